"""This loader beside others, in one run, in turns, on the same dataset and the same order of (episode, frame).

    python benchmarks/peers.py ROOT [--lerobot-python VENV/bin/python] [--mode single|sarm|action_chunk] [--json] [--out FILE]

dali_stream          this package's Loader
torchcodec           a plain loop around torchcodec, a thread per core, each with a decoder per file
lerobot, N workers   LeRobotDataset in PyTorch's DataLoader
lerobot-streaming    StreamingLeRobotDataset; it shuffles by itself, so its frames are checked, but not in which order they come
torchcodec-cuda      the plain loop on NVDEC; not run on a GPU yet
pynvvideocodec       a plain loop around PyNvVideoCodec's SimpleDecoder; not run on a GPU yet

All deliver float32 pictures in [0, 1] of all cameras on the same device; the plain loops no other rows than the frame's
number. Each is a process of its own, which stands still, with all of its workers, while another has its turn: a queue that
fills meanwhile would be measured as speed, and taken from the other's cores. The first batch is from opening the dataset on,
with everything imported and LeRobot's cache of the dataset empty. Memory is of all processes of a side, what they share
counted once, looked at every half second.

Delivered rows are all compared with the order, and pictures of each round with FFmpeg's of the file. The exit code is 1 where
this loader failed or delivered anything else; a peer that does is told in the report.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from argument_types import count, count_or_none, new_file, positive
from peer_programs import frames
from peer_programs.process import Peer, PeerError
from peer_programs.recorded import Recorded

import dali_stream
from dali_stream import environment, process
from dali_stream.bench.measure import MODES, windows

OWN = "dali_stream"
PROGRAMS = Path(__file__).with_name("peer_programs")


@dataclass
class Side:
    """One loader: how it is started, and what it did.

    Attributes:
        spec: what its program is told beside what all are told.
        follows: whether it can be given an order.
    """

    name: str
    program: str
    python: str | None = sys.executable
    spec: dict[str, Any] = field(default_factory=dict)
    follows: bool = True
    gpu: bool = False
    peer: Peer | None = None
    error: str | None = None
    first_batch_s: float | None = None
    rounds: list[float] = field(default_factory=list)
    frames: dict[str, Any] | None = None

    def report(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "frames_per_s": statistics.median(self.rounds) if self.rounds else None,
            "rounds": self.rounds,
            "first_batch_s": self.first_batch_s,
            "peak_bytes": self.peer.peak_bytes if self.peer else None,
            "follows_the_order": self.follows,
            "frames": self.frames,
            "error": self.error,
            "versions": self.peer.versions if self.peer else {},
        }


def sides(lerobot: str | None, workers: list[int]) -> list[Side]:
    """All that can be compared."""
    return [
        Side(OWN, "ours.py"),
        Side("torchcodec", "torchcodec_loop.py"),
        *(Side(f"lerobot, {n} workers", "lerobot_map.py", lerobot, {"workers": n}) for n in workers),
        Side("lerobot-streaming", "lerobot_stream.py", lerobot, follows=False),
        Side("torchcodec-cuda", "torchcodec_loop.py", spec={"gpu_decode": True}, gpu=True),
        Side("pynvvideocodec", "pynvvideocodec_loop.py", gpu=True),
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
        arguments.out.write_text(environment.report_json(result, indent=1) + "\n")
    if arguments.json:
        print(environment.report_json(result))
    own = result["peers"][0]
    return 0 if not own["error"] and own["frames"]["equal"] else 1


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("root", type=Path, help="a local LeRobot v3 dataset with video")
    parser.add_argument("--mode", choices=MODES, default="single")
    parser.add_argument("--batch-size", type=count, default=64)
    parser.add_argument("--batches", type=count, default=10, help="batches that a turn times; more than a side makes ahead")
    parser.add_argument("--rounds", type=count, default=5, help="turns of each side; the medians are compared")
    parser.add_argument("--warmup", type=count_or_none, default=4, help="batches after the first that are not timed")
    parser.add_argument("--workers", type=count_or_none, nargs="+", default=[0, 2], help="of LeRobot's DataLoader, a side each")
    parser.add_argument("--threads", type=count, default=process.cores(), help="of this loader and of the plain loop")
    parser.add_argument("--lerobot-python", help="the Python of an environment with LeRobot")
    parser.add_argument("--only", nargs="+", metavar="SIDE", help="names, or their beginnings; dali_stream is always there")
    parser.add_argument("--check", type=count, default=4, help="samples of each turn whose pictures are compared")
    parser.add_argument("--seed", type=int, default=0, help="of the order")
    parser.add_argument("--device", default="auto", help="where the batches are wanted: auto, cpu, cuda or cuda:N")
    parser.add_argument("--answer-s", type=positive, default=600, help="after this a side that does not answer is given up")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--out", type=new_file, help="write the JSON to this file")
    return parser.parse_args()


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Runs all sides in turns."""
    if not arguments.root.is_dir():
        raise ValueError(f"{arguments.root} is no folder; the peers read local datasets alone, so give the folder of one")
    dataset = dali_stream.Dataset(arguments.root.resolve())
    if not dataset.videos:
        raise ValueError(f"{dataset.uri} has no video to compare decoders with; give a dataset with video")
    gpu = process.gpu(arguments.device)
    device = "cpu" if gpu is None else f"cuda:{gpu}"
    known = sides(arguments.lerobot_python, arguments.workers)
    for name in arguments.only or ():
        if not any(side.name.startswith(name) for side in known):
            raise ValueError(f"--only names {name!r}, and there are {', '.join(side.name for side in known)}")
    chosen = [side for side in known if side.name.startswith(tuple(arguments.only or ("",)))]
    compared = chosen if chosen and chosen[0].name == OWN else [Side(OWN, "ours.py"), *chosen]
    deltas = windows(arguments.mode, dataset)
    batches = 1 + arguments.warmup + arguments.rounds * arguments.batches
    recorded = Recorded(dataset, deltas, arguments.batch_size, batches, arguments.seed)
    with tempfile.TemporaryDirectory() as folder:
        common = spec(arguments, recorded, deltas, device, Path(folder))
        run(compared, recorded, common, arguments)
    return {
        "root": str(arguments.root),
        "peers": [side.report() for side in compared],
        "arguments": {key: str(value) for key, value in vars(arguments).items()},
        "frames_per_round": frames_per_batch(recorded, arguments) * arguments.batches,
        **environment.ran_on(device),
    }


