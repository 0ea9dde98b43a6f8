"""State of a run. The running command shows it and writes it to OUT, where `--status` reads it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dali_stream.tools.preparation.place import Place

PROGRESS = "meta/prepare/progress.json"
_EVERY_S = 5.0  # minimum time between two writes of this file


@dataclass(frozen=True)
class PrepareStatus:
    """State of a run.

    Attributes:
        state: "running", "finishing" while metadata are written, "finished", "failed" if a file could not be written, or
            "stopped" if the run was interrupted or has written no progress for ten minutes.
        done, running, failed, total: Numbers of files.
        bytes: Size of the files that this run has written, in bytes.
        files_per_s: Rate of this run. 0 before the first file is done.
        left_s: Estimated remaining time in seconds. None if unknown.
        at: Time at which the status was written, in seconds since 1970.
    """

    state: str
    done: int
    running: int
    failed: int
    total: int
    bytes: int
    files_per_s: float
    left_s: float | None
    at: float

    def as_dict(self) -> dict[str, Any]:
        """Return the status as a dict for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        left = "" if self.left_s is None else f", {_duration(self.left_s)} left"
        rate = f", {self.files_per_s:.2f} files/s" if self.files_per_s else ""
        return f"{self.state}: {self.done} of {self.total} files done, {self.running} running, {self.failed} failed{rate}{left}"


class Progress:
    """Counts the files of a run, and writes the status to OUT every few seconds.

    Args:
        place: OUT.
        total: Number of files.
        done: Number of files that earlier runs have written.
        show: Function that is called with each new status.

    Attributes:
        failed: {path: reason} of the files that could not be written.
    """

    def __init__(self, place: Place, total: int, done: int, show: Callable[[PrepareStatus], None]) -> None:
        self._place, self._total, self._before, self._show = place, total, done, show
        self._done, self._running, self._bytes = done, 0, 0
        self.failed: dict[str, str] = {}
        self._start, self._written = time.monotonic(), 0.0
        self.update()

    def started(self, tasks: Sequence[dict[str, Any]]) -> None:
        """Count the files of tasks that were submitted to an executor."""
        self._running += len(tasks)
        self.update()

    def ended(self, result: dict[str, Any]) -> None:
        """Count a file that is done or has failed."""
        self._running = max(self._running - 1, 0)
        self._done += "error" not in result
        if "error" in result:
            self.failed[result["path"]] = result["error"]
        self._bytes += result["bytes"]
        self.update()

    def update(self, state: str = "running") -> None:
        """Show the status. Write it if the last write was more than a few seconds ago, or if the run ends."""
        new, failed, seconds = self._done - self._before, len(self.failed), time.monotonic() - self._start
        rate = new / seconds if seconds and new else 0.0
        unfinished = self._total - self._done - failed
        left = unfinished / rate if rate else None
        running = min(self._running, unfinished) if state == "running" else 0
        status = PrepareStatus(state, self._done, running, failed, self._total, self._bytes, rate, left, time.time())
        if state != "running" or not self._written or time.monotonic() - self._written > _EVERY_S:
            self._written = time.monotonic()
            self._place.write(PROGRESS, json.dumps(status.as_dict()).encode())
        self._show(status)


def _duration(seconds: float) -> str:
    minutes, hours = round(seconds / 60), seconds / 3600
    return f"{seconds:.0f} s" if seconds < 100 else f"{minutes} min" if minutes < 100 else f"{hours:.1f} h"
