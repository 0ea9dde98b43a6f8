"""`why`: why a loader is slow, the predicted effect of each remedy, and what a node needs.

A part of the dataset is streamed to measure the work per batch on this machine. The loader's schedule is replayed for the
whole dataset to count the decoded frames. The model of `tools.speed_model` computes batches per second from both. A remedy that
changes the work per frame, such as another codec, is measured on a part of the dataset.
"""

from __future__ import annotations

import contextlib
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from dali_stream.checks.arguments import positive
from dali_stream.dataset import Dataset
from dali_stream.mixture import Mixture
from dali_stream.run import mixture_file
from dali_stream.system.process import cores
from dali_stream.tools.measuring import Rounds, Speed
from dali_stream.tools.remedies import Proposal, Study
from dali_stream.tools.sizing import MODEL_ERROR, Node, Sizing, prediction_range

_GAIN = 1.005  # smallest gain of a remedy


@dataclass(frozen=True)
class Remedy:
    """Change to a loader, and its predicted effect.

    Attributes:
        name: Description of the change, such as "num_threads=8".
        price: Cost of the change, such as memory or disk space.
        first, later: Predicted speed in the first epoch, and in later ones. See `WhyReport`.
        gain: Batches per second of the run after the change, divided by those before it, the median of several rounds. It is
            greater than 1.
        gain_range: Smallest and largest gain of a round.
        loader: Arguments of the Loader that change.
        prepare: Arguments of `prepare` if the dataset is rewritten. Otherwise empty.
    """

    name: str
    price: str
    first: Speed
    later: Speed
    gain: float
    gain_range: tuple[float, float]
    loader: dict[str, Any] = field(default_factory=dict)
    prepare: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class WhyReport:
    """Speed of a loader on this machine, and remedies.

    Attributes:
        first, later: Predicted speed in the first epoch, and in later ones. If memory holds all frames, each of several ranks
            decodes fewer frames from epoch to epoch. `later` is then the speed in the second epoch.
        needed: Batches per second that the training step can consume. None if the time of a step is unknown.
        epochs: Number of epochs of the run.
        remedies: Remedies in decreasing order of gain.
        busy: Share of the cores that other processes used during the measurements. None if the system does not report it.
        notes: Remedies that were not measured, and the reasons.
        sizing: Needs of a node. None unless `ranks` or `node_cores` was passed. All speeds are then those of one rank of this
            node, and their ranges contain a measured speed with a probability of 80 %.
    """

    first: Speed
    later: Speed
    needed: float | None
    epochs: int
    remedies: list[Remedy]
    busy: float | None = None
    notes: list[str] = field(default_factory=list)
    sizing: Sizing | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the report as a dict for JSON."""
        return asdict(self)


def why(
    uri: str | os.PathLike[str],
    *,
    step_s: float | None = None,
    epochs: int = 10,
    dataset: Mapping[str, Any] | None = None,
    loader: Mapping[str, Any] | None = None,
    ranks: int | None = None,
    node_cores: int | None = None,
    anyway: bool = False,
    progress: Callable[[str], None] = lambda text: None,
) -> WhyReport:
    """Measure a loader, and predict the effect of remedies.

    The function streams a part of the dataset. To measure `prepare`, it rewrites a few episodes into a temporary folder. Each
    rate is measured several times, in turns with the others. The function assumes that the training step runs on a GPU, so
    that the loader has the CPU to itself.

    Args:
        uri: Address of the dataset, or path to a mixture file.
        step_s: Duration of a training step without loading, in seconds. Default: None, for an unknown duration.
        epochs: Number of epochs of the run, which determines the gain of a remedy. Default: 10.
        dataset: Other arguments of the `Dataset`, or of each dataset of a mixture.
        loader: Arguments of the `Loader`.
        ranks: Number of ranks on the node to size, one for each GPU. Default: 1 if `node_cores` is passed; otherwise nothing is
            sized.
        node_cores: Number of CPU cores of the node to size. Default: those of this process.
        anyway: Whether to predict even if other processes use the cores. Default: False.
        progress: Function that is called with a description of each measurement.

    Returns:
        The speed of the loader as it is, and the remedies that raise it.

    Raises:
        ValueError: If an argument is invalid, or the dataset has fewer frames than two batches.
        DatasetError, DecodeError, StorageError: If the dataset cannot be read.
        DaliStreamError: If other processes used more than a fifth of the cores meanwhile, and `anyway` is False.
    """
    if step_s is not None and not step_s > 0:
        raise ValueError(f"step_s must be greater than 0, got {step_s!r}. Leave it out if it is unknown")
    epochs, arguments, options = positive("epochs", epochs), dict(dataset or {}), dict(loader or {})
    node = _node(ranks, node_cores, step_s, options)
    with contextlib.ExitStack() as stack:
        whole = stack.enter_context(closing(_opened(uri, arguments)))
        study = Study(uri, arguments, options, whole, node, stack, progress, anyway)
        decodes, base = study.now, study.base.speeds(study.now)
        remedies = [_remedy(each, base, epochs, node is not None) for each in study.remedies(decodes)]
        sizing = study.sizing() if node else None
    helping = sorted((each for each in remedies if each.gain >= _GAIN), key=lambda each: -each.gain)
    needed = 1 / step_s if step_s else None
    return WhyReport(*_medians(base, node is not None), needed, epochs, helping, study.busy, study.notes, sizing)


def _node(ranks: int | None, node_cores: int | None, step_s: float | None, options: Mapping[str, Any]) -> Node | None:
    """Return the node to size, or None if neither `ranks` nor `node_cores` was passed."""
    if ranks is None and node_cores is None:
        return None
    if step_s is None:
        raise ValueError("To size a node, step_s (--step-ms) must be given: the time of a training step without loading")
    ranks = 1 if ranks is None else positive("ranks", ranks)
    node_cores = cores() if node_cores is None else positive("node_cores", node_cores)
    return Node(ranks, node_cores, step_s, num_threads=options.get("num_threads"))


def _opened(uri: str | os.PathLike[str], arguments: Mapping[str, Any]) -> Dataset | Mixture:
    """Open a dataset, or a mixture file whose datasets all get the arguments that are not None."""
    if not mixture_file.is_mixture_file(uri):
        return Dataset(uri, **arguments)
    return Mixture(**mixture_file.read(uri, {name: value for name, value in arguments.items() if value is not None}))


def _remedy(proposal: Proposal, base: Rounds, epochs: int, sized: bool) -> Remedy:
    """Return a remedy with its gain, which compares measurements of the same round."""
    pairs = zip(base, proposal.rounds, strict=True)
    gains = sorted(_seconds(*now, epochs) / _seconds(*then, epochs) for now, then in pairs)
    first, later = _medians(proposal.rounds, sized)
    gain, ends = statistics.median(gains), (gains[0], gains[-1])
    return Remedy(proposal.name, proposal.price, first, later, gain, ends, proposal.loader, proposal.prepare)


def _medians(rounds: Rounds, sized: bool) -> tuple[Speed, Speed]:
    """Return the median speeds of the first epoch and of later ones, with their ranges.

    Args:
        rounds: Speeds from each round.
        sized: Whether the speeds are predicted for another machine. Their ranges then include the error of the model.
    """
    first, later = (_median(speeds, sized) for speeds in zip(*rounds, strict=True))
    return first, later


def _median(speeds: Sequence[Speed], sized: bool) -> Speed:
    by_rate = sorted(speeds, key=lambda each: each.batches_per_s)
    rates = [each.batches_per_s for each in by_rate]
    return replace(by_rate[len(rates) // 2], range=prediction_range(rates, MODEL_ERROR) if sized else (rates[0], rates[-1]))


def _seconds(first: Speed, later: Speed, epochs: int) -> float:
    """Return the mean seconds per batch in a run of several epochs."""
    return (1 / first.batches_per_s + (epochs - 1) / later.batches_per_s) / epochs
