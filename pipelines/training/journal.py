"""Metrics of a run: metrics.jsonl, with one line per entry, and the same metrics for TensorBoard."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

NAME = "metrics.jsonl"


class Journal:
    """Journal of a run. A resumed run removes the entries after its checkpoint, because it repeats these steps.

    Args:
        out: Folder of the run.
        step: Step from which the run continues, or 0 at the start.
    """

    def __init__(self, out: Path, step: int) -> None:
        kept = [line for line in read(out) if line["step"] <= step]
        partial = out / f"{NAME}.partial"
        partial.write_text("".join(f"{json.dumps(line)}\n" for line in kept))
        partial.replace(out / NAME)  # atomic, as for the checkpoint
        self._lines = (out / NAME).open("a", buffering=1)  # line buffering
        self._board = SummaryWriter(str(out / "tensorboard"), purge_step=step + 1)

    def add(self, step: int, kind: str, values: dict[str, Any]) -> None:
        """Add an entry.

        Args:
            step: Step of the optimizer.
            kind: Group of the values on the board.
            values: Numbers by name.
        """
        self._lines.write(json.dumps({"step": step, **values}) + "\n")
        self.show(step, kind, values)

    def show(self, step: int, kind: str, values: dict[str, Any]) -> None:
        """Add values to the board only. See `add` for the arguments."""
        for name, value in values.items():
            self._board.add_scalar(f"{kind}/{name}", value, step)

    def close(self) -> None:
        """Write all entries and close the files."""
        self._lines.close()
        self._board.close()


def read(out: Path) -> list[dict[str, Any]]:
    """Return the entries of a journal in order. The last line is omitted if it is incomplete because the run was killed."""
    path = out / NAME
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]
