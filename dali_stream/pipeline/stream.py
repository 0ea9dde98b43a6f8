"""Stream of batches from any position of the order, which continues with another decoder if one fails."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from typing import TYPE_CHECKING

from dali_stream.decode.decoder import RouteChange
from dali_stream.decode.route import Route
from dali_stream.errors import DatasetError, DecodeError, MemoryBudgetError, StorageError
from dali_stream.observe.counters import Counters
from dali_stream.observe.tracing import batch_number, begin_batch
from dali_stream.pipeline.aliases import Batch, Graph
from dali_stream.pipeline.batch import closed
from dali_stream.pipeline.config import Config
from dali_stream.pipeline.layout import Layout
from dali_stream.pipeline.planner import MEMORY, Planner
from dali_stream.pipeline.torch_batches import TorchBatches

if TYPE_CHECKING:
    from dali_stream.pipeline.dali_batches import DaliBatches

_log = logging.getLogger("dali_stream")
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
    """Stream of batches from one position of the order, made by a planner and a front end.

    Args:
        layout: Configuration of the loader, with the decoders.
        user: User's function for the graph. None if the user gives none.
        epoch: Epoch of the first batch.
        position: Position in that epoch at which the first batch begins.
        counters: Counters to add to.

    Attributes:
        planner: Planner of the batches.
    """

    def __init__(self, layout: Layout, user: Graph | None, epoch: int, position: int, counters: Counters) -> None:
        config = layout.config
        try:
            self.planner = Planner(layout, epoch, position, counters)
        except MemoryError as error:  # of the slots of the batches in progress
            words = f" ({error})" if str(error) else ""
            raise MemoryBudgetError(
                f"{config.in_progress} batches in progress with batch_size={config.batches.batch_size} need more memory than "
                f"the system provides{words}. Use a smaller prefetch or batch_size, or shorter windows"
            ) from error
        self._batches: TorchBatches | DaliBatches | None = None  # None also after `close`
        # The finalizer ends the threads of a loader that is dropped without being closed.
        self._finalizer = weakref.finalize(self, _close_dropped, self.planner)
        _streams.add(self)
        try:
            self.planner.start()  # first, so that the first batches are decoded while DALI builds its pipeline
            if layout.uses_dali:
                from dali_stream.pipeline.dali_batches import DaliBatches

                self._batches = DaliBatches(layout, self.planner, counters, user)
            else:
                self._batches = TorchBatches(config, self.planner, counters)
        except BaseException:
            self.close()
            raise

    def next(self) -> Batch:
        """Return the next batch.

        Raises:
            RouteChange: If a decoder cannot decode a camera.
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
        self.planner.stop()
        self._finalizer.detach()  # afterwards, since until then only the finalizer may be left to stop the threads
        self.planner.join()
        self._batches = None  # frees the pipeline


def _close_dropped(planner: Planner) -> None:
    """Close the planner of a stream that was garbage collected.

    The garbage collector may run in one of the planner's threads, or in a thread that holds a lock for which they wait. To
    avoid a deadlock, another thread joins them, and this one waits for that thread for a limited time only.
    """
    own = threading.current_thread().name.startswith("dali_stream ")
    closing = threading.Thread(target=planner.close, name="dali_stream: close", daemon=True)
    try:
        closing.start()
    except RuntimeError:  # at the exit of the interpreter, which starts no threads
        planner.close()
    else:
        closing.join(0 if own else _CLOSE_S)


class BatchSource:
    """Batches of a loader from any position. If NVDEC fails to decode a camera, the CPU continues with it.

    Args:
        routes: {camera: decoder}.
        user: User's function for the graph. None if the user gives none.
        decode: Argument of the Loader.
        counters: Counters to add to.

    Attributes:
        routes: {camera: current decoder}.
        decode: See above.
        epochs: Number of whole epochs since the last `stop`. Their decoded frames may be in memory.
    """

    def __init__(self, routes: dict[str, Route], user: Graph | None, decode: str, counters: Counters) -> None:
        self.routes = routes
        self._user, self.decode, self._counters = user, decode, counters
        self._stream: BatchStream | None = None
        self._closed = False
        self._others = set[BatchSource]()  # sources that `batch_at` is using
        self.epochs = 0

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
                stream = BatchStream(Layout(config, self.routes), self._user, epoch, position, self._counters)
                self._stream = stream
                if self._closed:  # by another thread, while the pipeline was built
                    self.stop()
                    raise closed()
            try:
                return stream.next()
            except RouteChange as change:
                if self.decode != "auto":
                    raise DecodeError(
                        f'decode="{self.decode}": {change}. Use decode="auto" to continue with torchcodec'
                    ) from change
                # The pipeline is rebuilt at this position. If the data is broken, torchcodec's error names the sample.
                self.stop()
                self._counters.add(route_changes=1)
                self.routes = self.routes | {key: Route("torchcodec", change.reason) for key in change.cameras}
                _log.warning("Falling back to torchcodec: %s", change)
            except (DatasetError, DecodeError, StorageError) as error:
                # The message says everything. The traceback through the threads and decoders only helps to debug the loader.
                _log.debug("a batch could not be made", exc_info=error)
                raise error.with_traceback(None) from None

    def batch_at(self, config: Config, epoch: int, position: int) -> Batch:
        """Return the batch at any position, which another stream makes. See `next` for arguments and errors.

        The batches in progress, the routes and the counters do not change. `close` ends this method in another thread.
        """
        other, number = BatchSource(self.routes, self._user, self.decode, Counters()), batch_number()
        self._others.add(other)
        try:
            if self._closed:
                raise closed()
            return other.next(config, epoch, position)
        finally:
            other.close()
            self._others.discard(other)
            begin_batch(number)

    @property
    def keeps_all(self) -> bool:
        """Whether all decoded frames fit in memory, so that no epoch after the first decodes any."""
        stream = self._stream
        return stream is not None and stream.planner.keeps_all

    @property
    def layout(self) -> Layout | None:
        """Configuration and decoders of the batches in progress. None without any."""
        stream = self._stream
        return stream.planner.layout if stream else None

    def memory(self) -> dict[str, int]:
        """Return the memory in use in bytes. See `Planner.memory`."""
        return self._stream.planner.memory() if self._stream else dict.fromkeys(MEMORY, 0)

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
