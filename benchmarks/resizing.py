"""Compare the kernel that resizes the frames of the CPU with those of Pillow and of DALI on a CPU.

    python benchmarks/resizing.py URI [--frames 64] [--image-size 224x224] [--json]

A batch of frames is decoded at the recorded size and resized by each kernel. The differences are in levels of 255.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import numpy as np
import numpy.typing as npt
from argument_types import count
from nvidia.dali import fn, pipeline_def, types
from PIL import Image

import dali_stream
from dali_stream.checks.frame_size import frame_size, join_sizes
from dali_stream.decode.resize import resize
from dali_stream.tools import environment

Frames = npt.NDArray[np.uint8]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("uri")
    parser.add_argument("--frames", type=count, default=64)
    parser.add_argument("--image-size", type=frame_size, default=(224, 224), metavar="HxW")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    arguments = parser.parse_args(join_sizes())
    frames, size = decoded(arguments.uri, arguments.frames), arguments.image_size
    own = resize(frames, size)
    kernels: dict[str, npt.NDArray[Any]] = {
        "Pillow, BILINEAR": by_pillow(frames, size),
        "DALI on a CPU, uint8": by_dali(frames, size, types.UINT8),
        "DALI on a CPU, float32": by_dali(frames, size, types.FLOAT),
    }
    report: dict[str, Any] = {"frames": len(frames), "recorded_size": frames.shape[1:3], "image_size": size}
    for name, resized in kernels.items():
        difference = np.abs(resized.astype(np.float32) - own)
        report[name] = {"mean": float(difference.mean()), "maximum": float(difference.max())}
        print(f"{name}: mean difference {report[name]['mean']:.3f}, maximum {report[name]['maximum']:.1f}", flush=True)
    if arguments.json:
        print(environment.report_json(report | environment.ran_on("cpu")))
    return 0


def decoded(uri: str, number: int) -> Frames:
    """Return frames of the first camera at the recorded size, uint8, shape (number, H, W, 3)."""
    dataset = dali_stream.Dataset(uri, cameras=dali_stream.Dataset(uri).videos[:1])
    loader = dali_stream.Loader(dataset, batch_size=number, image_dtype="uint8", memory_budget="1GiB", device="cpu")
    with loader:
        frames = next(iter(loader))[dataset.videos[0]]
    return np.ascontiguousarray(frames.movedim(-3, -1).numpy())


def by_pillow(frames: Frames, size: tuple[int, int]) -> Frames:
    """Return the frames resized by Pillow with its filter `BILINEAR`."""
    return np.stack([Image.fromarray(frame).resize(size[::-1], Image.Resampling.BILINEAR) for frame in frames])


def by_dali(frames: Frames, size: tuple[int, int], dtype: types.DALIDataType) -> npt.NDArray[Any]:
    """Return the frames resized by `fn.resize` on the CPU, as in the graph of a Loader."""

    @pipeline_def(batch_size=len(frames), num_threads=1, device_id=None)
    def graph() -> Any:
        images = fn.external_source(lambda: list(frames), batch=True, layout="HWC")
        return fn.resize(images, size=size, dtype=dtype)

    pipeline = graph()
    pipeline.build()
    [resized] = pipeline.run()
    return np.asarray(resized.as_tensor())


if __name__ == "__main__":
    sys.exit(main())
