"""A run's one checkpoint: model, optimizer and loader in a file that is whole or not there."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import torch


def save(path: Path, state: dict[str, Any]) -> None:
    """Puts `state` at `path` at once: who is killed on the way, or finds the disk full, leaves the checkpoint before."""
    partial = path.with_suffix(".partial")
    try:
        with partial.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def load(path: Path, same: dict[str, Any]) -> dict[str, Any]:
    """The state at `path`, whose "arguments" have to be `same`.

    Raises:
        ValueError: they are not, and the model would be another one; or it is no checkpoint of `train.py`.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
        why = str(error).partition("\n")[0][:200] or type(error).__name__
        raise ValueError(f"{path} cannot be read ({why}); remove it, and start anew") from error
    if not isinstance(state, dict) or "arguments" not in state:
        raise ValueError(f"{path} is no checkpoint of train.py; name another --out")
    if differing := [name for name, value in same.items() if state["arguments"].get(name) != value]:
        saved, own = (", ".join(f"{name}={values.get(name)}" for name in differing) for values in (state["arguments"], same))
        raise ValueError(f"{path} is of {saved}, and this run has {own}; resume with the same, or name another --out")
    return state
