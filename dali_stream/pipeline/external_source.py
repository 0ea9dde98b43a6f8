"""External source of the DALI graph: finished batches, as the arrays that DALI reads."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy.typing as npt

from dali_stream.decode.audit import Audit
from dali_stream.decode.dali import Packed
from dali_stream.decode.route import TORCHCODEC_CUDA, Route
from dali_stream.pipeline.batches import PlannedBatch, Texts, with_time_axis
from dali_stream.pipeline.config import Config
from dali_stream.pipeline.finisher import Finisher

Array = npt.NDArray[Any]


class ExternalSource:
    """External source of the DALI graph. DALI calls its methods in the thread of the caller, once per run, after `prepare`.

    Args:
        config: Configuration of the loader.
        finisher: Finisher of the planner's batches, with frames as uint8.
        routes: {camera: decoder}.

    Attributes:
        texts: Text of the batches in the DALI pipeline, since DALI has no strings. The first entry belongs to the batch that
            DALI returns next.
        audits: {camera: {sample: audit of its frames}} of the same batches.
    """

    def __init__(self, config: Config, finisher: Finisher, routes: Mapping[str, Route]) -> None:
        self._config, self._finisher, self._on_cpu = config, finisher, config.on_cpu(routes)
        self._on_dali = [key for key in config.dataset.cameras if routes[key].decoder == "dali"]
        self._on_cuda = [key for key in config.dataset.cameras if routes[key].decoder == TORCHCODEC_CUDA]
        self._current: PlannedBatch
        self._clips: deque[dict[str, list[Packed]]] = deque(maxlen=2)  # of the batches that a failed run may concern
        self.texts: deque[Texts] = deque()
        self.audits: deque[dict[str, dict[int, Audit]]] = deque()

    def clips(self, camera: str) -> list[Packed]:
        """Return the clips of a camera in the last two batches, one of which a failed run of the pipeline has decoded."""
        return [clip for batch in self._clips for clip in batch[camera]]

    def prepare(self) -> None:
        """Wait for the next batch, which the methods below return to DALI's next run.

        Raises:
            DaliStreamError: If the batch could not be made. No batch follows.
        """
        self._current = self._finisher.next()
        frames = {key: self._current.frames[key] for key in self._on_dali}
        self._clips.append(frames)
        self.texts.append(self._current.texts)
        self.audits.append({key: {row: c.audit for row, c in enumerate(clips) if c.audit} for key, clips in frames.items()})

    def columns(self) -> tuple[Any, ...]:
        """Return the first part of the batch: the arrays of `Config.columns`, and the clips of cameras on the DALI route.

        Each of these cameras has a list of clips, a list of the frame indices in each clip and, for a window, a list of the
        orders of its steps. This method is an external source of the graph.
        """
        batch = self._current
        arrays: list[Any] = [batch.columns[key] for key in self._config.columns()]
        for key in self._on_dali:
            clips, places, orders, _ = (list(part) for part in zip(*batch.frames[key], strict=True))
            arrays += [clips, places] if self._config.squeezed(key) else [clips, places, orders]
        return tuple(arrays)

    def frames(self) -> tuple[Array, ...]:
        """Return the frames of the same batch that the CPU decoded, uint8 of shape (B, H, W, C) or (B, T, H, W, C) per camera.

        This method is an external source of the graph. The memory is reused when nothing refers to it any more.
        """
        return tuple(with_time_axis(self._config, key, self._current.frames[key]) for key in self._on_cpu)

    def gpu_frames(self) -> tuple[list[Any], ...]:
        """Return the frames of the same batch that torchcodec decoded on a GPU, with a list of DLPack capsules per camera.

        Each capsule has the frames of one sample, uint8 of shape (H, W, 3) or (T, H, W, 3). This method is an external source
        of the graph.
        """
        batch, squeezed = self._current, self._config.squeezed
        return tuple([(f[0] if squeezed(key) else f).__dlpack__(stream=-1) for f in batch.frames[key]] for key in self._on_cuda)
