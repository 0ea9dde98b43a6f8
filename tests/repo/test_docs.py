"""The tests, files, commands, options and arguments that the documents name exist. Every Python block runs."""

from __future__ import annotations

import ast
import functools
import html
import importlib
import inspect
import itertools
import json
import logging
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import matplotlib
import pytest
import torch
import typer
import yaml
from matplotlib.font_manager import FontProperties
from matplotlib.text import Text
from matplotlib.textpath import TextPath
from matplotlib.transforms import Bbox
from nbclient import NotebookClient
from nbformat import v4
from PIL import Image
from py_mini_racer import MiniRacer
from support.servers import Server
from support.slow import slow

import dali_stream
from dali_stream.cli import app, main
from dali_stream.integrations.lerobot.arguments import ARGUMENTS

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = sorted((ROOT / "docs").rglob("*.md"))
DOCUMENTS = [README, ROOT / "CONTRIBUTING.md", *PAGES]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def everywhere(pattern: str) -> list[tuple[str, re.Match[str]]]:
    """(document, match) in the text of all documents."""
    return [(path.name, match) for path in DOCUMENTS for match in re.finditer(pattern, path.read_text())]


def code(language: str | None = None, documents: list[Path] = DOCUMENTS) -> Iterator[tuple[str, str]]:
    """(document, code) of blocks, of one language or, with the spans in the text, of all."""
    for path in documents:
        text = path.read_text()
        yield from ((path.name, block[2]) for block in BLOCK.finditer(text) if language in (None, block[1]))
        if language is None:  # a span may continue in the next line
            yield from ((path.name, " ".join(span.split())) for span in re.findall(r"`([^`]+)`", BLOCK.sub("", text)))


def in_code(pattern: str) -> list[tuple[str, re.Match[str]]]:
    """(document, match) in code."""
    return [(name, match) for name, text in code() for match in re.finditer(pattern, text)]


@functools.cache
def functions(path: str) -> set[str]:
    """The functions of a module, which is not imported."""
    file = ROOT / path
    tree = ast.parse(file.read_text()) if file.is_file() else ast.Module([], [])
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@functools.cache
def classes() -> dict[str, set[str]]:
    """The arguments that the public classes are made with."""
    names = ("Dataset", "Mixture", "Loader", "Transformed", "FrameSampler", "Order", "MixtureOrder", "Normalizer")
    return {name: set(inspect.signature(getattr(dali_stream, name)).parameters) for name in names}


def test_tests_that_are_named_exist() -> None:
    named = everywhere(r"([\w./-]+\.py)::(\w+)")
    assert len(named) > 50
    assert [(where, m[0]) for where, m in named if not m[1].startswith("tests/") or m[2] not in functions(m[1])] == []


def test_links_lead_to_files() -> None:
    links = [(path, target) for path in DOCUMENTS for target in re.findall(r"\]\(([^)#\s]+)", path.read_text())]
    inside = [(path, target) for path, target in links if "://" not in target]
    assert inside
    assert [(path.name, target) for path, target in inside if not (path.parent / target).exists()] == []


def test_files_that_are_named_exist() -> None:
    """Paths from the root on, or in the package."""
    folders = "|".join(path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith((".", "_")))
    named = in_code(rf"(?<![\w./-])(?:(?:{folders})/[\w./-]*|[\w./-]+\.(?:py|md|toml|txt|sh)\b)")
    assert len(named) > 20
    # A file that an example of a change makes: a diff that begins with a docstring.
    made = [m[1] for _, m in in_code(r"^\+\+\+ (\S+)\n\+\"\"\"")]
    assert len(made) == 1
    named = [(where, m) for where, m in named if m[0] not in made]
    assert [(where, m[0]) for where, m in named if not any((at / m[0]).exists() for at in (ROOT, ROOT / "dali_stream"))] == []


def test_programs_have_the_options_that_are_named() -> None:
    named = in_code(r"(?:^|\s)((?:pipelines|benchmarks)/\w+\.py)((?: (?!#)[^\s#]+|\s*\\\n)*)")
    assert len(named) > 10
    for where, m in named:
        source = (ROOT / m[1]).read_text()
        if "training_parser" in source:
            source += (ROOT / "pipelines/plain_loop.py").read_text()
        if "program.run(" in source or "on_gpu(" in source:
            source += (ROOT / "benchmarks/program.py").read_text()
        for option in re.findall(r"(?<!\S)--[a-z][\w-]*", m[2]):
            assert f'"{option}"' in source, (where, m[0])


