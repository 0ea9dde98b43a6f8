"""Augmentation that can be replayed: DALI operators whose arguments are made from the numbers that each sample brings.

    from dali_stream import augment

    def graph(nodes):
        draw = augment.Draw(nodes["sample"])
        for key in cameras:
            frame = augment.random_resized_crop(nodes[key], draw, size=(224, 224), scale=(0.7, 1.0))
            nodes[key] = augment.color_jitter(frame, draw, brightness=0.2, contrast=0.2, saturation=0.2, hue=0.05)
        return nodes

    loader = dali_stream.Loader(dataset, dali_graph=graph)

The numbers are a function of seed, epoch and position, so the same position gives the same pixels after a resume, under another
number of ranks, in every run on the same kind of device. All frames of a window are treated alike; each call draws again, so
cameras are treated differently, unless each gets its own `Draw`.

Frames are (F)HWC, float32 in [0, 1] or uint8, and stay what they are. Ranges are closed; a number instead of one is the
largest change to either side.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from dali_stream.decode import dali  # noqa: F401  # before DALI itself: it says what to do where that is missing
from dali_stream.order.uniforms import COUNT

# isort: split
from nvidia.dali import fn, types
from nvidia.dali import math as dali_math

if TYPE_CHECKING:
    from nvidia.dali.data_node import DataNode


# DALI's color_twist would do all steps at once, and clamp none.
_COLOR_STEPS: dict[str, Any] = {
    "contrast": fn.brightness_contrast,
    "brightness": fn.brightness_contrast,
    "saturation": fn.color_twist,
    "hue": fn.color_twist,
}
_NO_EFFECT = {"contrast": 1.0, "brightness": 1.0, "saturation": 1.0, "hue": 0.0}
_NO_BLUR = 0.01  # a sigma whose kernel is 1 in the middle and, in float32, 0 beside it


class Draw:
    """Hands out a sample's random numbers, one after the other, as the graph is built.

    Args:
        sample: the node `nodes["sample"]` of a graph function.
        first: how many numbers to leave out: two that begin at the same one hand out the same.
    """

    def __init__(self, sample: DataNode, first: int = 0) -> None:
        self._sample, self._next = sample, first

    def uniform(self, low: float = 0.0, high: float = 1.0) -> DataNode:
        """The next number, uniform in [low, high); a scalar node on the CPU, as DALI's operators take for an argument.

        Raises:
            ValueError: all numbers are handed out.
        """
        if self._next >= COUNT:
            raise ValueError(
                f"a sample brings {COUNT} random numbers, and the graph draws more; use several Draw, which may share numbers "
                "where things may be treated alike"
            )
        number = self._sample[self._next]
        self._next += 1
        return number * (high - low) + low

    def coin(self, probability: float) -> DataNode:
        """1.0 with this probability, else 0.0; a scalar node."""
        if not 0 <= probability <= 1:
            raise ValueError(f"probability is {probability!r}; it is a number from 0 to 1")
        return fn.cast(self.uniform() < float(probability), dtype=types.FLOAT)


def random_resized_crop(
    frame: DataNode,
    draw: Draw,
    *,
    size: tuple[int, int],
    scale: tuple[float, float] = (0.7, 1.0),
    ratio: tuple[float, float] = (0.9, 1.1),
) -> DataNode:
    """Cuts a random part out and resizes it. Draws 4 numbers.

    Args:
        frame, draw: see the module.
        size: (height, width) in pixels of what comes out.
        scale: share of the frame's area that the part has, unless it would be higher or wider than the frame.
        ratio: width by height of the part, as a multiple of the frame's own; its logarithm is drawn uniformly.
    """
    top, left, height, width = _part(draw, scale, ratio)
    part = {"roi_start": fn.stack(top, left), "roi_end": fn.stack(top + height, left + width), "roi_relative": True}
    return fn.resize(frame, size=[*map(int, size)], **part)


def random_shift(frame: DataNode, draw: Draw, *, pixels: tuple[int, int]) -> DataNode:
    """Move the frame by whole pixels, up to (down, right) `pixels` to either side. The edge is repeated. Draws 2 numbers."""
    down, right = (dali_math.floor(draw.uniform() * (2 * count + 1)) - count for count in pixels)
    one, zero = right * 0 + 1, right * 0
    moved = fn.stack(fn.stack(one, zero, right), fn.stack(zero, one, down))
    return fn.warp_affine(frame, matrix=moved, inverse_map=True, interp_type=types.INTERP_NN)


def random_rotation(frame: DataNode, draw: Draw, *, degrees: float | tuple[float, float]) -> DataNode:
    """Turn the frame about its middle and keep its size. The edge is repeated. Draws 1 number."""
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

    Each step clamps values to [0, 1], or to 0 and 255 for uint8, as in torchvision's ColorJitter. Contrast is relative to the
    middle of that range, where torchvision takes the mean of the frame. A step whose range is a single value without effect is
    left out.

    Args:
        frame: Frames, see the module.
        draw: Random numbers, see the module.
        brightness: tuple[float, float] of factors, or largest distance from 1.
        contrast: tuple[float, float] of factors, or largest distance from 1.
        saturation: tuple[float, float] of factors, or largest distance from 1.
        hue: tuple[float, float] of turns of the colour circle, or largest turn to either side. 0.5 is the opposite colour.
    """
    factors = {"brightness": brightness, "contrast": contrast, "saturation": saturation}
    ranges = {name: _around(name, value, 1.0, least=0.0) for name, value in factors.items()} | {"hue": _around("hue", hue, 0.0)}
    drawn = {name: draw.uniform(*bounds) for name, bounds in ranges.items()}
    drawn["hue"] = drawn["hue"] * 360
    lowest, highest = _limits(frame)
    for name, operator in _COLOR_STEPS.items():
        if ranges[name] != (_NO_EFFECT[name],) * 2:
            frame = dali_math.max(dali_math.min(operator(frame, **{name: drawn[name]}), highest), lowest)
    return frame


