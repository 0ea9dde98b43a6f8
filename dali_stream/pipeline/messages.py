"""Messages between a Loader and its process. `ProducerProcess` is the end of the Loader, and `producer_main` the other end."""

from __future__ import annotations

from typing import NamedTuple

from dali_stream.cache.shared_buffers import Lent
from dali_stream.lerobot.source import Source
from dali_stream.observe.tracing import Span
from dali_stream.pipeline.batch import FinishedBatch
from dali_stream.storage import Store


class Start(NamedTuple):
    """First message to the process. Its file descriptor is that of a `waiting.Board`.

    Attributes:
        layout: Pickled configuration and routes of a `Layout`.
        epoch, position: See `Producer`.
        threads: Number of threads of torch's operators.
        cores: Cores on which the calling thread may run.
    """

    layout: bytes
    epoch: int
    position: int
    threads: int
    cores: set[int]


class Request(NamedTuple):
    """Request to finish another batch.

    Attributes:
        returned, forked: See `LentBuffers.take_back`.
        is_traced: Whether to record spans.
    """

    returned: list[int]
    forked: list[int]
    is_traced: bool


class Finished(NamedTuple):
    """Finished batch, with what was counted since the message before.

    Attributes:
        batch: Batch without `columns` and `frames`.
        frames: Keys of its frames. The other arrays are columns.
        lent: Arrays of the batch.
        counters: Growth of the counters.
        traffic: {number of a store of the source: growth of its `Traffic`}.
        versions: {number of a store: versions of files that it has read for the first time}, see `RemoteStore.take_versions`.
        indices: Camera, file, and bytes of each index that was read for the first time.
        memory: Result of `Producer.memory`.
        spans: Spans, if a trace is recorded.
    """

    batch: FinishedBatch
    frames: list[str]
    lent: Lent
    counters: dict[str, float]
    traffic: dict[int, dict[str, float]]
    versions: dict[int, dict[str, tuple[int, str]]]
    indices: list[tuple[str, int, int]]
    memory: dict[str, int]
    spans: list[Span]


def stores(source: Source) -> list[Store]:
    """Return the stores of all datasets of a source, in an order that is the same in both processes."""
    return [store for part in source.parts for store in part.dataset.stores]
