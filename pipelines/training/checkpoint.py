"""Checkpoint of model, optimizer and loader, a file that is replaced atomically."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import torch


def save(path: Path, state: dict[str, Any]) -> None:
    """Save a state atomically. If the process is killed or the disk is full, the previous checkpoint remains."""
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
    """Load a state.

    Args:
        path: Path of the checkpoint.
        same: Arguments of the run that must be equal to those in the checkpoint.

    Raises:
        ValueError: If an argument differs from that in the checkpoint, or the file is not a checkpoint of `train.py`.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
        why = str(error).partition("\n")[0][:200] or type(error).__name__
        raise ValueError(f"{path} cannot be read ({why}). Remove it, and start again") from error
    if not isinstance(state, dict) or "arguments" not in state:
        raise ValueError(f"{path} must be a checkpoint of train.py, got another file. Name another --out")
    if differing := [name for name, value in same.items() if state["arguments"].get(name) != value]:
        saved, own = (", ".join(f"{name}={values.get(name)}" for name in differing) for values in (state["arguments"], same))
        raise ValueError(
            f"{path} must be resumed with {saved}, got {own}. Use the arguments of the checkpoint, or name another --out"
        )
    return state
