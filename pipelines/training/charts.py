"""Frames of a training run: the loss curves, and predicted beside recorded action chunks."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import nn

import dali_stream
from training.data import Data
from training.policy import ACTION, actions, recorded


def loss_curves(path: Path, entries: list[dict[str, Any]]) -> None:
    """Draws the journal's entries: the training loss; beside it validation error, and the error of predicting the mean.

    Each has an axis of its own: the loss may hold more than an error, and counts what is padded.
    """
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    training, validation = figure.subplots(1, 2)
    steps, losses = _curve(entries, "loss")
    training.plot(steps, losses, color="0.8", linewidth=1)
    training.plot(steps, _smooth(losses))
    training.set(title="training", xlabel="step", ylabel="loss of the policy")
    validation.plot(*_curve(entries, "val_error"), "o-", label="policy")
    validation.plot(*_curve(entries, "mean_error"), "k--", label="predicting the mean")
    validation.set(title="validation", xlabel="step", ylabel="mean absolute error / standard deviation", ylim=(0, None))
    validation.legend()
    figure.savefig(path, dpi=120)


@torch.no_grad()
def action_chunks(path: Path, data: Data, policy: nn.Module) -> None:
    """Draws a row per frame of `data.shown`: what the policy saw, and per action what was recorded and what it predicts."""
    with dali_stream.Loader(**data.shown) as loader:
        batch = data.train.normalizer(next(iter(loader)))
    both = (batch[ACTION], policy.eval().predict(batch).reshape(batch[ACTION].shape))
    both = [actions(data.train.normalizer.inverse(batch | {ACTION: each})) for each in both]
    right, predicted = (each.masked_fill(~recorded(batch), math.nan).cpu() for each in both)
    names = data.action_names[:6]
    figure = Figure(figsize=(3 * (len(names) + 1), 2.4 * len(right)), layout="constrained")
    rows = figure.subplots(len(right), len(names) + 1, squeeze=False, sharey="col")  # one scale for an action
    seconds = data.shown["delta_timestamps"][ACTION]
    for number, (first, *rest) in enumerate(rows):
        first.imshow(batch[data.cameras[0]][number].permute(1, 2, 0).cpu().numpy())
        whose = f"{batch['dataset'][number]}, " if "dataset" in batch else ""
        first.set_title(f"{whose}episode {batch['episode_index'][number]}, frame {batch['frame_index'][number]}", fontsize=9)
        first.set_axis_off()
        for action, (axes, name) in enumerate(zip(rest, names, strict=True)):
            axes.plot(seconds, right[number, :, action], "k", label="recorded")
            axes.plot(seconds, predicted[number, :, action], "C1--", label="predicted")
            axes.set_title(name, fontsize=9)
    rows[0, 1].legend(fontsize=8)
    for axes in rows[-1, 1:]:
        axes.set_xlabel("s from now")
    figure.savefig(path, dpi=100)


def _curve(entries: list[dict[str, Any]], key: str) -> tuple[list[int], list[float]]:
    points = [(entry["step"], entry[key]) for entry in entries if key in entry]
    return [step for step, _ in points], [value for _, value in points]


def _smooth(values: list[float], share: float = 0.9) -> list[float]:
    """An exponential mean, without the pull of its beginning (Kingma and Ba 2015, section 3)."""
    mean, smooth = 0.0, []
    for count, value in enumerate(values, start=1):
        mean = share * mean + (1 - share) * value
        smooth.append(mean / (1 - share**count))
    return smooth
