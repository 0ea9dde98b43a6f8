"""Compare this Loader with others in one run, in turns, on the same dataset and in the same order of (episode, frame).

    python benchmarks/peers.py ROOT [--lerobot-python VENV/bin/python] [--mode single|sarm|action_chunk]
                                    [--image-size HxW] [--json] [--out FILE]

    LEROBOT_STREAMING_SOURCE   checkout of LeRobot after pull request 3917, with its new streaming class (default: none)

dali_stream          this package's Loader
torchcodec           a plain loop around torchcodec with a thread per core, each with a decoder per file
lerobot, N workers   LeRobotDataset in PyTorch's DataLoader
lerobot-uint8, N ... the same with return_uint8=True, as in LeRobot's training script; batches are converted to float32
lerobot-streaming    StreamingLeRobotDataset; since it shuffles by itself, its frames are checked, but not their order
lerobot-new-streaming, N workers, T threads, and lerobot-new-streaming-uint8, ...
                     the StreamingLeRobotDataset of LEROBOT_STREAMING_SOURCE, with 0 and 1 workers (it allows no more) and with
                     decode_threads=2 (its default) and 4, in the environment with LeRobot
torchcodec-cuda      the plain loop with NVDEC, which decodes on the CPU what NVDEC cannot decode

Each of these loaders is called a side below. All sides deliver float32 frames in [0, 1] of all cameras on the same device. The
plain loop delivers no columns other than index, episode_index and frame_index. With --image-size, frames are resized with
antialiasing: by LeRobot with torchvision's Resize in its image_transforms, and by the plain loop with torch's interpolate.

Each turn of a side runs in a new process, which ends before the turn of the next side. Therefore no decoded frames are kept
between turns, and only one side runs at a time. dali_stream keeps decoded frames for later batches. It is timed over its whole
first epoch after the first batch, and then over one or more whole epochs with at least --batches batches. The other sides
decode every frame each time. They are timed over --batches batches after a warm-up, and both rates of dali_stream are compared
with this rate, turn by turn. The time of the first batch starts with opening the dataset, after all imports and with an empty
cache of LeRobot. Memory is that of all processes of a side, with shared memory counted once, measured every half second.

The rows of all samples are compared with the order. Frames of the last batch of each timed part are compared with frames that
FFmpeg decodes from the file, and with their neighbours. The exit code is 1 if dali_stream failed or delivered wrong samples.
Errors of other sides are in the report.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from argument_types import count, count_or_none, new_file, positive
from peer_programs import frames
from peer_programs.process import PeerError, run_peer
from peer_programs.recorded import Recorded

import dali_stream
from dali_stream.checks.frame_size import frame_size, join_sizes
from dali_stream.system import cpu
from dali_stream.system.gpu import gpu_index
from dali_stream.tools import environment
from dali_stream.tools.bench.measure import MODES, windows

OWN = "dali_stream"
PROGRAMS = Path(__file__).with_name("peer_programs")


@dataclass
class Side:
    """One loader: how to start it, and its results.

    Attributes:
        spec: Entries of the spec of its program, in addition to those that all programs share. See `spec`.
        follows: Whether it follows a given order.
        keeps: Whether it keeps decoded frames, so that whole epochs are timed.
        source: Checkout whose LeRobot it imports instead of the installed one.
        rounds: Frames/s of each turn. If the side keeps frames, this is the rate of the first epoch.
        second_epoch_rounds: Frames/s of each turn in the epochs after the first. Empty unless the side keeps frames.
        first_batch_rounds: Time to the first batch of each turn, in seconds.
        checks: Result of `frames.check` of each turn.
    """

    name: str
    program: str
    python: str | None = sys.executable
    spec: dict[str, Any] = field(default_factory=dict)
    follows: bool = True
    keeps: bool = False
    source: Path | None = None
    gpu: bool = False
    error: str | None = None
    rounds: list[float] = field(default_factory=list)
    second_epoch_rounds: list[float] = field(default_factory=list)
    first_batch_rounds: list[float] = field(default_factory=list)
    peak_bytes: int | None = None
    checks: list[dict[str, Any]] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)

    def report(self, reference: Side) -> dict[str, Any]:
        """Return the part of the report about this side.

        `speedup` is the median, over the turns, of the rate of `reference` divided by the rate of this side.
        """
        other = self if self is not reference else Side(self.name, self.program)
        return {
            "name": self.name,
            "frames_per_s": median(self.rounds),
            "rounds": self.rounds,
            "second_epoch_frames_per_s": median(self.second_epoch_rounds),
            "second_epoch_rounds": self.second_epoch_rounds,
            "speedup": ratio(reference.rounds, other.rounds),
            "second_epoch_speedup": ratio(reference.second_epoch_rounds, other.rounds),
            "first_batch_s": median(self.first_batch_rounds),
            "first_batch_rounds": self.first_batch_rounds,
            "peak_bytes": self.peak_bytes,
            "follows_the_order": self.follows,
            "frames": frames.merged(self.checks) if self.checks and not self.error else None,
            "error": self.error,
            "versions": self.versions,
        }


def median(values: list[float]) -> float | None:
    """Return the median, or None without values."""
    return statistics.median(values) if values else None


def ratio(ours: list[float], theirs: list[float]) -> float | None:
    """Return the median ratio of corresponding turns, which have a similar load by other programs. None without turns."""
    return median([our_rate / their_rate for our_rate, their_rate in zip(ours, theirs, strict=False)])


def sides(lerobot: str | None, workers: list[int], streaming_source: Path | None) -> list[Side]:
    """Return all sides."""
    new_streaming = [
        Side(
            f"lerobot-new-streaming{'-uint8' * uint8}, {n} workers, {threads} threads",
            "lerobot_stream.py",
            lerobot,
            {"workers": n, "uint8": uint8, "decode_threads": threads},
            follows=False,
            source=streaming_source,
        )
        for uint8 in (False, True)
        for n in (0, 1)
        for threads in (2, 4)
    ]
    return [
        Side(OWN, "ours.py", keeps=True),
        Side("torchcodec", "torchcodec_loop.py"),
        *(Side(f"lerobot, {n} workers", "lerobot_map.py", lerobot, {"workers": n, "uint8": False}) for n in workers),
        *(Side(f"lerobot-uint8, {n} workers", "lerobot_map.py", lerobot, {"workers": n, "uint8": True}) for n in workers),
        Side("lerobot-streaming", "lerobot_stream.py", lerobot, follows=False),
        *(new_streaming if streaming_source else ()),
        Side("torchcodec-cuda", "torchcodec_loop.py", spec={"gpu_decode": True}, gpu=True),
    ]


def main() -> int:
    arguments = parsed()
    try:
        result = measure(arguments)
    except (dali_stream.DaliStreamError, ValueError) as error:
        print(f"peers: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print_table(result)
    if arguments.out:
        environment.write_report(arguments.out, result)
    if arguments.json:
        print(environment.report_json(result))
    loader = result["peers"][0]
    return 0 if not loader["error"] and loader["frames"]["equal"] else 1


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("root", type=Path, help="a local LeRobot v3 dataset with video")
    parser.add_argument("--mode", choices=MODES, default="single")
    parser.add_argument("--batch-size", type=count, default=64)
    parser.add_argument(
        "--batches",
        type=count,
        default=10,
        help="timed batches per turn; with many workers, more than they prefetch (2 each), or the rate is too high",
    )
    parser.add_argument("--image-size", type=frame_size, metavar="HxW", help="default: the recorded size")
    parser.add_argument("--rounds", type=count, default=5, help="turns of each side; the medians are compared")
    parser.add_argument("--warmup", type=count_or_none, default=4, help="untimed batches after the first")
    parser.add_argument(
        "--workers",
        type=count_or_none,
        nargs="+",
        default=[0, 2],
        help="workers of LeRobot's DataLoader; each number is a side",
    )
    parser.add_argument("--threads", type=count, default=cpu.cores(), help="threads of this loader and of the plain loop")
    parser.add_argument("--lerobot-python", help="the Python of an environment with LeRobot")
    parser.add_argument(
        "--only", nargs="+", metavar="SIDE", help="sides to measure, by name or prefix; dali_stream is always included"
    )
    parser.add_argument("--check", type=count, default=16, help="samples per timed part whose frames are compared")
    parser.add_argument("--seed", type=int, default=0, help="seed of the order")
    parser.add_argument("--device", default="auto", help="device of the batches: auto, cpu, cuda or cuda:N")
    parser.add_argument("--turn-s", type=positive, default=1800, help="time limit in seconds for a turn of a side")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--out", type=new_file, help="write the JSON to this file")
    return parser.parse_args(join_sizes())


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run all sides in turns."""
    if not arguments.root.is_dir():
        raise ValueError(f"root must be a folder, since the peers read only local datasets, got {arguments.root}")
    dataset = dali_stream.Dataset(arguments.root.resolve())
    if not dataset.videos:
        raise ValueError(f"dataset must have a camera with video, got {dataset.uri} without one")
    gpu = gpu_index(arguments.device)
    device = "cpu" if gpu is None else f"cuda:{gpu}"
    source = os.environ.get("LEROBOT_STREAMING_SOURCE")
    known = sides(arguments.lerobot_python, arguments.workers, Path(source).resolve() if source else None)
    for name in arguments.only or ():
        if not any(side.name.startswith(name) for side in known):
            raise ValueError(f"--only must name a peer, got {name!r}. Available: {', '.join(side.name for side in known)}")
    chosen = [side for side in known if side.name.startswith(tuple(arguments.only or ("",)))]
    compared = chosen if chosen and chosen[0].name == OWN else [known[0], *chosen]
    deltas = windows(arguments.mode, dataset)
    per_epoch = dataset.num_frames // arguments.batch_size
    if per_epoch < 2:
        raise ValueError(
            f"batch_size must be at most half of the {dataset.num_frames} frames of {dataset.uri}, so that an epoch has two "
            f"batches, got {arguments.batch_size}"
        )
    batches = max(per_epoch + whole_epochs(arguments.batches, per_epoch), 1 + arguments.warmup + arguments.batches)
    recorded = Recorded(dataset, deltas, arguments.batch_size, batches, arguments.seed, arguments.image_size)
    with tempfile.TemporaryDirectory() as folder:
        common = spec(arguments, recorded, deltas, device, Path(folder))
        run(compared, recorded, common, arguments)
    return {
        "root": str(arguments.root),
        "peers": [side.report(compared[0]) for side in compared],
        "arguments": {key: str(value) for key, value in vars(arguments).items()},
        "frames_per_batch": frames_per_batch(recorded, arguments),
        "batches_per_epoch": per_epoch,
        **environment.ran_on(device),
    }


