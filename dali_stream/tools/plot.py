"""Plots of state and action over the time of episodes, for datasets without cameras. Drawn with Pillow.

A column per episode, a row per feature, a line per dimension. The PNG's text chunk `dali_stream` holds the place of each panel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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


def features(dataset: Dataset) -> list[str]:
    """The features that are plotted: numbers that are observed, and the action."""
    keys = [key for key, f in dataset.features.items() if f.is_float and (key == "action" or key.startswith("observation."))]
    return keys[:_MOST_FEATURES]


def save(path: Path, dataset: Dataset, keys: Sequence[str], most: int) -> int:
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
        2 * MARGIN + _LEGEND + len(chosen) * (WIDTH + CAMERA_GAP) - CAMERA_GAP,
        top + len(keys) * (HEIGHT + 2 * line(SMALL) + CAMERA_GAP) + MARGIN,
    )
    image, pen = sheet.page(title, size)
    placed = []
    for key in keys:
        row = {episode: rows[key].reshape(len(rows[key]), -1).astype(float) for episode, rows in episodes.items()}
        lowest, highest = _range(np.concatenate(list(row.values())))
        pen.text((MARGIN, top), cut(key, size[0] - 2 * MARGIN, TEXT), PLAIN, font(TEXT))
        top += line(TEXT)
        for text, at in ((f"{highest:.4g}", top), (f"{lowest:.4g}", top + HEIGHT - line(SMALL))):
            pen.text((MARGIN, at), cut(text, _LEGEND - 8, SMALL), DIM, font(SMALL))
        for column, (episode, values) in enumerate(row.items()):
            left = MARGIN + _LEGEND + column * (WIDTH + CAMERA_GAP)
            box = (left, top, left + WIDTH, top + HEIGHT)
            _draw(pen, values, box, lowest, highest)
            seconds = f"episode {episode}  ·  {counted(len(values), 'frame')}, {len(values) / dataset.fps:.1f} s"
            pen.text((left, top + HEIGHT + 2), cut(seconds, WIDTH, SMALL), DIM, font(SMALL))
            placed.append({"key": key, "episode": episode, "box": box})
        top += HEIGHT + line(SMALL) + CAMERA_GAP
    sheet.write(path, image.crop((0, 0, size[0], min(top + MARGIN, size[1]))), {"title": title, "plots": placed})
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
