"""Compare the speed of NVDEC with DALI and with torchcodec, and that of the CPU, over frames per clip and threads.

    python benchmarks/nvdec_decoders.py [--codec h264] [--size 480x640] [--gop 2] [--seconds 1] [--device cuda] [--out FILE]

The program writes a demo dataset, and decodes random frames of one of its videos from packed clips. The frames stay on the GPU.
In the first round, their identity is read, and `wrong` is the number of frames that are not the requested ones. `marks` is the
keyframe marks of the clips for torchcodec on NVDEC: "one", as in a Loader, or "all", one for each GOP prefix. `--device cpu`
serves only to test this program, and leaves out DALI unless the codec is VP9.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from argument_types import count, positive
from program import Rows, on_gpu

from dali_stream.checks.frame_size import frame_size
from dali_stream.decode import dali
from dali_stream.decode.refusal import DALI_ON_CPU
from dali_stream.decode.torchcodec import decode_clip_in_parts
from dali_stream.decode.torchcodec_cuda import device_name, own_stream
from dali_stream.mp4.clip import Clip
from dali_stream.tools.selftest import videos

BATCHES = 24  # number of clips that torchcodec repeats
ON_TORCHCODEC = [(1, 1), (1, 4), (1, 16), (16, 1), (16, 4), (16, 16), (64, 4), (64, 16)]  # (frames per clip, threads)
ALL_MARKS = [(16, 16), (64, 16)]
ON_DALI = [(1, 64, 8), (4, 16, 8), (16, 4, 4), (16, 16, 16), (64, 4, 4), (64, 16, 16)]  # (frames per clip, clips, threads)
ON_CPU = [(16, 1), (16, 16)]
Request = tuple[list[int], Clip]  # numbers of frames in display order, and their clip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--codec", default="h264")
    parser.add_argument("--size", type=frame_size, default=(480, 640), metavar="HxW")
    parser.add_argument("--gop", type=count, default=2)
    parser.add_argument("--seconds", type=positive, default=1.0, help="duration of each measurement")
    arguments = on_gpu(parser)
    gpu, rows = arguments.gpu, Rows(arguments)

    def keep(decoder: str, frames: int, threads: int, run: tuple[float, int], **more: str) -> None:
        head = {"decoder": decoder, "per_clip": frames, "threads": threads, **more}
        rows.add({**head, "frames_per_s": round(run[0]), "wrong": run[1]})

    with tempfile.TemporaryDirectory() as folder:
        videos.write(folder + "/demo", arguments.codec, arguments.gop, arguments.size)
        video = videos.read(folder + "/demo")[0]
        for marks, settings in {"one": ON_TORCHCODEC, "all": ALL_MARKS}.items() if gpu is not None else ():
            for frames, threads in settings:
                run = with_torchcodec(video, frames, threads, gpu, arguments.seconds, marks == "one")
                keep("torchcodec-cuda", frames, threads, run, marks=marks)
        for frames, threads in ON_CPU:
            keep("torchcodec", frames, threads, with_torchcodec(video, frames, threads, None, arguments.seconds))
        for frames, clips, threads in ON_DALI if gpu is not None or arguments.codec in DALI_ON_CPU else ():
            keep("dali", frames, threads, with_dali(video, frames, clips, threads, gpu, arguments.seconds))


def requests(video: videos.Video, frames: int, clips: int, one_mark: bool = False) -> list[Request]:
    """Return requests for random frames, with clips of which only the first packet is marked as a keyframe if `one_mark`."""
    rng, total = np.random.default_rng(frames), len(video.identity)
    picks = [sorted(rng.choice(total, min(frames, total), replace=False).tolist()) for _ in range(clips)]
    return [(shown, video.clip(shown, one_mark)) for shown in picks]


def with_torchcodec(
    video: videos.Video, frames: int, threads: int, gpu: int | None, seconds: float, one_mark: bool = False
) -> tuple[float, int]:
    """Return the frames/s of torchcodec with a clip per thread at a time, and the number of wrong frames of the first round."""
    made = requests(video, frames, BATCHES, one_mark)

    def decode(request: Request, check: Callable[[list[int], Any], int] | None = None) -> int:
        shown, clip = request
        with own_stream(gpu):
            parts = list(decode_clip_in_parts(clip, video.format, len(shown), device_name(gpu)))
        return len(shown) if check is None else sum(check([shown[i] for i in places], part) for places, part, _ in parts)

    def wrong(shown: list[int], part: Any) -> int:
        return videos.count_wrong(part.cpu().numpy(), video.identity[shown])

    def work(first: int) -> int:
        done = 0
        for request in itertools.islice(itertools.cycle(made), first, None):
            done += decode(request)
            if time.perf_counter() > end:
                break
        return done

    with ThreadPoolExecutor(threads) as pool:
        number = sum(pool.map(lambda request: decode(request, wrong), made))
        started = time.perf_counter()
        end = started + seconds
        delivered = sum(pool.map(work, range(threads)))
        return delivered / (time.perf_counter() - started), number


def with_dali(video: videos.Video, frames: int, clips: int, threads: int, gpu: int | None, seconds: float) -> tuple[float, int]:
    """Return the frames/s of DALI with batches of `clips` clips, and the number of wrong frames of the first batch."""
    made = requests(video, frames, clips)
    encoded = [dali.encoded(clip) for _, clip in made]
    pipeline = dali.pipeline(lambda: encoded, clips, gpu, threads, prefetch=1)
    pipeline.build()
    [decoded] = pipeline.run()
    on_cpu = decoded if gpu is None else decoded.as_cpu()
    wrong = sum(videos.count_wrong(np.array(on_cpu.at(i)), video.identity[shown]) for i, (shown, _) in enumerate(made))
    started, delivered = time.perf_counter(), 0
    while time.perf_counter() - started < seconds:
        pipeline.run()
        delivered += sum(len(shown) for shown, _ in made)
    if gpu is not None:
        import torch

        torch.cuda.synchronize(gpu)
    return delivered / (time.perf_counter() - started), wrong


if __name__ == "__main__":
    main()
