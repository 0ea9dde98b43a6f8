"""Compact action-chunking policy in plain torch, which predicts a chunk of actions from frames, state and task.

The architecture is that of ACT (Zhao et al. 2023, https://arxiv.org/abs/2304.13705) without the variational encoder. A
convolutional backbone computes tokens of each frame, and a transformer encoder combines them with the state and the task. A
transformer decoder has one query for each action of the chunk. The policy has about 4 million parameters.

A policy of `train.py` has the methods of `ChunkPolicy`: `forward(batch)` returns the loss, and `predict(batch)` the actions.
LeRobot's ACT, in `lerobot_act.py`, has the same methods.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from action_chunks import ACTION, STATE, colour_cameras
from torch import Tensor, nn
from torch.nn import functional

import dali_stream


class ChunkPolicy(nn.Module):
    """Policy that predicts chunks of actions in the scale of the batches.

    Args:
        cameras: Keys of the frames in batches, with values in [0, 1] and shape (B, 3, H, W). All cameras share one backbone.
        state: Width D of "observation.state", which has the shape (B, D), or 0 without a state.
        action: Width of an action.
        chunk: Number of actions per prediction.
        tasks: Number of tasks. Batches have `task_index` of shape (B,).
        datasets: Number of datasets of a mixture. Each dataset counts its tasks from 0, so if there are several, batches must
            have `dataset_index` of shape (B,). Default: 1.
        width: Width of the tokens. Default: 192.
    """

    def __init__(
        self, cameras: Sequence[str], state: int, action: int, chunk: int, tasks: int, datasets: int = 1, width: int = 192
    ) -> None:
        super().__init__()
        self.cameras = list(cameras)
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 32, 4, stride=4), Block(32, 32), Block(32, 64, 2), Block(64, 128, 2), Block(128, width, 2)
        )  # the output has one token per 32×32 pixels
        self.backbone.to(memory_format=torch.channels_last)  # the memory format of the frames
        self.state = nn.Linear(state, width) if state else None
        self.task = nn.Embedding(tasks, width)
        self.dataset = nn.Embedding(datasets, width) if datasets > 1 else None
        self.camera = nn.Parameter(torch.randn(len(self.cameras), 1, width) * 0.02)
        self.query = nn.Parameter(torch.randn(1, chunk, width) * 0.02)
        layer = {"d_model": width, "nhead": 6, "dim_feedforward": 4 * width, "dropout": 0.0, "activation": "gelu"}
        form: dict[str, Any] = {"batch_first": True, "norm_first": True}
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(**layer, **form), 3, norm=nn.LayerNorm(width), enable_nested_tensor=False
        )
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(**layer, **form), 2, norm=nn.LayerNorm(width))
        self.head = nn.Linear(width, action)

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the loss, which is the mean absolute error, as in ACT. Actions that were not recorded have an error of 0.

        The mean includes this padding. Therefore the mean over the ranks equals the mean over the whole batch, and the loss
        does not depend on the number of ranks.
        """
        wrong = (self.predict(batch) - actions(batch)).abs()
        return (wrong * recorded(batch)).mean()

    def predict(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the actions from the current frame onwards, float32, shape (B, chunk, D)."""
        tokens = [self._see(batch, key, camera) for key, camera in zip(self.cameras, self.camera, strict=True)]
        tokens.append(self.task(batch["task_index"])[:, None])
        if self.dataset is not None:
            tokens.append(self.dataset(batch["dataset_index"])[:, None])
        if self.state is not None:
            tokens.append(self.state(state(batch))[:, None])
        memory = self.encoder(torch.cat(tokens, dim=1))
        return self.head(self.decoder(self.query.expand(len(memory), -1, -1), memory)).float()

    def _see(self, batch: Mapping[str, Tensor], key: str, camera: Tensor) -> Tensor:
        """Return the tokens of a camera's frames, shape (B, N, width). They are 0 if the sample's dataset lacks the camera."""
        seen = self.backbone(batch[key] * 4 - 2)  # the input has a mean of about 0 and a standard deviation of about 1
        tokens = seen.flatten(2).transpose(1, 2) + places(*seen.shape[2:], seen.shape[1], seen.device) + camera
        missing = batch.get(f"{key}_is_missing")
        return tokens if missing is None else tokens * ~missing[:, None, None]


def width(dataset: dali_stream.Dataset | dali_stream.Mixture, key: str) -> int:
    """Return the number of values of a feature in a sample, or 0 if the dataset lacks it."""
    return math.prod(dataset.features[key]["shape"]) if key in dataset.features else 0


def make_policy(dataset: dali_stream.Dataset, chunk: int) -> ChunkPolicy:
    """Create a policy for a dataset. Its random weights are always the same."""
    torch.manual_seed(0)
    tasks = max(dataset.tasks, default=0) + 1
    return ChunkPolicy(colour_cameras(dataset), width(dataset, STATE), width(dataset, ACTION), chunk, tasks)


def actions(batch: Mapping[str, Tensor]) -> Tensor:
    """Return the actions of a batch, shape (B, chunk, D).

    In a batch, an action has no dimension if it is a single number, and may have several. They are flattened to D.
    """
    return batch[ACTION].reshape(*batch["action_is_pad"].shape, -1)


def recorded(batch: Mapping[str, Tensor]) -> Tensor:
    """Return a mask of the actions that were recorded, bool, shape (B, chunk, D).

    Actions after the end of the episode were not recorded, nor were actions that a sample's dataset does not have.
    """
    mask = ~batch["action_is_pad"][..., None].expand_as(actions(batch))
    if "action_dim_is_pad" in batch:
        mask = mask & ~batch["action_dim_is_pad"].reshape(len(mask), 1, -1)
    if "action_is_missing" in batch:
        mask = mask & ~batch["action_is_missing"][:, None, None]
    return mask


def state(batch: Mapping[str, Tensor]) -> Tensor:
    """Return the state of a batch, shape (B, D). Its dimensions are flattened to D, as in `actions`."""
    return batch[STATE].reshape(len(batch[STATE]), -1)


class Block(nn.Module):
    """Residual block of two 3×3 convolutions (He et al. 2016). Its group norms do not depend on other samples of the batch."""

    def __init__(self, inside: int, outside: int, stride: int = 1) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inside, outside, 3, stride, padding=1, bias=False),
            nn.GroupNorm(8, outside),
            nn.ReLU(),
            nn.Conv2d(outside, outside, 3, padding=1, bias=False),
            nn.GroupNorm(8, outside),
        )
        self.past = nn.Conv2d(inside, outside, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, features: Tensor) -> Tensor:
        return functional.relu(self.body(features) + self.past(features))


def places(height: int, width: int, channels: int, device: torch.device) -> Tensor:
    """Return sine and cosine position encodings of rows and columns, as in Carion et al. 2020.

    Args:
        height: Number of rows.
        width: Number of columns.
        channels: Width of the encodings, a multiple of 4.
        device: Device of the result.

    Returns:
        Encodings of shape (height * width, channels).
    """
    rates = torch.exp(torch.arange(channels // 4, device=device) * (-math.log(1e4) * 4 / channels))
    row, column = ((torch.arange(1, size + 1, device=device) / size * math.tau)[:, None] * rates for size in (height, width))
    row, column = row[:, None].expand(-1, width, -1), column[None].expand(height, -1, -1)
    return torch.cat([row.sin(), row.cos(), column.sin(), column.cos()], dim=-1).flatten(0, 1)
