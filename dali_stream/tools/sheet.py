"""Contact sheets: a batch as the model sees it, in native pixels, captioned with task and indices.

Each sample is a cell: its cameras side by side, each camera's window as a strip of frames. The PNG's text chunk
`dali_stream` holds the place of each frame as JSON.

    top                 side
    -0.1 s    now       -0.1 s    now
    ┌────────┬────────┐ ┌────────┬────────┐
    │        │        │ │        │        │
    └────────┴────────┘ └────────┴────────┘
    Push the red block to the goal on the left.
    episode 3 · frame 57 · index 412
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont, PngImagePlugin

from dali_stream.errors import DaliStreamError

MARGIN, CELL_GAP, CAMERA_GAP, STEP_GAP = 20, 24, 12, 3
LEAST_CELL = 320  # wide enough for the line of indices
TITLE, TEXT, SMALL = 20, 15, 13  # font sizes; a line is a third higher
BACKGROUND, BRIGHT, PLAIN, DIM, PAD = "#14161a", "#ffffff", "#d5d8de", "#8d939e", "#f0a63c"
_MOST_LINES = 3  # of a task
_WIDEST = 2400  # pixels of a sheet of several columns

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
class Sample:
    """The content of a cell. `dataset` is empty without a mixture."""

    strips: tuple[Strip, ...]
    dataset: str
    task: str
    episode: int
    frame: int
    index: int


def samples(batch: Mapping[str, Any], cameras: Sequence[str], windows: Mapping[str, Sequence[float]]) -> list[Sample]:
    """Copies the samples of a sheet from a batch. Frames are uint8, `(B, C, H, W)` or `(B, T, C, H, W)`."""
    strips = [_strips(batch, camera, tuple(windows.get(camera, (0.0,)))) for camera in cameras]
    numbers = (batch[key].tolist() for key in ("episode_index", "frame_index", "index"))
    texts = (batch.get(key) or [""] * len(batch["index"]) for key in ("dataset", "task"))
    return [
        Sample(tuple(shown), dataset, task, episode, frame, index)
        for dataset, task, episode, frame, index, *shown in zip(*texts, *numbers, *strips, strict=True)
    ]


def _strips(batch: Mapping[str, Any], camera: str, seconds: tuple[float, ...]) -> list[Strip]:
    frames = batch[camera]
    if frames.ndim == 4:
        frames = frames[:, None]
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
    layout = _Layout(shown, columns) if columns else _grid(shown)
    image = Image.new("RGB", layout.size, BACKGROUND)
    pen = ImageDraw.Draw(image)
    pen.text((MARGIN, MARGIN), cut(title, layout.size[0] - 2 * MARGIN, TITLE), BRIGHT, font(TITLE))
    for column in range(layout.columns):
        _draw_header(pen, shown[0], layout.left(column), layout.header_top, layout.windowed)
    frames = []
    for number, sample in enumerate(shown):
        left, top = layout.left(number % layout.columns), layout.top(number // layout.columns)
        frames += _draw_cell(image, pen, number, sample, left, top, layout)
    write(path, image, {"title": title, "frames": frames})


def write(path: Path, image: Image.Image, described: Mapping[str, Any]) -> None:
    """Writes a PNG with the text chunk `dali_stream`. Errors as of `save`."""
    text = PngImagePlugin.PngInfo()
    text.add_text("dali_stream", json.dumps(described))
    try:
        image.save(path, format="PNG", pnginfo=text)
    except OSError as error:
        raise DaliStreamError(f"{path}: the contact sheet cannot be written: {error.strerror}; give another --out") from error


class _Layout:
    """Sizes and places. All samples of a batch have frames of the same sizes, so all cells are alike."""

    def __init__(self, shown: Sequence[Sample], columns: int) -> None:
        self.columns = min(columns, len(shown))
        strips = shown[0].strips
        widths = [_strip_width(strip) for strip in strips]
        self.cell_width = max(LEAST_CELL, sum(widths) + CAMERA_GAP * (len(widths) - 1))
        self.frame_height = max(strip.frames.shape[1] for strip in strips)
        self.tasks = [_wrapped(sample.task, self.cell_width) for sample in shown]
        lines = max(map(len, self.tasks))
        self.cell_height = self.frame_height + 8 + lines * line(TEXT) + line(SMALL)
        self.windowed = any(strip.seconds != (0.0,) for strip in strips)
        self.header_top = MARGIN + line(TITLE) + 14
        self.cells_top = self.header_top + line(SMALL) * (2 if self.windowed else 1) + 4
        rows = -(-len(shown) // self.columns)
        self.size = (
            2 * MARGIN + self.columns * (self.cell_width + CELL_GAP) - CELL_GAP,
            self.top(rows) - CELL_GAP + MARGIN,
        )

    def left(self, column: int) -> int:
        return MARGIN + column * (self.cell_width + CELL_GAP)

    def top(self, row: int) -> int:
        return self.cells_top + row * (self.cell_height + CELL_GAP)


def _grid(shown: Sequence[Sample]) -> _Layout:
    """The layout nearest to 4:3."""
    layouts = [_Layout(shown, columns) for columns in range(1, len(shown) + 1)]
    fits = [layout for layout in layouts if layout.size[0] <= _WIDEST] or layouts[:1]
    return min(fits, key=lambda layout: abs(math.log(layout.size[0] / layout.size[1] * 3 / 4)))


def _draw_header(pen: ImageDraw.ImageDraw, sample: Sample, left: int, top: int, windowed: bool) -> None:
    """Names of the cameras, and below them the seconds of the steps."""
    for strip in sample.strips:
        width = _strip_width(strip)
        pen.text((left, top), _camera_name(strip.camera, width), PLAIN, font(SMALL))
        if windowed:
            for step, seconds in enumerate(strip.seconds):
                at = left + step * (strip.frames.shape[2] + STEP_GAP)
                text = f"{seconds:+.4g} s" if seconds else "now"
                pen.text((at, top + line(SMALL)), cut(text, strip.frames.shape[2], SMALL), DIM, font(SMALL))
        left += width + CAMERA_GAP


def _draw_cell(
    image: Image.Image, pen: ImageDraw.ImageDraw, number: int, sample: Sample, left: int, top: int, layout: _Layout
) -> list[dict[str, Any]]:
    """Draws a sample; returns where each of its frames is."""
    which = {
        "sample": number,
        "dataset": sample.dataset,
        "episode": sample.episode,
        "frame": sample.frame,
        "index": sample.index,
    }
    frames, at = [], left
    for strip in sample.strips:
        height, width = strip.frames.shape[1:3]
        for step, (one, mark) in enumerate(zip(strip.frames, strip.marks, strict=True)):
            image.paste(Image.fromarray(one), (at, top))
            frames.append({**which, "camera": strip.camera, "step": step, "box": (at, top, at + width, top + height)})
            if mark:
                _mark(pen, mark, at, top, width)
            at += width + STEP_GAP
        at += CAMERA_GAP - STEP_GAP
    below = top + layout.frame_height + 6
    for text in layout.tasks[number]:
        pen.text((left, below), text, BRIGHT, font(TEXT))
        below += line(TEXT)
    where = f"{sample.dataset}  ·  " * bool(sample.dataset)
    where += f"episode {sample.episode}  ·  frame {sample.frame}  ·  index {sample.index}"
    pen.text((left, below), cut(where, layout.cell_width, SMALL), DIM, font(SMALL))
    return frames


def _mark(pen: ImageDraw.ImageDraw, mark: str, left: int, top: int, width: int) -> None:
    """Marks a step: outside the episode it shows the nearest frame inside, and of a camera that is missing nothing."""
    text = cut(mark, width - 8, SMALL)
    box = (left, top, left + int(font(SMALL).getlength(text)) + 9, top + line(SMALL) + 2)
    pen.rectangle(box, fill=PAD)
    pen.text((left + 5, top + 1), text, BACKGROUND, font(SMALL))


def _strip_width(strip: Strip) -> int:
    steps, _, width = strip.frames.shape[:3]
    return steps * (width + STEP_GAP) - STEP_GAP


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
