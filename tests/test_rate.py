"""The measured speed of NVDEC and of the CPU, both on the CPU here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.datasets import TOP

import dali_stream
from dali_stream.decode import rate
from dali_stream.decode.rate import Rates
from dali_stream.mp4.clip import Clip
from dali_stream.mp4.format import VideoFormat, describe
from dali_stream.mp4.index import read_index


def clip_of(root: Path) -> tuple[Clip, VideoFormat]:
    store = dali_stream.Dataset(root).data_store
    table = read_index(store, f"videos/{TOP}/chunk-000/file-000.mp4")
    return rate.request_clip(store, table), describe(table.configs[0])


def test_the_clip_has_a_frame_from_the_middle_of_each_gop(vp9_demo: Path) -> None:
    clip, _ = clip_of(vp9_demo)
    assert len(clip.frames) > 1
    assert clip.coded_frames == 6 * len(clip.frames)  # to the middle of a GOP of 12


@pytest.mark.parametrize(("slowed", "faster"), [(0, "cpu"), (1, "nvdec")])
def test_a_slower_decoder_is_seen(slowed: int, faster: str, demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first or the second decoder repeats each clip 20 times."""
    make, made = rate._with_torchcodec, list[None]()

    def repeated(*arguments: Any) -> Callable[[], int]:
        decode = make(*arguments)
        made.append(None)
        return (lambda: max(decode() for _ in range(20))) if len(made) == slowed + 1 else decode

    monkeypatch.setattr(rate, "_with_torchcodec", repeated)
    rates = rate.measure(*clip_of(demo), None, 1, 0.0)
    assert ("nvdec" if rates.nvdec > rates.cpu else "cpu") == faster


@pytest.mark.slow
def test_long_gops_are_measured_with_few_requests(written: Callable[..., Path]) -> None:
    clip, _ = clip_of(written(episodes=2, size=(128, 160), codec="vp9", gop=30))
    assert clip.coded_frames <= 64


def test_each_decoder_is_measured_for_half_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clip, video = Clip(bytearray(), [], 0), VideoFormat("vp9", 0, "420", 8, 128, 160)
    monkeypatch.setattr(rate, "_with_torchcodec", lambda _, __, ___, gpu: gpu)
    measured: list[tuple[Any, float]] = []

    def timed(gpu: Any, seconds: float) -> float:
        measured.append((gpu, seconds))
        return float(len(measured))

    monkeypatch.setattr(rate, "_rate", timed)
    assert rate.measure(clip, video, 0, 2, 3.0) == Rates(1.0, 2.0)
    assert measured == [(0, 1.5), (None, 1.5)]


def test_a_clip_has_many_frames(demo: Path) -> None:
    clip, video = clip_of(demo)
    assert len(clip.frames) == 42  # as many as take 64 decoded frames with GOPs of 2
    rates = rate.measure(clip, video, None, 2, 0.0)
    assert 0.2 < rates.nvdec / rates.cpu < 5
