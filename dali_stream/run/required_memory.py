"""Check that the frames of batches fit into the memory of this process."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from dali_stream.errors import MemoryBudgetError
from dali_stream.pipeline.layout import Layout
from dali_stream.schedule.frames import SLOT_BYTES
from dali_stream.system.memory_limit import MemoryLimit


class RequiredMemory(NamedTuple):
    """Lower bounds of the memory that frames need. Since they are lower bounds, no batch size that would work is refused.

    Attributes:
        batch: Bytes of the frames of one batch, as delivered or, with DALI, as passed to DALI.
        decoded: Bytes of the decoded frames of all batches in progress.
    """

    batch: int
    decoded: int


def required_memory(layout: Layout) -> RequiredMemory:
    """Return lower bounds of the memory that the frames of the cached cameras need.

    Samples may share the frames of their windows, so only the current frame of each sample in progress is counted as decoded,
    if the window contains it. A mixture may repeat samples, so none of its decoded frames are counted. The memory
    that locates the frames in progress is always counted.

    Args:
        layout: Configuration of the loader, with the decoders.
    """
    config, cameras = layout.config, layout.in_memory
    batches, share = config.batches, config.batches.frames // config.batches.world_size
    rows = batches.batch_size if batches.last_batch == "pad" else min(batches.batch_size, share)
    value_bytes = np.dtype(layout.copied_dtype).itemsize

    def batch_bytes(camera: str) -> int:
        """Return the memory of a camera's frames of one sample of a batch. Depth has its distances, and its stored values."""
        is_depth, values = config.source.features[camera].is_depth, math.prod(config.frame_shape(camera))
        return config.windows.steps(camera) * (4 * values + config.frame_bytes(camera) if is_depth else value_bytes * values)

    samples = 0 if config.source.dataset_names else min(config.in_progress * batches.batch_size, share)
    with_current_frame = (camera for camera in cameras if (config.windows.of(camera) == 0).any())
    decoded = samples * sum(map(config.frame_bytes, with_current_frame))
    slots = config.in_progress * batches.largest * sum(map(config.windows.steps, cameras))  # none of which is shared
    return RequiredMemory(rows * sum(map(batch_bytes, cameras)), decoded + slots * SLOT_BYTES)


def check_memory(layout: Layout, limit: MemoryLimit) -> None:
    """Check that the frames of batches fit into memory.

    Args:
        layout: Configuration of the loader, with the decoders.
        limit: Memory limit of this process.

    Raises:
        MemoryBudgetError: If the frames need more memory than the limit.
    """
    config, required = layout.config, required_memory(layout)
    if sum(required) <= limit.size:
        return
    raise MemoryBudgetError(
        f"batch_size={config.batches.batch_size} needs at least {_gibibytes(sum(required))} of memory: "
        f"{_gibibytes(required.batch)} for the frames of one batch and {_gibibytes(required.decoded)} for the decoded frames "
        f"of the batches in progress. The limit of {limit.owner} is {_gibibytes(limit.size)}. Use a smaller "
        + ("" if config.prefetch is None else "prefetch, ")
        + "batch_size or image_size, or shorter windows"
        + (', or image_dtype="uint8"' if config.image_dtype == "float32" else "")
    )


def _gibibytes(count: int) -> str:
    return f"{count / (1 << 30):.2f} GiB"
