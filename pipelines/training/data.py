"""Training and validation data: two loaders of different episodes of the same dataset or mixture."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from action_chunks import augmented, colour_cameras

import dali_stream
from training.policy import ACTION, STATE

Set = dali_stream.Dataset | dali_stream.Mixture


@dataclass
class Data:
    """Loaders of a run, and the properties of their batches that a policy requires.

    Batches of `val` are not normalized. Normalize them with `train.normalizer`, in the same way as those of `train`.

    Do not pass the loaders to `accelerator.prepare`. Each rank already gets its own share, on its device.
    """

    train: dali_stream.Loader
    val: dali_stream.Loader | None
    shown: dict[str, Any]
    """Arguments of the loader for charts, which delivers a few frames of the validation data or, without it, of the training
    data."""
    cameras: list[str]
    state: int
    """Width of the state, or 0 without a state."""
    action_names: list[str]
    """Name of each action. For a mixture, these are the names of the dataset with the most actions."""
    joint_names: dict[str, list[str]]
    """Names of the actions of each dataset of a mixture, by the dataset's name. Empty for a single dataset."""
    tasks: int
    datasets: int
    """Number of datasets of a mixture, or 1 for a single dataset."""

    def close(self) -> None:
        """Close both loaders."""
        self.train.close()
        if self.val is not None:
            self.val.close()


def open_data(arguments: Namespace, accelerator: Accelerator) -> Data:
    """Open the data of a run.

    Raises:
        ValueError: If the arguments do not fit the dataset.
        DaliStreamError: If the dataset cannot be read.
    """
    ranks, size = accelerator.num_processes, arguments.image_size
    if arguments.batch_size % ranks:
        raise ValueError(
            f"--batch-size must be a multiple of the {ranks} processes, which share the batch, got {arguments.batch_size}"
        )
    train, val = open_sets(arguments)
    mixed = isinstance(train, dali_stream.Mixture)
    parts = list(train.datasets.values()) if mixed else [train]
    if ACTION not in train.features or not train.cameras:
        raise ValueError(f"{train.uri} must have a camera and {ACTION!r}, got the keys {', '.join(train.features)}")
    fps = min(part.fps for part in parts)  # with the lowest rate, each dataset has a frame at each step of a chunk
    common: dict[str, Any] = {
        "batch_size": arguments.batch_size // ranks,
        "delta_timestamps": {ACTION: [step / fps for step in range(arguments.chunk)]},
        "device": str(accelerator.device),
        "num_threads": arguments.num_threads,
        "frame_cache": arguments.frame_cache,
        "frame_cache_bytes": arguments.frame_cache_bytes,
        "on_error": arguments.on_error,
    }
    plain = common | {"image_size": size}
    own = (plain if mixed else common) | {  # the augmentation also resizes, but requires frames of one size
        "normalize": {key: "mean_std" for key in (ACTION, STATE) if key in train.features},
        "seed": arguments.seed,
        "shuffle": arguments.shuffle == "true" or arguments.shuffle,
        "consumers": arguments.consumers,
        "dali_graph": augmented(colour_cameras(train), size),
    }
    # Each consumer reads different episodes, so with 4 consumers, the 4 frames are from different episodes.
    one_rank = {"batch_size": 4, "consumers": 4, "last_batch": "pad", "rank": 0, "world_size": 1}
    return Data(
        train=dali_stream.Loader(train, **own),
        val=dali_stream.Loader(val, **plain, shuffle=False, last_batch="partial") if val else None,
        shown=plain | {"dataset": val or train} | one_rank,
        cameras=colour_cameras(train),
        state=math.prod(train.features[STATE]["shape"]) if STATE in train.features else 0,
        action_names=_names(train.features[ACTION]),
        joint_names=_joint_names(arguments.uri, train.datasets) if mixed else {},
        tasks=max(max(part.tasks, default=0) for part in parts) + 1,
        datasets=len(parts),
    )


