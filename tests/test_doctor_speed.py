"""The speed of NVDEC and of the CPU, as `dali-stream doctor URI` measures it. DALI's CPU decoder and VP9 replace the GPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.datasets import TOP

import dali_stream
from dali_stream.mp4.clip import Clip
from dali_stream.mp4.format import VideoFormat, describe
from dali_stream.mp4.index import read_index
from dali_stream.tools.diagnosis import camera, speeds
from dali_stream.tools.diagnosis.frames import call_by_name
from dali_stream.tools.diagnosis.speeds import Rates, RequestClips
from dali_stream.tools.isolated import Answer

FIRST = f"videos/{TOP}/chunk-000/file-000.mp4"


def clips_of(root: Path) -> tuple[RequestClips, VideoFormat]:
    store = dali_stream.Dataset(root).data_store
    table = read_index(store, FIRST)
    return speeds.request_clips(store, table, None), describe(table.configs[0])


@pytest.fixture
def in_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each decoder is measured with one batch, in one thread."""
    monkeypatch.setattr(speeds, "_SECONDS", 0.0)
    monkeypatch.setattr("dali_stream.system.process.cores", lambda: 1)


@pytest.mark.parametrize(
    ("nvdec", "status", "text", "remedy"),
    [
        (3000.0, "ok", "NVDEC 3000 frames/s, the CPU 1000: NVDEC is faster", ""),
        (750.0, "ok", "NVDEC 750 frames/s, the CPU 1000: the CPU is faster, by 1.3 times", ""),
        (
            500.0,
            "warning",
            "NVDEC 500 frames/s, the CPU 1000: the CPU is faster, by 2.0 times",
            'use Loader(decode="torchcodec")',
        ),
    ],
)
def test_doctor_says_which_decoder_is_faster(nvdec: float, status: str, text: str, remedy: str) -> None:
    examined: Any = SimpleNamespace(facts={})
    [(name, result)] = camera.check_speeds(examined, {"GPU 0": Answer(Rates(nvdec, 1000.0))}).items()
    assert name == "speed on GPU 0"
    assert result[:2] == (status, text)
    assert result[2].startswith(remedy)
    assert bool(result[2]) == bool(remedy)
    assert examined.facts["speed"] == {"GPU 0": {"nvdec": nvdec, "cpu": 1000.0}}


def test_doctor_warns_if_the_speed_cannot_be_measured() -> None:
    examined: Any = SimpleNamespace(facts={})
    failed = Answer({}, "DALI's video decoder failed: no surface\nTraceback", "DecodeError")
    [(status, text, _)] = camera.check_speeds(examined, {"GPU 0": failed}).values()
    assert (status, text) == ("warning", "it could not be measured: DALI's video decoder failed: no surface")
    assert examined.facts["speed"] == {"GPU 0": {}}


@pytest.mark.usefixtures("in_no_time")
def test_dali_that_fails_while_it_is_measured_is_a_decode_error(vp9_demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("Error in operator, encountered: no surface C++ context: frames")

    broken = SimpleNamespace(build=lambda: None, run=fail)
    monkeypatch.setattr("dali_stream.decode.dali.pipeline", lambda *_, **__: broken)
    with pytest.raises(dali_stream.DecodeError, match=r"^DALI's video decoder failed: no surface$"):
        speeds.measure(*clips_of(vp9_demo), None, 1)


def test_the_clips_have_a_frame_from_the_middle_of_each_gop(vp9_demo: Path) -> None:
    clips, _ = clips_of(vp9_demo)
    assert len(clips.singles) == len(clips.packed.frames) > 1
    assert all(clip.coded_frames == 6 for clip in clips.singles)  # to the middle of a GOP of 12


@pytest.mark.usefixtures("in_no_time")
@pytest.mark.parametrize(("slowed", "faster"), [("_with_dali", "cpu"), ("_with_torchcodec", "nvdec")])
def test_a_slower_decoder_is_seen(slowed: str, faster: str, vp9_demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One decoder repeats each batch 20 times."""
    make = getattr(speeds, slowed)

    def repeated(*arguments: Any) -> Callable[[], int]:
        decode = make(*arguments)
        return lambda: max(decode() for _ in range(20))

    monkeypatch.setattr(speeds, slowed, repeated)
    rates = speeds.measure(*clips_of(vp9_demo), None, 1)
    assert max(vars(rates), key=vars(rates).__getitem__) == faster


@pytest.mark.slow
def test_long_gops_are_measured_with_few_requests(written: Callable[..., Path]) -> None:
    clips, _ = clips_of(written(episodes=2, size=(128, 160), codec="vp9", gop=30))
    assert clips.packed.coded_frames <= 64


@pytest.mark.slow
def test_doctor_shows_both_figures(vp9_demo: Path) -> None:
    """Measured in another process."""
    calls = {TOP: {"GPU 0": partial(speeds.measure, *clips_of(vp9_demo), None, 2)}}
    examined: Any = SimpleNamespace(facts={})
    [(_, text, _)] = camera.check_speeds(examined, call_by_name(calls, 120)[TOP]).values()
    rates = Rates(**examined.facts["speed"]["GPU 0"])
    assert rates.nvdec > 1
    assert rates.cpu > 1
    assert str(rates) in text


def test_each_decoder_is_measured_for_half_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clips, video = RequestClips([], Clip(bytearray(), [], 0)), VideoFormat("vp9", 0, "420", 8, 128, 160)
    monkeypatch.setattr(speeds, "_with_dali", lambda *_: "dali")
    monkeypatch.setattr(speeds, "_with_torchcodec", lambda *_: "torchcodec")
    measured: list[tuple[str, float]] = []

    def rate(decoder: Any, seconds: float) -> float:
        measured.append((decoder, seconds))
        return float(len(measured))

    monkeypatch.setattr(speeds, "_rate", rate)
    monkeypatch.setattr(speeds, "_SECONDS", 3.0)
    assert speeds.measure(clips, video, None, 1) == Rates(1.0, 2.0)
    assert measured == [("dali", 1.5), ("torchcodec", 1.5)]
