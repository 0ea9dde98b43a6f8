"""Calls of Python functions in a process of their own, since libraries may be missing, crash, hang or print anything."""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

_CRASH_S = 10.0  # for a process to end after a crash has closed its output
Call = tuple[str, str, Mapping[str, Any]]  # (Python file, function in it, keyword arguments that JSON can hold)


@dataclass(frozen=True)
class Answer:
    """The result of a call.

    Attributes:
        value: what the function returned; empty after an error.
        error: why there is no value; empty where there is one.
        kind: the name of the exception, "crash", "hang", or "skipped" for calls after one of these; empty without an error.
    """

    value: Mapping[str, Any]
    error: str = ""
    kind: str = ""

    @property
    def reason(self) -> str:
        """The first line of the error."""
        return self.error.partition("\n")[0][:300]


class Called(NamedTuple):
    """Attributes: `answers`, one per call; `ended`: how the process ended, empty for exit code 0; `stderr`: what it wrote."""

    answers: list[Answer]
    ended: str
    stderr: str


@contextlib.contextmanager
def calling(calls: Sequence[Call], limit_s: float) -> Iterator[Callable[[float], Called]]:
    """Starts to call functions, which return dicts that JSON can hold, one after the other in a new process.

    Each answer arrives as soon as it is known, so a crash or hang loses only the answers after it. The process is of this one's
    group, so that Ctrl-C ends it too. The end of the context kills it.

    Args:
        calls: the functions and their arguments.
        limit_s: seconds for all of them.

    Returns:
        A function that waits for the answers, and then for seconds that the process has to end by itself.
    """
    from dali_stream.process import same_python  # here: the child runs this file without importing the package

    hung = threading.Event()

    def end() -> None:
        hung.set()
        process.kill()

    def called(exit_s: float) -> Called:
        assert process.stdout is not None
        answers = [Answer(**json.loads(line)) for line in process.stdout if line.startswith(b'{"value"')]
        ended = _ended(process, exit_s if len(answers) == len(calls) else _CRASH_S)
        stderr.seek(0)
        if len(answers) < len(calls):
            crash = Answer({}, ended or "it ended without an answer", "crash")
            answers.append(Answer({}, f"no answer within {limit_s:.3g} s", "hang") if hung.is_set() else crash)
        skipped = Answer({}, "it was skipped, since the call before it got no answer", "skipped")
        answers += [skipped] * (len(calls) - len(answers))
        return Called(answers, ended, stderr.read().decode(errors="replace").strip())

    pipe, timer = subprocess.PIPE, threading.Timer(limit_s, end)
    with (
        tempfile.TemporaryFile() as stderr,
        subprocess.Popen(same_python(__file__), stdin=pipe, stdout=pipe, stderr=stderr) as process,
    ):
        timer.start()
        try:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError), process.stdin as requests:
                requests.write(json.dumps(calls).encode())
            yield called
        finally:
            timer.cancel()
            process.kill()


def call(calls: Sequence[Call], limit_s: float, exit_s: float = 0.0) -> Called:
    """Calls functions as `calling`, and waits for the answers."""
    with calling(calls, limit_s) as called:
        return called(exit_s)


def call_each(calls: Sequence[Call], limit_s: float) -> list[Answer]:
    """Answers to independent calls: those after a crash or hang are called in another process."""
    found: list[Answer] = []
    while len(found) < len(calls):
        found += [answer for answer in call(calls[len(found) :], limit_s).answers if answer.kind != "skipped"]
    return found


def _ended(process: subprocess.Popen[bytes], limit_s: float) -> str:
    """Waits for the end of a process; returns how it ended, empty for exit code 0."""
    try:
        code = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return f"it did not end within {limit_s:.3g} s"
    if code < 0:
        return f"it crashed with {signal.Signals(-code).name}"
    return f"it ended with exit code {code}" if code else ""


def _main() -> None:
    """The child: reads calls from stdin, and writes an answer per call to stdout. Libraries print to stderr instead."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    calls = json.load(sys.stdin)
    with os.fdopen(os.dup(1), "w", buffering=1) as answers:
        os.dup2(2, 1)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for file, function, arguments in calls:
            answer: dict[str, Any] = {"value": {}, "error": "", "kind": ""}
            try:
                answer["value"] = runpy.run_path(file, run_name="isolated")[function](**arguments) or {}
            except (Exception, SystemExit) as error:
                answer |= {"error": str(error).strip() or type(error).__name__, "kind": type(error).__name__}
            answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    _main()
