"""Programs in processes of their own, which may crash, hang or print anything, and answer in lines of JSON.

`Child` runs any program. `Calls` calls Python functions whose libraries may be missing, crash or hang: each answer arrives as
soon as it is known, so a crash loses only the answers after it.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import IO, Any, Literal, cast

TICK_S = 0.5  # between two checks whether a silent process is still there
Call = tuple[str, str, Mapping[str, Any]]  # (Python file, function in it, keyword arguments that JSON can hold)


class ChildError(Exception):
    """A process gave no answer. `kind`: it crashed, did not answer in time, or could not be started."""

    def __init__(self, kind: Literal["crash", "hang", "start"], message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Child:
    """A program in a process of its own.

    Args:
        command: program and arguments.
        environment: variables in addition to those of this process.
        own_session: start a session of its own. Then `close` also kills the processes that the program started, and Ctrl-C does
            not reach it.

    Raises:
        ChildError: it cannot be started.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str] | None = None, own_session: bool = True) -> None:
        self._unread = b""
        self._own_session = own_session
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed in `close`
        pipe = subprocess.PIPE
        try:
            self.process = subprocess.Popen(
                command, bufsize=0, stdin=pipe, stdout=pipe, stderr=self._stderr, start_new_session=own_session,
                env={**os.environ, **(environment or {})},
            )  # fmt: skip
        except OSError as error:
            self._stderr.close()
            raise ChildError("start", f"it does not start: {error}") from error
        # Unbuffered, since `select` does not see what a buffer holds.
        self._stdin, self._stdout = cast(IO[bytes], self.process.stdin), cast(IO[bytes], self.process.stdout)

    def send(self, request: Any) -> None:
        """Writes a line of JSON to its stdin."""
        with contextlib.suppress(BrokenPipeError):  # the missing answer tells how it ended
            self._stdin.write(json.dumps(request).encode() + b"\n")

    def receive(self, key: str, limit_s: float, waiting: Callable[[], None] = lambda: None) -> dict[str, Any]:
        """The next JSON object on its stdout that has this key; other lines are skipped.

        Args:
            key: that the object has.
            limit_s: seconds to wait for it.
            waiting: called about every half second until then.

        Raises:
            ChildError: the process ended, or the time is over.
        """
        until = time.monotonic() + limit_s
        while True:
            while b"\n" in self._unread:
                line, _, self._unread = self._unread.partition(b"\n")
                with contextlib.suppress(ValueError):
                    found = json.loads(line)
                    if isinstance(found, dict) and key in found:
                        return found
            left = until - time.monotonic()
            if left <= 0:
                raise ChildError("hang", f"no answer within {limit_s:.3g} s")
            if select.select([self._stdout], [], [], min(left, TICK_S))[0]:
                data = os.read(self._stdout.fileno(), 1 << 16)
                self._unread += data
                ended = not data
            else:
                waiting()
                ended = self.process.poll() is not None
            if ended:
                raise ChildError("crash", self.wait(10) or "it ended without an answer")

    def wait(self, limit_s: float) -> str:
        """Waits for its end. Returns how it ended; empty for exit code 0."""
        try:
            code = self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return f"it did not end within {limit_s:.3g} s"
        if code < 0:
            return f"it crashed with {_signal(-code)}"
        return f"it ended with exit code {code}" if code else ""

    def stderr(self) -> str:
        """What it has written to stderr."""
        self._stderr.seek(0)
        return self._stderr.read().decode(errors="replace").strip()

    def close(self) -> None:
        """Kills it. May be called again."""
        if self._own_session:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()
        for file in (self._stdin, self._stdout, self._stderr):
            with contextlib.suppress(BrokenPipeError):
                file.close()


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


class Calls:
    """Calls functions one after the other in a process that starts at once. A context manager: leaving it kills the process.

    Args:
        calls: the functions and their arguments. They return dicts that JSON can hold.
        limit_s: seconds for all of them.
        own_session: see `Child`.

    Attributes:
        child: the process.
    """

    def __init__(self, calls: Sequence[Call], limit_s: float, own_session: bool = True) -> None:
        from dali_stream.process import same_python  # here: the child runs this file without importing the package

        self._count, self._limit_s, self._until = len(calls), limit_s, time.monotonic() + limit_s
        self.child = Child(same_python(__file__), own_session=own_session)
        self.child.send(calls)

    def __enter__(self) -> Calls:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.child.close()

    def answers(self) -> list[Answer]:
        """Waits, and returns an answer for each call."""
        found: list[Answer] = []
        try:
            while len(found) < self._count:
                found.append(Answer(**self.child.receive("value", max(self._until - time.monotonic(), 0.01))))
        except ChildError as error:
            hung = f"no answer within {self._limit_s:.3g} s"
            found.append(Answer({}, hung if error.kind == "hang" else str(error), error.kind))
            skipped = Answer({}, "it was skipped, since the call before it got no answer", "skipped")
            found += [skipped] * (self._count - len(found))
        return found


def call_each(calls: Sequence[Call], limit_s: float) -> list[Answer]:
    """Answers to independent calls: those after a crash or hang are called in another process."""
    found: list[Answer] = []
    while len(found) < len(calls):
        with Calls(calls[len(found) :], limit_s) as process:
            found += [answer for answer in process.answers() if answer.kind != "skipped"]
    return found


def _signal(number: int) -> str:
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"


def _main() -> None:
    """The child: reads calls from stdin, and writes an answer per call to stdout. Libraries print to stderr instead."""
    calls = json.loads(sys.stdin.readline())
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for file, function, arguments in calls:
        answer: dict[str, Any] = {"value": {}, "error": "", "kind": ""}
        try:
            answer["value"] = runpy.run_path(file, run_name="isolated")[function](**arguments) or {}
        except (Exception, SystemExit) as error:
            answer |= {"error": str(error).strip() or type(error).__name__, "kind": type(error).__name__}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    _main()
