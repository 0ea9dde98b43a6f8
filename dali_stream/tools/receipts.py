"""Positions at which a run has seen an episode, from the order alone: no frame is read."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dali_stream import run_config
from dali_stream.dataset import Dataset
from dali_stream.errors import ResumeError
from dali_stream.mixture import Mixture
from dali_stream.order.batches import Batches
from dali_stream.order.state import STATE_VERSION, OrderArguments

Int64 = npt.NDArray[np.int64]


class Place(NamedTuple):
    """A place in a run: after the batches that end at this position of the epoch."""

    epoch: int
    position: int


@dataclass(frozen=True)
class Seen:
    """The frames of an episode that one epoch has shown.

    Attributes:
        epoch: Number of the epoch.
        positions: Positions in the epoch's order at which a frame of the episode was delivered, rising.
        frames: Frame within the episode at each position.
        padded: Positions of these that also filled up the last batch of the epoch (`last_batch="pad"`), as often as they did.
        steps: Step of the training at each position, from 1. None if no log says it.
    """

    epoch: int
    positions: list[int]
    frames: list[int]
    padded: list[int]
    steps: list[int | None]


@dataclass(frozen=True)
class Receipt:
    """All samples of an episode in a run.

    Attributes:
        episode: Index of the episode.
        dataset: Name of its dataset in the run's mixture. Empty for a run with one dataset.
        until: Epoch and position up to which the run was looked at.
        selected: Whether the run's selection contains the episode.
        epochs: The epochs that have shown the episode.
    """

    episode: int
    dataset: str
    until: tuple[int, int]
    selected: bool
    epochs: list[Seen]

    @property
    def samples(self) -> int:
        """Number of samples of the episode that were delivered."""
        return sum(len(seen.positions) + len(seen.padded) for seen in self.epochs)

    def as_dict(self) -> dict[str, Any]:
        """Return the receipt for JSON."""
        return asdict(self) | {"samples": self.samples}


def receipt(
    config: Mapping[str, Any],
    episode: int,
    *,
    until: Mapping[str, Any] | None = None,
    log: Path | str | None = None,
    mixed: str = "",
    dataset: Dataset | Mixture | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Receipt:
    """Return at which positions of which epochs a run has seen an episode.

    It follows from the order, in a few milliseconds per epoch. If the run was resumed with another global batch, the end of an
    epoch that fills no batch may be another one than in `config`.

    Args:
        config: Result of `Loader.describe`, or the content of a file of `Loader.save`.
        episode: Index of the episode in its dataset.
        until: State of the Loader up to which the run is looked at. Default: that in `config`, or else the last one in `log`.
        log: `metrics.jsonl` of `train.py`: JSON lines with `step`, and `epoch` and `position` after it. Default: no steps.
        mixed: Name of the episode's dataset, if the run has a mixture.
        dataset: Opened dataset of the run, see `batch_at`.
        progress: Function called as (epochs done, number of epochs).

    Raises:
        ValueError: If the run has no such dataset or episode, or neither a state nor a log says how far it came.
        ResumeError: If the dataset has changed, or another version of dali_stream wrote `config`.
        DatasetError, StorageError: See `Dataset`.
    """
    described = run_config.checked(config)
    entries = [] if log is None else _entries(Path(log))
    end = _end(until if until is not None or "config" not in config else config, entries)
    opened = run_config.open_described(described["dataset"]) if dataset is None else dataset
    try:
        state = described["state"]
        if state["version"] != STATE_VERSION:
            raise ResumeError(
                f"version of the state must be {STATE_VERSION}, got {state['version']}. Use the dali_stream of the run"
            )
        if not opened.has_fingerprint(state["dataset"]):
            raise ResumeError(
                f"dataset must be that of the run with the fingerprint {state['dataset']}, got {opened.fingerprint} of "
                f"{opened.uri}. Make the receipt from a copy that was not changed"
            )
        place = _place(opened, mixed, episode)
        orders = opened.orders()
    finally:
        if dataset is None:
            opened.close()
    batches = run_config.batches_of(described, orders.positions)
    loader = described["loader"]
    arguments = OrderArguments(*(loader[name] for name in ("shuffle", "seed", "consumers", "episode_pool_size")))
    epochs = []
    for epoch in range(end.epoch + (end.position > 0) if place is not None else 0):
        assert place is not None
        positions, frames = orders.of(epoch, arguments).find(place)
        whole = epoch < end.epoch
        shown = positions < (_delivered(batches) if whole else end.position)
        padded = _padded(batches, positions) if whole or not batches.count(end.position) else []
        if shown.any():
            positions, frames = positions[shown], frames[shown]
            steps = _steps(entries, batches, epoch, positions)
            epochs.append(Seen(epoch, positions.tolist(), frames.tolist(), padded, steps))
        progress(epoch + 1, end.epoch + 1)
    return Receipt(int(episode), mixed, (end.epoch, end.position), place is not None, epochs)


def _end(state: Mapping[str, Any] | None, entries: list[tuple[Place, int]]) -> Place:
    """Return how far the run came."""
    if state is not None:
        return Place(state["epoch"], state["position"])
    if not entries:
        raise ValueError("until must be a saved state of the run, got None. Give it, a log, or a file of Loader.save as config")
    return entries[-1][0]


def _place(dataset: Dataset | Mixture, name: str, episode: int) -> int | None:
    """Return the number of an episode among those of the order. None if the run's selection does not contain it."""
    before, part = 0, dataset
    if isinstance(dataset, Mixture):
        if name not in dataset.datasets:
            raise ValueError(f"dataset must be one of {', '.join(dataset.datasets)}, got {name!r}")
        names = list(dataset.datasets)
        before = sum(dataset.datasets[other].num_episodes for other in names[: names.index(name)])
        part = dataset.datasets[name]
    elif name:
        raise ValueError(f"dataset must be left out, since the run has only one, got {name!r}")
    assert isinstance(part, Dataset)
    if episode not in part.table.index:
        index = part.table.index
        raise ValueError(f"episode must be one of the {len(index)} episodes from {index[0]} to {index[-1]}, got {episode}")
    number = int(np.searchsorted(part.episodes, episode))
    selected = number < part.num_episodes and part.episodes[number] == episode
    return before + number if selected else None


