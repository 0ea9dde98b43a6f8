"""Wrapper that makes LeRobot's ACT a policy of `train.py`. It requires `lerobot`, and was written for version 0.4.4."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from training.policy import ACTION, STATE, actions, state

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # as in LeRobot: dataset.use_imagenet_stats


class LeRobotAct(nn.Module):
    """ACT with LeRobot's defaults: ResNet-18 with ImageNet weights, width 512 and a variational encoder. It ignores the task.

    Args:
        cameras: Keys of the frames, see `policy.ChunkPolicy`.
        size: Size (height, width) of the frames in pixels.
        width: Width of the state.
        action: Width of an action.
        chunk: Number of actions per prediction.
        pretrained: Whether the backbone starts with ImageNet weights, which torchvision downloads. Otherwise, they are random.
            Default: True.

    Raises:
        ValueError: If LeRobot is not installed, or the width of the state is 0. The variational encoder requires a state.
    """

    def __init__(
        self, cameras: Sequence[str], size: tuple[int, int], width: int, action: int, chunk: int, pretrained: bool = True
    ) -> None:
        try:
            from lerobot.configs.types import FeatureType, PolicyFeature
            from lerobot.policies.act.configuration_act import ACTConfig
            from lerobot.policies.act.modeling_act import ACTPolicy
        except ImportError as error:
            raise ValueError(
                f"LeRobot's ACT cannot be imported ({error}). Install lerobot, or take the policy of this folder"
            ) from error
        if not width:
            raise ValueError(f"LeRobot's ACT needs {STATE!r}, and the dataset has none. Take the policy of this folder")
        super().__init__()
        inputs = {key: PolicyFeature(FeatureType.VISUAL, (3, *size)) for key in cameras}
        inputs[STATE] = PolicyFeature(FeatureType.STATE, (width,))
        weights: dict[str, Any] = {} if pretrained else {"pretrained_backbone_weights": None}
        config = ACTConfig(
            input_features=inputs,
            output_features={ACTION: PolicyFeature(FeatureType.ACTION, (action,))},
            chunk_size=chunk,
            n_action_steps=chunk,
            **weights,
        )
        self.act, self.cameras = ACTPolicy(config), list(cameras)
        for name, values in (("mean", IMAGENET_MEAN), ("std", IMAGENET_STD)):
            self.register_buffer(name, torch.tensor(values)[:, None, None], persistent=False)

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return LeRobot's loss: the mean absolute error, plus the weighted divergence of the latent variable."""
        return self.act(self._seen(batch))[0]

    def predict(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the actions from the current frame onwards, float32, shape (B, chunk, D)."""
        return self.act.predict_action_chunk(self._seen(batch)).float()

    def _seen(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        pictures = {key: (batch[key] - self.mean) / self.std for key in self.cameras}
        return {**batch, **pictures, ACTION: actions(batch), STATE: state(batch)}
