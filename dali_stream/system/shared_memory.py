"""Arrays in anonymous memory that two processes share.

The memory has no name and no file, so nothing is left of it when the processes end, however they end, and the size of
/dev/shm does not matter.
"""

from __future__ import annotations

import ctypes
import logging
import math
import mmap
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from dali_stream.checks.arrays import Array

_log = logging.getLogger("dali_stream")
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_PORTABLE = 1  # cudaHostRegisterPortable: locked for all devices
_FAILED = ctypes.c_void_p(-1).value


class SharedBlock:
    """Block of memory. It is unmapped when no array refers to it any more.

    `mmap.mmap` would keep a file descriptor per block, so that a thousand blocks would exceed the limit of open files.

    Args:
        descriptor: File descriptor of the memory, see `os.memfd_create`. It may be closed afterwards.
        size: Size in bytes.
        freed: Function that is called when the block is unmapped. Default: none.

    Attributes:
        address, size: Address, and size in bytes.

    Raises:
        MemoryError: If the memory cannot be mapped.
    """

    _unlock: Callable[[], None] | None = None

    def __init__(self, descriptor: int, size: int, freed: Callable[[], None] | None = None) -> None:
        # All pages are touched here, which takes less time than a page fault for each of them.
        flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
        address = _libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, descriptor, 0)
        if address == _FAILED:
            raise MemoryError(f"{size} bytes of shared memory cannot be mapped: {os.strerror(ctypes.get_errno())}")
        self.address, self.size, self._freed, self._unmap = address, size, freed, _libc.munmap

    def array(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        """Return a contiguous array that begins where this block begins. It refers to the block."""
        return np.asarray(_Interface(self, shape, np.dtype(dtype)))

    @property
    def is_locked(self) -> bool:
        """Whether the pages are locked."""
        return self._unlock is not None

    def lock_pages(self, gpu: int) -> None:
        """Lock the pages until the block is unmapped, so that CUDA device `gpu` reads them without a copy by the driver."""
        import torch

        runtime, device, address, owner = torch.cuda.cudart(), torch.cuda.device, self.address, os.getpid()

        def unlock() -> None:
            if os.getpid() == owner:  # a forked process cannot use CUDA
                with device(gpu):
                    runtime.cudaHostUnregister(address)

        with device(gpu):  # otherwise both calls make a context on device 0
            locked = runtime.cudaHostRegister(address, self.size, _PORTABLE) == runtime.cudaError.success
        if locked:
            self._unlock = unlock
        else:
            _log.info("CUDA does not lock %d bytes of shared memory, so uploading them takes more CPU time", self.size)

    def __del__(self) -> None:
        if self._unlock is not None:
            self._unlock()
        if hasattr(self, "_unmap"):  # it was mapped
            self._unmap(self.address, self.size)
            if self._freed is not None:
                self._freed()


class _Interface:
    """Base of an array, which refers to the block. https://numpy.org/doc/stable/reference/arrays.interface.html."""

    def __init__(self, block: SharedBlock, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self.block = block
        self.__array_interface__ = {"version": 3, "shape": shape, "typestr": dtype.str, "data": (block.address, False)}


def block_of(array: Array) -> SharedBlock | None:
    """Return the block that has the memory of an array, or None if another object has it."""
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    return base.block if isinstance(base, _Interface) else None


def new_block(size: int) -> tuple[int, int]:
    """Return the file descriptor of new memory of at least `size` bytes, and its size, a multiple of the page."""
    size = -(-max(size, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
    descriptor = os.memfd_create("dali_stream")
    try:
        os.ftruncate(descriptor, size)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, size


def array_bytes(shape: tuple[int, ...], dtype: npt.DTypeLike) -> int:
    """Return the memory of a contiguous array in bytes."""
    return math.prod(shape) * np.dtype(dtype).itemsize
