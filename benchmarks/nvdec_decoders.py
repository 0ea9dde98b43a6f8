"""Measure the speed of torchcodec on NVDEC and on the CPU, over frames per clip, threads and keyframe marks.

    python benchmarks/nvdec_decoders.py [--codec h264 hevc] [--size 480x640] [--gop 2] [--seconds 1] [--device cuda]
                                        [--out FILE]

The program writes a demo dataset per codec, and decodes random frames of one of its videos from packed clips. The frames stay
on the GPU. In the first round, their identity is read, and `wrong` is the number of frames that are not the requested ones.
`marks` is the keyframe marks of the clips: "one", as in a Loader on NVDEC, or "all", one for each GOP prefix, at which
torchcodec flushes the decoder. `--device cpu` serves only to test this program. The exit code is 1 if a frame is wrong.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from argument_types import count, positive
from program import Rows, on_gpu

from dali_stream.checks.frame_size import frame_size
from dali_stream.decode.torchcodec import decode_clip_in_parts
from dali_stream.decode.torchcodec_cuda import device_name, own_stream
from dali_stream.mp4.clip import Clip
from dali_stream.tools.selftest import videos

CLIPS = 24  # number of clips that are decoded again and again
SETTINGS = [  # frames per clip, threads, marks; most important first
    *((16, 16, "one"), (16, 16, "all"), (64, 16, "one"), (64, 16, "all")),
    *((16, 4, "one"), (64, 4, "one"), (1, 16, "one"), (1, 4, "one")),
]
ON_CPU = [(16, 16, "all"), (16, 1, "all")]
Request = tuple[list[int], Clip]  # numbers of frames in display order, and their clip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--codec", nargs="+", default=["h264"])
    parser.add_argument("--size", type=frame_size, default=(480, 640), metavar="HxW")
    parser.add_argument("--gop", type=count, default=2)
    parser.add_argument("--seconds", type=positive, default=1.0, help="duration of each measurement")
    arguments = on_gpu(parser)
    rows = Rows(arguments)
    with tempfile.TemporaryDirectory() as folder:
        for codec in arguments.codec:
            videos.write(f"{folder}/{codec}", codec, arguments.gop, arguments.size)
            video = videos.read(f"{folder}/{codec}")[0]
            for gpu, settings in ((arguments.gpu, SETTINGS), (None, ON_CPU)):
                for frames, threads, marks in settings:
                    row = {"codec": codec, "decoder": "torchcodec" if gpu is None else "torchcodec-cuda", "marks": marks}
                    rate, wrong = measure(video, frames, threads, gpu, arguments.seconds, marks == "one")
                    rows.add(row | {"per_clip": frames, "threads": threads, "frames_per_s": round(rate), "wrong": wrong})
    return 1 if any(row["wrong"] for row in rows.report["rows"]) else 0


def measure(
    video: videos.Video, frames: int, threads: int, gpu: int | None, seconds: float, one_mark: bool
) -> tuple[float, int]:
    """Return the frames/s with a clip per thread at a time, and the number of wrong frames of the first round.

    Args:
        video: Video whose frames are decoded.
        frames: Number of random frames per clip.
        threads: Number of threads.
        gpu: Index of the CUDA device. None for the CPU.
        seconds: Duration of the measurement after the first round.
        one_mark: Whether only the first packet of a clip is marked as a keyframe.
    """
    rng, total = np.random.default_rng(frames), len(video.identity)
    picks = [sorted(rng.choice(total, min(frames, total), replace=False).tolist()) for _ in range(CLIPS)]
    clips = [(shown, video.clip(shown, one_mark)) for shown in picks]

    def decode(request: Request, check: Callable[[list[int], Any], int] | None = None) -> int:
        shown, clip = request
        with own_stream(gpu):
            parts = list(decode_clip_in_parts(clip, video.format, len(shown), device_name(gpu)))
        return len(shown) if check is None else sum(check([shown[i] for i in places], part) for places, part, _ in parts)

    def wrong(shown: list[int], part: Any) -> int:
        return videos.count_wrong(part.cpu().numpy(), video.identity[shown])

    def work(first: int) -> int:
        done = 0
        for request in itertools.islice(itertools.cycle(clips), first, None):
            done += decode(request)
            if time.perf_counter() > end:
                break
        return done

    with ThreadPoolExecutor(threads) as pool:
        number = sum(pool.map(lambda request: decode(request, wrong), clips))
        started = time.perf_counter()
        end = started + seconds
        delivered = sum(pool.map(work, range(threads)))
        return delivered / (time.perf_counter() - started), number


if __name__ == "__main__":
    sys.exit(main())
