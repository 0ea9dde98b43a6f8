"""Charts of a training run: curves of the losses, a batch, and predicted and recorded action chunks."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import nn

import dali_stream
from training.data import Data
from training.policy import ACTION, actions, recorded

MOST_ACTIONS = 6  # maximum number of actions in `action_chunks`
MOST_SAMPLES = 8  # maximum number of samples in `samples`


def loss_curves(path: Path, entries: list[dict[str, Any]]) -> None:
    """Draw the training loss and the validation error. For comparison, also draw the error of always predicting the mean.

    Loss and error have separate axes, because the loss includes padding and possibly other terms. The error of predicting the
    mean is the same in all validations.

    Args:
        path: Path of the PNG file.
        entries: Entries of the journal.
    """
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    training, validation = figure.subplots(1, 2)
    steps, losses = _curve(entries, "loss")
    training.plot(steps, losses)
    training.set(title="training", xlabel="step", ylabel="loss of the policy")
    steps, errors = _curve(entries, "val_error")
    mean_error = _curve(entries, "mean_error")[1][-1:]
    validation.plot(steps, errors, "o-", label="policy")
    for error in mean_error:
        validation.axhline(error, color="k", linestyle="--", label="predicting the mean")
    validation.set(title="validation", xlabel="step", ylabel="mean absolute error / standard deviation")
    validation.set_ylim(0, 1.1 * max(errors + mean_error, default=1))
    validation.legend()
    figure.savefig(path, dpi=120)


def samples(path: Path, data: Data, batch: dict[str, Any]) -> None:
    """Draw a row for each of the first samples of a batch as the policy gets it: the frames, and the normalized action chunk.

    Args:
        path: Path of the PNG file.
        data: Data of the run.
        batch: Batch of `data.train`.
    """
    chunks = actions(batch).masked_fill(~recorded(batch), math.nan).cpu()[:MOST_SAMPLES]
    columns = len(data.cameras) + 1
    figure = Figure(figsize=(3 * columns, 2.4 * len(chunks)), layout="constrained")
    for number, (*frames, chart) in enumerate(figure.subplots(len(chunks), columns, squeeze=False)):
        for camera, axes in zip(data.cameras, frames, strict=True):
            _show_frame(axes, batch, number, [camera])
        chart.plot(data.shown["delta_timestamps"][ACTION], chunks[number])
        chart.set_title("normalized actions", fontsize=9)
    chart.set_xlabel("s from now")
    figure.savefig(path, dpi=100)


@torch.no_grad()
def action_chunks(path: Path, data: Data, policy: nn.Module) -> None:
    """Draw a row for each frame of `data.shown`: the frame, and the recorded and the predicted chunk of the moving actions.

    In a mixture, each dataset has its own choice of actions. Only rows of the same dataset share their y-axes, since datasets
    may have different units.

    Args:
        path: Path of the PNG file.
        data: Data of the run.
        policy: Policy that predicts the chunks.
    """
    with dali_stream.Loader(**data.shown) as loader:
        batch = data.train.normalizer(next(iter(loader)))
    both = (batch[ACTION], policy.eval().predict(batch).reshape(batch[ACTION].shape))
    both = [actions(data.train.normalizer.inverse(batch | {ACTION: each})) for each in both]
    right, predicted = (each.masked_fill(~recorded(batch), math.nan).cpu().numpy() for each in both)
    stats, columns = data.train.dataset.stats[ACTION], min(data.action, MOST_ACTIONS) + 1
    whole = np.ravel(stats["max"] - stats["min"] if {"min", "max"} <= stats.keys() else stats["std"])
    figure = Figure(figsize=(3 * columns, 2.4 * len(right) + 0.4), layout="constrained")
    axes = figure.subplots(len(right), columns, squeeze=False)
    dataset = batch["dataset_index"].cpu().numpy() if "dataset_index" in batch else np.zeros(len(right), int)
    for number in np.unique(dataset):
        rows = np.flatnonzero(dataset == number)
        chosen = moving(right[rows], whole)
        for row in rows:
            _show_frame(axes[row, 0], batch, row, data.cameras)
            for chart in axes[row, 1 + len(chosen) :]:
                chart.set_axis_off()
            for chart, first, action in zip(axes[row, 1:], axes[rows[0], 1:], chosen, strict=False):
                if chart is not first:
                    chart.sharey(first)
                chart.plot(data.shown["delta_timestamps"][ACTION], right[row, :, action], "k", label="recorded")
                chart.plot(data.shown["delta_timestamps"][ACTION], predicted[row, :, action], "C1--", label="predicted")
                chart.set_title(data.names[number][action], fontsize=9)
                chart.set_xlabel("s from now", fontsize=8)
    lines = next((chart.lines for chart in axes.flat if chart.lines), [])
    figure.legend(handles=lines, loc="outside upper right", ncols=2, fontsize=9)
    figure.supylabel("action, in the unit of the dataset", fontsize=9)
    figure.savefig(path, dpi=100)


def moving(chunks: np.ndarray, whole: np.ndarray) -> np.ndarray:
    """Return the actions that move most: those with the largest range in any chunk, relative to their range in the dataset.

    Args:
        chunks: Recorded actions, shape (B, chunk, D), NaN where nothing was recorded.
        whole: Range of each action in the dataset, shape (D,).

    Returns:
        Up to `MOST_ACTIONS` dimensions in order, without those that were never recorded.
    """
    present = np.flatnonzero(np.isfinite(chunks).any(axis=(0, 1)))
    ranges = np.fmax.reduce(np.fmax.reduce(chunks, axis=1) - np.fmin.reduce(chunks, axis=1))
    relative = np.divide(ranges, whole, out=np.zeros(len(whole)), where=whole > 0)[present]
    return np.sort(present[np.argsort(-relative, kind="stable")[:MOST_ACTIONS]])


def _show_frame(axes: Axes, batch: dict[str, Any], number: int, cameras: list[str]) -> None:
    """Show the frame of the first camera that a sample's dataset has, captioned with dataset, episode, frame and camera."""
    missing = {camera: batch.get(f"{camera}_is_missing") for camera in cameras}
    own = [camera for camera, lacks in missing.items() if lacks is None or not lacks[number]]
    for camera in own[:1]:
        axes.imshow(batch[camera][number].permute(1, 2, 0).cpu().numpy())
    name = f"{batch['dataset'][number]}, " if "dataset" in batch else ""
    caption = f"{name}episode {batch['episode_index'][number]}, frame {batch['frame_index'][number]}"
    axes.set_title("\n".join([caption, *own[:1]]), fontsize=9)
    axes.set_axis_off()


def _curve(entries: list[dict[str, Any]], key: str) -> tuple[list[int], list[float]]:
    points = [(entry["step"], entry[key]) for entry in entries if key in entry]
    return [step for step, _ in points], [value for _, value in points]
