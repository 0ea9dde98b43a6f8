"""Batches out of DALI: from one position of the order, and on from there when a decoder changes."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from typing import Any

from dali_stream import process
from dali_stream.counters import Counters
from dali_stream.decode import dali
from dali_stream.decode.decoder import RouteChange
from dali_stream.decode.route import Route
from dali_stream.errors import DaliStreamError, DatasetError, DecodeError, StorageError
from dali_stream.memory_limit import fits
from dali_stream.pipeline import graph
from dali_stream.pipeline.bottleneck import Setup
from dali_stream.pipeline.config import Config
from dali_stream.pipeline.iterator import Iterator, PipelineError, abandon
from dali_stream.pipeline.producer import MEMORY, BatchProducer, closed
from dali_stream.schedule.budget import divide, frames_budget, reads_budget

Batch = dict[str, Any]
"""{key: tensor, or list of str for text}, with the batch as first dimension."""
_log = logging.getLogger("dali_stream")
_CLOSE_S = 5.0  # much longer than threads need to end
_TRIED = 8  # clips at a time in the search for one that failed to decode: the broken pipeline still holds memory
_streams: weakref.WeakSet[BatchStream] = weakref.WeakSet()


def _leave_to_the_parent() -> None:
    """Leave threads and pipelines to the parent of a forked process."""
    for stream in list(_streams):
        stream._finalizer.detach()
        if stream._iterator is not None:
            abandon(stream._iterator)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_the_parent)


class BatchStream:
    """A batch producer and the DALI pipeline over it, from one position of the order until it is closed."""

    def __init__(
        self, config: Config, routes: dict[str, Route], user: graph.Graph | None, epoch: int, position: int, counters: Counters
    ) -> None:
        self._routes, self._gpu, self._counters, self._user = routes, config.gpu, counters, user
        self.producer = BatchProducer(config, routes, epoch, position, counters)
        # A loader that is dropped without being closed leaves no threads behind either.
        self._finalizer = weakref.finalize(self, _close_dropped, self.producer)
        self._iterator: Any = None
        _streams.add(self)
        try:
            self.producer.start()
            pipeline, names = graph.build(config, self.producer, routes, user)
            self._iterator = Iterator(pipeline, names, self.producer.ready)
        except BaseException:
            self._close_producer()
            raise

    def next(self) -> Batch:
        """The next batch, with frames channels first, and with what went past DALI."""
        iterator = self._iterator
        if iterator is None:
            raise closed()
        try:
            with self._counters.timed("graph_s"):  # less what the producer takes, which is asked for a batch inside
                [batch] = next(iterator)
        except PipelineError as error:
            if (failure := self.producer.failure) is not None:
                raise failure from None
            if change := self._route_change(error.explanation):
                raise change from error.__cause__
            raise DaliStreamError(
                f"an operator of the DALI pipeline failed: {error.explanation}; see the error it was raised from"
            ) from error.__cause__
        for key, layout in iterator.layouts.items():
            if layout.endswith("HWC"):
                batch[key] = batch[key].movedim(-1, -3)
        text, frames = self.producer.delivered.popleft()
        return text | batch | frames

    def _route_change(self, explanation: str) -> RouteChange | None:
        """Return the cameras that DALI cannot decode; None if another operator failed.

        DALI's error names neither, so each camera's clips of the last batches are tried by themselves. If all of them decode
        now, the decoder is still the cause, unless an operator of the user's graph can be.
        """
        failed = {}
        for camera, clips in self.producer.clips().items():
            try:
                for i in range(0, len(clips), _TRIED):
                    dali.decode([(clip.clip, clip.frames) for clip in clips[i : i + _TRIED]], self._gpu, 1)
            except DecodeError as error:
                failed[camera] = str(error)
        on_dali = [camera for camera, route in self._routes.items() if route.decoder == "dali"]
        if not failed and (self._user is not None or not on_dali):
            return None
        return RouteChange(list(failed) or on_dali, next(iter(failed.values()), f"DALI's video decoder failed: {explanation}"))

    @property
    def closed(self) -> bool:
        """Whether it was closed, by `close` or by the exit of the interpreter."""
        return not self._finalizer.alive

    def close(self) -> None:
        self._close_producer()
        self._iterator = None

    def _close_producer(self) -> None:
        if self._finalizer.detach():
            self.producer.close()


def _close_dropped(producer: BatchProducer) -> None:
    """Close the producer of a stream that was garbage collected.

    The collector may run in one of the producer's threads, or in a thread that holds a lock for which they wait. So another
    thread joins them, and this one waits for it for a while only.
    """
    own = threading.current_thread().name.startswith("dali_stream ")
    closing = threading.Thread(target=producer.close, name="dali_stream: close", daemon=True)
    try:
        closing.start()
    except RuntimeError:  # at the exit of the interpreter, which starts no threads
        producer.close()
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
        epochs: Number of whole epochs since `stop`, whose decoded frames may be in memory.
    """

    def __init__(self, routes: dict[str, Route], user: graph.Graph | None, decode: str, counters: Counters) -> None:
        self.routes = routes
        self._user, self._decode, self._counters = user, decode, counters
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
                if self._decode == "dali":
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
        return stream is not None and stream.producer.keeps_all

    def setup(self, config: Config, normalize: bool, warm: bool) -> Setup:
        """What `bottleneck.find` has to know of the loader, whose batches come after a whole epoch if `warm`."""
        sizes = config.sizes([key for key in config.dataset.cameras if self.routes[key].decoder == "torchcodec"])
        parts, enough = divide(config.memory_budget, sizes), frames_budget(sizes)
        stream = self._stream
        advice = stream.producer.advice() if stream else None
        frames = enough if sizes.frame_bytes > 0 and config.memory_budget < enough else None
        return Setup(
            num_threads=config.num_threads,
            cores=process.cores(),
            gpu=config.gpu is not None,
            remote=config.dataset.data_store.remote,
            cached=config.dataset.cache_dir is not None,
            decode=self._decode,
            videos={key: self.routes[key].decoder for key in config.dataset.videos},
            image_size=config.image_size,
            image_dtype=config.image_dtype,
            normalize=normalize,
            dali_graph=config.augments,
            warm=warm,
            keeps_all=self.keeps_all,
            frames_budget=frames if fits(frames) else None,
            reads_budget=reads if fits(reads := reads_budget(parts, sizes)) else None,
            advice=advice if advice and fits(advice[0]) else None,
            block_bytes=parts.block,
        )

    def memory(self) -> dict[str, int]:
        """Bytes of what is kept in memory, as `BatchProducer.memory`."""
        return self._stream.producer.memory() if self._stream else dict.fromkeys(MEMORY, 0)

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
