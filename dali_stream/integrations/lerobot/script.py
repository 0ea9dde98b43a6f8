"""LeRobot's training script with a Loader in place of its DataLoader.

The source of the script is not changed. `patch` replaces the script's functions that make datasets, load checkpoints, save
checkpoints and submit remote jobs, its sampler, and `Accelerator.prepare`. The script passes all of its DataLoaders to
`prepare`, no matter how it makes them.
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
"""Arguments of the Loader in a checkpoint. A resumed run uses them again."""
_STEP_FILE = Path("training_state", "training_step.json")
_CONFIG_FILE = Path("pretrained_model", "train_config.json")
_EVAL_SHARE = 4  # the Loader of an evaluation gets memory_budget divided by this number
_CHANNELS = (1, 3, 4)  # numbers of channels by which shapes (C, H, W) are recognized
_SUPPORTED = "0.4.4 and 0.6.1"


def patch(**loader_arguments: Any) -> Any:
    """Make LeRobot's training script load its data through a Loader, in this process.

    The script's own arguments keep their meaning, except those for the workers of a DataLoader. Each checkpoint contains the
    state and the arguments of the Loader, and a resumed run continues at the next sample. If a checkpoint has no such state,
    the position is computed from the number of steps. See `Loader.resume`.

    Args:
        loader_arguments: Arguments of `Loader`. The script makes the policy for frames of `image_size`. Evaluation uses another
            Loader, with a quarter of `memory_budget`. In a resumed run, these arguments override those of the checkpoint.

    Returns:
        The module of the script, `lerobot.scripts.lerobot_train`.

    Raises:
        ValueError: If an argument is unknown, or set by LeRobot, such as batch_size.
        DaliStreamError: If LeRobot is not installed, if its version is not supported, or if its script is already patched.
    """
    check_names(name for name in loader_arguments if name != "dali_graph")
    try:
        script: Any = importlib.import_module("lerobot.scripts.lerobot_train")
    except ImportError as error:
        raise DaliStreamError(
            f"LeRobot's training script cannot be imported ({error}). Install LeRobot with: pip install 'lerobot[training]'"
        ) from error
    makers = [name for name in ("make_train_eval_datasets", "make_dataset") if hasattr(script, name)]  # in 0.6.1 and 0.4.4
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
    """State of one run of LeRobot's script, which the patched functions share."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        self._given = dict(arguments)
        self._arguments = self._given  # after a resume, also the arguments of the checkpoint
        self._config: Any = None
        self._train: Any = None  # training dataset
        self._eval: Any = None  # evaluation dataset, if any
        self._loader: Loader | None = None
        self._checkpoint: tuple[Path, int] | None = None  # folder and number of steps of the checkpoint that is resumed

    def making(self, make: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Wrap the function that makes the datasets, and set the size of the Loader's frames in their metadata."""

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
        """Wrap the function that loads a checkpoint, and remember the checkpoint."""

        @functools.wraps(load)
        def loaded(checkpoint_dir: Any, *arguments: Any, **named: Any) -> Any:
            state = load(checkpoint_dir, *arguments, **named)
            self._checkpoint = Path(checkpoint_dir), int(state[0])
            return state

        return loaded

    def saving(self, save: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the function that saves a checkpoint, and add the state and the arguments of the Loader."""

        @functools.wraps(save)
        def saved(checkpoint_dir: Any, *arguments: Any, **named: Any) -> Any:
            result = save(checkpoint_dir, *arguments, **named)
            assert self._loader is not None  # `prepared` raises an error if it has made no Loader
            own_arguments = {name: value for name, value in self._arguments.items() if name in ARGUMENTS}
            write_state(Path(checkpoint_dir, ARGUMENTS_FILE), own_arguments)
            self._loader.save(Path(checkpoint_dir, STATE_FILE))
            return result

        saved.patched = True  # type: ignore[attr-defined]
        return saved

    def sampling(self, sampler: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the class of the script's sampler. A streamed dataset gets no sampler, since its DataLoader would refuse one."""

        @functools.wraps(sampler, updated=())
        def sampled(*arguments: Any, **named: Any) -> Any:
            return None if isinstance(self._train, IterableDataset) else sampler(*arguments, **named)

        return sampled

    def preparing(self, prepare: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `Accelerator.prepare`, and replace each DataLoader over one of the script's datasets with a Loader."""

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
            return self._eval_loader(prepared.batch_size, indices)  # some rows, if `max_eval_samples` limits them
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
        """Configuration of the policy, or of a reward model, which LeRobot 0.6.1 can train."""
        return getattr(self._config, "trainable_config", self._config.policy)


def _saved_arguments(checkpoint: Path) -> dict[str, Any]:
    """Return the arguments of the Loader in a checkpoint. Empty if LeRobot saved it without a Loader."""
    saved: dict[str, Any] = {}
    load_state(checkpoint / ARGUMENTS_FILE, saved.update)
    # JSON stores tuples, such as `image_size`, as lists.
    return {name: tuple(value) if isinstance(value, list) else value for name, value in saved.items()}


def _resume(loader: Loader, batch_size: int, checkpoint: Path, step: int) -> None:
    """Continue from the Loader's state in a checkpoint or, if the checkpoint contains none, from its number of steps."""
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
    """Set the size of the Loader's frames in LeRobot's metadata, from which the script makes the policy."""
    for key in meta.camera_keys:
        shape = tuple(meta.features[key]["shape"])
        channels_first = shape[0] in _CHANNELS and shape[-1] not in _CHANNELS
        meta.features[key]["shape"] = (shape[0], *size) if channels_first else (*size, shape[-1])


def _frames(dataset: Any, indices: Sequence[int]) -> dict[int, list[tuple[int, int]]]:
    """Convert row numbers of a LeRobotDataset to ranges of frames, {episode: [(start, stop), ...]}."""
    of_row = dataset.hf_dataset.data.column("episode_index").to_numpy()
    begin = np.flatnonzero(np.diff(of_row, prepend=-1))  # first row of each episode
    rows = np.sort(np.asarray(indices))
    episodes, frames = of_row[rows], rows - begin[np.searchsorted(begin, rows, side="right") - 1]
    # A range ends where the episode changes or a frame is left out.
    starts = np.flatnonzero((np.diff(episodes, prepend=-1) != 0) | (np.diff(frames, prepend=-2) != 1))
    ranges: dict[int, list[tuple[int, int]]] = {}
    for first, last in zip(starts, [*starts[1:] - 1, len(rows) - 1], strict=True):
        ranges.setdefault(int(episodes[first]), []).append((int(frames[first]), int(frames[last]) + 1))
    return ranges
