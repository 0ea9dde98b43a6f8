"""Contact sheets: a batch as the model sees it, in native pixels, captioned with task and indices.

Each sample is a cell: its cameras side by side, each camera's window as a strip of frames. The PNG's text chunk
`dali_stream` holds the place of each frame or panel as JSON.

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

Of datasets without cameras, `plot` draws state and action over the time of episodes instead: a column per episode, a row per
feature, a line per dimension.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont, PngImagePlugin

from dali_stream.dataset import Dataset
from dali_stream.errors import DaliStreamError, counted
from dali_stream.lerobot.rows import RowReader
from dali_stream.mixture import Mixture

MARGIN, CELL_GAP, CAMERA_GAP, STEP_GAP = 20, 24, 12, 3
LEAST_CELL = 320  # wide enough for the line of indices
TITLE, TEXT, SMALL = 20, 15, 13  # font sizes; a line is a third higher
BACKGROUND, BRIGHT, PLAIN, DIM, PAD = "#14161a", "#ffffff", "#d5d8de", "#8d939e", "#f0a63c"
_MOST_LINES = 3  # of a task
_WIDEST = 2400  # pixels of a sheet of several columns
# Of plots.
_WIDTH, _HEIGHT = 360, 150  # of a panel
_LEGEND = 92  # left of the panels
_COLOURS = ("#4c9be8", "#f0a63c", "#5fc27e", "#e2657b", "#b48ce0", "#43c2c7", "#d6c24a", "#9aa3b2")
_MOST_FEATURES = 6
_STRIP_HEIGHT = 56  # of a plot below the frames of a sample

Frames = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Strip:
    """One camera's window.

    Attributes:
        frames: (T, H, W, 3).
        seconds: of each step.
        marks: per step "pad" outside the episode, "missing" where the dataset lacks the camera, or "".
    """

    camera: str
    frames: Frames
    seconds: tuple[float, ...]
    marks: tuple[str, ...]


@dataclass(frozen=True)
class Values:
    """The window of one feature in numbers, plotted below the frames.

    Attributes:
        numbers: Values of shape (T, D).
        seconds: Time of each step.
        padded: Whether each step is outside the episode.
    """

    key: str
    numbers: npt.NDArray[np.float64]
    seconds: tuple[float, ...]
    padded: tuple[bool, ...]


@dataclass(frozen=True)
class Sample:
    """The content of a cell. `dataset` is empty without a mixture."""

    strips: tuple[Strip, ...]
    values: tuple[Values, ...]
    dataset: str
    task: str
    episode: int
    frame: int
    index: int


def samples(
    batch: Mapping[str, Any], cameras: Sequence[str], windows: Mapping[str, Sequence[float]], plots: Sequence[str] = ()
) -> list[Sample]:
    """Return copies of the samples of a batch.

    Args:
        batch: Batch of a Loader. Frames are uint8 or floats in [0, 1], of shape (B, C, H, W) or (B, T, C, H, W).
        cameras: Keys of the frames to show.
        windows: Argument `delta_timestamps` of the Loader.
        plots: Keys of the features to plot below the frames.
    """
    count = len(batch["index"])
    strips = list(zip(*(_strips(batch, camera, tuple(windows.get(camera, (0.0,)))) for camera in cameras), strict=True))
    values = list(zip(*(_values(batch, key, tuple(windows.get(key, (0.0,)))) for key in plots), strict=True))
    texts = (batch.get(key) or [""] * count for key in ("dataset", "task"))
    numbers = (batch[key].tolist() for key in ("episode_index", "frame_index", "index"))
    nothing: list[tuple[()]] = [()] * count
    return [Sample(*each) for each in zip(strips or nothing, values or nothing, *texts, *numbers, strict=True)]


def image_keys(batch: Mapping[str, Any], dataset: Dataset | Mixture) -> list[str]:
    """Return the keys of a batch that hold images: of cameras, and of outputs that a `dali_graph` has added."""

    def is_image(value: Any) -> bool:
        return getattr(value, "ndim", 0) in (4, 5) and value.shape[-3] in (1, 3, 4)

    own = [key for key in dataset.cameras if key in batch]
    return [key for key in (*own, *(key for key in batch if key not in dataset.features)) if is_image(batch[key])]


def _values(batch: Mapping[str, Any], key: str, seconds: tuple[float, ...]) -> list[Values]:
    """Return the values of a feature (B, ...), or (B, T, ...) if it has a window."""
    numbers = batch[key].cpu().double().numpy().reshape(len(batch[key]), len(seconds), -1)
    masks = batch[f"{key}_is_pad"].tolist() if f"{key}_is_pad" in batch else [[False] * len(seconds)] * len(numbers)
    return [Values(key, each.copy(), seconds, tuple(mask)) for each, mask in zip(numbers, masks, strict=True)]


def _strips(batch: Mapping[str, Any], camera: str, seconds: tuple[float, ...]) -> list[Strip]:
    frames = batch[camera]
    if frames.ndim == 4:
        frames = frames[:, None]
    if frames.is_floating_point():
        frames = (frames * 255).round().clamp(0, 255).byte()
    if frames.shape[1] != len(seconds):  # a `dali_graph` has changed the window
        seconds = (0.0,) * frames.shape[1]
    found = frames.movedim(-3, -1).cpu().contiguous().numpy().copy()
    if found.shape[-1] == 1:
        found = np.repeat(found, 3, -1)
    nothing = [False] * len(found)
    missing = batch[f"{camera}_is_missing"].tolist() if f"{camera}_is_missing" in batch else nothing
    masks = batch[f"{camera}_is_pad"].tolist() if f"{camera}_is_pad" in batch else [[False] * len(seconds)] * len(found)
    return [
        Strip(camera, shown, seconds, tuple("missing" if lacking else "pad" if padded else "" for padded in mask))
        for shown, lacking, mask in zip(found, missing, masks, strict=True)
    ]


def save(path: Path, title: str, shown: Sequence[Sample], columns: int | None = None) -> None:
    """Draws samples row by row, and writes the sheet as PNG.

    Args:
        path, title, shown: the PNG, its title, and the samples.
        columns: of the grid. None: those that bring the sheet nearest to 4:3, up to a width of 2400 pixels.

    Raises:
        DaliStreamError: it cannot be written there.
    """
    strips = shown[0].strips  # all samples of a batch have frames of the same sizes, so all cells are alike
    width = max(LEAST_CELL, sum(_width(strip) + CAMERA_GAP for strip in strips) - CAMERA_GAP)
    tasks = [_wrapped(sample.task, width) for sample in shown]
    plots = max((strip.frames.shape[1] + 6 for strip in strips), default=0)  # below the top of a cell
    captions = plots + len(shown[0].values) * (line(SMALL) + _STRIP_HEIGHT + 6)
    ranges = [
        _range(np.concatenate([each.numbers for each in of])) for of in zip(*(sample.values for sample in shown), strict=True)
    ]
    height = captions + 2 + max(map(len, tasks)) * line(TEXT) + line(SMALL)
    windowed = any(strip.seconds != (0.0,) for strip in strips)
    header = MARGIN + line(TITLE) + 14
    cells = header + line(SMALL) * (2 if windowed else 1) + 4

    def size(columns: int) -> tuple[int, int]:
        rows = -(-len(shown) // columns)
        return 2 * MARGIN + columns * (width + CELL_GAP) - CELL_GAP, cells + rows * (height + CELL_GAP) - CELL_GAP + MARGIN

    if columns is None:
        ratios = {count: size(count)[0] / size(count)[1] for count in range(1, len(shown) + 1)}
        fits = [count for count in ratios if size(count)[0] <= _WIDEST] or [1]
        columns = min(fits, key=lambda count: abs(math.log(ratios[count] * 3 / 4)))
    columns = min(columns, len(shown))
    image, pen = page(title, size(columns))
    frames, plotted = [], []
    for number, (sample, task) in enumerate(zip(shown, tasks, strict=True)):
        row, column = divmod(number, columns)
        left, top = MARGIN + column * (width + CELL_GAP), cells + row * (height + CELL_GAP)
        if not row:
            _draw_header(pen, strips, left, header, windowed)
        which = {"sample": number, "dataset": sample.dataset, "episode": sample.episode}
        which |= {"frame": sample.frame, "index": sample.index}
        frames += [which | placed for placed in _draw_strips(image, pen, sample.strips, left, top)]
        plotted += [which | placed for placed in _draw_values(pen, sample.values, ranges, left, top + plots, width)]
        _draw_captions(pen, sample, task, left, top + captions, width)
    write(path, image, {"title": title, "frames": frames, "plots": plotted})


def page(title: str, size: tuple[int, int]) -> tuple[Image.Image, ImageDraw.ImageDraw]:
    """An image of this size with a title, and what draws on it."""
    image = Image.new("RGB", size, BACKGROUND)
    pen = ImageDraw.Draw(image)
    pen.text((MARGIN, MARGIN), cut(title, size[0] - 2 * MARGIN, TITLE), BRIGHT, font(TITLE))
    return image, pen


def write(path: Path, image: Image.Image, described: Mapping[str, Any]) -> None:
    """Writes a PNG with the text chunk `dali_stream`. Errors as of `save`."""
    text = PngImagePlugin.PngInfo()
    text.add_text("dali_stream", json.dumps(described))
    try:
        image.save(path, format="PNG", pnginfo=text)
    except OSError as error:
        raise DaliStreamError(f"{path}: the contact sheet cannot be written: {error.strerror}; give another --out") from error


def _draw_header(pen: ImageDraw.ImageDraw, strips: Sequence[Strip], left: int, top: int, windowed: bool) -> None:
    """Names of the cameras, and below them the seconds of the steps."""
    for strip in strips:
        pen.text((left, top), _camera_name(strip.camera, _width(strip)), PLAIN, font(SMALL))
        if windowed:
            for step, seconds in enumerate(strip.seconds):
                at = left + step * (strip.frames.shape[2] + STEP_GAP)
                pen.text((at, top + line(SMALL)), cut(_time(seconds), strip.frames.shape[2], SMALL), DIM, font(SMALL))
        left += _width(strip) + CAMERA_GAP


def _draw_strips(
    image: Image.Image, pen: ImageDraw.ImageDraw, strips: Sequence[Strip], left: int, top: int
) -> Iterator[dict[str, Any]]:
    """Draws the frames of a sample; yields where each is."""
    for strip in strips:
        height, width = strip.frames.shape[1:3]
        for step, (one, mark) in enumerate(zip(strip.frames, strip.marks, strict=True)):
            image.paste(Image.fromarray(one), (left, top))
            if mark:
                _mark(pen, mark, left, top, width)
            yield {"camera": strip.camera, "step": step, "box": (left, top, left + width, top + height)}
            left += width + STEP_GAP
        left += CAMERA_GAP - STEP_GAP


def _draw_values(
    pen: ImageDraw.ImageDraw, values: Sequence[Values], ranges: Sequence[tuple[float, float]], left: int, top: int, width: int
) -> Iterator[dict[str, Any]]:
    """Plot the values of a sample over the steps of their windows, or one bar per dimension. Yield where each plot is."""
    for each, (least, most) in zip(values, ranges, strict=True):
        said = f"{least:.3g} to {most:.3g}"
        pen.text((left + width - int(font(SMALL).getlength(said)), top), said, DIM, font(SMALL))
        room = width - int(font(SMALL).getlength(said)) - 8
        seconds = f", {_time(each.seconds[0])} to {_time(each.seconds[-1])}" if len(each.seconds) > 1 else ""
        pen.text((left, top), cut(f"{each.key}{seconds}", room, SMALL), PLAIN, font(SMALL))
        top += line(SMALL)
        box = (left, top, left + width, top + _STRIP_HEIGHT)
        if len(each.seconds) > 1:
            _draw(pen, each.numbers, box, least, most)
            _mark_padding(pen, each.padded, box)
        else:
            _draw_bars(pen, each.numbers[0], box, least, most)
        yield {"key": each.key, "box": box}
        top += _STRIP_HEIGHT + 6


def _mark_padding(pen: ImageDraw.ImageDraw, padded: Sequence[bool], box: tuple[int, int, int, int]) -> None:
    """Underline the steps outside the episode."""
    left, _, right, bottom = box
    x = np.linspace(left + 1, right - 1, len(padded) + 1).round().astype(int).tolist()
    for step, outside in enumerate(padded):
        if outside:
            pen.rectangle((x[step], bottom - 3, x[step + 1], bottom - 1), fill=PAD)


def _draw_bars(
    pen: ImageDraw.ImageDraw, numbers: npt.NDArray[np.float64], box: tuple[int, int, int, int], least: float, most: float
) -> None:
    """Draw the dimensions (D,) of a feature as bars, from 0 or the nearest value in the range."""
    left, top, right, bottom = box
    pen.rectangle(box, outline=DIM)
    x = np.linspace(left + 2, right - 2, len(numbers) + 1)
    base, *ends = (bottom - 1 - (bottom - top - 2) * (np.clip([0.0, *numbers], least, most) - least) / (most - least)).tolist()
    for dimension, end in enumerate(ends):
        if math.isfinite(end):
            ends_at = (x[dimension] + 1, min(base, end), x[dimension + 1] - 1, max(base, end))
            pen.rectangle(tuple(map(round, ends_at)), fill=_COLOURS[dimension % len(_COLOURS)])


def _draw_captions(pen: ImageDraw.ImageDraw, sample: Sample, task: Sequence[str], left: int, top: int, width: int) -> None:
    for text in task:
        pen.text((left, top), text, BRIGHT, font(TEXT))
        top += line(TEXT)
    where = f"{sample.dataset}  ·  " * bool(sample.dataset)
    where += f"episode {sample.episode}  ·  frame {sample.frame}  ·  index {sample.index}"
    pen.text((left, top), cut(where, width, SMALL), DIM, font(SMALL))


def _mark(pen: ImageDraw.ImageDraw, mark: str, left: int, top: int, width: int) -> None:
    """Marks a step: outside the episode it shows the nearest frame inside, and of a camera that is missing nothing."""
    text = cut(mark, width - 8, SMALL)
    box = (left, top, left + int(font(SMALL).getlength(text)) + 9, top + line(SMALL) + 2)
    pen.rectangle(box, fill=PAD)
    pen.text((left + 5, top + 1), text, BACKGROUND, font(SMALL))


def _width(strip: Strip) -> int:
    steps, _, width = strip.frames.shape[:3]
    return steps * (width + STEP_GAP) - STEP_GAP


def _time(seconds: float) -> str:
    """The time of a step relative to the current frame."""
    return f"{seconds:+.4g} s" if seconds else "now"


def _camera_name(key: str, width: int) -> str:
    """The key, or its last part if the key is too long."""
    short = key if font(SMALL).getlength(key) <= width else key.rpartition(".")[2]
    return cut(short, width, SMALL)


def _wrapped(text: str, width: int) -> list[str]:
    """Text in lines of up to `width` pixels; after `_MOST_LINES`, an ellipsis."""
    lines: list[str] = []
    for word in text.split():
        longer = f"{lines[-1]} {word}" if lines else word
        if lines and font(TEXT).getlength(longer) <= width:
            lines[-1] = longer
        else:
            lines.append(word)
    if len(lines) > _MOST_LINES:
        lines = [*lines[: _MOST_LINES - 1], " ".join(lines[_MOST_LINES - 1 :])]
    return [cut(each, width, TEXT) for each in lines]


def cut(text: str, width: int, size: int) -> str:
    """The text, with an ellipsis where it is wider than `width` pixels."""
    if font(size).getlength(text) <= width:
        return text
    while text and font(size).getlength(text + "…") > width:
        text = text[:-1]
    return text.rstrip() + "…"


def line(size: int) -> int:
    """Pixels of a line of this font size."""
    return size + size // 3


@functools.cache
def font(size: int) -> Any:
    """Pillow's own font."""
    return ImageFont.load_default(size)


