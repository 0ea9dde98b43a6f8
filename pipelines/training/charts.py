"""Charts of a training run: curves of the losses, a batch, and predicted and recorded action chunks."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn

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
    training.plot(steps, losses, color="0.8", linewidth=1)
    training.plot(steps, _smooth(losses))
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
    """Draw a row for each frame of `data.shown`: the frame, and the recorded and the predicted chunk of each action.

    In a mixture, rows share the y-axes of their actions only if they are of the same dataset, since datasets may have different
    units.

    Args:
        path: Path of the PNG file.
        data: Data of the run.
        policy: Policy that predicts the chunks.
    """
    with dali_stream.Loader(**data.shown) as loader:
        batch = data.train.normalizer(next(iter(loader)))
    both = (batch[ACTION], policy.eval().predict(batch).reshape(batch[ACTION].shape))
    both = [actions(data.train.normalizer.inverse(batch | {ACTION: each})) for each in both]
    right, predicted = (each.masked_fill(~recorded(batch), math.nan).cpu() for each in both)
    datasets = batch.get("dataset", [""] * len(right))
    columns = min(len(data.action_names), MOST_ACTIONS)
    figure = Figure(figsize=(3 * (columns + 1), 2.4 * len(right)), layout="constrained")
    rows = figure.subplots(len(right), columns + 1, squeeze=False)
    _share_scales(rows[:, 1:], datasets)
    for number, (first, *rest) in enumerate(rows):
        _show_frame(first, batch, number, data.cameras)
        names = data.joint_names.get(datasets[number], data.action_names)
        _plot_actions(rest, names, data.shown["delta_timestamps"][ACTION], right[number], predicted[number])
    drawn = [[axes for axes in column if axes.axison] for column in rows[:, 1:].T]
    for column in filter(None, drawn):
        column[-1].set_xlabel("s from now")
    for axes in drawn[0][:1]:
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=100)


def _plot_actions(row: list[Axes], names: list[str], seconds: list[float], right: Tensor, predicted: Tensor) -> None:
    """Plot the recorded and the predicted chunk, both of shape (chunk, D), of each named action. Other axes stay empty."""
    for axes in row[len(names) :]:
        axes.set_axis_off()
    for action, (axes, name) in enumerate(zip(row, names, strict=False)):
        axes.plot(seconds, right[:, action], "k", label="recorded")
        axes.plot(seconds, predicted[:, action], "C1--", label="predicted")
        axes.set_title(name, fontsize=9)


def _share_scales(rows: np.ndarray, datasets: list[str]) -> None:
    """Give the rows of one dataset the same y-axis in each column."""
    for number, name in enumerate(datasets):
        for axes, same in zip(rows[number], rows[datasets.index(name)], strict=True):
            if axes is not same:
                axes.sharey(same)


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


def _smooth(values: list[float], share: float = 0.9) -> list[float]:
    """Return the exponential moving average with bias correction (Kingma and Ba 2015, section 3)."""
    mean, smooth = 0.0, []
    for count, value in enumerate(values, start=1):
        mean = share * mean + (1 - share) * value
        smooth.append(mean / (1 - share**count))
    return smooth
