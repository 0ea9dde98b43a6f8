"""Tracker that writes the metrics of a run to metrics.jsonl, with one line per entry."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from accelerate.tracking import GeneralTracker, on_main_process


class JsonLines(GeneralTracker):
    """Tracker for `Accelerator(log_with=)`. See `accelerate.tracking.GeneralTracker` for its methods.

    Args:
        path: Path of the file.
    """

    name, requires_logging_directory = "jsonl", False

    def __init__(self, path: Path) -> None:
        self.tracker = path  # before the check of the base class
        super().__init__()

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        with self.tracker.open("a") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")

    def cut(self, step: int) -> None:
        """Remove the entries after a step, because a run that resumes from a checkpoint of this step repeats the later ones.

        The last line of the file is removed if it is incomplete because the run was killed.

        Raises:
            ValueError: If the file is damaged.
        """
        lines = self.tracker.read_text().split("\n")[:-1] if self.tracker.exists() else []
        try:
            kept = [line for line in lines if json.loads(line)["step"] <= step]
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(
                f"{self.tracker} must have a JSON object with a step in each line. Remove the others: {error}"
            ) from error
        partial = self.tracker.with_suffix(".partial")
        partial.write_text("".join(f"{line}\n" for line in kept))
        partial.replace(self.tracker)  # atomic
