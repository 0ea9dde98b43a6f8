"""Main program of a Loader's process: it finishes the batches that the Loader requests."""

from __future__ import annotations

import os
import pickle
import threading
from dataclasses import replace

import numpy as np
import torch

from dali_stream.cache.shared_buffers import Lent, LentBuffers
from dali_stream.observe.counters import Counters
from dali_stream.observe.tracing import take_spans
from dali_stream.observe.waiting import Board
from dali_stream.pipeline.batch import FinishedBatch
from dali_stream.pipeline.layout import Layout
from dali_stream.pipeline.messages import Finished, Start, stores
from dali_stream.pipeline.producer import Producer
from dali_stream.storage import RemoteStore
from dali_stream.system.child_process import CannotStart, Connection, send_error
from dali_stream.system.shared_memory import SharedBlock

_CLOSE_S = 3.0  # time in which threads should end, in seconds


def main(connection: Connection) -> None:
    """Serve one `ProducerProcess`. The main thread waits for its end, and another thread carries out its requests."""
    start, [descriptor] = connection.receive()
    Board(SharedBlock(descriptor, Board.SIZE).array((Board.SIZE,), np.uint8)).use()
    os.close(descriptor)
    os.sched_setaffinity(0, start.cores)  # of this thread, and of those that it starts
    torch.set_num_threads(start.threads)
    server = _Server(connection, start)
    threading.Thread(target=server.run, name="dali_stream batches", daemon=True).start()
    connection.wait_for_end()
    server.close()


class _Server:
    """Finished batches of a producer, as messages.

    Args:
        connection: Connection to the Loader.
        start: First message of the Loader.
    """

    def __init__(self, connection: Connection, start: Start) -> None:
        try:
            config, routes = pickle.loads(start.layout)
        except Exception as error:  # of a class that only the program of the user has
            raise CannotStart(f"the dataset cannot be unpickled there ({type(error).__name__}: {error})") from error
        layout = Layout(config, routes)
        self._connection, self._config = connection, config
        self._counters = Counters()
        numbered = enumerate(stores(config.source))
        self._stores = {id(store): (number, store, store.traffic.counts()) for number, store in numbered}
        config.indices.new = []
        for _, store, _ in self._stores.values():
            if isinstance(store, RemoteStore):
                store.note_versions()
        self._buffers = LentBuffers(layout.channels_first, len(layout.cached), layout.kept_buffers)
        self._producer = Producer(layout, start.epoch, start.position, self._counters, self._buffers)

    def close(self) -> None:
        """End all threads, so that no file stays unfinished, but wait for at most `_CLOSE_S`."""
        threading.Timer(_CLOSE_S, os._exit, [0]).start()
        self._producer.stop()
        self._producer.join()

    def run(self) -> None:
        """Carry out the requests, until a batch cannot be made."""
        try:
            self._producer.start()
            while True:
                request, _ = self._connection.receive()
                self._buffers.take_back(request.returned, request.forked)
                with self._counters.copying():
                    batch = self._producer.next()
                    lent, blocks = self._buffers.lend(batch.columns | batch.frames)
                self._connection.send(
                    self._finished(batch, lent, request.is_traced),
                    [block.descriptor for block in blocks if block.descriptor is not None],
                )
                for block in blocks:
                    block.close_descriptor()
        except EOFError:  # the Loader has ended, which the main thread notices as well
            pass
        except BaseException as error:
            send_error(self._connection, error)

    def _finished(self, batch: FinishedBatch, lent: Lent, is_traced: bool) -> Finished:
        traffic, versions = {}, {}
        for key, (number, store, before) in self._stores.items():
            now = store.traffic.counts()
            if now != before:
                traffic[number] = {name: now[name] - before[name] for name in now}
                self._stores[key] = number, store, now
            if isinstance(store, RemoteStore) and (read := store.take_versions()):
                versions[number] = read
        new = self._config.indices.new or []
        return Finished(
            replace(batch, columns={}, frames={}),
            list(batch.frames),
            lent,
            self._counters.take_growth(),
            traffic,
            versions,
            [new.pop() for _ in range(len(new))],
            self._producer.memory(),
            take_spans(is_traced),
        )
