"""Contact sheets: a batch as the model sees it, without scaling, captioned with task and indices.

Each sample is a cell. Its cameras are side by side, and each camera's window is a strip of frames. The PNG has a text chunk
`dali_stream`, which contains the position of each frame and plot as JSON.

    top                 side
    -0.1 s    now       -0.1 s    now
    ┌────────┬────────┐ ┌────────┬────────┐
    │        │        │ │        │        │
    └────────┴────────┘ └────────┴────────┘
    action, now to +0.5 s       -1.2 to 1.1
    ┌─────────────────────────────────────┐
    └─────────────────────────────────────┘
    Push the red block to the goal on the left.
    episode 3 · frame 57 · index 412

For datasets without cameras, `episodes` returns whole episodes, whose state and action are plotted over time.
"""

from __future__ import annotations

import functools
import json
import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageColor, ImageDraw, ImageFont, PngImagePlugin

from dali_stream.checks.text import visible
from dali_stream.dataset import Dataset
from dali_stream.errors import DaliStreamError, counted
from dali_stream.lerobot.features import vectors
from dali_stream.lerobot.rows import RowReader
from dali_stream.mixture import Mixture
from dali_stream.tools.work import spread

MARGIN, CELL_GAP, CAMERA_GAP, STEP_GAP = 20, 24, 12, 3
LEAST_CELL = 320  # minimum width of a cell, so that the line with the indices fits
TITLE, TEXT, SMALL = 20, 15, 13  # font sizes in pixels; a line is a third higher
BACKGROUND, BRIGHT, PLAIN, DIM, PAD = "#14161a", "#ffffff", "#d5d8de", "#8d939e", "#f0a63c"
_MOST_LINES = 3  # maximum number of lines of a task
_WIDEST = 2400  # maximum width of a sheet with several columns, in pixels
_COLOURS = ("#4c9be8", "#f0a63c", "#5fc27e", "#e2657b", "#b48ce0", "#43c2c7", "#d6c24a", "#9aa3b2")
_MOST_FEATURES = 6
_FALSE_COLOURS = ("#30123b", "#4686fb", "#1ae4b6", "#a4fc3c", "#faba39", "#e4460a", "#7a0402")  # near to far
_BAR = 3  # height of the bar with the false colours, in pixels
_STRIP_HEIGHT, _PLOT_HEIGHT = 56, 150  # heights of a plot below frames, and of a plot in a sample without frames


class Depth(NamedTuple):
    """Meaning of the frames of a depth camera: their unit, and the distance of pixels at which nothing was measured."""

    unit: str
    nothing: float


@dataclass(frozen=True)
class Series:
    """Frames of a camera, or values of a numeric feature, in the window of one sample.

    Attributes:
        data: Frames, uint8 of shape (T, H, W, 3), or values of shape (T, D).
        scale: Distances of the first and the last of the false colours, such as "310 to 4870 mm". Empty for other frames.
        seconds: Time of each step relative to the current frame, in seconds.
        padded: Whether each step is outside the episode.
        missing: Whether the sample's dataset lacks the camera or feature.
    """

    key: str
    data: npt.NDArray[Any]
    seconds: Sequence[float]
    padded: Sequence[bool]
    missing: bool = False
    scale: str = ""


@dataclass(frozen=True)
class Sample:
    """Content of a cell. `dataset` is empty if the batch is not from a mixture. `notes` has a line per language column."""

    strips: Sequence[Series]
    values: Sequence[Series]
    dataset: str
    task: str
    episode: int
    frame: int
    index: int
    notes: Sequence[str] = ()


