"""Validation of a Loader's arguments, and construction of the configuration of its pipeline."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

from dali_stream.cache.frame_folder import FrameFolder
from dali_stream.cache.indices import IndexCache
from dali_stream.checks.arguments import byte_count, from_zero, one_of, picture_size, positive, share
from dali_stream.checks.arrays import Int64
from dali_stream.lerobot.features import UNITS, Feature
from dali_stream.lerobot.source import Source
from dali_stream.order import Shuffle, check_world, default_pools, windows
from dali_stream.order.batches import LAST_BATCH, Batches
from dali_stream.order.orders import Orders
from dali_stream.order.state import OrderArguments
from dali_stream.pipeline.config import DATASET, SAMPLE, SUBSTITUTE, Config
from dali_stream.system import cpu, memory_limit
from dali_stream.system.gpu import gpu_index
from dali_stream.system.log_records import DATASET_LOG
from dali_stream.system.ranks import Ranks

# Decode threads for which there is a decode process by default, and decode threads from which on there are any. A core decodes
# about 600 frames of AV1 at 480×640 per second. Each of them holds the interpreter for about 100 µs, see
# benchmarks/interpreter.py, so 12 cores need 70 % of one interpreter.
THREADS_PER_PROCESS, FIRST_PROCESS = 8, 12
IN_PROCESS = "DALI_STREAM_IN_PROCESS"  # environment variable
MEMORY_FORMATS = ("channels_last", "contiguous")
_log = logging.getLogger("dali_stream")


class Streamed(Protocol):
    """What a Loader reads of its `Dataset` or `Mixture`."""

    @property
    def features(self) -> Mapping[str, Feature]: ...

    @property
    def source(self) -> Source: ...

    def orders(self) -> Orders: ...

    def window_offsets(self, deltas: Mapping[str, Sequence[float]], keys: Sequence[str]) -> dict[str, Int64]: ...

    def without(self, keys: Collection[str]) -> Streamed: ...


def make_config(
    dataset: Streamed,
    ranks: Ranks,
    *,
    batch_size: int,
    delta_timestamps: Mapping[str, Sequence[float]] | None,
    dali_graph: object,
    image_size: tuple[int, int] | None,
    image_dtype: object,
    depth_unit: str,
    memory_format: str,
    order: tuple[Shuffle, int, int | None, int | None],
    device: str,
    num_threads: int | None,
    prefetch: int | None,
    memory_budget: int | str | None,
    audit: int,
    last_batch: str,
    on_error: str,
    max_substitutes: float,
    frame_cache: str | os.PathLike[str] | None,
    frame_cache_bytes: int | str | None,
    gpu_cache: int | str | None,
    in_process: bool | None,
    decode_processes: int | None,
) -> Config:
    """Return the configuration of a Loader's pipeline.

    Args:
        dataset: Dataset of the Loader.
        ranks: Rank of this process, and number of ranks.
        order: Arguments shuffle, seed, consumers and episode_pool_size of the Loader.
        batch_size, delta_timestamps, dali_graph, image_size, image_dtype, depth_unit, memory_format, device, num_threads,
            prefetch, memory_budget, audit, last_batch, on_error, max_substitutes, frame_cache, frame_cache_bytes, gpu_cache,
            in_process, decode_processes: See `Loader`.

    Raises:
        ValueError: If an argument is invalid.
        MemoryBudgetError: If `memory_budget` exceeds the memory of this machine.
    """
    dtype = str(image_dtype).removeprefix("torch.")
    one_of("image_dtype", dtype, ("float32", "uint8"))
    one_of("depth_unit", depth_unit, UNITS)
    one_of("memory_format", memory_format, MEMORY_FORMATS)
    one_of("last_batch", last_batch, LAST_BATCH)
    one_of("on_error", on_error, ("raise", "substitute"))
    max_substitutes = share("max_substitutes", max_substitutes)
    if dali_graph is not None and not callable(dali_graph):
        raise ValueError(f"dali_graph must be a function from a dict of DALI nodes to one, or None, got {dali_graph!r}")
    batch_size = positive("batch_size", batch_size)
    check_world(ranks.rank, ranks.world_size, None)
    gpu = gpu_index(device)
    cached_on_gpu = _gpu_cache(gpu_cache, gpu, frame_cache is not None)
    shuffle, seed, *pools = order
    arguments = OrderArguments(shuffle, seed, *default_pools(batch_size, ranks.world_size, *pools))
    arguments = arguments.checked(ranks.rank, ranks.world_size)
    orders = dataset.orders()
    cores = cpu.available_cores()
    threads = cores.count if num_threads is None else positive("num_threads", num_threads)
    limit = memory_limit.memory_limit()
    stays = _stays_in_process(in_process, memory_limit.has_room_for_process(limit, cores.ranks.count))
    processes = _decode_processes(decode_processes, threads, stays, limit.size // cores.ranks.count)
    process_bytes = (0 if stays else memory_limit.PROCESS_BYTES) + processes * memory_limit.DECODE_PROCESS_BYTES
    budget = memory_limit.budget(memory_budget, limit, cores.ranks.count, process_bytes)
    own = _own_frames(orders, arguments, ranks)
    why, others = cores if num_threads is None else "given", f"decode_processes={processes}, " if processes else ""
    _log.info("Loader: num_threads=%d (%s), %s%s%s", threads, why, others, budget, own)
    offsets = _window_offsets(dataset, delta_timestamps or {}, ranks.rank)
    source = _delivered(dataset, offsets, dali_graph is not None, on_error == "substitute").source
    if image_size is None:
        for camera in source.cameras:
            source.frame_size(camera)
    return Config(
        source=source,
        orders=orders,
        batches=Batches(orders.positions, batch_size, ranks.world_size, last_batch).checked(),
        windows=windows.Windows(offsets),
        arguments=arguments,
        rank=ranks.rank,
        num_threads=threads,
        prefetch=None if prefetch is None else positive("prefetch", prefetch),
        memory_budget=budget.size,
        image_size=picture_size(image_size),
        image_dtype=dtype,
        depth_unit=depth_unit,
        memory_format=memory_format,
        indices=IndexCache(source),
        max_substitutes=max_substitutes if on_error == "substitute" else None,
        gpu=gpu,
        augments=dali_graph is not None,
        audit=from_zero("audit", audit),
        gpu_cache=cached_on_gpu,
        frame_folder=_frame_folder(frame_cache, frame_cache_bytes, cores.ranks.count),
        in_process=stays,
        decode_processes=processes,
    )


def _gpu_cache(given: int | str | None, gpu: int | None, has_frame_cache: bool) -> int | None:
    """Return the bytes of the GPU's memory for decoded frames."""
    if given is None:
        return None
    if gpu is None:
        raise ValueError(f"gpu_cache must be None for batches on the CPU, got {given!r}. Use memory_budget")
    if has_frame_cache:
        raise ValueError(f"gpu_cache must be None with a frame_cache, whose frames are in the CPU's memory, got {given!r}")
    return byte_count(given, "gpu_cache")


