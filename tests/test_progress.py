"""Bars on stderr while `bench` and `preview` work: on a terminal, and nowhere else."""

from __future__ import annotations

import json
import os
import pty
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from accelerate import PartialState

from dali_stream.cli import main

BENCH = ["--batch-size", "8", "--num-batches", "4", "--warmup", "2", "--device", "cpu"]


@pytest.fixture(autouse=True)
def _one_rank() -> Iterator[None]:
    yield
    PartialState._reset_state()


@pytest.fixture
def on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[str]], str]:
    """Run the program with a terminal as stderr, and return what the terminal gets."""

    def run(arguments: list[str]) -> str:
        ours, theirs = pty.openpty()
        received: list[bytes] = []

        def read() -> None:
            try:
                while part := os.read(ours, 4096):
                    received.append(part)
            except OSError:  # the other end is closed
                pass

        reader = threading.Thread(target=read)
        reader.start()
        with monkeypatch.context() as patch, os.fdopen(theirs, "w") as terminal:
            patch.setattr("sys.stderr", terminal)
            patch.setenv("TERM", "xterm")
            code = main(arguments)
        reader.join()
        os.close(ours)
        assert code == 0
        return b"".join(received).decode()

    return run


def test_bench_shows_its_batches(small: Path, on_a_terminal: Callable[[list[str]], str]) -> None:
    shown = on_a_terminal(["bench", str(small), *BENCH])
    for what in ("warm-up", "timed batches", "the rest of the first epoch"):
        assert what in shown
    assert "4/4" in shown


def test_preview_shows_that_it_works(small: Path, tmp_path: Path, on_a_terminal: Callable[[list[str]], str]) -> None:
    assert "decoding a batch" in on_a_terminal(["preview", str(small), "--out", str(tmp_path / "sheet.png")])


def test_json_comes_without_a_bar(
    small: Path, on_a_terminal: Callable[[list[str]], str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert on_a_terminal(["bench", str(small), *BENCH, "--json"]) == ""
    assert json.loads(capsys.readouterr().out)["samples"] == 32


def test_nothing_is_shown_where_stderr_is_no_terminal(small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", str(small), *BENCH]) == 0
    assert main(["preview", str(small), "--out", str(tmp_path / "sheet.png")]) == 0
    assert capsys.readouterr().err == ""
