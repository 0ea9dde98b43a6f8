"""Front end for GPUs and for users' graphs: a DALIGenericIterator whose external source returns the planner's batches."""

from __future__ import annotations

import time
from typing import Any

from dali_stream.decode import dali
from dali_stream.decode.decoder import RouteChange
from dali_stream.decode.turns import turns
from dali_stream.errors import DaliStreamError, DecodeError
from dali_stream.observe.counters import Counters
from dali_stream.observe.tracing import begin_batch
from dali_stream.pipeline import graph
from dali_stream.pipeline.aliases import Graph
from dali_stream.pipeline.batch import FinishedBatch, count_delivered
from dali_stream.pipeline.dali_iterator import Iterator, PipelineError, abandon
from dali_stream.pipeline.external_source import ExternalSource
from dali_stream.pipeline.layout import Layout
from dali_stream.pipeline.producer import Producer
from dali_stream.pipeline.producer_process import ProducerProcess

_TRIED = 8  # number of clips decoded at a time to find a broken one: few, since the failed pipeline still uses memory


class DaliBatches:
    """Batches that a DALI graph makes. On the DALI route, the graph also decodes.

    The pipeline is built when an instance is created, and freed with it.

    Args:
        layout: Configuration of the loader, with the decoders.
        producer: Producer of the batches.
        counters: Counters to add to.
        user: User's function for the graph. None if the user gives none.

    Raises:
        ValueError: If the user's function does not return a dict of DataNodes.
        DaliStreamError: If DALI cannot build the graph.
    """

    def __init__(self, layout: Layout, producer: Producer | ProducerProcess, counters: Counters, user: Graph | None) -> None:
        config = layout.config
        self._config, self._counters, self._user = config, counters, user
        self._external = ExternalSource(layout, producer)
        pipeline, names = graph.build(layout, self._external, user)
        self._iterator = Iterator(pipeline, names, producer.starter, self._external.prepare, turns(config.gpu))

    def next(self) -> dict[str, Any]:
        """Return the next batch, with frames channels first.

        Raises:
            RouteChange: If DALI cannot decode a camera.
            DaliStreamError: If the batch could not be made.
        """
        try:
            with self._counters.timed("graph_s"):
                began = time.perf_counter()
                [batch] = next(self._iterator)
                finished = self._external.batches.popleft()
                begin_batch(finished.number)
        except PipelineError as error:
            if change := self._route_change(error.explanation):
                raise change from error.__cause__
            raise DaliStreamError(
                f"An operator of the DALI pipeline failed: {error.explanation}. See the error that caused this one"
            ) from error.__cause__
        self._audit(finished, batch)
        for key, layout in self._iterator.layouts.items():
            if key in batch and layout.endswith("HWC"):
                frames = batch[key].movedim(-1, -3)
                batch[key] = frames.contiguous() if self._config.memory_format == "contiguous" else frames
        count_delivered(finished, began, self._config, self._counters)
        return finished.texts | batch  # DALI has no strings

    def _audit(self, finished: FinishedBatch, batch: dict[str, Any]) -> None:
        """Compare samples with the frames that FFmpeg decodes. Raises RouteChange if DALI delivered a different frame."""
        for camera in self._external.on_dali:
            # A user's function may change the frames, so the decoded frames are additional outputs of the graph.
            frames: Any = batch.pop(graph.AUDITED + camera) if self._config.audits_apart else batch.get(camera)
            audits = ((sample, clip.audit) for sample, clip in enumerate(finished.frames[camera]) if clip.audit)
            for sample, audit in audits:
                window = frames[sample].unsqueeze(0) if self._config.squeezed(camera) else frames[sample]
                levels = window.cpu().float().numpy() * (255 if self._config.image_dtype == "float32" else 1)
                with self._counters.timed("starved_s"):
                    different = audit.mismatch(levels)
                if different:
                    raise RouteChange([camera], different)

    def _route_change(self, explanation: str) -> RouteChange | None:
        """Return the cameras that DALI cannot decode. None if another operator failed.

        DALI's error names neither camera nor clip, so the clips of all batches in the pipeline are decoded again, camera by
        camera. If all of them can be decoded, the decoder is still considered the cause, unless the user gives a function for
        the graph: then one of its operators may have failed.
        """
        failed, on_dali = {}, self._external.on_dali
        for camera in on_dali:
            clips = [clip for batch in self._external.batches for clip in batch.frames[camera]]
            try:
                for i in range(0, len(clips), _TRIED):
                    dali.decode([(clip.clip, clip.frames) for clip in clips[i : i + _TRIED]], self._config.gpu, 1)
            except DecodeError as error:
                failed[camera] = str(error)
        if not failed and (self._user is not None or not on_dali):
            return None
        reason = next(iter(failed.values()), f"DALI's video decoder failed: {explanation}")
        return RouteChange(list(failed) or on_dali, reason)

    def abandon(self) -> None:
        """Leave the pipeline to the parent of a forked process."""
        abandon(self._iterator)
