"""Calls of functions in a separate process, since libraries may be missing, crash, hang or print anything."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

_CRASH_S = 10.0  # time allowed for a process to end after a crash has closed its output
Call = Callable[[], Any]
"""Function to call in another process, such as `functools.partial(function, argument)`. It and its result are pickled."""


@dataclass(frozen=True)
class Answer:
    """Result of a call.

    Attributes:
        value: Value that the function returned. An empty dict after an error.
        error: Error message. Empty if the call returned.
        kind: Class name of the exception, or "crash", "hang", or "skipped" for a call that follows a crash or hang. Empty if
            the call returned.
    """

    value: Any
    error: str = ""
    kind: str = ""

    @property
    def reason(self) -> str:
        """First line of the error."""
        return self.error.partition("\n")[0][:300]


class Called(NamedTuple):
    """Results of the calls in one process.

    Attributes:
        answers: Results in the order of the calls.
        ended: Description of how the process ended. Empty for exit code 0.
        stderr: Text that the process wrote to stderr.
    """

    answers: list[Answer]
    ended: str
    stderr: str


def call(calls: Sequence[Call], limit_s: float, exit_s: float = 0.0) -> Called:
    """Call functions one after the other in a new process.

    The process sends each answer at once, so a crash or hang loses only the answers after it. The new process stays in the
    process group of this one, so Ctrl-C ends both.

    Args:
        calls: Functions to call.
        limit_s: Time limit of all calls together, in seconds.
        exit_s: Time allowed for the process to end by itself after the last answer, in seconds. It is then killed. Default: 0.

    Returns:
        One answer per call, and how the process ended.
    """
    answers: list[Answer] = []
    with tempfile.TemporaryFile() as requests, tempfile.TemporaryFile() as stderr:
        # Each function is pickled separately, so that a module that cannot be imported fails only its own call.
        pickle.dump([pickle.dumps(each) for each in calls], requests)
        requests.seek(0)
        command, deadline = _same_python(__file__), time.monotonic() + limit_s
        with subprocess.Popen(command, stdin=requests, stdout=subprocess.PIPE, stderr=stderr) as child:
            assert child.stdout is not None
            timer = threading.Timer(limit_s, child.kill)
            timer.start()
            try:
                with contextlib.suppress(EOFError, pickle.UnpicklingError):  # the process has crashed
                    while len(answers) < len(calls):
                        answers.append(Answer(*pickle.load(child.stdout)))
                if len(answers) == len(calls):
                    timer.cancel()  # its end has a limit of its own
                ended = _wait(child, exit_s if len(answers) == len(calls) else _CRASH_S)
                hung = time.monotonic() >= deadline
            finally:
                timer.cancel()
                child.kill()
        stderr.seek(0)
        text = stderr.read().decode(errors="replace").strip()
    if len(answers) < len(calls):
        crash = Answer({}, ended or "it ended without an answer", "crash")
        answers.append(Answer({}, f"no answer within {limit_s:.3g} s", "hang") if hung else crash)
    skipped = Answer({}, "it was skipped, since the call before it got no answer", "skipped")
    return Called(answers + [skipped] * (len(calls) - len(answers)), ended, text)


def call_each(calls: Sequence[Call], limit_s: float) -> list[Answer]:
    """Return the answers to independent calls. After a crash or hang, another process continues with the next call.

    Args:
        calls: Functions to call.
        limit_s: Time limit of each process, in seconds.
    """
    answers: list[Answer] = []
    while len(answers) < len(calls):
        answers += [answer for answer in call(calls[len(answers) :], limit_s).answers if answer.kind != "skipped"]
    return answers


def _same_python(script: str | os.PathLike[str]) -> list[str]:
    """Return the command that runs a script in another process with the same module search path as this one.

    `python SCRIPT` and `python -m` would search another folder first.
    """
    code = f"import sys, runpy; sys.path[:] = {sys.path!r}; runpy.run_path({os.fspath(script)!r}, run_name='__main__')"
    return [sys.executable, "-c", code]


def _wait(child: subprocess.Popen[bytes], limit_s: float) -> str:
    """Wait until a process ends. Return how it ended, or an empty string for exit code 0."""
    try:
        code = child.wait(limit_s)
    except subprocess.TimeoutExpired:
        return f"it did not end within {limit_s:.3g} s"
    if code < 0:
        return f"it crashed with {signal.Signals(-code).name}"
    return f"it ended with exit code {code}" if code else ""


def _main() -> None:
    """Answer the calls on stdin, in the child process."""
    from dali_stream.system.torchcodec_import import compile_nothing

    signal.signal(signal.SIGINT, signal.SIG_DFL)
    compile_nothing()
    calls = pickle.load(sys.stdin.buffer)
    with os.fdopen(os.dup(1), "wb") as answers:
        # Only answers may reach the pipe, so libraries that print to stdout print to stderr instead.
        os.dup2(2, 1)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for each in calls:
            try:
                answer = pickle.loads(each)(), "", ""
            except (Exception, SystemExit) as raised:
                answer = {}, str(raised).strip() or type(raised).__name__, type(raised).__name__
            pickle.dump(answer, answers)
            answers.flush()


if __name__ == "__main__":
    _main()
