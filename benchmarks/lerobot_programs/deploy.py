"""Computes actions of a checkpoint with LeRobot alone, as on a robot. benchmarks/lerobot_train.py calls it.

The frames are those of a dataset: once as recorded, as a camera delivers them, and once as a Loader with `image_size` delivers
them in training. The policy and its preprocessor are loaded from the checkpoint.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lerobot.configs.policies import PreTrainedConfig
from lerobot.policies.factory import get_policy_class, make_pre_post_processors

from dali_stream import Loader

FRAMES = 4


def differences(checkpoint: Path, root: Path, size: tuple[int, int]) -> dict[str, float]:
    """Return the largest differences between recorded frames and those of a Loader, for frames in [0, 1] and for actions.

    "actions without resizing" is the difference if the resizing step is left out of the preprocessor.
    """
    folder = str(checkpoint / "pretrained_model")
    config = PreTrainedConfig.from_pretrained(folder)
    policy = get_policy_class(config.type).from_pretrained(folder)
    preprocessor, postprocessor = make_pre_post_processors(config, pretrained_path=folder)
    step = next(step for step in preprocessor.steps if hasattr(step, "resize_size"))
    batches = []
    for image_size in (None, size):
        with Loader(root, batch_size=FRAMES, shuffle=False, device="cpu", image_size=image_size) as loader:
            batch = next(iter(loader))
            batches.append({key: batch[key] for key in config.input_features})
    recorded, trained = batches

    def actions(batch: dict[str, Any]) -> torch.Tensor:
        rows: list[Any] = []
        for row in range(FRAMES):
            policy.reset()
            observation = {key: value[row : row + 1] for key, value in batch.items()}
            rows.append(postprocessor(policy.select_action(preprocessor(observation))))
        return torch.cat(rows)

    wanted = actions(trained)
    resized = step.observation(recorded)
    found = {
        "frames": max((resized[key] - trained[key]).abs().max().item() for key in trained if "image" in key),
        "actions": (actions(recorded) - wanted).abs().max().item(),
    }
    preprocessor.steps = [each for each in preprocessor.steps if each is not step]
    return found | {"actions without resizing": (actions(recorded) - wanted).abs().max().item()}
