"""`why`: why a loader is slow, and the predicted effect of each remedy.

A part of the dataset is streamed to measure the work per batch on this machine. The loader's schedule is replayed for the
whole dataset to count the decoded frames. The model of `speed.model` computes batches per second from both. A remedy that
changes the work per frame, such as another codec, is measured on a part of the dataset.
"""

from __future__ import annotations

import copy
import functools
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from dali_stream.arguments import budget_text
from dali_stream.dataset import Dataset
from dali_stream.errors import DaliStreamError
from dali_stream.loader import Loader
from dali_stream.memory_limit import fits
from dali_stream.process import cores
from dali_stream.speed.decodes import Decodes, decodes_of
from dali_stream.speed.model import Work, predicted, work_of
from dali_stream.tools.preparation import prepare

if TYPE_CHECKING:
    from dali_stream.pipeline.config import Config

_BATCHES = 32  # minimum size of the measured part of the dataset, in batches
_PREPARED = 1024  # minimum size of the part that is rewritten to measure a remedy, in frames
_LATER = 3  # number of measured epochs after the first
_FEW = 0.05  # an epoch that decodes at most this share of the first one is predicted from a later one
_SHORT = 2  # GOP of `prepare --for cpu`


@dataclass(frozen=True)
class Speed:
    """Predicted speed of a loader in an epoch.

    Attributes:
        batches_per_s: Batches per second if the training step takes no time.
        limit: Resource that limits the speed: "decode threads", "planner", "copying", "CPU cores" or "network".
        decodes: Number of frames decoded per delivered frame.
    """

    batches_per_s: float
    limit: str
    decodes: float


