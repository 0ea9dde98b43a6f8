"""LeRobot's own ACT as a policy of `train.py`, where `lerobot` is installed (written against 0.4.4)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from training.policy import ACTION, STATE, actions, state

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # LeRobot's too: dataset.use_imagenet_stats


class LeRobotAct(nn.Module):
    """ACT with LeRobot's defaults: ResNet-18 on ImageNet's weights, 512 wide, with a variational encoder.

    Args:
        cameras, action, chunk: as for `policy.ChunkPolicy`. It knows no task.
        size: (height, width) of the frames.
        width: of the state.
        pretrained: begin with ImageNet's weights, which torchvision downloads; else with random ones.

    Raises:
        ValueError: LeRobot is not installed, or there is no state, which its variational encoder takes for granted.
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
                f"LeRobot's ACT cannot be imported ({error}); pip install lerobot, or take the policy of this folder"
            ) from error
        if not width:
            raise ValueError(f"LeRobot's ACT needs {STATE!r}, and the dataset has none; take the policy of this folder")
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
        """LeRobot's loss: mean absolute error and the weighted divergence of its latent."""
        return self.act(self._seen(batch))[0]

    def predict(self, batch: Mapping[str, Tensor]) -> Tensor:
        """The actions (B, chunk, D) from the current frame on, float32."""
        return self.act.predict_action_chunk(self._seen(batch)).float()

    def _seen(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        pictures = {key: (batch[key] - self.mean) / self.std for key in self.cameras}
        return {**batch, **pictures, ACTION: actions(batch), STATE: state(batch)}
