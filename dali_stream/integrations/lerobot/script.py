"""LeRobot's training script with a Loader in place of its DataLoader.

The script itself is not changed. `patch` wraps those of its functions that make datasets and that save and load checkpoints,
and `Accelerator.prepare`, through which each DataLoader of the script goes, however it was made.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, IterableDataset, Subset

from dali_stream import process
from dali_stream.arguments import byte_count
from dali_stream.errors import DaliStreamError, ResumeError
from dali_stream.integrations.lerobot.arguments import ARGUMENTS, check_names
from dali_stream.integrations.lerobot.loader import make_loader
from dali_stream.loader import Loader
from dali_stream.state_file import load_state, write_state

_log = logging.getLogger("dali_stream")
STATE_FILE = Path("training_state", "dali_stream.json")
"""State of the Loader in a checkpoint."""
ARGUMENTS_FILE = Path("training_state", "dali_stream_arguments.json")
"""Arguments of the Loader in a checkpoint, which a resumed run keeps."""
_STEP_FILE = Path("training_state", "training_step.json")
_CONFIG_FILE = Path("pretrained_model", "train_config.json")
_EVAL_SHARE = 4  # memory_budget is divided by this for the Loader of an evaluation
_CHANNELS = (1, 3, 4)
_SUPPORTED = "0.4.4 and 0.6.1"


def patch(**loader_arguments: Any) -> Any:
    """Make LeRobot's training script load its data through a Loader, in this process.

    The script's own arguments keep their meaning, except for those of DataLoader's workers. Each checkpoint gets the state and
    the arguments of the Loader, and a resumed run continues at the next sample. In a checkpoint without them, the position
    follows from the number of steps, see `Loader.resume`.

    Args:
        loader_arguments: Arguments of `Loader`. The policy is made for frames of `image_size`. An evaluation has a Loader of
            its own, with a quarter of `memory_budget`.

    Returns:
        The module of the script, `lerobot.scripts.lerobot_train`.

    Raises:
        ValueError: If an argument is unknown, or set by LeRobot, such as batch_size.
        DaliStreamError: If LeRobot is not installed or of an unsupported version, or if its script is patched already.
    """
    check_names(name for name in loader_arguments if name != "dali_graph")
    try:
        script: Any = importlib.import_module("lerobot.scripts.lerobot_train")
    except ImportError as error:
        raise DaliStreamError(
            f"LeRobot's training script cannot be imported ({error}). Install LeRobot with: pip install 'lerobot[training]'"
        ) from error
    makers = [name for name in ("make_train_eval_datasets", "make_dataset") if hasattr(script, name)]  # of 0.6.1 and of 0.4.4
    missing = [name for name in ("load_training_state", "save_checkpoint", "EpisodeAwareSampler") if not hasattr(script, name)]
    if missing or not makers:
        raise DaliStreamError(
            f"LeRobot must be one of {_SUPPORTED}, got {_version()}, whose training script has no "
            f"{', '.join(missing) or 'make_dataset'}"
        )
    if hasattr(script.save_checkpoint, "patched"):
        raise DaliStreamError("patch must be called once per process, got a script that is patched already")
    run = _Run(loader_arguments)
    setattr(script, makers[0], run.making(getattr(script, makers[0])))
    script.load_training_state = run.loading(script.load_training_state)
    script.save_checkpoint = run.saving(script.save_checkpoint)
    script.EpisodeAwareSampler = run.sampling(script.EpisodeAwareSampler)
    if hasattr(script, "submit_to_hf"):
        script.submit_to_hf = _refuse_remote
    accelerator = importlib.import_module("accelerate").Accelerator
    accelerator.prepare = run.preparing(accelerator.prepare)
    return script


def _version() -> str:
    return importlib.metadata.version("lerobot")


def _refuse_remote(_: Any) -> None:
    raise DaliStreamError("--job.target must be local, because a remote job runs LeRobot's script without a Loader")


class _Run:
    """One run of LeRobot's script: what its patched functions share."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        self._given = dict(arguments)
        self._arguments = self._given  # with those of the checkpoint that is resumed
        self._config: Any = None
        self._train: Any = None  # datasets
        self._eval: Any = None
        self._loader: Loader | None = None
        self._checkpoint: tuple[Path, int] | None = None  # to resume from, with its number of steps

    def making(self, make: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return a function that makes LeRobot's datasets, with the size of the Loader's frames in their metadata."""

        @functools.wraps(make)
        def made(config: Any) -> Any:
            self._loader = self._checkpoint = None
            saved = _saved_arguments(Path(config.checkpoint_path)) if config.resume else {}
            self._arguments = saved | self._given
            self._config, datasets = config, make(config)
            self._train, self._eval = datasets if isinstance(datasets, tuple) else (datasets, None)
            if size := self._arguments.get("image_size"):
                for dataset in (self._train, self._eval):
                    if dataset is not None:
                        _resize(dataset.meta, size)
            return datasets

        return made

    def loading(self, load: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that loads a checkpoint, and remembers which one."""

        @functools.wraps(load)
        def loaded(checkpoint_dir: Any, *arguments: Any, **named: Any) -> Any:
            state = load(checkpoint_dir, *arguments, **named)
            self._checkpoint = Path(checkpoint_dir), int(state[0])
            return state

        return loaded

    def saving(self, save: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that saves a checkpoint, with the state and the arguments of the Loader."""

        @functools.wraps(save)
        def saved(checkpoint_dir: Any, *arguments: Any, **named: Any) -> Any:
            result = save(checkpoint_dir, *arguments, **named)
            assert self._loader is not None  # `preparing` has made sure
            own_arguments = {name: value for name, value in self._arguments.items() if name in ARGUMENTS}
            write_state(Path(checkpoint_dir, ARGUMENTS_FILE), own_arguments)
            self._loader.save(Path(checkpoint_dir, STATE_FILE))
            return result

        saved.patched = True  # type: ignore[attr-defined]
        return saved

    def sampling(self, sampler: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that makes the script's sampler, which a DataLoader of a streamed dataset would refuse."""

        @functools.wraps(sampler, updated=())
        def sampled(*arguments: Any, **named: Any) -> Any:
            return None if isinstance(self._train, IterableDataset) else sampler(*arguments, **named)

        return sampled

    def preparing(self, prepare: Callable[..., Any]) -> Callable[..., Any]:
        """Return `Accelerator.prepare` with a Loader in place of each DataLoader over the script's datasets."""

        @functools.wraps(prepare)
        def prepared(accelerator: Any, *objects: Any, **named: Any) -> Any:
            replaced = [self._replaced(each) for each in objects]
            if self._train is not None and self._loader is None:
                raise DaliStreamError(
                    f"LeRobot must be one of {_SUPPORTED}, got {_version()}, whose training script prepares no DataLoader of "
                    "its dataset"
                )
            return prepare(accelerator, *replaced, **named)

        return prepared

    def _replaced(self, prepared: Any) -> Any:
        if not isinstance(prepared, DataLoader) or prepared.batch_size is None:
            return prepared
        part = prepared.dataset
        whole, indices = (part.dataset, part.indices) if isinstance(part, Subset) else (part, None)
        if whole is self._train:
            return self._train_loader(prepared.batch_size)
        if self._eval is not None and whole is self._eval:
            return self._eval_loader(prepared.batch_size, indices)  # a part with `max_eval_samples`
        return prepared

    def _train_loader(self, batch_size: int) -> Loader:
        self._loader = self._make(self._train, batch_size, policy_config=self._policy)
        if self._checkpoint is not None:
            _resume(self._loader, batch_size, *self._checkpoint)
        _log.info("LeRobot's training script loads data through %r", self._loader)
        return self._loader

    def _eval_loader(self, batch_size: int, indices: Sequence[int] | None) -> Loader:
        budget = byte_count(self._arguments.get("memory_budget", "4GiB")) // _EVAL_SHARE
        frames = None if indices is None else _frames(self._eval, indices)
        return self._make(self._eval, batch_size, memory_budget=budget, shuffle=False, frames=frames)

    def _make(self, dataset: Any, batch_size: int, **arguments: Any) -> Loader:
        arguments = {"device": "cpu" if str(self._policy.device) == "cpu" else "auto", **self._arguments, **arguments}
        return make_loader(dataset, batch_size=batch_size, seed=self._config.seed or 0, **arguments)

    @property
    def _policy(self) -> Any:
        """Configuration of the policy, or of 0.6.1's reward model."""
        return getattr(self._config, "trainable_config", self._config.policy)


def _saved_arguments(checkpoint: Path) -> dict[str, Any]:
    """Return the arguments of the Loader in a checkpoint, and none for a checkpoint of LeRobot's own."""
    saved: dict[str, Any] = {}
    load_state(checkpoint / ARGUMENTS_FILE, saved.update)
    return {name: tuple(value) if isinstance(value, list) else value for name, value in saved.items()}


def _resume(loader: Loader, batch_size: int, checkpoint: Path, step: int) -> None:
    """Continue from a checkpoint, by the state of the Loader in it or by its number of steps."""
    if loader.restore(checkpoint / STATE_FILE):
        _log.info("resumed from %s at batch %d of epoch %d", checkpoint / STATE_FILE, loader.batch_index, loader.epoch)
        return
    saved, config = (json.loads((checkpoint / name).read_text()) for name in (_STEP_FILE, _CONFIG_FILE))
    samples, processes = saved.get("batch_size", config["batch_size"]), saved.get("num_processes")  # 0.4.4 does not save them
    world_size = process.ranks(None, None).world_size
    if samples != batch_size or processes not in (None, world_size):
        raise ResumeError(
            f"{checkpoint} must have {STATE_FILE} to be resumed with another global batch, got none. Its steps had {samples} "
            f"samples on each of {processes or 'an unknown number of'} processes, and now have {batch_size} on each of "
            f"{world_size}, so their number does not determine a position. Resume with the same numbers"
        )
    epoch, batch = divmod(step, len(loader))
    loader.resume(epoch=epoch, batch=batch)


def _resize(meta: Any, size: tuple[int, int]) -> None:
    """Write the size of the Loader's frames into LeRobot's metadata, from which a policy is made."""
    for key in meta.camera_keys:
        shape = tuple(meta.features[key]["shape"])
        channels_first = shape[0] in _CHANNELS and shape[-1] not in _CHANNELS
        meta.features[key]["shape"] = (shape[0], *size) if channels_first else (*size, shape[-1])


def _frames(dataset: Any, indices: Sequence[int]) -> dict[int, list[tuple[int, int]]]:
    """Return rows of a LeRobotDataset as ranges of frames, by episode."""
    table = dataset.hf_dataset.data
    rows = np.sort(np.asarray(indices))
    episodes, frames = (table.column(name).to_numpy()[rows] for name in ("episode_index", "frame_index"))
    starts = np.flatnonzero((np.diff(episodes, prepend=-1) != 0) | (np.diff(frames, prepend=-2) != 1))
    ranges: dict[int, list[tuple[int, int]]] = {}
    for first, last in zip(starts, [*starts[1:] - 1, len(rows) - 1], strict=True):
        ranges.setdefault(int(episodes[first]), []).append((int(frames[first]), int(frames[last]) + 1))
    return ranges
