"""Interpretation of the driver's answers, with a fake driver for GPUs that this machine lacks (`support.driver`)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.driver import FakeDriver
from support.slow import slow

from dali_stream.decode import capability

_ASK = """
import json
from dali_stream.decode import capability as c
def told(call, *arguments):
    try:
        return call(*arguments)
    except c.DriverError as error:
        return {"error": str(error), "remedy": error.remedy}
def caps(gpu):
    found = told(c.capabilities, gpu)
    return found if "error" in found else [[*key, vars(cap)] for key, cap in found.items()]
gpus = told(c.gpus)
gpus = gpus if "error" in gpus else [vars(gpu) for gpu in gpus]
print(json.dumps({
    "cuda": told(c.cuda_version),
    "gpus": gpus,
    "caps": [caps(index) for index in range(len(gpus))] if isinstance(gpus, list) else [],
    "h264": vars(c.capability(0, "h264", "420", 8)),
    "unknown": vars(c.capability(0, "prores", "422", 10)),
}))
"""


def ask(environment: dict[str, str]) -> Any:
    """Capabilities that a process with this driver reports."""
    done = subprocess.run([sys.executable, "-c", _ASK], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def supported(caps: list[Any]) -> set[str]:
    """The formats that a GPU decodes."""
    return {f"{codec} {chroma} {depth}" for codec, chroma, depth, cap in caps if cap["supported"]}


@pytest.mark.parametrize(
    ("gpu", "name", "engines", "has", "lacks"),
    [
        slow(
            "a100",
            "NVIDIA A100-SXM4-80GB",
            5,
            {"h264 420 8", "hevc 420 10", "vp9 420 8", "mpeg4 420 8"},
            {"av1 420 8", "h264 422 8"},
        ),
        ("h100", "NVIDIA H100 80GB HBM3", 7, {"h264 420 8", "hevc 420 8"}, {"av1 420 8", "h264 420 10"}),
        slow("l4", "NVIDIA L4", 4, {"av1 420 8", "av1 420 10"}, {"av1 444 8", "h264 422 8"}),
        ("b200", "NVIDIA B200", 7, {"av1 420 8", "h264 422 8", "hevc 422 10"}, {"h264 444 8"}),
    ],
)
def test_each_gpu_decodes_what_its_driver_says(
    gpu: str, name: str, engines: int, has: set[str], lacks: set[str], fake_driver: FakeDriver
) -> None:
    found = ask(fake_driver(gpu, cuda="12040"))
    assert found["cuda"] == [12, 4]
    assert [g["name"] for g in found["gpus"]] == [name]
    assert has <= supported(found["caps"][0])
    assert not lacks & supported(found["caps"][0])
    assert found["h264"] == {
        "supported": True, "reason": "", "engines": engines, "min_size": [80, 144], "max_size": [4096, 4096],
        "max_macroblocks": 65536,
    }  # fmt: skip
    assert found["unknown"]["reason"] == "NVDEC has no decoder for prores 422 10 bit"


def test_formats_that_dali_does_not_take_from_nvdec(fake_driver: FakeDriver) -> None:
    """NVDEC gives 4:4:4 as 4:4:4, and DALI asks for NV12 or P016."""
    caps = {tuple(key): cap for *key, cap in ask(fake_driver("h100"))["caps"][0]}
    assert "to a format that DALI does not take" in caps["hevc", "444", 8]["reason"]


def test_two_different_gpus_are_asked_each_for_itself(fake_driver: FakeDriver, tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    found = ask(fake_driver("h100", "l4") | {"FAKE_CALLS": str(calls)})
    assert [(g["index"], g["compute"], g["memory"] >> 30) for g in found["gpus"]] == [(0, [9, 0], 80), (1, [8, 9], 23)]
    assert "av1 420 8" not in supported(found["caps"][0])
    assert "av1 420 8" in supported(found["caps"][1])
    made = calls.read_text().split()
    for call in ("cuDevicePrimaryCtxRetain", "cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2", "cuDevicePrimaryCtxRelease_v2"):
        assert made.count(call) == 2  # a context costs a quarter of a second: one for all questions, given back


def test_a_mig_slice_without_engines(fake_driver: FakeDriver) -> None:
    found = ask(fake_driver("mig"))
    assert not supported(found["caps"][0])
    assert found["h264"]["reason"] == "this GPU has no NVDEC engine, as is possible for a MIG slice"


@pytest.mark.parametrize(
    ("call", "error", "name", "remedy"),
    [
        ("cuInit", 100, "CUDA_ERROR_NO_DEVICE", "--gpus all"),
        slow("cuInit", 34, "CUDA_ERROR_STUB_LIBRARY", "LD_LIBRARY_PATH"),
        slow("cuInit", 802, "CUDA_ERROR_SYSTEM_NOT_READY", "nvidia-fabricmanager"),
        slow("cuInit", 803, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", "Restart"),
        slow("cuInit", 804, "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE", "cuda-compat"),
        slow("cuInit", 4711, "error 4711", "nvidia-smi"),
        slow("cuDeviceGetCount", 800, "CUDA_ERROR_NOT_PERMITTED", "/dev/nvidia"),
        ("cuDeviceGetName", 101, "CUDA_ERROR_INVALID_DEVICE", "CUDA_VISIBLE_DEVICES"),
    ],
)
def test_a_driver_that_fails_says_how_and_what_to_do(
    call: str, error: int, name: str, remedy: str, fake_driver: FakeDriver
) -> None:
    found = ask(fake_driver("h100", fails={call: error}))
    assert name in found["gpus"]["error"]
    assert remedy in found["gpus"]["remedy"]
    if call == "cuInit":
        assert not found["h264"]["supported"]
        assert name in found["h264"]["reason"]
        assert remedy in found["h264"]["reason"]


@pytest.mark.parametrize(
    ("call", "error", "reason"),
    [
        ("cuDeviceGet", 101, "CUDA_ERROR_INVALID_DEVICE (101) when GPU 0 was opened"),
        slow("cuDevicePrimaryCtxRetain", 2, "CUDA_ERROR_OUT_OF_MEMORY (2) when a context on GPU 0 was requested: free memory"),
        slow("cuDevicePrimaryCtxRetain", 46, "CUDA_ERROR_DEVICE_UNAVAILABLE"),
        ("cuCtxPushCurrent_v2", 1, "CUDA_ERROR_INVALID_VALUE (1) when the context on GPU 0 was made current"),
        (
            "cuvidGetDecoderCaps",
            100,
            "(100) when asked what NVDEC decodes: a container with only some of the machine's GPUs",
        ),
        ("cuvidGetDecoderCaps", 801, "CUDA_ERROR_NOT_SUPPORTED (801) when asked whether NVDEC decodes h264 420 8 bit"),
        ("cuvidGetDecoderCaps:h264", 1, "CUDA_ERROR_INVALID_VALUE (1) when asked whether NVDEC decodes h264 420 8 bit"),
    ],
)
def test_a_question_that_fails_is_a_decoder_that_is_not_used(
    call: str, error: int, reason: str, fake_driver: FakeDriver, tmp_path: Path
) -> None:
    calls = tmp_path / "calls"
    found = ask(fake_driver("h100", fails={call: error}) | {"FAKE_CALLS": str(calls)})
    assert not found["h264"]["supported"]
    assert reason in found["h264"]["reason"]
    made = calls.read_text().split()  # every retained context is released, whatever failed
    if call != "cuDevicePrimaryCtxRetain":
        assert made.count("cuDevicePrimaryCtxRetain") == made.count("cuDevicePrimaryCtxRelease_v2")


def test_one_codec_that_the_driver_does_not_know_leaves_the_others(fake_driver: FakeDriver) -> None:
    """A driver from before AV1 may answer with an error instead of "no"."""
    found = supported(ask(fake_driver("l4", fails={"cuvidGetDecoderCaps:av1": 1}))["caps"][0])
    assert "hevc 420 8" in found
    assert "av1 420 8" not in found


def test_a_container_without_the_video_capability(fake_driver: FakeDriver) -> None:
    found = ask(fake_driver("h100", video=False))
    assert [g["name"] for g in found["gpus"]] == ["NVIDIA H100 80GB HBM3"]
    assert "libnvcuvid.so.1" in found["caps"][0]["error"]
    assert "NVIDIA_DRIVER_CAPABILITIES=video,compute,utility" in found["h264"]["reason"]


def test_frames_that_nvdec_is_too_small_for_are_refused() -> None:
    caps = capability.Capability(True, "", 1, (80, 144), (2048, 4096), 8160)
    assert [caps.refusal(*size) for size in ((80, 144), (1080, 1920), (1920, 1088), (2048, 1000))] == [""] * 4
    for size in ((79, 144), (80, 143), (2049, 144), (80, 4097)):
        assert caps.refusal(*size) == f"{size[0]}×{size[1]} is outside what NVDEC takes, 80×144 to 2048×4096"
    assert caps.refusal(1081, 1921) == "1081×1921 has 8228 macroblocks and NVDEC takes up to 8160"
    assert "has 8192 macroblocks" in caps.refusal(1024, 2048)


@pytest.mark.parametrize(
    ("outputs", "supported"), [(1, [True, False]), (2, [False, True]), (3, [True, True]), (4, [False, False])]
)
def test_dali_takes_nv12_of_8_bits_and_p016_of_more(outputs: int, supported: list[bool]) -> None:
    """By the mask of output formats of the driver's answer."""

    def answer(caps: Any) -> int:
        caps._obj.supported, caps._obj.engines, caps._obj.outputs = 1, 2, outputs
        return 0

    nvcuvid: Any = SimpleNamespace(cuvidGetDecoderCaps=answer)
    found = [capability._ask(nvcuvid, "hevc", "420", depth) for depth in (8, 10)]
    assert [caps.supported for caps in found] == supported


def test_engines_are_those_of_supported_formats(monkeypatch: pytest.MonkeyPatch) -> None:
    """At least one is counted on, also where the driver does not tell."""
    yes, no = (capability.Capability(supported, "", engines) for supported, engines in ((True, 3), (False, 7)))
    for answers, expected in (([yes, no], 3), ([no], 1), ([], 1)):
        monkeypatch.setattr(capability, "capabilities", lambda gpu, answers=answers: dict(enumerate(answers)))
        assert capability.engines(0) == expected

    def fail(gpu: int) -> None:
        raise capability.DriverError("no driver", "install it")

    monkeypatch.setattr(capability, "capabilities", fail)
    assert capability.engines(0) == 1
    assert capability.capability(0, "h264", "420", 8).reason == "no driver: install it"