def spec(arguments: argparse.Namespace, recorded: Recorded, deltas: Any, device: str, folder: Path) -> dict[str, Any]:
    """What all programs are told."""
    order = folder / "order.npz"
    return {
        "root": str(recorded.root),
        "folder": str(folder),
        "order": str(order),
        "files": recorded.write(order),
        "cameras": recorded.cameras,
        "delta_timestamps": deltas,
        "device": device,
        "gpu_decode": False,
        **{key: getattr(arguments, key) for key in ("batch_size", "threads", "seed", "check")},
    }


def run(compared: list[Side], recorded: Recorded, common: dict[str, Any], arguments: argparse.Namespace) -> None:
    """All turns of all sides; what goes wrong with one is its own."""
    try:
        for side in compared:
            attempt(side, begin, common, arguments)
        for _ in range(arguments.rounds):
            for side in compared:
                attempt(side, turn, arguments.batches, frames_per_batch(recorded, arguments))
        for side in compared:
            attempt(side, finish, recorded, Path(common["folder"]))
    finally:
        for side in compared:
            if side.peer:
                side.peer.close()


def attempt(side: Side, step: Callable[..., None], *arguments: Any) -> None:
    """A step of a side that has not failed before."""
    if side.error is None:
        try:
            step(side, *arguments)
        except PeerError as error:
            if side.peer:
                side.peer.close()  # what is left of it would take the others' cores
            side.error = str(error)
            print(f"{side.name}: {side.error}", file=sys.stderr)


def begin(side: Side, common: dict[str, Any], arguments: argparse.Namespace) -> None:
    """Starts a side, up to the end of its warm-up."""
    if side.gpu and common["device"] == "cpu":
        raise PeerError("no GPU")
    if side.python is None:
        raise PeerError("no LeRobot; give --lerobot-python the Python of an environment that has it")
    folder = Path(common["folder"]) / side.name
    folder.mkdir()
    (folder / "spec.json").write_text(json.dumps(common | side.spec | {"results": str(folder / "results.npz")}))
    # Nothing is asked of the Hub, and nothing left in the user's cache.
    variables = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(folder / "cache")}
    command = [side.python, str(PROGRAMS / side.program), str(folder / "spec.json")]
    side.peer = Peer(command, folder / "stderr", arguments.answer_s, variables)
    side.first_batch_s = side.peer.ask("seconds", go=1)
    if arguments.warmup:
        side.peer.ask("seconds", go=arguments.warmup)


def turn(side: Side, batches: int, frames_of_batch: int) -> None:
    assert side.peer
    side.rounds.append(batches * frames_of_batch / side.peer.ask("seconds", go=batches))


def finish(side: Side, recorded: Recorded, folder: Path) -> None:
    assert side.peer
    side.peer.ask("written", end=True)
    side.frames = frames.check(folder / side.name / "results.npz", recorded, side.follows)


def frames_per_batch(recorded: Recorded, arguments: argparse.Namespace) -> int:
    return arguments.batch_size * sum(len(steps) for steps in recorded.steps.values())


def print_table(result: dict[str, Any]) -> None:
    own = result["peers"][0]["frames_per_s"]
    print(f"{'':20} frames/s  of this loader  first batch  memory    right frames")
    for side in result["peers"]:
        rate, memory = side["frames_per_s"], side["peak_bytes"]
        line = f"{side['name']:20} {rate:8.0f}" if rate else f"{side['name']:20} {'-':>8}"
        line += f"  {rate / own:14.3f}" if rate and own else f"  {'-':>14}"
        line += f"  {side['first_batch_s']:9.2f} s" if side["first_batch_s"] else f"  {'-':>11}"
        line += f"  {memory / 1e6:5.0f} MB" if memory else f"  {'-':>8}"
        print(f"{line}  {verdict(side)}")


def verdict(side: dict[str, Any]) -> str:
    """Whether the frames were right, in a few words."""
    if side["error"]:
        return f"failed: {side['error'].splitlines()[-1]}"
    found = side["frames"]
    if not found["equal"]:
        return f"NO: {'; '.join(found['differences'])}"
    order = "" if side["follows_the_order"] else ", in its own order"
    return f"yes, {found['samples']} rows, {found['pictures']} pictures{order}"


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no peer is left behind
    sys.exit(main())
