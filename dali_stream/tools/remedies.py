"""`why`: why a loader is slow, and the predicted effect of each remedy.

A part of the dataset is streamed to measure the work per batch on this machine. The loader's schedule is replayed for the
whole dataset to count the decoded frames. The model of `tools.speed_model` computes batches per second from both. A remedy that
changes the work per frame, such as another codec, is measured on a part of the dataset.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dali_stream.checks.arguments import budget_text
from dali_stream.dataset import Dataset
from dali_stream.errors import DaliStreamError, MemoryBudgetError
from dali_stream.loader import Loader
from dali_stream.mixture import Mixture
from dali_stream.run.mixture_file import is_mixture_file
from dali_stream.system.memory_limit import fits
from dali_stream.system.process import cores
from dali_stream.tools.decodes import Decodes, decodes_of
from dali_stream.tools.preparation import prepare
from dali_stream.tools.speed_model import Work, predicted, work_of

if TYPE_CHECKING:
    from dali_stream.pipeline.config import Config

_BATCHES = 32  # minimum size of the measured part of the dataset, in batches
_PREPARED = 1024  # minimum size of the part that is rewritten to measure a remedy, in frames
_ROUNDS = 3  # number of times that each rate is measured, in turns with the others
_BUSY = 0.2  # the rates say little if other processes use more than this share of the cores
_GAIN = 1.005  # smallest gain of a remedy
_FEW = 0.05  # an epoch that decodes at most this share of the first one is predicted from a later one
_SHORT = 2  # GOP of `prepare --for cpu`


@dataclass(frozen=True)
class Speed:
    """Predicted speed of a loader in an epoch.

    Attributes:
        batches_per_s: Batches per second if the training step takes no time, the median of several rounds of measurements.
        limit: Resource that limits the speed: "decode threads", "planner", "copying", "CPU cores" or "network".
        decodes: Number of frames decoded per delivered frame.
        range: Batches per second in the slowest and in the fastest round.
    """

    batches_per_s: float
    limit: str
    decodes: float
    range: tuple[float, float]


@dataclass(frozen=True)
class Remedy:
    """Change to a loader, and its predicted effect.

    Attributes:
        name: Description of the change, such as "num_threads=8".
        price: Cost of the change, such as memory or disk space.
        first, later: Predicted speed in the first epoch, and in each epoch after it.
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
        first, later: Predicted speed in the first epoch, and in each epoch after it.
        needed: Batches per second that the training step can consume. None if the time of a step is unknown.
        epochs: Number of epochs of the run.
        remedies: Remedies in decreasing order of gain.
        busy: Share of the cores that other processes used during the measurements. None if the system does not report it.
        notes: Remedies that were not measured, and the reasons.
    """

    first: Speed
    later: Speed
    needed: float | None
    epochs: int
    remedies: list[Remedy]
    busy: float | None = None
    notes: list[str] = field(default_factory=list)

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
    """Measurements of the first epoch of a part of a dataset, and of the epoch after it, in one round."""

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
        rate = 1 / predicted(epoch.seconds, epoch.work, then)
        return Speed(rate, then.limit, decodes.decoded, (rate, rate))


Rounds = list[tuple[Speed, Speed]]
"""Predicted speeds of the first epoch and of later ones, from each round of measurements."""


@dataclass
class _Measurement:
    """Loader to measure in each round.

    Attributes:
        name: Description for the progress.
        part: Dataset to stream. It is closed at the end.
        changed: Arguments of the Loader that change.
        rounds: Results.
    """

    name: str
    part: Dataset | Mixture
    changed: dict[str, Any] = field(default_factory=dict)
    rounds: list[_Measured] = field(default_factory=list)

    def speeds(self, decodes: Sequence[Decodes], change: Callable[[Work], Work] = lambda work: work) -> Rounds:
        """Return the predicted speeds from each round. See `_Measured.speeds`."""
        return [each.speeds(decodes, change) for each in self.rounds]


@dataclass(frozen=True)
class _Proposal:
    """Remedy before its gain is known. See `Remedy`."""

    name: str
    price: str
    rounds: Rounds
    loader: dict[str, Any] = field(default_factory=dict)
    prepare: dict[str, Any] = field(default_factory=dict)


def why(
    uri: str | os.PathLike[str],
    *,
    step_s: float | None = None,
    epochs: int = 10,
    dataset: Mapping[str, Any] | None = None,
    loader: Mapping[str, Any] | None = None,
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
        anyway: Whether to predict even if other processes use the cores. Default: False.
        progress: Function that is called with a description of each measurement.

    Returns:
        The speed of the loader as it is, and the remedies that raise it.

    Raises:
        ValueError: If an argument is invalid, or the dataset has fewer frames than two batches.
        DatasetError, DecodeError, StorageError: If the dataset cannot be read.
        DaliStreamError: If other processes used more than a fifth of the cores meanwhile, and `anyway` is False.
    """
    arguments, options = dict(dataset or {}), dict(loader or {})
    with contextlib.ExitStack() as stack:
        whole = stack.enter_context(closing(_opened(uri, arguments)))
        full = stack.enter_context(Loader(whole, **options))
        study = _Study(uri, arguments, options, whole, full, stack, progress, anyway)
        decodes = study.now
        base = study.base.speeds(decodes)
        remedies = [_remedy(each, base, epochs) for each in study.remedies(decodes)]
    helping = sorted((each for each in remedies if each.gain >= _GAIN), key=lambda each: -each.gain)
    needed = 1 / step_s if step_s else None
    return WhyReport(*_medians(base), needed, epochs, helping, study.busy(), study.notes)


