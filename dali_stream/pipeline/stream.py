"""Batches from one position of the order, and on from there when a decoder changes."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from typing import TYPE_CHECKING, Any

from dali_stream.counters import Counters
from dali_stream.decode.decoder import RouteChange
from dali_stream.decode.route import Route
from dali_stream.errors import DatasetError, DecodeError, StorageError
from dali_stream.pipeline.batches import closed
from dali_stream.pipeline.config import Config
from dali_stream.pipeline.planner import MEMORY, Planner
from dali_stream.pipeline.torch_batches import TorchBatches

if TYPE_CHECKING:
    from dali_stream.pipeline.dali_batches import DaliBatches
    from dali_stream.pipeline.graph import Graph

Batch = dict[str, Any]
"""{key: tensor, or list of str for text}, with the batch as first dimension."""
_log = logging.getLogger("dali_stream")
_CLOSE_S = 5.0  # much longer than threads need to end
_streams: weakref.WeakSet[BatchStream] = weakref.WeakSet()


def _leave_to_the_parent() -> None:
    """Leave threads and pipelines to the parent of a forked process."""
    for stream in list(_streams):
        stream._finalizer.detach()
        if stream._dali is not None:
            stream._dali.abandon()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_the_parent)


class BatchStream:
    """A planner and a front end over it, from one position of the order until it is closed."""

    def __init__(
        self, config: Config, routes: dict[str, Route], user: Graph | None, epoch: int, position: int, counters: Counters
    ) -> None:
        self.planner = Planner(config, routes, epoch, position, counters)
        self._dali: DaliBatches | None = None
        self._batches: TorchBatches | DaliBatches
        if config.uses_dali(config.on_cpu(routes)):
            from dali_stream.pipeline.dali_batches import DaliBatches

            self._batches = self._dali = DaliBatches(config, self.planner, counters, routes, user)
        else:
            self._batches = TorchBatches(config, self.planner, counters)
        # A loader that is dropped without being closed leaves no threads behind either.
        self._finalizer = weakref.finalize(self, _close_dropped, self.planner)
        _streams.add(self)
        try:
            self.planner.start()
            if self._dali is not None:
                self._dali.build()
        except BaseException:
            self.close()
            raise

    def next(self) -> Batch:
        """Return the next batch. Raises RouteChange if DALI cannot decode a camera, and DaliStreamError for other errors."""
        return self._batches.next()

    @property
    def closed(self) -> bool:
        """Whether it was closed, by `close` or by the exit of the interpreter."""
        return not self._finalizer.alive

    def close(self) -> None:
        """Stop all threads and wait for them."""
        if self._finalizer.detach():
            self.planner.close()
        if self._dali is not None:
            self._dali.close()


def _close_dropped(planner: Planner) -> None:
    """Close the planner of a stream that was garbage collected.

    The collector may run in one of the planner's threads, or in a thread that holds a lock for which they wait. So another
    thread joins them, and this one waits for it for a while only.
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
    """The batches of a loader from any position. Where DALI cannot continue to decode a camera, torchcodec does.

    Args:
        routes: the decoder of each camera.
        user: the user's function for the graph.
        decode: the argument of the Loader.
        counters: what to add to.

    Attributes:
        routes: as they are now.
        decode: See above.
        epochs: Number of whole epochs since `stop`, whose decoded frames may be in memory.
    """

    def __init__(self, routes: dict[str, Route], user: Graph | None, decode: str, counters: Counters) -> None:
        self.routes = routes
        self._user, self.decode, self._counters = user, decode, counters
        self._stream: BatchStream | None = None
        self._closed = False
        self.epochs = 0

    def next(self, config: Config, epoch: int, position: int) -> Batch:
        """The batch after the last one, or, after `stop`, the one at a position."""
        while True:
            stream = self._stream  # another thread that closes the loader takes it away from here
            if stream is None:
                stream = BatchStream(config, self.routes, self._user, epoch, position, self._counters)
                self._stream = stream
                if self._closed:  # by another thread, while the pipeline was built
                    self.stop()
                    raise closed()
            try:
                return stream.next()
            except RouteChange as change:
                if self.decode == "dali":
                    raise DecodeError(f'decode="dali": {change}; decode="auto" continues with torchcodec') from change
                # The pipeline is rebuilt at this very position. Where the data is at fault, torchcodec names the sample.
                self.stop()
                self._counters.add(route_changes=1)
                self.routes = self.routes | {key: Route("torchcodec", change.reason) for key in change.cameras}
                _log.warning("Falling back to torchcodec: %s", change)
            except (DatasetError, DecodeError, StorageError) as error:
                # Its message says all; what DALI and the threads add is for whoever debugs the loader.
                _log.debug("a batch could not be made", exc_info=error)
                raise error.with_traceback(None) from None

    @property
    def keeps_all(self) -> bool:
        """Whether all decoded frames fit in memory, so that no epoch after the first decodes any."""
        stream = self._stream
        return stream is not None and stream.planner.keeps_all

    def advice(self) -> tuple[int, float, float] | None:
        """See `Planner.advice`."""
        return self._stream.planner.advice() if self._stream else None

    def memory(self) -> dict[str, int]:
        """Bytes of what is kept in memory, as `Planner.memory`."""
        return self._stream.planner.memory() if self._stream else dict.fromkeys(MEMORY, 0)

    @property
    def ended(self) -> bool:
        """Whether the exit of the interpreter has ended the batches in progress."""
        return self._stream is not None and self._stream.closed

    def stop(self) -> None:
        """Drop the batches in progress."""
        self.epochs = 0
        if self._stream is not None:
            stream, self._stream = self._stream, None
            stream.close()

    def close(self) -> None:
        """As `stop`, for good."""
        self._closed = True
        self.stop()
