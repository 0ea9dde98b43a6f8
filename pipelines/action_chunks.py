"""Batches for action chunking policies (ACT, diffusion, flow matching): augmented current frames and chunks of future actions.

python pipelines/action_chunks.py URI [--chunk 50] [--batch-size 32] [--batches 50] [--image-size 224 224] [--seed 0]

Actions have the shape (B, chunk, D) and values in [-1, 1]. `action_is_pad` is True after the end of the episode. The state has
mean 0 and standard deviation 1. The augmentation is a function of the seed and the position in the order. See
`dali_stream.augment`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from examples import Parser, show
from nvidia.dali import math

import dali_stream
from dali_stream import augment

STATE, ACTION = "observation.state", "action"


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


def loader_arguments(
    dataset: dali_stream.Dataset | dali_stream.Mixture, fps: float, chunk: int, size: tuple[int, int], action: str = "mean_std"
) -> dict[str, Any]:
    """Return the arguments of a Loader for action chunks. Frames of a mixture also need `image_size`, to have one size.

    Args:
        dataset: Dataset or mixture.
        fps: Actions per second.
        chunk: Number of actions per chunk.
        size: Size (height, width) of the augmented frames in pixels.
        action: Normalization of actions. Default: "mean_std", as for the state.
    """
    scales = {ACTION: action, STATE: "mean_std"}
    return {
        "delta_timestamps": {ACTION: [step / fps for step in range(chunk)]},
        "dali_graph": augmented(colour_cameras(dataset), size),
        "normalize": {key: scale for key, scale in scales.items() if key in dataset.features},
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Stream some batches, and print their shapes and the rate."""
    parser = Parser("Current frames, augmented, and chunks of the actions to come").streams()
    parser.add_argument("--chunk", type=int, default=50, help="actions per chunk, one per frame")
    parser.add_argument("--seed", type=int, default=0, help="seed of the order and the augmentation")
    arguments = parser.parse(argv)
    dataset = dali_stream.Dataset(arguments.uri)
    options = loader_arguments(dataset, dataset.fps, arguments.chunk, arguments.image_size, action="min_max")
    show(dali_stream.Loader(dataset, batch_size=arguments.batch_size, seed=arguments.seed, **options), arguments.batches)


if __name__ == "__main__":
    main()