def open_sets(arguments: Namespace) -> tuple[Set, Set | None]:
    """Return the training data and the validation data: two datasets, or two mixtures if the URI is a mixture file.

    The validation data is None if --val-episodes is 0.

    Raises:
        ValueError: If the options do not fit the URI, or a dataset has too few episodes.
        DaliStreamError: If a dataset cannot be read.
    """
    count = arguments.val_episodes
    names = ("revision", "data_files_root", "cache_dir", "clock", "tolerance_s", "give_up_after_s")
    where = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    if Path(arguments.uri).suffix not in (".yaml", ".yml", ".json"):
        return divided({"uri": arguments.uri, **where}, count)
    if where:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in where)
        raise ValueError(f"{options} must not be given with a mixture file. Give them in {arguments.uri}")
    mixed, train, val = dali_stream.Mixture.file_arguments(arguments.uri), {}, {}
    for name, dataset_arguments in mixed.pop("datasets").items():
        try:
            train[name], val[name] = divided(dataset_arguments, count, mixed.get("keys", {}).get(name, {}))
        except (ValueError, dali_stream.DaliStreamError) as error:
            kind = ValueError if isinstance(error, ValueError) else dali_stream.DaliStreamError
            raise kind(f"dataset {name!r}: {error}") from error
    # The weights of a mixture are not used for validation, in which each frame is used once.
    alike = {key: mixed[key] for key in ("keys", "missing", "nearest") if key in mixed}
    return dali_stream.Mixture(train, **mixed), dali_stream.Mixture(val, **alike) if count else None


def divided(
    where: dict[str, Any], val_episodes: int, keys: dict[str, str] | None = None
) -> tuple[dali_stream.Dataset, dali_stream.Dataset | None]:
    """Split a dataset into training and validation data.

    Args:
        where: Arguments of `Dataset`.
        val_episodes: Number of validation episodes.
        keys: {own key: key in the mixture} of the features that a mixture renames. Default: none.

    Returns:
        Training data, and validation data, which is None if `val_episodes` is 0.
    """
    whole = dali_stream.Dataset(**where)
    shares = held_out(whole.episodes.tolist(), val_episodes)
    if not shares[1]:
        return whole, None
    # Both datasets use the same commit, even if a branch of the repository changes in between.
    train, val = (where | {"revision": whole.revision, "episodes": episodes} for episodes in shares)
    # The statistics in the dataset include all episodes, but those for training must not include the validation episodes.
    rows = [key for key in whole.features if (keys or {}).get(key, key) in (ACTION, STATE)]
    train["stats"] = dali_stream.Dataset(**train).compute_stats(rows)
    return dali_stream.Dataset(**train), dali_stream.Dataset(**val)


def held_out(episodes: Sequence[int], count: int) -> tuple[list[int], list[int]]:
    """Return the training episodes, and `count` evenly spaced validation episodes.

    Raises:
        ValueError: If no training episode would remain, or `count` is negative.
    """
    if not 0 <= count < len(episodes):
        raise ValueError(f"--val-episodes must be 0 to {len(episodes) - 1}, to leave one episode to train on, got {count}")
    out = {(2 * number + 1) * len(episodes) // (2 * count) for number in range(count)}
    return [e for n, e in enumerate(episodes) if n not in out], [e for n, e in enumerate(episodes) if n in out]


def _joint_names(uri: str, datasets: dict[str, dali_stream.Dataset]) -> dict[str, list[str]]:
    """Return {dataset: names of its actions}. The list is empty for a dataset without actions.

    A dataset of a mixture may have its actions under a key of its own.
    """
    keys = dali_stream.Mixture.file_arguments(uri).get("keys", {})
    features = {
        name: [feature for key, feature in dataset.features.items() if keys.get(name, {}).get(key, key) == ACTION]
        for name, dataset in datasets.items()
    }
    return {name: _names(own[0]) if own else [] for name, own in features.items()}


def _names(feature: dict[str, Any]) -> list[str]:
    """Return the name of each action. LeRobot's datasets store names as a list, as a list in a dict, or not at all."""
    names = feature.get("names")
    if isinstance(names, dict):
        names = next(iter(names.values()), None)
    width = math.prod(feature["shape"])
    return list(map(str, names)) if isinstance(names, list) and len(names) == width else [f"action {n}" for n in range(width)]
