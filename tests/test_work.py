"""Frames in progress: how they are copied into batches, and how many of them a thread decodes at once."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from dali_stream import DaliStreamError
from dali_stream.cache.slots import Slots
from dali_stream.decode import torchcodec
from dali_stream.decode.decoder import even_tasks, task_frames
from dali_stream.decode.torchcodec import frames_at_once
from dali_stream.system.workers import Workers

HEIGHT, WIDTH = 364, 366  # six frames are so large that threads share the work
SHAPE = (2, 3, HEIGHT, WIDTH, 3)  # of two windows with three steps each
LAYOUTS: dict[str, Callable[[type[np.generic]], Any]] = {
    "contiguous": lambda dtype: np.empty(SHAPE, dtype),
    "channels first": lambda dtype: np.moveaxis(np.empty((2, 3, 3, HEIGHT, WIDTH), dtype), -3, -1),
    "frames apart": lambda dtype: np.empty((2, 6, HEIGHT, WIDTH, 3), dtype)[:, ::2],
    "frames apart, channels first": lambda dtype: np.moveaxis(np.empty((2, 6, 3, HEIGHT, WIDTH), dtype)[:, ::2], -3, -1),
    "backwards": lambda dtype: np.empty(SHAPE, dtype)[::-1, ::-1],
    "wide rows": lambda dtype: np.empty((2, 3, HEIGHT, WIDTH + 4, 3), dtype)[:, :, :, 2:-2],
}


@pytest.mark.parametrize("threads", [0, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_a_batch_of_any_layout_gets_its_frames(dtype: type[np.generic], layout: str, threads: int) -> None:
    frames = np.random.default_rng(0).integers(1, 256, (5, *SHAPE[2:]), np.uint8)
    slots, out, copiers = Slots(7, SHAPE[2:]), LAYOUTS[layout](dtype), Workers("copy", threads)
    slots.put([0, 2, 3, 5, 6], frames)
    out[:] = 99
    slots.copy_batch(np.array([[5, 0, 5], [-1, 3, 2]]), out, copiers)
    copiers.stop()
    copiers.join()
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
    assert [frames_at_once(size, 0) for size in ((480, 640), (1080, 1920))] == [32, (64 << 20) // (1080 * 1920 * 3)]


def load_error(of: str) -> RuntimeError:
    """Error of torchcodec, with an attempt for each version of FFmpeg: FFmpeg 5 lacks this library, and others lack all."""
    missing = ["libavutil.so.61", "libavutil.so.60", of]
    attempts = [
        f"Traceback:\nOSError: {name}: cannot open shared object file\n\nOSError: Could not load this library: /lib/core.so"
        for name in missing
    ]
    return RuntimeError("Could not load libtorchcodec. Likely causes:\n1. FFmpeg is missing.\n" + "\n".join(attempts))


def import_error(error: Exception, monkeypatch: pytest.MonkeyPatch) -> str:
    """Message of the error of `dali_stream.decode.torchcodec` if torchcodec's decoders raise this error.

    Without FFmpeg's version, each decoder that is made raises it, and otherwise the import.
    """

    def broken(*arguments: object) -> None:
        raise error

    decoders: Any = ModuleType("torchcodec.decoders")
    if sys.modules["torchcodec"].ffmpeg_major_version is None:
        decoders.VideoDecoder = broken
    else:
        decoders.__getattr__ = broken
    monkeypatch.setitem(sys.modules, "torchcodec.decoders", decoders)
    spec = importlib.util.spec_from_file_location("again", torchcodec.__file__)
    assert spec
    assert spec.loader
    with pytest.raises(DaliStreamError) as caught:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    return str(caught.value)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ImportError("no module\nof that name"), "(no module)"),
        (OSError("libavutil.so.58: cannot open"), "(libavutil.so.58: cannot open)"),
        (RuntimeError(""), "(RuntimeError)"),
        (load_error("libavutil.so.57"), "(FFmpeg's libraries were not found)"),
        (load_error("libavdevice.so.59"), "(libavdevice.so.59: cannot open shared object file)"),
    ],
)
def test_a_torchcodec_that_cannot_be_loaded_is_explained(error: Exception, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert f"torchcodec cannot be loaded {said}. It needs FFmpeg's shared libraries" in import_error(error, monkeypatch)


def test_a_torchcodec_that_is_imported_without_ffmpeg_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchcodec 0.16 and later: the import succeeds, and each decoder that is made fails."""
    monkeypatch.setattr(sys.modules["torchcodec"], "ffmpeg_major_version", None)
    message = import_error(load_error("libavutil.so.57"), monkeypatch)
    assert "torchcodec cannot be loaded (FFmpeg's libraries were not found). It needs FFmpeg's shared libraries" in message


@pytest.mark.parametrize(("cuda", "build", "index"), [(None, "without CUDA", "cpu"), ("12.6", "for CUDA 12.6", "cu126")])
@pytest.mark.parametrize("wrapped", [False, True], ids=["torchcodec 0.14", "torchcodec 0.17"])
def test_a_torchcodec_for_another_cuda_than_that_of_torch_is_explained(
    wrapped: bool, cuda: str | None, build: str, index: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    error: Exception = load_error("libnvrtc.so.13")
    if wrapped:  # its library for images is loaded first
        error = OSError("Could not load this library: /lib/libtorchcodec_image.so")
        error.__cause__ = OSError("libnvrtc.so.13: cannot open shared object file")
    monkeypatch.setattr(torch.version, "cuda", cuda)
    message = import_error(error, monkeypatch)
    assert message.startswith("torchcodec cannot be loaded (libnvrtc.so.13: cannot open shared object file). From version 0.14")
    assert f"built for CUDA 13, and torch {torch.__version__} is built {build}: install torchcodec 0.13" in message
    assert f"https://download.pytorch.org/whl/{index}`)" in message


@pytest.mark.parametrize("cause", ["libnvrtc.so.13: cannot open", "libtorch_cuda.so: cannot open", "undefined symbol: x"])
@pytest.mark.parametrize(
    ("version", "cuda", "advised"),
    [
        ("2.9.1+cpu", None, "0.9.1"),
        ("2.10.0", "12.8", "0.10.0"),
        ("2.11.0+cpu", None, "0.13.0"),
        ("2.15.0+cu126", "12.6", "0.13.0"),
        ("2.15.0", "13.0", "0.17.0"),
    ],
)
def test_a_torchcodec_that_fits_torch_is_advised(
    version: str, cuda: str | None, advised: str, cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command gives the release that docs/compatibility.md names, whichever ones there are."""
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    command = re.search(r"`pip install '(torchcodec[^']*)'`", import_error(OSError(cause), monkeypatch))
    assert command
    released = ["0.8.1", "0.9.1", "0.10.0", "0.11.1", "0.12.0", "0.13.0", "0.14.0", "0.15.0", "0.16.0", "0.17.0"]
    plain = "0.13.0" if cuda == "13.0" and "cannot open" in cause else advised  # its library for CUDA is lost
    assert max(SpecifierSet(command[1].removeprefix("torchcodec")).filter(released), key=Version) == plain
