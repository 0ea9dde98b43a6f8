"""NVDEC's formats according to the driver, as `doctor` and a Loader report them (with `support.gpu_machine`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.doctor import doctor, found
from support.gpu_machine import GpuMachine
from support.videos import draw, encode, h264, recorded, write_dataset

from dali_stream import Loader

pytestmark = pytest.mark.usefixtures("doctor_here")


def decoders(gpu: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """{format: the driver's answer for it} of a GPU of the report."""
    return {f"{each['codec']} {each['chroma']} {each['depth']}": each for each in gpu["decoders"]}


def supported(gpu: dict[str, Any]) -> set[str]:
    """The formats that a GPU of the report decodes."""
    return {name for name, each in decoders(gpu).items() if each["supported"]}


def reason(root: Path) -> str:
    """Why the CPU decodes a dataset."""
    with Loader(root, batch_size=1, device="cuda") as loader:
        [(decoder, why)] = {(route.decoder, route.reason) for route in loader.routes.values()}
    assert decoder == "torchcodec"
    return why


@pytest.mark.parametrize(
    ("gpu", "name", "engines", "has", "lacks"),
    [
        (
            "a100",
            "NVIDIA A100-SXM4-80GB",
            5,
            {"h264 420 8", "hevc 420 10", "vp9 420 8", "mpeg4 420 8"},
            {"av1 420 8", "h264 422 8"},
        ),
        ("h100", "NVIDIA H100 80GB HBM3", 7, {"h264 420 8", "hevc 420 8"}, {"av1 420 8", "h264 420 10"}),
        ("l4", "NVIDIA L4", 4, {"av1 420 8", "av1 420 10"}, {"av1 444 8", "h264 422 8"}),
        ("b200", "NVIDIA B200", 7, {"av1 420 8", "h264 422 8", "hevc 422 10"}, {"h264 444 8"}),
    ],
)
def test_each_gpu_decodes_what_its_driver_says(
    gpu: str, name: str, engines: int, has: set[str], lacks: set[str], gpu_machine: GpuMachine
) -> None:
    gpu_machine.has(gpu, cuda=12040)
    report = doctor()
    [described] = report["gpus"]
    assert described["name"] == name
    assert has <= supported(described)
    assert not lacks & supported(described)
    assert decoders(described)["h264 420 8"] == {
        "codec": "h264", "chroma": "420", "depth": 8, "supported": True, "reason": "", "engines": engines,
        "min_size": [80, 144], "max_size": [4096, 4096], "max_macroblocks": 65536,
    }  # fmt: skip
    assert "CUDA 12.4" in found(report, "driver")["text"]


def test_formats_that_dali_does_not_take_from_nvdec(gpu_machine: GpuMachine) -> None:
    """NVDEC gives 4:4:4 as 4:4:4, and DALI asks for NV12 or P016."""
    gpu_machine.has("h100")
    assert "to a format that DALI does not take" in decoders(doctor()["gpus"][0])["hevc 444 8"]["reason"]


@pytest.mark.parametrize(("outputs", "eight", "ten"), [(1, True, False), (2, False, True), (3, True, True), (4, False, False)])
def test_dali_takes_nv12_of_8_bits_and_p016_of_more(outputs: int, eight: bool, ten: bool, gpu_machine: GpuMachine) -> None:
    """By the mask of output formats of the driver's answer."""
    gpu_machine.has("h100", outputs=outputs)
    answers = decoders(doctor()["gpus"][0])
    assert [answers[f"hevc 420 {depth}"]["supported"] for depth in (8, 10)] == [eight, ten]


def test_two_different_gpus_are_asked_each_for_itself(gpu_machine: GpuMachine) -> None:
    gpu_machine.has("h100", "l4")
    first, second = doctor()["gpus"]
    made = gpu_machine.driver_calls()
    assert [(gpu["compute"], gpu["memory"] >> 30) for gpu in (first, second)] == [([9, 0], 80), ([8, 9], 23)]
    assert "av1 420 8" not in supported(first)
    assert "av1 420 8" in supported(second)
    for call in ("cuDevicePrimaryCtxRetain", "cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2", "cuDevicePrimaryCtxRelease_v2"):
        assert made.count(call) == 2  # a context costs a quarter of a second: one for all questions, given back


def test_a_mig_slice_without_engines(h264_demo: Path, gpu_machine: GpuMachine) -> None:
    gpu_machine.has("mig")
    assert not supported(doctor()["gpus"][0])
    assert reason(h264_demo) == "this GPU has no NVDEC engine, as is possible for a MIG slice"


@pytest.mark.parametrize(
    ("call", "error", "name", "remedy"),
    [
        ("cuInit", 100, "CUDA_ERROR_NO_DEVICE", "--gpus all"),
        ("cuInit", 34, "CUDA_ERROR_STUB_LIBRARY", "LD_LIBRARY_PATH"),
        ("cuInit", 802, "CUDA_ERROR_SYSTEM_NOT_READY", "nvidia-fabricmanager"),
        ("cuInit", 803, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", "Restart"),
        ("cuInit", 804, "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE", "cuda-compat"),
        ("cuInit", 4711, "error 4711", "nvidia-smi"),
        ("cuDeviceGetCount", 800, "CUDA_ERROR_NOT_PERMITTED", "/dev/nvidia"),
        ("cuDeviceGetName", 101, "CUDA_ERROR_INVALID_DEVICE", "CUDA_VISIBLE_DEVICES"),
    ],
)
def test_a_driver_that_fails_says_how_and_what_to_do(
    call: str, error: int, name: str, remedy: str, h264_demo: Path, gpu_machine: GpuMachine
) -> None:
    gpu_machine.has("h100", fails={call: error})
    finding = found(doctor(), "driver")
    assert name in finding["text"]
    assert remedy in finding["remedy"]
    if call == "cuInit":
        assert name in reason(h264_demo)
        assert remedy in reason(h264_demo)


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        ("cuDeviceGet", 101, "CUDA_ERROR_INVALID_DEVICE (101) when GPU 0 was opened"),
        ("cuDevicePrimaryCtxRetain", 2, "CUDA_ERROR_OUT_OF_MEMORY (2) when a context on GPU 0 was requested: free memory"),
        ("cuDevicePrimaryCtxRetain", 46, "CUDA_ERROR_DEVICE_UNAVAILABLE"),
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
    call: str, error: int, said: str, h264_demo: Path, gpu_machine: GpuMachine
) -> None:
    gpu_machine.has("h100", fails={call: error})
    assert said in reason(h264_demo)
    made = gpu_machine.driver_calls()  # every retained context is released, whatever failed
    if call != "cuDevicePrimaryCtxRetain":
        assert made.count("cuDevicePrimaryCtxRetain") == made.count("cuDevicePrimaryCtxRelease_v2")


def test_one_codec_that_the_driver_does_not_know_leaves_the_others(gpu_machine: GpuMachine) -> None:
    """A driver from before AV1 may answer with an error instead of "no"."""
    gpu_machine.has("l4", fails={"cuvidGetDecoderCaps:av1": 1})
    [gpu] = doctor()["gpus"]
    assert "hevc 420 8" in supported(gpu)
    assert "av1 420 8" not in supported(gpu)


def test_a_container_without_the_video_capability(h264_demo: Path, gpu_machine: GpuMachine) -> None:
    gpu_machine.has("h100", video=False)
    [gpu] = doctor()["gpus"]
    assert gpu["name"] == "NVIDIA H100 80GB HBM3"
    assert "libnvcuvid.so.1" in gpu["error"]
    assert "NVIDIA_DRIVER_CAPABILITIES=video,compute,utility" in reason(h264_demo)


def test_sizes_are_compared_with_all_limits(tmp_path: Path, gpu_machine: GpuMachine) -> None:
    """The frames have 128×160 pixels, or 8×10 macroblocks."""
    root = recorded(tmp_path, h264(12))
    limits = {"least": (128, 160), "most": (128, 160), "macroblocks": 80}
    gpu_machine.has("h100", **limits)
    with Loader(root, batch_size=1, device="cuda") as loader:
        assert [route.decoder for route in loader.routes.values()] == ["torchcodec-cuda"]
    for least, most in (((129, 160), (200, 200)), ((128, 161), (200, 200)), ((1, 1), (127, 160)), ((1, 1), (128, 159))):
        gpu_machine.has("h100", least=least, most=most)
        sizes = "{}×{} to {}×{}".format(*least, *most)
        assert reason(root) == f"128×160 is outside what NVDEC takes, {sizes}"
    gpu_machine.has("h100", **limits | {"macroblocks": 79})
    assert reason(root) == "128×160 has 80 macroblocks and NVDEC takes up to 79"


def test_a_codec_that_nvdec_never_decodes(tmp_path: Path, gpu_machine: GpuMachine) -> None:
    movie = encode(draw((8,)), tmp_path / "video.mov", ("-c:v", "prores_ks", "-pix_fmt", "yuv422p10le"))
    root = write_dataset(tmp_path / "set", [movie.rename(tmp_path / "video.mp4")], [[8]])
    assert reason(root) == "NVDEC has no decoder for apch 420 8 bit"  # its name in the file
