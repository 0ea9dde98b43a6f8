"""`why`: why a loader is slow, the predicted effect of each remedy, and what a node needs.

A part of the dataset is streamed to measure the work per batch on this machine. The loader's schedule is replayed for the
whole dataset to count the decoded frames. The model of `tools.speed_model` computes batches per second from both. A remedy that
changes the work per frame, such as another codec, is measured on a part of the dataset.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field
from typing import Any

from dali_stream.checks.arguments import known_arguments, positive
from dali_stream.dataset import Dataset
from dali_stream.mixture import Mixture
from dali_stream.run import mixture_file
from dali_stream.system.process import cores
from dali_stream.tools.measuring import Speed, medians
from dali_stream.tools.remedies import Remedy, Study
from dali_stream.tools.sizing import Node, Sizing

_GAIN = 1.005  # smallest gain of a remedy


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


@known_arguments
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
        study = Study(uri, arguments, options, whole, epochs, node, stack, progress, anyway)
        helping = sorted((each for each in study.remedies() if each.gain >= _GAIN), key=lambda each: -each.gain)
        sizing = study.sizing() if node else None
    needed = 1 / step_s if step_s else None
    return WhyReport(*medians(study.speeds, node is not None), needed, epochs, helping, study.busy, study.notes, sizing)


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
