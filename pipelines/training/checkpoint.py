"""A run's one checkpoint: model, optimizer and loader in a file that is whole or not there."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch


def save(path: Path, state: dict[str, Any]) -> None:
    """Puts `state` at `path` at once: who is killed on the way leaves the checkpoint before."""
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def load(path: Path, same: dict[str, Any]) -> dict[str, Any]:
    """The state at `path`, whose "arguments" have to be `same`.

    Raises:
        ValueError: they are not, and the model would be another one.
    """
    state = torch.load(path, map_location="cpu", weights_only=True)
    if differing := [name for name, value in same.items() if state["arguments"].get(name) != value]:
        saved, own = (", ".join(f"{name}={values.get(name)}" for name in differing) for values in (state["arguments"], same))
        raise ValueError(f"{path} is of {saved}, and this run has {own}; resume with the same, or name another --out")
    return state
