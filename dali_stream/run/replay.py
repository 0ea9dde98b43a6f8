"""Reproduction of a batch of a run from the run's description."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from dali_stream.checks.arguments import byte_count, known_arguments
from dali_stream.dataset import Dataset
from dali_stream.errors import ResumeError
from dali_stream.loader import Loader
from dali_stream.mixture import Mixture
from dali_stream.pipeline.aliases import Batch, Graph
from dali_stream.run import description
from dali_stream.system.memory_limit import memory_limit

_log = logging.getLogger("dali_stream")


@known_arguments
def batch_at(
    config: Mapping[str, Any],
    epoch: int,
    batch: int,
    dali_graph: Graph | None = None,
    *,
    rank: int = 0,
    dataset: Dataset | Mixture | None = None,
) -> Batch:
    """Return a batch that the Loader of a run delivered, without making the batches before it.

    The batch has the same samples. On the same kind of device and with the same software, it is equal bit by bit, with the same
    frames, augmentation and normalization. A warning lists differences in software, device and decoders.

    Args:
        config: Result of `Loader.describe`.
        epoch: Epoch of the batch, from 0.
        batch: Number of the batch in its epoch, from 0: `Loader.batch_index` before the batch was delivered.
        dali_graph: Argument `dali_graph` of the run. JSON cannot contain a function, so it must be passed again. Default: None,
            if the run had none.
        rank: Rank whose share of the global batch is returned. Default: 0.
        dataset: Opened dataset of the run, which stays open. Pass it if the data has moved, or if it needs credentials, which
            `config` does not contain. Default: the dataset that `config` describes.

    Returns:
        {key: tensor, or list of str for text}, see `Loader`.

    Raises:
        ValueError: If an epoch has no such batch, `dali_graph` is missing or has other arguments, or `config` is invalid.
        ResumeError: If the dataset has changed, or `config` was written by a version of dali_stream with another order.
        DaliStreamError: See `Loader`.
    """
    described = description.checked(config)
    _check_graph(described["dali_graph"], description.described_graph(dali_graph))
    opened = description.open_described(described["dataset"]) if dataset is None else dataset
    try:
        with _loader(opened, described, dali_graph, rank) as loader:
            position = description.position_of(described, epoch, batch, opened.orders().positions)
            try:
                loader.load_state_dict(described["state"] | {"epoch": epoch, "position": position})
            except ResumeError as error:
                raise ResumeError(f"the config does not fit: {error}") from error
            _warn_of_differences(described, loader)
            return next(iter(loader))
    finally:
        if dataset is None:
            opened.close()


def _loader(dataset: Dataset | Mixture, config: Mapping[str, Any], dali_graph: Graph | None, rank: int) -> Loader:
    """Return a Loader with the arguments of the run. It makes one batch at a time."""
    arguments = dict(config["loader"])
    if arguments["device"] == "cuda":
        arguments["device"] = "auto"
    if "memory_budget" in arguments:  # the run may have had a larger machine, and the budget changes no batch
        arguments["memory_budget"] = min(byte_count(arguments["memory_budget"]), memory_limit().size)
    size = arguments["image_size"]
    arguments["image_size"] = None if size is None else tuple(size)
    return Loader(dataset, **arguments, dali_graph=dali_graph, rank=rank, prefetch=1, audit=0)


def _check_graph(recorded: Mapping[str, Any] | None, passed: Mapping[str, Any] | None) -> None:
    if recorded is None and passed is not None:
        raise ValueError(f"dali_graph must be None, since the run had none, got {passed['function']}")
    if recorded is None:
        return
    arguments = recorded["arguments"]
    function = recorded["function"] + (f" with the arguments {arguments}" if arguments else "")
    if passed is None:
        raise ValueError(
            f"dali_graph must be the function of the run, {function}, got None. Pass it, because JSON does not hold functions"
        )
    if None not in (arguments, passed["arguments"]) and arguments != passed["arguments"]:
        raise ValueError(f"dali_graph must be the function of the run, {function}, got the arguments {passed['arguments']}")


def _warn_of_differences(config: Mapping[str, Any], loader: Loader) -> None:
    """Log the differences from the run that may change pixels: software, device and decoders."""
    here = loader.describe()
    differences = [
        f"{name} was {before} and is {now}"
        for name, before, now in (
            *((package, config["software"].get(package), version) for package, version in here["software"].items()),
            ("device", config["loader"]["device"], here["loader"]["device"]),
            *((f"the decoder of {key}", config["routes"].get(key), decoder) for key, decoder in here["routes"].items()),
        )
        if before != now
    ]
    if differences:
        _log.warning("Pixels may differ from those of the run: %s", "; ".join(differences))
