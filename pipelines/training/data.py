"""Training and validation data: two loaders of different episodes of the same dataset or mixture."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import numpy as np
from accelerate import Accelerator
from plain_loop import ACTION, STATE, colour_cameras, loader_arguments

import dali_stream
from dali_stream import Dataset, Loader, Mixture
from dali_stream.lerobot.mixture_file import is_mixture_file

# Arguments of the Loader and of the Dataset that the program sets.
OF_LOADER = {"dataset", "batch_size", "seed", "device", "rank", "world_size", "image_size", "image_dtype", "last_batch"}
OF_LOADER |= {"delta_timestamps", "dali_graph", "normalize"}
OF_DATASET = {"uri", "stats"}


def open_data(arguments: Namespace, accelerator: Accelerator) -> tuple[Loader, Loader | None, dict[str, Any]]:
    """Open the data of a run. Each process gets its share, on its device, so `accelerator.prepare` must not get the loaders.

    Returns:
        The Loader of the training data; the Loader of the validation data, or None without it; and the arguments of a Loader
        for charts, whose batches have frames of 4 episodes. Only batches of the training data are normalized.

    Raises:
        ValueError: If the arguments do not fit the dataset.
        TypeError: If --dataset or --loader has a name that is not an argument.
        DaliStreamError: If the dataset cannot be read.
    """
    ranks, given = accelerator.num_processes, arguments.loader
    if taken := [*(given.keys() & OF_LOADER), *(arguments.dataset.keys() & OF_DATASET)]:
        raise ValueError(f"--loader and --dataset must not set what the program itself sets, got {', '.join(sorted(taken))}")
    if arguments.batch_size % ranks:
        raise ValueError(
            f"--batch-size must be a multiple of the {ranks} processes, which share the batch, got {arguments.batch_size}"
        )
    train, val = open_sets(arguments)
    if ACTION not in train.features or not colour_cameras(train):
        raise ValueError(f"{train.uri} must have a colour camera and {ACTION!r}, got the keys {', '.join(train.features)}")
    own = loader_arguments(train, arguments.chunk, arguments.image_size)
    common = {"device": str(accelerator.device), "batch_size": arguments.batch_size // ranks}
    loader = Loader(train, seed=arguments.seed, **common, **own, **given)
    plain = common | {"image_size": arguments.image_size, "delta_timestamps": own["delta_timestamps"]}
    plain |= {name: value for name, value in given.items() if name not in ("shuffle", "consumers", "gpu_cache")}
    four = {"batch_size": 4, "consumers": 4, "last_batch": "pad", "rank": 0, "world_size": 1}
    validation = Loader(val, shuffle=False, last_batch="partial", **plain) if val else None
    return loader, validation, {"dataset": val or train} | plain | four


def open_sets(arguments: Namespace) -> tuple[Dataset | Mixture, Dataset | Mixture | None]:
    """Return the training data, and the validation data if --val-episodes is not 0. See `open_data` for the errors."""
    if not is_mixture_file(arguments.uri):
        return divided({"uri": arguments.uri, **arguments.dataset}, arguments.val_episodes, {})
    if arguments.dataset:
        raise ValueError(f"--dataset must not be given with a mixture file. Give the arguments in {arguments.uri}")
    mixed, train, val = Mixture.file_arguments(arguments.uri), {}, {}
    for name, where in mixed.pop("datasets").items():
        try:
            train[name], val[name] = divided(where, arguments.val_episodes, mixed.get("keys", {}).get(name, {}))
        except (ValueError, dali_stream.DaliStreamError) as error:
            raise ValueError(f"dataset {name!r}: {error}") from error
    # The weights of a mixture are not used for validation, in which each frame is used once.
    alike = {key: mixed[key] for key in ("keys", "missing", "nearest") if key in mixed}
    return Mixture(train, **mixed), Mixture(val, **alike) if arguments.val_episodes else None


def divided(where: dict[str, Any], count: int, keys: dict[str, str]) -> tuple[Dataset, Dataset | None]:
    """Split a dataset into training data and `count` evenly spread episodes of validation data, which is None without any.

    Args:
        where: Arguments of `Dataset`.
        count: Number of validation episodes.
        keys: {own key: key in the mixture} of the features that a mixture renames.
    """
    whole = Dataset(**where)
    if not 0 <= count < whole.num_episodes:
        raise ValueError(f"--val-episodes must be 0 to {whole.num_episodes - 1}, to leave one episode to train on, got {count}")
    if count == 0:
        return whole, None
    held_out = [(2 * number + 1) * whole.num_episodes // (2 * count) for number in range(count)]
    train, val = whole.part(np.delete(whole.rows, held_out)), whole.part(whole.rows[held_out])
    # The statistics in the dataset include all episodes, but those for training must not include the validation episodes.
    stats = train.compute_stats([key for key in whole.features if keys.get(key, key) in (ACTION, STATE)])
    return train.with_stats(stats), val
