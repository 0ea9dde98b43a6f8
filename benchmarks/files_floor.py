"""The floor of an epoch that decodes every frame once: plain threads without a loader.

Each core has one thread, which decodes its part of the files in file order with torchcodec, resizes each frame with the kernel
of the Loader, and drops it. For comparison, FFmpeg decodes the same files and converts frames to RGB without resizing.
"""

from __future__ import annotations

import itertools
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from torchcodec.decoders import VideoDecoder

import dali_stream
from dali_stream.cache.indices import IndexCache
from dali_stream.decode.resize import resize
from dali_stream.decode.torchcodec import frames_at_once

Part = tuple[Path, int, int]  # file, and range [start, stop) of its frames in display order


def parts(dataset: dali_stream.Dataset, threads: int) -> list[list[Part]]:
    """Divide the files of all cameras into one part of nearly equal size per thread. Each part begins with a keyframe."""
    indices, runs = IndexCache(dataset.source), []
    for camera in dataset.videos:
        files = dataset.table.video[camera]
        number, episode = np.unique(files.index[dataset.rows], return_index=True)  # each file, and its first episode
        for path, first in zip((files.paths[n] for n in number), episode.tolist(), strict=True):
            table = indices.of(camera, first, dataset.data_store)
            place = np.argsort(table.display_order)  # position of each packet in display order
            starts = np.append(place[table.keyframes], len(table))
            runs += [(Path(dataset.data_store.where(path)), a, b) for a, b in itertools.pairwise(starts)]
    ends = np.cumsum([b - a for _, a, b in runs])
    thread_of_run = (ends - 1) * threads // ends[-1]
    return [_joined([runs[i] for i in np.flatnonzero(thread_of_run == thread)]) for thread in range(threads)]


def torchcodec_rate(work: list[list[Part]], size: tuple[int, int]) -> float:
    """Return the rate of threads that decode and resize, in frames/s."""
    started = time.perf_counter()
    with ThreadPoolExecutor(len(work)) as pool:
        frames = sum(pool.map(lambda share: _decode(share, size), work))
    return frames / (time.perf_counter() - started)


def ffmpeg_rate(work: list[list[Part]], threads: int) -> float:
    """Return the rate of FFmpeg, with one process per file, for decoding and conversion to RGB, in frames/s."""
    files = {path: 0 for share in work for path, _, _ in share}
    for share in work:
        for path, _, stop in share:
            files[path] = max(files[path], stop)
    command = ["ffmpeg", "-hide_banner", "-nostdin", "-v", "error", "-threads", "1", "-filter_threads", "1"]
    started = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        end = ["-vf", "format=rgb24", "-vsync", "passthrough", "-f", "null", "-"]
        list(pool.map(lambda path: subprocess.run([*command, "-i", str(path), *end], check=True), files))
    return sum(files.values()) / (time.perf_counter() - started)


def _decode(share: list[Part], size: tuple[int, int]) -> int:
    frames = 0
    for path, first, stop in share:
        decoder = VideoDecoder(path, dimension_order="NHWC", num_ffmpeg_threads=1, seek_mode="approximate")
        step = frames_at_once((decoder.metadata.height, decoder.metadata.width))
        for start in range(first, stop, step):
            decoded = decoder.get_frames_in_range(start, min(start + step, stop)).data.numpy()
            frames += len(resize(decoded, size))
    return frames


def _joined(runs: list[Part]) -> list[Part]:
    joined: list[Part] = []
    for path, first, stop in runs:
        if joined and joined[-1][0] == path and joined[-1][2] == first:
            joined[-1] = (path, joined[-1][1], int(stop))
        else:
            joined.append((path, int(first), int(stop)))
    return joined
