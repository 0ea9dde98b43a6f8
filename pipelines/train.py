"""Behaviour cloning with action chunks, predicted from frames, state and task, on one or many GPUs.

python pipelines/train.py URI --out DIR [--resume] [--max-steps N] [--val-episodes N] ...
accelerate launch --multi_gpu --num_processes 8 pipelines/train.py URI --out DIR ...                 one process per GPU
accelerate launch --multi_gpu --num_processes 2 pipelines/train.py URI --out DIR --device cpu ...    on a CPU

With --multi_gpu, Accelerate starts several processes, also on a CPU. With `accelerate launch --cpu`, it starts only one process
and ignores --num_processes. `torchrun --nproc-per-node N` also starts N processes. The output says how many processes train.

URI may also be a mixture file (.yaml, .yml or .json) of several datasets. See docs/mixtures.md.

The program writes a checkpoint of Accelerate (model, optimizer and loader) to DIR/checkpoints, metrics.jsonl and the files of
other trackers to DIR, and at the end loss.png and chunks.png. With --show EPOCH BATCH, it draws the batch of any step to
batch.png. See docs/replay.md.

With --resume, a run that was killed continues from its last checkpoint, with the next sample. The number of processes may
change, but it must divide --consumers. --batch-size is the number of samples of all processes together, so the batches stay the
same.

On SIGTERM or Ctrl-C, the program finishes the current batch and saves the run, and each process exits with 143 or 130. torchrun
and accelerate launch exit with 1 instead. They kill the processes after 30 s, or after TORCH_ELASTIC_SHUTDOWN_TIMEOUT seconds.
If a checkpoint cannot be written, the program exits with 1, and the previous checkpoint remains.

The program requires tensorboard and matplotlib: pip install -c constraints.txt '.[train]' in the checkout.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from dali_stream.checks.frame_size import frame_size, join_sizes


class _Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Formatter that shows defaults other than None and False, and does not wrap the description."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        nothing = action.default is None or action.default is False
        return action.help if nothing else super()._get_help_string(action)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line. Exit if it is invalid."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_Help)
    add = parser.add_argument
    add("uri", help="a LeRobot dataset, or a mixture file of several: .yaml, .yml or .json")
    add("--out", type=Path, required=True, help="folder of the run")
    add("--resume", action="store_true", help="continue from the checkpoint in --out, or start if it has none")
    add("--show", nargs=2, type=int, metavar=("EPOCH", "BATCH"), help="do not train, but draw this batch of the run, by its "
        "entry in metrics.jsonl, to batch.png; the other arguments must be those of the run")  # fmt: skip
    add("--max-steps", type=int, default=20_000, help="steps of the optimizer, over all epochs")
    add("--batch-size", type=int, default=32, help="samples per step of all processes together")
    add("--chunk", type=int, default=50, help="actions per chunk, one per frame")
    size = "size of the frames that the policy gets, in pixels; HEIGHT WIDTH also works"
    add("--image-size", type=frame_size, default="224x224", metavar="HxW", help=size)
    add("--policy", choices=("compact", "lerobot-act"), default="compact", help="compact: the policy of training/policy.py; "
        "lerobot-act: LeRobot's ACT")  # fmt: skip
    add("--from-scratch", action="store_true", help="start lerobot-act without ImageNet weights, which it would download")
    rate = "peak of the learning rate, after the warm-up and before the cosine decay"
    add("--learning-rate", type=float, default=3e-4, help=rate)
    add("--weight-decay", type=float, default=1e-4, help="weight decay of AdamW")
    add("--clip", type=float, default=1.0, help="largest norm of the gradient")
    add("--val-episodes", type=int, default=0, help="episodes of each dataset held out to validate on, evenly spread")
    add("--val-every", type=int, default=1000, help="steps between validations")
    add("--save-every", type=int, default=500, help="steps between checkpoints")
    add("--log-every", type=int, default=10, help="steps between entries of metrics.jsonl and of the other trackers")
    trackers = "trackers of Accelerate, such as tensorboard and wandb, in addition to metrics.jsonl"
    add("--log-with", nargs="*", default=["tensorboard"], metavar="NAME", help=trackers)
    add("--seed", type=int, default=0, help="seed of weights, order and augmentation")
    add("--shuffle", choices=("true", "sharded", "global"), default="true", help="true: pools of episodes; sharded: the same, "
        "with the same frames for a process in all epochs, so that the memory of all processes adds up; global: a permutation "
        "of all frames (default: true)")  # fmt: skip
    add("--consumers", type=int, help="consumers of the order; a run can continue on any number of processes that divides it "
        "(default: chosen for --batch-size)")  # fmt: skip
    add("--num-threads", type=int, help="decode threads of each process (default: its cores)")
    add("--device", choices=("auto", "cpu"), default="auto", help="auto: the GPU if one exists")
    add("--revision", help="branch, tag or commit of a dataset on the Hub (default: its main branch)")
    add("--data-files-root", help="address of data/ and videos/, if they are not beside meta/")
    add("--cache-dir", help="folder for fetched bytes of a remote dataset")
    add("--frame-cache", help="folder for decoded frames, which all processes of a machine and later runs share")
    add("--frame-cache-bytes", help="size limit of --frame-cache, such as 200GiB (default: none on a disk)")
    add("--clock", choices=("timestamp", "frame_index"), help="column that locates the frame of a row; frame_index for "
        "wall-clock timestamps (default: timestamp)")  # fmt: skip
    add("--tolerance-s", type=float, help="largest distance of a frame from its row's time in seconds (default: a quarter of a "
        "frame)")  # fmt: skip
    add("--give-up-after-s", type=float, help="time limit of a request for remote data with all attempts, in seconds "
        "(default: 60)")  # fmt: skip
    add("--on-error", choices=("raise", "substitute"), default="raise", help="substitute: replace samples that cannot be read "
        "or decoded by others of the batch, and count them")  # fmt: skip
    arguments = parser.parse_args(join_sizes(argv))
    for name in ("max_steps", "batch_size", "chunk", "val_every", "save_every", "log_every"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be 1 or more, got {getattr(arguments, name)}")
    if min(arguments.image_size) < 32:
        size = "x".join(map(str, arguments.image_size))
        parser.error(f"--image-size must be 32x32 or more, since a policy makes one token of 32x32 pixels, got {size}")
    if arguments.clip <= 0:
        parser.error(f"--clip must be greater than 0, the largest norm that a gradient keeps, got {arguments.clip}")
    return arguments


def main(argv: Sequence[str] | None = None) -> None:
    """Train. Exit with 143 or 130 if SIGTERM or Ctrl-C ends the run early, and with 1 if the disk of --out is full."""
    arguments = parse(argv)
    if os.environ.get("RANK", "0") == "0":
        print(f"train.py: opening {arguments.uri}", file=sys.stderr, flush=True)
    from training import run  # imports torch, which takes seconds

    run.main(arguments)


if __name__ == "__main__":
    # Threads of OpenMP sleep while they wait, so that they leave a CPU with other work to it. torch reads this on import.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("GOMP_SPINCOUNT", "0")
    main()
