"""How near the loader comes to the decode floor.

The floor is FFmpeg alone, one process with one thread per core, decoding exactly the GOP prefixes that each batch's frames
need, and converting only those frames to RGB. With `--decode dali` it is that of DALI's decoder: see nvdec_floor.py.

    python benchmarks/decode_floor.py URI [--mode single|sarm] [--decode torchcodec|dali] [--device cuda] [--batch-size 64]
                                      [--batches 30] [--rounds 5] [--json]

With `--mode sarm`, a sample is a window of 8 frames of each camera, 1 s apart. Both sides get the same requests and take
turns, in which the other rests; the loader has nothing at hand when its turn begins. FFmpeg gets its requests as one packed
clip a core and camera, so it pays neither for opening files nor for seeking; the time that the program takes to start and end
is measured and taken off.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import nvdec_floor
from argument_types import count

import dali_stream
from dali_stream import environment, process
from dali_stream.bench.measure import endless, take, windows
from dali_stream.counters import Counters
from dali_stream.process import cores
from dali_stream.residency import Residency
from dali_stream.tables import Tables
from dali_stream.video.clip import pack
from dali_stream.windows import offsets, window

AHEAD = 20  # batches: more than the loader makes ahead


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("uri", help="a local LeRobot v3 dataset")
    parser.add_argument("--mode", choices=("single", "sarm"), default="single", help="single frames, or windows of 8")
    parser.add_argument("--decode", choices=("torchcodec", "dali"), default="torchcodec", help="dali: NVDEC on a GPU")
    parser.add_argument("--device", default="cpu", help="of the loader: cpu, cuda or cuda:N")
    parser.add_argument("--batch-size", type=count, default=64)
    parser.add_argument("--batches", type=count, default=30, help="batches that a round times")
    parser.add_argument("--rounds", type=count, default=5, help="rounds of each side, whose ratios have a median")
    parser.add_argument("--threads", type=count, default=cores(), help="FFmpeg processes, and decode threads of the loader")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    arguments = parser.parse_args()
    if arguments.decode == "torchcodec" and not shutil.which("ffmpeg"):
        print("decode_floor: needs the program ffmpeg; install it (Debian, Ubuntu: apt-get install ffmpeg)", file=sys.stderr)
        return 1
    try:
        result = measure(arguments)
    except (dali_stream.DaliStreamError, ValueError) as error:
        print(f"decode_floor: {error}", file=sys.stderr)
        return 1
    print(
        f"floor {result['floor_frames_per_s']:.0f} frames/s, loader {result['loader_frames_per_s']:.0f} frames/s, "
        f"ratio {result['ratio']:.3f} ({result['frames_per_round']} frames a round, {arguments.rounds} rounds, "
        f"{arguments.threads} threads)"
    )
    if arguments.json:
        print(environment.report_json(result))
    return 0


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Times both sides in turns."""
    dataset, batch_size, threads = dali_stream.Dataset(arguments.uri), arguments.batch_size, arguments.threads
    if not dataset.videos:
        raise ValueError(f"{dataset.uri} has no video to decode; give a dataset with video")
    deltas = windows(arguments.mode, dataset)
    batches = min(arguments.batches, dataset.num_frames // batch_size)
    frames = batches * batch_size * sum(len(deltas.get(camera, [0])) for camera in dataset.videos)
    with (
        tempfile.TemporaryDirectory() as folder,
        dali_stream.Loader(
            dataset,
            batch_size=batch_size,
            delta_timestamps=deltas,
            image_dtype="uint8",
            threads=threads,
            decode=arguments.decode,
            device=arguments.device,
        ) as loader,
    ):
        if arguments.decode == "dali":
            gpu = process.gpu(arguments.device)
            floor_rate = nvdec_floor.make(dataset, gpu, threads, lambda: decoded_per_frame(loader, began))
        else:
            shown = offsets(deltas, dataset.fps, dataset.cameras)
            order = dali_stream.Order(dataset.lengths, **loader.state_dict()["order"])
            jobs = floor_jobs(dataset, order, shown, batch_size, batches, threads, Path(folder))
            floor_rate = ffmpeg_floor(jobs, threads, frames)
        stream = endless(loader)
        take(stream, AHEAD)
        settle(loader)
        began = loader.stats()
        floor, own = [], []
        for _ in range(arguments.rounds):
            take(stream, AHEAD)
            settle(loader)
            floor.append(floor_rate())
            take(stream, AHEAD)  # what was made meanwhile is no work of this turn
            own.append(frames / timed(lambda: take(stream, batches)))
        settle(loader)
        decoded = decoded_per_frame(loader, began)
        routes = {key: dataclasses.asdict(route) for key, route in loader.routes.items()}
    return {
        # Of turns that follow each other: a machine that others use is not as fast in the next minute.
        "ratio": statistics.median(mine / its for mine, its in zip(own, floor, strict=True)),
        "floor_frames_per_s": statistics.median(floor),
        "loader_frames_per_s": statistics.median(own),
        "floor_rounds": floor,
        "loader_rounds": own,
        "frames_per_round": frames,
        "decoded_per_frame": decoded,
        "peak_rss_bytes": environment.peak_rss(),
        "dataset": dataset.uri,
        "arguments": {key: value for key, value in vars(arguments).items() if key != "json"},
        "routes": routes,
        **environment.ran_on(arguments.device),
    }


def decoded_per_frame(loader: dali_stream.Loader, began: dict[str, Any]) -> float:
    """Pictures that were decoded per frame that was delivered, since some statistics were taken.

    At both times the loader has made all that it makes ahead, which is decoded and not delivered yet.
    """
    now = loader.stats()
    return float((now["decoded_pictures"] - began["decoded_pictures"]) / (now["frames"] - began["frames"]))


def ffmpeg_floor(jobs: list[tuple[Path, str, int]], threads: int, frames: int) -> Callable[[], float]:
    """A call that has FFmpeg do the jobs, and returns frames/s without the time that a program takes to start and end."""
    idle = min(timed(lambda: run_ffmpeg(jobs[:1], 1, head_only=True)) for _ in range(3))
    return lambda: frames / (timed(lambda: run_ffmpeg(jobs, threads)) - idle * len(jobs) / threads)


def settle(loader: dali_stream.Loader) -> None:
    """Returns when the loader has made all that it makes ahead, so that it takes no core from the other side."""
    before = -1
    while (now := loader.stats()["decoded_pictures"]) != before:
        before = now
        time.sleep(0.5)  # longer than a task takes


def floor_jobs(
    dataset: dali_stream.Dataset,
    order: dali_stream.Order,
    shown: dict[str, Any],
    batch_size: int,
    batches: int,
    threads: int,
    folder: Path,
) -> list[tuple[Path, str, int]]:
    """(clip, FFmpeg filter, frames) per core and camera: what the loader's first batches ask for.

    `shown` has the frame offsets of cameras that show windows. A picture that a batch asks for twice is converted once.
    """
    residency = Residency(dataset, 4 << 30, Tables(dataset, 1 << 30), shown, batch_size, Counters())
    jobs = []
    for camera in dataset.videos:
        steps = shown.get(camera, np.zeros(1, np.int64))
        for core in range(min(threads, batches)):
            tables, samples = [], []
            for number in range(core, batches, threads):
                episode, frame = order.read(number * batch_size, batch_size)
                residency.load(np.unique(episode))
                frames, _ = window(steps, frame, dataset.lengths[episode])
                found = [residency.table(camera, e) for e in episode.tolist() for _ in steps]
                # A copy of the table a batch: two batches that need the same GOP pay for it twice, as any loader does.
                own = {id(table): dataclasses.replace(table) for table in found}
                tables += [own[id(table)] for table in found]
                samples += residency.samples(camera, episode, frames).reshape(-1).tolist()
            clip = pack(dataset.data_store, tables, samples)
            path = folder / f"{len(jobs)}.mp4"
            path.write_bytes(clip.data)
            wanted = np.zeros(clip.pictures, bool)
            wanted[clip.frames] = True
            jobs.append((path, f"select='{selection(wanted, 0, len(wanted))}',format=rgb24", int(wanted.sum())))
    return jobs


def selection(wanted: np.ndarray, start: int, stop: int) -> str:
    """An expression in n, the number of the picture, that is 1 for the wanted ones: a tree, so that it is cheap to evaluate."""
    if wanted[start:stop].all():
        return "1"
    if not wanted[start:stop].any():
        return "0"
    middle = (start + stop) // 2
    return f"if(lt(n,{middle}),{selection(wanted, start, middle)},{selection(wanted, middle, stop)})"


def run_ffmpeg(jobs: list[tuple[Path, str, int]], threads: int, head_only: bool = False) -> None:
    """Decodes the clips, `threads` processes at a time; with `head_only` the first picture of each."""

    def run(job: tuple[Path, str, int]) -> None:
        path, filters, frames = job
        command = ["ffmpeg", "-hide_banner", "-nostdin", "-threads", "1", "-i", str(path), "-filter_threads", "1"]
        command += ["-frames:v", "1"] if head_only else ["-vf", filters]
        done = subprocess.run([*command, "-vsync", "passthrough", "-f", "null", "-"], capture_output=True, text=True)
        counts = re.findall(r"frame=\s*(\d+)", done.stderr)
        if done.returncode or (not head_only and int(counts[-1]) != frames):
            raise dali_stream.DecodeError(f"ffmpeg delivered {counts[-1:]} of {frames} frames: {done.stderr[-300:]}")

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(run, jobs))


def timed(work: Any) -> float:
    """Seconds that a call takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


if __name__ == "__main__":
    sys.exit(main())
