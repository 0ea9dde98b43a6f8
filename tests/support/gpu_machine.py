"""A machine with GPUs, for tests on a machine without one. The tests use the public API, and change only other libraries.

The driver is `driver.c`. torch finds its GPUs, torchcodec decodes on the CPU what NVDEC would decode, for DALI as well, and
DALI's pipelines run on the CPU. Tensors are in the CPU's memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torchcodec

from support.driver import SOURCE, compiler

if TYPE_CHECKING:
    from nvidia.dali.data_node import DataNode


class GpuMachine:
    """A machine with GPUs.

    Attributes:
        before_decoding: Function that gets the numbers of frames of a clip before "NVDEC" decodes them. It may raise an error.
        change_frames: Function from the frames of a clip, shape (n, H, W, 3), to those that "NVDEC" delivers.
        late: Time in seconds that is added to the times of frames from "NVDEC".
        cpu_fallback: Reason for which torchcodec lets the CPU decode clips for "NVDEC". None if it does not.
        decoded: Number of frames that "NVDEC" delivered.
        clips: Number of clips for which torchcodec opened a decoder on "NVDEC".
        devices: Devices on which torchcodec opened decoders, apart from the CPU.
        pipelines: Arguments of DALI's pipelines, in the order in which they were made.
        capacities: Sizes of torchcodec's cache of decoders that were set.
        stream_events: What happened to CUDA streams, in order: (what, number of the stream, thread).
        streams: Number of CUDA streams that were made.
        most_streams: Largest number of streams in use at a time.
        free_bytes: Free memory of each GPU in bytes.
        allocated: Bytes that were allocated on GPUs.
        page_locked: Shapes of the tensors that were made in page-locked memory.
        uploads: Addresses of the arrays that DALI uploads without a copy to page-locked memory of its own.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, library: Path, calls: Path) -> None:
        self._monkeypatch, self._calls = monkeypatch, calls
        self.before_decoding: Callable[[list[int]], object] = lambda frames: None
        self.change_frames: Callable[[torch.Tensor], torch.Tensor] = lambda frames: frames
        self.late: float = 0.0
        self.cpu_fallback: str | None = None
        self._has_video = True
        self.decoded, self.clips, self.devices, self.capacities = 0, 0, set[str](), list[int]()
        self.pipelines: list[dict[str, Any]] = []
        self.stream_events: list[tuple[str, int, int]] = []
        self.streams = self.most_streams = self._streams_in_use = 0
        self.free_bytes, self.allocated, self.page_locked = 60 << 30, 0, list[tuple[int, ...]]()
        self.uploads: list[int] = []
        self._lock = threading.Lock()
        self._add_driver(library)
        self._add_torch()
        self._add_torchcodec()
        self._add_dali()
        self.has("h100")
        self.installs("0.17.0", "13.0")

    def has(
        self,
        *gpus: str,
        fails: dict[str, int] | None = None,
        video: bool = True,
        cuda: int = 13000,
        outputs: int | None = None,
        least: tuple[int, int] | None = None,
        most: tuple[int, int] = (4096, 4096),
        macroblocks: int = 65536,
    ) -> None:
        """Have GPUs that `driver.c` knows.

        Args:
            gpus: Their names in `driver.c`.
            fails: {call of the driver that fails: its error}.
            video: Whether the driver's library for video decoding is installed, as it is not in every container.
            cuda: Latest version of CUDA that the driver supports.
            outputs: Mask of the output formats of every codec. Default: those of the GPU.
            least, most, macroblocks: Smallest and largest size (height, width) of frames and largest number of macroblocks.
                Default: those of the GPU.
        """
        self._has_video = video
        self._calls.unlink(missing_ok=True)
        variables = {
            "GPUS": ",".join(gpus),
            "FAILS": ",".join(f"{call}={error}" for call, error in (fails or {}).items()),
            "CUDA": str(cuda),
            "OUTPUTS": "" if outputs is None else str(outputs),
            "LIMITS": "" if least is None else ",".join(map(str, (*least, *most, macroblocks))),
        }
        for name, value in variables.items():
            self._monkeypatch.setenv(f"FAKE_{name}", value)
        self._monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
        forget_machine()

    def driver_calls(self) -> list[str]:
        """Return the names of the calls of the driver since `has`, in order."""
        return self._calls.read_text().split()

    def installs(self, version: str, cuda: str | None) -> None:
        """Have a version of torchcodec, and torch for a version of CUDA."""
        self._monkeypatch.setattr(torchcodec, "__version__", version)
        self._monkeypatch.setattr(torch.version, "cuda", cuda)

    def _add_driver(self, library: Path) -> None:
        load = ctypes.CDLL

        def loaded(name: str | None, *rest: Any) -> ctypes.CDLL:
            if name == "libnvcuvid.so.1" and not self._has_video:
                raise OSError(f"{name}: cannot open shared object file")
            return load(str(library) if name in ("libcuda.so.1", "libnvcuvid.so.1") else name, *rest)

        self._monkeypatch.setattr(ctypes, "CDLL", loaded)
        self._monkeypatch.setenv("FAKE_CALLS", str(self._calls))

    def _add_torch(self) -> None:
        machine = self

        current = threading.local()

        @contextlib.contextmanager
        def device(gpu: int | str) -> Iterator[None]:
            before, current.gpu = getattr(current, "gpu", 0), _number(gpu)
            try:
                yield
            finally:
                current.gpu = before

        class Stream:
            def __init__(self, device: str) -> None:
                with machine._lock:
                    machine.streams += 1
                    self.number, self.device = machine.streams, device

            def synchronize(self) -> None:
                machine.stream_events.append(("synchronize", self.number, threading.get_ident()))

        @contextlib.contextmanager
        def stream(own: Stream) -> Iterator[None]:
            assert getattr(current, "gpu", 0) == _number(own.device), "torch would make a context on the current device"
            with machine._lock:
                machine._streams_in_use += 1
                machine.most_streams = max(machine.most_streams, machine._streams_in_use)
            machine.stream_events.append(("enter", own.number, threading.get_ident()))
            try:
                yield
            finally:
                with machine._lock:
                    machine._streams_in_use -= 1

        runtime = SimpleNamespace(
            cudaHostRegister=lambda address, size, flags: 0, cudaHostUnregister=lambda address: 0,
            cudaError=SimpleNamespace(success=0),
        )  # fmt: skip
        changes = {
            "is_available": lambda: True, "current_device": lambda: 0, "Stream": Stream, "stream": stream,
            "mem_get_info": lambda gpu: (60 << 30, 80 << 30), "device": device, "cudart": lambda: runtime,
            "current_stream": lambda: SimpleNamespace(cuda_stream=0),
        }  # fmt: skip
        for name, value in changes.items():
            self._monkeypatch.setattr(torch.cuda, name, value)
        make_tensor = torch.empty

        def empty(*shape: Any, device: str | None = None, pin_memory: bool = False, **options: Any) -> torch.Tensor:
            if device is None or not str(device).startswith("cuda"):
                tensor = make_tensor(*shape, device=device, **options)
            elif (size := math.prod(shape[0])) > machine.free_bytes:
                raise torch.OutOfMemoryError(f"{size} bytes")
            else:
                tensor = make_tensor(*shape, **options)
                machine.allocated += size
            if pin_memory:
                machine.page_locked.append(tuple(tensor.shape))
            return tensor

        self._monkeypatch.setattr(torch, "empty", empty)

    def _add_torchcodec(self) -> None:
        from torchcodec.decoders import VideoDecoder

        machine = self
        initialise, decode = VideoDecoder.__init__, VideoDecoder.get_frames_at

        def __init__(self: VideoDecoder, *arguments: Any, device: str = "cpu", **options: Any) -> None:
            initialise(self, *arguments, device="cpu", **options)
            self.is_on_nvdec = device != "cpu"
            if self.is_on_nvdec:
                with machine._lock:
                    machine.clips += 1
                    machine.devices.add(device)

        def get_frames_at(self: Any, indices: list[int]) -> Any:
            if not self.is_on_nvdec:
                return decode(self, indices)
            batch = machine._decode(indices, functools.partial(decode, self))
            batch.pts_seconds = batch.pts_seconds + machine.late
            return batch

        self._monkeypatch.setattr(VideoDecoder, "__init__", __init__)
        self._monkeypatch.setattr(VideoDecoder, "get_frames_at", get_frames_at)
        fallback = property(lambda decoder: machine.cpu_fallback if decoder.is_on_nvdec else None)
        self._monkeypatch.setattr(VideoDecoder, "cpu_fallback", fallback, raising=False)
        set_capacity = "torchcodec.decoders.set_nvdec_cache_capacity"
        self._monkeypatch.setattr(set_capacity, self.capacities.append, raising=False)

    def _decode(self, indices: list[int], decode: Callable[[list[int]], Any]) -> Any:
        """Decode frames of a clip in place of NVDEC."""
        self.before_decoding(indices)
        batch = decode(indices)
        with self._lock:
            self.decoded += len(indices)
        batch.data = self.change_frames(batch.data)
        return batch

    def _decode_for_dali(self, clip: npt.NDArray[np.uint8], frames: npt.NDArray[np.int32]) -> npt.NDArray[np.uint8]:
        """Decode frames of a clip. They must be increasing, since DALI would begin again at the first one."""
        assert (np.diff(frames) > 0).all()
        data = torch.frombuffer(bytearray(clip), dtype=torch.uint8)
        decoder = torchcodec.decoders.VideoDecoder(data, dimension_order="NHWC", seek_mode="approximate")
        delivered: torch.Tensor = self._decode(frames.tolist(), decoder.get_frames_at).data
        return delivered.numpy()

    def _add_dali(self) -> None:
        from nvidia.dali import fn, tensors
        from nvidia.dali.data_node import DataNode
        from nvidia.dali.pipeline import Pipeline

        machine, initialise, decoder, source = self, Pipeline.__init__, fn.decoders.video, fn.external_source

        class TensorListCPU(tensors.TensorListCPU):  # type: ignore[misc]  # DALI has no types
            def __init__(self, array: Any, *rest: Any, is_pinned: bool = False) -> None:
                super().__init__(array, *rest)
                if is_pinned:
                    machine.uploads.append(array.ctypes.data)

        def __init__(self: Pipeline, *arguments: Any, **options: Any) -> None:
            machine.pipelines.append(options)
            initialise(self, *arguments, **options | {"device_id": None})

        def video(clips: DataNode, *, device: str, frames: DataNode, **options: Any) -> DataNode:
            if device == "cpu":
                return decoder(clips, device=device, frames=frames, **options)
            # A function in place of the operator, whose variant for the CPU takes VP8, VP9 and MJPEG only.
            return fn.python_function(clips, frames, function=machine._decode_for_dali, output_layouts="FHWC")

        self._monkeypatch.setattr(tensors, "TensorListCPU", TensorListCPU)
        self._monkeypatch.setattr(Pipeline, "__init__", __init__)
        self._monkeypatch.setattr(DataNode, "gpu", fn.copy)  # uploading copies, too
        self._monkeypatch.setattr(fn.decoders, "video", video)

        def external_source(*arguments: Any, device: str = "cpu", **options: Any) -> Any:
            return source(*arguments, **options)

        self._monkeypatch.setattr(fn, "external_source", external_source)


