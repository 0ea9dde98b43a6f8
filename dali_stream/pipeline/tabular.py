"""Values of a batch other than its frames: tabular features, masks, random numbers and text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from dali_stream.checks.arrays import Array
from dali_stream.errors import DaliStreamError
from dali_stream.lerobot.arrow import parse_annotations
from dali_stream.order import windows
from dali_stream.order.uniforms import uniforms
from dali_stream.pipeline.batch import Texts
from dali_stream.pipeline.config import DATASET, SAMPLE, SUBSTITUTE, Config
from dali_stream.schedule.episodes import EpisodeTable
from dali_stream.schedule.plan import BatchPlan
from dali_stream.schedule.samples import Samples

Names = Mapping[str, Sequence[Mapping[int, str]]]
"""See `Source.names`."""


def readable(plan: BatchPlan, failed: Mapping[int, DaliStreamError]) -> BatchPlan:
    """Return a plan of which `columns` can read all rows: samples in `failed` become another sample of the batch.

    Only `samples` and `is_pad` are replaced, so the result is for `columns` and `take_texts`, and not for decoders.

    Args:
        plan: Plan of the batch.
        failed: {sample whose episode cannot be read: error}.

    Raises:
        DaliStreamError: The first error, if no episode of the batch can be read.
    """
    if not failed:
        return plan
    samples = plan.samples
    good = np.setdiff1d(np.arange(len(samples.episode)), list(failed))
    if not len(good):
        raise failed[min(failed)]
    instead = np.arange(len(samples.episode))
    instead[list(failed)] = good[0]
    return replace(
        plan,
        samples=samples._replace(episode=samples.episode[instead], frame=samples.frame[instead]),
        is_pad={camera: mask[instead] for camera, mask in plan.is_pad.items()},
    )


def columns(config: Config, table: EpisodeTable, plan: BatchPlan) -> dict[str, Array]:
    """Return the values of a batch except frames. Text has dtype object.

    Args:
        config: Configuration of the loader.
        table: Table of the open episodes.
        plan: Plan of the batch, see `readable`.

    Returns:
        {key: values of shape (B, ...), or (B, T, ...) with a window}, and {key of its mask: whether each step of a window is
        outside the episode, bool of shape (B, T)}.
    """
    source, samples = config.source, plan.samples
    which, lengths = source.dataset_of[samples.episode], source.lengths[samples.episode]
    values: dict[str, Array] = {}
    for key in source.features:
        frames = samples.frame
        if key in config.windows:
            if key in plan.is_pad:
                is_pad = plan.is_pad[key].copy()  # cameras may share a mask, and a user may change one of them in place
            else:
                frames, is_pad = windows.window(config.windows.of(key)[which], samples.frame, lengths)
            values[f"{key}_is_pad"] = is_pad
        if key not in source.cameras:
            values[key] = table.values(key, samples.episode, frames)
    values |= {key: constant[which] for key, constant in source.constants.items()}
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
        {key: one string per sample, or its annotations for a language column}.

    Raises:
        DatasetError: If rows refer to a task or a subtask that the dataset lacks.
    """
    source = config.source
    which = source.dataset_of[samples.episode].tolist()
    texts: Texts = {}
    for key, feature in source.features.items():
        if feature.is_text:
            own = values.pop(key).tolist()
            texts[key] = [parse_annotations(text) for text in own] if feature.is_language else own
    for key, tables in names.items():
        index = f"{key}_index"
        if index in values and (any(tables) or key == "task"):
            numbers = table.values(index, samples.episode, samples.frame).tolist()
            try:
                texts[key] = [tables[d][n] for d, n in zip(which, numbers, strict=True)]
            except KeyError:
                place, number = next((d, n) for d, n in zip(which, numbers, strict=True) if n not in tables[d])
                raise source.parts[place].dataset.unknown_name(key, number) from None
    if dataset_names := source.dataset_names:
        texts[DATASET] = [dataset_names[d] for d in which]
    return texts
