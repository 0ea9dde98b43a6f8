"""External source of the DALI graph: finished batches, as the arrays that DALI reads."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from dali_stream.decode import dali
from dali_stream.pipeline.batch import FinishedBatch, with_time_axis
from dali_stream.pipeline.layout import Layout
from dali_stream.pipeline.producer_process import ProducerProcess

if TYPE_CHECKING:
    from dali_stream.pipeline.producer import Producer


class ExternalSource:
    """External source of the DALI graph. DALI calls its methods in the thread that starts a run, once per run, after `prepare`.

    Args:
        layout: Configuration of the loader, with the decoders.
        producer: Producer of the batches, with frames as uint8.

    Attributes:
        batches: Batches from `prepare` that `DaliBatches` has not returned yet, at most three. The first one is returned next.
            The last one is the input of the next run.
        on_dali: Cameras that DALI decodes.
    """

    def __init__(self, layout: Layout, producer: Producer | ProducerProcess) -> None:
        self._config, self._producer = layout.config, producer
        self._on_gpu, self._in_memory = layout.in_gpu_cache, layout.in_memory
        self.on_dali = layout.on_dali
        self.batches: deque[FinishedBatch] = deque()

    def prepare(self) -> None:
        """Wait for the next batch, which the methods below return to DALI's next run.

        Raises:
            DaliStreamError: If the batch could not be made. No batch follows.
        """
        self.batches.append(self._producer.next())

    def columns(self) -> tuple[Any, ...]:
        """Return the first part of the batch: the arrays of `Config.columns`, and the clips of cameras on the DALI route.

        Each of these cameras has a list of clips, a list of the frame indices in each clip and, if it has a time axis, a list
        with the order of the steps for each sample. This method is an external source of the graph.
        """
        batch = self.batches[-1]
        arrays: list[Any] = [batch.columns[key] for key in self._config.columns()]
        for key in self.on_dali:
            clips, places, orders, *_ = (list(part) for part in zip(*batch.frames[key], strict=True))
            arrays += [clips, places] if self._config.squeezed(key) else [clips, places, orders]
        return tuple(arrays)

    def frames(self) -> tuple[Any, ...]:
        """Return the decoded frames of the same batch, uint8 of shape (B, H, W, C) or (B, T, H, W, C) per camera.

        Those of depth cameras are distances, float32. A GPU reads page-locked memory without another copy.

        This method is an external source of the graph, which reads the memory of the arrays until the run has ended. `batches`
        refers to them as long. The memory is reused once nothing refers to it.
        """
        arrays, gpu = self._frames(self._in_memory), self._config.gpu
        return arrays if gpu is None else tuple(dali.as_input(array, gpu) for array in arrays)

    def gpu_frames(self) -> tuple[Any, ...]:
        """Return the frames of the cameras whose frames are in the GPU's memory, as tensors. See `frames`."""
        return self._frames(self._on_gpu)

    def _frames(self, cameras: list[str]) -> tuple[Any, ...]:
        return tuple(with_time_axis(self._config, key, self.batches[-1].frames[key]) for key in cameras)
