"""A batch producer and the DALI pipeline over it, from one position of the order until it is closed."""

from __future__ import annotations

import ctypes
import os
import weakref
from typing import Any

from dali_stream.counters import Counters
from dali_stream.decode import dali
from dali_stream.decode.decoder import RouteChange
from dali_stream.decode.route import Route
from dali_stream.errors import DaliStreamError, DecodeError
from dali_stream.pipeline import graph
from dali_stream.pipeline.config import Config
from dali_stream.pipeline.iterator import Iterator
from dali_stream.pipeline.producer import BatchProducer, closed

Batch = dict[str, Any]
_TRIED = 8  # clips at a time in the search for one that failed to decode: the broken pipeline still holds memory
_streams: weakref.WeakSet[BatchStream] = weakref.WeakSet()


def _leave_to_the_parent() -> None:
    """In a forked process: DALI crashes where a pipeline of the parent is freed, at exit too, so it is never freed."""
    for stream in list(_streams):
        stream._finalizer.detach()
        for pipeline in () if stream._iterator is None else stream._iterator._pipes:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(pipeline._pipe))
            pipeline._pipe = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_the_parent)


class BatchStream:
    """A batch producer and the DALI pipeline over it, from one position of the order until it is closed."""

    def __init__(
        self, config: Config, routes: dict[str, Route], user: graph.Graph | None, epoch: int, position: int, counters: Counters
    ) -> None:
        self._routes, self._gpu, self._counters = routes, config.gpu, counters
        self.producer = BatchProducer(config, routes, epoch, position, counters)
        # A loader that is dropped without being closed leaves no threads behind either.
        self._finalizer = weakref.finalize(self, self.producer.close)
        self._iterator: Any = None
        _streams.add(self)
        try:
            pipeline, names = graph.build(config, self.producer, routes, user)
            self._iterator = Iterator(pipeline, names, self.producer.ready)
        except BaseException:
            self._finalizer()
            raise

    def next(self) -> Batch:
        """The next batch, with frames channels first, and with what went past DALI."""
        iterator = self._iterator
        if iterator is None:
            raise closed()
        try:
            with self._counters.timed("graph_s"):  # less what the producer takes, which is asked for a batch inside
                [batch] = next(iterator)
        except RuntimeError as error:
            if "error in pipeline" not in str(error):  # of the producer, not of a DALI operator
                raise
            if "fn.decoders.video" in str(error):
                raise self._route_change(dali.explanation(error)) from error
            raise DaliStreamError(
                f"an operator of the DALI pipeline failed: {dali.explanation(error)}; see the error it was raised from"
            ) from error
        for key, layout in iterator.layouts.items():
            if layout.endswith("HWC"):
                batch[key] = batch[key].movedim(-1, -3)
        text, frames = self.producer.delivered.popleft()
        return text | batch | frames

    def _route_change(self, said: str) -> RouteChange:
        """Which cameras leave DALI. Its error names none, so each one's clips of the last batches are tried by themselves."""
        failed = {}
        for camera, clips in self.producer.clips().items():
            try:
                for i in range(0, len(clips), _TRIED):
                    dali.decode([(clip.clip, clip.frames) for clip in clips[i : i + _TRIED]], self._gpu, 1)
            except DecodeError as error:
                failed[camera] = str(error)
        on_dali = [camera for camera, route in self._routes.items() if route.decoder == "dali"]
        return RouteChange(list(failed) or on_dali, next(iter(failed.values()), f"DALI's video decoder failed: {said}"))

    def close(self) -> None:
        self._finalizer()
        self._iterator = None
