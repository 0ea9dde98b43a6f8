"""Checkpoints of Accelerate: one folder per step below `checkpoints`, of which the newest is always complete."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from argparse import Namespace
from pathlib import Path

from accelerate import Accelerator
from safetensors import SafetensorError

from dali_stream import DaliStreamError

RUN, STEP = "run.json", "step_" + 8 * "[0-9]"
DAMAGED = (OSError, RuntimeError, EOFError, KeyError, ValueError, TypeError, pickle.UnpicklingError, SafetensorError)


def newest(out: Path) -> Path | None:
    """Return the checkpoint of a run, or None if the run has none."""
    return max((out / "checkpoints").glob(STEP), default=None)


def save(accelerator: Accelerator, arguments: Namespace, step: int, validated: bool) -> None:
    """Save the run after a step. Only the main process calls this, since all have the same state.

    Raises:
        OSError: If the checkpoint cannot be written. The previous checkpoint then remains.
    """
    folder, previous = arguments.out / "checkpoints", newest(arguments.out)
    partial, complete = folder / "partial", folder / f"step_{step:08}"
    run = json.dumps({"step": step, "validated": validated, "arguments": vars(arguments)}, default=str)
    if previous == complete:
        (changed := complete / "run.partial").write_text(run)  # it may be validated by now
        changed.replace(complete / RUN)
        return
    shutil.rmtree(partial, ignore_errors=True)  # of a run that was killed while it saved
    try:
        accelerator.save_state(str(partial))
        (partial / RUN).write_text(run)
        for path in [*partial.iterdir(), partial]:
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
        partial.rename(complete)  # atomic
    except (OSError, RuntimeError, SafetensorError, DaliStreamError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        why, kept = str(error).partition("\n")[0], f"{previous.name} is unchanged" if previous else "no older one exists"
        raise OSError(
            f"{complete} could not be written, and {kept}. Is the disk full? Then free space, and --resume: {why}"
        ) from error
    for other in set(folder.glob(STEP)) - {complete}:
        shutil.rmtree(other, ignore_errors=True)


def load(accelerator: Accelerator, path: Path, arguments: Namespace) -> tuple[int, bool, list[str]]:
    """Load model, optimizer and loader from a checkpoint.

    Returns:
        The step of the checkpoint, whether it was validated, and a text for each argument that differs from that of the run.

    Raises:
        ValueError: If the checkpoint is damaged, or its model is another one.
        ResumeError: If the checkpoint belongs to another dataset or another order.
    """
    changes = []
    try:
        run = json.loads((path / RUN).read_text())
        for name, value in json.loads(json.dumps(vars(arguments), default=str)).items():
            before = run["arguments"].get(name)
            if value != before and name not in ("uri", "out", "resume"):
                changes.append(f"--{name.replace('_', '-')} was {before} and is {value}")
        accelerator.load_state(str(path))
        return run["step"], run["validated"], changes
    except DAMAGED as error:
        why = " ".join(str(error).split())[:200] or type(error).__name__
        advice = "Use the arguments of the run. If the checkpoint is damaged, remove it, and start again"
        raise ValueError(f"{path} cannot be loaded. {'; '.join([*changes, advice])}: {why}") from error
