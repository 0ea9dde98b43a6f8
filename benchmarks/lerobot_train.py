"""Compare LeRobot's training script on a Loader with the same script on its own DataLoader, and test that it resumes.

    python benchmarks/lerobot_train.py --data NAME=ROOT [--data NAME=ROOT ...] [--only PART ...] [--out FILE]

Run the program in an environment with LeRobot. See `make test-lerobot`. It trains small ACT and Diffusion policies on the CPU,
with one thread each. If a dataset lacks actions, as a bare recording does, or statistics, the program adds them to a copy.
It checks for each policy and dataset:

losses       all 15 losses equal those of the script's own DataLoader in the same order, with frames of the recorded size
resumed      a run that resumes after 5 steps, in the middle of an epoch, or after 10 steps, at its end, has the losses and
             frames of an uninterrupted run
transforms   a run with image_transforms that resumes in the middle of an epoch, with worker processes, has the losses and
             frames of an uninterrupted run without them, for ACT on the first dataset and Diffusion on the last
streaming    with streaming=true, the losses equal those of the dataset on disk, for the same policies and datasets

It checks for the first dataset that two ranks deliver 800 frames without a repetition; that a run that is killed on two ranks,
then killed on one, and continued on two, delivers each frame of the epoch once; that LeRobot alone computes the same actions of
an ACT policy from recorded frames as from those of a Loader with --loader.image_size, also after --policy.path has continued
it, at the same and at another size. With LeRobot 0.6 or later, it also checks that an evaluation has the same loss, and batches
the same depth maps, as with LeRobot's DataLoader. With LeRobot after 0.6.1, it checks that exclude_episodes has the losses of
LeRobot's DataLoader, and that ranks started by `accelerate launch` deliver distinct frames. The speed is measured by
lerobot_gpu.py.

The exit code is 1 if a check fails.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from argument_types import new_file

import dali_stream

os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}  # inherited by all runs

from lerobot_programs import deploy
from lerobot_programs.comparison import NEWER, Comparison, Failed, Run
from lerobot_programs.trainable import trainable

PARTS = ("policies", "ranks", "newer", "depth", "deployment", "evaluation")
STEPS = 15
SIZE = (32, 32)  # size of frames in runs that are not compared with LeRobot's own DataLoader
OTHER_SIZE = (48, 64)
POLICIES = {
    "act": [
        *("--policy.type=act", "--policy.pretrained_backbone_weights=null", "--policy.dim_model=32", "--policy.n_heads=2"),
        *("--policy.dim_feedforward=64", "--policy.n_encoder_layers=1", "--policy.n_vae_encoder_layers=1"),
        *("--policy.chunk_size=10", "--policy.n_action_steps=10"),
    ],
    "diffusion": [
        *("--policy.type=diffusion", "--policy.pretrained_backbone_weights=null", "--policy.use_group_norm=true"),
        *("--policy.down_dims=[32,64]", "--policy.diffusion_step_embed_dim=32"),
        *("--policy.crop_shape=[28,28]", "--policy.spatial_softmax_num_keypoints=8"),
    ],
}
DROP_LAST = {"act": 0, "diffusion": 7}
JITTER = ["--dataset.image_transforms.enable=true", "--dataset.image_transforms.max_num_transforms=2"]
LOADER = [f"--loader.image_size={SIZE[0]}x{SIZE[1]}", "--loader.num_threads=1"]
NEW = importlib.metadata.version("lerobot") >= "0.6"


def equal(ours: Sequence[Any], theirs: Sequence[Any], wanted: int) -> tuple[bool, str]:
    """Return whether both sequences have the same `wanted` values, and a text with the number of equal values."""
    same = sum(our_value == their_value for our_value, their_value in zip(ours, theirs, strict=False))
    return same == wanted == len(ours) == len(theirs), f"{same} of {wanted}"


def both(comparison: Comparison, arguments: Sequence[str], drop_n_last_frames: int = 0) -> tuple[Run, Run]:
    """Run the script on LeRobot's DataLoader in the Loader's order, and on a Loader. Frames have the recorded size."""
    common = [*arguments, "--num_workers=0", "--save_checkpoint=false"]
    stock, _ = comparison.run("ordered", common, drop_n_last_frames=drop_n_last_frames)
    ours, _ = comparison.run("loader", [*common, "--loader.num_threads=1"])
    return stock, ours


def of_dataset(name: str, root: Path, policy: str) -> list[str]:
    return [f"--dataset.repo_id=local/{name}", f"--dataset.root={root}", *POLICIES[policy]]


def continued(output: Path, step: int, steps: int) -> list[str]:
    """Return the arguments of a run that resumes a checkpoint.

    A newer script saves the number of its processes as dp_replicate, and replaces 1 with the number of this run.
    """
    config = output / f"checkpoints/{step:06d}/pretrained_model/train_config.json"
    processes = ["--parallelism.dp_replicate=1"] if NEWER else []
    return ["--resume=true", f"--config_path={config}", f"--steps={steps}", *processes]


def compare_losses(comparison: Comparison, name: str, root: Path, policy: str, more: Sequence[str] = ()) -> None:
    arguments = [*of_dataset(name, root, policy), *more, f"--steps={STEPS}", "--batch_size=2"]

    def losses() -> tuple[bool, Any]:
        stock, ours = both(comparison, arguments, DROP_LAST[policy])
        same, detail = equal(ours.losses, stock.losses, STEPS)
        return same and ours.index == stock.index and ours.frames == stock.frames, {
            "equal": detail,
            "same frames": ours.index == stock.index,
            "frames": ours.frames,
            "losses": ours.losses,
        }

    label = f"{policy} on {name}{f' with {more[-1]}' if more else ''}"
    comparison.attempt(f"{label}: losses equal those of LeRobot's DataLoader", losses)


def of_epoch(name: str, root: Path, policy: str) -> list[str]:
    """Return the arguments of a run whose epochs have 10 steps, with a checkpoint every 5 steps."""
    episode = dali_stream.Dataset(root, episodes=[0])
    batch_size = math.ceil((int(episode.lengths[0]) - DROP_LAST[policy]) / 10)
    short = ["--dataset.episodes=[0]", f"--batch_size={batch_size}", "--save_freq=5", "--num_workers=0"]
    return [*of_dataset(name, root, policy), *short, *LOADER]


def compare_resumed(
    comparison: Comparison, name: str, root: Path, policy: str, more: Sequence[str] = (), at: Sequence[int] = (5, 10)
) -> Run | None:
    """Compare runs that resume after some steps with an uninterrupted run. Return the uninterrupted run, or None on failure."""
    label = f"{policy} on {name}{' with image_transforms' if more else ''}"
    try:
        whole, output = comparison.run("loader", [*of_epoch(name, root, policy), *more, f"--steps={STEPS}"])
    except Failed as error:
        comparison.check(f"{label}: uninterrupted", False, str(error))
        return None

    def resumed(step: int) -> tuple[bool, Any]:
        # All other arguments are those in the checkpoint. Transforms are applied by workers now.
        workers = ["--num_workers=2"] if more else []
        rest, _ = comparison.run("loader", [*continued(output, step, STEPS), "--save_checkpoint=false", *workers])
        same, detail = equal(rest.losses, whole.losses[step:], STEPS - step)
        return same and rest.index == whole.index[step:], detail

    for step in at:
        where = "in mid-epoch" if step % 10 else "at the end of an epoch"
        comparison.attempt(f"{label}: resumed {where} equals uninterrupted", functools.partial(resumed, step))
    return whole


def compare_more(comparison: Comparison, name: str, root: Path, policy: str) -> None:
    """Compare runs with image transforms, resumed and with streaming."""
    whole = compare_resumed(comparison, name, root, policy, JITTER, at=(5,))

    def streamed() -> tuple[bool, Any]:
        arguments = [*of_epoch(name, root, policy), *JITTER, "--steps=5", "--save_checkpoint=false"]
        ours, _ = comparison.run("loader", [*arguments, "--dataset.streaming=true"])
        same, detail = equal(ours.losses, whole.losses[:5] if whole else [], 5)
        return same and whole is not None and ours.index == whole.index[:5], detail

    comparison.attempt(f"{policy} on {name}: streaming=true gives the same losses", streamed)


def check_ranks(comparison: Comparison, name: str, root: Path) -> None:
    arguments = [*of_dataset(name, root, "act"), "--num_workers=0", *LOADER]

    def distinct(**launched: bool) -> tuple[bool, Any]:
        short = [*arguments, "--steps=20", "--batch_size=20", "--save_checkpoint=false"]
        run, _ = comparison.run("loader", short, ranks=2, **launched)
        seen = [index for rank in run.ranks for batch in rank for index in batch]
        return len(seen) == len(set(seen)) == 800, f"{len(set(seen))} of {len(seen)}"

    comparison.attempt("two ranks: distinct frames", distinct)
    if NEWER:
        name = "two ranks of accelerate launch: distinct frames"
        comparison.attempt(name, functools.partial(distinct, accelerate=True))

    def killed() -> tuple[bool, Any]:
        """Kill two ranks in step 7, after step 4 was saved, then one rank in step 11, after step 8. Two ranks read the rest."""
        frames = int(dali_stream.Dataset(root).lengths[0])
        batch_size = min(8, frames // 40)  # the demo's episodes are short
        short = [*arguments, "--dataset.episodes=[0]", f"--batch_size={batch_size}", "--save_freq=4", "--steps=1000"]
        first, output = comparison.run("loader", short, ranks=2, kill_at=7, trains=False)
        second, _ = comparison.run(
            "loader", continued(output, 4, 1000), kill_at=7, trains=False, output=str(output)
        )  # the seventh step of this process is step 11
        steps = 8 + math.ceil((frames - 4 * 3 * batch_size) / (2 * batch_size))
        third, _ = comparison.run("loader", [*continued(output, 8, steps), "--save_checkpoint=false"], ranks=2, trains=False)
        seen = [index for rank in first.ranks for batch in rank[:4] for index in batch]
        seen += [index for batch in second.index[:4] for index in batch]
        seen += [index for rank in third.ranks for batch in rank for index in batch]
        lost = frames - len(set(seen))
        return sorted(seen) == sorted(
            set(seen)
        ) and not lost, f"{len(seen)} frames, {len(seen) - len(set(seen))} twice, {lost} lost"

    comparison.attempt("killed on 2 ranks, then on 1, continued on 2: each frame of the epoch once", killed)


def check_newer(comparison: Comparison, name: str, root: Path) -> None:
    """Check settings that LeRobot 0.6.1 does not have."""
    compare_losses(comparison, name, root, "act", ["--dataset.episodes=[0,1,2]", "--dataset.exclude_episodes=[1]"])


def check_depth(comparison: Comparison, folder: Path) -> None:
    """Check the depth maps of batches, and the losses of a policy that does not look at them: no policy of 0.6.1 does."""
    written = folder / "depth"
    writer = Path(__file__).parent / "lerobot_programs" / "write_depth.py"
    subprocess.run([sys.executable, str(writer), str(written)], check=True, capture_output=True)
    top, state = '{"type": "VISUAL", "shape": [3, 96, 128]}', '{"type": "STATE", "shape": [2]}'
    inputs = f'{{"observation.images.top": {top}, "observation.state": {state}}}'
    for name in ("video", "images"):
        arguments = [*of_dataset(name, written / name, "act"), f"--policy.input_features={inputs}"]
        arguments += [f"--steps={STEPS}", "--batch_size=4"]

        def depth(arguments: list[str] = arguments) -> tuple[bool, Any]:
            stock, ours = both(comparison, arguments)
            same_depth, maps = equal(ours.depth, stock.depth, STEPS)
            same_losses, losses = equal(ours.losses, stock.losses, STEPS)
            cameras = sorted({key for batch in ours.depth for key in batch})
            passed = same_depth and same_losses and ours.index == stock.index and len(cameras) == 2
            return passed, {"equal batches": maps, "equal losses": losses, "cameras": cameras}

        comparison.attempt(f"depth stored as {name} and the losses are those of LeRobot's DataLoader", depth)


def check_deployment(comparison: Comparison, name: str, root: Path) -> None:
    """Check what the preprocessor in a checkpoint makes of recorded frames, and runs that begin with such a checkpoint."""
    data = of_dataset(name, root, "act")
    short = ["--steps=2", "--batch_size=4", "--save_freq=2", "--num_workers=0", "--loader.num_threads=1"]
    sizes = {"trained": SIZE, "--policy.path": SIZE, "--policy.path with another size": OTHER_SIZE}
    options = {
        "trained": [*data, f"--loader.image_size={SIZE[0]}x{SIZE[1]}"],
        "--policy.path": [],
        "--policy.path with another size": [f"--loader.image_size={OTHER_SIZE[0]}x{OTHER_SIZE[1]}"],
    }
    checkpoint: Path | None = None
    for label, size in sizes.items():

        def deployed(label: str = label, size: tuple[int, int] = size) -> tuple[bool, Any]:
            nonlocal checkpoint
            path = [] if checkpoint is None else [*data[:2], f"--policy.path={checkpoint / 'pretrained_model'}"]
            _, output = comparison.run("loader", [*path, *options[label], *short])
            checkpoint = output / "checkpoints/000002"
            found = deploy.differences(checkpoint, root, size)
            # The Loader's frames are rounded to uint8.
            return found["frames"] <= 1 / 255 and found["actions"] < found["actions without resizing"] / 10, found

        comparison.attempt(f"deployed with LeRobot alone, {label}: the Loader's frames and actions", deployed)


def check_evaluation(comparison: Comparison, name: str, root: Path) -> None:
    # LeRobot divides the episodes of each task, so two episodes of one task are needed.
    tasks = pq.read_table(root / "meta/episodes", columns=["tasks"])["tasks"].to_pylist()
    pair = [episode for episode, task in enumerate(tasks) if task == tasks[0]][:2]
    for most in (0, 20):
        arguments = [*of_dataset(name, root, "act"), f"--dataset.episodes={pair}", "--dataset.eval_split=0.5", "--eval_steps=2"]
        arguments += ["--steps=2", "--batch_size=8", f"--max_eval_samples={most}"]

        def evaluated(arguments: list[str] = arguments) -> tuple[bool, Any]:
            stock, ours = both(comparison, arguments)
            return bool(ours.evals) and ours.evals == stock.evals, {"loader": ours.evals, "stock": stock.evals}

        comparison.attempt(f"evaluation with max_eval_samples={most} has the loss of LeRobot's own", evaluated)


def main() -> int:
    arguments = parsed()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        datasets = {name: trainable(name, root, folder) for name, root in arguments.data}
        comparison = Comparison(folder, list(datasets), arguments.out)
        names = list(datasets)
        first = (names[0], datasets[names[0]])
        if "policies" in arguments.only:
            for name, root in datasets.items():
                for policy in POLICIES:
                    compare_losses(comparison, name, root, policy)
                    compare_resumed(comparison, name, root, policy)
            for policy, name in zip(POLICIES, (names[0], names[-1]), strict=True):
                compare_more(comparison, name, datasets[name], policy)
        if "ranks" in arguments.only:
            check_ranks(comparison, *first)
        if "newer" in arguments.only and NEWER:
            check_newer(comparison, *first)
        if "depth" in arguments.only and NEW:
            check_depth(comparison, folder)
        if "deployment" in arguments.only:
            check_deployment(comparison, *first)
        if "evaluation" in arguments.only and NEW:
            check_evaluation(comparison, *first)
    passed = sum(check["passed"] for check in comparison.checks)
    print(f"{passed} of {len(comparison.checks)} checks passed")
    return 0 if passed == len(comparison.checks) else 1


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--data", type=named, action="append", required=True, metavar="NAME=ROOT", help="a dataset of v3.0")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="parts of the comparison")
    parser.add_argument("--out", type=new_file, help="file for the report")
    return parser.parse_args()


def named(text: str) -> tuple[str, Path]:
    """Parse NAME=ROOT as the name and the folder of a dataset."""
    name, _, root = text.partition("=")
    if not name or not (Path(root) / "meta/info.json").is_file():
        raise argparse.ArgumentTypeError(f"{text!r} must be NAME=ROOT, with the folder of a dataset")
    return name, Path(root)


if __name__ == "__main__":
    sys.exit(main())