def gaussian_blur(
    frame: DataNode, draw: Draw, *, sigma: tuple[float, float] = (0.1, 2.0), probability: float = 0.5
) -> DataNode:
    """Blurs some frames, with a standard deviation of `sigma` pixels. Draws 2 numbers."""
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
    """Fills a rectangle of some frames with one value, as if something stood before the camera. Draws 5 numbers.

    Args:
        frame, draw: see the module.
        probability: that a frame gets one.
        scale, ratio: of the rectangle, as in `random_resized_crop`.
        value: of every channel, in the frame's own unit.
    """
    top, left, height, width = _part(draw, scale, ratio)
    there = draw.coin(probability)
    return fn.erase(
        frame, anchor=fn.stack(top, left), shape=fn.stack(height * there, width * there), axis_names="HW",
        normalized_anchor=True, normalized_shape=True, fill_value=float(value),
    )  # fmt: skip


def _limits(frame: DataNode) -> tuple[DataNode, DataNode]:
    """Return the lowest and the highest value of the frame's type as pixels: 0 and 1 for floats, 0 and 255 for uint8.

    The type is not known while the graph is built, but DALI shifts brightness by the range of the type.
    """
    pixel = fn.crop(frame, crop=(1, 1))
    return tuple(fn.brightness_contrast(pixel, brightness=0.0, brightness_shift=shift) for shift in (0.0, 1.0))


def _part(draw: Draw, scale: tuple[float, float], ratio: tuple[float, float]) -> tuple[DataNode, DataNode, DataNode, DataNode]:
    """(top, left, height, width) of a random part of the frame, as shares of its sides. Draws 4 numbers."""
    area = draw.uniform(*_range("scale", scale, 0, 1))
    low, high = _range("ratio", ratio, 0, math.inf)
    shape = dali_math.exp(draw.uniform(math.log(low), math.log(high)))
    height, width = dali_math.min(dali_math.sqrt(area / shape), 1.0), dali_math.min(dali_math.sqrt(area * shape), 1.0)
    return draw.uniform() * (1 - height), draw.uniform() * (1 - width), height, width


def _range(name: str, given: tuple[float, float], least: float, most: float) -> tuple[float, float]:
    low, high = given
    if not least < low <= high <= most:
        raise ValueError(f"{name} is {given!r}; it is (low, high), above {least} and up to {most}")
    return float(low), float(high)


def _around(name: str, given: float | tuple[float, float], middle: float, least: float = -math.inf) -> tuple[float, float]:
    """The range that a number means: as far as that from the middle to either side."""
    low, high = (middle - given, middle + given) if isinstance(given, (int, float)) else given
    if not low <= high or low < least or (isinstance(given, (int, float)) and given < 0):
        bound = "" if least == -math.inf else f", from {least} up"
        raise ValueError(f"{name} is {given!r}; it is (low, high){bound}, or how far from {middle} it may be")
    return float(low), float(high)
