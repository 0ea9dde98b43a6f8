"""Description of a run in JSON: everything that determines the contents of its batches.

    software    versions of the packages that affect pixels
    dataset     arguments of a `Dataset`, or of a `Mixture` with the arguments of its datasets in `datasets`
    loader      arguments of the `Loader`, with defaults resolved
    dali_graph  name and arguments of the function, because JSON cannot contain the function itself
    routes      decoder of each camera
    state       part of the Loader's state that is the same at each position
    begin       epoch and position at which the Loader began, or None if the position is a multiple of the global batch

The description contains no credentials.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from dali_stream.checks.arguments import MOST_EPOCHS, epoch_number, from_zero
from dali_stream.checks.file_content import (
    DICT,
    FLAG,
    INTEGER,
    LIST,
    NULL,
    NUMBER,
    RANGES,
    TEXT,
    TEXTS,
    Fields,
    Kind,
    array_of,
    check_fields,
    dict_of,
    one_of_texts,
    whole,
)
from dali_stream.dataset import Dataset
from dali_stream.decode.route import DECODE, Route
from dali_stream.errors import ResumeError, counted
from dali_stream.lerobot import fingerprint
from dali_stream.lerobot.features import UNITS
from dali_stream.mixture import Mixture
from dali_stream.order.batches import LAST_BATCH, Batches
from dali_stream.order.order import SHUFFLES
from dali_stream.order.state import MOST_CONSUMERS, MOST_SEGMENTS, STATE_VERSION, OrderArguments
from dali_stream.pipeline.config import Config

VERSION = 2
PARTS = ("software", "dataset", "loader", "dali_graph", "routes", "state", "begin")
_PACKAGES = ("dali-stream", "torch", "torchcodec", "av", "nvidia-dali-cuda120", "nvidia-dali-cuda130")
_log = logging.getLogger("dali_stream")


# ---- to JSON


def describe(
    dataset: Dataset | Mixture,
    config: Config,
    *,
    windows: Mapping[str, Sequence[float]],
    normalize: Mapping[str, str],
    decode: str,
    routes: Mapping[str, Route],
    dali_graph: Callable[..., Any] | None,
    begin: Mapping[str, int] | None,
) -> dict[str, Any]:
    """Return the description of a Loader. See `Loader.describe`.

    Args:
        dataset: Dataset of the Loader.
        config: Configuration of its pipeline.
        windows: Argument `delta_timestamps` of the Loader, with lists of floats.
        normalize: Mode of each normalized key.
        decode: Argument of the Loader.
        routes: {camera: decoder}.
        dali_graph: Argument of the Loader.
        begin: Epoch and position at which the Loader began. None if the position is a multiple of the global batch, so that
            the batches are divided in the same way as from the beginning of the epoch.
    """
    arguments, batches = config.arguments, config.batches
    loader = {
        "batch_size": batches.batch_size,
        "world_size": batches.world_size,
        "delta_timestamps": dict(windows),
        "image_size": config.image_size,
        "image_dtype": config.image_dtype,
        "depth_unit": config.depth_unit,
        "memory_format": config.memory_format,
        "normalize": dict(normalize),
        "shuffle": arguments.shuffle,
        "seed": int(arguments.seed),
        "consumers": int(arguments.consumers),
        "episode_pool_size": int(arguments.episode_pool_size),
        "device": "cpu" if config.gpu is None else "cuda",
        "decode": decode,
        "memory_budget": config.memory_budget,
        "last_batch": batches.last_batch,
        "on_error": "raise" if config.max_substitutes is None else "substitute",
        "max_substitutes": 1.0 if config.max_substitutes is None else config.max_substitutes,
    }
    used = [name for name in _PACKAGES if name != "av" or any(route.decoder == "pyav" for route in routes.values())]
    described = {
        "version": VERSION,
        "software": {name: version for name, version in software().items() if name in used},
        "dataset": described_dataset(dataset),
        "loader": loader,
        "dali_graph": described_graph(dali_graph),
        "routes": {camera: route.decoder for camera, route in routes.items()},
        "state": {"version": STATE_VERSION, "order": config.order_state(), **fingerprint.saved(dataset.identity)},
        "begin": begin,
    }
    parsed: dict[str, Any] = json.loads(json.dumps(described))  # equal to the content of a file
    return parsed


@functools.cache
def software() -> dict[str, str]:
    """Return {package: version} of the installed packages that affect the contents of batches."""
    versions = {}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def described_dataset(dataset: Dataset | Mixture) -> dict[str, Any]:
    """Return the arguments of a dataset or a mixture for JSON. The address of a Hub repository contains its commit."""
    if isinstance(dataset, Mixture):
        parts = dataset.datasets
        keys = {
            name: {own: key for own, key in renamed.items() if own in parts[name].features}
            for name, renamed in dataset.renamed_keys.items()
        }
        return {
            "datasets": {name: described_dataset(part) for name, part in parts.items()},
            **dataset.shares_given,
            "keys": keys,
            "missing": dataset.missing,
            "nearest": dataset.nearest,
        }
    arguments: dict[str, Any] = {"uri": dataset.store.address}
    if dataset.data_store is not dataset.store:
        arguments["data_files_root"] = dataset.data_store.address
    if dataset.num_episodes < len(dataset.table.index):
        arguments["episodes"] = _ranges(dataset.episodes)
    if dataset.frame_ranges is not None and dataset.drops is not None:
        arguments["drop_n_first_frames"], arguments["drop_n_last_frames"] = dataset.drops
    elif dataset.frame_ranges is not None:
        ranges, frames = dataset.frame_ranges, dict[str, list[tuple[int, int]]]()
        for episode, start, stop in zip(ranges.episode.tolist(), ranges.start.tolist(), ranges.stop.tolist(), strict=True):
            frames.setdefault(str(dataset.episodes[episode]), []).append((start, stop))
        arguments["frames"] = frames
    if dataset.own_stats is not None:
        arguments["stats"] = {key: {name: v.tolist() for name, v in own.items()} for key, own in dataset.own_stats.items()}
    missing = {key: feature for key, feature in dataset.info.features.items() if key not in dataset.features}
    if any(feature.is_camera for feature in missing.values()):
        arguments["cameras"] = list(dataset.cameras)
    if without := [key for key, feature in missing.items() if not feature.is_camera]:
        arguments["without"] = without
    if dataset.trust_timestamps:
        arguments["trust_timestamps"] = True
    return arguments | {"clock": dataset.clock, "tolerance_s": dataset.tolerance_s}


def described_graph(dali_graph: Callable[..., Any] | None) -> dict[str, Any] | None:
    """Return the name and the keyword arguments of a function for JSON.

    The arguments are the keyword arguments of `functools.partial`. They are None if JSON cannot contain them, or if some
    arguments are positional.
    """
    if dali_graph is None:
        return None
    function, arguments, positional = dali_graph, dict[str, Any](), False
    while isinstance(function, functools.partial):
        arguments, positional = {**function.keywords, **arguments}, positional or bool(function.args)
        function = function.func
    name = f"{getattr(function, '__module__', '?')}:{getattr(function, '__qualname__', type(function).__qualname__)}"
    try:
        held = None if positional else json.loads(json.dumps(arguments))
    except (TypeError, ValueError):
        held = None
    return {"function": name, "arguments": held}


def _ranges(episodes: npt.NDArray[np.int64]) -> list[list[int]]:
    """Return increasing numbers as ranges [start, stop)."""
    parts = np.split(episodes, np.flatnonzero(np.diff(episodes) != 1) + 1)
    return [[int(part[0]), int(part[-1]) + 1] for part in parts]


# ---- from JSON

_COUNT, _POSITION = whole(1, 1 << 20), whole(0, 1 << 62)
_SOURCE: Fields = {
    "uri": (TEXT,), "data_files_root": (TEXT,), "revision": (TEXT,), "episodes": (RANGES,),
    "frames": (dict_of(RANGES, "ranges of frames by episode"),), "drop_n_first_frames": (_POSITION,),
    "drop_n_last_frames": (_POSITION,), "cameras": (TEXTS,), "without": (TEXTS,), "clock": (TEXT,), "tolerance_s": (NUMBER,),
    "trust_timestamps": (FLAG,),
    "stats": (dict_of(dict_of(LIST, ""), "lists of numbers by feature and statistic"),),
}  # fmt: skip
_MIXTURE: Fields = {
    "datasets": (DICT,), "weights": (DICT,), "repeats": (DICT,), "temperature": (NUMBER,), "epoch_samples": (_POSITION,),
    "keys": (dict_of(dict_of(TEXT, ""), "keys by dataset"),), "missing": (TEXT,), "nearest": (FLAG,),
}  # fmt: skip
LOADER_FIELDS: Fields = {
    "batch_size": (_COUNT,), "world_size": (_COUNT,), "consumers": (whole(1, MOST_CONSUMERS),),
    "episode_pool_size": (whole(1, MOST_SEGMENTS),), "seed": (Kind("an integer", lambda value: type(value) is int),),
    "delta_timestamps": (dict_of(array_of(NUMBER, ""), "lists of seconds by key"),),
    "image_size": (array_of(whole(1, 1 << 15), "[height, width]", 2), NULL), "image_dtype": (TEXT,), "memory_format": (TEXT,),
    "depth_unit": (one_of_texts(*UNITS),),
    "normalize": (dict_of(TEXT, "modes by key"),), "shuffle": (FLAG, one_of_texts(*SHUFFLES)), "device": (TEXT,),
    "decode": (one_of_texts(*DECODE),), "memory_budget": (_POSITION, TEXT), "last_batch": (one_of_texts(*LAST_BATCH),),
    "on_error": (TEXT,), "max_substitutes": (NUMBER,),
}  # fmt: skip
_NEEDED = (
    *("batch_size", "world_size", *OrderArguments._fields, "delta_timestamps", "image_size", "normalize"),
    *("device", "decode", "last_batch"),
)
_DESCRIPTION: Fields = {
    "version": (INTEGER,), "software": (dict_of(TEXT, "versions by package"),), "dataset": (DICT,), "loader": (DICT,),
    "dali_graph": (DICT, NULL), "routes": (dict_of(TEXT, "decoders by camera"),), "state": (DICT,), "begin": (DICT, NULL),
}  # fmt: skip
_STATE: Fields = {"version": (INTEGER,), "dataset": (TEXT, DICT), "order": (DICT,)}
_GRAPH: Fields = {"function": (TEXT,), "arguments": (DICT, NULL)}
_PLACE: Fields = {"epoch": (whole(0, MOST_EPOCHS - 1),), "position": (_POSITION,)}


def checked(config: object) -> dict[str, Any]:
    """Return a description of a run after checking it.

    Raises:
        ValueError: If `config` is not the result of `Loader.describe`.
        ResumeError: If `config` was written by a version of dali_stream whose descriptions have another form.
    """
    if not isinstance(config, Mapping) or "version" not in config or any(part not in config for part in PARTS):
        raise ValueError(f"config must be the result of Loader.describe(), got {str(config)[:80]}")
    if config["version"] != VERSION:
        raise ResumeError(
            f"version of the config must be {VERSION}, got {config['version']}. Use the dali_stream that wrote it"
        )
    described = check_fields("config", {part: config[part] for part in ("version", *PARTS)}, _DESCRIPTION, PARTS)
    parts = described["dataset"].get("datasets")
    if parts is not None:
        check_fields("dataset of the config", described["dataset"], _MIXTURE, ("datasets",))
    for name, part in {"": described["dataset"]}.items() if not isinstance(parts, dict) else parts.items():
        check_fields(f"dataset {name!r} of the config" if name else "dataset of the config", part, _SOURCE, ("uri",))
    check_fields("loader of the config", described["loader"], LOADER_FIELDS, _NEEDED)
    state = {key: value for key, value in described["state"].items() if key in _STATE}
    for part, content, fields in (("dali_graph", None, _GRAPH), ("begin", None, _PLACE), ("state", state, _STATE)):
        if described[part] is not None:
            check_fields(f"{part} of the config", content or described[part], fields, tuple(fields))
    return described


def open_described(described: Mapping[str, Any], where: Mapping[str, Any] | None = None) -> Dataset | Mixture:
    """Open the dataset of a description.

    Args:
        described: Entry `dataset` of a description.
        where: Arguments of `Dataset` that a description does not contain or that have changed, such as `uri`, `cache_dir` and
            `storage_options`. They are passed to each dataset of a mixture. Default: none.

    Raises:
        ValueError: If `where` has a `uri` for a mixture, or an argument is invalid.
        DatasetError, StorageError: See `Dataset`.
    """
    arguments, where = dict(described), {name: value for name, value in (where or {}).items() if value is not None}
    if "datasets" in arguments:
        if "uri" in where:
            raise ValueError(f"uri must not be given for the run's mixture of datasets, got {where['uri']!r}")
        parts = arguments.pop("datasets")
        opened: dict[str, Dataset] = {}
        with contextlib.ExitStack() as stack:
            for name, part in parts.items():
                opened[name] = cast(Dataset, open_described(part, where))
                stack.callback(opened[name].close)
            mixture = Mixture(opened, **arguments)
            stack.pop_all()
        return mixture
    without = arguments.pop("without", [])
    episodes = arguments.pop("episodes", None)
    dataset = Dataset(**(arguments | where))
    try:
        if episodes is not None:
            dataset = dataset.part(_rows(dataset.table.index, episodes))
        return dataset.without(without) if without else dataset
    except BaseException:
        dataset.close()
        raise


def _rows(index: npt.NDArray[np.int64], episodes: Sequence[Sequence[int]]) -> npt.NDArray[np.int64]:
    """Return the rows of the episodes in some ranges [start, stop). Raises ValueError if an episode is unknown."""
    rows = [np.empty(0, np.int64)]
    for start, stop in episodes:  # a range is not expanded, since it may have any length
        first, last = np.searchsorted(index, [start, stop])
        if last - first != stop - start:
            available = f"{counted(len(index), 'episode')} up to {index[-1]}"
            raise ValueError(f"Unknown episode in [{start}, {stop}). Available: {available}")
        rows.append(np.arange(first, last))
    if len(rows) == 1:
        raise ValueError("episodes must have one or more ranges, got none")
    return np.concatenate(rows)


def last_batch(config: Mapping[str, Any], state: Mapping[str, Any], frames: int) -> tuple[int, int]:
    """Return epoch and number of the batch after which a state was saved.

    Args:
        config: Description of the run.
        state: Result of `Loader.state_dict`.
        frames: Number of positions of an epoch.

    Raises:
        ValueError: If no batch had been delivered, or if epoch or position are missing or out of range.
    """
    place = check_fields("state", {key: state[key] for key in _PLACE if key in state}, _PLACE, tuple(_PLACE))
    epoch, position = place["epoch"], place["position"]
    batches = _batches_of(config, frames)
    if not position and epoch:
        return epoch - 1, batches.count(0) - 1
    if not position or config["begin"] == {"epoch": epoch, "position": position}:
        raise ValueError(
            f"state must be one that was saved after a batch, got the beginning at epoch {epoch}, position {position}"
        )
    return epoch, batches.count(0) - batches.count(position) - 1


def _batches_of(config: Mapping[str, Any], frames: int) -> Batches:
    """Return the batches of a run's epoch, which has `frames` positions."""
    loader = config["loader"]
    return Batches(frames, loader["batch_size"], loader["world_size"], loader["last_batch"])


def position_of(config: Mapping[str, Any], epoch: int, batch: int, frames: int) -> int:
    """Return the position at which a batch of the run begins.

    Args:
        config: Description of the run.
        epoch: Number of the epoch.
        batch: Number of the batch in the epoch, counted like `Loader.batch_index`.
        frames: Number of positions of an epoch.

    Raises:
        ValueError: If the epoch has no such batch, or a Loader with another global batch delivered it.
    """
    epoch, batch = epoch_number(epoch), from_zero("batch", batch)
    batches, begin = _batches_of(config, frames), config["begin"]
    first, start = 0, 0
    if begin is not None and epoch == begin["epoch"]:
        start = begin["position"]
        first = batches.count(0) - batches.count(start)
    if not first <= batch < batches.count(0):
        least = f"at least {first}, where the run was resumed with another global batch, and " if first else ""
        raise ValueError(
            f"batch must be {least}below {batches.count(0)}, the number of batches of an epoch, got {batch}. For a count from "
            "the start of training, divmod(count, len(loader)) is (epoch, batch)"
        )
    return start + (batch - first) * batches.stride
