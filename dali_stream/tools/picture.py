"""Picture of one batch, for a notebook and for `dali-stream preview`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image

from dali_stream.checks.text import listed
from dali_stream.dataset import Dataset
from dali_stream.decode.depth import distance_of_nothing
from dali_stream.errors import DatasetError
from dali_stream.loader import Loader
from dali_stream.mixture import Mixture, open_dataset
from dali_stream.tools import sheet


class BatchSheet(NamedTuple):
    """Content of a sheet: its title, its samples, and the keys of their images and plots."""

    title: str
    samples: list[sheet.Sample]
    keys: list[str]


def preview(
    dataset: Dataset | Mixture | str | os.PathLike[str],
    *,
    epoch: int = 0,
    batch: int = 0,
    plots: bool = False,
    **options: Any,
) -> Image.Image:
    """Draw a batch as the model sees it, captioned with tasks and indices.

    A cell of a notebook displays the picture. In a script, `save("sheet.png")` writes it to a file.

    Args:
        dataset: Dataset, mixture or address, as for a `Loader`.
        epoch, batch: Epoch of the batch, and its index in the epoch. Default: the first batch.
        plots: Whether to plot actions and states below the frames. They are always plotted for a dataset without cameras.
            Default: False.
        options: Arguments of the Loader, such as `image_size`, `delta_timestamps` and `seed`. Default: those of a Loader, but
            with 8 samples.

    Returns:
        Image of Pillow.

    Raises:
        DatasetError: If the batch has neither frames nor an action or observations to show.
        ValueError, DaliStreamError: See `Loader` and `Loader.batch_at`.
    """
    options = {"batch_size": 8, "in_process": True, **options}
    with Loader(open_dataset(dataset), **options) as loader:
        numbers = sheet.plotted(loader.dataset) if plots or not loader.dataset.cameras else []
        drawn = batch_sheet(loader, epoch, batch, numbers, options)
    return sheet.draw(drawn.title, drawn.samples)


def batch_sheet(
    loader: Loader, epoch: int, number: int, numbers: list[str], options: Mapping[str, Any], advice: str = ""
) -> BatchSheet:
    """Return the sheet with a batch of a Loader.

    Args:
        loader: Loader.
        epoch, number: Epoch of the batch, and its index in the epoch.
        numbers: Keys of the features to plot.
        options: Arguments of the Loader.
        advice: Remedy for a batch that has nothing to show, as the end of the error. Default: "".

    Raises:
        DatasetError: If the batch has neither frames nor features to plot.
        ValueError, DaliStreamError: See `Loader.batch_at`.
    """
    dataset, batch = loader.dataset, loader.batch_at(epoch, number)
    place = f"epoch {epoch}, batch {number}, seed {options.get('seed', 0)}"
    if (options.get("world_size") or 1) > 1:
        place += f", rank {options.get('rank') or 0} of {options['world_size']}"
    title = f"{dataset_name(dataset)}: {len(batch['index'])} of {dataset.num_frames} frames, {place}"
    images, numbers = sheet.image_keys(batch, dataset), [key for key in numbers if key in batch]
    if not images and not numbers:
        raise DatasetError(f"the batch has neither frames nor an action or observations to show, only {listed(batch)}{advice}")
    unit = options.get("depth_unit", "mm")
    features = {key: dataset.features[key] for key in images if key in dataset.features}
    depth = {key: sheet.Depth(unit, distance_of_nothing(each, unit)) for key, each in features.items() if each.is_depth}
    samples = sheet.samples(batch, images, options.get("delta_timestamps") or {}, numbers, depth)
    return BatchSheet(title, samples, [*images, *numbers])


def dataset_name(dataset: Dataset | Mixture) -> str:
    """Return the name of a dataset, or the names of the datasets of a mixture."""
    return ", ".join(dataset.source.dataset_names) or Path(dataset.uri).name
