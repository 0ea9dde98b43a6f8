"""Memory of batches that one process fills and another one delivers to the user."""

from __future__ import annotations

import functools
import itertools
import os
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from dali_stream.cache.buffers import KEPT, Buffers
from dali_stream.checks.arrays import Array
from dali_stream.system.shared_memory import SharedBlock, array_bytes, block_of, new_block

_ALIGNED = 64  # bytes to which arrays are aligned that are copied into one block


Place = tuple[int, int, tuple[int, ...], str, tuple[int, ...]]
"""Place of an array in a block of shared memory: (number of the block, first byte, shape, dtype, strides in bytes)."""


class Lent(NamedTuple):
    """Arrays of a batch, as a message.

    Attributes:
        places: {name: place of the array}.
        added: {number: size in bytes} of the blocks that the other process does not know yet, in the order of the message's
            file descriptors.
        freed: Numbers of the blocks that were unmapped.
    """

    places: dict[str, Place]
    added: dict[int, int]
    freed: list[int]


class _LentBlock(SharedBlock):
    """Block of shared memory with a number.

    Attributes:
        number: Number.
        descriptor: File descriptor of the memory, until the other process has got it. Then None.
    """

    descriptor: int | None = None

    def __init__(self, number: int, size: int, freed: list[int]) -> None:
        self.number = number
        self.descriptor, size = new_block(size)
        super().__init__(self.descriptor, size, lambda: freed.append(number))

    def close_descriptor(self) -> None:
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None

    def __del__(self) -> None:
        self.close_descriptor()
        super().__del__()


class LentBuffers(Buffers):
    """Buffers in shared memory. An array is reused when the other process does not use it any more either. See `Buffers`."""

    def __init__(self, channels_first: bool, cameras: int = 1, kept: int = KEPT) -> None:
        super().__init__(channels_first, cameras, kept)
        self._numbers, self._freed = itertools.count(), list[int]()
        self._lent: dict[int, Array] = {}  # {number of a block: array in it}. The reference keeps the block from being reused

    def new(self, shape: tuple[int, ...], dtype: type[np.generic]) -> Array:
        """See `Buffers.new`."""
        return _LentBlock(next(self._numbers), array_bytes(shape, dtype), self._freed).array(shape, dtype)

    def lend(self, arrays: Mapping[str, Array]) -> tuple[Lent, list[_LentBlock]]:
        """Lend arrays to the other process, until `take_back`. Arrays that are not in these buffers are copied.

        Returns:
            Message, and the blocks whose file descriptors belong to it. The caller sends and closes these.
        """
        outside = {name: values for name, values in arrays.items() if block_of(values) is None}
        sizes = [-(-values.nbytes // _ALIGNED) * _ALIGNED for values in outside.values()]
        together = self._packed((sum(sizes),), np.uint8)
        copies: dict[str, Array] = {}
        for (name, values), start in zip(outside.items(), itertools.accumulate(sizes, initial=0), strict=False):
            copies[name] = together[start : start + values.nbytes].view(values.dtype).reshape(values.shape)
            copies[name][...] = values
        places, blocks = {}, dict[int, _LentBlock]()
        for name, values in {**arrays, **copies}.items():
            block = _block(values)
            start = values.__array_interface__["data"][0] - block.address
            places[name] = block.number, start, values.shape, values.dtype.str, values.strides
            self._lent[block.number], blocks[block.number] = values, block
        added = [block for block in blocks.values() if block.descriptor is not None]
        freed = [self._freed.pop() for _ in range(len(self._freed))]
        return Lent(places, {block.number: block.size for block in added}, freed), added

    def _packed(self, shape: tuple[int, ...], dtype: type[np.generic]) -> Array:
        with self._lock:
            return self._take(shape, dtype)

    def take_back(self, returned: Sequence[int], forked: Sequence[int]) -> None:
        """Take back blocks that the other process does not use any more.

        Args:
            returned: Numbers of these blocks.
            forked: Numbers of those among them that a fork of the other process may still use. They are not reused.
        """
        for number in returned:
            self._lent.pop(number, None)
        if forked:
            with self._lock:
                for arrays in self._arrays.values():
                    arrays[:] = [array for array in arrays if _block(array).number not in forked]


def _block(array: Array) -> _LentBlock:
    block = block_of(array)
    assert isinstance(block, _LentBlock)
    return block


class BorrowedBuffers:
    """Buffers of another process, which lends them with `LentBuffers`.

    Args:
        gpu: CUDA device that reads the arrays, whose memory is then page-locked. Default: None.
    """

    def __init__(self, gpu: int | None = None) -> None:
        self._gpu = gpu
        self._blocks: dict[int, SharedBlock] = {}
        # {number of a block in use: reference to the array to which all arrays in the block refer}
        self._in_use: dict[int, weakref.ref[Array]] = {}
        self._returned: deque[int] = deque()
        self._forked: set[int] = set()  # numbers of blocks that were mapped when this process was forked
        _borrowed.add(self)

    def arrays(self, lent: Lent, descriptors: Sequence[int]) -> dict[str, Array]:
        """Return the arrays of a message. `descriptors` are its file descriptors, which are closed."""
        for number in lent.freed:
            self._blocks.pop(number, None)  # None for a block that was never lent
            self._forked.discard(number)
        try:
            for (number, size), descriptor in zip(lent.added.items(), descriptors, strict=True):
                self._blocks[number] = block = SharedBlock(descriptor, size)
                if self._gpu is not None:
                    block.lock_pages(self._gpu)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        whole: dict[int, Array] = {}
        for number in {number for number, *_ in lent.places.values()}:
            block = self._blocks[number]
            whole[number] = block.array((block.size,), np.uint8)
            self._in_use[number] = weakref.ref(whole[number], functools.partial(self._return, number))
        return {
            name: np.ndarray(shape, dtype, whole[number], offset, strides)
            for name, (number, offset, shape, dtype, strides) in lent.places.items()
        }

    def _return(self, number: int, _: object) -> None:
        """Note that nothing refers to a block any more. A garbage collection may call this in any thread, so it has no lock."""
        self._returned.append(number)

    def returned(self) -> tuple[list[int], list[int]]:
        """Return the arguments of `LentBuffers.take_back`: blocks to which no array of this process refers any more."""
        returned = [self._returned.popleft() for _ in range(len(self._returned))]
        for number in returned:
            del self._in_use[number]
        return returned, [number for number in returned if number in self._forked]

    def note_fork(self) -> None:
        """Do not let blocks be reused that a forked process may use."""
        self._forked |= set(self._blocks)


_borrowed: weakref.WeakSet[BorrowedBuffers] = weakref.WeakSet()


def _note_fork() -> None:
    for each in list(_borrowed):
        each.note_fork()


os.register_at_fork(before=_note_fork, after_in_parent=_note_fork)  # a block may be added between the two
