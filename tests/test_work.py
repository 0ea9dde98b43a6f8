"""Frames in progress: when a batch is ready, and how many frames a thread decodes at once."""

from __future__ import annotations

import importlib.util
import sys
from concurrent.futures import Future
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dali_stream import DaliStreamError
from dali_stream.decode import torchcodec
from dali_stream.decode.decoder import Decoded, even_tasks, succeeded, task_frames
from dali_stream.decode.torchcodec import frames_at_once
from dali_stream.errors import DecodeError


def task(state: str) -> Future[None]:
    """A task that waits, runs, was cancelled, has failed or is done."""
    made: Future[None] = Future()
    if state == "cancelled":
        made.cancel()
    elif state != "waits":
        made.set_running_or_notify_cancel()
    if state == "failed":
        made.set_exception(DecodeError("damaged"))
    elif state == "done":
        made.set_result(None)
    return made


@pytest.mark.parametrize("state", ["waits", "runs", "cancelled", "failed", "done"])
def test_a_batch_is_ready_once_all_of_its_tasks_are_done(state: str) -> None:
    assert succeeded(task(state)) == (state == "done")
    slots: Any = SimpleNamespace(broken={})
    plan: Any = None
    assert Decoded(slots, plan, [task("done"), task(state)], {}).ready() == (state == "done")


def test_a_batch_with_a_frame_that_failed_is_not_ready() -> None:
    plan: Any = None
    for broken, failed in (({3: "damaged"}, {}), ({}, {0: DecodeError("damaged")})):
        slots: Any = SimpleNamespace(broken=broken)
        assert not Decoded(slots, plan, [task("done")], failed).ready()


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
    assert frames_at_once((480, 640)) == (15 << 20) // (480 * 640 * 3)
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
