"""The measured speed of NVDEC and of the CPU. DALI's CPU decoder and VP9 replace the GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.datasets import TOP
from support.slow import slow_after

import dali_stream
from dali_stream.decode import rate
from dali_stream.decode.rate import Rates, RequestClips
from dali_stream.mp4.clip import Clip
from dali_stream.mp4.format import VideoFormat, describe
from dali_stream.mp4.index import read_index

FIRST = f"videos/{TOP}/chunk-000/file-000.mp4"


def clips_of(root: Path) -> tuple[RequestClips, VideoFormat]:
    store = dali_stream.Dataset(root).data_store
    table = read_index(store, FIRST)
    return rate.request_clips(store, table, None), describe(table.configs[0])


def test_dali_that_fails_while_it_is_measured_is_a_decode_error(vp9_demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("Error in operator, encountered: no surface C++ context: frames")

    broken = SimpleNamespace(build=lambda: None, run=fail)
    monkeypatch.setattr("dali_stream.decode.dali.pipeline", lambda *_, **__: broken)
    with pytest.raises(dali_stream.DecodeError, match=r"^DALI's video decoder failed: no surface$"):
        rate.measure(*clips_of(vp9_demo), None, 1, 1, 0.0)


def test_the_clips_have_a_frame_from_the_middle_of_each_gop(vp9_demo: Path) -> None:
    clips, _ = clips_of(vp9_demo)
    assert len(clips.singles) == len(clips.packed.frames) > 1
    assert all(clip.coded_frames == 6 for clip in clips.singles)  # to the middle of a GOP of 12


@pytest.mark.parametrize(("slowed", "faster"), slow_after(1, [("_with_dali", "cpu"), ("_with_torchcodec", "nvdec")]))
def test_a_slower_decoder_is_seen(slowed: str, faster: str, vp9_demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One decoder repeats each batch 20 times."""
    make = getattr(rate, slowed)

    def repeated(*arguments: Any) -> Callable[[], int]:
        decode = make(*arguments)
        return lambda: max(decode() for _ in range(20))

    monkeypatch.setattr(rate, slowed, repeated)
    rates = rate.measure(*clips_of(vp9_demo), None, 1, 1, 0.0)
    assert ("nvdec" if rates.nvdec > rates.cpu else "cpu") == faster


@pytest.mark.slow
def test_long_gops_are_measured_with_few_requests(written: Callable[..., Path]) -> None:
    clips, _ = clips_of(written(episodes=2, size=(128, 160), codec="vp9", gop=30))
    assert clips.packed.coded_frames <= 64


def test_each_decoder_is_measured_for_half_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clips, video = RequestClips([], Clip(bytearray(), [], 0)), VideoFormat("vp9", 0, "420", 8, 128, 160)
    monkeypatch.setattr(rate, "_with_dali", lambda *_: "dali")
    monkeypatch.setattr(
        rate, "_with_torchcodec", lambda _, __, ___, gpu=None: "torchcodec" if gpu is None else "torchcodec-cuda"
    )
    measured: list[tuple[str, float]] = []

    def timed(decoder: Any, seconds: float) -> float:
        measured.append((decoder, seconds))
        return float(len(measured))

    monkeypatch.setattr(rate, "_rate", timed)
    assert rate.measure(clips, video, None, 1, 2, 3.0) == Rates(1.0, 2.0)
    assert measured == [("dali", 1.5), ("torchcodec", 1.5)]
    measured.clear()
    assert rate.measure(clips, video, 0, 1, 2, 3.0, "torchcodec-cuda") == Rates(1.0, 2.0, "torchcodec-cuda")
    assert measured == [("torchcodec-cuda", 1.5), ("torchcodec", 1.5)]


def test_torchcodec_on_nvdec_is_measured_with_one_clip_of_many_frames(demo: Path) -> None:
    """On the CPU, where both decoders are the same."""
    store = dali_stream.Dataset(demo).data_store
    table = read_index(store, FIRST)
    clips = rate.request_clips(store, table, None, "torchcodec-cuda")
    assert clips.singles == []
    assert len(clips.packed.frames) == 42  # as many as take 64 decoded frames with GOPs of 2
    rates = rate.measure(clips, describe(table.configs[0]), None, 1, 2, 0.0, "torchcodec-cuda")
    assert 0.2 < rates.nvdec / rates.cpu < 5