def _stays_in_process(given: bool | None, has_room: bool) -> bool:
    """Return whether the training process makes the batches, whatever decodes them.

    Args:
        given: Argument `in_process` of the Loader.
        has_room: Whether there is memory for another process.
    """
    if given is not None and not isinstance(given, bool):
        raise ValueError(f"in_process must be True, False or None for the default, got {given!r}")
    if given is None and os.environ.get(IN_PROCESS, "") not in ("", "0"):
        return True
    if given is None and not has_room:
        _log.info("Loader: the batches are made in this process, since there is little memory for another one")
    return not has_room if given is None else given


def _decode_processes(given: int | None, threads: int, stays: bool, memory: int) -> int:
    """Return the number of decode processes.

    Args:
        given: Argument `decode_processes` of the Loader.
        threads: Number of decode threads.
        stays: Whether the training process makes the batches. By default, it then decodes as well.
        memory: Memory of this rank in bytes. By default, the processes take at most a sixteenth of it.
    """
    if given is not None:
        return min(from_zero("decode_processes", given), threads)
    if stays or threads < FIRST_PROCESS:
        return 0
    return min(threads // THREADS_PER_PROCESS, memory // (16 * memory_limit.DECODE_PROCESS_BYTES))


def _own_frames(orders: Orders, arguments: OrderArguments, ranks: Ranks) -> str:
    """Return the end of the first line of the log: the frames that a rank samples in all epochs, or nothing."""
    shard = orders.of(0, arguments).shard(ranks.rank, ranks.world_size) if arguments.shuffle == "sharded" else None
    if shard is None:
        return ""
    return f', shuffle="sharded" (this rank samples the same {int((shard.stop - shard.start).sum())} frames in all epochs)'


def _frame_folder(folder: str | os.PathLike[str] | None, limit: int | str | None, ranks: int) -> FrameFolder | None:
    """Return the folder of the frame cache on disk, or None if none is given.

    On a file system in memory, the default limit is a quarter of the memory of this machine or cgroup: a process that exceeds
    the memory of its cgroup is killed without an error. It is also at most half of the file system: /dev/shm, which has 64 MB
    in a container, holds the batches of torch's worker processes as well.
    """
    if folder is None:
        if limit is not None:
            raise ValueError(f"frame_cache_bytes={limit!r} needs frame_cache, the folder whose size it limits")
        return None
    size = None if limit is None else byte_count(limit, "frame_cache_bytes")
    if size is None and memory_limit.is_in_memory(folder):
        size = memory_limit.memory_limit().size // 4
        if capacity := memory_limit.file_system_size(folder):
            size = min(size, capacity // 2)
    return FrameFolder(folder, size, ranks)


def _delivered(dataset: Streamed, offsets: Mapping[str, Any], augments: bool, substitutes: bool) -> Streamed:
    """Return the dataset without features whose keys a batch uses for other values, such as masks. Log a warning about them.

    Args:
        dataset: Selected part of a dataset.
        offsets: {key with a window: its frame offsets}.
        augments: Whether samples have random numbers for augmentation.
        substitutes: Whether samples that cannot be decoded are substituted and marked.

    Raises:
        ValueError: If one of these features has a window itself, or if a feature has the key of the random numbers.
    """
    if augments and SAMPLE in dataset.features:
        raise ValueError(
            f"dataset must not have the feature {SAMPLE!r}, under whose key dali_graph gets random numbers. Leave "
            f"it out with dataset.without([{SAMPLE!r}])"
        )
    added = {f"{key}_is_pad": f"the mask of the window on {key!r}" for key in offsets}
    added["task"] = "the text of task_index"
    source = dataset.source
    added |= dict.fromkeys(source.constants, "what the sample's dataset has")
    if source.dataset_names:
        added[DATASET] = "the name of the sample's dataset"
    if substitutes:
        added[SUBSTITUTE] = "the mask of substituted samples"
    if "subtask" in dataset.features and "subtask_index" in dataset.features and any(source.names()["subtask"]):
        added["subtask"] = "the text of subtask_index"
    replaced = [key for key in dataset.features if key in added]
    for key in replaced:
        if key in offsets:
            raise ValueError(
                f"delta_timestamps must not have {key!r}, a feature of the dataset, because {added[key]} is delivered under "
                "the same key. Leave one of the two windows out"
            )
    if not replaced:
        return dataset
    logging.getLogger(DATASET_LOG).warning(
        "left out of the batches: %s",
        "; ".join(f"the dataset's {key!r}, whose key is that of {added[key]}" for key in replaced),
    )
    return dataset.without(replaced)


def _window_offsets(dataset: Streamed, deltas: Mapping[str, Sequence[float]], rank: int) -> dict[str, Int64]:
    """Return {key with a window: its frame offsets}. Warn about windows that were probably meant in frames, not in seconds.

    Args:
        dataset: Dataset of the Loader.
        deltas: Argument `delta_timestamps` of the Loader.
        rank: Rank of this process. Only rank 0 warns.
    """
    keys = [key for key, feature in dataset.features.items() if not feature.is_text]
    offsets, source = dataset.window_offsets(deltas, keys), dataset.source
    for key, frames in offsets.items():
        beyond = windows.beyond_every_episode(frames, source.lengths, source.dataset_of)
        if rank == 0 and windows.looks_like_frames(deltas[key], frames, beyond):
            _log.warning(
                "delta_timestamps[%r] is in seconds, and %d of its %d steps lie beyond the end or the beginning of every "
                "episode, so they deliver padding only. If you meant frames, divide them by dataset.fps",
                *(key, beyond.sum(), len(beyond)),
            )
    return offsets
