"""Capabilities of NVDEC, according to the driver (`cuvidGetDecoderCaps` in libnvcuvid) and not to the GPU's name.

Sources of structures and constants: NVIDIA Video Codec SDK, cuviddec.h (CUVIDDECODECAPS, cudaVideoCodec, cudaVideoChromaFormat,
cudaVideoSurfaceFormat), and CUDA driver API, cuda.h. The driver numbers the GPUs as torch does, because both apply
CUDA_VISIBLE_DEVICES.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from dali_stream.errors import DaliStreamError

_CODECS = {"mpeg4": 2, "h264": 4, "mjpeg": 5, "hevc": 8, "vp8": 9, "vp9": 10, "av1": 11}
_CHROMA = {"gray": 0, "420": 1, "422": 2, "444": 3}
CODECS, CHROMA, DEPTHS = tuple(_CODECS), tuple(_CHROMA), (8, 10, 12)
_NV12, _P016 = 1 << 0, 1 << 1  # output formats that DALI requests, as bits of a mask: 4:2:0 with 8 bits, and with more
_REMEDIES = {  # advice for each CUDA error
    2: "free memory on this GPU",
    34: "the CUDA toolkit's stub was loaded instead of the driver. Take its folder out of LD_LIBRARY_PATH",
    46: "another process holds this GPU for itself. End it, or set the GPU's compute mode back to Default",
    100: "start the container with --gpus all, ask the scheduler for a GPU, or look at CUDA_VISIBLE_DEVICES",
    101: "look at CUDA_VISIBLE_DEVICES",
    800: "this user may not use the GPU. Check the permissions of /dev/nvidia*",
    802: "the machine's fabric manager is not running or not of the driver's version. Start nvidia-fabricmanager",
    803: "the driver's libraries and its kernel module differ. Restart the machine, or the container after a driver update",
    804: "remove the CUDA compatibility libraries (cuda-compat) from LD_LIBRARY_PATH, or use a data centre GPU",
}


_NO_DEVICE = 100
_NO_NVDEC = (
    "a container with only some of the machine's GPUs may have no access to NVDEC: start it with --gpus all and select the GPU "
    "with CUDA_VISIBLE_DEVICES, or update NVIDIA's container toolkit"
)


class DriverError(DaliStreamError):
    """The driver, or its library for video decoding, is missing or failed.

    Args:
        said: Message of the error.
        remedy: Advice for the user.
        code: Error code of the driver, or 0 if the driver could not be loaded. Default: 0.
    """

    def __init__(self, said: str, remedy: str, code: int = 0) -> None:
        super().__init__(said)
        self.remedy, self.code = remedy, code


@dataclass(frozen=True)
class Gpu:
    """Properties of a GPU.

    Attributes:
        index: Number of the CUDA device.
        name: Name of the GPU.
        memory: Size of its memory in bytes.
        compute: Compute capability (major, minor).
    """

    index: int
    name: str
    memory: int
    compute: tuple[int, int]


@dataclass(frozen=True)
class Capability:
    """Support of NVDEC for one codec and format on one GPU.

    Attributes:
        supported: Whether NVDEC decodes it.
        reason: Reason why NVDEC does not decode it. Empty if it does.
        engines: Number of NVDEC engines that decode it.
        min_size, max_size: Smallest and largest size (height, width) of the frames in pixels.
        max_macroblocks: Maximum number of macroblocks of 16×16 pixels per frame.
    """

    supported: bool
    reason: str
    engines: int = 0
    min_size: tuple[int, int] = (0, 0)
    max_size: tuple[int, int] = (0, 0)
    max_macroblocks: int = 0

    def refusal(self, height: int, width: int) -> str:
        """Return why NVDEC does not decode frames of this size in pixels. The text is empty if it does."""
        if not self.supported:
            return self.reason
        small, large = self.min_size, self.max_size
        macroblocks = -(-height // 16) * -(-width // 16)
        if height < small[0] or width < small[1] or height > large[0] or width > large[1]:
            return f"{height}×{width} is outside what NVDEC takes, {small[0]}×{small[1]} to {large[0]}×{large[1]}"
        if macroblocks > self.max_macroblocks:
            return f"{height}×{width} has {macroblocks} macroblocks and NVDEC takes up to {self.max_macroblocks}"
        return ""


def cuda_version() -> tuple[int, int]:
    """Return the latest CUDA version (major, minor) that the driver supports.

    Raises:
        DriverError: If the driver is missing or fails.
    """
    version = ctypes.c_int()
    _check(_cuda().cuDriverGetVersion(ctypes.byref(version)), "its version was requested")
    return version.value // 1000, version.value % 1000 // 10


def gpus() -> tuple[Gpu, ...]:
    """Return the GPUs that are visible to this process.

    Raises:
        DriverError: If the driver is missing or fails.
    """
    count = ctypes.c_int()
    _check(_cuda().cuDeviceGetCount(ctypes.byref(count)), "GPUs were counted")
    return tuple(map(_gpu, range(count.value)))


def capability(gpu: int, codec: str, chroma: str, depth: int) -> Capability:
    """Return whether NVDEC decodes a format. If the driver fails, the format counts as not supported.

    Args:
        gpu: Number of the CUDA device.
        codec: Codec as in `VideoFormat`.
        chroma: "gray", "420", "422" or "444".
        depth: Number of bits per value.
    """
    try:
        supported = capabilities(gpu).get((codec, chroma, depth))
    except DriverError as error:
        return Capability(False, f"{error}: {error.remedy}")
    return supported or Capability(False, f"NVDEC has no decoder for {codec} {chroma} {depth} bit")


@functools.cache
def capabilities(gpu: int) -> Mapping[tuple[str, str, int], Capability]:
    """Return the capabilities of a GPU for all of CODECS × CHROMA × DEPTHS.

    The result is cached, because the query requires a context on the GPU.

    Args:
        gpu: Number of the CUDA device.

    Raises:
        DriverError: If the driver or its library for video decoding is missing or fails.
    """
    cuda = _cuda()
    nvcuvid = _load("libnvcuvid.so.1", "in a container, set NVIDIA_DRIVER_CAPABILITIES=video,compute,utility")
    with _context(cuda, gpu):
        return {
            (codec, chroma, depth): _ask(nvcuvid, codec, chroma, depth)
            for codec in CODECS
            for chroma in CHROMA
            for depth in DEPTHS
        }


SESSIONS_PER_ENGINE = 3
"""Maximum number of decoding sessions per NVDEC engine.

