"""Training and validation data: two loaders of different episodes of the same dataset or mixture."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from action_chunks import colour_cameras, loader_arguments

import dali_stream
from training.policy import ACTION, STATE, width

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
    action: int
    """Width of an action."""
    names: list[list[str]]
    """Names of the actions of each dataset. The list is empty for a dataset of a mixture without actions."""
    tasks: int

    @property
    def datasets(self) -> int:
        """Number of datasets of a mixture, or 1 for a single dataset."""
        return len(self.names)

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
    own = loader_arguments(train, fps, arguments.chunk, size) | {
        "seed": arguments.seed,
        "shuffle": arguments.shuffle == "true" or arguments.shuffle,
        "consumers": arguments.consumers,
    }
    common = {
        "batch_size": arguments.batch_size // ranks,
        "device": str(accelerator.device),
        **{name: getattr(arguments, name) for name in ("num_threads", "frame_cache", "frame_cache_bytes", "on_error")},
    }
    plain = common | {"image_size": size, "delta_timestamps": own["delta_timestamps"]}
    # Each consumer reads different episodes, so with 4 consumers, the 4 frames are from different episodes.
    one_rank = {"batch_size": 4, "consumers": 4, "last_batch": "pad", "rank": 0, "world_size": 1}
    return Data(
        train=dali_stream.Loader(train, **(plain if mixed else common) | own),
        val=dali_stream.Loader(val, **plain, shuffle=False, last_batch="partial") if val else None,
        shown=plain | {"dataset": val or train} | one_rank,
        cameras=colour_cameras(train),
        state=width(train, STATE),
        action=width(train, ACTION),
        names=_joint_names(arguments.uri, train) if mixed else [action_names(train.features[ACTION])],
        tasks=max(max(part.tasks, default=0) for part in parts) + 1,
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


def _joint_names(uri: str, mixture: dali_stream.Mixture) -> list[list[str]]:
    """Return the names of the actions of each dataset, which may have its actions under a key of its own."""
    keys, names = dali_stream.Mixture.file_arguments(uri).get("keys", {}), []
    for name, dataset in mixture.datasets.items():
        own = [feature for key, feature in dataset.features.items() if keys.get(name, {}).get(key, key) == ACTION]
        names.append(action_names(own[0]) if own else [])
    return names


def action_names(feature: dict[str, Any]) -> list[str]:
    """Return the name of each action. Datasets have names in a list, in a list or dict of lists, as keys of a dict, or none."""
    width, found = math.prod(feature["shape"]), _texts(feature.get("names"))
    return found if len(found) == width else [f"action {n}" for n in range(width)]


def _texts(names: Any) -> list[str]:
    """Return the texts in nested lists and dicts, and the keys of a dict from names to indices."""
    if isinstance(names, dict):
        names = [key if isinstance(value, int) else value for key, value in names.items()]
    return [text for each in names for text in _texts(each)] if isinstance(names, list) else [names] * isinstance(names, str)
