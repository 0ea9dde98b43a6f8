"""Checkpoints of Accelerate: one folder per step below `checkpoints`, of which the newest is always complete."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors import SafetensorError

import dali_stream

FOLDER, RUN = "checkpoints", "run.json"
LOADER = "custom_checkpoint_0.pkl"  # Accelerate's name for the state of the first registered object
MODEL = ("policy", "chunk", "image_size")  # arguments that determine the model and must equal those of the checkpoint
DAMAGED = (OSError, RuntimeError, EOFError, KeyError, ValueError, pickle.UnpicklingError, SafetensorError)


def newest(out: Path) -> Path | None:
    """Return the checkpoint of a run, or None if the run has none.

    Raises:
        ValueError: If the folder has a checkpoint of an earlier version of `train.py`.
    """
    found = max((out / FOLDER).glob("step_*"), default=None)
    if found is None and (old := out / "checkpoint.pt").exists():
        raise ValueError(
            f"{old} is a checkpoint of an earlier version of train.py, which cannot be resumed. Name another --out"
        )
    return found


def register(accelerator: Accelerator, loader: dali_stream.Loader) -> None:
    """Register what a checkpoint holds in addition to the optimizer: the loader, and the model by the names of one process.

    Accelerate itself saves the names of DistributedDataParallel, so a run could not resume on one process.
    """
    accelerator.register_for_checkpointing(loader)

    def name_as_one_process(models: list[torch.nn.Module], weights: list[dict[str, Any]], _: str) -> None:
        weights[:] = [accelerator.unwrap_model(model).state_dict() for model in models]

    def unwrap(models: list[torch.nn.Module], _: str) -> None:
        models[:] = [accelerator.unwrap_model(model) for model in models]

    accelerator.register_save_state_pre_hook(name_as_one_process)
    accelerator.register_load_state_pre_hook(unwrap)


def save(accelerator: Accelerator, arguments: Namespace, step: int) -> None:
    """Save the run after a step, unless it is saved already. Only the main process calls this, since all have the same state.

    Raises:
        OSError: If the checkpoint cannot be written. The previous checkpoint then remains.
    """
    folder, previous = arguments.out / FOLDER, newest(arguments.out)
    partial, complete = folder / "partial", folder / f"step_{step:08}"
    if previous == complete:
        return
    shutil.rmtree(partial, ignore_errors=True)  # of a run that was killed while it saved
    try:
        accelerator.save_state(str(partial))
        (partial / RUN).write_text(json.dumps({"step": step, "arguments": vars(arguments)}, default=str))
        for path in [*partial.iterdir(), partial]:
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
        partial.rename(complete)  # atomic
    except (OSError, RuntimeError, SafetensorError) as error:
        why = _reason(error, partial)
        shutil.rmtree(partial, ignore_errors=True)
        kept = f"The checkpoint of step {int(previous.name[5:])} is unchanged" if previous else "No checkpoint was saved before"
        raise OSError(
            f"the checkpoint of step {step} could not be written: {why} ({folder}). {kept}. Free space, then use --resume"
        ) from error
    for other in set(folder.glob("step_*")) - {complete}:
        shutil.rmtree(other, ignore_errors=True)


def _reason(error: Exception, partial: Path) -> str:
    """Return why a file could not be written. torch does not say it, but writing more to its largest file fails again."""
    if number := re.search(r"os error (\d+)", str(error)):  # as safetensors says it
        return os.strerror(int(number[1]))
    try:
        largest = max(partial.iterdir(), key=lambda path: path.stat().st_size, default=partial / RUN)
        with largest.open("ab") as file:
            file.write(bytes(2**20))
    except OSError as again:
        return os.strerror(again.errno or 0)
    return str(error).partition("\n")[0]


def check(path: Path, arguments: Namespace, loader: dali_stream.Loader) -> dict[str, Any]:
    """Load the loader's state from a checkpoint, and return the checkpoint's {"step": step, "arguments": {name: value}}.

    Raises:
        ValueError: If an argument differs from that in the checkpoint, or the checkpoint is damaged.
        ResumeError: If the checkpoint belongs to another dataset or another order.
    """
    try:
        run = json.loads((path / RUN).read_text())
        before, state = run["arguments"], torch.load(path / LOADER, map_location="cpu", weights_only=True)
    except DAMAGED as error:
        raise _damaged(path, error) from error
    own = json.loads(json.dumps({name: getattr(arguments, name) for name in MODEL}))
    if differing := [name for name, value in own.items() if before.get(name) != value]:
        saved, given = (", ".join(f"{name}={values.get(name)}" for name in differing) for values in (before, own))
        raise ValueError(
            f"{path} must be resumed with {saved}, got {given}. Use the arguments of the checkpoint, or name another --out"
        )
    loader.load_state_dict(state)
    return run


def load(path: Path, accelerator: Accelerator) -> None:
    """Load model, optimizer and loader. Call `check` before.

    Raises:
        ValueError: If the checkpoint is damaged.
    """
    try:
        accelerator.load_state(str(path))
    except DAMAGED as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> ValueError:
    why = str(error).partition("\n")[0][:200] or type(error).__name__
    return ValueError(f"{path} cannot be read ({why}). Remove it, and start again")
