"""A compact action-chunking policy in plain torch: frames, state and task in, a chunk of actions out.

The shape is that of ACT (Zhao et al. 2023, https://arxiv.org/abs/2304.13705) without its variational encoder: a
convolutional backbone makes tokens of each frame, a transformer encoder mixes them with the state and the task, and a
transformer decoder asks them one query per action of the chunk. About 4 million parameters.

What `train.py` needs of a policy is what `ChunkPolicy` has: `forward(batch)` is the loss to descend, `predict(batch)` the
actions. LeRobot's own ACT, in `lerobot_act.py`, has the same two.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

STATE, ACTION = "observation.state", "action"


class ChunkPolicy(nn.Module):
    """Predicts `chunk` actions, in the scale in which they come.

    Args:
        cameras: keys of frames (B, 3, H, W) in [0, 1]; all are seen by one backbone.
        state: width D of "observation.state" (B, D); 0 where there is none.
        action: width of an action.
        chunk: actions per prediction.
        tasks: number of tasks; `task_index` (B,) tells them apart.
        datasets: of a mixture, whose tasks count from 0 in each; `dataset_index` (B,) tells them apart.
    """

    def __init__(
        self, cameras: Sequence[str], state: int, action: int, chunk: int, tasks: int, datasets: int = 1, width: int = 192
    ) -> None:
        super().__init__()
        self.cameras = list(cameras)
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 32, 4, stride=4), Block(32, 32), Block(32, 64, 2), Block(64, 128, 2), Block(128, width, 2)
        )  # a token per 32 x 32 pixels
        self.backbone.to(memory_format=torch.channels_last)  # as the frames lie
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
        """The loss: mean absolute error, as ACT has it. What was not recorded counts as no error.

        It is a mean over all of the batch, padded or not, so that the mean over the ranks is the mean over their batches
        taken together, and a run is the same run on any number of ranks.
        """
        wrong = (self.predict(batch) - actions(batch)).abs()
        return (wrong * recorded(batch)).mean()

    def predict(self, batch: Mapping[str, Tensor]) -> Tensor:
        """The actions (B, chunk, D) from the current frame on, float32."""
        tokens = [self._see(batch, key, camera) for key, camera in zip(self.cameras, self.camera, strict=True)]
        tokens.append(self.task(batch["task_index"])[:, None])
        if self.dataset is not None:
            tokens.append(self.dataset(batch["dataset_index"])[:, None])
        if self.state is not None:
            tokens.append(self.state(state(batch))[:, None])
        memory = self.encoder(torch.cat(tokens, dim=1))
        return self.head(self.decoder(self.query.expand(len(memory), -1, -1), memory)).float()

    def _see(self, batch: Mapping[str, Tensor], key: str, camera: Tensor) -> Tensor:
        """Tokens (B, N, width) of one camera's frames; zeros where a sample's dataset lacks the camera."""
        seen = self.backbone(batch[key] * 4 - 2)  # about 0 in the mean, with a deviation of about 1
        tokens = seen.flatten(2).transpose(1, 2) + places(*seen.shape[2:], seen.shape[1], seen.device) + camera
        missing = batch.get(f"{key}_is_missing")
        return tokens if missing is None else tokens * ~missing[:, None, None]


def actions(batch: Mapping[str, Tensor]) -> Tensor:
    """The recorded actions (B, chunk, D), also where D is 1, which LeRobot leaves out, or the action is a matrix."""
    return batch[ACTION].reshape(*batch["action_is_pad"].shape, -1)


def recorded(batch: Mapping[str, Tensor]) -> Tensor:
    """Which of these numbers were recorded, bool (B, chunk, D): not what lies behind the episode's end, and of a mixture not
    what a sample's dataset lacks."""
    there = ~batch["action_is_pad"][..., None].expand_as(actions(batch))
    if "action_dim_is_pad" in batch:
        there = there & ~batch["action_dim_is_pad"].reshape(len(there), 1, -1)
    if "action_is_missing" in batch:
        there = there & ~batch["action_is_missing"][:, None, None]
    return there


def state(batch: Mapping[str, Tensor]) -> Tensor:
    """The state (B, D), likewise."""
    return batch[STATE].reshape(len(batch[STATE]), -1)


class Block(nn.Module):
    """A residual block of two 3x3 convolutions (He et al. 2016), with group norms, which know nothing of other samples."""

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

    def forward(self, given: Tensor) -> Tensor:
        return functional.relu(self.body(given) + self.past(given))


def places(height: int, width: int, channels: int, device: torch.device) -> Tensor:
    """Sines and cosines (height * width, channels) of row and column, as in Carion et al. 2020; `channels` a multiple of 4."""
    rates = torch.exp(torch.arange(channels // 4, device=device) * (-math.log(1e4) * 4 / channels))
    row, column = ((torch.arange(1, size + 1, device=device) / size * math.tau)[:, None] * rates for size in (height, width))
    row, column = row[:, None].expand(-1, width, -1), column[None].expand(height, -1, -1)
    return torch.cat([row.sin(), row.cos(), column.sin(), column.cos()], dim=-1).flatten(0, 1)
