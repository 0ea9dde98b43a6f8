"""Compare the speed of the Loader with floors, which are programs that do only a part of its work, such as decoding.

The floor "prefixes" is FFmpeg, with one single-threaded process per core. It decodes exactly the GOP prefixes that the frames
of each batch need, that is, the frames from a keyframe to the last requested frame of its GOP, and converts only the requested
frames to RGB. The Loader delivers frames of the recorded size as uint8, with its default arguments. It decodes less than the
floor, since it keeps decoded frames. Its first and second epoch are timed, and `ratio` is the rate over both epochs divided by
that of the floor.

The floor "files" consists of one thread per core. The threads decode every frame of the files once, in file order, and resize
it. See files_floor.py. The Loader delivers float32 frames of this size, and its first epoch and later ones are timed. If
`memory_budget` holds all frames, later epochs decode nothing. They are compared with the floor "gather", which only copies
frames and converts them to float32. See gather_floor.py.

    python benchmarks/decode_floor.py URI [--mode single|sarm] [--batch-size 64] [--batches 30] [--image-size 224 224]
                                      [--rounds 5] [--json]

With `--mode sarm`, a sample is a window of 8 frames of each camera, 1 s apart. The Loader and the floors run in turns. Each
round uses a new Loader, which is timed after its first batch. FFmpeg gets one MP4 file per core and camera with only the
packets that it decodes, so it spends no time on opening many files and seeking. The time that FFmpeg needs to start and end is
measured and subtracted. On a virtual machine, the host may provide memory only when it is first written. Before each Loader, as
much memory as its cache takes is therefore written and freed. `first_touch_ms_per_mb` is the time that this takes.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import files_floor
import gather_floor
import numpy as np
import program
from argument_types import count
from host_memory import cached_bytes, provide

import dali_stream
from dali_stream.cache.indices import IndexCache
from dali_stream.checks.frame_size import frame_size
from dali_stream.lerobot.rows import RowReader
from dali_stream.mp4.clip import pack
from dali_stream.mp4.index import VideoIndex
from dali_stream.mp4.timing import find_packets
from dali_stream.order.windows import offsets, window
from dali_stream.system.cpu import cores
from dali_stream.tools import environment
from dali_stream.tools.bench.measure import windows

LATER = 4  # number of epochs after the first that are timed against the floors "files" and "gather"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("uri", help="a local LeRobot v3 dataset")
    parser.add_argument("--mode", choices=("single", "sarm"), default="single", help="single frames, or windows of 8")
    parser.add_argument("--batch-size", type=count, default=64)
    parser.add_argument("--batches", type=count, default=30, help="number of batches that are timed in each round")
    parser.add_argument("--image-size", type=frame_size, default=(224, 224), metavar="HxW")
    parser.add_argument("--rounds", type=count, default=5, help="rounds; the report has the median of their ratios")
    parser.add_argument("--threads", type=count, default=cores(), help="FFmpeg processes, and decode threads of the loader")
    return program.run(parser, measure, as_text)


def as_text(result: dict[str, Any]) -> str:
    """Return the result as text."""
    files, first, second = result["files"], result["first_epoch"], result["second_epoch"]
    files_first, files_second = files["first_epoch_frames_per_s"], files["second_epoch_frames_per_s"]
    return "\n".join([
        f"prefixes: floor {result['floor_frames_per_s']:.0f} frames/s, loader {result['loader_frames_per_s']:.0f}, "
        f"ratio {result['ratio']:.3f} (first epoch {first['ratio']:.3f}, second {second['ratio']:.3f})",
        f"memory that is touched for the first time: {result['first_touch_ms_per_mb']:.2f} ms per MB",
        f"files: floor {files['floor_frames_per_s']:.0f} frames/s (FFmpeg, without resizing: "
        f"{files['ffmpeg_frames_per_s']:.0f}), loader {files_first:.0f} in the first epoch, ratio {files['ratio']:.3f}, and "
        f"{files_second:.0f} in the second, {files['second_to_first']:.1f} times as many",
        f"gather: floor {result['gather']['floor_frames_per_s']:.0f} frames/s, the loader's second epoch beside it "
        f"{files_second:.0f}, ratio {result['gather']['ratio']:.3f}",
        "decoded frames per delivered frame: {:.2f} and {:.2f}".format(*files["decoded_per_frame"]),
        f"wait for a batch: median {files['wait_p50_ms']:.1f} ms, p99 {files['wait_p99_ms']:.1f} ms",
    ])  # fmt: skip


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Time the Loader and its floors in turns."""
    if not shutil.which("ffmpeg"):
        raise ValueError("needs the program ffmpeg; install it (Debian, Ubuntu: apt-get install ffmpeg)")
    dataset = dali_stream.Dataset(arguments.uri)
    if not dataset.videos:
        raise ValueError(f"dataset must have a camera with video, got {dataset.uri} without one")
    threads, size = arguments.threads, arguments.image_size
    batches = min(arguments.batches, dataset.num_frames // arguments.batch_size)
    deltas = windows(arguments.mode, dataset)
    per_batch = arguments.batch_size * sum(len(deltas.get(camera, [0])) for camera in dataset.videos)
    work, waits, found = files_floor.parts(dataset, threads), list[float](), defaultdict[str, list[float]](list)
    with tempfile.TemporaryDirectory() as folder:
        with new_loader(dataset, arguments, deltas, image_dtype="uint8") as loader:
            order = dali_stream.Order(dataset.lengths, **loader.state_dict()["order"])
            routes = {key: dataclasses.asdict(route) for key, route in loader.routes.items()}
        shown = offsets(deltas, dataset.fps, dataset.cameras)
        jobs = floor_jobs(dataset, order, shown, arguments.batch_size, batches, threads, Path(folder))
        prefix_rate = ffmpeg_floor(jobs, threads, batches * per_batch)
        for _ in range(arguments.rounds):
            found["prefixes"].append(prefix_rate())
            found["touching"].append(provide(cached_bytes(dataset)))
            with new_loader(dataset, arguments, deltas, image_dtype="uint8") as loader:
                first_s, second_s = mean_wait(loader), mean_wait(loader)
            found["prefixes, first"].append(per_batch / first_s)
            found["prefixes, second"].append(per_batch / second_s)
            found["prefixes, both"].append(2 * per_batch / (first_s + second_s))
            found["files"].append(files_floor.torchcodec_rate(work, size))
            # 2 GB of frames are enough, since they exceed the cache of any processor.
            cached = min(dataset.num_frames * len(dataset.videos), int(2e9 / np.prod([*size, 3])))
            found["gather"].append(gather_floor.gather_rate(cached, size, per_batch, 10 * batches, threads))
            found["ffmpeg"].append(files_floor.ffmpeg_rate(work, threads))
            provide(cached_bytes(dataset, size))
            with new_loader(dataset, arguments, deltas, image_size=size) as loader:
                found["first"].append(per_batch / mean_wait(loader, waits))
                first = loader.stats()
                # One epoch without decoding may take only a tenth of a second.
                found["second"].append(per_batch / statistics.mean(mean_wait(loader) for _ in range(LATER)))
                second = loader.stats()
            found["decoded"].append(first["decoded_frames"] / first["frames"])
            later = {key: second[key] - first[key] for key in ("decoded_frames", "frames")}
            found["decoded later"].append(later["decoded_frames"] / later["frames"])
    return {
        **rates("loader", found["prefixes, both"], found["prefixes"]),
        "first_epoch": rates("loader", found["prefixes, first"], found["prefixes"]),
        "second_epoch": rates("loader", found["prefixes, second"], found["prefixes"]),
        "first_touch_ms_per_mb": statistics.median(found["touching"]),
        "frames_per_round": batches * per_batch,
        "routes": routes,
        "gather": rates("second_epoch", found["second"], found["gather"]),
        "files": {
            **rates("first_epoch", found["first"], found["files"]),
            "ffmpeg_frames_per_s": statistics.median(found["ffmpeg"]),
            "second_epoch_frames_per_s": statistics.median(found["second"]),
            "second_epoch_rounds": found["second"],
            "second_to_first": statistics.median(b / a for a, b in zip(found["first"], found["second"], strict=True)),
            "decoded_per_frame": [statistics.median(found["decoded"]), statistics.median(found["decoded later"])],
            "wait_p50_ms": float(np.percentile(waits or [0.0], 50) * 1e3),
            "wait_p99_ms": float(np.percentile(waits or [0.0], 99) * 1e3),
        },
        "peak_rss_bytes": environment.peak_rss(),
        "dataset": dataset.uri,
    }


def rates(name: str, loader: list[float], floor: list[float]) -> dict[str, Any]:
    """Return the median rates of the Loader and of a floor, and the median of their ratios.

    Each ratio compares two turns in succession, since the load by other programs changes over time.
    """
    return {
        "ratio": statistics.median(loader_rate / floor_rate for loader_rate, floor_rate in zip(loader, floor, strict=True)),
        "floor_frames_per_s": statistics.median(floor),
        f"{name}_frames_per_s": statistics.median(loader),
        "floor_rounds": floor,
        f"{name}_rounds": loader,
    }


def new_loader(
    dataset: dali_stream.Dataset, arguments: argparse.Namespace, deltas: dict[str, list[float]], **options: Any
) -> dali_stream.Loader:
    return dali_stream.Loader(
        dataset, batch_size=arguments.batch_size, delta_timestamps=deltas, num_threads=arguments.threads, device="cpu",
        **options,
    )  # fmt: skip


def mean_wait(loader: dali_stream.Loader, waits: list[float] | None = None) -> float:
    """Return the mean time per batch of an epoch, without its first batch, in seconds.

    The times of these batches, except for the first 20, are appended to `waits`.
    """
    batches = iter(loader)
    next(batches)
    times = [time.perf_counter()]
    while next(batches, None) is not None:  # each batch is dropped before the next one
        times.append(time.perf_counter())
    if waits is not None:
        waits += np.diff(times[20:]).tolist()
    return (times[-1] - times[0]) / max(len(times) - 1, 1)


def ffmpeg_floor(jobs: list[tuple[Path, str, int]], threads: int, frames: int) -> Callable[[], float]:
    """Return a function that runs FFmpeg on the jobs, and returns frames/s without the time of starting and ending FFmpeg."""
    idle = min(timed(lambda: run_ffmpeg(jobs[:1], 1, head_only=True)) for _ in range(3))
    return lambda: frames / (timed(lambda: run_ffmpeg(jobs, threads)) - idle * len(jobs) / threads)


def floor_jobs(
    dataset: dali_stream.Dataset,
    order: dali_stream.Order,
    shown: dict[str, Any],
    batch_size: int,
    batches: int,
    threads: int,
    folder: Path,
) -> list[tuple[Path, str, int]]:
    """Return (clip, FFmpeg filter, number of frames) for each core and camera, with the frames of the Loader's first batches.

    `shown` contains the frame offsets of cameras with windows. A frame that a batch requests twice is converted only once.
    """
    jobs = []
    for camera in dataset.videos:
        steps, packets = shown.get(camera, np.zeros(1, np.int64)), packets_of(dataset, camera)
        for core in range(min(threads, batches)):
            tables, samples = [], []
            for number in range(core, batches, threads):
                episode, frame = order.read(number * batch_size, batch_size)
                frames, _ = window(steps, frame, dataset.lengths[episode])
                batch_tables = [packets(e)[0] for e in episode.tolist() for _ in steps]
                # `pack` puts a GOP into the clip once per table. With a copy of the table per batch, a GOP that two batches
                # need is in the clip twice, and decoded twice, as in a loader without a cache.
                copies = {id(table): dataclasses.replace(table) for table in batch_tables}
                tables += [copies[id(table)] for table in batch_tables]
                samples += [
                    p
                    for e, sample_frames in zip(episode.tolist(), frames, strict=True)
                    for p in packets(e)[1][sample_frames].tolist()
                ]
            clip = pack(dataset.data_store, tables, samples)
            path = folder / f"{len(jobs)}.mp4"
            path.write_bytes(clip.data)
            wanted = np.zeros(clip.coded_frames, bool)
            wanted[clip.frames] = True
            jobs.append((path, f"select='{selection(wanted, 0, len(wanted))}',format=rgb24", int(wanted.sum())))
    return jobs


def packets_of(dataset: dali_stream.Dataset, camera: str) -> Callable[[int], tuple[VideoIndex, np.ndarray]]:
    """Return a function that takes an episode, and returns the index of its video file and the packet of each of its frames."""
    indices, reader = IndexCache(dataset.source), RowReader(dataset, keys=["timestamp"])

    @functools.cache
    def packets(episode: int) -> tuple[VideoIndex, np.ndarray]:
        table = indices.of(camera, episode, dataset.data_store)
        row, episodes = dataset.rows[episode], dataset.table
        interval = float(episodes.start[camera][row]), float(episodes.stop[camera][row])
        return table, find_packets(table, interval, reader.read(episode)["timestamp"], dataset.tolerance_s)

    return packets


def selection(wanted: np.ndarray, start: int, stop: int) -> str:
    """Return an FFmpeg expression of the frame number n that is 1 for wanted frames, and 0 for others.

    The expression is a binary tree of comparisons, so that FFmpeg evaluates it quickly.
    """
    if wanted[start:stop].all():
        return "1"
    if not wanted[start:stop].any():
        return "0"
    middle = (start + stop) // 2
    return f"if(lt(n,{middle}),{selection(wanted, start, middle)},{selection(wanted, middle, stop)})"


def run_ffmpeg(jobs: list[tuple[Path, str, int]], threads: int, head_only: bool = False) -> None:
    """Decode the clips in `threads` concurrent processes. If `head_only`, decode only the first frame of each clip."""

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
    """Return the duration of a call, in seconds."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


if __name__ == "__main__":
    sys.exit(main())