def plotted(dataset: Dataset | Mixture) -> list[str]:
    """The features that are plotted: numbers that are observed, and the action."""
    keys = [key for key, f in dataset.features.items() if f.is_float and (key == "action" or key.startswith("observation."))]
    return keys[:_MOST_FEATURES]


def plot(path: Path, dataset: Dataset, keys: Sequence[str], most: int) -> int:
    """Plots features of up to `most` episodes, evenly spread, a row per feature, and writes them as PNG.

    Returns:
        How many episodes are shown.

    Raises:
        DatasetError, StorageError: rows cannot be read.
        DaliStreamError: the PNG cannot be written there.
    """
    reader = RowReader(dataset, keys={*keys, "timestamp"})
    chosen = np.unique(np.linspace(0, dataset.num_episodes - 1, min(most, dataset.num_episodes)).round().astype(int)).tolist()
    episodes = {int(dataset.episodes[e]): reader.read(e)[e] for e in chosen}
    title = f"{Path(dataset.uri).name}: {len(chosen)} of {counted(dataset.num_episodes, 'episode')}"
    top = MARGIN + line(TITLE) + 14
    size = (
        2 * MARGIN + _LEGEND + len(chosen) * (_WIDTH + CAMERA_GAP) - CAMERA_GAP,
        top + len(keys) * (_HEIGHT + 2 * line(SMALL) + CAMERA_GAP) + MARGIN,
    )
    image, pen = page(title, size)
    placed = []
    for key in keys:
        row = {episode: rows[key].reshape(len(rows[key]), -1).astype(float) for episode, rows in episodes.items()}
        lowest, highest = _range(np.concatenate(list(row.values())))
        pen.text((MARGIN, top), cut(key, size[0] - 2 * MARGIN, TEXT), PLAIN, font(TEXT))
        top += line(TEXT)
        for text, at in ((f"{highest:.4g}", top), (f"{lowest:.4g}", top + _HEIGHT - line(SMALL))):
            pen.text((MARGIN, at), cut(text, _LEGEND - 8, SMALL), DIM, font(SMALL))
        for column, (episode, values) in enumerate(row.items()):
            left = MARGIN + _LEGEND + column * (_WIDTH + CAMERA_GAP)
            box = (left, top, left + _WIDTH, top + _HEIGHT)
            _draw(pen, values, box, lowest, highest)
            seconds = f"episode {episode}  ·  {counted(len(values), 'frame')}, {len(values) / dataset.fps:.1f} s"
            pen.text((left, top + _HEIGHT + 2), cut(seconds, _WIDTH, SMALL), DIM, font(SMALL))
            placed.append({"key": key, "episode": episode, "box": box})
        top += _HEIGHT + line(SMALL) + CAMERA_GAP
    write(path, image.crop((0, 0, size[0], min(top + MARGIN, size[1]))), {"title": title, "plots": placed})
    return len(chosen)


def _range(values: npt.NDArray[np.float64]) -> tuple[float, float]:
    """The lowest and the highest finite value, apart."""
    values = values[np.isfinite(values)]
    least, most = (float(values.min()), float(values.max())) if len(values) else (0.0, 0.0)
    return (least, most) if most > least else (least - 1, most + 1)


def _draw(
    pen: ImageDraw.ImageDraw, of: npt.NDArray[np.float64], box: tuple[int, int, int, int], least: float, most: float
) -> None:
    """Draws the dimensions (T, D) of a feature as lines."""
    left, top, right, bottom = box
    pen.rectangle(box, outline=DIM)
    if least < 0 < most:
        zero = round(bottom - (bottom - top) * -least / (most - least))
        pen.line((left, zero, right, zero), fill="#3a3f48")
    x = np.linspace(left + 1, right - 1, max(len(of), 2))
    for dimension, values in enumerate(of.T):
        y = bottom - 1 - (bottom - top - 2) * (values - least) / (most - least)
        points = [(a, b) for a, b in zip(x.tolist(), y.tolist(), strict=False) if math.isfinite(b)]
        pen.line(points if len(points) > 1 else points * 2, fill=_COLOURS[dimension % len(_COLOURS)], width=1)