def samples(
    batch: Mapping[str, Any],
    cameras: Sequence[str],
    windows: Mapping[str, Sequence[float]],
    plots: Sequence[str] = (),
    depth: Mapping[str, Depth] | None = None,
) -> list[Sample]:
    """Return copies of the samples of a batch.

    Args:
        batch: Batch of a Loader. Frames are uint8 or floats in [0, 1], of shape (B, C, H, W) or (B, T, C, H, W).
        cameras: Keys of the frames to show.
        windows: Argument `delta_timestamps` of the Loader.
        plots: Keys of the features to plot below the frames. Default: none.
        depth: Cameras whose frames are distances, by key. They get false colours. Default: none.
    """
    count = len(batch["index"])

    def split(key: str, data: npt.NDArray[Any], scale: str = "") -> list[Series]:
        """Return the window of each sample. `data` has shape (B, T, ...)."""
        seconds = windows.get(key, [0.0])
        if data.shape[1] != len(seconds):  # a `dali_graph` has changed the window
            seconds = [0.0] * data.shape[1]
        padded = batch.get(f"{key}_is_pad", np.zeros(data.shape[:2], bool)).tolist()
        missing = batch.get(f"{key}_is_missing", np.zeros(count, bool)).tolist()
        parts = zip(data.copy(), [seconds] * count, padded, missing, strict=True)
        return [Series(key, *each, scale) for each in parts]

    distances = depth or {}
    strips = [
        split(key, *_false_colours(batch[key], distances[key])) if key in distances else split(key, _pixels(batch[key]))
        for key in cameras
    ]
    numbers = {key: batch[key].cpu().double().numpy() for key in plots}
    values = [split(key, each.reshape(count, len(windows.get(key, [0.0])), -1)) for key, each in numbers.items()]
    captions = [batch.get(key) or [""] * count for key in ("dataset", "task")]
    captions += [batch[key].tolist() for key in ("episode_index", "frame_index", "index")]
    times = batch["timestamp"].tolist() if "timestamp" in batch else [math.inf] * count
    columns = [values for values in batch.values() if isinstance(values, list) and any(isinstance(v, list) for v in values)]
    captions.append([[_note(column[n], times[n]) for column in columns if column[n]] for n in range(count)])
    return [
        Sample([camera[n] for camera in strips], [feature[n] for feature in values], *caption)
        for n, caption in enumerate(zip(*captions, strict=True))
    ]


def _note(annotations: Sequence[Mapping[str, Any] | None], now: float) -> str:
    """Return the role and the first line of the last annotation up to a time in seconds, or else of the first annotation."""
    told = [each for each in annotations if each and each.get("content")]
    past = [each for each in told if (each.get("timestamp") or 0.0) <= now + 1e-6] or told[:1]
    return f"{past[-1].get('role')}: {past[-1]['content'].splitlines()[0]}" if past else f"{len(annotations)} without text"


def image_keys(batch: Mapping[str, Any], dataset: Dataset | Mixture) -> list[str]:
    """Return the keys of the images in a batch: cameras, and images that a `dali_graph` has added."""
    keys = [*dataset.cameras, *(key for key in batch if key not in dataset.features)]
    return [key for key in keys if getattr(batch.get(key), "ndim", 0) in (4, 5) and batch[key].shape[-3] in (1, 3, 4)]


def _pixels(frames: Any) -> npt.NDArray[np.uint8]:
    """Return the frames of a batch as uint8, shape (B, T, H, W, C)."""
    if frames.ndim == 4:
        frames = frames[:, None]
    if frames.is_floating_point():
        frames = (frames * 255).round().clamp(0, 255).byte()
    pixels = frames.movedim(-3, -1).cpu().contiguous().numpy()
    return np.repeat(pixels, 3, -1) if pixels.shape[-1] == 1 else pixels


def _false_colours(frames: Any, depth: Depth) -> tuple[npt.NDArray[np.uint8], str]:
    """Return the distances of a batch as colours, shape (B, T, H, W, 3), and the range of the colours as text.

    Pixels at which nothing was measured are black.
    """
    values = (frames[:, None] if frames.ndim == 4 else frames).movedim(-3, -1)[..., 0].cpu().numpy()
    is_measured = np.isfinite(values) & (values > depth.nothing)
    measured = values[is_measured]
    least, most = (float(measured.min()), float(measured.max())) if len(measured) else (0.0, 0.0)
    colours = _gradient((np.where(is_measured, values, least) - least) / max(most - least, 1e-9))
    colours[~is_measured] = 0
    digits = ".0f" if depth.unit == "mm" else ".2f"
    return colours, f"{least:{digits}} to {most:{digits}} {depth.unit}"


