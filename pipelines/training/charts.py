"""Chart of predicted and recorded action chunks."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from plain_loop import ACTION, actions, colour_cameras, recorded
from torch import nn

import dali_stream

MOST = 6  # maximum number of actions per sample


@torch.no_grad()
def action_chunks(path: Path, loader: dali_stream.Loader, example: dict[str, Any], policy: nn.Module) -> None:
    """Draw a row for each sample: the frame of a camera, and the recorded and the predicted chunk of the actions that move.

    Args:
        path: Path of the PNG file.
        loader: Loader whose batches the policy was trained on.
        example: Arguments of a Loader whose first batch is drawn. Its batches are not normalized.
        policy: Policy that predicts the chunks.
    """
    with dali_stream.Loader(**example) as drawn:
        batch = loader.normalizer(next(iter(drawn)))
    both = batch[ACTION], policy.eval().predict(batch).reshape(batch[ACTION].shape)
    both = [actions(loader.normalizer.inverse(batch | {ACTION: each})) for each in both]
    right, predicted = (each.masked_fill(~recorded(batch), math.nan).cpu().numpy() for each in both)
    times, names = example["delta_timestamps"][ACTION], action_names(loader.dataset)
    whole = np.ravel(loader.dataset.stats[ACTION]["std"])
    columns = min(right.shape[-1], MOST) + 1
    figure = Figure(figsize=(3 * columns, 2.4 * len(right) + 0.4), layout="constrained")
    lines: list[Any] = []
    for row, (picture, *charts) in enumerate(figure.subplots(len(right), columns)):
        missing = {key: batch.get(f"{key}_is_missing") for key in colour_cameras(loader.dataset)}
        cameras = [key for key, lacks in missing.items() if lacks is None or not lacks[row]]
        for camera in cameras[:1]:
            picture.imshow(batch[camera][row].permute(1, 2, 0).cpu().numpy())
        dataset = f"{batch['dataset'][row]}, " if "dataset" in batch else ""
        caption = f"{dataset}episode {batch['episode_index'][row]}, frame {batch['frame_index'][row]}"
        picture.set_title("\n".join([caption, *cameras[:1]]), fontsize=9)
        chosen = moving(right[row], whole)
        for chart in [picture, *charts[len(chosen) :]]:
            chart.set_axis_off()
        for chart, action in zip(charts, chosen, strict=False):
            lines = chart.plot(times, right[row, :, action], "k", label="recorded")
            lines += chart.plot(times, predicted[row, :, action], "C1--", label="predicted")
            # The axis shows at least a standard deviation above and below, so that small differences look small.
            middle, half = np.nanmean(right[row, :, action]), whole[action]
            chart.update_datalim([(0, middle - half), (0, middle + half)])
            chart.autoscale_view()
            chart.set_title(names[int(batch["dataset_index"][row]) if "dataset_index" in batch else 0][action], fontsize=9)
            chart.set_xlabel("s from now", fontsize=8)
    figure.legend(handles=lines, loc="outside upper right", ncols=2, fontsize=9)
    figure.supylabel("action, in the unit of the dataset", fontsize=9)
    figure.savefig(path, dpi=100)


def moving(chunk: np.ndarray, whole: np.ndarray) -> np.ndarray:
    """Return the actions that move most, relative to their standard deviation in the dataset.

    Args:
        chunk: Recorded actions of a sample, shape (chunk, D), NaN where nothing was recorded.
        whole: Standard deviation of each action, shape (D,).

    Returns:
        Up to `MOST` dimensions in order, without those that were not recorded.
    """
    present = np.flatnonzero(np.isfinite(chunk).any(axis=0))
    ranges = np.nanmax(chunk[:, present], axis=0) - np.nanmin(chunk[:, present], axis=0)
    relative = np.divide(ranges, whole[present], out=np.zeros(len(present)), where=whole[present] > 0)
    return np.sort(present[np.argsort(-relative, kind="stable")[:MOST]])


def action_names(dataset: dali_stream.Dataset | dali_stream.Mixture) -> list[list[str]]:
    """Return the name of each action of each dataset: one list for a dataset, and one for each dataset of a mixture."""
    if not isinstance(dataset, dali_stream.Mixture):
        return [feature_names(dataset.features[ACTION])]
    own = {name: {new: key for key, new in keys.items()}.get(ACTION, ACTION) for name, keys in dataset.renamed_keys.items()}
    return [feature_names(part.features.get(own[name], {"shape": [0]})) for name, part in dataset.datasets.items()]


def feature_names(feature: dict[str, Any]) -> list[str]:
    """Return the names of a vector's values. Datasets have them in lists and dicts, as keys of a dict of indices, or not."""
    width, found = math.prod(feature["shape"]), _texts(feature.get("names"))
    return found if len(found) == width else [f"action {n}" for n in range(width)]


def _texts(names: Any) -> list[str]:
    """Return the texts in nested lists and dicts, and the keys of a dict from names to indices."""
    if isinstance(names, dict):
        names = [key if isinstance(value, int) else value for key, value in names.items()]
    return [text for each in names for text in _texts(each)] if isinstance(names, list) else [names] * isinstance(names, str)