def _opened(uri: str | os.PathLike[str], arguments: Mapping[str, Any]) -> Dataset | Mixture:
    """Open a dataset, or a mixture file whose datasets all get the arguments that are not None."""
    if not is_mixture_file(uri):
        return Dataset(uri, **arguments)
    mixture, given = Mixture.file_arguments(uri), {name: value for name, value in arguments.items() if value is not None}
    if "data_files_root" in given:
        raise ValueError("data_files_root belongs to one dataset. Write it into the mixture file")
    return Mixture(**mixture | {"datasets": {name: each | given for name, each in mixture["datasets"].items()}})


def _remedy(proposal: _Proposal, base: Rounds, epochs: int) -> Remedy:
    """Return a remedy with its gain, which compares measurements of the same round."""
    pairs = zip(base, proposal.rounds, strict=True)
    gains = sorted(_seconds(*now, epochs) / _seconds(*then, epochs) for now, then in pairs)
    first, later = _medians(proposal.rounds)
    gain, ends = statistics.median(gains), (gains[0], gains[-1])
    return Remedy(proposal.name, proposal.price, first, later, gain, ends, proposal.loader, proposal.prepare)


def _medians(rounds: Rounds) -> tuple[Speed, Speed]:
    """Return the median speeds of the first epoch and of later ones, with their ranges."""
    first, later = (sorted(speeds, key=lambda each: each.batches_per_s) for speeds in zip(*rounds, strict=True))
    first, later = (
        replace(each[len(each) // 2], range=(each[0].batches_per_s, each[-1].batches_per_s)) for each in (first, later)
    )
    return first, later


def _seconds(first: Speed, later: Speed, epochs: int) -> float:
    """Return the mean seconds per batch in a run of several epochs."""
    return (1 / first.batches_per_s + (epochs - 1) / later.batches_per_s) / epochs


def _cpu_seconds() -> tuple[float, float] | None:
    """Return the CPU seconds that the cores of this process were busy, and those that this process and its children used.

    None on systems without `/proc/stat`.
    """
    try:
        lines = [line.split() for line in Path("/proc/stat").read_text().splitlines() if re.match(r"cpu\d", line)]
        cores = {f"cpu{number}" for number in os.sched_getaffinity(0)}
        # user, nice, system, idle, iowait, irq, softirq, steal; guests are contained in user and nice
        ticks = sum(sum(map(int, line[1:4] + line[6:9])) for line in lines if line[0] in cores)
        return ticks / os.sysconf("SC_CLK_TCK"), sum(os.times()[:4])
    except (OSError, AttributeError, ValueError):
        return None


class _Study:
    """Measurements of a loader with different arguments.

    Args:
        uri: Address of the dataset.
        arguments: Other arguments of the Dataset.
        options: Arguments of the Loader.
        whole: Opened dataset.
        full: Loader of the whole dataset. It is only inspected, and not iterated.
        stack: Stack that removes rewritten datasets at the end.
        progress: Function that is called with a description of each measurement.
        anyway: See `why`.

    Attributes:
        base: Measurement of the loader without a remedy.
        now: Decodes of the first epoch and of later ones, without a remedy.
        notes: See `WhyReport`.
    """

    def __init__(
        self, uri: str | os.PathLike[str], arguments: dict[str, Any], options: dict[str, Any], whole: Dataset | Mixture,
        full: Loader, stack: contextlib.ExitStack, progress: Callable[[str], None], anyway: bool,
    ) -> None:  # fmt: skip
        self._uri, self._arguments, self._options, self._progress = uri, arguments, options, progress
        self._whole, self._full, self._config, self._stack, self._anyway = whole, full, full._config, stack, anyway
        self._cached = self._config.cached(full.routes)
        self._busy: list[tuple[float, float]] = []  # seconds of other processes, and of all cores, in each measurement
        self.notes: list[str] = []
        config = self._config
        self.base = self._changed()
        self._measure(self.base)
        self._check_busy()  # before anything is rewritten
        self._as_bytes = self._changed(image_dtype="uint8") if config.gpu is None and config.image_dtype == "float32" else None
        self._on_gpu = self._changed(device="cuda") if config.gpu is None and torch.cuda.is_available() else None
        self.now = self.decodes()
        self._stored = self._with_frames_on_disk() if self.now[1].decoded and config.frame_folder is None else None
        self._rewritten = self._rewrite() if config.source.videos else []
        rewritten = (each for each, _, _ in self._rewritten)
        others = [each for each in (self._as_bytes, self._on_gpu, self._stored, *rewritten) if each]
        for number in range(_ROUNDS):
            # Every other round is in reverse order, so that a load that grows or shrinks slows down all of them.
            in_turns = [self.base, *others] if number else others
            for each in in_turns if number % 2 == 0 else in_turns[::-1]:
                self._measure(each)
        self._check_busy()

    def busy(self) -> float | None:
        """Return the share of the cores that other processes used during the measurements. None if it is unknown."""
        others, everything = map(sum, zip(*self._busy, strict=True)) if self._busy else (0.0, 0.0)
        return others / everything if everything else None

    def _check_busy(self) -> None:
        """Raise DaliStreamError if other processes made the measurements meaningless."""
        share = self.busy()
        if share is not None and share > _BUSY and not self._anyway:
            rates = sorted(1 / each.first.seconds for each in self.base.rounds)
            raise DaliStreamError(
                f"other processes used {share:.0%} of the cores of this process while the loader was measured, so its "
                f"{rates[0]:.3g} to {rates[-1]:.3g} batches/s in the first epoch say little about it. Run this while nothing "
                "else uses the machine, or predict anyway (--anyway, or anyway=True)"
            )

    def decodes(self, gop: int | None = None, **changed: Any) -> tuple[Decodes, Decodes]:
        """Replay the schedule for the whole dataset. Return the decodes of the first epoch, and of later ones.

        Args:
            gop: GOP length after a rewrite, in frames. Default: the GOPs of the dataset.
            changed: Arguments of the Loader that change.
        """
        if not changed:
            return decodes_of(self._config, self._cached, gop)
        with Loader(self._whole, **self._options | changed) as loader:
            return decodes_of(loader._config, self._cached, gop)

    def remedies(self, now: tuple[Decodes, Decodes]) -> Iterator[_Proposal]:
        """Yield the remedies that apply. Their gains are computed later.

        Args:
            now: Decodes of the first epoch and of later ones, without a remedy.
        """
        config, base, count = self._config, self.base, cores()
        for budget in (2 * config.memory_budget, 4 * config.memory_budget):
            if now[1].decoded and fits(budget):
                price = f"{budget_text(budget)} of memory instead of {budget_text(config.memory_budget)}"
                rounds = base.speeds(self.decodes(memory_budget=budget))
                yield _Proposal(f'memory_budget="{budget_text(budget)}"', price, rounds, {"memory_budget": budget})
        if self._stored:
            size = sum(config.frame_bytes(camera) for camera in self._cached) * self._whole.num_frames
            price = f"{size / 1e9:.3g} GB on a local disk, for all ranks of the machine"
            # The first epoch decodes each frame once, whatever the memory holds, as in the measured part.
            decodes = self._stored.rounds[0].first.decodes, Decodes(0.0, 0.0)
            yield _Proposal("frame_cache=DIR", price, self._stored.speeds(decodes), {"frame_cache": "DIR"})
        if count > config.num_threads:
            rounds = base.speeds(now, lambda work: work.with_threads(count))
            yield _Proposal(f"num_threads={count}", "none", rounds, {"num_threads": count})
        rounds = base.speeds(now, lambda work: replace(work.with_threads(2 * count), cores=2 * count))
        yield _Proposal(f"{2 * count} CPU cores instead of {count}", "a larger machine", rounds)
        if self._as_bytes:
            rounds = self._as_bytes.speeds(now)
            yield _Proposal('image_dtype="uint8"', "conversion in the model", rounds, {"image_dtype": "uint8"})
        if self._on_gpu:
            yield _Proposal('device="cuda"', "time of the GPU's decoders", self._on_gpu.speeds(now), {"device": "cuda"})
        if config.source.data_store.remote:
            rounds = base.speeds(now, lambda work: work.scaled(network=0.5))
            yield _Proposal("twice the bandwidth", "a faster connection, or nearer storage", rounds)
            if config.source.cache_dir is None:
                cached = base.speeds(now, lambda work: work.scaled(network=0.0))
                rounds = [(first, later) for (first, _), (_, later) in zip(base.speeds(now), cached, strict=True)]
                yield _Proposal("cache_dir=DIR", "disk space for the files", rounds)
        if config.arguments.shuffle is True and (fewer := config.arguments.consumers // 2) >= self._full._ranks.world_size:
            rounds = base.speeds(self.decodes(consumers=fewer))
            yield _Proposal(f"consumers={fewer}", "another order of the samples", rounds, {"consumers": fewer})
        if self._rewritten:
            then = self.decodes(_SHORT)
            for measurement, options, sample_bytes in self._rewritten:
                price = f"a copy of the dataset, about {sample_bytes * self._whole.num_frames / 1e6:.3g} MB of video"
                rounds = self._after_rewrite(measurement, now, then, sample_bytes)
                yield _Proposal(_command(options), price, rounds, prepare=options)

    def _with_frames_on_disk(self) -> _Measurement | None:
        """Return a measurement of a part with a frame cache on disk, or None if memory_budget must hold the whole part.

        As in the whole dataset, memory holds a share of the frames, and the others are read from the disk.
        """
        folder = self._stack.enter_context(tempfile.TemporaryDirectory())
        measurement = self._changed(frame_cache=folder)
        budget = self._config.memory_budget * measurement.part.num_frames // self._whole.num_frames
        while budget < self._config.memory_budget:
            measurement.changed["memory_budget"] = budget
            try:
                with Loader(measurement.part, **self._options | measurement.changed):
                    measurement.name = "streaming a part of the dataset with frame_cache"
                    return measurement
            except MemoryBudgetError:  # it does not hold a batch
                budget *= 2
        return None

    def _after_rewrite(
        self, measurement: _Measurement, now: Sequence[Decodes], then: Sequence[Decodes], sample_bytes: float
    ) -> Rounds:
        """Return the speeds after a rewrite.

        Epochs that decode next to nothing, before and after it, copy the same frames from memory, and so are equally fast.

        Args:
            measurement: Measurement of the rewritten part.
            now, then: Decodes of the first epoch and of later ones, before and after the rewrite.
            sample_bytes: Bytes of encoded video per sample of the rewritten part.
        """
        rounds = measurement.speeds(then, functools.partial(self._over_the_network, sample_bytes))
        if any(later.decoded > _FEW * first.decoded for first, later in (now, then)):
            return rounds
        return [(first, later) for (first, _), (_, later) in zip(rounds, self.base.speeds(now), strict=True)]

    def _rewrite(self) -> list[tuple[_Measurement, dict[str, Any], float]]:
        """Rewrite a small part of the dataset in each way that may help.

        Returns:
            (measurement, options of `prepare`, bytes of video per sample) of each way.
        """
        if isinstance(self._whole, Mixture):
            self.notes.append("prepare is not measured for a mixture. Run `dali-stream why URI` on each of its datasets")
            return []
        size, rewritten = self._config.image_size, []
        part = self._part(_PREPARED)
        assert isinstance(part, Dataset)
        smaller = size is not None and any(self._whole.features[camera].frame_size != size for camera in self._whole.videos)
        kinds: list[dict[str, Any]] = [{"for_": "cpu"}, {"for_": "cpu", "size": size}]
        read = {key: value for key, value in self._arguments.items() if key not in ("episodes", "cache_dir")}
        read |= {"episodes": part.episodes.tolist(), "executor": _threads}
        for options in kinds[: 1 + smaller]:
            name = _command(options)
            self._progress(f"rewriting {part.num_episodes} episodes with {name}")
            folder = self._stack.enter_context(tempfile.TemporaryDirectory())
            try:
                report = prepare(self._uri, f"{folder}/part", **read, **options)
            except DaliStreamError as error:  # such as a missing ffmpeg
                self.notes.append(f"{name} cannot be measured: {error}")
                break
            if report.failed:
                self.notes.append(f"{name} cannot be measured, since it failed for {len(report.failed)} files of the part")
                break
            opened = self._stack.enter_context(closing(Dataset(f"{folder}/part")))
            sample_bytes = sum(camera.bytes for camera in report.cameras.values()) / report.frames
            rewritten.append((_Measurement(f"streaming the part after {name}", opened), options, sample_bytes))
        return rewritten

    def _over_the_network(self, sample_bytes: float, work: Work) -> Work:
        """Return the work of a batch if its bytes were read over the network of the original dataset.

        The rewritten part is on the local disk. Its time on the network is that of the original, in proportion to the bytes.

        Args:
            sample_bytes: Bytes of encoded video per sample of the rewritten part.
            work: Work that was measured on the local disk.
        """
        now = self.base.rounds[0].first
        network = now.work.network * sample_bytes / now.fetched if now.fetched and work.decode else 0.0
        return replace(work, network=network)

    def _part(self, frames: int) -> Dataset | Mixture:
        """Return a copy of the dataset with the first episodes that together have at least `frames` frames, or all episodes.

        The copy of a mixture has such a part of each dataset, with as many frames as its share.
        """
        whole = self._whole
        if isinstance(whole, Dataset):
            return _first_episodes(whole, frames)
        shares = zip(whole.datasets.items(), whole.shares.targets.tolist(), strict=True)
        parts = {name: _first_episodes(dataset, int(share * frames) + 1) for (name, dataset), share in shares}
        given = {name: value for name, value in whole.shares_given.items() if name != "epoch_samples"}
        return Mixture(parts, **given, keys=whole.renamed_keys, missing=whole.missing, nearest=whole.nearest)

    def _changed(self, **changed: Any) -> _Measurement:
        """Return a measurement of a part of the dataset, with changed arguments of the Loader."""
        name = " with ".join(["streaming a part of the dataset", *(f"{key}={value!r}" for key, value in changed.items())])
        part = self._stack.enter_context(closing(self._part(_BATCHES * self._config.batches.batch_size)))
        return _Measurement(name, part, changed)

    def _measure(self, measurement: _Measurement) -> None:
        """Measure a first epoch and a later one. If an epoch has few batches, repeat this with new Loaders."""
        self._progress(f"{measurement.name}, round {len(measurement.rounds) + 1} of {_ROUNDS}")
        first: list[dict[str, float]] = []
        later: list[dict[str, float]] = []
        began, started = _cpu_seconds(), time.perf_counter()
        while sum(growth["batches"] for growth in first) < _BATCHES // _ROUNDS:
            with Loader(measurement.part, **self._options | {"last_batch": "drop"} | measurement.changed) as loader:
                if len(loader) < 2:
                    size = self._config.batches.batch_size
                    raise ValueError(f"dataset must have 2 batches of {size} samples or more. Give a smaller batch_size")
                first.append(_growth(loader))
                later.append(_growth(loader))
                config, graph = loader._config, loader._config.uses_dali(loader._config.cached(loader.routes))
        ended, seconds = _cpu_seconds(), time.perf_counter() - started
        if began and ended:
            others = (ended[0] - began[0]) - (ended[1] - began[1])
            self._busy.append((max(others, 0.0), seconds * len(os.sched_getaffinity(0))))
        measurement.rounds.append(_Measured(*(_epoch(config, graph, growths) for growths in (first, later))))


def _command(options: Mapping[str, Any]) -> str:
    """Return the command of a rewrite for its name."""
    size = options.get("size")
    return "prepare --for cpu" + (f" --size {size[0]}x{size[1]}" if size else "")


def _first_episodes(dataset: Dataset, frames: int) -> Dataset:
    """Return a copy of a dataset with the first episodes that together have at least `frames` frames, or all episodes."""
    count = int((dataset.lengths.cumsum() < frames).sum()) + 1
    return copy.copy(dataset.part(dataset.rows[:count]))


def _growth(loader: Loader) -> dict[str, float]:
    """Return the growth of a loader's counters over an epoch.

    The first batch is excluded, since it includes the startup. However, if most frames were decoded before it was delivered, as
    with few long GOPs, it is included.
    """
    began, seen = loader.stats(), dict[str, float]()
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
    work = work_of(growth, config.num_threads, cores(), config.source.data_store.remote, graph)
    seconds = (growth["wait_s"] + growth["training_s"]) / growth["batches"]
    decodes = Decodes(*(growth[key] / max(growth["frames"], 1) for key in ("decoded_frames", "stored_frames")))
    return _Epoch(seconds, replace(work, step=0.0), decodes, growth["fetched_bytes"] / growth["samples"])


def _threads() -> ThreadPoolExecutor:
    """Return the executor of a rewrite. For a few files, starting processes would take longer than it saves."""
    return ThreadPoolExecutor(cores())
