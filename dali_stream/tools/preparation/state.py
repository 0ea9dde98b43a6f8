"""State of a run: the file meta/prepare.json in OUT, the only one that a run writes about itself.

It is JSON. During a run, it is {"plan": header of the plan, "tasks": its tasks, "done": {path of an output file: note},
"status": status}, see `plan`, `task` and `PrepareStatus`. At the end, it is {"plan": header of the plan, "report": report}.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from dali_stream.errors import DatasetError
from dali_stream.tools.preparation.place import Json, Place
from dali_stream.tools.preparation.plan import Plan

STATE = "meta/prepare.json"
_SHARE = 0.05  # maximum share of the time in which the state is written


@dataclass(frozen=True)
class PrepareStatus:
    """Status of a run.

    Attributes:
        state: "running", "finishing" while metadata are written, "finished", "failed" if a file could not be written, or
            "stopped" if the run was interrupted or has written nothing for ten minutes.
        done, failed, total: Numbers of files.
        bytes: Size of the files that this run has written, in bytes.
        files_per_s: Rate of this run. 0 before the first file is done.
        left_s: Estimated remaining time in seconds. None if unknown.
        at: Time at which the status was written, in seconds since 1970.
    """

    state: str
    done: int
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
        return f"{self.state}: {self.done} of {self.total} files done, {self.failed} failed{rate}{left}"


def _duration(seconds: float) -> str:
    minutes, hours = round(seconds / 60), seconds / 3600
    return f"{seconds:.0f} s" if seconds < 100 else f"{minutes} min" if minutes < 100 else f"{hours:.1f} h"


def read_state(place: Place) -> Json | None:
    """Return the content of the state file, or None if OUT has none. Raises DatasetError if it is invalid."""
    data = place.read(STATE)
    if data is None:
        return None
    try:
        state = json.loads(data)
        if state["plan"]["version"] and ("report" in state or state.keys() >= {"tasks", "done", "status"}):
            return dict(state)
    except (ValueError, TypeError, KeyError):
        pass
    raise DatasetError(f"Invalid {STATE} in {place.address}. Remove {place.address}, and run the command again")


class RunState:
    """State of the run of this process, which is written to OUT every few seconds.

    Args:
        place: OUT.
        plan: Plan of the run.
        notes: {path: note} of the files that earlier runs have written.
        show: Function that is called with each new status.

    Attributes:
        plan: Plan of the run.
        notes: {path: note} of the files that are finished.
        failed: {path: reason} of the files that could not be written.
    """

    def __init__(self, place: Place, plan: Plan, notes: dict[str, Json], show: Callable[[PrepareStatus], None]) -> None:
        self.plan, self.notes, self.failed = plan, notes, dict[str, str]()
        self._place, self._show = place, show
        self._uploads: list[Any] = []
        self._before, self._bytes, self._start = len(notes), 0, time.monotonic()
        self._next = 0.0  # time from which the state is written again

    @property
    def written(self) -> int:
        """Number of files that this run has written."""
        return len(self.notes) - self._before

    def add(self, result: Json) -> None:
        """Add the result of a task. See `task.write_file`."""
        if "error" in result:
            self.failed[result["path"]] = result["error"]
        else:
            self.notes[result["path"]] = result["note"]
            self._uploads.append(result["upload"])
            self._bytes += result["note"]["bytes"]

    def update(self, state: str = "running") -> None:
        """Show the status. Write the state if the last write was more than a few seconds ago, or if the run ends."""
        status = self._status(state)
        is_first, is_last = not self._next, state in ("stopped", "failed")
        is_due = state != "running" or time.monotonic() > self._next
        # Commits of a repository are few, so each has finished files, except for the first and the last one of a run.
        has_files = bool(self._uploads) or not self._place.counts_commits
        if is_first or is_last or (is_due and has_files):
            self._write(status)
        self._show(status)

    def _write(self, status: PrepareStatus) -> None:
        begin = time.monotonic()
        plan = {"plan": self.plan.header, "tasks": self.plan.tasks}
        content = json.dumps(plan | {"done": self.notes, "status": status.as_dict()})
        self._place.commit([(STATE, content.encode())], self._uploads)
        self._uploads = []
        end = time.monotonic()
        self._next = end + max(self._place.interval_s, (end - begin) / _SHARE)

    def _status(self, state: str) -> PrepareStatus:
        done, total, seconds = len(self.notes), len(self.plan.tasks), time.monotonic() - self._start
        rate = self.written / seconds if seconds and self.written else 0.0
        left = (total - done - len(self.failed)) / rate if rate else None
        return PrepareStatus(state, done, len(self.failed), total, self._bytes, rate, left, time.time())

    def finish(self, report: Json) -> None:
        """Write the state of a finished run, which has only the header of the plan and a report."""
        content = json.dumps({"plan": self.plan.header, "report": report}, indent=4)
        self._place.commit([(STATE, content.encode())])
