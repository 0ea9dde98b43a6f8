"""How the measured speed of NVDEC and the CPU decides on a decoder. NVDEC's figures are made up; those of VP9 are measured."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.datasets import TOP

import dali_stream
from dali_stream.cache.indices import IndexCache
from dali_stream.decode import choice, route, speed
from dali_stream.decode.capability import Capability, Gpu
from dali_stream.decode.route import Rates
from dali_stream.mp4.clip import Clip
from dali_stream.mp4.format import VideoFormat, describe
from dali_stream.mp4.index import read_index
from dali_stream.tools.diagnosis import answers, camera
from dali_stream.tools.diagnosis.frames import call_by_name

FIRST = f"videos/{TOP}/chunk-000/file-000.mp4"
THREADS = 4


class Machine:
    """A machine whose GPU decodes everything.

    Attributes:
        rates: Speeds that it measures.
        seconds: Time limit of each measurement so far.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
        self.rates, self.seconds, self.gpu, self.driver = Rates(1000.0, 1000.0), list[float](), "NVIDIA L4", "580.95"
        capability = Capability(True, "", 4, (48, 48), (4096, 4096), 65536)
        monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
        monkeypatch.setattr(route, "capability", lambda *_: capability)
        monkeypatch.setattr("dali_stream.decode.trial.trial", lambda *_: "")
        monkeypatch.setattr(speed, "gpus", lambda: (Gpu(0, self.gpu, 24 << 30, (8, 9)),))
        monkeypatch.setattr(speed, "driver_version", lambda: self.driver)
        monkeypatch.setattr(speed, "measure", self._measure)

    def _measure(self, *arguments: Any) -> Rates:
        self.seconds.append(arguments[-1])
        return self.rates

    def routes(self, root: Path, decode: str, gpu: int | None = 0, threads: int = THREADS) -> dict[str, route.Route]:
        dataset = dali_stream.Dataset(root)
        return choice.choose_routes(dataset, IndexCache(dataset), decode, gpu, threads)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    return Machine(monkeypatch, tmp_path / "cache")


@pytest.mark.parametrize(
    ("decode", "nvdec", "decoder", "warns"),
    [
        ("auto", 3000.0, "dali", False),
        ("auto", 750.0, "dali", False),
        ("auto", 650.0, "dali", True),
        ("fastest", 1100.0, "dali", False),
        ("fastest", 900.0, "torchcodec", False),
        ("fastest", 400.0, "torchcodec", False),
    ],
)
def test_the_measured_speed_decides_or_warns(
    decode: str,
    nvdec: float,
    decoder: str,
    warns: bool,
    h264_demo: Path,
    machine: Machine,
    caplog: pytest.LogCaptureFixture,
) -> None:
    machine.rates = Rates(nvdec, 1000.0)
    with caplog.at_level(logging.INFO, "dali_stream"):
        routes = machine.routes(h264_demo, decode)
    assert {found.decoder for found in routes.values()} == {decoder}
    assert all(found.rates == machine.rates for found in routes.values())
    lines = [record for record in caplog.records if f"NVDEC {nvdec:.0f} frames/s, the CPU 1000" in record.getMessage()]
    assert len(lines) == len(routes)
    assert [record.levelname for record in lines] == ["WARNING" if warns else "INFO"] * len(routes)
    assert all(('Use decode="fastest"' in record.getMessage()) == warns for record in lines)
    assert all(f"NVDEC {nvdec:.0f} frames/s, the CPU 1000" in found.reason for found in routes.values())


@pytest.mark.parametrize("decode", ["auto", "fastest"])
def test_nothing_is_measured_without_a_gpu(decode: str, vp9_demo: Path, machine: Machine) -> None:
    with dali_stream.Loader(vp9_demo, batch_size=8, device="cpu", decode=decode) as loader:
        assert {found.decoder for found in loader.routes.values()} == {"torchcodec"}
        assert all(found.rates is None for found in loader.routes.values())
    assert machine.seconds == []


@pytest.mark.parametrize("decode", ["dali", "torchcodec"])
def test_nothing_is_measured_for_a_decoder_that_is_asked_for(decode: str, h264_demo: Path, machine: Machine) -> None:
    assert {found.decoder for found in machine.routes(h264_demo, decode).values()} == {decode}
    assert machine.seconds == []


