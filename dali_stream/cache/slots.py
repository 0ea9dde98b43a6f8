"""Decoded frames in memory, in the slots that the schedule gives them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dali_stream.errors import DecodeError
from dali_stream.workers import Workers

Frames = npt.NDArray[np.uint8]
Int64 = npt.NDArray[np.int64]
_COPY_BYTES = 1 << 20  # of a batch, for which another thread is worth its wake-up


class Slots:
    """One camera's frames. Decode threads put them in, and the thread that runs DALI copies batches out.

    It takes no lock: the schedule has no slot written while another batch reads or writes it.

    Args:
        count: slots. Memory is taken when one is first written.
        shape: (height, width, channels) of each frame.
    """

    def __init__(self, count: int, shape: tuple[int, int, int]) -> None:
        self._frames = np.empty((count + 1, *shape), np.uint8)
        self._frames[-1] = 0  # what -1 stands for
        self._errors: dict[int, DecodeError] = {}
        self.shape = shape

    def put(self, slots: Sequence[int], frames: Frames) -> None:
        """Writes frames, (n, height, width, channels), into slots."""
        self._frames[np.asarray(slots)] = frames
        if self._errors:
            for slot in slots:
                self._errors.pop(slot, None)

    def fail(self, slot: int, error: DecodeError) -> None:
        """Notes that the frame of a slot cannot be decoded: an error for the batch that shows it, and for no other."""
        self._errors[slot] = error

    def free(self) -> None:
        """Frees the memory. The slots cannot be used afterwards."""
        self._frames = self._frames[:0].copy()

    @property
    def broken(self) -> bool:
        """Whether any slot has a frame that cannot be decoded."""
        return bool(self._errors)

    def gather(self, show: Int64, out: npt.NDArray[Any], helpers: Workers) -> dict[int, DecodeError]:
        """Copies the frames of a batch.

        Args:
            show: (B, T) slots; -1 for zeros.
            out: (B, T, height, width, channels), uint8, or float32 for values divided by 255. In memory, the channels may come
                before height and width.
            helpers: threads that take a share each of the copying; the calling one takes its own.

        Returns:
            Per sample that failed, the error of its first frame that failed; `out` is undefined there.
        """
        slots, frames = show.reshape(-1), out.reshape(-1, *out.shape[2:])
        ends = np.linspace(0, len(slots), 1 + min(1 + len(helpers), 1 + out.nbytes // _COPY_BYTES)).astype(int).tolist()
        shares = [(slots[a:b], frames[a:b]) for a, b in itertools.pairwise(ends)]
        others = [helpers.submit(self._copy, *share) for share in shares[1:]]
        self._copy(*shares[0])
        for other in others:
            other.result()
        if not self._errors:
            return {}
        failed = {}
        for sample, shown in enumerate(show.tolist()):
            errors = [self._errors[slot] for slot in shown if slot in self._errors]
            if errors:
                failed[sample] = errors[0]
        return failed

    def _copy(self, slots: Int64, out: npt.NDArray[Any]) -> None:
        if out.dtype == np.uint8 and out.flags.c_contiguous:
            np.take(self._frames, slots, axis=0, out=out, mode="wrap")  # "raise" goes by way of another copy
            return
        planes = np.moveaxis(np.empty((self.shape[2], *self.shape[:2]), np.uint8), 0, -1)
        for slot, to in zip(slots.tolist(), out, strict=True):
            frame = self._frames[slot]
            if not to.flags.c_contiguous:  # to transpose and then to divide is faster than both at once
                planes = planes if to.dtype != np.uint8 else to
                planes[:] = frame
                frame = planes
            if to.dtype != np.uint8:  # a division, as LeRobot does it: x * (1 / 255) rounds otherwise
                np.divide(frame, np.float32(255), out=to, dtype=np.float32)
