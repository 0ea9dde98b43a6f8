"""Why a loader is slow, and the predicted effect of each remedy.

A part of the dataset is streamed to measure the work of a batch on this machine. The loader's schedule is replayed for the
whole dataset to count the decoded frames. The model of `pipeline.model` turns both into batches per second. A remedy that
changes the work of a frame, such as another codec, is measured on the same part of the dataset.
"""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dali_stream.arguments import budget_text
from dali_stream.dataset import Dataset
from dali_stream.errors import DaliStreamError
from dali_stream.loader import Loader
from dali_stream.memory_limit import fits
from dali_stream.pipeline.decodes import Decodes, decodes_of
from dali_stream.pipeline.model import Work, predicted, work_of
from dali_stream.process import cores
from dali_stream.tools.preparation import prepare

if TYPE_CHECKING:
    from dali_stream.pipeline.config import Config

_BATCHES = 32  # batches of the measured part of the dataset
_PREPARED = 6  # batches of the part that is rewritten to measure a remedy
_LATER = 3  # measured epochs after the first
_SHORT = 2  # GOP of `prepare --for cpu`


@dataclass(frozen=True)
class Speed:
    """Predicted speed of a loader in an epoch.

    Attributes:
        batches_per_s: Batches per second, if training takes no time.
        limit: Resource that works longest: "decode threads", "planner", "copying", "CPU cores" or "network".
        decodes: Number of frames decoded per delivered frame.
    """

    batches_per_s: float
    limit: str
    decodes: float


@dataclass(frozen=True)
class Remedy:
    """Change of a loader, and its predicted effect.

    Attributes:
        name: What to change.
        price: What it costs.
        first, later: Predicted speed in the first epoch, and in each epoch after it.
        gain: Batches per second of the run with it, divided by those without it.
        loader: Arguments of the Loader that change.
        prepare: Arguments of `prepare`, if the dataset is rewritten.
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
        needed: Batches per second that the model needs. None if unknown.
        epochs: Number of epochs of the run.
        remedies: Remedies by falling gain.
    """

    first: Speed
    later: Speed
    needed: float | None
    epochs: int
    remedies: list[Remedy]

    def as_dict(self) -> dict[str, Any]:
        """Return the report for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class _Epoch:
    """Measured batches of a kind of epoch.

    Attributes:
        seconds: Seconds per batch.
        work: Work of a batch.
        decodes: Number of frames decoded per delivered frame.
        fetched: Bytes that are read over the network per sample.
    """

    seconds: float
    work: Work
    decodes: float
    fetched: float


@dataclass(frozen=True)
class _Measured:
    """Measured first epoch of a part of a dataset, and the epochs after it."""

    first: _Epoch
    later: _Epoch

    def speeds(self, decodes: Decodes, change: Callable[[Work], Work] = lambda work: work) -> tuple[Speed, Speed]:
        """Return the predicted speeds of the first epoch and of later ones.

        Args:
            decodes: Frames decoded per delivered frame, for the whole dataset.
            change: Function that returns the work after a remedy.
        """
        return self._speed(decodes.first, change), self._speed(decodes.later, change)

    def _speed(self, decodes: float, change: Callable[[Work], Work]) -> Speed:
        # An epoch that decodes is predicted from one that decodes, in proportion.
        epoch = self.later if decodes == 0 or self.first.decodes == 0 else self.first
        then = change(epoch.work.scaled(decode=decodes / epoch.decodes if epoch.decodes else 1.0))
        return Speed(1 / predicted(epoch.seconds, epoch.work, then), then.limit, decodes)


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

    Streams a part of the dataset for some seconds. To measure `prepare`, a few of its episodes are rewritten into a temporary
    folder. The training step is assumed to run on a GPU, so it leaves the CPU to the loader.

    Args:
        uri: The dataset.
        step_s: Seconds of a training step without loading. None if unknown.
        epochs: Number of epochs of the run, from which the gain of a remedy is computed.
        dataset: Other arguments of the `Dataset`.
        loader: Other arguments of the `Loader`.
        progress: Called with a description of each measurement.

    Raises:
        ValueError: If an argument is invalid, or the dataset has fewer frames than two batches.
        DatasetError, DecodeError, StorageError: If the dataset cannot be read.
    """
    dataset_arguments, options = dict(dataset or {}), dict(loader or {})
    with closing(Dataset(uri, **dataset_arguments)) as whole, Loader(whole, **options) as full:
        study = _Study(uri, dataset_arguments, options, whole, full, progress)
        first, later = study.base.speeds(study.decodes())
        now = _seconds(first, later, epochs)
        remedies = [replace(each, gain=now / _seconds(each.first, each.later, epochs)) for each in study.remedies(later)]
    return WhyReport(first, later, 1 / step_s if step_s else None, epochs, sorted(remedies, key=lambda each: -each.gain))


