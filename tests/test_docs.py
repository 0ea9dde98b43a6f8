"""What the documents name is there: tests, files, commands, options, arguments; and their code compiles."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import typer

from dali_stream.cli import app

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def everywhere(pattern: str) -> list[tuple[str, re.Match[str]]]:
    """(document, match) in the text of all documents."""
    return [(path.name, match) for path in DOCUMENTS for match in re.finditer(pattern, path.read_text())]


def code(language: str | None = None) -> Iterator[tuple[str, str]]:
    """(document, code) of blocks, of one language or, with the spans in the text, of all."""
    for path in DOCUMENTS:
        text = path.read_text()
        yield from ((path.name, block[2]) for block in BLOCK.finditer(text) if language in (None, block[1]))
        if language is None:  # a span may go on in the next line
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
    return {"Dataset": arguments("dali_stream/dataset.py", "Dataset"), "Loader": arguments("dali_stream/loader.py", "Loader")}


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
