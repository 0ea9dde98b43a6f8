"""Front end for GPUs and for users' graphs: a DALIGenericIterator whose external source returns the planner's batches."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from dali_stream.decode import dali
from dali_stream.decode.audit import mismatch
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
from dali_stream.pipeline.producer_process import ProducerProcess

if TYPE_CHECKING:
    from dali_stream.pipeline.producer import Producer


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
        self._config, self._counters = config, counters
        self._external = ExternalSource(layout, producer)
        pipeline, names = graph.build(layout, self._external, user)
        self._iterator = Iterator(pipeline, names, producer.starter, self._external.prepare, turns(config.gpu))

    def next(self) -> dict[str, Any]:
        """Return the next batch, with frames channels first.

        Raises:
            DecodeError: If DALI cannot decode a clip, or if an audit finds a wrong frame.
            DaliStreamError: If the batch could not be made.
        """
        try:
            with self._counters.timed("graph_s"):
                began = time.perf_counter()
                [batch] = next(self._iterator)
                finished = self._external.batches.popleft()
                begin_batch(finished.number)
        except PipelineError as error:
            self._check_clips()
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
        """Compare samples with the frames that FFmpeg decodes. Raises DecodeError if DALI delivered a different frame."""
        for camera in self._external.on_dali:
            # A user's function may change the frames, so the decoded frames are additional outputs of the graph.
            frames: Any = batch.pop(graph.AUDITED + camera) if self._config.audits_apart else batch.get(camera)
            for sample, clip in enumerate(finished.frames[camera]):
                if clip.expected is None:
                    continue
                window = frames[sample].unsqueeze(0) if self._config.squeezed(camera) else frames[sample]
                levels = window.cpu().float().numpy() * (255 if self._config.image_dtype == "float32" else 1)
                with self._counters.timed("starved_s"):
                    steps, different = mismatch(levels, clip.expected)
                if different:
                    raise dali.refused(self._config.source, camera, clip.request, different, steps)

    def _check_clips(self) -> None:
        """Decode the clips of all batches in the pipeline again, since DALI's error names neither camera nor clip.

        Raises:
            DecodeError: If DALI cannot decode one of them.
        """
        for batch in self._external.batches:
            for camera in self._external.on_dali:
                for clip in batch.frames[camera]:  # one at a time, since the failed pipeline still uses memory
                    try:
                        dali.decode([(clip.clip, clip.frames)], self._config.gpu, 1)
                    except DecodeError as error:
                        raise dali.refused(self._config.source, camera, clip.request, error) from error

    def abandon(self) -> None:
        """Leave the pipeline to the parent of a forked process."""
        abandon(self._iterator)
