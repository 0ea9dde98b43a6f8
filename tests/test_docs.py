"""What the documents name is there: tests, files, commands, options, arguments. The README's code runs, all other compiles."""

from __future__ import annotations

import ast
import functools
import importlib
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from PIL import Image

import dali_stream
from dali_stream.cli import app, main

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
MOST_WORDS = 700  # code and links counted
DOCUMENTS = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
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
def arguments(path: str, name: str) -> set[str]:
    """The arguments that a class is made with."""
    [found] = (n for n in ast.parse((ROOT / path).read_text()).body if isinstance(n, ast.ClassDef) and n.name == name)
    [init] = (n for n in found.body if isinstance(n, ast.FunctionDef) and n.name == "__init__")
    return {argument.arg for argument in (*init.args.args, *init.args.kwonlyargs)} - {"self"}


def classes() -> dict[str, set[str]]:
    return {
        "Dataset": arguments("dali_stream/lerobot/dataset.py", "Dataset"),
        "Loader": arguments("dali_stream/loader.py", "Loader"),
    }


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
    assert [(where, m[0]) for where, m in named if not any((at / m[0]).exists() for at in (ROOT, ROOT / "dali_stream"))] == []


def test_commands_and_their_options_exist() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]  # a group's
    named = in_code(r"dali-stream +([a-z]+)([^\n#]*)")
    assert {m[1] for _, m in named} >= {"info", "preview", "demo", "index", "reshard"}
    assert [(where, m[0]) for where, m in named if m[1] not in commands] == []
    for where, m in named:
        options = {option for parameter in commands[m[1]].params for option in parameter.opts}
        assert set(re.findall(r"(?<!\S)--?[a-z][\w-]*", m[2])) <= options, (where, m[0])


def test_arguments_of_dataset_and_loader_exist() -> None:
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


def test_python_code_compiles() -> None:
    blocks = list(code("python"))
    assert blocks
    for where, text in blocks:
        compile(text, where, "exec")


def test_targets_of_make_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = in_code(r"(?:^|\n)make ([a-z-]+(?: (?!-)[a-z-]+)*)")
    assert len(named) > 10
    assert [(where, m[0]) for where, m in named if not set(m[1].split()) <= targets] == []


# ----------------------------------------------------------------------- the README


def test_the_readme_is_short() -> None:
    assert len(README.read_text().split()) <= MOST_WORDS


class Stopped(Exception):
    """Stands for a program that is stopped."""


def quickstart(root: Path) -> str:
    """The code of the README, on a dataset."""
    [(_, text)] = code("python", [README])
    assert len([line for line in text.splitlines() if line]) <= 12
    assert text.count("path/to/dataset") == 1
    return text.replace("path/to/dataset", str(root))


def stop_after(batches: int) -> tuple[Any, list[dict[str, Any]]]:
    """`train` of a program that is stopped when it has trained so often, and what it is called with."""
    seen: list[dict[str, Any]] = []

    def train(batch: dict[str, Any]) -> None:
        if len(seen) == batches:
            raise Stopped
        seen.append(batch)

    return train, seen


def test_the_quickstart_runs(demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    train, seen = stop_after(1)
    with pytest.raises(Stopped):
        exec(quickstart(demo), {"train": train})
    shapes = {key: tuple(seen[0][key].shape) for key in ("observation.images.top", "action", "action_is_pad")}
    assert shapes == {"observation.images.top": (64, 3, 224, 224), "action": (64, 16, 4), "action_is_pad": (64, 16)}


def test_the_quickstart_continues_when_it_is_started_again(demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of an epoch, and at its end. The samples alone, without video."""
    dataset = dali_stream.Dataset
    monkeypatch.setattr(dali_stream, "Dataset", lambda uri: dataset(uri, cameras=[]))
    monkeypatch.chdir(tmp_path)

    def samples(batches: int) -> list[list[int]]:
        train, seen = stop_after(batches)
        try:
            exec(quickstart(demo), {"train": train})
        except Stopped:
            assert len(seen) == batches
        return [batch["index"].tolist() for batch in seen]

    whole = samples(1000)
    (tmp_path / "loader.json").unlink()
    epoch = dataset(demo).num_frames // 64
    assert len(whole) == 10 * epoch
    assert samples(3) + samples(epoch - 3) + samples(epoch + 1) + samples(1000) == whole
    assert samples(1000) == []  # ten epochs are over


def test_the_commands_of_the_readme_run(
    demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    extras = re.findall(
        r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text().partition("optional-dependencies]")[2], re.MULTILINE
    )
    monkeypatch.chdir(tmp_path)
    ran = 0
    for line in "".join(text for _, text in code("sh", [README])).splitlines():
        words = shlex.split(line.replace("path/to/dataset", shlex.quote(str(demo))), comments=True)
        if words[0] == "pip":  # not from here: that there is such an extra has to do
            assert words[:3] == ["pip", "install", "-c"]
            assert (ROOT / words[3]).is_file()
            assert re.fullmatch(r"\.\[(\w+)\]", words[-1])[1] in extras  # type: ignore[index]
        elif words[0] == "dali-stream":
            assert main(words[1:]) == 0, capsys.readouterr().err
            ran += 1
        else:
            assert words[:2] == ["apt-get", "install"]
    assert ran >= 2
    assert Image.open("sheet.png").size[0] > 300


def test_pictures_of_the_readme_show_on_github() -> None:
    """Files of the repository, by relative paths, with a text for those who cannot see them, and small."""
    pictures = re.findall(r"!\[([^\]]*)\]\(([^)\s]+)\)", README.read_text())
    assert sorted(target for _, target in pictures) == ["docs/figures/demo.png", "docs/figures/peers.svg"]
    assert all(len(text) > 20 for text, _ in pictures)
    assert all((ROOT / target).stat().st_size < 300_000 for _, target in pictures)
    with Image.open(ROOT / "docs/figures/demo.png") as image:
        image.verify()


def test_the_chart_is_that_of_the_committed_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    """After new reports: `make figures`."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    chart = importlib.import_module("peers_chart")
    reports = [ROOT / name for name in re.findall(r"benchmarks/results/peers\w+\.json", (ROOT / "Makefile").read_text())]
    assert reports
    assert (ROOT / "docs/figures/peers.svg").read_text() == chart.chart([chart.read(path) for path in reports])
