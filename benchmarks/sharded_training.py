"""Train the same policy with each kind of shuffle, and compare losses on training and validation episodes.

    dali-stream demo --root DIR --episodes 56 --size 120x160
    python benchmarks/sharded_training.py DIR --out benchmarks/results/sharded_training_2cores.json
    python benchmarks/sharded_training.py --report benchmarks/results/sharded_training_2cores.json    # prints its table

It runs pipelines/train.py with `--shuffle` true, global and sharded, several seeds each, one run after the other, with one
thread each. A seed determines weights, order and augmentation, so the runs of a seed start with the same weights.

A run has one process, which trains as several processes do: the order does not depend on the number of ranks, so the one
process has the global batches of all ranks, and the mean of their gradients is the gradient of the global batch. The policy
has no dropout and no batch norm. Before the runs, the program compares the losses of --ranks processes (gloo) and of one, over
several epochs of CHECK_EPISODES episodes: with a learning rate of 0, where equal batches have equal losses, and with that of
the runs, where rounding makes the weights differ more with each step. To measure what rounding does, it also compares two runs
of one process, one of which has the AVX2 kernels of PyTorch.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from argument_types import count, new_file

from dali_stream import Dataset
from dali_stream.checks.frame_size import frame_size, join_sizes
from dali_stream.tools import environment

TRAIN = Path(__file__).parents[1] / "pipelines/train.py"
SHUFFLES = ("true", "global", "sharded")
CHECK_STEPS, CHECK_EPISODES = 60, 8
LAST = 100  # steps over which the final loss is averaged
OPTIONS = ["--device", "cpu", "--chunk", 20, "--learning-rate", 5e-4, "--log-every", 1, "--num-threads", 1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("root", nargs="?", type=Path, help="folder of the dataset")
    parser.add_argument("--seeds", type=count, default=3, help="runs of each kind of shuffle")
    parser.add_argument("--steps", type=count, default=420)
    parser.add_argument("--check-steps", type=count, default=CHECK_STEPS, help="steps of the runs that are compared before")
    parser.add_argument("--ranks", type=count, default=4, help="processes that are compared with one process before the runs")
    parser.add_argument("--batch-size", type=count, default=32, help="samples of a global batch")
    parser.add_argument("--image-size", type=frame_size, default=(64, 64), metavar="HxW")
    parser.add_argument("--val-episodes", type=count, default=16)
    parser.add_argument("--val-every", type=count, default=210, help="steps between validations")
    parser.add_argument("--out", type=new_file, help="write the report after each run")
    parser.add_argument("--report", type=Path, help="print the table of this report, and train nothing")
    arguments = parser.parse_args(join_sizes())
    if arguments.report:
        print(table(json.loads(arguments.report.read_text())))
        return
    if arguments.root is None:
        parser.error("the folder of a dataset is required without --report")
    report = measure(arguments)
    print(table(report))


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Train all runs. Return the report."""
    dataset, steps = Dataset(arguments.root), arguments.steps
    size = "x".join(map(str, arguments.image_size))
    given = ["--batch-size", arguments.batch_size, "--image-size", size]
    long = [*given, "--max-steps", steps, "--val-every", arguments.val_every, "--val-episodes", arguments.val_episodes]
    report: dict[str, Any] = {
        "dataset": {"name": arguments.root.name, "episodes": dataset.num_episodes, "frames": dataset.num_frames},
        "options": list(map(str, [*OPTIONS, *long])),
        "ranks": arguments.ranks,
        "one_process_and_ranks": compare_ranks(
            arguments.root,
            *given,
            "--val-episodes",
            max(dataset.num_episodes - CHECK_EPISODES, 0),
            ranks=arguments.ranks,
            steps=arguments.check_steps,
        ),
        "last": min(LAST, steps),
        "runs": [],
        **environment.ran_on("cpu"),
    }
    for seed in range(arguments.seeds):
        for shuffle in SHUFFLES:
            journal = train(arguments.root, *long, "--shuffle", shuffle, "--seed", seed)
            found = losses(journal)
            report["runs"].append({
                "shuffle": shuffle,
                "seed": seed,
                "epochs": epochs(journal),
                "train_loss": statistics.mean(found[-LAST:]),
                "val_error": [entry["val_error"] for entry in journal if "val_error" in entry],
                "mean_error": next(entry["mean_error"] for entry in journal if "mean_error" in entry),
            })  # fmt: skip
            print(environment.report_json(report["runs"][-1]), file=sys.stderr, flush=True)
            if arguments.out:
                environment.write_report(arguments.out, report)
    return report


def compare_ranks(root: Path, *options: object, ranks: int, steps: int) -> dict[str, Any]:
    """Return the differences between the losses of several processes and of one, for each learning rate and step.

    "differences_of_kernels" are those between two runs of one process, see above.
    """
    short = [*options, "--max-steps", steps, "--shuffle", "sharded"]
    found: dict[str, Any] = {}
    for rate in (0, 5e-4):
        one, several = (train(root, *short, "--learning-rate", rate, processes=processes) for processes in (1, ranks))
        found["epochs"] = epochs(one)
        found[f"differences_at_{rate}"] = [abs(a - b) for a, b in zip(losses(one), losses(several), strict=True)]
    rounded = losses(train(root, *short, variables={"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}))
    found["differences_of_kernels"] = [abs(a - b) for a, b in zip(losses(one), rounded, strict=True)]
    return found


def train(root: Path, *options: object, processes: int = 1, variables: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
    """Train once, and return the entries of the journal.

    Args:
        root: Folder of the dataset.
        options: Options of train.py.
        processes: Number of processes. Default: 1.
        variables: Environment variables of the run. Default: none.

    Raises:
        RuntimeError: If the run fails.
    """
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", processes] if processes > 1 else []
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        line = list(map(str, [sys.executable, *launcher, TRAIN, root, "--out", out, *OPTIONS, *options]))
        done = subprocess.run(
            line, env={**os.environ, "OMP_NUM_THREADS": "1", **(variables or {})}, capture_output=True, text=True
        )
        if done.returncode:
            raise RuntimeError(f"train.py failed: {done.stderr[-3000:]}")
        return [json.loads(entry) for entry in (out / "metrics.jsonl").read_text().splitlines()]


def losses(journal: list[dict[str, Any]]) -> list[float]:
    """Return the loss of each step."""
    return [entry["loss"] for entry in journal if "loss" in entry]


def epochs(journal: list[dict[str, Any]]) -> int:
    """Return the number of epochs that the run has begun."""
    return max(entry["epoch"] for entry in journal if "epoch" in entry) + 1


def table(report: dict[str, Any]) -> str:
    """Return the table of docs/order.md: means and standard deviations over the seeds, and the results of each seed."""
    lines = [
        "| `--shuffle` | training loss | of each seed | validation error | of each seed |",
        "|---|---|---|---|---|",
    ]
    for shuffle in SHUFFLES:
        runs = [run for run in report["runs"] if run["shuffle"] == shuffle]
        parts = []
        for values in ([run["train_loss"] for run in runs], [run["val_error"][-1] for run in runs]):
            deviation = f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""
            parts += [f"{statistics.mean(values):.3f}{deviation}", ", ".join(f"{value:.3f}" for value in values)]
        lines.append(f"| {shuffle} | {' | '.join(parts)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
