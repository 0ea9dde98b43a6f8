"""Plots of state and action over the time of episodes, for datasets without cameras. Drawn with Pillow.

A column per episode, a row per feature, a line per dimension. The PNG's text chunk `dali_stream` holds the place of each panel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import ImageDraw

from dali_stream.dataset import Dataset
from dali_stream.errors import counted
from dali_stream.lerobot.rows import RowReader
from dali_stream.tools import sheet
from dali_stream.tools.sheet import CAMERA_GAP, DIM, MARGIN, PLAIN, SMALL, TEXT, TITLE, cut, font, line

WIDTH, HEIGHT = 360, 150  # of a panel
_LEGEND = 92  # left of the panels
_COLOURS = ("#4c9be8", "#f0a63c", "#5fc27e", "#e2657b", "#b48ce0", "#43c2c7", "#d6c24a", "#9aa3b2")
_MOST_FEATURES = 6


@dataclass(frozen=True)
class Panel:
    """A feature of an episode: `values` (T, D)."""

    key: str
    episode: int
    values: npt.NDArray[np.float64]


def features(dataset: Dataset) -> list[str]:
    """The features that are plotted: numbers that are observed, and the action."""
    keys = [key for key, f in dataset.features.items() if f.is_float and (key == "action" or key.startswith("observation."))]
    return keys[:_MOST_FEATURES]


def panels(dataset: Dataset, keys: Sequence[str], most: int) -> list[list[Panel]]:
    """Per feature, a panel of each of up to `most` episodes, evenly spread. Raises DatasetError, StorageError."""
    reader = RowReader(dataset, keys={*keys, "timestamp"})
    chosen = np.unique(np.linspace(0, dataset.num_episodes - 1, min(most, dataset.num_episodes)).round().astype(int)).tolist()
    found = {episode: reader.read(episode)[episode] for episode in chosen}
    return [
        [Panel(key, int(dataset.episodes[e]), rows[key].reshape(len(rows[key]), -1).astype(float)) for e, rows in found.items()]
        for key in keys
    ]


def save(path: Path, title: str, shown: Sequence[Sequence[Panel]], fps: float) -> None:
    """Draws panels, a row per feature, and writes them as PNG.

    Raises:
        DaliStreamError: it cannot be written there.
    """
    columns = len(shown[0])
    top = MARGIN + line(TITLE) + 14
    size = (
        2 * MARGIN + _LEGEND + columns * (WIDTH + CAMERA_GAP) - CAMERA_GAP,
        top + len(shown) * (HEIGHT + 2 * line(SMALL) + CAMERA_GAP) + MARGIN,
    )
    image, pen = sheet.page(title, size)
    placed = []
    for row in shown:
        least, most = _range(row)
        pen.text((MARGIN, top), cut(row[0].key, size[0] - 2 * MARGIN, TEXT), PLAIN, font(TEXT))
        top += line(TEXT)
        for text, at in ((f"{most:.4g}", top), (f"{least:.4g}", top + HEIGHT - line(SMALL))):
            pen.text((MARGIN, at), cut(text, _LEGEND - 8, SMALL), DIM, font(SMALL))
        for column, panel in enumerate(row):
            left = MARGIN + _LEGEND + column * (WIDTH + CAMERA_GAP)
            box = (left, top, left + WIDTH, top + HEIGHT)
            _draw(pen, panel, box, least, most)
            seconds = f"episode {panel.episode}  ·  {counted(len(panel.values), 'frame')}, {len(panel.values) / fps:.1f} s"
            pen.text((left, top + HEIGHT + 2), cut(seconds, WIDTH, SMALL), DIM, font(SMALL))
            placed.append({"key": panel.key, "episode": panel.episode, "box": box})
        top += HEIGHT + line(SMALL) + CAMERA_GAP
    sheet.write(path, image.crop((0, 0, size[0], min(top + MARGIN, size[1]))), {"title": title, "plots": placed})


def _range(row: Sequence[Panel]) -> tuple[float, float]:
    """The lowest and the highest finite value of a feature, apart."""
    values = np.concatenate([panel.values.ravel() for panel in row])
    values = values[np.isfinite(values)]
    least, most = (float(values.min()), float(values.max())) if len(values) else (0.0, 0.0)
    return (least, most) if most > least else (least - 1, most + 1)


def _draw(pen: ImageDraw.ImageDraw, panel: Panel, box: tuple[int, int, int, int], least: float, most: float) -> None:
    left, top, right, bottom = box
    pen.rectangle(box, outline=DIM)
    if least < 0 < most:
        zero = round(bottom - (bottom - top) * -least / (most - least))
        pen.line((left, zero, right, zero), fill="#3a3f48")
    x = np.linspace(left + 1, right - 1, max(len(panel.values), 2))
    for dimension, values in enumerate(panel.values.T):
        y = bottom - 1 - (bottom - top - 2) * (values - least) / (most - least)
        points = [(a, b) for a, b in zip(x.tolist(), y.tolist(), strict=False) if math.isfinite(b)]
        pen.line(points if len(points) > 1 else points * 2, fill=_COLOURS[dimension % len(_COLOURS)], width=1)