def test_commands_and_their_options_exist() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]  # a group's
    named = in_code(r"dali-stream +([a-z-]+)([^\n#]*)")
    assert {m[1] for _, m in named} >= {"info", "preview", "demo", "prepare"}
    assert [(where, m[0]) for where, m in named if m[1] not in commands] == []
    for where, m in named:
        command, words = commands[m[1]], m[2].split()
        if hasattr(command, "commands"):  # a group of commands
            command = command.commands[words[0]]
        options = {option for parameter in command.params for option in parameter.opts}
        if m[1] == "lerobot-train":  # takes LeRobot's arguments, and names those of the Loader
            assert set(re.findall(r"--loader\.(\w+)", m[2])) <= set(ARGUMENTS), (where, m[0])
            continue
        assert set(re.findall(r"(?<!\S)--?[a-z][\w-]*", m[2])) <= options, (where, m[0])


def test_arguments_of_public_classes_exist() -> None:
    calls = 0
    for where, text in code("python"):
        for node in ast.walk(ast.parse(text)):
            name = ast.unparse(node.func).rpartition(".")[2] if isinstance(node, ast.Call) else ""
            if name in classes():
                calls += 1
                assert {keyword.arg for keyword in node.keywords} <= classes()[name], where  # type: ignore[attr-defined]
    assert calls > 2
    alone = in_code(r"^([a-z_]+)=")  # `shuffle=False` in the text
    assert alone
    assert [(where, m[0]) for where, m in alone if m[1] not in set().union(*classes().values())] == []


def with_python() -> list[Any]:
    """The pages with blocks of Python, except for the cells of a notebook. All but two are slow."""
    pages = [path for path in PAGES if path.name != "notebooks.md" and "```python" in path.read_text()]
    names = [str(path.relative_to(ROOT)) for path in pages]
    return [name if name in ("README.md", "docs/api/loader.md") else slow(name) for name in names]