def test_a_video_that_nvdec_refuses_is_not_measured(h264_demo: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dali_stream.decode.trial.trial", lambda *_: "DALI's frames differ from FFmpeg's")
    assert {found.decoder for found in machine.routes(h264_demo, "fastest").values()} == {"torchcodec"}
    assert machine.seconds == []


def test_a_decoder_that_fails_while_it_is_measured_is_not_used(
    h264_demo: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Rates:
        raise dali_stream.DecodeError("DALI's video decoder failed: no surface")

    monkeypatch.setattr(speed, "measure", fail)
    for found in machine.routes(h264_demo, "auto").values():
        assert (found.decoder, found.reason) == (
            "torchcodec",
            "DALI's video decoder failed: no surface, when its speed was measured",
        )


def test_dali_that_fails_while_it_is_measured_is_a_decode_error(vp9_demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("Error in operator, encountered: no surface C++ context: frames")

    store = dali_stream.Dataset(vp9_demo).data_store
    table = read_index(store, FIRST)
    broken = SimpleNamespace(build=lambda: None, run=fail)
    monkeypatch.setattr("dali_stream.decode.dali.pipeline", lambda *_, **__: broken)
    with pytest.raises(dali_stream.DecodeError, match=r"^DALI's video decoder failed: no surface$"):
        speed.measure(speed.request_clips(store, table, None), describe(table.configs[0]), None, 1, 1, 0)


def test_cameras_of_one_kind_are_measured_once_and_later_loaders_measure_nothing(h264_demo: Path, machine: Machine) -> None:
    machine.routes(h264_demo, "auto")
    assert len(machine.seconds) == 1
    machine.rates = Rates(1.0, 1.0)
    assert machine.routes(h264_demo, "fastest")[TOP].rates == Rates(1000.0, 1000.0)
    assert len(machine.seconds) == 1


def test_another_gpu_driver_codec_size_gop_or_number_of_threads_is_measured_anew(vp9_demo: Path, machine: Machine) -> None:
    table = read_index(dali_stream.Dataset(vp9_demo).data_store, FIRST)
    video, clips = describe(table.configs[0]), speed.RequestClips([], Clip(bytearray(), [], 0))

    def measured(video: VideoFormat = video, gop: int = 12, threads: int = THREADS) -> int:
        """How many speeds the Loaders up to one on such a video have measured."""
        speed.Speeds(threads, 2, 0).of(video, gop, lambda: clips)
        return len(machine.seconds)

    assert measured() == 1
    assert measured(gop=2) == 2
    assert measured(dataclasses.replace(video, codec="hevc")) == 3
    assert measured(dataclasses.replace(video, height=144)) == 4
    assert measured(threads=THREADS + 1) == 5
    machine.driver = "590.10"
    assert measured() == 6
    machine.gpu = "NVIDIA H100"
    assert measured() == 7
    assert measured() == 7


def test_all_cameras_together_take_the_time_of_the_limit(vp9_demo: Path, machine: Machine) -> None:
    table = read_index(dali_stream.Dataset(vp9_demo).data_store, FIRST)
    speeds, clips = speed.Speeds(2, 20, 0), speed.RequestClips([], Clip(bytearray(), [], 0))
    for gop in range(1, 21):
        speeds.of(describe(table.configs[0]), gop, lambda: clips)
    assert len(machine.seconds) == 20
    assert 0.5 * speed.LIMIT_S < sum(machine.seconds) <= speed.LIMIT_S


@pytest.mark.parametrize("content", ["", "[]", '{"a": 1}', "no JSON", None])
def test_a_broken_or_forbidden_file_of_speeds_costs_only_another_measurement(
    content: str | None, h264_demo: Path, machine: Machine, tmp_path: Path
) -> None:
    file = tmp_path / "cache" / "dali_stream" / "decode_speed.json"
    if content is None:
        (tmp_path / "cache").write_text("a file in place of the folder")
    else:
        file.parent.mkdir(parents=True)
        file.write_text(content)
    assert machine.routes(h264_demo, "auto")[TOP].rates == machine.rates
    machine.routes(h264_demo, "auto")
    assert len(machine.seconds) == (2 if content is None else 1)
    assert content is None or len(json.loads(file.read_text())) >= 1


# ---- measured here, with DALI's decoder on the CPU


def test_both_decoders_are_measured(vp9_demo: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each decodes the requested frames: (frames, decoded) of a batch are counted, and time passes."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    store = dali_stream.Dataset(vp9_demo).data_store
    table = read_index(store, FIRST)
    clips = speed.request_clips(store, table, None)
    assert len(clips.singles) == len(clips.packed.frames) > 1
    assert all(clip.coded_frames == 6 for clip in clips.singles)  # to the middle of a GOP of 12
    rates = speed.Speeds(2, 2, None).of(describe(table.configs[0]), speed.median_gop(table), lambda: clips)
    assert rates.nvdec > 1
    assert rates.cpu > 1
    [(kind, kept)] = json.loads((tmp_path / "dali_stream" / "decode_speed.json").read_text()).items()
    assert kept == {"nvdec": rates.nvdec, "cpu": rates.cpu}
    assert "vp9 yuv420p 128×160, GOP 12" in kind


@pytest.mark.parametrize(("slowed", "faster"), [("_with_dali", "cpu"), ("_with_torchcodec", "nvdec")])
def test_a_slower_decoder_is_seen(slowed: str, faster: str, vp9_demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One decoder repeats each batch 20 times."""
    store = dali_stream.Dataset(vp9_demo).data_store
    table = read_index(store, FIRST)
    make = getattr(speed, slowed)

    def repeated(*arguments: Any) -> Callable[[], int]:
        decode = make(*arguments)
        return lambda: max(decode() for _ in range(20))

    monkeypatch.setattr(speed, slowed, repeated)
    rates = speed.measure(speed.request_clips(store, table, None), describe(table.configs[0]), None, 1, 1, 0)
    assert max(vars(rates), key=vars(rates).__getitem__) == faster


def test_long_gops_are_measured_with_few_requests(written: Callable[..., Path]) -> None:
    store = dali_stream.Dataset(written(episodes=2, size=(128, 160), codec="vp9", gop=30)).data_store
    clips = speed.request_clips(store, read_index(store, FIRST), None)
    assert clips.packed.coded_frames <= 64


@pytest.mark.slow
def test_doctor_shows_both_figures(vp9_demo: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Measured in another process, and with DALI's CPU decoder in place of a GPU."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    store = dali_stream.Dataset(vp9_demo).data_store
    table = read_index(store, FIRST)
    clips = speed.request_clips(store, table, None)
    calls = {TOP: {"GPU 0": partial(answers.speed, clips, describe(table.configs[0]), 12, None, 2)}}
    examined: Any = SimpleNamespace(facts={})
    [(name, (_, text, _))] = camera.check_speeds(examined, call_by_name(calls, 120)[TOP]).items()
    assert set(examined.facts["speed"]["GPU 0"]) == {"nvdec", "cpu"}
    assert name == "speed on GPU 0"
    assert str(Rates(**examined.facts["speed"]["GPU 0"])) in text
    # Once they are known, nothing is measured. These are such that the doctor warns.
    file = tmp_path / "dali_stream" / "decode_speed.json"
    file.write_text(json.dumps({kind: {"nvdec": 500, "cpu": 1000} for kind in json.loads(file.read_text())}))
    [result] = camera.check_speeds(examined, call_by_name(calls, 120)[TOP]).values()
    assert result == (
        "warning",
        "NVDEC 500 frames/s, the CPU 1000. NVDEC reaches 0.50 of the CPU's speed",
        'use decode="fastest"',
    )


def test_each_decoder_is_measured_for_half_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clips, video = speed.RequestClips([], Clip(bytearray(), [], 0)), VideoFormat("vp9", 0, "420", 8, 128, 160)
    monkeypatch.setattr(speed, "_with_dali", lambda *_: "dali")
    monkeypatch.setattr(speed, "_with_torchcodec", lambda *_: "torchcodec")
    measured: list[tuple[str, float]] = []

    def rate(decoder: Any, seconds: float) -> float:
        measured.append((decoder, seconds))
        return float(len(measured))

    monkeypatch.setattr(speed, "_rate", rate)
    assert speed.measure(clips, video, None, 4, 1, 3.0) == Rates(1.0, 2.0)
    assert measured == [("dali", 1.5), ("torchcodec", 1.5)]
