"""The command line of `train.py`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments; exits where they are none."""
    parser = argparse.ArgumentParser(description="Behaviour cloning with action chunks")
    add = parser.add_argument
    add("uri", help="a LeRobot v3 dataset")
    add("--out", type=Path, required=True, help="folder of the run")
    add("--resume", action="store_true", help="go on from the checkpoint in --out; without one there, start")
    add("--max-steps", type=int, default=20_000)
    add("--batch-size", type=int, default=32, help="samples of a step, of all processes together")
    add("--chunk", type=int, default=50, help="actions of a chunk, a frame apart")
    add("--image-size", type=int, nargs=2, default=[224, 224], metavar=("HEIGHT", "WIDTH"))
    add("--policy", choices=("compact", "lerobot-act"), default="compact", help="that of training/policy.py, or LeRobot's ACT")
    add("--from-scratch", action="store_true", help="lerobot-act without ImageNet's weights, which it downloads")
    add("--dummy", action="store_true", help="no model: how fast batches come")
    add("--learning-rate", type=float, default=3e-4, help="its peak, between warm-up and a cosine")
    add("--weight-decay", type=float, default=1e-4)
    add("--clip", type=float, default=1.0, help="largest norm of the gradient")
    add("--val-episodes", type=int, default=0, help="episodes held out, evenly spread, to validate on")
    add("--val-every", type=int, default=1000, help="steps")
    add("--save-every", type=int, default=500, help="steps")
    add("--log-every", type=int, default=10, help="steps")
    add("--seed", type=int, default=0, help="of weights, order and augmentation")
    add("--consumers", type=int, help="of the order; chosen for --batch-size unless given. A run can continue on any number of "
        "processes that divides it")  # fmt: skip
    add("--threads", type=int, help="of each process's decoders; its cores unless given")
    add("--device", choices=("auto", "cpu"), default="auto")
    add("--revision", help="of a dataset on the Hub")
    add("--data-files-root", help="where data/ and videos/ lie, if not beside meta/")
    add("--cache-dir", help="folder for fetched bytes of a remote dataset")
    arguments = parser.parse_args(argv)
    for name in ("max_steps", "batch_size", "chunk", "val_every", "save_every", "log_every"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(arguments, name)}; give 1 or more")
    if min(arguments.image_size) < 32:
        parser.error(f"--image-size is {arguments.image_size}; give 32 or more, what a policy makes one token of")
    if arguments.clip <= 0:
        parser.error(f"--clip is {arguments.clip}; give more than 0, the largest norm that a gradient keeps")
    return arguments
