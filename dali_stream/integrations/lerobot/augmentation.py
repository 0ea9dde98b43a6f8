"""LeRobot's image transforms of whole batches on the GPU, with random numbers that a resumed run repeats."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from dali_stream.integrations.lerobot import parts


class BatchAugmentation:
    """Step that applies image transforms to batches, in place of LeRobot's `ImageAugmentationProcessorStep`.

    LeRobot's step draws the numbers of all batches from one generator, which a resumed run would begin again. This one seeds
    its generator for each batch.

    Args:
        step: LeRobot's step.
        seed: Function that returns the seed of the current batch.

    Raises:
        DaliStreamError: If LeRobot lacks the transforms of batches.
    """

    def __init__(self, step: Any, seed: Callable[[], int]) -> None:
        transforms = getattr(importlib.import_module(parts.BATCHED.module), parts.find(parts.BATCHED))
        self._transforms = transforms(step.config, chunk_size=step.chunk_size, compile_model=step.compile_model)
        self._cameras, self._device, self._seed = step.image_keys, torch.device(step.device), seed

    def observation(self, observation: dict[str, Any]) -> dict[str, Any]:
        """Return a batch with transformed frames. LeRobot's script calls this method for each batch of training."""
        generator = torch.Generator(self._device).manual_seed(self._seed())
        frames = {camera: observation[camera].to(self._device, non_blocking=True) for camera in self._cameras}
        return observation | {camera: self._transforms(values, generator=generator) for camera, values in frames.items()}
