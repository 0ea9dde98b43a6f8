"""Reproducible augmentation: DALI operators whose arguments are computed from random numbers that are part of each sample.

    from dali_stream import augment

    def graph(nodes):
        draw = augment.Draw(nodes["sample"])
        for key in cameras:  # without depth cameras
            frame = augment.random_resized_crop(nodes[key], draw, size=(224, 224), scale=(0.7, 1.0))
            nodes[key] = augment.color_jitter(frame, draw, brightness=0.2, contrast=0.2, saturation=0.2, hue=0.05)
        return nodes

    loader = dali_stream.Loader(dataset, dali_graph=graph)

The numbers are a function of seed, epoch and position. The same position therefore gives the same pixels after a resume, on any
number of ranks, and in every run on the same kind of device. All frames of a window get the same augmentation. Each call draws
new numbers, so cameras get different augmentations. To augment all cameras in the same way, make a `Draw` for each camera,
because every `Draw` begins with the same numbers.

Frames have the layout HWC or FHWC, and are float32 in [0, 1] or uint8. Layout and dtype do not change, and neither does the
size, except in `random_resized_crop`. A range is a tuple (low, high). A number instead of a range is the largest change in both
directions. All functions raise a ValueError if a range is invalid or if no random numbers are left.

Depth is not in [0, 1]: functions that change colours clamp distances, and crops, rotation and blur interpolate them. Leave
depth cameras out, or use operators of DALI for them.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from dali_stream.decode import dali  # noqa: F401  # imported before DALI, since its error explains how to install DALI
from dali_stream.order.uniforms import COUNT

# isort: split
from nvidia.dali import fn, types
from nvidia.dali import math as dali_math

if TYPE_CHECKING:
    from nvidia.dali.data_node import DataNode


# Separate operators, since DALI's color_twist applies all steps at once without clamping between them.
_COLOR_STEPS: dict[str, Any] = {
    "contrast": fn.brightness_contrast,
    "brightness": fn.brightness_contrast,
    "saturation": fn.color_twist,
    "hue": fn.color_twist,
}
_NO_EFFECT = {"contrast": 1.0, "brightness": 1.0, "saturation": 1.0, "hue": 0.0}
_NO_BLUR = 0.01  # sigma without effect: in float32, its kernel is 1 in the middle and 0 elsewhere


class Draw:
    """Source of a sample's random numbers. Each call of a method uses the next one while the graph is built.

    Args:
        sample: Node `nodes["sample"]` of a graph function.
        first: Number of random numbers to skip. Two objects with the same value return the same numbers. Default: 0.
    """

    def __init__(self, sample: DataNode, first: int = 0) -> None:
        self._sample, self._next = sample, first

    def uniform(self, low: float = 0.0, high: float = 1.0) -> DataNode:
        """Return the next number, uniform in [low, high), as a scalar node on the CPU, which DALI accepts as an argument.

        Raises:
            ValueError: If no numbers are left.
        """
        if self._next >= COUNT:
            raise ValueError(
                f"a graph must draw at most {COUNT} random numbers per sample. Use a second Draw. "
                "It returns the same numbers as the first one"
            )
        number = self._sample[self._next]
        self._next += 1
        return number * (high - low) + low

    def coin(self, probability: float) -> DataNode:
        """Return a scalar node that is 1.0 with this probability, and 0.0 otherwise.

        Raises:
            ValueError: If `probability` is not in [0, 1], or if no numbers are left.
        """
        if not 0 <= probability <= 1:
            raise ValueError(f"probability must be from 0 to 1, got {probability!r}")
        return fn.cast(self.uniform() < float(probability), dtype=types.FLOAT)


def random_resized_crop(
    frame: DataNode,
    draw: Draw,
    *,
    size: tuple[int, int],
    scale: tuple[float, float] = (0.7, 1.0),
    ratio: tuple[float, float] = (0.9, 1.1),
) -> DataNode:
    """Crop a random part of the frame, and resize it. Draws 4 numbers.

    Args:
        frame: Frames, see the module.
        draw: Random numbers, see the module.
        size: Size (height, width) of the result in pixels.
        scale: Range of the part's share of the frame's area. The share is smaller if the part would exceed the frame.
            Default: (0.7, 1.0).
        ratio: Range of the part's aspect ratio (width / height), relative to that of the frame. Its logarithm is drawn
            uniformly. Default: (0.9, 1.1).
    """
    top, left, height, width = _part(draw, scale, ratio)
    part = {"roi_start": fn.stack(top, left), "roi_end": fn.stack(top + height, left + width), "roi_relative": True}
    return fn.resize(frame, size=[*map(int, size)], **part)


def random_shift(frame: DataNode, draw: Draw, *, pixels: tuple[int, int]) -> DataNode:
    """Shift the frame by a random number of whole pixels. Pixels at the edge are repeated. Draws 2 numbers.

    Args:
        frame: Frames, see the module.
        draw: Random numbers, see the module.
        pixels: Largest shift (vertical, horizontal) in pixels, in both directions.
    """
    down, right = (dali_math.floor(draw.uniform() * (2 * count + 1)) - count for count in pixels)
    one, zero = right * 0 + 1, right * 0
    moved = fn.stack(fn.stack(one, zero, right), fn.stack(zero, one, down))
    return fn.warp_affine(frame, matrix=moved, inverse_map=True, interp_type=types.INTERP_NN)


def random_rotation(frame: DataNode, draw: Draw, *, degrees: float | tuple[float, float]) -> DataNode:
    """Rotate the frame about its center, and keep its size. Pixels at the edge are repeated. Draws 1 number.

    Args:
        frame: Frames, see the module.
        draw: Random numbers, see the module.
        degrees: Range of the angle, or the largest angle in both directions, in degrees.
    """
    return fn.rotate(frame, angle=draw.uniform(*_around("degrees", degrees, 0.0)), keep_size=True)


def color_jitter(
    frame: DataNode,
    draw: Draw,
    *,
    brightness: float | tuple[float, float] = 0.0,
    contrast: float | tuple[float, float] = 0.0,
    saturation: float | tuple[float, float] = 0.0,
    hue: float | tuple[float, float] = 0.0,
) -> DataNode:
    """Change contrast, brightness, saturation and hue, in this order. Draws 4 numbers.

    Each step clamps values to [0, 1], or to [0, 255] for uint8, as in torchvision's ColorJitter. Contrast is relative to the
    middle of this range, whereas torchvision uses the mean of the frame. A step that has no effect is left out. Saturation and
    hue need frames of 3 channels.

    Args:
        frame: Frames, see the module.
        draw: Random numbers, see the module.
        brightness: Range of the factor, or its largest difference from 1. Default: 0.0, no change.
        contrast: Range of the factor, or its largest difference from 1. Default: 0.0, no change.
        saturation: Range of the factor, or its largest difference from 1. Default: 0.0, no change.
        hue: Range of the rotation of the colour wheel, or the largest rotation in both directions, in turns. A rotation of
            0.5 gives the opposite colour. Default: 0.0, no change.
    """
    factors = {"brightness": brightness, "contrast": contrast, "saturation": saturation}
    ranges = {name: _around(name, value, 1.0, least=0.0) for name, value in factors.items()} | {"hue": _around("hue", hue, 0.0)}
    drawn = {name: draw.uniform(*bounds) for name, bounds in ranges.items()}
    drawn["hue"] = drawn["hue"] * 360
    lowest, highest = _limits(frame)
    steps = {name: operator for name, operator in _COLOR_STEPS.items() if ranges[name] != (_NO_EFFECT[name],) * 2}
    if fn.color_twist in steps.values():
        # It would write beyond the memory of a frame with fewer channels, for which this slice fails.
        frame = fn.slice(frame, 0, 3, axis_names="C")
    for name, operator in steps.items():
        frame = dali_math.max(dali_math.min(operator(frame, **{name: drawn[name]}), highest), lowest)
    return frame


def gaussian_blur(
    frame: DataNode, draw: Draw, *, sigma: tuple[float, float] = (0.1, 2.0), probability: float = 0.5
) -> DataNode:
    """Blur the frames of some samples. Draws 2 numbers.

    Args:
        frame: Frames, see the module.
        draw: Random numbers, see the module.
        sigma: Range of the standard deviation of the blur in pixels. Default: (0.1, 2.0).
        probability: Probability that a sample is blurred. Default: 0.5.
    """
    drawn, blurred = draw.uniform(*_range("sigma", sigma, 0, math.inf)), draw.coin(probability)
    return fn.gaussian_blur(frame, sigma=blurred * (drawn - _NO_BLUR) + _NO_BLUR)


def random_erasing(
    frame: DataNode,
    draw: Draw,
    *,
    probability: float = 0.5,
    scale: tuple[float, float] = (0.02, 0.2),
    ratio: tuple[float, float] = (0.5, 2.0),
    value: float = 0.0,
) -> DataNode:
    """Fill a rectangle in the frames of some samples with one value, as if an object covered it. Draws 5 numbers.

    Args:
        frame: Frames, see the module.
        draw: Random numbers, see the module.
        probability: Probability that a sample gets a rectangle. Default: 0.5.
        scale, ratio: Ranges of the rectangle's area and aspect ratio. See `random_resized_crop`. Default: (0.02, 0.2) and
            (0.5, 2.0).
        value: Value of all channels in the rectangle, in [0, 1], or in [0, 255] for uint8. Default: 0.0.
    """
    top, left, height, width = _part(draw, scale, ratio)
    is_erased = draw.coin(probability)
    return fn.erase(
        frame, anchor=fn.stack(top, left), shape=fn.stack(height * is_erased, width * is_erased), axis_names="HW",
        normalized_anchor=True, normalized_shape=True, fill_value=float(value),
    )  # fmt: skip


def _limits(frame: DataNode) -> tuple[DataNode, DataNode]:
    """Return the lowest and the highest value of the frame's type as pixels: 0 and 1 for floats, 0 and 255 for uint8.

    The type is not known while the graph is built. But `brightness_shift` is relative to the range of the type, so black with a
    shift of 0 or 1 is the lowest or the highest value.
    """
    pixel = fn.crop(frame, crop=(1, 1))
    return tuple(fn.brightness_contrast(pixel, brightness=0.0, brightness_shift=shift) for shift in (0.0, 1.0))


def _part(draw: Draw, scale: tuple[float, float], ratio: tuple[float, float]) -> tuple[DataNode, DataNode, DataNode, DataNode]:
    """Return (top, left, height, width) of a random part of the frame, as shares of its sides. Draws 4 numbers."""
    area = draw.uniform(*_range("scale", scale, 0, 1))
    low, high = _range("ratio", ratio, 0, math.inf)
    shape = dali_math.exp(draw.uniform(math.log(low), math.log(high)))
    height, width = dali_math.min(dali_math.sqrt(area / shape), 1.0), dali_math.min(dali_math.sqrt(area * shape), 1.0)
    return draw.uniform() * (1 - height), draw.uniform() * (1 - width), height, width


def _range(name: str, value: tuple[float, float], least: float, most: float) -> tuple[float, float]:
    low, high = value
    if not least < low <= high <= most:
        raise ValueError(f"{name} must be (low, high), greater than {least} and at most {most}, got {value!r}")
    return float(low), float(high)


def _around(name: str, value: float | tuple[float, float], middle: float, least: float = -math.inf) -> tuple[float, float]:
    """Return a range (low, high). A number instead of a range is the distance of both bounds from the middle."""
    low, high = (middle - value, middle + value) if isinstance(value, (int, float)) else value
    if not low <= high or low < least or (isinstance(value, (int, float)) and value < 0):
        bound = "" if least == -math.inf else f" of at least {least}"
        raise ValueError(f"{name} must be (low, high){bound}, or the distance of both from {middle}, got {value!r}")
    return float(low), float(high)
