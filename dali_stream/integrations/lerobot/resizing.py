"""Resizing of frames when a policy is deployed, as the Loader has resized them in training."""

from __future__ import annotations

import importlib
from typing import Any

from dali_stream.integrations.lerobot import parts

Size = tuple[int, int]


def add_resizing(preprocessor: Any, image_size: Size) -> None:
    """Add LeRobot's resizing step to the preprocessor of a policy that is trained on a Loader with `image_size`.

    Without this step, a policy that accepts frames of any size computes other actions from a robot's frames than from those of
    the Loader. The step does not change a batch of the Loader, since its frames have this size already. For a frame as the
    camera delivers it, the result equals that of the Loader except for rounding to uint8. Save the preprocessor afterwards.
    Do not add the step if the policy has depth cameras, since it clamps values to [0, 1].

    Args:
        preprocessor: PolicyProcessorPipeline, changed in place. If it has a resizing step, its size is replaced.
        image_size: Size (height, width) of the Loader's frames, in pixels.

    Raises:
        DaliStreamError: If LeRobot is not installed, or lacks the step.
        ValueError: If the preprocessor has a step that crops frames.
    """
    steps = list(preprocessor.steps)
    place = _place(steps)
    if place is None:
        names = [getattr(type(step), "_registry_name", None) for step in steps]
        # After this step, keys are those of the policy.
        place = names.index("rename_observations_processor") + 1 if "rename_observations_processor" in names else 0
        steps.insert(place, None)
    elif steps[place].crop_params_dict:
        raise ValueError(
            f"image_size must not be passed for a preprocessor that crops the recorded frames, got {image_size}. Leave it out, "
            "or remove the cropping step"
        )
    steps[place] = _resizing_step()(resize_size=list(image_size))
    preprocessor.steps = steps


def size_of(preprocessor: Any) -> Size | None:
    """Return the size to which a preprocessor resizes frames without cropping them, or None."""
    place = _place(preprocessor.steps)
    step = None if place is None else preprocessor.steps[place]
    if step is None or step.crop_params_dict or not step.resize_size:
        return None
    height, width = step.resize_size
    return int(height), int(width)


def _place(steps: Any) -> int | None:
    original = _original_step()
    return next((place for place, step in enumerate(steps) if isinstance(step, original)), None)


def _original_step() -> Any:
    return getattr(importlib.import_module(parts.RESIZING.module), parts.find(parts.RESIZING))


def _resizing_step() -> Any:
    """Return a class for training. A saved preprocessor contains LeRobot's own class, whose registered name it inherits."""
    original = _original_step()

    class ResizingStep(original):  # type: ignore[misc, valid-type]
        def observation(self, observation: dict[str, Any]) -> dict[str, Any]:
            """Resize frames of another size. LeRobot's step would also resize the masks of windows, which have camera keys."""
            others = {
                key: value
                for key, value in observation.items()
                if "image" in key and not key.endswith("_is_pad") and list(value.shape[-2:]) != self.resize_size
            }
            return observation | super().observation(others)

    return ResizingStep
