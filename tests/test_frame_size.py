"""`--image-size 96 128` and `--image-size 96x128` are the same, in every program and at every place of its command line."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from support.programs import failed, pictures
from support.slow import slow

from dali_stream.checks.frame_size import join_sizes
from dali_stream.cli import main

ROOT = Path(__file__).parents[1]
FORMS = [("96x128",), ("96", "128")]
BOTH = "must be HEIGHTxWIDTH or HEIGHT WIDTH"
# Programs of argparse with the option. Most of pipelines/ have it from plain_loop.py.
PROGRAMS = [
    path.relative_to(ROOT)
    for path in sorted([*ROOT.glob("benchmarks/*.py"), *ROOT.glob("pipelines/*.py")])
    if '"--image-size"' in (text := path.read_text()) or "training_parser" in text
]
FRAMEWORKS = {"lightning_module": "lightning", "ray_train": "ray"}


def orders(position: str, size: tuple[str, ...], *others: object) -> list[str]:
    """A command line with the size at its beginning or at its end."""
    option = ["--image-size", *size]
    words = [*option, *others] if position == "first" else [*others, *option]
    return list(map(str, words))


# ----------------------------------------------------------------------- dali-stream


@pytest.mark.slow
@pytest.mark.parametrize("position", ["first", "last"])
@pytest.mark.parametrize("size", FORMS)
def test_bench(demo: Path, capsys: pytest.CaptureFixture[str], size: tuple[str, ...], position: str) -> None:
    options = ("--num-batches", 1, "--warmup", 1, "--batch-size", 4, "--json")
    assert main(["bench", *orders(position, size, demo, *options)]) == 0
    assert json.loads(capsys.readouterr().out)["image_size"] == [96, 128]


@pytest.mark.parametrize("position", ["first", "last"])
@pytest.mark.parametrize("size", FORMS)
def test_preview(demo: Path, tmp_path: Path, size: tuple[str, ...], position: str) -> None:
    assert main(["preview", *orders(position, size, demo, "--batch-size", 1, "--out", tmp_path / "a.png")]) == 0
    assert {pixels.shape for _, pixels in pictures(tmp_path / "a.png")} == {(96, 128, 3)}


@pytest.mark.slow
def test_size_of_the_demo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--size", "120", "128", "--root", str(tmp_path / "demo"), "--episodes", "1", "--codec", "h264"]) == 0
    info = json.loads((tmp_path / "demo/meta/info.json").read_text())
    assert info["features"]["observation.images.top"]["shape"] == [120, 128, 3]


@pytest.mark.parametrize("command", ["bench", "preview"])
@pytest.mark.parametrize("size", [["96"], ["96", "wide"], ["96x"], ["0x96"], ["-1", "96"], ["0", "96"], ["96x128x3"]])
def test_a_wrong_size_is_an_error_that_names_both_forms(
    demo: Path, capsys: pytest.CaptureFixture[str], command: str, size: list[str]
) -> None:
    assert f"--image-size {BOTH}" in failed(capsys, [command, demo, "--image-size", *size], 2)


# ----------------------------------------------------------------------- programs of argparse


class Parsed(Exception):
    """Ends a program that has read its command line."""


def parsed(program: Path, words: list[str], monkeypatch: pytest.MonkeyPatch) -> argparse.Namespace:
    """Return the arguments that a program reads from its command line."""
    parse = argparse.ArgumentParser.parse_args

    def stop(self: argparse.ArgumentParser, *arguments: Any) -> None:
        raise Parsed(parse(self, *arguments))

    monkeypatch.syspath_prepend(str((ROOT / program).parent))
    monkeypatch.setattr(sys, "argv", [str(program), *words])
    if framework := FRAMEWORKS.get(program.stem):
        pytest.importorskip(framework)
    module = importlib.import_module(program.stem)
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop)
    with pytest.raises(Parsed) as ended:
        module.main()
    return ended.value.args[0]


def needed(program: Path) -> list[str]:
    """Arguments that a program does not run without, or ends with."""
    with_out = ("train.py", "plain_loop.py", "lightning_module.py", "ray_train.py")
    return ["URI", "--out", "run"] if program.name in with_out else ["URI"]


def test_all_programs_are_found() -> None:
    assert {path.name for path in PROGRAMS} >= {"peers.py", "decode_floor.py", "plain_loop.py", "train.py"}


@pytest.mark.parametrize(
    "program", [slow(path) if "lightning" in path.name else path for path in PROGRAMS], ids=lambda path: path.stem
)
def test_programs(program: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for position in ("first", "last"):
        for size in FORMS:
            arguments = parsed(program, orders(position, size, *needed(program)), monkeypatch)
            assert list(arguments.image_size) == [96, 128]
            given = [value[0] if isinstance(value, list) and value else value for value in vars(arguments).values()]
            assert "URI" in map(str, given)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
@pytest.mark.parametrize("size", [["96"], ["96", "wide"], ["0", "96"]])
def test_programs_name_both_forms(
    program: Path, size: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        parsed(program, [*needed(program), "--image-size", *size], monkeypatch)
    assert ended.value.code == 2
    assert f"argument --image-size: {BOTH}" in capsys.readouterr().err


# ----------------------------------------------------------------------- joining


@pytest.mark.parametrize(
    ("words", "joined"),
    [
        (["URI", "--image-size", "1", "2"], ["URI", "--image-size", "1x2"]),
        (["--image-size", "1", "2", "3"], ["--image-size", "1x2", "3"]),
        (["--image-size", "1x2", "3"], ["--image-size", "1x2", "3"]),
        (["--image-size", "1", "URI"], ["--image-size", "1", "URI"]),
        (["--image-size", "1"], ["--image-size", "1"]),
        (["--image-size", "1", "--image-size", "2", "3"], ["--image-size", "1", "--image-size", "2x3"]),
        (["--other", "1", "2"], ["--other", "1", "2"]),
        (["URI", "--image-size"], ["URI", "--image-size"]),
        ([], []),
    ],
)
def test_two_numbers_after_the_option_become_one_word(words: list[str], joined: list[str]) -> None:
    assert join_sizes(words) == joined