@dataclass(frozen=True)
class Remedy:
    """Change to a loader, and its predicted effect.

    Attributes:
        name: Description of the change, such as "num_threads=8".
        price: Cost of the change, such as memory or disk space.
        first, later: Predicted speed in the first epoch, and in each epoch after it.
        gain: Batches per second of the run after the change, divided by those before it.
        loader: Arguments of the Loader that change.
        prepare: Arguments of `prepare` if the dataset is rewritten. Otherwise empty.
    """

    name: str
    price: str
    first: Speed
    later: Speed
    gain: float = 1.0
    loader: dict[str, Any] = field(default_factory=dict)
    prepare: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class WhyReport:
    """Speed of a loader on this machine, and remedies.

    Attributes:
        first, later: Predicted speed in the first epoch, and in each epoch after it.
        needed: Batches per second that the training step can consume. None if the time of a step is unknown.
        epochs: Number of epochs of the run.
        remedies: Remedies in decreasing order of gain.
    """

    first: Speed
    later: Speed
    needed: float | None
    epochs: int
    remedies: list[Remedy]

    def as_dict(self) -> dict[str, Any]:
        """Return the report as a dict for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class _Epoch:
    """Mean of the measured batches of first epochs, or of later ones.

    Attributes:
        seconds: Seconds per batch.
        work: Work per batch.
        decodes: Numbers of frames decoded and stored per delivered frame.
        fetched: Bytes per sample that are read over the network.
    """

    seconds: float
    work: Work
    decodes: Decodes
    fetched: float


@dataclass(frozen=True)
class _Measured:
    """Measurements of the first epoch of a part of a dataset, and of the epochs after it."""

    first: _Epoch
    later: _Epoch

    def speeds(self, decodes: Sequence[Decodes], change: Callable[[Work], Work] = lambda work: work) -> tuple[Speed, Speed]:
        """Return the predicted speeds of the first epoch and of later ones.

        Args:
            decodes: Decodes of the whole dataset in the first epoch and in later ones.
            change: Function that takes the work before a remedy, and returns the work after it. Default: no change.
        """
        first, later = (self._speed(each, change) for each in decodes)
        return first, later

    def _speed(self, decodes: Decodes, change: Callable[[Work], Work]) -> Speed:
        # The measured part may fit in memory although the whole dataset does not. Its later epochs then decode nothing, and
        # an epoch that decodes can only be predicted from the first one, by scaling the decode work.
        epoch = self.later if decodes.decoded <= _FEW * self.first.decodes.decoded else self.first
        then = change(epoch.work.decoding(epoch.decodes, decodes))
        return Speed(1 / predicted(epoch.seconds, epoch.work, then), then.limit, decodes.decoded)


def why(
    uri: str | os.PathLike[str],
    *,
    step_s: float | None = None,
    epochs: int = 10,
    dataset: Mapping[str, Any] | None = None,
    loader: Mapping[str, Any] | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> WhyReport:
    """Measure a loader, and predict the effect of remedies.

    The function streams a part of the dataset. To measure `prepare`, it rewrites a few episodes into a temporary folder. It
    assumes that the training step runs on a GPU, so that the loader has the CPU to itself.

    Args:
        uri: Address of the dataset.
        step_s: Duration of a training step without loading, in seconds. Default: None, for an unknown duration.
        epochs: Number of epochs of the run, which determines the gain of a remedy. Default: 10.
        dataset: Other arguments of the `Dataset`.
        loader: Arguments of the `Loader`.
        progress: Function that is called with a description of each measurement.

    Returns:
        The speed of the loader as it is, and the remedies that apply.

    Raises:
        ValueError: If an argument is invalid, or the dataset has fewer frames than two batches.
        DatasetError, DecodeError, StorageError: If the dataset cannot be read.
    """
    arguments, options = dict(dataset or {}), dict(loader or {})
    with closing(Dataset(uri, **arguments)) as whole, Loader(whole, **options) as full:
        study = _Study(uri, arguments, options, whole, full, progress)
        decodes = study.decodes()
        first, later = study.base.speeds(decodes)
        now = _seconds(first, later, epochs)
        remedies = [replace(each, gain=now / _seconds(each.first, each.later, epochs)) for each in study.remedies(decodes)]
    return WhyReport(first, later, 1 / step_s if step_s else None, epochs, sorted(remedies, key=lambda each: -each.gain))


def _seconds(first: Speed, later: Speed, epochs: int) -> float:
    """Return the mean seconds per batch in a run of several epochs."""
    return (1 / first.batches_per_s + (epochs - 1) / later.batches_per_s) / epochs


class _Study:
    """Measurements of a loader with different arguments.

    Args:
        uri: Address of the dataset.
        arguments: Other arguments of the Dataset.
        options: Arguments of the Loader.
        whole: Opened dataset.
        full: Loader of the whole dataset. It is only inspected, and not iterated.
        progress: Function that is called with a description of each measurement.

    Attributes:
        base: Measurement of the loader without a remedy.
    """

    def __init__(
        self, uri: str | os.PathLike[str], arguments: dict[str, Any], options: dict[str, Any], whole: Dataset, full: Loader,
        progress: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._uri, self._arguments, self._options, self._progress = uri, arguments, options, progress
        self._whole, self._full, self._config = whole, full, full._config
        self._on_cpu = self._config.on_cpu(full.routes)
        self.base = self._changed()

    def decodes(self, gop: int | None = None, **changed: Any) -> tuple[Decodes, Decodes]:
        """Replay the schedule for the whole dataset. Return the decodes of the first epoch, and of later ones.

        Args:
            gop: GOP length after a rewrite, in frames. Default: the GOPs of the dataset.
            changed: Arguments of the Loader that change.
        """
        if not changed:
            return decodes_of(self._config, self._on_cpu, gop)
        with Loader(self._whole, **self._options | changed) as loader:
            return decodes_of(loader._config, self._on_cpu, gop)

    def remedies(self, now: tuple[Decodes, Decodes]) -> Iterator[Remedy]:
        """Yield the remedies that apply. Their gains are computed later.

        Args:
            now: Decodes of the first epoch and of later ones, without a remedy.
        """
        config, base, count = self._config, self.base, cores()
        for budget in (2 * config.memory_budget, 4 * config.memory_budget):
            if now[1].decoded and fits(budget):
                price = f"{budget_text(budget)} of memory instead of {budget_text(config.memory_budget)}"
                speeds = base.speeds(self.decodes(memory_budget=budget))
                yield Remedy(f'memory_budget="{budget_text(budget)}"', price, *speeds, loader={"memory_budget": budget})
        if count > config.num_threads:
            speeds = base.speeds(now, lambda work: work.with_threads(count))
            yield Remedy(f"num_threads={count}", "none", *speeds, loader={"num_threads": count})
        speeds = base.speeds(now, lambda work: replace(work.with_threads(2 * count), cores=2 * count))
        yield Remedy(f"{2 * count} CPU cores instead of {count}", "a larger machine", *speeds)
        if config.gpu is None and config.image_dtype == "float32":
            speeds = self._changed(image_dtype="uint8").speeds(now)
            yield Remedy('image_dtype="uint8"', "conversion in the model", *speeds, loader={"image_dtype": "uint8"})
        if config.gpu is None and torch.cuda.is_available():
            speeds = self._changed(device="cuda").speeds(now)
            yield Remedy('device="cuda"', "time of the GPU's decoders", *speeds, loader={"device": "cuda"})
        if config.dataset.data_store.remote:
            speeds = base.speeds(now, lambda work: work.scaled(network=0.5))
            yield Remedy("twice the bandwidth", "a faster connection, or nearer storage", *speeds)
            if not self._whole.cache_dir:
                first, _ = base.speeds(now)
                _, cached = base.speeds(now, lambda work: work.scaled(network=0.0))
                yield Remedy("cache_dir=DIR", "disk space for the files", first, cached)
        if config.arguments.shuffle is True and (fewer := config.arguments.consumers // 2) >= self._full._ranks.world_size:
            speeds = base.speeds(self.decodes(consumers=fewer))
            yield Remedy(f"consumers={fewer}", "another order of the samples", *speeds, loader={"consumers": fewer})
        if config.dataset.videos:
            yield from self._rewritten()

    def _rewritten(self) -> Iterator[Remedy]:
        """Yield the remedies that rewrite the dataset. They are measured on a small part of it."""
        size, part, decodes = self._config.image_size, self._part(_PREPARED), self.decodes(_SHORT)
        smaller = size is not None and any(self._whole.picture_size(camera) != size for camera in self._whole.videos)
        kinds: list[dict[str, Any]] = [{"for_": "cpu"}, {"for_": "cpu", "size": size}]
        read = {key: value for key, value in self._arguments.items() if key not in ("episodes", "cache_dir")}
        read |= {"episodes": part.episodes.tolist(), "executor": _threads}
        for options in kinds[: 1 + smaller]:
            name = "prepare --for cpu" + (f" --size {size[0]}x{size[1]}" if size and "size" in options else "")
            self._progress(f"rewriting {part.num_episodes} episodes with {name}")
            with tempfile.TemporaryDirectory() as folder:
                try:
                    report = prepare(self._uri, f"{folder}/part", **read, **options)
                except DaliStreamError as error:  # such as a missing ffmpeg
                    self._progress(f"{name} cannot be measured: {error}")
                    return
                if report.failed:
                    return
                measured = self._measure(f"streaming them after {name}", Dataset(f"{folder}/part"))
            per_frame = sum(camera.bytes for camera in report.cameras.values()) / report.frames
            price = f"a copy of the dataset, about {per_frame * self._whole.num_frames / 1e6:.3g} MB of video"
            speeds = measured.speeds(decodes, functools.partial(self._over_the_network, per_frame))
            yield Remedy(name, price, *speeds, prepare=options)

    def _over_the_network(self, sample_bytes: float, work: Work) -> Work:
        """Return the work of a batch if its bytes were read over the network of the original dataset.

        The rewritten part is on the local disk. Its time on the network is that of the original, in proportion to the bytes.

        Args:
            sample_bytes: Bytes of encoded video per sample of the rewritten part.
            work: Work that was measured on the local disk.
        """
        now = self.base.first
        network = now.work.network * sample_bytes / now.fetched if now.fetched and work.decode else 0.0
        return replace(work, network=network)

    def _part(self, frames: int) -> Dataset:
        """Return a copy of the dataset with the first episodes that together have at least `frames` frames, or all episodes."""
        count = int((self._whole.lengths.cumsum() < frames).sum()) + 1
        return copy.copy(self._whole.part(self._whole.rows[:count]))

    def _changed(self, **changed: Any) -> _Measured:
        """Return a measurement of a part of the dataset, with changed arguments of the Loader."""
        name = " with ".join(["streaming a part of the dataset", *(f"{key}={value!r}" for key, value in changed.items())])
        return self._measure(name, self._part(_BATCHES * self._config.batches.batch_size), **changed)

    def _measure(self, name: str, part: Dataset, **changed: Any) -> _Measured:
        """Measure a first epoch and later epochs. If an epoch has few batches, repeat this with new Loaders.

        Args:
            name: Description of the measurement.
            part: Part of the dataset. It is closed at the end.
            changed: Arguments of the Loader that change.
        """
        self._progress(name)
        first: list[dict[str, float]] = []
        later: list[dict[str, float]] = []
        with closing(part):
            while sum(growth["batches"] for growth in first) < _BATCHES:
                with Loader(part, **self._options | {"last_batch": "drop"} | changed) as loader:
                    if len(loader) < 2:
                        size = self._config.batches.batch_size
                        raise ValueError(f"dataset must have 2 batches of {size} samples or more. Give a smaller batch_size")
                    first.append(_growth(loader, 1))
                    later.append(_growth(loader, _LATER))
                    config, graph = loader._config, loader._config.uses_dali(loader._config.on_cpu(loader.routes))
        return _Measured(*(_epoch(config, graph, growths) for growths in (first, later)))


def _growth(loader: Loader, epochs: int) -> dict[str, float]:
    """Return the growth of a loader's counters over some epochs.

    The first batch is excluded, since it includes the startup. However, if most frames were decoded before it was delivered, as
    with few long GOPs, it is included.
    """
    began, seen = loader.stats(), dict[str, float]()
    for _ in range(epochs):
        for _ in loader:
            seen = seen or loader.stats()
    now = loader.stats()
    if seen["decoded_frames"] - began["decoded_frames"] > (now["decoded_frames"] - began["decoded_frames"]) / 2:
        seen = began
    return {key: now[key] - seen[key] for key in now if key != "first_batch_s"}


def _epoch(config: Config, graph: bool, growths: list[dict[str, float]]) -> _Epoch:
    """Return the mean batch of some measurements.

    Args:
        config: Configuration of the loaders.
        graph: Whether the batches pass through a DALI graph.
        growths: Growth of the counters in each measurement.
    """
    growth = {key: sum(each[key] for each in growths) for key in growths[0]}
    work = work_of(growth, config.num_threads, cores(), config.dataset.data_store.remote, graph)
    seconds = (growth["wait_s"] + growth["training_s"]) / growth["batches"]
    decodes = Decodes(*(growth[key] / max(growth["frames"], 1) for key in ("decoded_frames", "stored_frames")))
    return _Epoch(seconds, replace(work, step=0.0), decodes, growth["fetched_bytes"] / growth["samples"])


def _threads() -> ThreadPoolExecutor:
    """Return the executor of a rewrite. For a few files, starting processes would take longer than it saves."""
    return ThreadPoolExecutor(cores())