On an H100 with 7 engines, torchcodec was faster with 16 threads than with 4. More were not tried."""


def engines(gpu: int) -> int:
    """Return the number of NVDEC engines of a GPU, at least 1.

    Raises:
        DriverError: If the driver or its library for video decoding is missing or fails.
    """
    return max(1, *(each.engines for each in capabilities(gpu).values()))


class _Caps(ctypes.Structure):
    _fields_ = [
        ("codec", ctypes.c_int), ("chroma", ctypes.c_int), ("depth_minus_8", ctypes.c_uint), ("_1", ctypes.c_uint * 3),
        ("supported", ctypes.c_ubyte), ("engines", ctypes.c_ubyte), ("outputs", ctypes.c_ushort),
        ("max_width", ctypes.c_uint), ("max_height", ctypes.c_uint), ("max_macroblocks", ctypes.c_uint),
        ("min_width", ctypes.c_ushort), ("min_height", ctypes.c_ushort), ("histogram", ctypes.c_ubyte),
        ("counter_bits", ctypes.c_ubyte), ("max_bins", ctypes.c_ushort), ("_2", ctypes.c_uint * 10),
    ]  # fmt: skip


def _ask(nvcuvid: ctypes.CDLL, codec: str, chroma: str, depth: int) -> Capability:
    caps = _Caps(codec=_CODECS[codec], chroma=_CHROMA[chroma], depth_minus_8=depth - 8)
    format_name = f"{codec} {chroma} {depth} bit"
    failed = nvcuvid.cuvidGetDecoderCaps(ctypes.byref(caps))
    if failed == _NO_DEVICE:  # NVDEC is not accessible at all, for any codec
        message = f"the driver answers {_error_name(failed)} when asked what NVDEC decodes"
        raise DriverError(message, _NO_NVDEC, failed)
    if failed:
        return Capability(False, f"the driver answers {_error_name(failed)} when asked whether NVDEC decodes {format_name}")
    if not caps.supported:
        return Capability(False, f"this GPU has no NVDEC decoder for {format_name}")
    if not caps.engines:
        return Capability(False, "this GPU has no NVDEC engine, as is possible for a MIG slice")
    if not caps.outputs & (_NV12 if depth == 8 else _P016):
        return Capability(False, f"NVDEC decodes {format_name} to a format that DALI does not take (mask {caps.outputs:#x})")
    smallest, largest = (caps.min_height, caps.min_width), (caps.max_height, caps.max_width)
    return Capability(True, "", caps.engines, smallest, largest, caps.max_macroblocks)


def _gpu(index: int) -> Gpu:
    cuda, doing = _cuda(), f"GPU {index} was opened"
    handle, memory, name = ctypes.c_int(), ctypes.c_size_t(), ctypes.create_string_buffer(256)
    _check(cuda.cuDeviceGet(ctypes.byref(handle), index), doing)
    _check(cuda.cuDeviceGetName(name, len(name), handle), doing)
    _check(cuda.cuDeviceTotalMem_v2(ctypes.byref(memory), handle), doing)
    compute = []
    for attribute in (75, 76):  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR
        value = ctypes.c_int()
        _check(cuda.cuDeviceGetAttribute(ctypes.byref(value), attribute, handle), doing)
        compute.append(value.value)
    return Gpu(index, name.value.decode(errors="replace"), memory.value, (compute[0], compute[1]))


@contextlib.contextmanager
def _context(cuda: ctypes.CDLL, gpu: int) -> Iterator[None]:
    """Make the primary context of a GPU current in this thread, because `cuvidGetDecoderCaps` reads the current context.

    torch uses the primary context too, so no second one takes memory on the GPU.
    """
    handle, context, popped = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p()
    _check(cuda.cuDeviceGet(ctypes.byref(handle), gpu), f"GPU {gpu} was opened")
    _check(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), handle), f"a context on GPU {gpu} was requested")
    try:
        _check(cuda.cuCtxPushCurrent_v2(context), f"the context on GPU {gpu} was made current")
        try:
            yield
        finally:
            cuda.cuCtxPopCurrent_v2(ctypes.byref(popped))
    finally:
        cuda.cuDevicePrimaryCtxRelease_v2(handle)


def _cuda() -> ctypes.CDLL:
    cuda = _load("libcuda.so.1", "install NVIDIA's driver, or start a container with --gpus all and NVIDIA's container toolkit")
    _check(cuda.cuInit(0), "CUDA was initialised")
    return cuda


def _load(library: str, remedy: str) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(library)
    except OSError as error:
        raise DriverError(f"the driver's {library} cannot be loaded ({error})", remedy) from None


def _check(result: int, doing: str) -> None:
    if result:
        remedy = _REMEDIES.get(result, "look at nvidia-smi and the kernel's log (dmesg) of this machine")
        raise DriverError(f"the driver answered {_error_name(result)} when {doing}", remedy, result)


def _error_name(result: int) -> str:
    name = ctypes.c_char_p()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libcuda.so.1").cuGetErrorName(result, ctypes.byref(name))
    return f"{name.value.decode()} ({result})" if name.value else f"error {result}"
