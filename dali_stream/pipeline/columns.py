"""What a batch has beside its frames: features out of the rows, masks, random numbers and text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dali_stream.errors import DatasetError
from dali_stream.order import windows
from dali_stream.order.uniforms import uniforms
from dali_stream.pipeline.batches import Texts
from dali_stream.pipeline.config import DATASET, SAMPLE, SUBSTITUTE, Config
from dali_stream.schedule.episodes import EpisodeTable
from dali_stream.schedule.samples import Samples

Array = npt.NDArray[Any]
Names = Mapping[str, Sequence[Mapping[int, str]]]
"""See `Source.names`."""


def shown_frames(config: Config, samples: Samples) -> tuple[dict[str, Array], dict[str, Array]]:
    """Return {key with a window: frames of shape (B, T)} and {key of the mask: whether each is outside the episode}."""
    shown, pads = {}, {}
    which = config.dataset.dataset_of[samples.episode]
    for key, offsets in config.windows.offsets.items():
        lengths = config.dataset.lengths[samples.episode]
        shown[key], pads[f"{key}_is_pad"] = windows.window(offsets[which], samples.frame, lengths)
    return shown, pads


def gather(config: Config, table: EpisodeTable, samples: Samples, shown: Mapping[str, Array]) -> dict[str, Array]:
    """Return {key: values of shape (B, ...)} of all that is not a frame or a mask of padding, text included."""
    dataset = config.dataset
    keys = [key for key in dataset.features if key not in dataset.cameras]
    columns = {key: table.gather(key, samples.episode, shown.get(key, samples.frame)) for key in keys}
    columns |= {key: values[dataset.dataset_of[samples.episode]] for key, values in dataset.constants.items()}
    if config.augments:
        columns[SAMPLE] = uniforms(config.arguments.seed, samples.epoch, samples.position)
    if config.max_substitutes is not None:
        columns[SUBSTITUTE] = np.zeros(len(samples.frame), np.bool_)
    return columns


def take_texts(config: Config, table: EpisodeTable, samples: Samples, columns: dict[str, Array], names: Names) -> Texts:
    """Take what is text out of `columns`. Add the name of the current frame's task.

    Raises:
        DatasetError: If rows name a task that the dataset lacks.
    """
    dataset = config.dataset
    which = dataset.dataset_of[samples.episode].tolist()
    texts = {key: columns.pop(key).tolist() for key, f in dataset.features.items() if f.is_text}
    for key, tables in names.items():
        index = f"{key}_index"
        if index in columns and (any(tables) or key == "task"):
            numbers = table.gather(index, samples.episode, samples.frame).tolist()
            try:
                texts[key] = [tables[d][n] for d, n in zip(which, numbers, strict=True)]
            except KeyError as error:
                place = next(d for d, n in zip(which, numbers, strict=True) if n not in tables[d])
                raise DatasetError(
                    f"{dataset.names_place(key, place)}: has no {index} {error}, which rows of the dataset "
                    f"name; it has {len(tables[place])}. Copy the dataset again"
                ) from error
    if dataset_names := dataset.dataset_names:
        texts[DATASET] = [dataset_names[d] for d in which]
    return texts
