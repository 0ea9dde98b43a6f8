"""Values of a batch other than its frames: tabular features, masks, random numbers and text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dali_stream.errors import DaliStreamError, DatasetError
from dali_stream.order import windows
from dali_stream.order.uniforms import uniforms
from dali_stream.pipeline.config import DATASET, SAMPLE, SUBSTITUTE, Config
from dali_stream.pipeline.planned_batch import Texts
from dali_stream.schedule.episodes import EpisodeTable
from dali_stream.schedule.samples import Samples

Array = npt.NDArray[Any]
Names = Mapping[str, Sequence[Mapping[int, str]]]
"""See `Source.names`."""


def readable(samples: Samples, failed: Mapping[int, DaliStreamError]) -> Samples:
    """Return samples whose rows can all be gathered: those in `failed` become another sample of the batch.

    Args:
        samples: Samples of the batch.
        failed: {sample whose episode cannot be read: error}.

    Raises:
        DaliStreamError: The first error, if no episode of the batch can be read.
    """
    if not failed:
        return samples
    good = np.setdiff1d(np.arange(len(samples.episode)), list(failed))
    if not len(good):
        raise failed[min(failed)]
    from_row = np.arange(len(samples.episode))
    from_row[list(failed)] = good[0]
    return samples._replace(episode=samples.episode[from_row], frame=samples.frame[from_row])


def shown_frames(config: Config, samples: Samples) -> tuple[dict[str, Array], dict[str, Array]]:
    """Return the frames in the windows of a batch, and the padding masks.

    Args:
        config: Configuration of the loader.
        samples: Samples of the batch.

    Returns:
        {key with a window: frames within the episodes, shape (B, T)}, and {key of its mask: whether each step is outside the
        episode, bool of shape (B, T)}.
    """
    shown, pads = {}, {}
    which = config.dataset.dataset_of[samples.episode]
    for key, offsets in config.windows.offsets.items():
        lengths = config.dataset.lengths[samples.episode]
        shown[key], pads[f"{key}_is_pad"] = windows.window(offsets[which], samples.frame, lengths)
    return shown, pads


def columns(config: Config, table: EpisodeTable, samples: Samples, shown: Mapping[str, Array]) -> dict[str, Array]:
    """Return the values of a batch except frames and padding masks.

    Args:
        config: Configuration of the loader.
        table: Table of the open episodes.
        samples: Samples of the batch.
        shown: {key with a window: frames within the episodes, shape (B, T)}.

    Returns:
        {key: values of shape (B, ...)}. Text has dtype object.
    """
    dataset = config.dataset
    keys = [key for key in dataset.features if key not in dataset.cameras]
    values = {key: table.gather(key, samples.episode, shown.get(key, samples.frame)) for key in keys}
    values |= {key: constant[dataset.dataset_of[samples.episode]] for key, constant in dataset.constants.items()}
    if config.augments:
        values[SAMPLE] = uniforms(config.arguments.seed, samples.epoch, samples.position)
    if config.max_substitutes is not None:
        values[SUBSTITUTE] = np.zeros(len(samples.frame), np.bool_)
    return values


def take_texts(config: Config, table: EpisodeTable, samples: Samples, values: dict[str, Array], names: Names) -> Texts:
    """Return the text of a batch, which includes the task of each current frame and the name of its dataset.

    Args:
        config: Configuration of the loader.
        table: Table of the open episodes.
        samples: Samples of the batch.
        values: Result of `columns`. Text is removed from it.
        names: Names of tasks and subtasks, see `Source.names`.

    Returns:
        {key: one string per sample}.

    Raises:
        DatasetError: If rows refer to a task or a subtask that the dataset lacks.
    """
    dataset = config.dataset
    which = dataset.dataset_of[samples.episode].tolist()
    texts = {key: values.pop(key).tolist() for key, f in dataset.features.items() if f.is_text}
    for key, tables in names.items():
        index = f"{key}_index"
        if index in values and (any(tables) or key == "task"):
            numbers = table.gather(index, samples.episode, samples.frame).tolist()
            try:
                texts[key] = [tables[d][n] for d, n in zip(which, numbers, strict=True)]
            except KeyError as error:
                place = next(d for d, n in zip(which, numbers, strict=True) if n not in tables[d])
                where = dataset.parts[place].dataset.names_place(key)
                raise DatasetError(
                    f"{where}: rows of the dataset refer to {index} {error}, which is missing. The file has "
                    f"{len(tables[place])}. Copy the dataset again"
                ) from error
    if dataset_names := dataset.dataset_names:
        texts[DATASET] = [dataset_names[d] for d in which]
    return texts