@pytest.mark.parametrize("page", with_python())
def test_python_code_runs(
    page: str, demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The blocks of a page, one after the other in one namespace. The dataset is the demo, and so is the one in a bucket."""
    caplog.set_level(logging.NOTSET, "dali_stream")  # pytest restores the level after the test: a page sets it to INFO
    (tmp_path / "path/to").mkdir(parents=True)
    (tmp_path / "path/to/dataset").symlink_to(demo)
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": "page"}
    with Server(demo) as server:
        for _, text in code("python", [ROOT / page]):
            text = text.replace("s3://bucket/dataset", server.url).replace("start_http_server(9464)", "start_http_server(0)")
            exec(compile(text, page, "exec"), namespace)


@pytest.mark.slow
def test_the_cells_of_the_page_on_notebooks_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a Jupyter kernel, without the installation. Each cell that ends in a value displays a table, a picture or text."""
    blocks = [block for _, block in code(None, [ROOT / "docs/notebooks.md"]) if "\n" in block and "pip install" not in block]
    assert any(block.startswith("!") for block in blocks)
    blocks = [block.replace("demo --root demo", "demo --root demo --episodes 2 --size 120x160") for block in blocks]
    book = v4.new_notebook(cells=[v4.new_code_cell(block.strip()) for block in blocks])
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    NotebookClient(book, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = [set(output.data) for cell in book.cells for output in cell.outputs if output.output_type == "execute_result"]
    kinds = [data & {"text/html", "image/png"} for data in shown]
    assert kinds == [{"text/html"}, {"image/png"}, {"text/html"}, set()]
    assert not [output for cell in book.cells for output in cell.outputs if output.get("name") == "stderr"]


def test_a_page_begins_with_a_sentence() -> None:
    """After its title, and before headings, code, tables and pictures."""
    for page in (*PAGES, ROOT / "CONTRIBUTING.md"):
        if page.name != "contributing.md":  # it includes CONTRIBUTING.md
            after = re.search(r"^# [^\n]+\n\n(.*?)(?:\n\n|\Z)", page.read_text(), re.MULTILINE | re.DOTALL)
            assert after, page
            assert not after[1].startswith(("#", "```", "|", "![", "- ")), page
            assert re.search(r"[.:]\*{0,2}(?:\s|$)", after[1]), page


def test_every_public_name_has_a_page() -> None:
    """Each public name has an entry in the API reference, and each page of the reference has a complete example."""
    pages = {path: path.read_text() for path in PAGES if path.parent.name == "api"}
    assert all("```python" in text for text in pages.values())
    documented = {name for text in pages.values() for name in re.findall(r"^::: dali_stream\.([\w.]+)$", text, re.MULTILINE)}
    errors = {name for name in dali_stream.__all__ if name.endswith("Error")}
    modules = {f"{module}.{name}" for module in ("tools", "types") for name in getattr(dali_stream, module).__all__}
    assert documented | errors | {"tools", "types"} == {*dali_stream.__all__, "errors", *modules}


def test_the_site_has_every_page_once() -> None:
    def files(entry: Any) -> list[str]:
        if isinstance(entry, str):
            return [entry]
        return [file for part in (entry if isinstance(entry, list) else entry.values()) for file in files(part)]

    named = files(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    assert sorted(named) == sorted(str(path.relative_to(ROOT / "docs")) for path in PAGES)


def test_the_compatibility_page_has_the_versions_of_the_project() -> None:
    """Those of pyproject.toml, constraints.txt and the reports with LeRobot."""
    page = (ROOT / "docs/compatibility.md").read_text()
    rows = {cells[1].strip(): cells[2:4] for line in page.splitlines() if len(cells := line.split("|")) == 5}
    project, constraints = (ROOT / "pyproject.toml").read_text(), (ROOT / "constraints.txt").read_text()
    for name in ("torch", "torchcodec"):
        allowed, tested = rows[name]
        assert re.search(rf'"{name}>=([\d.]+)"', project)[1] in allowed  # type: ignore[index]
        assert re.search(rf"^{name}==([\d.]+)", constraints, re.MULTILINE)[1] in tested  # type: ignore[index]
    assert 'requires-python = ">=3.10,<3.14"' in project
    assert rows["Python"][0].strip() == "3.10 to 3.13"
    assert project.count(">=2.3,<2.5") == 2
    assert rows["DALI"][0].startswith(" 2.3 and 2.4")
    for name, version in re.findall(r"^(nvidia-dali-cuda\d+)==([\d.]+)", constraints, re.MULTILINE):
        assert f"`{name}` {version}" in rows["DALI"][1]
    for path in sorted((ROOT / "benchmarks/results").glob("lerobot_train_*.json")):
        report = json.loads(path.read_text())
        assert report["lerobot"]["lerobot"] in rows["LeRobot"][1]
        for name in ("torch", "torchcodec"):
            assert report["versions"][name].partition("+")[0] in rows[name][1]


# ----------------------------------------------------------------------- the built site


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site as `make docs` builds it. CI names the site that it has built."""
    if "SITE" in os.environ:
        return Path(os.environ["SITE"])
    folder = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})
    assert done.returncode == 0, done.stderr
    return folder


class Resources(HTMLParser):
    """Scripts, style sheets and pictures that a browser loads for a page."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.scripts: list[str] = []
        self.others: list[str] = []
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        source = values.get("href") if tag == "link" and values.get("rel") not in ("canonical", "prev", "next") else None
        source = values.get("src") or source
        if source and not source.startswith("data:"):
            (self.scripts if tag == "script" else self.others).append(source)


def pages_of(site: Path) -> list[Path]:
    """The pages that open from the disk: 404.html is for servers."""
    return [page for page in sorted(site.rglob("*.html")) if page.name != "404.html"]


@pytest.mark.slow
def test_pages_load_files_of_the_site_only(site: Path) -> None:
    assert len(pages_of(site)) == len(PAGES)
    for page in pages_of(site):
        resources = Resources(page)
        missing = [name for name in resources.scripts + resources.others if not (page.parent / name).is_file()]
        assert missing == [], page
    styles = "".join(path.read_text() for path in site.rglob("*.css"))
    assert re.findall(r"(?:@import|url\()\s*['\"]?(?:https?:)?//[^)]*", styles) == []


@pytest.mark.slow
def test_the_site_can_be_searched_from_the_disk(site: Path) -> None:
    """Browsers read no JSON and start no worker from file://. The index is a script, and a polyfill runs the worker."""
    name, _, index = (site / "search/search_index.js").read_text().partition(" = ")
    assert name == "var __index"
    assert "episode_pool_size" in json.dumps(json.loads(index)["docs"])
    for page in pages_of(site):
        workers = [page.parent / name for name in Resources(page).scripts if name.endswith("iframe-worker.js")]
        assert workers, page
        assert 'location.protocol==="file:"&&(window.Worker=' in workers[0].read_text(), page


# Names that a worker has in a browser. `answer` is its last message.
BROWSER = """
var self = globalThis, console = {warn() {}}, answer, handle;
function addEventListener(name, listener) { handle = listener; }
function postMessage(message) { answer = message; }
"""
SETUP, QUERY = 0, 2  # types of messages
FIRST = {  # {what a user types: section of the first hit}
    "Prometheus": "tracing.html#prometheus",
    "notebook": "notebooks.html",
    "Jupyter": "notebooks.html",
    "Colab": "notebooks.html",
    "offline": "remote.html#offline-machines",
    "NFS": "remote.html#nfs-and-other-network-file-systems",
    "proxy": "remote.html#proxies",
    "30 fps data at 10 fps": "answers.html#train-on-30-fps-data-at-10-fps-another-frame-rate",
    "frame rate": "answers.html#train-on-30-fps-data-at-10-fps-another-frame-rate",
    "pin_memory": "answers.html#does-it-need-pin_memory-non_blocking",
    "licence": "answers.html#under-which-licence-is-it-license-licenses",
    "license": "answers.html#under-which-licence-is-it-license-licenses",
}


@pytest.fixture(scope="module")
def first_hit(site: Path) -> Iterator[Callable[[str], str]]:
    """Return the address of the best section of the first page that the search finds."""
    [worker] = site.glob("assets/javascripts/workers/search.*.min.js")
    index = json.loads((site / "search/search_index.js").read_text().partition(" = ")[2])
    engine = MiniRacer()

    def ask(kind: int, data: object) -> Any:
        engine.eval(f"answer = null; handle({{data: {json.dumps({'type': kind, 'data': data})}}}); 0")
        return json.loads(str(engine.eval("JSON.stringify(answer)")))

    def first(query: str) -> str:
        pages = ask(QUERY, query)["data"]["items"]
        return str(max(pages[0], key=lambda section: section["score"])["location"]) if pages else ""

    try:
        engine.eval(BROWSER + worker.read_text())
        ask(SETUP, {**index, "options": {}})
        yield first
    finally:
        engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("query", FIRST)
def test_the_first_hit_answers(query: str, first_hit: Callable[[str], str]) -> None:
    assert first_hit(query) == FIRST[query]


@pytest.mark.slow
def test_a_word_that_no_page_has_finds_nothing(first_hit: Callable[[str], str]) -> None:
    assert first_hit("xylophone") == ""


GALLERY = {
    "window": "action (3, 20, 4)",
    "mixture": "first: 233 samples of 270 frames, 67% of the epoch",
    "resume": "the batches are those of an uninterrupted epoch: True",
    "remote": "second run: 349 frames, ",
    "augmentation": "same seed, same pixels: True same pixels with another seed: False",
    "graph": "decoder: dali",
}
"""A part of the output of each example of the gallery."""


@pytest.mark.slow
def test_the_gallery_shows_what_its_examples_print_and_draw(site: Path) -> None:
    page, text = site / "gallery.html", " ".join(text_of(site / "gallery.html").split())
    assert [path.removeprefix("gallery/") for path in Resources(page).others if path.startswith("gallery/")] == [
        f"{name}.png" for name in GALLERY
    ]
    for name, printed in GALLERY.items():
        assert printed in text, name
        assert " ".join((ROOT / f"docs/gallery/{name}.py").read_text().split()) in text, name
        with Image.open(site / f"gallery/{name}.png") as picture:
            assert len(picture.convert("RGB").getcolors(1 << 24)) > 20, name  # more than an empty plot


def test_an_example_that_fails_is_an_error(demo: Path, tmp_path: Path) -> None:
    (tmp_path / "demo").symlink_to(demo)
    (tmp_path / "broken.py").write_text("import dali_stream\n\ndali_stream.Dataset('nowhere')\n")
    command = [sys.executable, str(ROOT / "docs/gallery/run.py"), "broken.py"]
    done = subprocess.run(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 1
    assert 'File "broken.py", line 3' in done.stderr


def text_of(page: Path) -> str:
    return html.unescape(re.sub(r"<[^>]+>", "", page.read_text()))


@pytest.mark.slow
def test_signatures_have_a_line_for_each_argument(site: Path) -> None:
    signature = re.search(r"^Loader\(\n(.*?)^\)", text_of(site / "api/loader.html"), re.MULTILINE | re.DOTALL)
    assert signature
    names = re.findall(r"^    (\w+):", signature[1], re.MULTILINE)
    assert names == list(inspect.signature(dali_stream.Loader).parameters)


@pytest.mark.slow
def test_types_of_signatures_are_documented(site: Path) -> None:
    """A name in a signature links to its entry; without one it is a span."""
    text = "".join(page.read_text() for page in site.glob("api/*.html"))
    for name in ("Route", "Graph", "Modes"):
        assert re.search(rf'<a [^>]*href="[^"]*#dali_stream[\w.]*\.{name}"[^>]*>{name}</a>', text), name
    assert set(re.findall(r'<span title="dali_stream[\w.]*\.([A-Z]\w*)">', text)) <= {"Self"}


def test_code_fits_the_page() -> None:
    """In a window of 1400 pixels, and that of the quickstart in a narrower one."""
    widest = {"README.md": 100, "index.md": 100}
    long = [(name, line) for name, text in code() for line in text.splitlines() if len(line) > widest.get(name, 128)]
    assert long == []


def test_folders_import_what_the_table_allows() -> None:
    """The table of CONTRIBUTING.md: a folder imports those above it, and all import the errors and the first three folders."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    rows = re.findall(r"^\| (`\w+/`|top level) \| ([^|]*)\| ([^|]*)\|", text, re.MULTILINE)
    everywhere = {"errors.py", "checks", "system", "observe"}
    package = ROOT / "dali_stream"
    named = {name.strip("`/") for name, _, _ in rows} - {"top level"}
    assert named == {path.parent.name for path in package.glob("*/__init__.py")}
    assert all((package / name).exists() for name in everywhere)
    above = set[str]()
    for name, contents, allowed in rows:
        own = set(re.findall(r"`(\w+\.py)`", contents)) if name == "top level" else {name.strip("`/")}
        if name == "top level":
            assert own == {path.name for path in package.glob("*.py")} - {"__init__.py", "__main__.py"}
        listed = set(re.findall(r"`(\w+)`", allowed))
        assert listed <= above
        shared = {"errors.py"} if own <= everywhere else everywhere
        wrong = imports_of(own) - (above if "all above" in allowed else listed) - shared - own
        # Programs on top also use the package as a user does, by its public names.
        wrong -= {"", *(f"{public}.py" for public in dali_stream.__all__)} if "all above" in allowed else set()
        assert not wrong, f"{name} imports {wrong}"
        above |= own


def imports_of(names: set[str]) -> set[str]:
    """Folders and top-level files of the package that some of its folders and files import."""
    package, found = ROOT / "dali_stream", set()
    for path in [path for name in names for path in ((package / name).rglob("*.py") if "." not in name else [package / name])]:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if names == ["dali_stream"] and isinstance(node, ast.ImportFrom):
                names = [f"dali_stream.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            for name in names:
                top, _, rest = name.partition(".")
                if top == "dali_stream":
                    part = rest.partition(".")[0]
                    found.add(part if (package / part).is_dir() else f"{part}.py")
    return found


def test_targets_of_make_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = in_code(r"(?:^|\n)make ([a-z-]+(?: (?!-)[a-z-]+)*)")
    assert len(named) > 10
    assert [(where, m[0]) for where, m in named if not set(m[1].split()) <= targets] == []


# ----------------------------------------------------------------------- the README


class Stopped(Exception):
    """Stands for a program that is stopped."""


class Model(torch.nn.Module):
    """Counts the steps that it is trained for. Its weight depends on all samples so far and on their order."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))
        self.weight = torch.nn.Parameter(torch.ones((), dtype=torch.float64))


def quickstart(root: Path) -> str:
    """The code of the README, on a dataset."""
    [(_, text)] = code("python", [README])
    assert len([line for line in text.splitlines() if line]) <= 12
    assert text.count("path/to/dataset") == 1
    return text.replace("path/to/dataset", str(root))


def untrained() -> dict[str, Any]:
    """A model and its optimizer, which has a state of its own, as every run makes them."""
    model = Model()
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)}


def stop_after(batches: int) -> tuple[Any, list[dict[str, Any]]]:
    """`train` of a program that is stopped when it has trained so often, and what it is called with."""
    seen: list[dict[str, Any]] = []

    def train(model: Any, optimizer: Any, batch: dict[str, Any]) -> None:
        model.steps += 1
        optimizer.zero_grad()
        (model.weight * batch["index"].double().mean() / 1000).backward()
        optimizer.step()
        if len(seen) == batches:
            raise Stopped
        seen.append(batch)

    return train, seen


def test_the_quickstart_runs(demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    train, seen = stop_after(1)
    with pytest.raises(Stopped):
        exec(quickstart(demo), {"train": train, **untrained()})
    shapes = {key: tuple(seen[0][key].shape) for key in ("observation.images.top", "action", "action_is_pad")}
    assert shapes == {"observation.images.top": (64, 3, 224, 224), "action": (64, 16, 4), "action_is_pad": (64, 16)}


def test_the_quickstart_continues_when_it_is_started_again(demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of an epoch, and at its end, with model and optimizer of the same step. Without video."""
    dataset = dali_stream.Dataset
    monkeypatch.setattr(dali_stream, "Dataset", lambda uri: dataset(uri, cameras=[]))
    monkeypatch.chdir(tmp_path)

    trained: list[tuple[int, float, float]] = []

    def samples(batches: int) -> list[list[int]]:
        (train, seen), parts = stop_after(batches), untrained()
        try:
            exec(quickstart(demo), {"train": train, **parts})
        except Stopped:
            assert len(seen) == batches
        [momentum] = parts["optimizer"].state_dict()["state"].values()
        trained.append((int(parts["model"].steps), parts["model"].weight.item(), momentum["momentum_buffer"].item()))
        return [batch["index"].tolist() for batch in seen]

    whole = samples(1000)
    (tmp_path / "checkpoint.pt").unlink()
    epoch = dataset(demo).num_frames // 64
    assert len(whole) == 10 * epoch
    assert samples(3) + samples(epoch - 3) + samples(epoch + 1) + samples(1000) == whole
    assert samples(1000) == []  # ten epochs are over
    assert trained[-1] == trained[0]


def test_the_commands_of_the_readme_run(
    demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    extras = re.findall(
        r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text().partition("optional-dependencies]")[2], re.MULTILINE
    )
    monkeypatch.chdir(tmp_path)
    first, *_ = (text for _, text in code("sh", [README]))
    assert [line.split()[:2] for line in first.splitlines()] == [["make", "demo"], ["make", "test"]]  # in test_install.py
    ran = 0
    for line in "".join(text for _, text in code("sh", [README])).splitlines():
        words = shlex.split(line.replace("path/to/dataset", shlex.quote(str(demo))), comments=True)
        if words[0] == "pip":  # not installed here, only the existence of the extra is checked
            assert words[:3] == ["pip", "install", "-c"]
            assert (ROOT / words[3]).is_file()
            assert set(re.fullmatch(r"\.\[([\w,]+)\]", words[-1])[1].split(",")) <= set(extras)  # type: ignore[index]
        elif words[0] == "dali-stream":
            assert main(words[1:]) == 0, capsys.readouterr().err
            ran += 1
        elif words[0] == "make":
            assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
        elif words[0] != "python":  # for programs see test_programs_have_the_options_that_are_named
            assert words[:2] == ["apt-get", "install"]
    assert ran >= 2
    assert Image.open("sheet.png").size[0] > 300


def test_pictures_of_the_readme_show_on_github() -> None:
    """Files of the repository, by relative paths, with a text for those who cannot see them, and small."""
    pictures = re.findall(r"!\[([^\]]*)\]\(([^)\s]+)\)", README.read_text())
    names = ["docs/figures/demo.png", "docs/figures/path.svg", "docs/figures/peers.svg"]
    assert sorted(target for _, target in pictures) == names
    assert all(len(text) > 20 for text, _ in pictures)
    assert all((ROOT / target).stat().st_size < 300_000 for _, target in pictures)
    with Image.open(ROOT / "docs/figures/demo.png") as image:
        image.verify()


@pytest.fixture
def chart(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Values that peers_chart.py draws from the committed reports. After a change: `make figures`."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    reports = [ROOT / name for name in re.findall(r"benchmarks/results/\w+\.json", (ROOT / "Makefile").read_text())]
    *peers, on_disk = (json.loads(path.read_text()) for path in reports)
    return importlib.import_module("peers_chart").chart(peers, on_disk)


def shown(chart: Any) -> list[tuple[str, Any]]:
    """All text that the chart shows, with its extent in pixels. The ticks of hidden axes and beyond the limits are none."""
    hidden = set()
    for axis in (axis for axes in chart.figure.axes for axis in (axes.xaxis, axes.yaxis)):
        low, high = sorted(axis.get_view_interval())
        for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks()):
            if not (axis.get_visible() and axis.axes.axison and low <= tick.get_loc() <= high):
                hidden |= {id(tick.label1), id(tick.label2)}
    texts = [text for text in chart.figure.findobj(Text) if text.get_visible() and id(text) not in hidden]
    return [(text.get_text(), text.get_window_extent()) for text in texts if text.get_text().strip()]


def check_no_text_is_cut_or_covered(texts: list[tuple[str, Any]], whole: Any) -> None:
    assert len(texts) > 8
    for text, extent in texts:
        assert whole.x0 <= extent.x0 < extent.x1 <= whole.x1, text
        assert whole.y0 <= extent.y0 < extent.y1 <= whole.y1, text
    for (one, first), (other, second) in itertools.combinations(texts, 2):
        assert not first.overlaps(second), (one, other)


def test_the_chart_is_that_of_the_committed_reports(chart: Any) -> None:
    committed = (ROOT / "docs/figures/peers.svg").read_text()
    assert f"<desc>{html.escape(' '.join([chart.text, *chart.notes]))}</desc>" in committed
    if f"matplotlib=={matplotlib.__version__};" in (ROOT / "constraints.txt").read_text():  # another version draws other lines
        assert chart.svg == committed


def test_no_text_of_the_chart_is_cut_or_covered_by_another(chart: Any) -> None:
    check_no_text_is_cut_or_covered(shown(chart), chart.figure.bbox)


def test_the_chart_has_its_panels_and_numbers_as_text(chart: Any) -> None:
    """In the file, and in the pages that show it."""
    assert [text for text, _ in shown(chart) if text not in " ".join([chart.text, *chart.notes])] == []
    pages = [page for page in (README, *(ROOT / "docs").glob("*.md")) if "peers.svg)" in page.read_text()]
    assert pages
    for page in pages:
        [text] = re.findall(r"!\[([^\]]*)\]\([\w/]*peers.svg\)", page.read_text())
        assert " ".join(text.split()) == chart.text, f"{page}: write the text into its ![](peers.svg)"


def test_the_path_of_a_frame_fits_its_boxes_and_is_described() -> None:
    """With the widths of DejaVu Sans, the first font that the file names and among the widest of those that a browser has."""
    svg = "{http://www.w3.org/2000/svg}"
    root = ElementTree.parse(ROOT / "docs/figures/path.svg").getroot()
    assert root.get("font-family", "").startswith("DejaVu Sans")
    described, places = " ".join(root.findtext(f"{svg}desc", "").split()), []
    boxes = [
        Bbox.from_bounds(*(float(box.get(key, 0)) for key in ("x", "y", "width", "height"))) for box in root.iter(f"{svg}rect")
    ]
    for text in root.iter(f"{svg}text"):
        named = text.get("class") == "name"
        size, weight = (14, "bold") if named else (float(root.get("font-size", 0)), "normal")
        font = FontProperties(family="DejaVu Sans", weight=weight, size=size)
        width = TextPath((0, 0), text.text, prop=font).get_extents().width
        left = float(text.get("x", 0)) - (0 if text.get("text-anchor") == "start" else width / 2)
        places.append((text.text, Bbox.from_bounds(left, float(text.get("y", 0)) - size, width, size)))
        assert text.text in described
        box = min((box for box in boxes if box.contains(left + width / 2, float(text.get("y", 0)))), key=lambda box: box.width)
        assert box.x0 + 4 < left < left + width < box.x1 - 4, text.text
    check_no_text_is_cut_or_covered(places, boxes[0])


def test_the_chart_says_when_its_second_epoch_holds() -> None:
    """In the chart itself, and below it in the README and on the home page."""
    for page in (README, ROOT / "docs/index.md"):
        below = page.read_text().partition("figures/peers.svg)")[2].split("\n\n")[1]
        assert "all frames of this recording fit in `memory_budget`" in " ".join(below.split()), page
        assert "A larger dataset runs every epoch at the first epoch's rate" in " ".join(below.split()), page
    assert "fit in memory_budget. A larger dataset" in (ROOT / "docs/figures/peers.svg").read_text()
