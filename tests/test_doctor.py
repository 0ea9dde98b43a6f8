"""`dali-stream doctor` on machines of all kinds: GPUs that are not here, libraries that are missing, crash or hang."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
import torchcodec
from support.doctor import ABORTS, ABSENT, BROKEN, HANGS, TORCH, bad, cpu_torch, doctor, found, run, shadows
from support.driver import FakeDriver
from support.gpu_machine import GpuMachine
from support.programs import failed

from dali_stream.cli import main
from dali_stream.system.cgroups import cpu_quota
from dali_stream.system.memory_limit import cgroup_memory_limit

CODECS = ("H.264", "HEVC", "AV1", "VP9", "MPEG-4")


@pytest.fixture
def libraries(tmp_path: Path) -> Path:
    return shadows(tmp_path / "libraries")


@pytest.mark.slow
def test_the_text_fits_on_a_screen(fake_driver: FakeDriver, libraries: Path) -> None:
    done = run(environment=fake_driver("h100"), libraries=libraries)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert len(lines) <= 30
    assert {"gpu", "software"} <= {line.strip() for line in lines}
    assert [line.split()[0] for line in lines if "AV1" in line and "GPU" in line] == ["warning"]
    assert "→ `dali-stream prepare URI OUT --codec hevc`" in done.stdout
    assert lines[-1].startswith("warning: 0 problems, ")


@pytest.mark.usefixtures("doctor_here")
@pytest.mark.parametrize(
    ("gpus", "warned", "engines"),
    [
        ("a100", ["GPU 0 AV1"], [5]),
        ("l4", [], [4]),
        ("b200", [], [7]),
        ("h100,h100,l4", ["GPU 0, 1 AV1"], [7, 7, 4]),
        ("mig", ["GPU 0"], [0]),
    ],
)
def test_what_each_gpu_decodes(gpus: str, warned: list[str], engines: list[int], gpu_machine: GpuMachine) -> None:
    gpu_machine.has(*gpus.split(","))
    report = doctor()
    assert report["status"] != "problem"
    assert bad(report) == [("warning", name) for name in warned]
    assert [gpu["engines"] for gpu in report["gpus"]] == engines
    if "AV1" in "".join(warned):
        assert "`dali-stream prepare URI OUT --codec hevc` re-encodes a dataset to HEVC" in found(report, warned[0])["remedy"]
    for name in ("GPU 0", "GPU 0, 1", "GPU 2"):
        shown = [f["name"] for f in report["findings"] if f["name"].startswith(f"{name} ")]
        assert shown in ([], [f"{name} {codec}" for codec in CODECS])
    if gpus == "b200":
        assert found(report, "GPU 0 HEVC")["text"] == "4:2:0 8 bit, 4:2:0 10 bit, 4:2:2 up to 8192×8192; no 4:4:4"
    if gpus == "l4":
        assert {(d["codec"], d["max_size"][0]) for d in report["gpus"][0]["decoders"] if d["supported"]} >= {
            ("h264", 4096), ("av1", 8192),
        }  # fmt: skip


@pytest.mark.usefixtures("doctor_here")
@pytest.mark.parametrize(
    ("fails", "status", "said", "remedy"),
    [
        ({"cuInit": 100}, "warning", "CUDA_ERROR_NO_DEVICE", "--gpus all"),
        ({"cuInit": 803}, "problem", "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", "Restart"),
        ({"cuInit": 34}, "problem", "CUDA_ERROR_STUB_LIBRARY", "LD_LIBRARY_PATH"),
        ({"cuDeviceGetCount": 800}, "problem", "CUDA_ERROR_NOT_PERMITTED", "/dev/nvidia"),
    ],
)
def test_a_driver_that_fails(fails: dict[str, int], status: str, said: str, remedy: str, gpu_machine: GpuMachine) -> None:
    gpu_machine.has("h100", fails=fails)
    report = doctor()
    finding = found(report, "driver")
    assert (report["status"], finding["status"], report["gpus"]) == (status, status, [])
    assert said in finding["text"]
    assert remedy in finding["remedy"]


@pytest.mark.usefixtures("doctor_here")
def test_nvdec_that_cannot_be_asked(gpu_machine: GpuMachine) -> None:
    gpu_machine.has("h100", video=False)
    report = doctor()
    assert bad(report) == [("problem", "GPU 0")]
    assert "libnvcuvid.so.1" in found(report, "GPU 0")["text"]
    assert "NVIDIA_DRIVER_CAPABILITIES=video,compute,utility" in found(report, "GPU 0")["remedy"]
    for fails, said in (
        ({"cuDevicePrimaryCtxRetain": 2}, "OUT_OF_MEMORY"),
        ({"cuvidGetDecoderCaps": 801}, "NOT_SUPPORTED"),
        ({"cuvidGetDecoderCaps": 100}, "NO_DEVICE"),
    ):
        gpu_machine.has("h100", fails=fails)
        report = doctor()
        assert bad(report) == [("problem", "GPU 0")]
        assert said in found(report, "GPU 0")["text"]


@pytest.mark.slow
def test_a_driver_that_crashes(fake_driver: FakeDriver, libraries: Path) -> None:
    """The fake driver aborts at a GPU that it does not know."""
    done = run("--json", environment=fake_driver("unheard-of"), libraries=libraries)
    report = json.loads(done.stdout)
    assert (done.returncode, done.stderr, report["gpus"]) == (1, "", [])
    assert "SIGABRT" in found(report, "driver")["text"]


@pytest.mark.slow
def test_what_does_not_fit_together(fake_driver: FakeDriver, tmp_path: Path) -> None:
    builds = {
        "cpu": (cpu_torch(), "11080", "without CUDA: it finds none of the driver's GPUs, and the driver supports up to 11.8"),
        "new": (
            f"__version__ = '2.13.0+cu130'\n{TORCH.format(cuda='13.0', gpu=False)}",
            "12040",
            "for CUDA 13.0: it finds none",
        ),
    }
    for name, (code, cuda, said) in builds.items():
        report = doctor(environment=fake_driver("l4", cuda=cuda), libraries=shadows(tmp_path / name, torch=code))
        finding = found(report, "torch")
        assert (report["status"], finding["status"]) == ("problem", "problem"), name
        assert said in finding["text"]
        assert "torch.cuda.init()'` says why" in finding["remedy"]
        dali = found(report, "DALI")
        assert dali["status"] == ("problem" if cuda == "11080" else "ok")
        assert ("for CUDA 12, and the driver supports up to 11.8" in dali["text"]) == (cuda == "11080")


@pytest.mark.usefixtures("doctor_here")
@pytest.mark.parametrize(("version", "cuda"), [("0.16.0", "13.0"), ("0.17.0+cu126", "12.6")])
def test_versions_that_must_not_decode_on_nvdec(version: str, cuda: str, gpu_machine: GpuMachine) -> None:
    """A warning, since the CPU decodes everything. Without engines, NVDEC decodes nothing in any version."""
    gpu_machine.installs(version, cuda)
    gpu_machine.has("l4")
    report = doctor()
    assert bad(report) == [("warning", "torchcodec")]
    finding = found(report, "torchcodec")
    said = f"torchcodec must be 0.17 or later, with torch for CUDA 13, got torchcodec {version} and torch {torch.__version__}"
    fits = f"{version}, fits torch and FFmpeg {torchcodec.ffmpeg_major_version}"
    assert finding["text"] == f"{fits}. The CPU decodes all videos: on NVDEC, {said}"
    assert finding["remedy"].startswith("pip install --upgrade 'torch>=2.11' 'torchcodec>=0.17', ")
    gpu_machine.has("mig")
    assert bad(doctor()) == [("warning", "GPU 0")]
    gpu_machine.has()
    assert "torchcodec" not in [name for _, name in bad(doctor())]


@pytest.mark.slow
def test_two_builds_of_dali_at_once(libraries: Path) -> None:
    for build in ("cuda120", "cuda130"):
        folder = libraries / f"nvidia_dali_{build}-2.4.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: nvidia-dali-{build}\nVersion: 2.4.0\n")
    finding = found(doctor(libraries=libraries), "DALI")
    assert finding["status"] == "problem"
    assert "nvidia-dali-cuda120 and nvidia-dali-cuda130 are both installed" in finding["text"]
    assert "keep one" in finding["remedy"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "codes",
    [
        {"torch": ABSENT, "DALI": BROKEN},
        {"torch": BROKEN, "torchcodec": ABSENT},
        {"torchcodec": BROKEN, "DALI": ABSENT},
        {"torch": ABORTS},
        {"torchcodec": ABORTS, "DALI": ABORTS},
    ],
)
def test_libraries_that_are_absent_broken_or_crash(codes: dict[str, str], tmp_path: Path) -> None:
    report = doctor(libraries=shadows(tmp_path, **{library.lower(): code for library, code in codes.items()}))
    assert report["status"] == "problem"
    for library, code in codes.items():
        finding = found(report, library)
        assert {ABSENT: "No module named X", BROKEN: "undefined symbol", ABORTS: "crashed with SIGABRT"}[code] in finding[
            "text"
        ]
        # Without a GPU, a Loader needs no DALI.
        status = "warning" if (library, code) == ("DALI", ABSENT) else "problem"
        assert finding["status"] == status
        assert status == "warning" or finding["text"].startswith(f"{library} does not import: ")
        if (library, code) == ("torchcodec", BROKEN):
            assert all(word in finding["remedy"] for word in ("FFmpeg 4 to 8", "fits torch"))
    others = {"torch", "torchcodec", "DALI"} - set(codes) - ({"torchcodec"} if codes == {"torch": ABORTS} else set())
    assert {found(report, other)["status"] for other in others} == {"ok"}


@pytest.mark.slow
def test_a_torchcodec_that_lacks_libraries(tmp_path: Path) -> None:
    """torchcodec 0.16 and later are imported without FFmpeg. With a torch without CUDA, they lack libraries of CUDA, too."""
    libraries = shadows(tmp_path, torch=cpu_torch(), torchcodec="__version__, ffmpeg_major_version = '0.17.0', None\n")
    for library, said, remedy in (
        ("libavutil.so.59", "FFmpeg's libraries were not found", "FFmpeg 4 to 8"),
        ("libnvrtc.so.13", "libnvrtc.so.13: cannot open", "pip install 'torchcodec<0.14'"),
    ):
        error = f"Could not load libtorchcodec. Likely causes:\nOSError: {library}: cannot open shared object file"
        (tmp_path / "torchcodec/decoders/__init__.py").write_text(f"def VideoDecoder(data): raise RuntimeError({error!r})\n")
        finding = found(doctor(libraries=libraries), "torchcodec")
        assert (finding["status"], said in finding["text"], remedy in finding["remedy"]) == ("problem", True, True), finding


@pytest.mark.slow
def test_a_torch_that_does_not_load_where_nothing_has_loaded_it(tmp_path: Path) -> None:
    """In a process that has not imported torch, as the program's is: it must not need it."""
    done = run("--json", libraries=shadows(tmp_path, torch=BROKEN))
    assert (done.returncode, done.stderr) == (1, "")
    assert "undefined symbol" in found(json.loads(done.stdout), "torch")["text"]


