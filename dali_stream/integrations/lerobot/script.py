"""LeRobot's training script with a Loader in place of its DataLoader.

The source of the script is not changed. `patch` replaces the script's functions that make datasets, load checkpoints, save
checkpoints, make preprocessors, make the transforms of batches and submit remote jobs, its sampler, and `Accelerator.prepare`.
`parts` lists them. The script passes all of its DataLoaders to `prepare`, no matter how it makes them.
"""

from __future__ import annotations

import functools
import importlib
import json
import logging
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, Subset

from dali_stream.checks.file_content import check_fields
from dali_stream.errors import DaliStreamError, ResumeError
from dali_stream.integrations.lerobot import parts
from dali_stream.integrations.lerobot.arguments import ARGUMENTS, PREFIX, SAVED, check_names
from dali_stream.integrations.lerobot.loader import make_loader
from dali_stream.integrations.lerobot.resizing import Size, add_resizing, size_of
from dali_stream.lerobot.features import Feature
from dali_stream.loader import Loader
from dali_stream.run.sample_function import seed_of
from dali_stream.storage.state_file import load_state, write_state
from dali_stream.system import memory_limit
from dali_stream.system.ranks import current_ranks, local_ranks
from dali_stream.transformed import Transformed

_log = logging.getLogger("dali_stream")
STATE_FILE = Path("training_state", "dali_stream.json")
"""State of the Loader in a checkpoint."""
ARGUMENTS_FILE = Path("training_state", "dali_stream_arguments.json")
"""Arguments of the Loader in a checkpoint. A resumed run uses them again."""
_STEP_FILE = Path("training_state", "training_step.json")
_CONFIG_FILE = Path("pretrained_model", "train_config.json")
_EVAL_SHARE = 4  # the Loader of an evaluation gets memory_budget divided by this number
_CHANNELS = (1, 3, 4)  # numbers of channels by which shapes (C, H, W) are recognized
_SETTINGS = (
    "seed",
    "dataset.revision",
    "dataset.episodes",
    "dataset.exclude_episodes",
    "dataset.eval_split",
    "policy.drop_n_last_frames",
    "reward_model.drop_n_last_frames",
)
"""LeRobot's settings that determine the order."""
_WORKERS = ("prefetch_factor", "persistent_workers", "dataloader_multiprocessing_context")
"""LeRobot's settings of a DataLoader's workers that have no effect with a Loader."""
_ORDER = ("shuffle", "consumers", "episode_pool_size")
"""Arguments of the Loader that determine the order."""


