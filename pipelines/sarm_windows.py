"""Windows of past frames for a stage-aware reward model (SARM): 8 steps of all cameras, one second apart.

python pipelines/sarm_windows.py URI [--steps 8] [--spacing 1.0] [--batch-size 8] [--batches 20] [--image-size 224 224]

Frames have the type float16 and the shape (B, steps, 3, H, W). They are normalized with the mean and the standard deviation of
CLIP's image encoders. Steps before the start of the episode show its first frame, and `<camera>_is_pad` is True for them.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

from nvidia.dali import fn, types

import dali_stream
from dali_stream.checks.frame_size import frame_size, join_sizes

CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)  # openai/CLIP, clip.py


def for_clip(cameras: Sequence[str]) -> Any:
    """Return a graph function that normalizes the windows of cameras for CLIP. Other keys are not changed."""

    def graph(nodes: dict[str, Any]) -> dict[str, Any]:
        normal = {"mean": CLIP_MEAN, "std": CLIP_STD, "dtype": types.FLOAT16, "output_layout": "FCHW"}
        return nodes | {key: fn.crop_mirror_normalize(nodes[key], **normal) for key in cameras}

    return graph


def past(steps: int, spacing: float, fps: float) -> list[float]:
    """Return the time of each step relative to the current frame in seconds, from the oldest to 0.

    Args:
        steps: Number of steps.
        spacing: Distance between steps in seconds. It is rounded to whole frames.
        fps: Frames per second.
    """
    frames = max(round(spacing * fps), 1)
    return [-frames * step / fps for step in reversed(range(steps))]


def main(argv: Sequence[str] | None = None) -> None:
    """Stream some batches, and print their shapes and the rate."""
    parser = argparse.ArgumentParser(description="Windows of the past, of all cameras")
    parser.add_argument("uri", help="a LeRobot dataset")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--spacing", type=float, default=1.0, help="seconds between steps")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--batches", type=int, default=20)
    parser.add_argument("--image-size", type=frame_size, default=(224, 224), metavar="HxW")
    arguments = parser.parse_args(join_sizes(argv))
    dataset = dali_stream.Dataset(arguments.uri)
    window = past(arguments.steps, arguments.spacing, dataset.fps)
    started = time.perf_counter()
    with dali_stream.Loader(
        dataset,
        batch_size=arguments.batch_size,
        delta_timestamps={key: window for key in (*dataset.cameras, "observation.state") if key in dataset.features},
        image_size=arguments.image_size,
        dali_graph=for_clip([key for key in dataset.cameras if not dataset.features[key].is_depth]),
    ) as loader:
        for count, batch in zip(range(1, arguments.batches + 1), loader, strict=False):
            for key, value in batch.items() if count == 1 else ():
                print(f"{key}: {tuple(value.shape)} {value.dtype}" if hasattr(value, "shape") else f"{key}: {value[0]!r}, ...")
    seconds = time.perf_counter() - started
    print(f"{count * arguments.batch_size / seconds:.0f} samples/s, the first batch included")


if __name__ == "__main__":
    main()
