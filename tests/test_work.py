"""Frames in progress: how they are copied into batches, and how many of them a thread decodes at once."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from dali_stream import DaliStreamError
from dali_stream.cache import slots as slots_module
from dali_stream.cache.slots import Slots
from dali_stream.decode import torchcodec
from dali_stream.decode.decoder import even_tasks, task_frames
from dali_stream.decode.torchcodec import frames_at_once
from dali_stream.system.workers import Workers

SHAPE = (2, 3, 4, 5, 3)  # of two windows with three steps each
LAYOUTS: dict[str, Callable[[type[np.generic]], Any]] = {
    "contiguous": lambda dtype: np.empty(SHAPE, dtype),
    "channels first": lambda dtype: np.moveaxis(np.empty((2, 3, 3, 4, 5), dtype), -3, -1),
    "frames apart": lambda dtype: np.empty((2, 6, 4, 5, 3), dtype)[:, ::2],
    "frames apart, channels first": lambda dtype: np.moveaxis(np.empty((2, 6, 3, 4, 5), dtype)[:, ::2], -3, -1),
    "backwards": lambda dtype: np.empty(SHAPE, dtype)[::-1, ::-1],
    "wide rows": lambda dtype: np.empty((2, 3, 4, 9, 3), dtype)[:, :, :, 2:7],
}


@pytest.mark.parametrize("threads", [0, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_a_batch_of_any_layout_gets_its_frames(
    dtype: type[np.generic], layout: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    frames = np.random.default_rng(0).integers(1, 256, (5, *SHAPE[2:]), np.uint8)
    slots, out, helpers = Slots(7, SHAPE[2:]), LAYOUTS[layout](dtype), Workers("copy", threads)
    monkeypatch.setattr(slots_module, "_COPY_BYTES", out.nbytes // 3)  # a share for two frames
    slots.put([0, 2, 3, 5, 6], frames)
    out[:] = 99
    assert slots.gather(np.array([[5, 0, 5], [-1, 3, 2]]), out, helpers) == {}
    helpers.stop()
    helpers.join()
    expected = np.stack([frames[3], frames[0], frames[3], np.zeros_like(frames[0]), frames[2], frames[1]]).reshape(SHAPE)
    assert np.array_equal(out, expected if dtype == np.uint8 else expected / np.float32(255))


def test_tasks_of_small_frames_have_more_of_them() -> None:
    assert [task_frames(size) for size in ((1080, 1920), (480, 640), (360, 640), (224, 224), (32, 32))] == [32, 32, 42, 64, 64]


@pytest.mark.parametrize("frames", [1, 2, 31, 32, 33, 64, 65, 1000])
def test_frames_are_dealt_to_few_tasks_of_about_equal_size(frames: int) -> None:
    numbers, counts = np.unique(even_tasks(np.arange(1, frames + 1), 32), return_counts=True)
    assert numbers.tolist() == list(range(-(-frames // 32)))
    assert counts.max() - counts.min() <= 1
    gops = even_tasks(np.cumsum([10] * frames), 32)
    assert (np.diff(gops) >= 0).all()
    assert len(np.unique(gops)) == min(-(-10 * frames // 32), frames)
    assert np.bincount(gops).max() <= 4


def test_frames_that_a_thread_decodes_at_once_take_15_mib() -> None:
    assert frames_at_once((480, 640)) == (8 << 20) // (480 * 640 * 3)
    assert [frames_at_once(size) for size in ((120, 160), (4000, 4000))] == [64, 1]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ImportError("no module\nof that name"), "(no module)"),
        (OSError("libavutil.so.58: cannot open"), "(libavutil.so.58: cannot open)"),
        (RuntimeError(""), "(RuntimeError)"),
    ],
)
def test_a_torchcodec_that_cannot_be_loaded_is_explained(error: Exception, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> None:
        raise error

    decoders: Any = ModuleType("torchcodec.decoders")
    decoders.__getattr__ = broken
    monkeypatch.setitem(sys.modules, "torchcodec.decoders", decoders)
    spec = importlib.util.spec_from_file_location("again", torchcodec.__file__)
    assert spec
    assert spec.loader
    with pytest.raises(DaliStreamError) as caught:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    assert f"torchcodec cannot be loaded {said}. It needs FFmpeg's shared libraries" in str(caught.value)