def spec(arguments: argparse.Namespace, recorded: Recorded, deltas: Any, device: str, folder: Path) -> dict[str, Any]:
    """Return the spec that all programs share."""
    order = folder / "order.npz"
    return {
        "root": str(recorded.root),
        "folder": str(folder),
        "order": str(order),
        "files": recorded.write(order),
        "cameras": recorded.cameras,
        "delta_timestamps": deltas,
        "device": device,
        **{"gpu_decode": False, "workers": 0, "uint8": False, "decode_threads": None},  # sides have others
        **{key: getattr(arguments, key) for key in ("batch_size", "image_size", "threads", "seed", "check")},
    }


def run(compared: list[Side], recorded: Recorded, common: dict[str, Any], arguments: argparse.Namespace) -> None:
    """Run all turns of all sides. After an error, a side gets no further turns."""
    for number in range(arguments.rounds):
        for side in compared:
            if side.error is None:
                folder = Path(common["folder"]) / f"{side.name} {number}"
                attempt(side, recorded, common, folder, arguments)


def attempt(side: Side, recorded: Recorded, common: dict[str, Any], folder: Path, arguments: argparse.Namespace) -> None:
    """Run a turn of a side, and check the delivered samples."""
    try:
        turn(side, recorded, common, folder, arguments)
    except PeerError as error:
        side.error = str(error)
        print(f"{side.name}: {side.error}", file=sys.stderr)
    else:
        side.checks.append(frames.check(folder / "results.npz", recorded, side.follows))


