"""Loader, the public iterator over batches. A run can resume from its state on another number of ranks."""

from __future__ import annotations

import importlib
import logging
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn, SupportsIndex

import numpy as np

from dali_stream.cache.indices import IndexCache
from dali_stream.checks.arguments import epoch_number, from_zero, known_arguments, one_of
from dali_stream.checks.text import html_table, listed
from dali_stream.dataset import Dataset
from dali_stream.decode.route import DECODE, TORCHCODEC_CUDA, Route, choose_routes
from dali_stream.errors import DaliStreamError, MemoryBudgetError, ResumeError, StorageError, counted
from dali_stream.lerobot import fingerprint
from dali_stream.mixture import Mixture, open_dataset
from dali_stream.normalize import Modes, make_normalizer
from dali_stream.observe.counters import Counters, metrics
from dali_stream.observe.tracing import profiled, record
from dali_stream.order import Shuffle
from dali_stream.order.state import STATE_VERSION, check_state, check_version, noted
from dali_stream.pipeline.aliases import Batch, Graph
from dali_stream.pipeline.layout import Layout
from dali_stream.pipeline.stream import BatchSource
from dali_stream.pipeline.substitutes import Substitutes
from dali_stream.run import bottleneck
from dali_stream.run.bottleneck import Bottleneck
from dali_stream.run.loader_config import make_config
from dali_stream.run.required_memory import check_memory
from dali_stream.storage.store import TRAFFIC, Store
from dali_stream.system.heap import trim_memory
from dali_stream.system.log_records import note_given
from dali_stream.system.memory_limit import memory_limit
from dali_stream.system.ranks import current_ranks, refuse_workers

if TYPE_CHECKING:
    import torch

    from dali_stream.pipeline.config import Config


_JOIN_S = 0.1  # time after which the reads of a thread that is joined are ended again
_log = logging.getLogger("dali_stream")


@dataclass(eq=False)
class _Iteration:
    """Iteration over an epoch, or over the rest of it.

    Attributes:
        is_whole: Whether it begins with the first batch of the epoch.
        is_complete: Whether all batches of the epoch were delivered. If not, the next iteration leaves out the others.
        is_stopped: Whether it has ended without batches in progress, since the Loader was closed or the interpreter exits.
    """

    is_whole: bool = False
    is_complete: bool = False
    is_stopped: bool = False

    @property
    def is_done(self) -> bool:
        """Whether no batches are in progress for it."""
        return self.is_complete or self.is_stopped