def patch(**loader_arguments: Any) -> Any:
    """Make LeRobot's training script load its data through a Loader, in this process.

    The script's own arguments keep their meaning, except those for the workers of a DataLoader and for the video backend. Each
    checkpoint contains the state and the arguments of the Loader, and a resumed run continues at the next sample. If a
    checkpoint has no such state, the position is computed from the number of steps. See `Loader.resume`.

    With `image_size`, the script makes the policy for frames of this size, and the preprocessor in each checkpoint resizes the
    frames of a robot in the same way. See `add_resizing`. A run that begins with `--policy.path` from such a checkpoint takes
    the size from it. A dataset with depth cameras is an error, since this step would clamp their distances to [0, 1].

    Args:
        loader_arguments: Arguments of `Loader`. Evaluation uses another Loader, with a quarter of `memory_budget`. In a resumed
            run, these arguments override those of the checkpoint.

    Returns:
        The module of the script, `lerobot.scripts.lerobot_train`.

    Raises:
        ValueError: If an argument is unknown, or set by LeRobot, such as batch_size.
        DaliStreamError: If LeRobot is not installed, if it lacks a part that is replaced, or if its script is already patched.
    """
    check_names(name for name in loader_arguments if name != "dali_graph")
    names = {part: parts.find(part) for part in parts.REQUIRED}
    script: Any = importlib.import_module(parts.SCRIPT)
    if hasattr(script.save_checkpoint, "patched"):
        raise DaliStreamError("patch must be called once per process, got a script that is patched already")
    run = _Run(loader_arguments)
    wrappers = {
        parts.DATASETS: run.making,
        parts.RESUMED: run.resuming,
        parts.SAVE: run.saving,
        parts.SAMPLER: run.sampling,
        parts.PROCESSORS: run.processing,
        parts.REWARD_PROCESSORS: run.processing,
        parts.AUGMENTATION: run.augmenting,
        parts.REMOTE: lambda _: _refuse_remote,
    }
    for part, wrap in wrappers.items():
        name = names.get(part, part.names[0])
        if part in names or hasattr(script, name):
            setattr(script, name, wrap(getattr(script, name)))
    accelerator = importlib.import_module("accelerate").Accelerator
    accelerator.prepare = run.preparing(accelerator.prepare)
    return script


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
        self._loader: Loader | Transformed | None = None
        self._checkpoint: tuple[Path, int] | None = None  # folder and number of steps of the checkpoint that is resumed

    def making(self, make: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Wrap the function that makes the datasets, and set the size of the Loader's frames for the policy."""

        @functools.wraps(make)
        def made(cfg: Any) -> Any:
            _check_settings(cfg)
            self._loader = self._checkpoint = None
            saved = self._resumed_arguments(Path(cfg.checkpoint_path)) if cfg.resume else {}
            self._arguments = saved | self._given
            self._config, datasets = cfg, make(cfg)
            self._train, self._eval = datasets if isinstance(datasets, tuple) else (datasets, None)
            root = _setting(cfg, "dataset.streaming_data_root")
            if root is not None and isinstance(self._train, IterableDataset) and not hasattr(self._train, "_data_root"):
                raise DaliStreamError(
                    f"--dataset.streaming_data_root must be an attribute _data_root of {type(self._train).__name__}, got "
                    f"{root!r} and no such attribute. Use --dataset.root or --dataset.repo_id"
                )
            if size := self._arguments.get("image_size"):
                self._set_size(size)
            return datasets

        return made

    def _resumed_arguments(self, checkpoint: Path) -> dict[str, Any]:
        """Return the arguments of a checkpoint that a resumed run uses. A folder to write to is not taken from a checkpoint."""
        saved = _saved_arguments(checkpoint)
        folder, limit = saved.pop("frame_cache", None), saved.get("frame_cache_bytes")
        if self._given.get("frame_cache") is None:
            saved.pop("frame_cache_bytes", None)
            if folder is not None:
                words = shlex.join([f"{PREFIX}frame_cache={folder}"] + [f"{PREFIX}frame_cache_bytes={limit}"] * bool(limit))
                _warn("no frame cache is used, since folders are not taken from a checkpoint. Pass %s to use its folder", words)
        return saved

    def _set_size(self, size: Size) -> None:
        """Set the size of the Loader's frames in the metadata, from which a policy is made, and in a policy that exists."""
        self._refuse_depth(size)
        names = dict(getattr(self._config, "rename_map", None) or {})
        for key in self._train.meta.features:
            name = names.get(key, key)
            if name.startswith("observation.") and ("image" in name) != (key in self._train.meta.camera_keys):
                raise ValueError(
                    f"With image_size, the names of cameras, and of no other observations, must contain 'image', got {name!r}. "
                    f"LeRobot's resizing step recognizes frames by it. Leave {PREFIX}image_size out or, with --policy.path, "
                    "rename the observation with --rename_map"
                )
        for dataset in (self._train, self._eval):
            if dataset is not None:
                _resize(dataset.meta, size)
        inputs = getattr(self._policy, "input_features", None) or {}
        for key in self._train.meta.camera_keys:
            feature = inputs.get(names.get(key, key))
            if feature is not None and tuple(feature.shape[-2:]) != size:
                old = "x".join(map(str, feature.shape[-2:]))
                _warn(
                    "%simage_size changes the policy's input %s from %s to %dx%d. Pass %simage_size=%s to keep the size for "
                    "which its weights were trained",
                    *(PREFIX, names.get(key, key), old, *size, PREFIX, old),
                )
                feature.shape = (*feature.shape[:-2], *size)

    def _refuse_depth(self, size: Size) -> None:
        """Raise ValueError if the dataset has depth cameras, since LeRobot's resizing step would change their distances."""
        features = self._train.meta.features
        if depth := [key for key in self._train.meta.camera_keys if Feature(features[key]).is_depth]:
            raise ValueError(
                f"image_size must not be given with depth cameras, got {size} and {', '.join(depth)}. LeRobot's resizing step, "
                f"which checkpoints contain, clamps values to [0, 1]. Leave {PREFIX}image_size out, or train on a copy without "
                "these cameras, which `dali-stream prepare URI OUT` writes with --cameras"
            )

    def processing(self, make: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function that makes the pre- and postprocessor, and let the preprocessor resize frames as the Loader does."""

        @functools.wraps(make)
        def processors(*arguments: Any, **named: Any) -> Any:
            preprocessor, postprocessor = make(*arguments, **named)
            size = self._arguments.get("image_size")
            if size is None and (size := size_of(preprocessor)):
                self._refuse_depth(size)
                _log.info("image_size is %s, that of the preprocessor of the policy", size)
                self._arguments = {**self._arguments, "image_size": size}
            if size is not None:
                add_resizing(preprocessor, size)
            return preprocessor, postprocessor

        return processors

    def augmenting(self, make: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the function that makes the step with transforms of batches, and let a resumed run repeat its random numbers."""

        @functools.wraps(make)
        def made(*arguments: Any, **named: Any) -> Any:
            step = make(*arguments, **named)
            return None if step is None else _BatchAugmentation(step, self._batch_seed)

        return made

    def _batch_seed(self) -> int:
        """Return the seed for the transforms of the batch that the Loader has delivered last. It differs between ranks."""
        assert self._loader is not None
        seed = (self._config.seed or 0) + current_ranks(None, None).rank
        return seed_of(seed, self._loader.epoch, self._loader.batch_index)

    def resuming(self, resume: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the function that reads the number of steps of a checkpoint, and remember both."""

        @functools.wraps(resume)
        def resumed(*arguments: Any, **named: Any) -> Any:
            result = resume(*arguments, **named)
            step = result[0] if isinstance(result, tuple) else result  # the optimizer and the scheduler may follow it
            self._checkpoint = Path(self._config.checkpoint_path), int(step)
            return result

        return resumed

    def saving(self, save: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the function that saves a checkpoint, and add the state and the arguments of the Loader on rank 0."""

        @functools.wraps(save)
        def saved(checkpoint_dir: Any, *arguments: Any, **named: Any) -> Any:
            result = save(checkpoint_dir, *arguments, **named)
            assert self._loader is not None  # `prepared` raises an error if it has made no Loader
            if _is_first():
                own_arguments = {name: value for name, value in self._arguments.items() if name in ARGUMENTS}
                if own_arguments.get("frame_cache") is not None:
                    own_arguments["frame_cache"] = os.fspath(own_arguments["frame_cache"])
                write_state(Path(checkpoint_dir, ARGUMENTS_FILE), own_arguments)
                write_state(Path(checkpoint_dir, STATE_FILE), self._loader.state_dict())
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
                    f"{parts.SCRIPT}.train must pass a DataLoader of its dataset to Accelerator.prepare, got other objects only"
                )
            return prepare(accelerator, *replaced, **named)

        return prepared

    def _replaced(self, prepared: Any) -> Any:
        if not isinstance(prepared, DataLoader) or prepared.batch_size is None:
            return prepared
        part = prepared.dataset
        whole, indices = (part.dataset, part.indices) if isinstance(part, Subset) else (part, None)
        if whole is self._train:
            return self._train_loader(prepared.batch_size, prepared.num_workers)
        if self._eval is not None and whole is self._eval:
            return self._eval_loader(prepared.batch_size, indices)  # some rows, if `max_eval_samples` limits them
        return prepared

    def _train_loader(self, batch_size: int, num_workers: int) -> Loader | Transformed:
        self._loader = self._make(self._train, batch_size, policy_config=self._policy, num_workers=num_workers)
        self._tell_without_effect()
        if self._checkpoint is not None:
            self._resume(self._loader, batch_size, *self._checkpoint)
        _log.info("LeRobot's training script loads data through %r", self._loader)
        return self._loader

    def _tell_without_effect(self) -> None:
        """Warn about settings of the DataLoader's workers that the user has given and that have no effect."""
        names = _WORKERS if getattr(self._train, "image_transforms", None) is not None else ("num_workers", *_WORKERS)
        if given := [f"--{name}" for name in names if _is_given(self._config, name)]:
            verb = "has" if len(given) == 1 else "have"
            _warn(
                "%s %s no effect. %snum_threads and %sprefetch set those of the Loader", ", ".join(given), verb, PREFIX, PREFIX
            )

    def _resume(self, loader: Loader | Transformed, batch_size: int, checkpoint: Path, step: int) -> None:
        """Continue from the Loader's state in a checkpoint or, if the checkpoint contains none, from its number of steps."""
        try:
            loaded = load_state(checkpoint / STATE_FILE, loader.load_state_dict)
        except ResumeError as error:
            if not (changed := self._changed(checkpoint)):
                raise
            raise ResumeError(
                f"the order of {checkpoint} was made with {', '.join(changed)}, so its position means other samples now. "
                "Resume with the saved values. Or begin a new run with its weights, without --resume and with "
                f"--policy.path={checkpoint / 'pretrained_model'}. Or remove {checkpoint / STATE_FILE} to continue where the "
                "number of steps leads in the new order"
            ) from error
        if loaded:
            _log.info("resumed from %s at batch %d of epoch %d", checkpoint / STATE_FILE, loader.batch_index, loader.epoch)
            return
        saved, config = (json.loads((checkpoint / name).read_text()) for name in (_STEP_FILE, _CONFIG_FILE))
        samples = saved.get("batch_size", config["batch_size"])
        processes = saved.get("dp_world_size", saved.get("num_processes"))  # 0.4.4 saves neither
        world_size = current_ranks(None, None).world_size
        if samples != batch_size or processes not in (None, world_size):
            raise ResumeError(
                f"{checkpoint} must have {STATE_FILE} to be resumed with another global batch, got none. Its steps had "
                f"{samples} samples on each of {processes or 'an unknown number of'} processes, and now have {batch_size} on "
                f"each of {world_size}, so their number does not determine a position. Resume with the same numbers"
            )
        if processes is None:
            _warn("%s does not contain the number of its processes. Its position assumes %d, as now", checkpoint, world_size)
        epoch, batch = divmod(step, len(loader))
        loader.resume(epoch=epoch, batch=batch)

    def _changed(self, checkpoint: Path) -> list[str]:
        """Return the settings of the order that differ from those of a checkpoint, as text."""
        config, arguments = json.loads((checkpoint / _CONFIG_FILE).read_text()), _saved_arguments(checkpoint)
        values = [(f"--{name}", _setting(config, name), _setting(self._config, name)) for name in _SETTINGS]
        values += [(PREFIX + name, arguments.get(name), self._given[name]) for name in _ORDER if name in self._given]
        return [f"{name}={json.dumps(old)} (now {json.dumps(new)})" for name, old, new in values if old != new]

    def _eval_loader(self, batch_size: int, indices: Sequence[int] | None) -> Loader | Transformed:
        given = self._arguments.get("memory_budget")
        budget = memory_limit.budget(given, memory_limit.memory_limit(), local_ranks().count, True).size // _EVAL_SHARE
        frames = None if indices is None else frame_ranges(self._eval, indices)
        return self._make(self._eval, batch_size, memory_budget=budget, shuffle=False, frames=frames)

    def _make(self, dataset: Any, batch_size: int, **arguments: Any) -> Loader | Transformed:
        arguments = {"device": "cpu" if str(self._policy.device) == "cpu" else "auto", **self._arguments, **arguments}
        return make_loader(dataset, batch_size=batch_size, seed=self._config.seed or 0, **arguments)

    @property
    def _policy(self) -> Any:
        """Configuration of the policy, or of a reward model, which LeRobot 0.6.1 can train."""
        return getattr(self._config, "trainable_config", self._config.policy)


class _BatchAugmentation:
    """Step that applies image transforms to whole batches on the GPU, in place of LeRobot's `ImageAugmentationProcessorStep`.

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


def _saved_arguments(checkpoint: Path) -> dict[str, Any]:
    """Return the arguments of the Loader in a checkpoint. Empty if LeRobot saved it without a Loader.

    Raises:
        ResumeError: If the file has other content than arguments of a Loader.
    """
    saved: dict[str, Any] = {}

    def check(content: Any) -> None:
        try:
            saved.update(check_fields("the file", content, SAVED, ()))
        except ValueError as error:
            raise ResumeError(f"{error}. Remove the file, and pass the arguments of the run as {PREFIX}NAME=VALUE") from error

    load_state(checkpoint / ARGUMENTS_FILE, check)
    # JSON stores tuples, such as `image_size`, as lists.
    return {name: tuple(value) if isinstance(value, list) else value for name, value in saved.items()}


def _setting(config: Any, name: str) -> Any:
    """Return a setting such as "dataset.episodes" of LeRobot's configuration or of its JSON file, or None if it has none."""
    for part in name.split("."):
        config = config.get(part) if isinstance(config, Mapping) else getattr(config, part, None)
    return config


def _is_given(config: Any, name: str) -> bool:
    """Return whether a setting is on the command line, or differs from its default, which is an attribute of the class."""
    words = (word.partition("=")[0] for word in sys.argv[1:])
    value = getattr(config, name, None)
    return f"--{name}" in words or value != getattr(type(config), name, value)


def _check_settings(config: Any) -> None:
    """Refuse settings that a Loader cannot follow, and warn about those that have no effect."""
    transforms = _setting(config, "dataset.image_transforms")
    if _setting(transforms, "enable") and (backend := _setting(transforms, "backend")) not in (None, "dataloader"):
        try:
            parts.find(parts.AUGMENTATION)
        except DaliStreamError as error:
            raise DaliStreamError(f"--dataset.image_transforms.backend must be dataloader, got {backend!r}. {error}") from error
    if (backend := _setting(config, "dataset.video_backend")) not in (None, "torchcodec"):
        _warn(
            "--dataset.video_backend=%s has no effect, since the Loader decodes with torchcodec or DALI. %sdecode chooses one "
            "of them",
            *(backend, PREFIX),
        )


def _is_first() -> bool:
    return current_ranks(None, None).rank == 0


def _warn(text: str, *values: object) -> None:
    """Log a warning on rank 0."""
    if _is_first():
        _log.warning(text, *values)


def _resize(meta: Any, size: tuple[int, int]) -> None:
    """Set the size of the Loader's frames in LeRobot's metadata, from which the script makes the policy."""
    for key in meta.camera_keys:
        shape = tuple(meta.features[key]["shape"])
        channels_first = shape[0] in _CHANNELS and shape[-1] not in _CHANNELS
        meta.features[key]["shape"] = (shape[0], *size) if channels_first else (*size, shape[-1])


def frame_ranges(dataset: Any, indices: Sequence[int]) -> dict[int, list[tuple[int, int]]]:
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