def turn(side: Side, recorded: Recorded, common: dict[str, Any], folder: Path, arguments: argparse.Namespace) -> None:
    """Run a turn of a side in a new process, from opening the dataset to the last batch."""
    if side.gpu and common["device"] == "cpu":
        raise PeerError("no GPU")
    if side.python is None:
        raise PeerError("no LeRobot. --lerobot-python must be the Python of an environment with LeRobot")
    per_epoch = recorded.epoch // arguments.batch_size
    # Numbers of batches, each of which is timed separately.
    takes = [1, per_epoch - 1, whole_epochs(arguments.batches, per_epoch)]
    if not side.keeps:
        takes = [1, *([arguments.warmup] if arguments.warmup else []), arguments.batches]
    folder.mkdir()
    answer, results = folder / "answer.json", folder / "results.npz"
    more = {"takes": takes, "answer": str(answer), "results": str(results)}
    (folder / "spec.json").write_text(json.dumps(common | side.spec | more))
    # The programs make no requests to the Hub, and write no files to the user's caches.
    variables = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(folder / "cache"), "HF_LEROBOT_HOME": str(folder / "lerobot")}
    if side.source:
        variables["PYTHONPATH"] = str(side.source / "src")
    command = [side.python, str(PROGRAMS / side.program), str(folder / "spec.json")]
    side.peak_bytes = max(run_peer(command, arguments.turn_s, variables), side.peak_bytes or 0)
    found, per_batch = json.loads(answer.read_text()), frames_per_batch(recorded, arguments)
    side.versions = found["versions"] | (described(side.source) if side.source else {})
    side.first_batch_rounds.append(found["seconds"][0])
    rates = [count * per_batch / seconds for count, seconds in zip(takes, found["seconds"], strict=True)]
    side.rounds.append(rates[1 if side.keeps else -1])
    side.second_epoch_rounds += rates[2:] if side.keeps else []


