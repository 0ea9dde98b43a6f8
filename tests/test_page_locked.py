"""Memory of batches for a GPU: page-locked while it is mapped, and reused only when nobody uses it. CUDA is replaced."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.batches import check_identities
from support.datasets import CAMERAS, TOP, read_lengths
from support.gpu_machine import GpuMachine

from dali_stream import Dataset, Loader
from dali_stream.cache.buffers import Buffers
from dali_stream.cache.shared_buffers import BorrowedBuffers, LentBuffers


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """CUDA devices that were current at least once."""
    used: list[int] = []

    @contextlib.contextmanager
    def device(number: int) -> Iterator[None]:
        used.append(number)
        yield

    monkeypatch.setattr(torch.cuda, "device", device)
    return used


@pytest.mark.parametrize("status", [0, 2], ids=["locked", "refused"])
def test_shared_memory_is_locked_once_while_it_is_mapped(
    devices: list[int], monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    locked: dict[int, int] = {}
    unlocked: list[int] = []

    def lock(address: int, size: int, flags: int) -> int:
        assert address not in locked
        assert flags == 1
        if not status:
            locked[address] = size
        return status

    def unlock(address: int) -> None:
        ctypes.string_at(address, 1)  # it is still mapped
        del locked[address]
        unlocked.append(address)

    runtime = SimpleNamespace(
        cudaHostRegister=lock, cudaHostUnregister=unlock, cudaError=SimpleNamespace(success=0)
    )  # fmt: skip
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    lent, borrowed = LentBuffers(False), BorrowedBuffers(1)
    for _ in range(3):
        lent.take_back(*borrowed.returned())
        message, blocks = lent.lend({"frames": lent.take((4, 100, 100, 3), np.uint8)})
        arrays = borrowed.arrays(message, [os.dup(block.descriptor) for block in blocks if block.descriptor is not None])
        for block in blocks:
            block.close_descriptor()
        assert (arrays["frames"].ctypes.data in locked) == (not status)
        del arrays, blocks
    assert set(devices) == {1}
    assert set(locked.values()) == (set() if status else {120_000 // 4096 * 4096 + 4096})
    del borrowed
    gc.collect()
    assert not locked
    assert bool(unlocked) == (not status)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.float32])
def test_page_locked_arrays_are_reused_when_nobody_uses_them(
    devices: list[int], monkeypatch: pytest.MonkeyPatch, dtype: type[np.generic]
) -> None:
    empty, asked = torch.empty, []

    def without_cuda(shape: tuple[int, ...], dtype: torch.dtype, pin_memory: bool) -> torch.Tensor:
        asked.append(pin_memory)
        return empty(shape, dtype=dtype)

    monkeypatch.setattr(torch, "empty", without_cuda)
    buffers = Buffers(False, gpu=1)
    first = buffers.take((2, 3, 4, 3), dtype)
    assert (first.shape, first.dtype) == ((2, 3, 4, 3), np.dtype(dtype))
    address = first.ctypes.data
    part = torch.from_numpy(first[:, 1:])
    del first
    other = buffers.take((2, 3, 4, 3), dtype)
    assert other.ctypes.data != address
    del part
    assert buffers.take((2, 3, 4, 3), dtype).ctypes.data == address
    assert asked == [True, True]
    assert set(devices) == {1}


@pytest.mark.parametrize("status", [None, 0, 2], ids=["in the process", "own process", "refused"])
def test_a_gpu_reads_the_memory_of_batches_directly(
    h264_demo: Path, gpu_machine: GpuMachine, monkeypatch: pytest.MonkeyPatch, status: int | None
) -> None:
    """The Loader tells DALI which memory is page-locked. DALI copies other memory once more."""
    if status:
        runtime = SimpleNamespace(cudaHostRegister=lambda *_: status, cudaError=SimpleNamespace(success=0))
        monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.delenv("DALI_STREAM_IN_PROCESS")
    options: dict[str, Any] = {"device": "cuda", "decode": "torchcodec", "batch_size": 8, "in_process": status is None}
    with Loader(Dataset(h264_demo, episodes=[0]), **options) as loader:
        batches = list(loader)
    for batch in batches:
        check_identities(batch, TOP, None, read_lengths(h264_demo))
    if status:
        assert not gpu_machine.uploads
    else:
        assert len(gpu_machine.uploads) >= len(batches) * len(CAMERAS)
