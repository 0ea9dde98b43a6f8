"""Commands that messages and pages recommend: each is one that the program takes, and those that can run here do.

In messages, a command is complete and in backticks. URI, OUT and DIR are placeholders.
"""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from packaging.requirements import Requirement
from support.datasets import build
from support.servers import Server
from test_docs import BLOCK, DOCUMENTS, code
from test_install import write_wheel

from dali_stream import Loader
from dali_stream.cli import app, main
from dali_stream.system.install import install_command

ROOT = Path(__file__).parents[2]
EXTRAS = ("cuda12", "cuda13", "s3", "train")
GROUP: Any = typer.main.get_command(app)
FILES = [path for folder in ("dali_stream", "pipelines", "benchmarks") for path in sorted((ROOT / folder).rglob("*.py"))]
SOURCES = [path for path in FILES if "dali-stream" in path.read_text()]
# Values for the placeholders of messages, by the option or the name before them.
VALUES = {
    "--codec": "h264",
    "--drop-n-last-frames": "1",
    "preview": "URI",
    "list": "DIR",
    "remove": "DIR",
    "{}": "NAME",
    "install": "'botocore'",
}


def messages(path: Path) -> Iterator[str]:
    """The strings of a module without docstrings. `{}` is a placeholder for a value."""
    tree = ast.parse(path.read_text())
    skipped: set[ast.AST] = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            skipped.update(node.values)
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in skipped:
            yield node.value


def help_texts() -> Iterator[str]:
    """The help texts of the program, its commands and their options."""
    yield GROUP.help
    for command in GROUP.commands.values():
        yield command.help
        yield from (getattr(parameter, "help", None) or "" for parameter in command.params)


def of_messages() -> list[str]:
    """The commands in messages and in help texts."""
    texts = [text for path in SOURCES for text in messages(path)]
    texts += help_texts()
    return sorted({filled(span) for text in texts for span in re.findall(r"`(dali-stream [^`]+)`", text)})


def filled(command: str) -> str:
    words = command.replace("{}x{}", "48x64").split()
    return " ".join(VALUES[before] if word == "{}" else word for before, word in zip(["", *words], words, strict=False))


def of_pages() -> list[str]:
    """The commands of all pages: lines of shell blocks, and spans in the text that are more than the name of a command."""
    lines = [line for _, text in code("sh") for line in text.replace("\\\n", " ").splitlines()]
    spans = [" ".join(span.split()) for path in DOCUMENTS for span in re.findall(r"`([^`]+)`", BLOCK.sub("", path.read_text()))]
    commands = [line for line in lines if line.startswith("dali-stream ")]
    commands += [span for span in spans if re.match(r"dali-stream \S+ \S", span) and "COMMAND" not in span]
    return sorted({" ".join(shlex.split(command, comments=True)) for command in commands})


ALL = sorted({*of_messages(), *of_pages()})


@pytest.mark.slow
def test_there_are_such_commands() -> None:
    assert len(of_messages()) > 8
    assert len(of_pages()) > 30


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_commands_in_messages_are_in_backticks(path: Path) -> None:
    for text in messages(path):
        rest = re.sub(r"`[^`]*`", "", text)
        named = re.findall(rf"dali-stream (?:{'|'.join(GROUP.commands)})(?![\w<]).*", rest)
        assert not named, text


@pytest.mark.parametrize("command", ALL)
def test_the_program_takes_each_command(command: str) -> None:
    """With all that is required, and with values that its options take."""
    _, name, *words = shlex.split(command)
    taken = GROUP.commands[name]
    if hasattr(taken, "commands"):
        name, *words = words
        taken = taken.commands[name]
    if "--help" not in words:
        taken.make_context(name, words)


# The first needs a GPU, and the second takes minutes; test_selftest.py runs parts of it.
NOT_HERE = ("dali-stream selftest", "dali-stream selftest --device cpu")


CHOICES = ("--clock", "--codec", "--decode", "--for", "--mode", "--normalize")  # their values are words that choose a behaviour


def uses(command: str) -> set[tuple[str, ...]]:
    """The options of a command, with the value if it is a choice, and the places that it reads or writes."""
    _, name, *words = shlex.split(command)
    if hasattr(GROUP.commands[name], "commands"):
        name, words = f"{name} {words[0]}", words[1:]
    found: set[tuple[str, ...]] = {(name,)}
    for before, word in zip(["", *words], words, strict=False):
        if word.startswith("--"):
            found.add((name, word))
        elif before in CHOICES or not before.startswith("--"):
            found.add((name, before if before in CHOICES else "", word))
    return found


