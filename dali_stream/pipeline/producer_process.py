"""Producer of finished batches in a process of its own, so that its work does not take the interpreter from training."""

from __future__ import annotations

import os
import pickle

import numpy as np
import torch

from dali_stream.cache.shared_buffers import BorrowedBuffers
from dali_stream.observe.counters import MEMORY, Counters
from dali_stream.observe.tracing import add_spans, begin_batch, is_recorded
from dali_stream.observe.waiting import Board
from dali_stream.pipeline.batch import FinishedBatch, closed
from dali_stream.pipeline.layout import Layout
from dali_stream.pipeline.messages import Finished, Request, Start, stores
from dali_stream.storage import RemoteStore
from dali_stream.system.child_process import CannotStart, Child, ChildEnded
from dali_stream.system.shared_memory import SharedBlock, new_block
from dali_stream.system.workers import Workers

FINISHED_AHEAD = 1  # number of batches that are finished before they are requested


class ProducerEnded(Exception):
    """The process has ended, and with it the batches in progress. The message says how, and what it was decoding."""


def start_process() -> Child:
    """Start a process for a `ProducerProcess`. It imports its modules, and waits. Raises CannotStart if this is impossible."""
    return Child("dali_stream.pipeline.producer_main:main", "the process of the Loader")


class ProducerProcess:
    """`Producer` in another process, which plans, reads, decodes and finishes batches. They arrive in shared memory.

    Only finished batches, and what is counted and logged, cross. The position stays here, so if the process ends, another one
    can continue.

    Args:
        child: Process, see `start_process`. It ends with this object.
        layout, epoch, position, counters: See `Planner`.

    Attributes:
        starter: Thread that starts the runs of a DALI graph.
    """

    def __init__(self, child: Child, layout: Layout, epoch: int, position: int, counters: Counters) -> None:
        self._child, self._layout, self._counters = child, layout, counters
        self._begin, self._stores = (epoch, position), stores(layout.config.source)
        self._buffers, self._memory = BorrowedBuffers(layout.config.gpu), dict.fromkeys(MEMORY, 0)
        self._stopping = False
        self.starter = Workers("dali_stream graph", 1, counters.copying)

    def start(self) -> None:
        """Begin to plan and decode.

        Raises:
            CannotStart: If the configuration cannot be sent.
        """
        config = self._layout.config
        try:
            layout = pickle.dumps((config, dict(self._layout.routes)), pickle.HIGHEST_PROTOCOL)
        except Exception as error:  # of objects of the user, such as a client in storage_options
            raise CannotStart(f"the dataset cannot be pickled ({type(error).__name__}: {error})") from error
        self._child.send_log_levels()  # they may have changed since the process was started
        descriptor, size = new_block(Board.SIZE)
        try:
            self._board = Board(SharedBlock(descriptor, size).array((Board.SIZE,), np.uint8))
            cores = os.sched_getaffinity(0)
            self._child.send(Start(layout, *self._begin, torch.get_num_threads(), cores), [descriptor])
        finally:
            os.close(descriptor)
        for _ in range(FINISHED_AHEAD):
            self._request()

    def _request(self) -> None:
        self._child.send(Request(*self._buffers.returned(), is_recorded()))

    def next(self) -> FinishedBatch:
        """Return the next batch, with its frames.

        Raises:
            DaliStreamError: If the batch could not be made, or the loader was closed.
            ProducerEnded: If the process has ended.
            CannotStart: If the process cannot do this work.
        """
        self._request()
        try:
            message, descriptors = self._child.receive()
        except ChildEnded as ended:
            if self._stopping:
                raise closed() from None
            doing = "; ".join(self._board.read())
            raise ProducerEnded(f"{ended}{f' (it {doing})' if doing else ''}") from None
        assert isinstance(message, Finished)
        batch, arrays = message.batch, self._buffers.arrays(message.lent, descriptors)
        batch.frames = {key: arrays.pop(key) for key in message.frames}
        batch.columns = arrays
        self._count(message)
        begin_batch(batch.number)
        return batch

    def _count(self, message: Finished) -> None:
        self._counters.add(**message.counters)
        for number, growth in message.traffic.items():
            self._stores[number].traffic.add(**growth)
        for number, versions in message.versions.items():
            store = self._stores[number]
            assert isinstance(store, RemoteStore)
            store.pin(versions)
        for index in message.indices:
            self._layout.config.indices.count(*index)
        self._memory = message.memory
        add_spans(message.spans)

    def memory(self) -> dict[str, int]:
        """Return the memory in use in bytes when the last batch was finished. See `Planner.memory`."""
        return self._memory

    def stop(self) -> None:
        """Let the process end, without waiting for it."""
        self._stopping = True
        self._child.end()
        self.starter.stop()

    def join(self) -> None:
        """Wait for the end of the process, after `stop`."""
        self._child.close()
        self.starter.join()
