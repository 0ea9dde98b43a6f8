"""Batches for action chunking policies (ACT, diffusion, flow matching): augmented current frames and chunks of future actions.

python pipelines/action_chunks.py URI [--chunk 50] [--batch-size 32] [--batches 50] [--image-size 224 224] [--seed 0]

Actions have the shape (B, chunk, D) and values in [-1, 1]. `action_is_pad` is True after the end of the episode. The state has
mean 0 and standard deviation 1. The augmentation is a function of the seed and the position in the order. See
`dali_stream.augment`.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Sequence
from typing import Any

from nvidia.dali import math
from show import show

import dali_stream
from dali_stream import augment
from dali_stream.checks.frame_size import frame_size, join_sizes


def colour_cameras(dataset: dali_stream.Dataset | dali_stream.Mixture) -> list[str]:
    """Return the cameras without depth cameras, whose distances are not colours in [0, 1]."""
    return [key for key in dataset.cameras if not dataset.features[key].is_depth]


def augmented(cameras: Sequence[str], size: tuple[int, int]) -> Any:
    """Return `augment_frames` with its arguments."""
    return functools.partial(augment_frames, cameras=list(cameras), size=size)


def augment_frames(nodes: dict[str, Any], cameras: Sequence[str], size: Sequence[int]) -> dict[str, Any]:
    """Crop and rotate the frames of each camera, and change their colours, independently. Other keys are not changed."""
    draw = augment.Draw(nodes["sample"])
    for key in cameras:
        picture = augment.random_resized_crop(nodes[key], draw, size=size, scale=(0.8, 1.0))
        picture = augment.random_rotation(picture, draw, degrees=3)
        picture = augment.color_jitter(picture, draw, brightness=0.2, contrast=0.2, saturation=0.3, hue=0.03)
        nodes[key] = math.clamp(picture, 0.0, 1.0)
    return nodes


def main(argv: Sequence[str] | None = None) -> None:
    """Stream some batches, and print their shapes and the rate."""
    parser = argparse.ArgumentParser(description="Current frames, augmented, and chunks of the actions to come")
    parser.add_argument("uri", help="a LeRobot v3 dataset")
    parser.add_argument("--chunk", type=int, default=50, help="actions per chunk, one per frame")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--batches", type=int, default=50)
    parser.add_argument("--image-size", type=frame_size, default=(224, 224), metavar="HxW")
    parser.add_argument("--seed", type=int, default=0, help="seed of the order and the augmentation")
    arguments = parser.parse_args(join_sizes(argv))

    dataset = dali_stream.Dataset(arguments.uri)
    scales = {"action": "min_max", "observation.state": "mean_std"}
    loader = dali_stream.Loader(
        dataset,
        batch_size=arguments.batch_size,
        delta_timestamps={"action": [step / dataset.fps for step in range(arguments.chunk)]},
        dali_graph=augmented(colour_cameras(dataset), arguments.image_size),
        normalize={key: scale for key, scale in scales.items() if key in dataset.features},
        seed=arguments.seed,
    )
    show(loader, arguments.batches)


if __name__ == "__main__":
    main()
