"""The parts of LeRobot that `patch` uses, with the parameters that it passes or reads.

LeRobot's versions differ in these parts. Whether one is supported follows from its parts, not from its version number.
`find` names the part that is missing or has changed, and `tests/test_lerobot_installed.py` calls it for the installed LeRobot.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
from typing import Any, NamedTuple

from dali_stream.errors import DaliStreamError

SCRIPT = "lerobot.scripts.lerobot_train"


class Part(NamedTuple):
    """A function or class of LeRobot.

    Attributes:
        module: Module in which `patch` looks it up.
        names: Its names, from the newest LeRobot to the oldest one.
        parameters: Names of its parameters that `patch` relies on.
        purpose: Reason why `patch` needs it, as the end of a sentence.
    """

    module: str
    names: tuple[str, ...]
    parameters: tuple[str, ...]
    purpose: str


DATASETS = Part(SCRIPT, ("make_train_eval_datasets", "make_dataset"), ("cfg",), "to learn which datasets are loaded")
RESUMED = Part(SCRIPT, ("resume_before_prepare", "load_training_state"), (), "to learn the number of steps of a checkpoint")
SAVE = Part(SCRIPT, ("save_checkpoint",), ("checkpoint_dir",), "to add the state of the Loader to a checkpoint")
SAMPLER = Part(SCRIPT, ("EpisodeAwareSampler",), (), "to make no sampler for a streamed dataset")
PROCESSORS = Part(SCRIPT, ("make_pre_post_processors",), (), "to resize frames when the policy is deployed")
REWARD_PROCESSORS = Part(SCRIPT, ("make_reward_pre_post_processors",), (), "to resize the frames of a reward model")
REMOTE = Part(SCRIPT, ("submit_to_hf",), (), "to refuse remote jobs")
RESIZING = Part("lerobot.processor", ("ImageCropResizeProcessorStep",), ("resize_size",), "to resize frames at deployment")
AUGMENTATION = Part(SCRIPT, ("_make_image_augmentation",), (), "to repeat the transforms of batches after a resume")
BATCHED = Part(
    "lerobot.transforms", ("BatchedImageTransforms",), ("cfg", "chunk_size", "compile_model"), "to transform frames on the GPU"
)
DELTAS = Part("lerobot.datasets.factory", ("resolve_delta_timestamps",), ("cfg", "ds_meta"), "to find a policy's windows")

REQUIRED = (DATASETS, RESUMED, SAVE, SAMPLER, PROCESSORS, RESIZING, DELTAS)


def find(part: Part) -> str:
    """Return the name of a part in the LeRobot that is installed.

    Raises:
        DaliStreamError: If LeRobot cannot be imported, or if it lacks the part or one of its parameters.
    """
    try:
        module: Any = importlib.import_module(part.module)
    except ImportError as error:
        raise DaliStreamError(
            f"LeRobot's training script cannot be imported ({error}). Install LeRobot with: pip install 'lerobot[training]'"
        ) from error
    name = next((name for name in part.names if hasattr(module, name)), None)
    if name is None:
        raise _unsupported(f"{part.module}.{' or '.join(part.names)}", part)
    parameters = inspect.signature(getattr(module, name)).parameters
    for parameter in part.parameters:
        if parameter not in parameters:
            raise _unsupported(f"the parameter {parameter} of {part.module}.{name}", part)
    return name


def _unsupported(what: str, part: Part) -> DaliStreamError:
    version = importlib.metadata.version("lerobot")
    return DaliStreamError(
        f"LeRobot must have {what}, which dali_stream needs {part.purpose}, got LeRobot {version} without it. docs/lerobot.md "
        "lists the versions that were tested"
    )