def described(source: Path) -> dict[str, str]:
    """Return the version of a checkout of LeRobot, as an entry of `versions`."""
    git = ["git", "-C", str(source), "describe", "--always", "--all", "--long", "--abbrev=12"]
    result = subprocess.run(git, capture_output=True, text=True, check=False)
    return {"lerobot": result.stdout.strip() or "a folder without git"}


def whole_epochs(batches: int, per_epoch: int) -> int:
    """Return the number of batches of the smallest number of whole epochs with at least `batches` batches."""
    return -(-batches // per_epoch) * per_epoch


def frames_per_batch(recorded: Recorded, arguments: argparse.Namespace) -> int:
    return arguments.batch_size * sum(len(steps) for steps in recorded.steps.values())


def print_table(result: dict[str, Any]) -> None:
    width = max(len(side["name"]) for side in result["peers"])
    print(f"{'':{width}} frames/s, 2nd epoch  {OWN}: 1st, 2nd epoch  first batch    memory  correct frames")
    for side in result["peers"]:
        memory = side["peak_bytes"] and side["peak_bytes"] / 1e6
        line = f"{side['name']:{width}} {cell(side['frames_per_s'])}  {cell(side['second_epoch_frames_per_s'], 9)}"
        line += f"  {cell(side['speedup'], 19, '.2f', 'x')} {cell(side['second_epoch_speedup'], 10, '.1f', 'x')}"
        print(f"{line}  {cell(side['first_batch_s'], 11, '.2f', ' s')}  {cell(memory, unit=' MB')}  {verdict(side)}")


def cell(value: float | None, width: int = 8, form: str = ".0f", unit: str = "") -> str:
    """Return a cell of the table."""
    return f"{'-' if value is None else f'{value:{form}}{unit}':>{width}}"


def verdict(side: dict[str, Any]) -> str:
    """Return a short text that says whether the frames were correct."""
    if side["error"]:
        return f"failed: {side['error'].splitlines()[-1]}"
    check = side["frames"]
    if not check["equal"]:
        return f"NO: {'; '.join(check['differences'])}"
    order = "" if side["follows_the_order"] else ", in its own order"
    return f"yes, {check['samples']} rows, {check['pictures']} frames{order}"


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # exits normally, so that the peers are ended too
    sys.exit(main())