def _gradient(places: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """Return the false colours of places from 0 to 1, with a further axis for the channels."""
    channels = np.array([ImageColor.getrgb(colour) for colour in _FALSE_COLOURS]).T
    at = np.linspace(0, 1, len(_FALSE_COLOURS))
    return np.stack([np.interp(places, at, channel) for channel in channels], -1).round().astype(np.uint8)


def save(path: Path, title: str, shown: Sequence[Sample], columns: int | None = None) -> None:
    """Draw a sheet, and write it as PNG.

    Args:
        path: Path of the PNG.
        title, shown, columns: See `draw`.

    Raises:
        DaliStreamError: If the PNG cannot be written.
    """
    image, text = draw(title, shown, columns), PngImagePlugin.PngInfo()
    text.add_text("dali_stream", image.info["dali_stream"])
    try:
        image.save(path, format="PNG", pnginfo=text)
    except OSError as error:
        raise DaliStreamError(f"{path}: the contact sheet cannot be written: {error.strerror}. Give another --out") from error


def draw(title: str, shown: Sequence[Sample], columns: int | None = None) -> Image.Image:
    """Draw samples row by row. `info["dali_stream"]` of the image has the position of each frame and plot as JSON.

    Args:
        title: Title of the sheet.
        shown: Samples of one batch, or from `episodes`.
        columns: Number of columns. Default: the number that brings the sheet closest to 4:3, within a width of 2400 pixels.
    """
    strips = shown[0].strips  # all samples have frames of the same sizes, so all cells are alike
    width = max(LEAST_CELL, sum(_width(strip) + CAMERA_GAP for strip in strips) - CAMERA_GAP)
    tasks = [[*_wrapped(sample.task, width), *sample.notes] for sample in shown]
    ranges = [
        _range(np.concatenate([values.data for values in feature]))
        for feature in zip(*(sample.values for sample in shown), strict=True)
    ]
    plot_height = _STRIP_HEIGHT if strips else _PLOT_HEIGHT
    plots = max((strip.data.shape[1] + 6 for strip in strips), default=0)  # distance of the plots from the top of a cell
    captions = plots + len(ranges) * (line(SMALL) + plot_height + 6)
    height = captions + 2 + max(map(len, tasks)) * line(TEXT) + line(SMALL)
    windowed = any(list(strip.seconds) != [0.0] for strip in strips)
    header = MARGIN + line(TITLE) + 14
    cells = header + line(SMALL) * (2 if windowed else 1) + 4

    def size(columns: int) -> tuple[int, int]:
        rows = -(-len(shown) // columns)
        return 2 * MARGIN + columns * (width + CELL_GAP) - CELL_GAP, cells + rows * (height + CELL_GAP) - CELL_GAP + MARGIN

    if columns is None:
        fits = [count for count in range(1, len(shown) + 1) if size(count)[0] <= _WIDEST] or [1]
        columns = min(fits, key=lambda count: abs(math.log(size(count)[0] / size(count)[1] * 3 / 4)))
    columns = min(columns, len(shown))
    page = _Page(size(columns))
    page.text(MARGIN, MARGIN, title, BRIGHT, TITLE, size(columns)[0] - 2 * MARGIN)
    frames, plotted = [], []
    for number, (sample, task) in enumerate(zip(shown, tasks, strict=True)):
        row, column = divmod(number, columns)
        left, top = MARGIN + column * (width + CELL_GAP), cells + row * (height + CELL_GAP)
        if not row:
            page.draw_header(strips, left, header, windowed)
        place = {name: getattr(sample, name) for name in ("dataset", "episode", "frame", "index")} | {"sample": number}
        frames += [place | box for box in page.draw_strips(sample.strips, left, top)]
        plotted += [place | box for box in page.draw_values(sample.values, ranges, left, top + plots, width, plot_height)]
        page.draw_captions(sample, task, left, top + captions, width)
    page.image.info["dali_stream"] = json.dumps({"title": title, "frames": frames, "plots": plotted})
    return page.image


class _Page:
    """An image, and methods that draw on it. Generators yield the key and the box of each frame or plot that they draw."""

    def __init__(self, size: tuple[int, int]) -> None:
        self.image = Image.new("RGB", size, BACKGROUND)
        self._pen = ImageDraw.Draw(self.image)

    def text(self, left: int, top: int, text: str, colour: str, size: int, width: int) -> None:
        """Draw a line of text, with control characters escaped. If it is wider than `width` pixels, it gets an ellipsis."""
        self._pen.text((left, top), _cut(text, width, size), colour, font(size))

    def draw_header(self, strips: Sequence[Series], left: int, top: int, windowed: bool) -> None:
        """Draw the names of the cameras, and below them the times of the steps if `windowed`."""
        for strip in strips:
            width, step_width = _width(strip), strip.data.shape[2]
            scale_width = int(font(SMALL).getlength(strip.scale)) + 8 if strip.scale else 0
            name_width = max(width - scale_width, width // 3)
            short = strip.key if font(SMALL).getlength(visible(strip.key)) <= name_width else strip.key.rpartition(".")[2]
            self.text(left, top, short, PLAIN, SMALL, name_width)
            if strip.scale:
                self.text(left + width - min(scale_width - 8, width - name_width), top, strip.scale, DIM, SMALL, scale_width)
                bar = Image.fromarray(_gradient(np.linspace(0, 1, width)[None].repeat(_BAR, 0)))
                self.image.paste(bar, (left, top + line(SMALL) * (2 if windowed else 1) + 1))
            for step, seconds in enumerate(strip.seconds if windowed else ()):
                self.text(left + step * (step_width + STEP_GAP), top + line(SMALL), _time(seconds), DIM, SMALL, step_width)
            left += width + CAMERA_GAP

    def draw_strips(self, strips: Sequence[Series], left: int, top: int) -> Iterator[dict[str, Any]]:
        """Draw the frames of a sample."""
        for strip in strips:
            height, width = strip.data.shape[1:3]
            for step, (frame, padded) in enumerate(zip(strip.data, strip.padded, strict=True)):
                self.image.paste(Image.fromarray(frame), (left, top))
                if strip.missing or padded:
                    text = _cut("missing" if strip.missing else "pad", width - 8, SMALL)
                    box = (left, top, left + int(font(SMALL).getlength(text)) + 9, top + line(SMALL) + 2)
                    self._pen.rectangle(box, fill=PAD)
                    self.text(left + 5, top + 1, text, BACKGROUND, SMALL, width)
                yield {"camera": strip.key, "step": step, "box": (left, top, left + width, top + height)}
                left += width + STEP_GAP
            left += CAMERA_GAP - STEP_GAP

    def draw_values(
        self, values: Sequence[Series], ranges: Sequence[tuple[float, float]], left: int, top: int, width: int, height: int
    ) -> Iterator[dict[str, Any]]:
        """Plot the values of a sample: lines over the steps of a window, or one bar per dimension for a single step."""
        for each, (least, most) in zip(values, ranges, strict=True):
            limits, windowed = f"{least:.3g} to {most:.3g}", len(each.seconds) > 1
            limits_width = int(font(SMALL).getlength(limits))
            seconds = f", {_time(each.seconds[0])} to {_time(each.seconds[-1])}" if windowed else ""
            self.text(left + width - limits_width, top, limits, DIM, SMALL, width)
            self.text(left, top, f"{each.key}{seconds}", PLAIN, SMALL, width - limits_width - 8)
            top += line(SMALL)
            box = (left, top, left + width, top + height)
            self._pen.rectangle(box, outline=DIM)
            (self._draw_lines if windowed else self._draw_bars)(each, box, least, most)
            yield {"key": each.key, "box": box}
            top += height + 6

    def _draw_lines(self, values: Series, box: tuple[int, int, int, int], least: float, most: float) -> None:
        """Draw each dimension of a window as a line, and underline the steps outside the episode."""
        left, top, right, bottom = box
        if least < 0 < most:
            zero = round(bottom - (bottom - top) * -least / (most - least))
            self._pen.line((left, zero, right, zero), fill="#3a3f48")
        x = np.linspace(left + 1, right - 1, len(values.data)).tolist()
        for dimension, numbers in enumerate(values.data.T):
            y = bottom - 1 - (bottom - top - 2) * (numbers - least) / (most - least)
            points = [(a, b) for a, b in zip(x, y.tolist(), strict=True) if math.isfinite(b)]
            self._pen.line(points if len(points) > 1 else points * 2, fill=_COLOURS[dimension % len(_COLOURS)], width=1)
        edges = np.linspace(left + 1, right - 1, len(values.padded) + 1).round().astype(int).tolist()
        for step in np.flatnonzero(values.padded).tolist():
            self._pen.rectangle((edges[step], bottom - 3, edges[step + 1], bottom - 1), fill=PAD)

    def _draw_bars(self, values: Series, box: tuple[int, int, int, int], least: float, most: float) -> None:
        """Draw each dimension of one step as a bar. Bars begin at 0, or at the end of the range that is closest to 0."""
        left, top, right, bottom = box
        [numbers] = values.data
        x = np.linspace(left + 2, right - 2, len(numbers) + 1)
        shares = (np.clip([0.0, *numbers], least, most) - least) / (most - least)
        base, *ends = (bottom - 1 - (bottom - top - 2) * shares).tolist()
        for dimension, end in enumerate(ends):
            if math.isfinite(end):
                bar = (x[dimension] + 1, min(base, end), x[dimension + 1] - 1, max(base, end))
                self._pen.rectangle(tuple(map(round, bar)), fill=_COLOURS[dimension % len(_COLOURS)])

    def draw_captions(self, sample: Sample, task: Sequence[str], left: int, top: int, width: int) -> None:
        """Draw the task and the indices of a sample."""
        for text in task:
            self.text(left, top, text, BRIGHT, TEXT, width)
            top += line(TEXT)
        indices = f"episode {sample.episode}  ·  frame {sample.frame}  ·  index {sample.index}"
        self.text(left, top, "  ·  ".join(filter(None, (sample.dataset, indices))), DIM, SMALL, width)


def _width(strip: Series) -> int:
    steps, _, width = strip.data.shape[:3]
    return steps * (width + STEP_GAP) - STEP_GAP


def _time(seconds: float) -> str:
    """Return the time of a step relative to the current frame."""
    return f"{seconds:+.4g} s" if seconds else "now"


def _range(values: npt.NDArray[np.float64]) -> tuple[float, float]:
    """Return the lowest and the highest finite value. If they are equal, return a range around them."""
    values = values[np.isfinite(values)]
    least, most = (float(values.min()), float(values.max())) if len(values) else (0.0, 0.0)
    return (least, most) if most > least else (least - 1, most + 1)


def _wrapped(text: str, width: int) -> list[str]:
    """Break a text into at most `_MOST_LINES` lines of `width` pixels. The last line may be wider, and so may long words."""
    lines: list[str] = []
    for word in visible(" ".join(text.split())).split():
        longer = f"{lines[-1]} {word}" if lines else word
        if lines and (font(TEXT).getlength(longer) <= width or len(lines) == _MOST_LINES):
            lines[-1] = longer
        else:
            lines.append(word)
    return lines


def _cut(text: str, width: int, size: int) -> str:
    """Return a text. If it is wider than `width` pixels, it is cut and gets an ellipsis."""
    text = visible(text)
    if font(size).getlength(text) <= width:
        return text
    fits = bisect_right(range(len(text)), width, key=lambda count: font(size).getlength(text[: count + 1] + "…"))
    return text[:fits].rstrip() + "…"


def line(size: int) -> int:
    """Return the height of a line of this font size, in pixels."""
    return size + size // 3


@functools.cache
def font(size: int) -> Any:
    """Return the font that Pillow includes. `size` is in pixels."""
    return ImageFont.load_default(size)


def plotted(dataset: Dataset | Mixture, action: str | None = None) -> list[str]:
    """Return the keys of the features to plot, at most 6: `action`, floating-point observations, and vectors of floats.

    Args:
        dataset: Dataset or mixture.
        action: Key of the feature to plot first. Default: None, and features are plotted in the order of the dataset.
    """
    named = [key for key, f in dataset.features.items() if f.is_float and (key == "action" or key.startswith("observation."))]
    return list(dict.fromkeys([*([action] if action else []), *named, *vectors(dataset.features)]))[:_MOST_FEATURES]


def episodes(dataset: Dataset, keys: Sequence[str], most: int) -> list[Sample]:
    """Return at most `most` evenly spread episodes. Each becomes a sample without frames, whose window is the whole episode.

    Raises:
        DatasetError, StorageError: If rows cannot be read.
    """
    reader, shown = RowReader(dataset, keys={*keys, "timestamp", "index"}), []
    for number in spread(dataset.num_episodes, most):
        rows, length = reader.read(number), int(dataset.lengths[number])
        seconds = (np.arange(length) / dataset.fps).tolist()
        values = [Series(key, rows[key].reshape(length, -1).astype(float), seconds, [False] * length) for key in keys]
        task = f"{counted(length, 'frame')}, {length / dataset.fps:.1f} s"
        shown.append(Sample([], values, "", task, int(dataset.episodes[number]), 0, int(rows["index"][0])))
    return shown
