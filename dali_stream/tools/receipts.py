"""Positions at which a run has seen an episode. They are computed from the order, without reading a frame."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dali_stream.checks.file_content import Fields, check_fields, from_json, whole
from dali_stream.checks.text import listed
from dali_stream.dataset import Dataset
from dali_stream.errors import ResumeError
from dali_stream.lerobot import fingerprint
from dali_stream.mixture import Mixture
from dali_stream.order.batches import Batches
from dali_stream.order.state import STATE_VERSION, OrderArguments
from dali_stream.run import description

Int64 = npt.NDArray[np.int64]
_ENTRY: Fields = {**description.PLACE, "step": (whole(0, 1 << 62),)}


class Place(NamedTuple):
    """Point in a run between two batches: all samples before this position of the epoch are delivered."""

    epoch: int
    position: int


@dataclass(frozen=True)
class Seen:
    """Frames of an episode that one epoch has delivered.

    Attributes:
        epoch: Number of the epoch.
        positions: Positions in the epoch's order at which a frame of the episode was delivered, in increasing order.
        frames: Index of the frame within the episode at each position.
        padded: Positions whose sample was delivered again to complete the last batch (`last_batch="pad"`). A position is listed
            once for each repetition.
        steps: Training step at each position, counted from 1. None if it cannot be determined from a log.
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
        until: (epoch, position) at which the receipt ends.
        selected: Whether the run's selection contains the episode.
        epochs: Samples by epoch. Epochs without a sample of the episode are omitted.
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
        """Return the receipt as a dict for JSON."""
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
    """Return the epochs and positions at which a run has seen an episode.

    They are computed from the order, in a few milliseconds per epoch. If the run was resumed with another global batch size,
    the positions that an epoch drops or pads at its end may differ from the result.

    Args:
        config: Result of `Loader.describe`.
        episode: Index of the episode in its dataset.
        until: State of the Loader at which the receipt ends. Default: the last entry of `log`.
        log: Path of the `metrics.jsonl` of `train.py`. Its lines are JSON objects with `step`, and with the `epoch` and
            `position` after that step. Default: None, which leaves the steps unknown.
        mixed: Name of the episode's dataset in the run's mixture. Default: "", for a run with one dataset.
        dataset: Opened dataset of the run. See `batch_at`.
        progress: Function that is called with (epochs done, number of epochs).

    Returns:
        The samples of the episode, by epoch.

    Raises:
        ValueError: If the run has no such dataset or episode, or if neither a state nor a log says where the run ended.
        ResumeError: If the dataset has changed, or another version of dali_stream wrote `config`.
        DatasetError, StorageError: If the dataset cannot be read. See `Dataset`.
    """
    described = description.checked(config)
    entries = [] if log is None else _entries(Path(log))
    end = _end(until, entries)
    with closing(description.open_described(described["dataset"])) if dataset is None else nullcontext(dataset) as opened:
        state = described["state"]
        if state["version"] != STATE_VERSION:
            raise ResumeError(
                f"version of the state must be {STATE_VERSION}, got {state['version']}. Use the dali_stream of the run"
            )
        # An episode is seen in the order, whatever its frames.
        fingerprint.check(opened.identity, state, allow_other_frames=True)
        place = _place(opened, mixed, episode)
        orders = opened.orders()
    batches = description.batches_of(described, orders.positions)
    arguments = OrderArguments(*(described["loader"][name] for name in OrderArguments._fields))
    # A whole epoch delivers the positions before the end of its last batch.
    delivered = batches.span((batches.count(0) - 1) * batches.stride)[1]
    epochs = []
    for epoch in range(end.epoch + (end.position > 0)) if place is not None else ():
        assert place is not None
        positions, frames = orders.of(epoch, arguments).find(place)
        whole = epoch < end.epoch
        shown = positions < (delivered if whole else end.position)
        # An epoch has been padded only if its last batch was delivered.
        padded = _padded(batches, positions) if whole or not batches.count(end.position) else []
        if shown.any():
            steps = _steps(entries, batches, epoch, positions[shown])
            epochs.append(Seen(epoch, positions[shown].tolist(), frames[shown].tolist(), padded, steps))
        progress(epoch + 1, end.epoch + 1)
    return Receipt(int(episode), mixed, (end.epoch, end.position), place is not None, epochs)