def _delivered(batches: Batches) -> int:
    """Return the number of positions of a whole epoch that are delivered."""
    return batches.span((batches.count(0) - 1) * batches.stride)[1]


def _padded(batches: Batches, positions: Int64) -> list[int]:
    """Return the positions that also fill up the last batch of an epoch. Each rank takes its first samples of the epoch."""
    world, rest = batches.world_size, batches.frames % batches.stride
    if batches.last_batch != "pad" or not rest:
        return []
    padded = []
    for position in positions.tolist():
        number, rank = divmod(position, world)
        own = -((rank - batches.frames) // world)  # samples of the rank in the epoch
        missing = batches.batch_size + (rank - rest) // world  # of its last batch
        padded += [position] * (-((number - missing) // own) if number < missing else 0)
    return padded


def _entries(log: Path) -> list[tuple[Place, int]]:
    """Return places and steps in a log. Raises ValueError."""
    try:
        lines = log.read_text().split("\n")[:-1]  # without a line that a kill cut off
    except OSError as error:
        raise ValueError(f"log must be a file that can be read, got {str(log)!r}: {error.strerror}") from None
    entries = []
    for number, line in enumerate(lines, 1):
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise ValueError(f"log must contain JSON lines, got line {number} of {log}: {error}") from None
        if {"step", "epoch", "position"} <= entry.keys():
            entries.append((Place(entry["epoch"], entry["position"]), entry["step"]))
    return entries


def _steps(entries: list[tuple[Place, int]], batches: Batches, epoch: int, positions: Int64) -> list[int | None]:
    """Return the step of each position of an epoch: counted in batches from the entry before it.

    None for all positions between two entries that are not as many steps apart as batches, such as after a resume with another
    global batch.
    """
    known = [(Place(0, 0), 0), *entries]
    places = [place for place, _ in known]
    steps: list[int | None] = []
    for position in positions.tolist() if entries else ():
        after = bisect_left(places, Place(epoch, position + 1))
        place, step = known[after - 1]
        agrees = after == len(known) or known[after][1] - step == _apart(batches, place, known[after][0])
        start = place if place.epoch == epoch else Place(epoch, 0)
        number = min((position - start.position) // batches.stride, batches.count(start.position) - 1)
        steps.append(step + _apart(batches, place, start) + number + 1 if agrees else None)
    return steps or [None] * len(positions)


def _apart(batches: Batches, first: Place, second: Place) -> int:
    """Return the number of batches between two places at which a batch ends."""
    epochs = second.epoch - first.epoch
    return batches.count(first.position) + epochs * batches.count(0) - batches.count(second.position)
