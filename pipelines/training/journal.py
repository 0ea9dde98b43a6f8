"""Tracker that writes the metrics of a run to metrics.jsonl, with one line per entry."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from accelerate.tracking import GeneralTracker, on_main_process

NAME = "metrics.jsonl"


class JsonLines(GeneralTracker):
    """Tracker for `Accelerator(log_with=)`. See `accelerate.tracking.GeneralTracker` for its methods.

    Args:
        out: Folder of the run.
    """

    name, requires_logging_directory = "jsonl", False

    def __init__(self, out: Path) -> None:
        self.tracker = out / NAME  # before the check of the base class
        super().__init__()

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        own = {name: value for name, value in values.items() if "/" not in name}  # without the metrics of the loader
        with self.tracker.open("a") as file:
            file.write(json.dumps({"step": step, **own}) + "\n")


def read(out: Path) -> list[dict[str, Any]]:
    """Return the entries of a run in order. The last line is omitted if it is incomplete because the run was killed."""
    path = out / NAME
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def cut(out: Path, step: int) -> None:
    """Remove the entries after a step, because a run that resumes from a checkpoint of this step repeats the later ones."""
    partial = out / f"{NAME}.partial"
    partial.write_text("".join(f"{json.dumps(entry)}\n" for entry in read(out) if entry["step"] <= step))
    partial.replace(out / NAME)  # atomic
