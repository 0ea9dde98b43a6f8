"""Questions to libraries that may be missing, crash or hang: each group is asked in a process of its own, with a time limit.

The process answers a line of JSON per question, as soon as it has it, so what is behind a crash is lost and no more.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from dali_stream.process import same_python

LIMIT_S = 120.0  # per group; a first import of torch from a network file system takes a minute

_ANSWERS = Path(__file__).with_name("answers.py")


@dataclass(frozen=True)
class Answer:
    """Attributes: `value`, what came back; `error`, why nothing did, in which case `value` is empty.

    `kind` is the name of the exception, "crash", "hang", or "unasked" behind one of those; empty where there is an answer.
    """

    value: Mapping[str, Any]
    error: str = ""
    kind: str = ""


class Group:
    """Questions for one process, which starts at once. A context manager: leaving it ends the process.

    Args:
        questions: (name of a function in `dali_stream.tools.doctor.answers`, its arguments), asked one after the other.
        limit_s: seconds for all of them.
    """

    def __init__(self, questions: Sequence[tuple[str, Mapping[str, Any]]], limit_s: float = LIMIT_S) -> None:
        self._questions, self._limit_s = questions, limit_s
        self._until = time.monotonic() + limit_s
        # By its path, since the package brings pyarrow and more, which takes time and may fail itself.
        self._process = subprocess.Popen(
            [*same_python(_ANSWERS), json.dumps(questions)],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip

    def __enter__(self) -> Group:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._kill()
        self._process.communicate()

    def answers(self) -> list[Answer]:
        """Waits, and returns an answer for each question."""
        hung = False
        try:
            out, _ = self._process.communicate(timeout=max(self._until - time.monotonic(), 0.01))
        except subprocess.TimeoutExpired:
            hung = True
            self._kill()
            out, _ = self._process.communicate()
        found = [Answer(**fields) for fields in map(_parsed, out.splitlines()) if fields is not None]
        missing = len(self._questions) - len(found)
        if missing > 0:
            found.append(self._silence(hung))
        return found + [Answer({}, "it was not asked, since the question before got no answer", "unasked")] * (missing - 1)

    def _silence(self, hung: bool) -> Answer:
        if hung:
            return Answer({}, f"it did not answer within {self._limit_s:g} s", "hang")
        code = self._process.returncode
        if code < 0:
            with contextlib.suppress(ValueError):
                return Answer({}, f"it crashed with {signal.Signals(-code).name}", "crash")
        return Answer({}, f"it ended the process with exit code {code}", "crash")

    def _kill(self) -> None:
        # The whole group: a library may have started programs of its own, which would keep the pipe open.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)


def ask(questions: Sequence[tuple[str, Mapping[str, Any]]], limit_s: float = LIMIT_S) -> list[Answer]:
    """Asks independent questions: what comes behind a crash is asked again in another process."""
    found: list[Answer] = []
    while len(found) < len(questions):
        with Group(questions[len(found) :], limit_s) as group:
            found += [answer for answer in group.answers() if answer.kind != "unasked"]
    return found


def _parsed(line: bytes) -> dict[str, Any] | None:
    with contextlib.suppress(ValueError):
        fields = json.loads(line)
        if isinstance(fields, dict) and set(fields) == {"value", "error", "kind"}:
            return fields
    return None
