"""Stream of batches from any position of the order, which continues with the CPU if NVDEC fails."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from dataclasses import replace
from typing import TYPE_CHECKING

from dali_stream.cache.buffers import Buffers
from dali_stream.decode.decoder import RouteChange
from dali_stream.decode.route import Route
from dali_stream.errors import DaliStreamError, DatasetError, DecodeError, StorageError
from dali_stream.observe.counters import MEMORY, Counters
from dali_stream.observe.tracing import batch_number, begin_batch
from dali_stream.pipeline.aliases import Batch, Graph
from dali_stream.pipeline.batch import closed
from dali_stream.pipeline.config import Config
from dali_stream.pipeline.layout import Layout
from dali_stream.pipeline.producer_process import ProducerEnded, ProducerProcess, start_process
from dali_stream.pipeline.torch_batches import TorchBatches
from dali_stream.system.child_process import CannotStart, Child

if TYPE_CHECKING:
    from dali_stream.pipeline.dali_batches import DaliBatches
    from dali_stream.pipeline.producer import Producer

_log = logging.getLogger("dali_stream")
_DEATHS = 3  # processes of a Loader that may end one after the other before this is an error
_CLOSE_S = 5.0  # seconds to wait for the threads of a dropped loader, which normally end much sooner
_streams: weakref.WeakSet[BatchStream] = weakref.WeakSet()


def _leave_to_the_parent() -> None:
    """Leave threads and pipelines to the parent of a forked process: the threads do not exist in the child."""
    for stream in list(_streams):
        stream._finalizer.detach()
        if stream._batches is not None:
            stream._batches.abandon()


os.register_at_fork(after_in_child=_leave_to_the_parent)


class BatchStream:
    """Stream of batches from one position of the order, made by a producer and a front end.

    Args:
        layout: Configuration of the loader, with the decoders.
        user: User's function for the graph. None if the user gives none.
        producer: Producer of the batches, which this method starts.
        counters: Counters to add to.

    Attributes:
        layout, producer: See above.
    """

    def __init__(self, layout: Layout, user: Graph | None, producer: Producer | ProducerProcess, counters: Counters) -> None:
        self.layout, self.producer = layout, producer
        self._batches: TorchBatches | DaliBatches | None = None  # None also after `close`
        # The finalizer ends the threads of a loader that is dropped without being closed.
        self._finalizer = weakref.finalize(self, _close_dropped, self.producer)
        _streams.add(self)
        try:
            self.producer.start()  # first, so that the first batches are decoded while DALI builds its pipeline
            if layout.uses_dali:
                from dali_stream.pipeline.dali_batches import DaliBatches

                self._batches = DaliBatches(layout, self.producer, counters, user)
            else:
                self._batches = TorchBatches(layout.config, self.producer, counters)
        except BaseException:
            self.close()
            raise

    def next(self) -> Batch:
        """Return the next batch.

        Raises:
            RouteChange: If torchcodec cannot decode a camera on NVDEC.
            DaliStreamError: If the batch could not be made, or the stream was closed.
        """
        batches = self._batches  # a local reference, since another thread that closes the loader resets the attribute
        if batches is None:
            raise closed()
        return batches.next()

    @property
    def closed(self) -> bool:
        """Whether the stream was closed, by `close` or at the exit of the interpreter."""
        return not self._finalizer.alive

    def close(self) -> None:
        """Stop all threads and wait for them. If Ctrl-C interrupts this method, the next call continues."""
        self.producer.stop()
        self._finalizer.detach()  # afterwards, since until then only the finalizer may be left to stop the threads
        self.producer.join()
        self._batches = None  # frees the pipeline


def _close_dropped(producer: Producer | ProducerProcess) -> None:
    """Close the producer of a stream that was garbage collected.

    The garbage collector may run in one of the producer's threads, or in a thread that holds a lock for which they wait. To
    avoid a deadlock, another thread joins them, and this one waits for that thread for a limited time only.
    """

    def close() -> None:
        producer.stop()
        producer.join()

    own = threading.current_thread().name.startswith("dali_stream ")
    closing = threading.Thread(target=close, name="dali_stream: close", daemon=True)
    try:
        closing.start()
    except RuntimeError:  # at the exit of the interpreter, which starts no threads
        close()
    else:
        closing.join(0 if own else _CLOSE_S)


class BatchSource:
    """Batches of a loader from any position. If torchcodec fails to decode a camera on NVDEC, the CPU continues with it.

    Args:
        routes: {camera: decoder}.
        user: User's function for the graph. None if the user gives none.
        decode: Argument of the Loader. Only with "auto", the CPU continues. Otherwise, the failure is an error.
        counters: Counters to add to.
        own_process: Whether a process of its own makes the batches, see `ProducerProcess`. It is started at once.

    Attributes:
        routes: {camera: current decoder}.
        decode: See above.
        epochs: Number of whole epochs since the last `stop`. Their decoded frames may be in memory.
    """

    def __init__(
        self, routes: dict[str, Route], user: Graph | None, decode: str, counters: Counters, own_process: bool
    ) -> None:
        self.routes = routes
        self._user, self.decode, self._counters = user, decode, counters
        self._stream: BatchStream | None = None
        self._closed = False
        self._others = set[BatchSource]()  # sources that `batch_at` is using
        self.epochs = 0
        self._own_process, self._deaths = own_process, 0  # processes that ended since the last batch
        self._child: Child | None = None  # process for the next stream
        if own_process:
            self._start_process()
        else:
            import dali_stream.pipeline.producer  # noqa: F401  # so that an error of torchcodec comes at once

    def next(self, config: Config, epoch: int, position: int) -> Batch:
        """Return the next batch.

        Args:
            config: Configuration of the loader.
            epoch: Epoch of the batch.
            position: Position at which the batch begins. Epoch and position are used only for the first batch after `stop`.

        Raises:
            DaliStreamError: If the batch could not be made, or the loader was closed.
        """
        while True:
            stream = self._stream  # a local reference, since another thread that closes the loader resets the attribute
            if stream is None:
                layout = Layout(config, self.routes)
                try:
                    producer = self._producer(layout, epoch, position)
                    stream = self._stream = BatchStream(layout, self._user, producer, self._counters)
                except CannotStart as reason:
                    self._stay_in_process(reason)
                    continue
                if self._closed:  # by another thread, while the pipeline was built
                    self.stop()
                    raise closed()
            try:
                batch = stream.next()
                self._deaths = 0
                return batch
            except CannotStart as reason:
                self.stop()
                self._stay_in_process(reason)
            except ProducerEnded as ended:
                self.stop()
                self._deaths += 1
                where = f"batch at position {position} of epoch {epoch}"
                if self._deaths == _DEATHS:
                    self._deaths = 0  # for a caller that tries again
                    raise DaliStreamError(
                        f"The process of the Loader {ended}, {_DEATHS} times in a row before it had made the {where}. After "
                        "SIGKILL, see whether the machine or the cgroup had too little memory (`dmesg`), and give a smaller "
                        "memory_budget. After another signal, a decoder crashed: try the files that are named with "
                        "`dali-stream doctor URI --deep`. in_process=True makes the batches in this process"
                    ) from None
                _log.warning("The process of the Loader %s. Another one continues with the %s", ended, where)
            except RouteChange as change:
                if self.decode != "auto":
                    raise DecodeError(
                        f'decode="{self.decode}": {change}. Use decode="auto" to continue with torchcodec'
                    ) from change
                # The pipeline is rebuilt at this position. If the data is broken, torchcodec's error names the sample.
                self.stop()
                self._counters.add(route_changes=1)
                self.routes = self.routes | {change.camera: Route("torchcodec", change.reason)}
                _log.warning("Falling back to torchcodec: %s", change)
            except (DatasetError, DecodeError, StorageError) as error:
                # The message says everything. The traceback through the threads and decoders only helps to debug the loader.
                _log.debug("a batch could not be made", exc_info=error)
                raise error.with_traceback(None) from None

    def _producer(self, layout: Layout, epoch: int, position: int) -> Producer | ProducerProcess:
        """Return the producer of a stream."""
        if self._own_process and self._child is None:
            self._start_process()
        child, self._child = self._child, None
        if child is not None:
            return ProducerProcess(child, layout, epoch, position, self._counters)
        from dali_stream.pipeline.producer import Producer  # imported on use: it decodes, and torchcodec takes a second

        buffers = Buffers(layout.channels_first, len(layout.cached), layout.kept_buffers, layout.config.gpu)
        return Producer(layout, epoch, position, self._counters, buffers)

    def _start_process(self) -> None:
        try:
            self._child = start_process()
            _log.info("Loader: process %d makes the batches", self._child.number)
        except CannotStart as reason:
            self._stay_in_process(reason)

    def _stay_in_process(self, reason: CannotStart) -> None:
        self._own_process = False
        _log.warning("The Loader makes its batches in this process, since %s", reason)

    def batch_at(self, config: Config, epoch: int, position: int) -> Batch:
        """Return the batch at any position, which another stream makes. See `next` for arguments and errors.

        The batches in progress, the routes and the counters do not change. `close` ends this method in another thread.
        """
        other, number = BatchSource(self.routes, self._user, self.decode, Counters(), own_process=False), batch_number()
        self._others.add(other)
        try:
            if self._closed:
                raise closed()
            # A decode process starts slower than this decodes, and the GPU may have no memory for a second gpu_cache.
            return other.next(replace(config, decode_processes=0, gpu_cache=None), epoch, position)
        finally:
            other.close()
            self._others.discard(other)
            begin_batch(number)

    @property
    def keeps_all(self) -> bool:
        """Whether all decoded frames fit in memory, so that no epoch after the first decodes any."""
        stream = self._stream
        return stream is not None and stream.layout.keeps_all

    @property
    def layout(self) -> Layout | None:
        """Configuration and decoders of the batches in progress. None without any."""
        stream = self._stream
        return stream.layout if stream else None

    def memory(self) -> dict[str, int]:
        """Return the memory in use in bytes. See `Planner.memory`."""
        stream = self._stream  # a local reference, since another thread may reset the attribute
        return stream.producer.memory() if stream else dict.fromkeys(MEMORY, 0)

    @property
    def ended(self) -> bool:
        """Whether the batches in progress were closed at the exit of the interpreter."""
        return self._stream is not None and self._stream.closed

    def stop(self) -> None:
        """Drop the batches in progress."""
        self.epochs = 0
        stream = self._stream
        if stream is not None:
            stream.close()
            if self._stream is stream:  # another thread may have stopped it too, and started another stream
                self._stream = None

    def close(self) -> None:
        """Drop the batches in progress, and refuse to make others."""
        self._closed = True
        for other in list(self._others):
            other.close()
        self.stop()
        if self._child is not None:
            self._child.close()