class Loader:
    """Iterator over the batches of a LeRobot dataset, one epoch after the other.

    A batch equals `torch.utils.data.default_collate` of LeRobotDataset's items, key for key. Video has shape (B, C, H, W), or
    (B, T, C, H, W) for a window of several steps. Tabular features have shape (B, D) or (B, T, D), without D if the feature
    has shape (1,). `<key>_is_pad` is bool of shape (B, T) for each key with a window, and `task` is a list of str. The memory
    format of frames is channels last. C is 3, or 1 or 4 for grey and RGBA images. Frames of depth cameras are distances with
    C = 1. A feature that has the key of a mask or of `task` is left out, and the log names it.

    Iterate a Loader directly in the training process. It replaces PyTorch's DataLoader, and cannot be copied.

    Args:
        dataset: `Dataset`, an address that `Dataset` accepts, or a `Mixture` of several datasets.
        batch_size: Number of samples per batch and rank. Default: 64.
        delta_timestamps: Windows per key: times in seconds relative to the current frame, in multiples of 1/fps, such as
            `{"action": [i / dataset.fps for i in range(16)]}`. As in LeRobot, a step selects the row that is
            round(seconds * fps) rows away in the episode, regardless of the timestamp of that row. Default: no windows.
        dali_graph: Function from a dict of DALI nodes to another dict. Its operators are added at the end of the DALI graph.
            Frames are HWC or FHWC, resized and converted to `image_dtype`. An output whose layout ends in HWC is delivered
            channels first. The node "sample" contains random numbers for augmentation, see `dali_stream.augment`, and is not
            delivered. Default: none.
        image_size: Size (height, width) in pixels to which frames are resized, without keeping their aspect ratio. To keep it,
            crop in `dali_graph`. Frames of another size than `meta/info.json` says are then read as well, with a warning.
            Frames of depth cameras are resized with nearest neighbour, since a mean of distances may be where nothing is.
            Default: the recorded size, which must be the same for all datasets of a mixture.
        image_dtype: "float32" or `torch.float32` for values in [0, 1], "uint8" or `torch.uint8` for values in [0, 255].
            Default: "float32".
        depth_unit: Unit of the distances of depth cameras, "m" or "mm". They are float32 whatever `image_dtype` is. Default:
            "mm", as in LeRobot.
        memory_format: "channels_last" for frames whose channels are adjacent in memory, or "contiguous" for the strides of
            `torch.utils.data.default_collate`. Frames have the same shape and values in both. Default: "channels_last", which
            is the format of decoders, so nothing is transposed.
        normalize: Mode per key, {key: "mean_std", "min_max", "quantiles" or None}, or one mode for action and observations,
            see `Normalizer`. For a mixture, modes such as "min_max_per_dataset" use the statistics of each sample's own
            dataset. Normalization follows `dali_graph`, and `normalizer.inverse` undoes it. Default: no normalization.
        shuffle: True for pools of episodes, "sharded" for pools whose frames stay on their rank in all epochs, so that the
            memory of all ranks adds up, "global" for one permutation of all frames, which suits local data, or False for the
            recorded order. Default: True.
        seed: Seed of the order and of augmentation. Default: 0.
        consumers, episode_pool_size: See `Order`. "global" and False ignore them. A run with consumers can be resumed on every
            world size that divides `consumers`. Default: chosen for the global batch, which is batch_size times the world size,
            such as 32 and 8 for 64 samples. A resumed run keeps the values of its state.
        device: "auto", "cpu", "cuda" or an index such as "cuda:1". "auto" is the GPU of this process if it has one, and the CPU
            otherwise. Default: "auto".
        decode: "auto" for NVDEC or the CPU with torchcodec: NVDEC if it decodes the video of a camera, unless `num_threads` is
            greater than about 4 per NVDEC engine. "torchcodec" for the CPU, and "torchcodec-cuda" or "dali" for NVDEC.
            torchcodec uses NVDEC from version 0.17 on. Default: "auto".
        num_threads: Number of threads that decode on the CPU, and maximum number of threads that decode on NVDEC. Default: the
            number of cores of this process, which is its share if local ranks share cores or a CPU quota. The first line that
            a Loader logs has the number and the reason.
        prefetch: Number of batches that are prepared ahead, at most those of an epoch. Default: enough to keep all threads
            busy, at least 2. It exceeds 16 and twice `num_threads` only if the frames of these batches take at most 1/8 of
            `memory_budget`.
        memory_budget: Memory for rows, indices of video files, encoded video of remote data, and decoded frames, in bytes or as
            a text such as "4GiB". The first three get what the episodes in use need, up to half of the budget. Decoded frames
            get the rest. The frames of the batches in progress are not counted if they exceed this rest, or if the rest holds
            all frames of the dataset. Each rank has its own budget. Default: 4 GiB, but at most a quarter of what is left of
            the memory of the machine or cgroup, divided by the number of ranks on the machine, less 512 MiB for the process of
            the Loader and 256 MiB for each decode process.
        audit: Average number of samples per audit. If DALI decodes a camera, an audit decodes a sample with torchcodec as
            well. If the frames differ by more than a tolerance, a DecodeError names episode, frame and file. The first sample
            of each file is always audited. 0 turns audits off. With a `dali_graph`, audits take the memory of another batch
            of frames on the GPU. Default: 1000.
        last_batch: Treatment of samples that do not fill the last batch of an epoch: "drop" omits them, "partial" delivers a
            smaller batch, and "pad" fills the batch with the first samples that the rank has in the epoch. Default: "drop".
        on_error: "raise", or "substitute" to replace a sample that cannot be read or decoded with another sample of its
            batch. Substitutes are counted in `stats()`, summed up in a warning per file and epoch, and marked in
            `is_substitute`, bool of shape (B,). They depend on the batch only, so they are the same in a run that is resumed
            with the same ranks and batch size. Default: "raise".
        max_substitutes: Maximum share of a batch that may be replaced, above 0 and up to 1. If more samples cannot be read or
            decoded, a DecodeError that contains the first error is raised. Default: 1.0.
        frame_cache: Folder for decoded frames on disk, which all ranks of the machine and later runs share. Stored frames
            are read and not decoded. Batches are the same with and without it. Frames that DALI decodes are not stored.
            With a folder in /dev/shm, the frames are in memory, once per machine. Default: none.
        frame_cache_bytes: Maximum size of `frame_cache`, in bytes or as a text such as "200GiB". When it is reached, no more
            frames are added. Default: no limit, except for a folder in memory: a quarter of the memory of the machine or
            cgroup, and at most half of its file system.
        gpu_cache: Memory of the GPU for decoded frames, in bytes or as a text such as "4GiB", in which 28,000 frames of 224×224
            fit. Batches are then copied within the GPU, and frames that NVDEC decodes do not leave it. Depth stays in the
            CPU's memory, and this process makes the batches. It is allocated when batches start. Default: none, so
            decoded frames are in the CPU's memory, within `memory_budget`.
        rank, world_size: Rank of this process, and number of ranks. Default: those of torch.distributed or Accelerate if
            initialized, otherwise of the environment variables `RANK` and `WORLD_SIZE`, otherwise 0 and 1. Iterating raises an
            error if torch.distributed has been initialized with other values since. Explicit values are not checked in this
            way, so several processes may share a rank, as in tensor parallelism.
        in_process: Whether this process makes the batches, for example to debug or profile them. Otherwise a process of the
            Loader's own makes them, and passes them on in shared memory, so that the Loader takes neither the interpreter nor
            garbage collections from training. NVDEC, and decoders in a DALI graph, always work in this process. Batches are
            the same either way. Default: False, unless a rank has less than 2 GiB of memory, or the environment variable
            `DALI_STREAM_IN_PROCESS` is 1.
        decode_processes: Number of processes that decode video on the CPU for the decode threads, at most `num_threads`. One
            Python interpreter hands out about 10,000 frames per second, whatever number of threads decode. Batches are the
            same with any number. Default: one for every 8 of `num_threads` from 12 on, and 0 with `in_process=True`. They take
            at most a sixteenth of the memory of this rank, 256 MiB each.

    Raises:
        ValueError: If an argument is invalid.
        DatasetError: See `Dataset`.
        MemoryBudgetError: If `memory_budget` does not hold one batch, or exceeds the memory of this machine or of the cgroup of
            this process, or if the frames of the batches in progress need more memory than that or than `gpu_cache`.
        DaliStreamError: If the Loader is made in a worker of a DataLoader, since each worker would deliver the same batches, or
            if a GPU, `dali_graph` or `decode="dali"` needs DALI, or a depth camera needs PyAV, and it cannot be imported.
    """

    _epoch = _position = 0  # epoch of the next batch, and position in its order
    _iteration: _Iteration | None = None  # iteration that began last
    _begin: tuple[int, int] | None = None  # loaded epoch and position, if the position is not a multiple of the global batch
    _closed = False

    @known_arguments
    def __init__(
        self,
        dataset: Dataset | Mixture | str | os.PathLike[str],
        *,
        batch_size: int = 64,
        delta_timestamps: Mapping[str, Sequence[float]] | None = None,
        dali_graph: Graph | None = None,
        image_size: tuple[int, int] | None = None,
        image_dtype: str | torch.dtype = "float32",
        depth_unit: str = "mm",
        memory_format: str = "channels_last",
        normalize: Modes = None,
        shuffle: Shuffle = True,
        seed: int = 0,
        consumers: int | None = None,
        episode_pool_size: int | None = None,
        device: str = "auto",
        decode: str = "auto",
        num_threads: int | None = None,
        prefetch: int | None = None,
        memory_budget: int | str | None = None,
        audit: int = 1000,
        last_batch: str = "drop",
        on_error: str = "raise",
        max_substitutes: float = 1.0,
        frame_cache: str | os.PathLike[str] | None = None,
        frame_cache_bytes: int | str | None = None,
        gpu_cache: int | str | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        in_process: bool | None = None,
        decode_processes: int | None = None,
    ) -> None:
        refuse_workers()
        one_of("decode", decode, DECODE)
        self._ranks = current_ranks(rank, world_size)
        note_given(self._ranks)
        self._budget_given = memory_budget is not None
        self._given_pools = {"consumers": consumers, "episode_pool_size": episode_pool_size}
        self.dataset = open_dataset(dataset)
        self._config = make_config(
            self.dataset,
            self._ranks,
            batch_size=batch_size,
            delta_timestamps=delta_timestamps,
            dali_graph=dali_graph,
            image_size=image_size,
            image_dtype=image_dtype,
            depth_unit=depth_unit,
            memory_format=memory_format,
            order=(shuffle, seed, consumers, episode_pool_size),
            device=device,
            num_threads=num_threads,
            prefetch=prefetch,
            memory_budget=memory_budget,
            audit=audit,
            last_batch=last_batch,
            on_error=on_error,
            max_substitutes=max_substitutes,
            frame_cache=frame_cache,
            frame_cache_bytes=frame_cache_bytes,
            gpu_cache=gpu_cache,
            in_process=in_process,
            decode_processes=decode_processes,
        )
        self.normalizer = make_normalizer(self.dataset, self._config, normalize)
        self._counters, self._recent = Counters(), bottleneck.Recent()
        self._constructed, self._pid = time.perf_counter(), os.getpid()
        self._delivered_at = self._constructed
        self._waiting_since: float | None = None  # time at which `next` began to wait, if it is waiting
        self._metered: dict[str, Any] = {}  # counters at the last call of `metrics`
        self._batch_source = self._make_batch_source(decode, dali_graph)
        self._state_reader: threading.Thread | None = None
        self._told: set[str] = set()  # messages that are logged once
        self._warn_if_uneven()

    def _make_batch_source(self, decode: str, dali_graph: Graph | None) -> BatchSource:
        """Choose the decoders, and return the source of the batches.

        Also check that batches fit into memory and, if DALI is needed, that it can be imported.
        """
        config = self._config
        try:
            routes = choose_routes(config.source, config.indices, decode, config.gpu, config.num_threads)
        finally:
            self._release_dataset()
        if decode == "auto":
            routes = config.with_stored(routes)
        layout = Layout(config, routes)
        self._check_budget(layout)
        check_memory(layout, memory_limit())
        if layout.uses_dali:
            importlib.import_module("dali_stream.pipeline.dali_batches")
        own_process = _has_own_process(config, routes, self.dataset.stores)
        return BatchSource(routes, dali_graph, decode, self._counters, own_process)

    def _check_budget(self, layout: Layout) -> None:
        """Check that memory_budget holds one batch."""
        try:
            _ = layout.parts
        except MemoryBudgetError as error:
            if self._budget_given:
                raise
            raise MemoryBudgetError(
                f"{error}. No memory_budget was given, and its default is at most a quarter of the memory of this machine or "
                "cgroup, divided by the ranks on this machine"
            ) from None

    def __getattr__(self, name: str) -> Any:
        # Accelerate reads these attributes of a loader to split it by rank, or to skip batches.
        if name in ("sampler", "batch_sampler"):
            raise AttributeError(
                f"A Loader has no {name}, since it splits batches by rank and resumes with load_state_dict. Do not pass it to "
                "accelerate's prepare_data_loader or skip_first_batches"
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError(
            "A Loader cannot be copied or pickled, because its threads and its DALI pipeline belong to this object. Copy its "
            "dataset and its state_dict(), and make another Loader from them"
        )

    def __getitem__(self, index: object) -> NoReturn:
        # A DataLoader calls this method if its dataset is a Loader.
        raise TypeError(
            "A Loader has no items. Iterate it, `for batch in loader`. It takes the place of a torch DataLoader, so do "
            "not pass it to one. num_threads and prefetch correspond to num_workers and prefetch_factor"
        )

    def __repr__(self) -> str:
        cameras: dict[str, list[str]] = {}
        for camera, route in self._batch_source.routes.items():
            cameras.setdefault(route.decoder, []).append(camera)
        routes = "".join(f"{', '.join(keys)} on {decoder}; " for decoder, keys in cameras.items())
        uri = self.dataset.uri if len(self.dataset.uri) <= 100 else f"{self.dataset.uri[:97]}..."  # of a large mixture
        batches = f"{len(self)} batch{'' if len(self) == 1 else 'es'} of {self._config.batches.batch_size}"
        rank = f"rank {self._ranks.rank} of {self._ranks.world_size}"
        return f"{type(self).__name__}({uri!r}: {batches}; {routes}{rank}{'; closed' if self._closed else ''})"

    def _repr_html_(self) -> str:
        """Return a table for a notebook: dataset, batches, position, and the decoder of each camera."""
        rows = [
            ("dataset", self.dataset.uri),
            ("batches of an epoch", f"{len(self):,} of {self._config.batches.batch_size} samples"),
            ("next batch", "none, since it is closed" if self._closed else f"{self.batch_index} of epoch {self._epoch}"),
            ("rank", f"{self._ranks.rank} of {self._ranks.world_size}"),
        ]
        routes = self._batch_source.routes.items()
        return html_table("Loader", [*rows, *((camera, f"{route.decoder}: {route.reason}") for camera, route in routes)])

    def __len__(self) -> int:
        """Number of batches of an epoch, the same on each rank."""
        return self._config.batches.count(0)

    def __iter__(self) -> Iterator[Batch]:
        """Iterate over one epoch.

        The first iteration yields the first epoch, or the rest of the epoch of a loaded state. Each later iteration yields the
        epoch after the previous one, even if that was left early. Leaving a loop early stops all work. The next iteration then
        logs a warning about the batches that were left out, once per Loader.

        Raises:
            DaliStreamError: If the loader is closed, or torch.distributed has another rank or world size than the loader.
        """
        self._check_usable()
        self._ranks.check("Loader")
        return self._iterate()

    @property
    def epoch(self) -> int:
        """Number of the current epoch, from 0. After a complete loop over an epoch, it is the number of the next one."""
        return self._epoch

    @property
    def batch_index(self) -> int:
        """Index of the epoch's next batch, from 0. The epoch has `len(loader) - batch_index` batches left.

        It is the number of batches delivered in this epoch, unless the epoch was resumed with another global batch.
        """
        return len(self) - self._config.batches.count(self._position)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the run, a small dict that is the same on each rank.

        It holds text, integers, booleans, lists and dicts. `torch.load(weights_only=True)` and JSON read it, so it can be saved
        in the same file as the model.

        The state contains the position in the epoch's order after the batches that have been delivered. A resumed run
        continues with the very next sample, on any number of ranks that divides `consumers`. A state that is saved after the
        last batch of an epoch resumes with the next epoch.
        """
        self._check_usable()
        return {
            "version": STATE_VERSION,
            "epoch": self._epoch,
            "position": self._position,
            "order": self._config.order_state(),
            **fingerprint.saved(self.dataset.identity),
        }

    def load_state_dict(self, state: Mapping[str, Any], *, allow_other_frames: bool = False) -> None:
        """Continue a run from its state. Call this method before the first iteration.

        If `consumers` or `episode_pool_size` was not given to this Loader, it uses the value of the state.

        Args:
            state: Result of `state_dict`.
            allow_other_frames: Whether the frames of the cameras may differ from those of the run, for example in size, as
                after `dali-stream prepare --size`. Episodes, rows, tasks and their statistics must be the same. Default:
                False.

        Raises:
            ResumeError: If iteration has begun, if the state belongs to another dataset or order, or if this world size does
                not divide the `consumers` of the state. The message names the parts of the dataset that differ.
            MemoryBudgetError: If memory_budget does not hold one batch of the state's order.
        """
        self._check_not_begun("load_state_dict")
        check_version(state, "Loader", "dataset")
        fingerprint.check(self.dataset.identity, state, allow_other_frames)
        taken = noted(state, self._config.arguments.shuffle, self._given_pools)
        config = replace(self._config, arguments=self._config.arguments._replace(**taken))
        epoch, position = check_state(state, "loader", config.order_state(), config.batches.frames)
        if taken:
            config.arguments.check_resumable(config.batches.world_size)
            self._check_budget(Layout(config, self._batch_source.routes))
        self._config, self._epoch, self._position = config, epoch, position
        if "consumers" in taken:
            self._warn_if_uneven()
        if not config.batches.count(position):
            self._end_epoch()
        on_grid = self._position % self._config.batches.stride == 0
        self._begin = None if on_grid else (self._epoch, self._position)

    def batch_at(self, epoch: int, batch: int) -> Batch:
        """Return any batch of this rank, exactly as the iteration delivers it.

        Its samples, frames, augmentation and normalization are the same, bit for bit, if its cameras still have the same
        decoders (see `routes`). The batches before it are not made. The position of this Loader, its state and its counters do
        not change, except for the requests and bytes of its dataset. Call this method before, during or after an iteration,
        for example to look at the batch of a step with an unusual loss. During an iteration, its time counts as training.

        The batch has its own threads and caches, which are released before this method returns. Until then, it takes as much
        memory as an iteration with `prefetch=1`, in addition to that of an iteration in progress: the rows, indices, encoded
        video and decoded frames of the batch and of the next one, within a second `memory_budget`. If DALI makes the batches,
        a second pipeline takes memory on the same device. The method takes as long as the first batch of an iteration.

        Args:
            epoch: Number of the epoch, from 0.
            batch: Index of the batch in the epoch, from 0. It is the value of `batch_index` before this batch is delivered.

        Returns:
            {key: tensor, or list of str for text}, see `Loader`.

        Raises:
            ValueError: If the epoch has no such batch, or if a loaded state, whose position is not a multiple of the global
                batch, is of a later part of this epoch.
            DaliStreamError: If the Loader is closed, or the batch cannot be made.
        """
        self._check_usable()
        self._ranks.check("Loader")
        epoch, position = self._place_of(epoch, batch)
        substitutes = Substitutes()
        config = replace(self._config, prefetch=1, indices=IndexCache(self._config.source), substitutes=substitutes)
        try:
            return self._normalized(self._batch_source.batch_at(config, epoch, position))
        finally:
            substitutes.report(epoch)
            self._release_dataset()

    def resume(self, *, epoch: int, batch: int) -> None:
        """Continue without a saved state, from the number of steps of a checkpoint.

        If another loader delivered the batches before, or a Loader with another dataset, order or global batch, some samples
        of this epoch repeat, and others are missing. The Loader cannot check this, because the number of steps says nothing
        about them. At the start of an epoch, with `batch=0`, no sample repeats. Prefer `load_state_dict`. Call this method
        before the first iteration.

        Args:
            epoch: Epoch of the checkpoint, from 0.
            batch: Number of batches that were delivered to each rank since the beginning of the epoch. The global batch,
                batch_size times the world size, must have been that of this Loader for the whole epoch.

        Raises:
            ResumeError: If iteration has begun.
            ValueError: If an epoch has fewer batches.
        """
        self._check_not_begun("resume")
        self._epoch, self._position = epoch_number(epoch), self._config.batches.start_of(from_zero("batch", batch))
        self._begin = None
        batches = self._config.batches
        if not batches.count(self._position):
            self._epoch, self._position = self._epoch + 1, 0
        if not self._position:
            _log.info("resumed at the start of epoch %d, without a state", self._epoch)
            return
        _log.warning(
            "resumed at batch %d of epoch %d, position %d, without a state. Samples of this epoch may repeat, and others may "
            "be missing, unless a Loader with the same dataset, a global batch of %d samples and the same %s delivered the "
            "batches before. To begin with epoch %d, in which no sample repeats, resume from a checkpoint at step %d, or with "
            "epoch=%d, batch=0",
            *(batch, epoch, self._position, batches.stride, ", ".join(self._config.order_state())),
            *(epoch + 1, (epoch + 1) * len(self), epoch + 1),
        )

    @property
    def routes(self) -> dict[str, Route]:
        """Decoder of each camera, {camera: Route(decoder, reason)}. torchcodec replaces a decoder that cannot decode a file."""
        self._check_usable()
        return dict(self._batch_source.routes)

    def stats(self) -> dict[str, Any]:
        """Return counters and times since the loader was made. Those of its process are as of the last batch delivered.

        Other threads may call this method, also while the loader waits for a batch.

        Counters:

        - `batches`, `samples`: Number of batches and samples delivered.
        - `frames`: Number of frames delivered, without the frames of cameras that a dataset lacks.
        - `clips`: Number of clips that were packed or decoded for these frames.
        - `decoded_frames`: Number of frames decoded, including frames that are decoded only to reach other frames.
        - `stored_frames`: Number of decoded frames that were resized and put into memory or `frame_cache`.
        - `memory_hits`: Number of delivered frames that were in memory, since an earlier batch had decoded or read them.
        - `disk_hits`: Number of frames that were read from `frame_cache` and not decoded.
        - `disk_written_bytes`: Bytes of the frames that were added to `frame_cache`.
        - `frames_evicted_before_use`: Number of decoded frames that memory_budget did not hold until their next use.
        - `indices_read_again`: Number of indices of video files that were read again, since memory_budget did not hold them.
        - `padded`, `substituted`, `audited`: Number of samples that were added as padding, substituted, and audited.
        - `route_changes`: Number of times that the CPU continued with a camera, because NVDEC could not decode it.

        Memory in use, in bytes:

        - `row_bytes`, `index_bytes`, `encoded_bytes`, `decoded_bytes`: Memory of rows, indices of video files, encoded
          video of remote data, and cached decoded frames.
        - `resident_bytes`: Sum of these four.

        Times of the stages, in seconds. Stages of the same thread do not overlap, except for the parts of `wait_s`:

        - `training_s`, `wait_s`: Time of the iterating thread between batches, and in `next()`.
        - `starved_s`, `graph_s`: Parts of `wait_s` for waiting for frames, and for copying them and running the DALI graph.
        - `rows_s`, `gather_s`, `plan_s`: Reading rows or waiting for them, gathering them into batches, and all other work of
          the planner thread.
        - `read_s`, `pack_s`, `decode_s`, `resize_s`, `write_s`: Reading encoded video or waiting for it, or reading
          `frame_cache`; packing video into clips; decoding, or waiting for frames that other processes decode for
          `frame_cache`; resizing and storing; writing `frame_cache`. They are added up over the decode threads, so the sum is
          up to `num_threads` seconds per second.
        - `decode_cpu_s`, `plan_cpu_s`, `copy_cpu_s`: CPU time of the decode threads, of the planner thread, and of copying.
        - `first_batch_s`: Time from construction to the first batch. None before it.

        Times until now, in seconds, which show a run that has stopped:

        - `waiting_s`: Time that `next()` has been waiting for the batch that it will return. 0 if no `next()` is running.
        - `since_batch_s`: Time since the last batch was delivered, or since construction.

        Remote data (these are 0 for local data):

        - `requests`, `retries`: Number of requests and of retries since the dataset was opened.
        - `fetched_bytes`, `cached_bytes`: Bytes read over the network and from `cache_dir` since the dataset was opened.
        - `failed_checksums`: Number of damaged files of `cache_dir` that were found since the dataset was opened.
        - `fetch_s`: Time that all reads waited for the network since the dataset was opened, in seconds.
        - `needed_bytes`: Bytes of the indices, rows and encoded video that the batches so far needed. Indices are counted once.
          Rows are counted at most once per epoch, and so is encoded video unless its episode was closed and opened again.
        - `evicted_early`: Number of blocks of encoded video that memory_budget did not hold until their next use.

        `bottleneck` interprets the times.
        """
        counters = self._counts()
        counters["needed_bytes"] += self._config.indices.bytes_read if self._config.source.data_store.remote else 0
        now, since = time.perf_counter(), self._waiting_since
        counters |= {"waiting_s": 0.0 if since is None else now - since, "since_batch_s": now - self._delivered_at}
        return counters | self._batch_source.memory()

    def _counts(self) -> dict[str, Any]:
        """Return the part of `stats` that is cheap to compute: counters, times and traffic."""
        traffic = {name: sum(getattr(store.traffic, name) for store in self.dataset.stores) for name in TRAFFIC}
        return asdict(self._counters) | traffic

    def metrics(self) -> dict[str, float]:
        """Return what the loader did since the last call, as a flat dict of floats for TensorBoard, W&B or MLflow.

        - `samples_per_s`: Samples delivered per second.
        - `wait_share`: Share of the time that the training loop waited for batches, 0 to 1.
        - `decodes_per_frame`: Number of frames decoded per frame delivered.
        - `memory_hit_share`: Share of the delivered frames that were in memory, 0 to 1.
        - `disk_hit_share`: Share of the delivered frames that were read from `frame_cache`, 0 to 1.
        - `disk_written_bytes`: Bytes that were added to `frame_cache`.
        - `network_bytes`, `disk_cache_bytes`: Bytes read over the network and from `cache_dir`.
        - `requests`, `retries`, `failed_checksums`: Requests over the network, repeated requests, and damaged files of
          `cache_dir`. If `retries` is not small compared with `requests`, the network or the server fails.
        - `substituted`, `route_changes`: Samples that were substituted, and cameras that moved from NVDEC to the CPU.
        - `evicted_early`, `indices_read_again`, `frames_evicted_before_use`: Blocks of encoded video, indices and decoded
          frames that memory_budget did not hold until their next use.
        - `row_bytes`, `index_bytes`, `encoded_bytes`, `decoded_bytes`, `resident_bytes`: Memory in use now, see `stats`.

        Rates and shares are 0 if no batch was delivered since the last call. The first call covers the time since construction.
        Decodes and cache hits are counted when a batch is made, up to `prefetch` batches before its delivery.
        """
        now = self.stats()
        before, self._metered = self._metered, now
        return metrics(before, now)

    def bottleneck(self, since: Mapping[str, Any] | None = None) -> Bottleneck | None:
        """Return the stage that limits this loader, and what may help. Print the result to read it as text.

        The last 200 batches are judged. Batches of the first epoch are never judged together with later ones, whose frames may
        be in memory already. A Loader logs the result once, after 200 batches. If memory_budget holds all decoded frames, the
        Loader logs the result after the first epoch, since only the first epoch decodes. Everything is measured, and nothing is
        predicted: `dali-stream bench URI` measures the frames per second with and without a change.

        Args:
            since: Earlier result of `stats()`. If given, all batches after it are judged instead.

        Returns:
            Stage and advice, or None before the second batch.
        """
        since = since or self._recent.since
        if since is None:
            return None
        growth = {key: value - (since[key] or 0) for key, value in self._counts().items() if key != "first_batch_s"}
        return bottleneck.find(growth, bottleneck.setup_of(self._config, self._batch_source))

    def close(self) -> None:
        """Stop all work, join all threads and close all files. The loader cannot be used afterwards."""
        self._closed = True
        if os.getpid() == self._pid:
            self._batch_source.close()
            self._config.indices.cached.clear()
            trim_memory()  # a large dataset leaves much free memory in small blocks
            self._config.substitutes.report(self._epoch + 1)  # batches of the next epoch may have been prepared already
            self._close_dataset()

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _iterate(self) -> Iterator[Batch]:
        self._check_usable()
        iteration, batches = self._begin_iteration(), self._config.batches
        try:
            while batches.count(self._position):
                batch = self._next()
                given = time.perf_counter()
                try:
                    self._position = batches.span(self._position)[1]  # last, so that Ctrl-C before it does not lose the batch
                    yield batch
                except GeneratorExit:
                    # After `close`, or at the exit of the interpreter, no batches are in progress, so `_stop` is not necessary.
                    # At the exit it is not possible either, since the modules that it uses may have been freed already.
                    iteration.is_stopped = self._closed or self._batch_source.ended
                    raise
                # This check must precede any use of a lock: after a fork, a lock that a thread of the parent held stays locked.
                self._check_current(iteration)
                resumed = time.perf_counter()
                self._counters.add(training_s=resumed - given)
                record("training", given, resumed)
            self._complete(iteration)
        finally:
            # Drop the batches in progress if the epoch was left early or failed. A loop that takes len(loader) batches without
            # requesting another one has not left early.
            if iteration is self._iteration and not iteration.is_done and batches.count(self._position):
                self._stop()

    def _begin_iteration(self) -> _Iteration:
        """Begin an iteration over the current epoch, or over the next one if the last iteration has left its epoch early."""
        last, iteration = self._iteration, _Iteration()
        self._iteration = iteration
        if last is not None and not last.is_complete:
            self._config.substitutes.report(self._epoch)
            if left := self._config.batches.count(self._position):
                self._stop()
                self._tell_left_out(left)
            self._epoch, self._position = self._epoch + 1, 0
        iteration.is_whole = self._position == 0
        self._recent.begin(self._batch_source.epochs > 0, self._counts)
        return iteration

    def _next(self) -> Batch:
        """Return the batch at the current position, which stays the same."""
        started = self._waiting_since = time.perf_counter()
        with profiled("dali_stream: next batch"):
            try:
                batch = self._normalized(self._batch_source.next(self._config, self._epoch, self._position))
            except StorageError as error:
                waited = time.perf_counter() - started
                raise StorageError(f"{error}. The training loop waited {waited:.1f} s for this batch") from error
            finally:
                self._waiting_since = None
        now = self._delivered_at = time.perf_counter()
        self._counters.add(batches=1, wait_s=now - started)
        if self._counters.first_batch_s is None:
            self._counters.first_batch_s = now - self._constructed
            self._prepare_to_save()
            layout, on_disk = self._batch_source.layout, self._config.frame_folder is not None
            if layout is not None and on_disk and not self._config.rank and _log.isEnabledFor(logging.INFO):
                _log.info("%s", layout.frame_folder_text())
        self._recent.add(self._counters.batches, self._counts)
        if self._counters.batches % bottleneck.JUDGED == 0 and "bottleneck" not in self._told:
            self._log_bottleneck()
        return batch

    def _complete(self, iteration: _Iteration) -> None:
        """Continue with the next epoch, after the last batch of an iteration."""
        self._config.substitutes.report(self._epoch)
        self._batch_source.epochs += iteration.is_whole
        if iteration.is_whole and "shards" not in self._told:
            self._told.add("shards")
            self._tell_what_shards_save()
        self._epoch, self._position = self._epoch + 1, 0
        iteration.is_complete = True

    def _prepare_to_save(self) -> None:
        """Read what the state has of a remote dataset, so that a run can be saved while its storage does not respond."""
        if any(store.remote for store in self.dataset.stores):
            self._state_reader = threading.Thread(
                target=_read_identity, args=(self.dataset,), name="dali_stream state", daemon=True
            )
            self._state_reader.start()

    def _log_bottleneck(self) -> None:
        """Log the bottleneck once. Log it as a warning only if training has to wait, and only on rank 0.

        If memory holds all frames, the first epoch is not typical of the run, so nothing is logged in it.
        """
        typical = self._recent.warm or not self._batch_source.keeps_all
        enough = self._recent.batches >= bottleneck.JUDGED // 2
        if typical and enough and (limit := self.bottleneck()):
            self._told.add("bottleneck")
            held_up = limit.stage != "training" and self._config.rank == 0
            level = logging.WARNING if held_up else logging.INFO
            _log.log(level, "Loader, after %d batches: %s", self._counters.batches, limit)

    def _normalized(self, batch: Batch) -> Batch:
        missing = [key for key in self.normalizer.modes if key not in batch]
        if missing:
            raise ValueError(
                f"normalize has the key {missing[0]!r}, but dali_graph returned only {listed(batch)}. Features are "
                "normalized by key after dali_graph. Return this key from dali_graph, or remove it from normalize"
            )
        return self.normalizer(batch)

    def _stop(self) -> None:
        """Drop the batches in progress. The next iteration starts new ones."""
        if os.getpid() == self._pid:  # in a forked process, a lock that another thread held is never released
            self._batch_source.stop()
            self._close_dataset()
            self._config.substitutes.report(self._epoch)

    def _close_dataset(self) -> None:
        """End the thread that reads what a state needs, and release the dataset, which other Loaders may be reading."""
        while self._state_reader is not None and self._state_reader.is_alive():
            self.dataset.close()  # repeatedly, since a request may begin afterwards
            self._state_reader.join(_JOIN_S)
        self._release_dataset()

    def _release_dataset(self) -> None:
        for store in self.dataset.stores:
            store.release()

    def _check_usable(self) -> None:
        if os.getpid() != self._pid:
            raise DaliStreamError(
                f"This Loader was made in process {self._pid}, but it is used in {os.getpid()} after a fork, where its threads "
                "and its GPU context do not exist. Make the Loader in the process that uses it"
            )
        if self._closed:
            raise DaliStreamError("This Loader is closed. Make a new one")

    def _check_not_begun(self, method: str) -> None:
        self._check_usable()
        if self._iteration is not None:
            raise ResumeError(f"{method} must be called before iteration begins. Call it on a new Loader")

    def _check_current(self, iteration: _Iteration | None) -> None:
        self._check_usable()
        if iteration is not self._iteration:
            raise DaliStreamError("Another iteration of this Loader has begun. A Loader can only be iterated once at a time")

    def _place_of(self, epoch: int, batch: int) -> tuple[int, int]:
        """Return an epoch, and the position at which one of its batches begins. See `batch_at` for arguments and errors."""
        epoch, batches = epoch_number(epoch), self._config.batches
        start = self._begin[1] if self._begin is not None and self._begin[0] == epoch else 0
        first = len(self) - batches.count(start)  # index of the batch that begins at `start`
        is_whole = isinstance(batch, (int, np.integer)) and not isinstance(batch, bool)
        if not is_whole or not first <= batch < len(self):
            resumed = ", at which this run was resumed with another global batch," if start else ""
            raise ValueError(
                f"batch must be at least {first}{resumed} and less than {len(self)}, the number of batches of an epoch, got "
                f"{batch!r}. For a count from the start of training, divmod(count, len(loader)) is (epoch, batch)"
            )
        return epoch, start + (int(batch) - first) * batches.stride

    def _end_epoch(self) -> None:
        """Begin with the next epoch, since the epoch of the loaded position has no batch left."""
        left = self._config.batches.frames - self._position
        if left and self._config.batches.last_batch == "partial":
            _log.warning(
                "left out: %s of epoch %d, fewer than the ranks that resume the run", counted(left, "frame"), self._epoch
            )
        self._epoch, self._position = self._epoch + 1, 0

    def _tell_left_out(self, batches: int) -> None:
        if "left out" not in self._told:
            _log.warning(
                "the last iteration ended before its epoch: %d of %d batches of epoch %d are left out, and epoch %d begins. To "
                "continue within an epoch, keep the iterator, it = iter(loader), or load the state into a new Loader. "
                "next(iter(loader)) begins and leaves an epoch in this way. To look at a batch and leave the Loader as it is, "
                "use loader.batch_at(epoch, batch). This message is logged once",
                *(batches, len(self), self._epoch, self._epoch + 1),
            )
        self._told.add("left out")

    def _tell_what_shards_save(self) -> None:
        """Log on rank 0, after the first epoch, what `shuffle="sharded"` would save if memory holds all frames of a shard."""
        config, layout, world = self._config, self._batch_source.layout, self._config.batches.world_size
        if layout is None or config.rank or world == 1 or config.arguments.shuffle is not True or not layout.cached:
            return
        if config.frame_folder is not None or layout.on_dali:
            return
        sharded = Layout(replace(config, arguments=config.arguments._replace(shuffle="sharded")), layout.routes)
        if not sharded.needed or not sharded.keeps_all:
            return
        # With memory for all frames, a rank decodes those that it has not shown in the first epoch.
        counts = asdict(self._counters)
        left = 1 - 1 / world if self._batch_source.keeps_all else counts["decoded_frames"] / max(counts["frames"], 1)
        _log.info(
            "Loader, after the first epoch: the memory of the %d ranks holds all decoded frames together, but a rank has other "
            "frames in each epoch, and decodes about %.2f frames per delivered frame in the next one. A new run with "
            'shuffle="sharded" decodes each frame once, on one rank',
            *(world, left),
        )

    def _warn_if_uneven(self) -> None:
        config = self._config
        told = config.arguments.uneven(config.batches.batch_size, config.batches.world_size)
        if told and config.rank == 0:
            _log.warning("%s", told)


def _has_own_process(config: Config, routes: Mapping[str, Route], stores: Iterable[Store]) -> bool:
    """Return whether a process of the Loader's own makes the batches."""
    if config.in_process:
        return False
    here = [key for key, route in routes.items() if route.decoder in ("dali", TORCHCODEC_CUDA)]
    reasons = [f"{routes[here[0]].decoder} decodes {listed(here)}"] if here else []
    reasons += ["decoded frames are in the GPU's memory (gpu_cache)"] if config.gpu_cache is not None else []
    reasons += [f"the files of {store.address} are in its memory" for store in stores if store.in_memory]
    if reasons:
        _log.info("Loader: the batches are made in this process, since %s", reasons[0])
    return not reasons


def _read_identity(dataset: Dataset | Mixture) -> None:
    with suppress(DaliStreamError):  # raised again by `state_dict`
        _ = dataset.identity
