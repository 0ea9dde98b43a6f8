"""Decoded frames in the memory of a GPU, in the slots that the schedule assigns."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from dali_stream.cache.slots import Frames, Slots
from dali_stream.checks.arguments import budget_text
from dali_stream.checks.arrays import Int64
from dali_stream.errors import MemoryBudgetError


class GpuSlots(Slots):
    """Decoded frames of one camera, uint8, in the memory of a GPU. See `Slots`.

    No CUDA events are needed. `put` and `batch` return when the GPU has done their work, or `put` is followed by a
    synchronization of its stream before the decode task ends. A batch is copied after its tasks, and later batches may
    overwrite its slots as soon as it was copied. Nothing uses the stream of the training step.

    Args:
        count: Number of slots. Their memory is allocated at once.
        shape: Shape (height, width, channels) of each frame.
        device: Name of the GPU, such as "cuda:0".

    Raises:
        MemoryBudgetError: If the GPU has too little free memory.
    """

    def __init__(self, count: int, shape: tuple[int, int, int], device: str) -> None:
        super().__init__(0, shape)
        size = (count + 1) * math.prod(shape)
        self._device = device
        with self._explained(f"{size} bytes of it cannot be allocated", size // 2), own_work(device):
            self._on_gpu = torch.empty((count + 1, *shape), dtype=torch.uint8, device=device)
            self._on_gpu[-1] = 0  # slot -1 is a black frame

    @contextlib.contextmanager
    def _explained(self, what: str, less: int) -> Iterator[None]:
        """Context manager that raises MemoryBudgetError if the GPU has too little memory."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            raise MemoryBudgetError(
                f"gpu_cache must fit into the free memory of {self._device} with some batches beside it, but {what}. Use a "
                f'smaller gpu_cache, such as "{budget_text(less)}", or none'
            ) from error

    def put(self, slots: Sequence[int], frames: Frames | torch.Tensor) -> None:
        """Write frames, of shape (n, height, width, channels), into slots.

        Frames on the GPU are written in the current stream, which the caller synchronizes. Others are uploaded first.
        """
        if isinstance(frames, torch.Tensor):
            self._write(slots, frames)
        else:
            with self._explained("frames cannot be uploaded", self._on_gpu.nbytes // 2), own_work(self._device):
                self._write(slots, torch.from_numpy(frames).to(self._on_gpu.device))
        for slot in slots if self._errors else ():
            self._errors.pop(slot, None)

    def _write(self, slots: Sequence[int], frames: torch.Tensor) -> None:
        self._on_gpu[torch.tensor(slots, device=self._on_gpu.device)] = frames

    def batch(self, show: Int64, *_: Any) -> torch.Tensor:
        """Return the frames of a batch, a tensor of shape (B, T, height, width, channels) on the GPU. See `Slots.batch`."""
        with self._explained("a batch cannot be copied", self._on_gpu.nbytes // 2), own_work(self._device):
            slots = torch.from_numpy(np.where(show < 0, len(self._on_gpu) - 1, show).reshape(-1)).to(self._on_gpu.device)
            frames = self._on_gpu.index_select(0, slots)
        return frames.reshape(*show.shape, *self.shape)

    def fill(self, *_: Any) -> list[bool]:
        """Raise NotImplementedError, since frames on disk are read into the CPU's memory."""
        raise NotImplementedError

    def free(self) -> None:
        """Free the memory, for NVDEC and other libraries, too. The slots cannot be used afterwards."""
        super().free()
        with contextlib.suppress(RuntimeError), own_work(self._device):  # each call fails after an error of the GPU
            self._on_gpu = self._on_gpu.new_empty(0)
            torch.cuda.empty_cache()  # otherwise torch keeps it for tensors on the same stream


def copy_sample(frames: torch.Tensor, sample: int, of: int) -> None:
    """Overwrite the frames of a sample with those of another one, in a batch from `GpuSlots`, and wait for it."""
    with own_work(str(frames.device)):
        frames[sample] = frames[of]


def own_work(device: str) -> contextlib.AbstractContextManager[None]:
    """Return the context manager `on_stream` for the stream of all slots on a GPU."""
    return on_stream(_stream(device))


@contextlib.contextmanager
def on_stream(stream: torch.cuda.Stream) -> Iterator[None]:
    """Context manager that uses a CUDA stream, and finally waits for it.

    Its GPU is the current device meanwhile. Otherwise, leaving the stream would make a context on device 0.
    """
    with torch.cuda.device(stream.device), torch.cuda.stream(stream):
        try:
            yield
        finally:
            stream.synchronize()


@functools.cache
def _stream(device: str) -> torch.cuda.Stream:
    """Return the stream. All slots share it: torch has 32 per GPU, and memory that one stream has freed is not for others."""
    return torch.cuda.Stream(device)
