"""What a run has measured: metrics.jsonl, a line per entry, and the same for TensorBoard."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

NAME = "metrics.jsonl"


class Journal:
    """Appends to a run's journal. A resumed run forgets what lies behind its checkpoint, which will be measured again.

    Args:
        out: folder of the run.
        step: the step that the run continues from, 0 at the start.
    """

    def __init__(self, out: Path, step: int) -> None:
        kept = [line for line in read(out) if line["step"] <= step]
        partial = out / f"{NAME}.partial"
        partial.write_text("".join(f"{json.dumps(line)}\n" for line in kept))
        partial.replace(out / NAME)  # at once, as the checkpoint
        self._lines = (out / NAME).open("a", buffering=1)  # a line at a time
        self._board = SummaryWriter(str(out / "tensorboard"), purge_step=step + 1)

    def add(self, step: int, kind: str, values: dict[str, Any]) -> None:
        """Adds a line with the `values` of a step, numbers, under `kind` on the board."""
        self._lines.write(json.dumps({"step": step, **values}) + "\n")
        self.show(step, kind, values)

    def show(self, step: int, kind: str, values: dict[str, Any]) -> None:
        """Adds the `values` of a step to the board alone."""
        for name, value in values.items():
            self._board.add_scalar(f"{kind}/{name}", value, step)

    def close(self) -> None:
        """Writes all out."""
        self._lines.close()
        self._board.close()


def read(out: Path) -> list[dict[str, Any]]:
    """The journal's entries, in order. A line that was cut off by a kill is left out: its step comes again."""
    path = out / NAME
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]
