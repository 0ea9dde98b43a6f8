"""Storage of decoded frames, in the slots that the schedule assigns."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dali_stream.cache.buffers import Buffers
from dali_stream.checks.arrays import Int64, Mask
from dali_stream.errors import DaliStreamError, DecodeError
from dali_stream.observe.tracing import span
from dali_stream.system.workers import Workers

Frames = npt.NDArray[Any]
# The system reads a file 1.6 times as fast into memory whose address is a multiple of 64, on an AMD EPYC, 2026-11-26. NumPy's
# arrays begin 16 bytes after one.
_ALIGNMENT = 64
_COPY_BYTES = 2 << 20  # bytes of each thread's share of a copy: for fewer, waking the thread costs more than it saves


class Slots:
    """Decoded frames of one camera. Decode threads write them, and the thread that makes a batch copies them into it.

    No lock is needed. A batch writes only slots that no other batch in progress shows or writes, see `FramesInMemory`. It may
    show what an earlier batch writes, since `Producer` waits for the tasks of the batches in their order.

    NumPy asks the system for huge pages (MADV_HUGEPAGE) for arrays of 4 MiB or more. With them, the first write of a frame of
    224×224 costs 0.2 page faults and 10 µs, in place of 37 and 61 (2 cores of an AMD EPYC, 2026-11-29, NumPy 2.4, enabled =
    madvise). Slots are first written in ascending order, so the memory of a cache that is not full exceeds its frames by at
    most two huge pages, which are 4 MiB on x86-64. It never exceeds that of all slots.

    Args:
        count: Number of slots. The system allocates the memory of a slot when it is first written.
        shape: Shape (height, width, channels) of each frame.
        dtype: Type of the values. Default: uint8.
    """

    def __init__(self, count: int, shape: tuple[int, int, int], dtype: type[np.generic] = np.uint8) -> None:
        size = (count + 1) * math.prod(shape) * np.dtype(dtype).itemsize
        memory = np.empty(size + _ALIGNMENT, np.uint8)
        aligned = memory[-memory.ctypes.data % _ALIGNMENT :][:size]
        self._frames = aligned.view(dtype).reshape(count + 1, *shape)
        self._frames[-1] = 0  # slot -1 is a black frame
        self._errors: dict[int, DaliStreamError] = {}
        self._unread: deque[int] = deque()
        self.shape, self.dtype = shape, dtype

    def put(self, slots: Sequence[int], frames: Frames) -> None:
        """Write frames, of shape (n, height, width, channels), into slots."""
        self._frames[np.asarray(slots)] = frames
        if self._errors:
            for slot in slots:
                self._errors.pop(slot, None)

    def fill(
        self, slots: Sequence[int], read: Callable[[list[Frames]], list[bool]], instead: Sequence[Frames | None]
    ) -> list[bool]:
        """Let `read` write frames in place. Return its result: which frames it has written.

        Args:
            slots: Slot of each frame.
            read: Function that writes frames into arrays.
            instead: Array for each frame that is not written into its slot, or None.
        """
        filled = read([self._frames[slot] if other is None else other for slot, other in zip(slots, instead, strict=True)])
        if self._errors:
            for slot in itertools.compress(slots, filled):
                self._errors.pop(slot, None)
        return filled

    def fail(self, slot: int, error: DaliStreamError) -> None:
        """Record that the frame of a slot cannot be read or decoded. Only samples that show this frame fail with the error."""
        self._errors[slot] = error
        if not isinstance(error, DecodeError):
            self._unread.append(slot)

    def take_unread(self) -> list[int]:
        """Return the slots whose frames could not be read since the last call. Reading them again may succeed."""
        return [self._unread.popleft() for _ in range(len(self._unread))]

    def free(self) -> None:
        """Free the memory. The slots cannot be used afterwards."""
        self._frames = self._frames[:0].copy()

    def batch(self, show: Int64, buffers: Buffers, dtype: type[np.generic], copiers: Workers) -> Any:
        """Return the frames of a batch, in memory of their own.

        Args:
            show: Slot of each frame, shape (B, T). -1 for zeros.
            buffers: Pool of memory for batches.
            dtype: Type of the frames, uint8 or float32, unless the slots have another type than uint8.
            copiers: Threads that help the calling thread to copy.

        Returns:
            Array of shape (B, T, height, width, channels).
        """
        # `decode.depth` converts the values of depth cameras.
        frames = buffers.take((*show.shape, *self.shape), dtype if self.dtype is np.uint8 else self.dtype)
        self.copy_batch(show, frames, copiers)
        return frames

    def copy_batch(self, show: Int64, out: npt.NDArray[Any], copiers: Workers, is_read: Mask | None = None) -> None:
        """Copy the frames of a batch. Those of samples that failed are undefined, see `failed`.

        Args:
            show: Slot of each frame, shape (B, T). -1 for zeros.
            out: Array for the frames, shape (B, T, height, width, channels). It has the type of the slots, or float32 for uint8
                values divided by 255. In memory, the channels may precede height and width.
            copiers: Threads that help the calling thread to copy.
            is_read: Whether each frame is in `out` already, shape (B · T,). Default: None, if no frame is.
        """
        slots, frames = show.reshape(-1), out.reshape(-1, *out.shape[2:])
        count = max(_COPY_BYTES // max(out.nbytes // max(len(slots), 1), 1), 1)
        if is_read is None:
            runs = [(at, min(at + count, len(slots))) for at in range(0, len(slots), count)]
        else:
            # Frames that are not next to each other are copied one by one.
            runs = [(at, at + 1) for at in np.flatnonzero(~is_read).tolist()]
        # Each thread takes another share when it has copied one, so a thread that other work slows down copies fewer.
        shares = iter([(slots[start:stop], frames[start:stop]) for start, stop in runs])
        copies = -(-sum(stop - start for start, stop in runs) // count)
        others = [copiers.submit(self._copy, shares) for _ in range(min(len(copiers), copies - 1))]
        self._copy(shares)
        for other in others:
            other.result()

    def failed(self, show: Int64) -> dict[int, DaliStreamError]:
        """Return {sample that failed: error of its first frame that failed}. See `copy_batch` for `show`."""
        samples = enumerate(show.tolist()) if self._errors else ()
        return {sample: self._errors[bad[0]] for sample, shown in samples if (bad := [s for s in shown if s in self._errors])}

    def _copy(self, shares: Iterator[tuple[Int64, npt.NDArray[Any]]]) -> None:
        with span("copy"):
            for slots, out in shares:
                self._copy_share(slots, out)

    def _copy_share(self, slots: Int64, out: npt.NDArray[Any]) -> None:
        is_float = out.dtype != self.dtype
        if out.flags.c_contiguous:
            # One call copies all frames, since each call may wait for the interpreter. For floats, this requires an additional
            # copy before the division. It stays in the processor's cache, and takes less time than the single call saves. All
            # slots are valid. NumPy's default mode "raise" would buffer the output, which is another copy. "wrap" maps slot -1
            # to the last one, which is black.
            frames = np.take(self._frames, slots, axis=0, out=None if is_float else out, mode="wrap")
            if is_float:
                _divide(frames, out)
            return
        planes = np.moveaxis(np.empty((self.shape[2], *self.shape[:2]), self.dtype), 0, -1)
        for slot, to in zip(slots.tolist(), out, strict=True):
            if is_float:  # transposing first and then dividing is faster than both in one operation
                planes[:] = self._frames[slot]
                _divide(planes, to)
            else:
                to[:] = self._frames[slot]


def _divide(frames: Frames, out: npt.NDArray[np.float32]) -> None:
    """Divide values by 255 as LeRobot does, since a multiplication by 1 / 255 is rounded differently."""
    np.divide(frames, np.float32(255), out=out, dtype=np.float32)
