"""Messages between a Loader and its process. `ProducerProcess` is the end of the Loader, and `producer_main` the other end."""

from __future__ import annotations

from typing import NamedTuple

from dali_stream.cache.shared_buffers import Lent
from dali_stream.lerobot.source import Source
from dali_stream.observe.tracing import Span
from dali_stream.pipeline.batch import BatchInProgress
from dali_stream.storage import Store


class Start(NamedTuple):
    """First message to the process. Its file descriptor is that of a `waiting.Board`.

    Attributes:
        layout: Pickled configuration and routes of a `Layout`.
        epoch, position: See `Producer`.
        threads: Number of threads of torch's operators.
    """

    layout: bytes
    epoch: int
    position: int
    threads: int


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
        batch: Batch without `columns`, `frames` and `work`.
        frames: Keys of its frames. The other arrays are columns.
        lent: Arrays of the batch.
        counters: Growth of the counters.
        traffic: {number of a store of the source: growth of its `Traffic`}.
        index_bytes: Growth of `IndexCache.bytes_read`.
        memory: Result of `Producer.memory`.
        spans: Spans, if a trace is recorded.
    """

    batch: BatchInProgress
    frames: list[str]
    lent: Lent
    counters: dict[str, float]
    traffic: dict[int, dict[str, float]]
    index_bytes: int
    memory: dict[str, int]
    spans: list[Span]


def stores(source: Source) -> list[Store]:
    """Return the stores of all datasets of a source, in an order that is the same in both processes."""
    return [store for part in source.parts for store in part.dataset.stores]