def _seconds(first: Speed, later: Speed, epochs: int) -> float:
    """Return the average seconds per batch in a run of several epochs."""
    return (1 / first.batches_per_s + (epochs - 1) / later.batches_per_s) / epochs


class _Study:
    """Measurements of a loader with different arguments.

    Args:
        uri: The dataset.
        dataset_arguments: Other arguments of the Dataset.
        options: Arguments of the Loader.
        whole: The dataset.
        full: Loader of the dataset, which is not iterated.
        progress: Called with a description of each measurement.

    Attributes:
        base: Measurement of the loader as it is.
    """

    def __init__(
        self, uri: str | os.PathLike[str], dataset_arguments: dict[str, Any], options: dict[str, Any], whole: Dataset,
        full: Loader, progress: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._uri, self._dataset_arguments, self._options = uri, dataset_arguments, options
        self._whole, self._full = whole, full
        self._progress, self._config = progress, full._config
        self._on_cpu = self._config.on_cpu(full.routes)
        self.base = self._streamed(
            "streaming a part of the dataset", self._dataset_arguments | {"episodes": self._part(_BATCHES)}
        )

    def decodes(self, gop: int | None = None, **changed: Any) -> Decodes:
        """Return the frames decoded per delivered frame of the whole dataset, by replaying the schedule.

        Args:
            gop: Number of frames of each GOP after a rewrite. None for those of the dataset.
            changed: Arguments of the Loader that change.
        """
        if not changed:
            return decodes_of(self._config, self._on_cpu, gop)
        with Loader(self._whole, **self._options | changed) as loader:
            return decodes_of(loader._config, self._on_cpu, gop)

    def remedies(self, later: Speed) -> Iterator[Remedy]:
        """Yield the remedies that apply, without their gains.

        Args:
            later: Predicted speed of later epochs as they are.
        """
        config, base, now, count = self._config, self.base, self.decodes(), cores()
        for budget in (2 * config.memory_budget, 4 * config.memory_budget):
            if later.decodes and fits(budget):
                price = f"{budget_text(budget)} of memory instead of {budget_text(config.memory_budget)}"
                speeds = base.speeds(self.decodes(memory_budget=budget))
                yield Remedy(f'memory_budget="{budget_text(budget)}"', price, *speeds, loader={"memory_budget": budget})
        if count > config.num_threads:
            speeds = base.speeds(now, lambda work: replace(work, threads=count))
            yield Remedy(f"num_threads={count}", "none", *speeds, loader={"num_threads": count})
        speeds = base.speeds(now, lambda work: replace(work, threads=2 * count, cores=2 * count))
        yield Remedy(f"{2 * count} CPU cores instead of {count}", "a larger machine", *speeds)
        if config.gpu is None and config.image_dtype == "float32":
            light = self._changed(image_dtype="uint8").later.work
            speeds = base.speeds(now, lambda work: replace(work, copy=light.copy, deliver=light.deliver))
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
            yield Remedy(f"consumers={fewer}", "mixes fewer episodes at a time", *speeds, loader={"consumers": fewer})
        if config.dataset.videos:
            yield from self._rewritten()

    def _rewritten(self) -> Iterator[Remedy]:
        """Yield remedies that rewrite the dataset, measured on a small part of it."""
        size, part = self._config.image_size, self._part(_PREPARED)
        smaller = size is not None and any(self._whole.picture_size(camera) != size for camera in self._whole.videos)
        kinds: list[dict[str, Any]] = [{"for_": "cpu"}, {"for_": "cpu", "size": size}]
        for options in kinds[: 1 + smaller]:
            name = "prepare --for cpu" + (f" --size {size[0]}x{size[1]}" if size and "size" in options else "")
            self._progress(f"rewriting {len(part)} episodes with {name}")
            read = {key: value for key, value in self._dataset_arguments.items() if key not in ("episodes", "cache_dir")}
            with tempfile.TemporaryDirectory() as folder:
                out = Path(folder) / "part"
                try:
                    report = prepare(self._uri, out, episodes=part, executor=_threads, **read, **options)
                except DaliStreamError as error:  # such as a missing ffmpeg
                    self._progress(f"{name} cannot be measured: {error}")
                    return
                if report.failed:
                    return
                video_bytes = sum(path.stat().st_size for path in out.rglob("*.mp4"))
                measured = self._streamed(f"streaming them after {name}", {}, uri=out)
            per_frame = video_bytes / int(self._whole.lengths[: len(part)].sum())
            price = f"a copy of the dataset, about {per_frame * self._whole.num_frames / 1e6:.3g} MB of video"
            speeds = measured.speeds(self.decodes(_SHORT), functools.partial(self._over_the_network, per_frame))
            yield Remedy(name, price, *speeds, prepare=options)

    def _over_the_network(self, sample_bytes: float, work: Work) -> Work:
        """Return the work of a batch that was measured on the disk if its bytes come over the same network as now.

        Args:
            sample_bytes: Bytes of encoded video per sample.
            work: Measured work.
        """
        now = self.base.first
        network = now.work.network * sample_bytes / now.fetched if now.fetched and work.decode else 0.0
        return replace(work, network=network)

    def _part(self, batches: int) -> list[int]:
        """Return the first episodes that have the frames of a number of batches."""
        frames = self._whole.lengths.cumsum()
        count = int((frames <= batches * self._config.batches.batch_size).sum()) + 1
        return [int(episode) for episode in self._whole.episodes[:count]]

    def _changed(self, **changed: Any) -> _Measured:
        """Return a measurement with other arguments of the Loader."""
        [(name, value)] = changed.items()
        return self._streamed(
            f"streaming with {name}={value!r}", self._dataset_arguments | {"episodes": self._part(_BATCHES)}, changed
        )

    def _streamed(
        self,
        name: str,
        dataset_arguments: dict[str, Any],
        changed: Mapping[str, Any] | None = None,
        uri: str | os.PathLike[str] | None = None,
    ) -> _Measured:
        """Stream several epochs, the first one several times if it has few batches.

        Args:
            name: Description of the measurement.
            dataset_arguments: Arguments of the Dataset.
            changed: Arguments of the Loader that change.
            uri: Another dataset.
        """
        self._progress(name)
        options = self._options | {"last_batch": "drop"} | dict(changed or {})
        first: list[dict[str, float]] = []
        later: list[dict[str, float]] = []
        with closing(Dataset(uri or self._uri, **dataset_arguments)) as part:
            while not first or sum(growth["batches"] for growth in first) < _BATCHES // 2:
                with Loader(part, **options) as loader:
                    if len(loader) < 2:
                        size = self._config.batches.batch_size
                        raise ValueError(f"dataset must have 2 batches of {size} samples or more. Give a smaller batch_size")
                    first.append(_growth(loader, 1))
                    later.append(_growth(loader, _LATER))
                    config = loader._config
        return _Measured(*(_epoch(config, growths) for growths in (first, later)))


def _growth(loader: Loader, epochs: int) -> dict[str, float]:
    """Return how the counters of a loader grow in some epochs, after their first batch, whose time includes starting."""
    seen: dict[str, float] = {}
    for _ in range(epochs):
        for _ in loader:
            seen = seen or loader.stats()
    now = loader.stats()
    return {key: now[key] - seen[key] for key in now if key != "first_batch_s"}


def _epoch(config: Config, growths: list[dict[str, float]]) -> _Epoch:
    """Return the average batch of some measurements."""
    growth = {key: sum(each[key] for each in growths) for key in growths[0]}
    work = work_of(growth, config.num_threads, cores(), config.dataset.data_store.remote)
    seconds = (growth["wait_s"] + growth["training_s"]) / growth["batches"]
    decodes = growth["decoded_frames"] / max(growth["frames"], 1)
    return _Epoch(seconds, replace(work, step=0.0), decodes, growth["fetched_bytes"] / growth["samples"])


def _threads() -> ThreadPoolExecutor:
    """Return the executor of a rewrite. A few files are written sooner by threads than by new processes."""
    return ThreadPoolExecutor(cores())
