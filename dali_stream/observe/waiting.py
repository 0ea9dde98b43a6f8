"""Log of what the threads of a Loader do while a batch does not come, such as reads from a server or a disk that hangs."""

from __future__ import annotations

import itertools
import logging
import queue
import sys
import threading
import time
import traceback
from concurrent import futures
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

LONG_WAIT_S = 60.0  # seconds after which a wait is logged
_log = logging.getLogger("dali_stream")
_T = TypeVar("_T")


class _Work(NamedTuple):
    """Work of a thread.

    Attributes:
        since: Time of `time.perf_counter` at which it began, in seconds.
        what: Its description, such as "requests {} bytes {} to {}", followed by the values to insert.
    """

    since: float
    what: tuple[object, ...]


_works: dict[int, _Work] = {}  # {identifier of a thread: what it does}
_board: Board | None = None


class Board:
    """Memory shared with another process, which reads there what the decode threads of this process did when it crashed.

    Args:
        memory: Memory, uint8 of shape (`SIZE`,), all zero.
    """

    _LINES, _WIDTH = 256, 512  # threads, and bytes of text of a thread. Further threads and the rest of a text are left out
    SIZE = _LINES * _WIDTH

    def __init__(self, memory: npt.NDArray[np.uint8]) -> None:
        self._lines = memory.reshape(self._LINES, self._WIDTH)
        self._line_of: dict[int, int] = {}  # {identifier of a thread: its line}
        self._unused = itertools.count()

    def use(self) -> None:
        """Show from now on what threads of this process decode."""
        global _board
        _board = self

    def write(self, thread: int, text: str) -> None:
        """Set the line of a thread."""
        line = self._line_of.get(thread)
        if line is None:
            line = self._line_of[thread] = next(self._unused)
        if line < self._LINES:
            data = text.encode(errors="replace")[: self._WIDTH]
            self._lines[line, : len(data)] = np.frombuffer(data, np.uint8)
            self._lines[line, len(data) :] = 0

    def read(self) -> list[str]:
        """Return the lines that are not empty."""
        return [line.tobytes().rstrip(b"\0").decode(errors="replace") for line in self._lines if line[0]]


def _text(what: tuple[object, ...]) -> str:
    return str(what[0]).format(*what[1:])


class working:
    """Context that remembers what this thread does, for the log of a long wait. Contexts may be nested.

    Args:
        what: What the thread does, with a {} for each value, such as "requests {} bytes {} to {}".
        values: Values to insert. They are converted to text only if a wait is long.
    """

    __slots__ = ("_before", "_shown", "_what")

    def __init__(self, what: str, *values: object) -> None:
        self._what, self._shown = (what, *values), what.startswith("decodes")  # only decoders crash
        self._before: _Work | None = None

    def __enter__(self) -> None:
        thread = threading.get_ident()
        self._before = _works.get(thread)
        _works[thread] = _Work(time.perf_counter(), self._what)
        if _board is not None and self._shown:
            _board.write(thread, _text(self._what))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if _board is not None and self._shown:
            _board.write(threading.get_ident(), "")
        if self._before is None:
            _works.pop(threading.get_ident(), None)
        else:
            _works[threading.get_ident()] = self._before


def take(waited: queue.SimpleQueue[_T], what: str) -> _T:
    """Return the next item of a queue. If this takes longer than `LONG_WAIT_S`, log once what all threads do.

    Args:
        waited: Queue.
        what: What is waited for, for the log.
    """
    try:
        return waited.get(timeout=LONG_WAIT_S)
    except queue.Empty:
        _tell(what)
        return waited.get()


def result(waited: futures.Future[_T], what: str) -> _T:
    """Return the result of a future, or raise its exception. If this takes longer than `LONG_WAIT_S`, log once, see `take`."""
    try:
        return waited.result(LONG_WAIT_S)
    except futures.TimeoutError:
        if not waited.done():
            _tell(what)
        return waited.result()


def _tell(what: str) -> None:
    """Log what the threads do, and at the level DEBUG the calls of every thread, the innermost last."""
    now, names = time.perf_counter(), {thread.ident: thread.name for thread in threading.enumerate()}
    lines = [
        f"{names[thread]} {_text(work.what)} for {now - work.since:.0f} s"
        for thread, work in sorted(_works.items())
        if thread in names
    ]
    _log.warning(
        "The Loader has waited %.0f s for %s, and continues to wait. %s",
        *(LONG_WAIT_S, what, "; ".join(lines) or "The level DEBUG logs the calls of all threads"),
    )
    if _log.isEnabledFor(logging.DEBUG):
        for thread, frame in sys._current_frames().items():
            calls = (f"{Path(call.filename).name}:{call.lineno} {call.name}" for call in traceback.extract_stack(frame))
            _log.debug("%s: %s", names.get(thread, thread), " > ".join(calls))
