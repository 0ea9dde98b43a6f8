"""Remedies for a slow loader: what may help, measured or computed for a dataset and a machine."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from dali_stream.checks.arguments import budget_text
from dali_stream.dataset import Dataset
from dali_stream.errors import DaliStreamError, MemoryBudgetError
from dali_stream.loader import Loader
from dali_stream.mixture import Mixture
from dali_stream.order import has_consumers
from dali_stream.schedule.budget import frames_budget
from dali_stream.system.memory_limit import fits
from dali_stream.system.process import cores
from dali_stream.tools.decodes import Decodes, decodes_of
from dali_stream.tools.measuring import BATCHES, FEW, ROUNDS, Clock, Measurement, Rounds, Speed, first_episodes, medians
from dali_stream.tools.preparation import prepare
from dali_stream.tools.sizing import Node, Sizing, size_node
from dali_stream.tools.speed_model import Work

_PREPARED = 1024  # minimum size of the part that is rewritten to measure a remedy, in frames
_BUSY = 0.2  # the rates say little if other processes use more than this share of the cores
_SHORT = 2  # GOP of `prepare --for cpu`
_SMALL = (224, 224)  # frame size to suggest if frames have the recorded size


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


class Study:
    """Measurements of a loader with different arguments, and predictions from them.

    Args:
        uri: Address of the dataset.
        arguments: Other arguments of the Dataset.
        options: Arguments of the Loader.
        whole: Opened dataset.
        epochs: Number of epochs of the run, which determines the gain of a remedy.
        node: Machine to predict for. None for this machine, with one rank.
        stack: Stack that removes rewritten datasets at the end.
        progress: Function that is called with a description of each measurement.
        anyway: See `why`.

    Attributes:
        speeds: Speeds of the first epoch and of later ones, without a remedy.
        notes: See `WhyReport`.
    """

    def __init__(
        self, uri: str | os.PathLike[str], arguments: dict[str, Any], options: dict[str, Any], whole: Dataset | Mixture,
        epochs: int, node: Node | None, stack: contextlib.ExitStack, progress: Callable[[str], None], anyway: bool,
    ) -> None:  # fmt: skip
        self._uri, self._arguments, self._options, self._progress = uri, arguments, options, progress
        self._whole, self._stack, self._anyway = whole, stack, anyway
        # The order of one of several ranks is another one, and so is the number of decodes.
        self._ranks = {"rank": 0, "world_size": node.ranks} if node else {}
        self._full = stack.enter_context(Loader(whole, **options | self._ranks))  # to inspect, and not to iterate
        config = self._config = self._full._config
        self._cached = config.cached(self._full.routes)
        self._sized, self._epochs = node is not None, epochs
        self._node = node or Node(1, cores(), 0.0, 0.0, config.num_threads)
        self._clock = Clock(options)
        self.notes: list[str] = []
        self._base = self._changed()
        self._measure(self._base)
        self._check_busy()  # before anything is rewritten
        self._as_bytes = self._changed(image_dtype="uint8") if config.gpu is None and config.image_dtype == "float32" else None
        self._on_gpu = self._changed(device="cuda") if config.gpu is None and torch.cuda.is_available() else None
        self._smaller = self._changed(image_size=_SMALL) if self._is_larger_than_small() else None
        self._now = self._decodes()
        self._stored = self._with_frames_on_disk() if self._now[1].decoded and config.frame_folder is None else None
        self._rewritten = self._rewrite() if self._is_rewritten() else []
        rewritten = (each for each, _, _ in self._rewritten)
        others = [each for each in (self._as_bytes, self._on_gpu, self._smaller, self._stored, *rewritten) if each]
        for number in range(ROUNDS):
            # Every other round is in reverse order, so that a load that grows or shrinks slows down all of them.
            in_turns = [self._base, *others] if number else others
            for each in in_turns if number % 2 == 0 else in_turns[::-1]:
                self._measure(each)
        self._check_busy()
        self.speeds = self._base.speeds(self._now)

    @property
    def busy(self) -> float | None:
        """Share of the cores that other processes used during the measurements. None if it is unknown."""
        return self._clock.busy

    def _check_busy(self) -> None:
        """Raise DaliStreamError if other processes made the measurements meaningless."""
        if self.busy is not None and self.busy > _BUSY and not self._anyway:
            rates = sorted(1 / first.seconds for first, _ in self._base.rounds)
            raise DaliStreamError(
                f"other processes used {self.busy:.0%} of the cores of this process while the loader was measured, so its "
                f"{rates[0]:.3g} to {rates[-1]:.3g} batches/s in the first epoch say little about it. Run this while nothing "
                "else uses the machine, or predict anyway (--anyway, or anyway=True)"
            )

    def _is_rewritten(self) -> bool:
        """Return whether `prepare` would re-encode a video. It copies those of depth cameras."""
        source = self._config.source
        return any(not source.features[key].is_depth for key in source.videos)

    def _is_larger_than_small(self) -> bool:
        """Return whether frames have the recorded size, and a camera's are larger than `_SMALL`."""
        sizes = [self._config.frame_size(camera) for camera in self._cached]
        return self._config.image_size is None and any(height * width > _SMALL[0] * _SMALL[1] for height, width in sizes)

    def sizing(self) -> Sizing:
        """Return what the node needs, without a remedy."""
        config = self._config
        sizes = config.sizes(self._cached)
        return size_node(
            self._node,
            [[self._node.need(work) for work in works] for works in self._base.works(self._now)],
            frames=int(sizes.lengths.sum()),
            batch_size=config.batches.batch_size,
            frame_bytes=sizes.frame_bytes,
            video_bytes=sum(float(index.size().mean()) for index in sizes.indices.values()),
            memory_budget=config.memory_budget,
            frames_budget=frames_budget(sizes),
        )

    def _decodes(self, gop: int | None = None, **changed: Any) -> tuple[Decodes, Decodes]:
        """Replay the schedule for the whole dataset. Return the decodes of the first epoch, and of later ones.

        Args:
            gop: GOP length after a rewrite, in frames. Default: the GOPs of the dataset.
            changed: Arguments of the Loader that change.
        """
        if not changed:
            return decodes_of(self._config, self._cached, gop)
        with Loader(self._whole, **self._options | self._ranks | changed) as loader:
            return decodes_of(loader._config, self._cached, gop)

    def remedies(self) -> Iterator[Remedy]:
        """Yield the remedies that apply, whether they help or not."""
        config, base, now, node = self._config, self._base, self._now, self._node
        for budget in (2 * config.memory_budget, 4 * config.memory_budget):
            if now[1].decoded and (self._sized or fits(budget)):  # the memory of another machine is unknown
                price = f"{budget_text(budget)} of memory per rank instead of {budget_text(config.memory_budget)}"
                rounds = base.speeds(self._decodes(memory_budget=budget))
                yield self._remedy(f'memory_budget="{budget_text(budget)}"', price, rounds, memory_budget=budget)
        if self._stored:
            size = sum(config.frame_bytes(camera) for camera in self._cached) * self._whole.num_frames
            price = f"{size / 1e9:.3g} GB on a local disk, for all ranks of the machine"
            # The first epoch decodes each frame once, whatever the memory holds, as in the measured part.
            decodes = self._stored.rounds[0][0].decodes, Decodes(0.0, 0.0)
            yield self._remedy("frame_cache=DIR", price, self._stored.speeds(decodes), frame_cache="DIR")
        if (count := node.cores // node.ranks) > node.threads:
            rounds = base.speeds(now, node=replace(node, num_threads=count))
            yield self._remedy(f"num_threads={count}", "none", rounds, num_threads=count)
        more = replace(node, cores=2 * node.cores, num_threads=max(2 * node.cores // node.ranks, 1))
        yield self._remedy(f"{more.cores} CPU cores instead of {node.cores}", "a larger machine", base.speeds(now, node=more))
        if self._as_bytes:
            rounds = self._as_bytes.speeds(now)
            yield self._remedy('image_dtype="uint8"', "conversion in the model", rounds, image_dtype="uint8")
        if self._smaller:
            rounds = self._smaller.speeds(self._decodes(image_size=_SMALL))
            yield self._remedy(f"image_size={_SMALL}", "smaller frames for the model", rounds, image_size=_SMALL)
        if self._on_gpu:
            yield self._remedy('device="cuda"', "time of the GPU's decoders", self._on_gpu.speeds(now), device="cuda")
        if config.source.data_store.remote:
            rounds = base.speeds(now, lambda work: work.scaled(network=0.5))
            yield self._remedy("twice the bandwidth", "a faster connection, or nearer storage", rounds)
            if config.source.cache_dir is None:
                cached = base.speeds(now, lambda work: work.scaled(network=0.0))
                rounds = [(first, later) for (first, _), (_, later) in zip(base.speeds(now), cached, strict=True)]
                yield self._remedy("cache_dir=DIR", "disk space for the files", rounds)
        pooled, fewer = has_consumers(config.arguments.shuffle), config.arguments.consumers // 2
        if pooled and fewer >= self._full._ranks.world_size:
            rounds = base.speeds(self._decodes(consumers=fewer))
            yield self._remedy(f"consumers={fewer}", "another order of the samples", rounds, consumers=fewer)
        if self._rewritten:
            then = self._decodes(_SHORT)
            for measurement, options, sample_bytes in self._rewritten:
                price = f"a copy of the dataset, about {sample_bytes * self._whole.num_frames / 1e6:.3g} MB of video"
                rounds = self._after_rewrite(measurement, then, sample_bytes)
                yield replace(self._remedy(_command(options), price, rounds), prepare=options)

    def _remedy(self, name: str, price: str, rounds: Rounds, **loader: Any) -> Remedy:
        """Return a remedy with its gain, which compares measurements of the same round."""
        pairs = zip(self.speeds, rounds, strict=True)
        gains = sorted(self._seconds(*now) / self._seconds(*then) for now, then in pairs)
        return Remedy(name, price, *medians(rounds, self._sized), statistics.median(gains), (gains[0], gains[-1]), loader)

    def _seconds(self, first: Speed, later: Speed) -> float:
        """Return the mean seconds per batch in a run of several epochs."""
        return (1 / first.batches_per_s + (self._epochs - 1) / later.batches_per_s) / self._epochs

    def _with_frames_on_disk(self) -> Measurement | None:
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

    def _after_rewrite(self, measurement: Measurement, then: Sequence[Decodes], sample_bytes: float) -> Rounds:
        """Return the speeds after a rewrite.

        Epochs that decode next to nothing, before and after it, copy the same frames from memory, and so are equally fast.

        Args:
            measurement: Measurement of the rewritten part.
            then: Decodes of the first epoch and of later ones after the rewrite.
            sample_bytes: Bytes of encoded video per sample of the rewritten part.
        """
        rounds = measurement.speeds(then, functools.partial(self._over_the_network, sample_bytes))
        if any(later.decoded > FEW * first.decoded for first, later in (self._now, then)):
            return rounds
        return [(first, later) for (first, _), (_, later) in zip(rounds, self.speeds, strict=True)]

    def _rewrite(self) -> list[tuple[Measurement, dict[str, Any], float]]:
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
        # A selection of frames and statistics do not change the work of a rewritten episode.
        read = {key: value for key, value in self._arguments.items() if key in inspect.signature(prepare).parameters}
        read |= {"episodes": part.episodes.tolist(), "map_tasks": _in_threads}
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
            rewritten.append((Measurement(f"streaming the part after {name}", opened, self._node), options, sample_bytes))
        return rewritten

    def _over_the_network(self, sample_bytes: float, work: Work) -> Work:
        """Return the work of a batch if its bytes were read over the network of the original dataset.

        The rewritten part is on the local disk. Its time on the network is that of the original, in proportion to the bytes.

        Args:
            sample_bytes: Bytes of encoded video per sample of the rewritten part.
            work: Work that was measured on the local disk.
        """
        now = self._base.rounds[0][0]
        network = now.work.network * sample_bytes / now.fetched if now.fetched and work.decode else 0.0
        return replace(work, network=network)

    def _part(self, frames: int) -> Dataset | Mixture:
        """Return a copy of the dataset with the first episodes that together have at least `frames` frames, or all episodes.

        The copy of a mixture has such a part of each dataset, with as many frames as its share.
        """
        whole = self._whole
        if isinstance(whole, Dataset):
            return first_episodes(whole, frames)
        shares = zip(whole.datasets.items(), whole.shares.targets.tolist(), strict=True)
        parts = {name: first_episodes(dataset, int(share * frames) + 1) for (name, dataset), share in shares}
        given = {name: value for name, value in whole.shares_given.items() if name != "epoch_samples"}
        return Mixture(parts, **given, keys=whole.renamed_keys, missing=whole.missing, nearest=whole.nearest)

    def _changed(self, **changed: Any) -> Measurement:
        """Return a measurement of a part of the dataset, with changed arguments of the Loader."""
        name = " with ".join(["streaming a part of the dataset", *(f"{key}={value!r}" for key, value in changed.items())])
        part = self._stack.enter_context(closing(self._part(BATCHES * self._config.batches.batch_size)))
        return Measurement(name, part, self._node, changed)

    def _measure(self, measurement: Measurement) -> None:
        self._progress(f"{measurement.name}, round {len(measurement.rounds) + 1} of {ROUNDS}")
        self._clock.measure(measurement)


def _command(options: Mapping[str, Any]) -> str:
    """Return the command of a rewrite for its name."""
    size = options.get("size")
    return "prepare --for cpu" + (f" --size {size[0]}x{size[1]}" if size else "")


def _in_threads(call: Callable[[Any], Any], tasks: Sequence[Any]) -> Iterator[Any]:
    """Run the tasks of a rewrite. For a few files, starting processes would take longer than it saves."""
    with ThreadPoolExecutor(cores()) as pool:
        yield from pool.map(call, tasks)
