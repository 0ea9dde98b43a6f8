"""Compare the steps per second of LeRobot's training script with a Loader, and with its own DataLoader.

    python benchmarks/lerobot_gpu.py NAME=ROOT [NAME=ROOT ...] [--cores 4 16] [--batch-size 64] [--steps 60] [--rounds 2]
                                     [--image-size HxW] [--data-only] [--device cuda] [--out FILE]

It trains ACT of LeRobot's default size, without pretrained weights, at the recorded frame size. Each run is a process that is
restricted to some cores. LeRobot's DataLoader gets a worker per core, and the Loader a decode thread per core. The side
"repeated" trains on its first batch only, which shows the speed of the GPU without data loading. With --image-size, LeRobot
resizes with torchvision's Resize in its workers. With --data-only, no policy is trained, and batches are only preprocessed. A
Loader keeps decoded frames for later batches, so --steps should then be those of a whole epoch. Run the program in an
environment with LeRobot.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from argument_types import count
from lerobot_programs.trainable import trainable
from program import Rows, on_gpu

from dali_stream.checks.frame_size import frame_size

SIDES = ("stock", "loader", "repeated")
WARMUP = 6  # steps before the timed ones
RUN = Path(__file__).parent / "lerobot_programs" / "run.py"
ACT = ["--policy.type=act", "--policy.pretrained_backbone_weights=null", "--policy.push_to_hub=false", "--wandb.enable=false"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("data", nargs="+", metavar="NAME=ROOT")
    parser.add_argument("--cores", type=count, nargs="+", default=[4, 16])
    parser.add_argument("--batch-size", type=count, default=64)
    parser.add_argument("--steps", type=count, default=60)
    parser.add_argument("--rounds", type=count, default=2)
    parser.add_argument("--sides", nargs="+", default=SIDES, choices=SIDES)
    parser.add_argument("--image-size", type=frame_size, metavar="HxW", help="default: the recorded size")
    parser.add_argument("--data-only", action="store_true", help="train no policy")
    arguments = on_gpu(parser)
    rows = Rows(arguments)
    with tempfile.TemporaryDirectory() as place:
        given = (each.partition("=")[::2] for each in arguments.data)
        datasets = {name: trainable(name, Path(root), Path(place)) for name, root in given}
        for turn, (name, root), cores, side in itertools.product(
            range(arguments.rounds), datasets.items(), arguments.cores, arguments.sides
        ):
            if side == "repeated" and (turn or cores != max(arguments.cores)):
                continue
            rows.add({"data": name, "cores": cores, "side": side, **run(Path(place), name, root, cores, side, arguments)})


def run(place: Path, name: str, root: Path, cores: int, side: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the steps and samples per second of a run, and the median time of a step in seconds."""
    folder = Path(tempfile.mkdtemp(dir=place))
    device = "cuda" if arguments.gpu == 0 else arguments.device  # not every version of LeRobot knows "cuda:0"
    spec = {"side": side, "trains": not arguments.data_only, "kill_at": None, "out": str(folder / "out"), "records": "times"}
    (folder / "spec.json").write_text(json.dumps(spec))
    command = [
        *(sys.executable, str(RUN), str(folder / "spec.json"), "--", *ACT, f"--policy.device={device}"),
        *(f"--dataset.repo_id=local/{name}", f"--dataset.root={root}"),
        *(f"--output_dir={folder / 'run'}", f"--steps={arguments.steps}", f"--batch_size={arguments.batch_size}"),
        *("--save_checkpoint=false", "--log_freq=10", f"--num_workers={cores}"),
        *(resized(side, arguments.image_size) if arguments.image_size else ()),
    ]
    used = sorted(os.sched_getaffinity(0))[:cores]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, preexec_fn=lambda: os.sched_setaffinity(0, used)
    )
    if done.returncode:
        return {"error": (done.stderr or done.stdout)[-1500:]}
    entries = [json.loads(line) for line in (folder / "out.0").read_text().splitlines()]
    times = [entry["time"] for entry in entries if "time" in entry][WARMUP:]
    steps = [later - earlier for earlier, later in itertools.pairwise(times)]
    return {
        "steps_per_s": round(len(steps) / (times[-1] - times[0]), 2),
        "samples_per_s": round(len(steps) * arguments.batch_size / (times[-1] - times[0])),
        "median_step_s": round(statistics.median(steps), 4),
    }


def resized(side: str, size: tuple[int, int]) -> list[str]:
    """Return the arguments for frames of a size (height, width): of the Loader, or of torchvision's Resize in the workers.

    Args:
        side: "loader", or another side of `run.py`.
        size: Size in pixels.
    """
    height, width = size
    if side == "loader":
        return [f"--loader.image_size={height}x{width}"]
    resize = f"{{resize: {{weight: 1.0, type: Resize, kwargs: {{size: [{height}, {width}]}}}}}}"
    transforms = "--dataset.image_transforms"
    return [f"{transforms}.enable=true", f"{transforms}.max_num_transforms=1", f"{transforms}.tfs={resize}"]


if __name__ == "__main__":
    main()