def _number(device: int | str) -> int:
    return device if isinstance(device, int) else int(device.partition(":")[2] or 0)


def forget_machine() -> None:
    """Clear the caches of the package, some of which have what its functions know of the machine."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "dali_stream":
            for value in vars(module).values():
                if callable(clear := getattr(value, "cache_clear", None)):
                    clear()


@pytest.fixture(scope="session")
def driver_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both libraries of the fake driver in one, which can be loaded beside DALI: it has the name of neither."""
    folder, compile_c = tmp_path_factory.mktemp("driver"), [compiler(), "-fPIC", "-Wall", "-Wextra", "-Werror", "-O1"]
    for name, options in (("cuda.o", []), ("nvcuvid.o", ["-DVIDEO"])):
        subprocess.run([*compile_c, *options, "-c", str(SOURCE), "-o", str(folder / name)], check=True)
    library = folder / "driver.so"
    subprocess.run([*compile_c, "-shared", str(folder / "cuda.o"), str(folder / "nvcuvid.o"), "-o", str(library)], check=True)
    return library


@pytest.fixture
def gpu_machine(
    driver_library: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GpuMachine]:
    """This machine has a GPU, an H100, with versions of torch and torchcodec that decode on it."""
    yield GpuMachine(monkeypatch, driver_library, tmp_path_factory.mktemp("driver_calls") / "calls")
    monkeypatch.undo()
    forget_machine()