@pytest.mark.slow
def test_a_library_that_hangs(tmp_path: Path) -> None:
    started = time.monotonic()
    report = doctor(libraries=shadows(tmp_path, dali=HANGS), limit_s=10)
    assert time.monotonic() - started < 120
    assert "within 10 s" in found(report, "DALI")["text"]
    assert found(report, "torch")["status"] == "ok"


@pytest.mark.usefixtures("doctor_here")
def test_a_container_that_was_promised_gpus_and_has_none(gpu_machine: GpuMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The image asks for all of them, so a `docker run` without --gpus would else pass for a machine without any."""
    gpu_machine.has("h100", fails={"cuInit": 100})
    for promised, status in (("all", "problem"), ("0,hf_secret", "problem"), ("void", "warning"), ("none", "warning")):
        monkeypatch.setenv("NVIDIA_VISIBLE_DEVICES", promised)
        report = doctor()
        assert found(report, "driver")["status"] == status
        assert "--gpus all" in found(report, "driver")["remedy"]
        assert "secret" not in str(report)


# ---- the limits of this process


def written(root: Path, **files: str) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_limits_of_control_groups(tmp_path: Path) -> None:
    two = written(tmp_path / "two", **{
        "proc/self/cgroup": "0::/pod/box\n", "sys/fs/cgroup/pod/cpu.max": "150000 100000\n",
        "sys/fs/cgroup/pod/box/cpu.max": "max 100000\n", "sys/fs/cgroup/pod/box/memory.max": "2147483648\n",
        "sys/fs/cgroup/memory.max": "max\n",
    })  # fmt: skip
    assert (cpu_quota(two), cgroup_memory_limit(two)) == (1.5, 2 << 30)
    one = written(tmp_path / "one", **{
        "proc/self/cgroup": "4:memory:/docker/1\n3:cpuacct,cpu:/docker/1\n0::/\n",
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "50000\n", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
    })  # fmt: skip
    assert (cpu_quota(one), cgroup_memory_limit(one)) == (0.5, None)
    assert (cpu_quota(tmp_path), cgroup_memory_limit(tmp_path)) == (None, None)


def test_bad_arguments_are_told_in_a_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "--storage-options" in failed(capsys, ["doctor", "--storage-options", "nope"], 2)
    assert "revision" in failed(capsys, ["doctor", tmp_path, "--revision", "main"], 2)
    assert "no-such" in failed(capsys, ["doctor", "--no-such"], 2)
    said = failed(capsys, ["doctor", "--deep", "--cameras", "top"], 2)
    assert "the address of a dataset must be given with deep, cameras, got none" in said
    assert main(["doctor", "--help"]) == 0