def _end(state: Mapping[str, Any] | None, entries: list[tuple[Place, int]]) -> Place:
    """Return the place at which the run ended."""
    if state is not None:
        return Place(*description.checked_place("until", state))
    if not entries:
        raise ValueError("until must be a saved state of the run, got None. Give it, or a log")
    return entries[-1][0]


def _place(dataset: Dataset | Mixture, name: str, episode: int) -> int | None:
    """Return the position of an episode among the episodes of the order. None if the run does not select it.

    In a mixture, the order counts the selected episodes of one dataset after the other.
    """
    before, part = 0, dataset
    if isinstance(dataset, Mixture):
        if name not in dataset.datasets:
            raise ValueError(f"dataset must be one of {listed(dataset.datasets)}, got {name!r}")
        before, part = dataset.source.parts[list(dataset.datasets).index(name)].first, dataset.datasets[name]
    elif name:
        raise ValueError(f"dataset must be left out, since the run has only one, got {name!r}")
    assert isinstance(part, Dataset)
    if episode not in part.table.index:
        index = part.table.index
        raise ValueError(f"episode must be one of the {len(index)} episodes from {index[0]} to {index[-1]}, got {episode}")
    numbers = np.flatnonzero(part.episodes == episode)
    return before + int(numbers[0]) if len(numbers) else None


def _padded(batches: Batches, positions: Int64) -> list[int]:
    """Return the positions that are delivered again to complete the last batch of an epoch, once per repetition.

    Each rank completes its batch with its own first samples of the epoch. If these are too few, it starts over, so a position
    can be repeated several times.
    """
    world, rest = batches.world_size, batches.frames % batches.stride
    if batches.last_batch != "pad" or not rest:
        return []
    number, rank = np.divmod(positions, world)
    own = -((rank - batches.frames) // world)  # samples of the rank in the epoch, rounded up
    missing = batches.batch_size + (rank - rest) // world  # samples that the rank's last batch lacks
    return np.repeat(positions, np.maximum(-((number - missing) // own), 0)).tolist()


def _entries(log: Path) -> list[tuple[Place, int]]:
    """Return the place and the step of each entry of a log. Raises ValueError if the log cannot be read."""
    try:
        lines = log.read_text(errors="replace").split("\n")[
            :-1
        ]  # a last line without an end was cut off when the run was killed
    except OSError as error:
        raise ValueError(f"log must be a file that can be read, got {str(log)!r}: {error.strerror}") from None
    entries = []
    for number, line in enumerate(lines, 1):
        try:
            entry = from_json(line)
            if not isinstance(entry, dict):
                raise ValueError(f"must be an object, got {type(entry).__name__}")
            if _ENTRY.keys() <= entry.keys():
                check_fields("the entry", place := {key: entry[key] for key in _ENTRY}, _ENTRY, tuple(_ENTRY))
                entries.append((Place(place["epoch"], place["position"]), place["step"]))
        except ValueError as error:
            raise ValueError(f"log must contain JSON lines, got line {number} of {log}: {error}") from None
    return entries


def _steps(entries: list[tuple[Place, int]], batches: Batches, epoch: int, positions: Int64) -> list[int | None]:
    """Return the training step of each position of an epoch.

    The step is that of the log entry before the position, plus the number of batches since then. It is None if the number of
    steps between the two entries around the position differs from the number of batches between them. This happens, for
    example, if a run was resumed with another global batch size.
    """

    def delivered(place: Place) -> int:
        """Return the number of batches before a place at which a batch ends."""
        return place.epoch * batches.count(0) - batches.count(place.position)

    known = [(Place(0, 0), 0), *entries]
    places = [place for place, _ in known]
    ahead = [step - delivered(place) for place, step in known]  # equal if the steps between two entries are batches
    steps: list[int | None] = []
    for position in positions.tolist() if entries else ():
        after = bisect_left(places, Place(epoch, position + 1))
        start = max(places[after - 1], Place(epoch, 0))
        # With last_batch="partial", the last batch may be longer than the stride. Its number is therefore clamped.
        number = min((position - start.position) // batches.stride, batches.count(start.position) - 1)
        agrees = len(set(ahead[after - 1 : after + 1])) == 1
        steps.append(ahead[after - 1] + delivered(start) + number + 1 if agrees else None)
    return steps or [None] * len(positions)