def runnable() -> list[str]:
    """Commands that together have every option, choice and place. Others combine them in another way, or give other numbers."""
    absent = "lerobot-train", "--executor", "hf://buckets/owner/robot"  # they need LeRobot, a cluster, and a bucket of the Hub
    here = (command for command in ALL if command not in NOT_HERE and not any(word in command.split() for word in absent))
    commands, seen, chosen = {command.replace("path/to/dataset", "URI") for command in here}, set[tuple[str, ...]](), []
    for command in sorted(commands, key=lambda each: (-len(uses(each)), each)):
        if not uses(command) <= seen:
            seen |= uses(command)
            chosen.append(command)
    return sorted(chosen)


@pytest.fixture
def places(
    written: Callable[..., Path], plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[dict[str, str]]:
    """Values of the placeholders. A bucket is a server on loopback."""
    small = written(episodes=2, size=(120, 128), fps=10)  # few frames, since many of the commands encode all of them
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT / "pipelines"))
    (tmp_path / "mixture.yaml").write_text(f"datasets:\n  one: {{uri: {small}}}\n  two: {{uri: {small}}}\n")
    old = build(tmp_path / "v2.1", [3, 4], {}, version="v2.1")
    with Server(small) as server:
        yield {
            "path/to/v2.1/dataset": str(old),
            "URI": str(small),
            "OTHER_URI": str(plain),
            "s3://bucket/dataset": server.url,
            "OUT": "out",
            "s3://robots/raw": server.url,
            "s3://robots/prepared": "out",
            "s3://bucket/prepared": "out",
            "DIR": "cache",
            "FILE": "stats.json",
            "KEY": "action",
            "NAME": "",  # see `fill`
            "h264{}": "h264",
            "0-19": "0-1",
        }


def write_run(dataset: Path, folder: Path) -> dict[str, str]:
    """Save the checkpoint of a run. Return values for its batches."""
    with Loader(dataset, batch_size=4, device="cpu") as loader:
        next(iter(loader))
        torch.save({"model": {}, "loader": loader.state_dict()}, folder / "checkpoint.pt")
    return {"199": "1", "32": "4"}


def fill(dataset: str, folder: str) -> str:
    """Fill a frame cache. Return the name of its frames."""
    with Loader(dataset, batch_size=4, device="cpu", image_size=(48, 64), frame_cache=folder) as loader:
        next(iter(loader))
    [frames] = [path.name for path in Path(folder).iterdir()]
    return frames


@pytest.mark.slow
@pytest.mark.usefixtures("doctor_here")
@pytest.mark.parametrize("command", runnable())
def test_each_command_runs(command: str, places: dict[str, str], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    if " demo " in command:
        places["URI"] = "new"  # the command writes it
    if " bench OUT" in command:
        places["OUT"] = places["URI"]  # any dataset will do
    if " frames list " in command or " frames remove " in command:
        places["NAME"] = fill(places["URI"], places["DIR"])
    if " --index " in command:
        places["URI"] = places["s3://bucket/dataset"]
    if "--state" in command:
        places |= write_run(Path(places["URI"]), tmp_path)
    if "--status" in command:
        assert main(["prepare", places["URI"], "out", "--jobs", "1"]) == 0
    words = [places.get(word, word) for word in shlex.split(command)[1:]]
    if words[0] == "demo":  # less than the default
        for option, value in (("--episodes", "2"), ("--size", "120x128")):
            words += [] if option in words else [option, value]
    if words[0] == "prepare" and not {"--jobs", "--executor", "--status"} & {*words}:
        words += ["--jobs", "1"]  # the import of torch takes longer than the work of a second process saves
    assert main(words) == 0, capsys.readouterr().err


# ---- pip


@pytest.mark.parametrize("extra", EXTRAS)
def test_install_commands_name_the_requirements_of_the_extra(extra: str) -> None:
    [wanted] = re.findall(rf"^{extra} = (\[.*\])$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    pip, install, *words = shlex.split(install_command(extra))
    assert (pip, install) == ("pip", "install")
    assert {Requirement(word) for word in words} == {Requirement(text) for text in ast.literal_eval(wanted)}


def test_install_commands_work_without_an_index_that_has_this_package(tmp_path: Path) -> None:
    """Here pip finds the requirements alone, as wheels of empty packages."""
    write_wheel(tmp_path, "botocore", "1.40.0", "empty_botocore")
    words = shlex.split(install_command("s3"))[1:]
    alone = ["--dry-run", "--ignore-installed", "--no-deps", "--no-index", "--find-links", str(tmp_path)]
    done = subprocess.run([sys.executable, "-m", "pip", *words, *alone], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Would install botocore-1.40.0" in done.stdout


def test_no_text_installs_the_package_from_the_index() -> None:
    """The index does not have it. Once it does, `install_command` and this test change together."""
    for path in [*SOURCES, *DOCUMENTS]:
        assert not re.search(r"pip install\b[^\n`]*dali-stream", path.read_text()), path
