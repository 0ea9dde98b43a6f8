"""What NVDEC decodes, asked of the driver (`cuvidGetDecoderCaps` in libnvcuvid) and never guessed from a GPU's name.

Structure and constants: NVIDIA Video Codec SDK, cuviddec.h (CUVIDDECODECAPS, cudaVideoCodec, cudaVideoChromaFormat).
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass

_CODECS = {"mpeg4": 2, "h264": 4, "mjpeg": 5, "hevc": 8, "vp8": 9, "vp9": 10, "av1": 11}
_CHROMA = {"gray": 0, "420": 1, "422": 2, "444": 3}


class _Caps(ctypes.Structure):
    _fields_ = [
        ("codec", ctypes.c_int), ("chroma", ctypes.c_int), ("depth_minus_8", ctypes.c_uint), ("_1", ctypes.c_uint * 3),
        ("supported", ctypes.c_ubyte), ("engines", ctypes.c_ubyte), ("outputs", ctypes.c_ushort),
        ("max_width", ctypes.c_uint), ("max_height", ctypes.c_uint), ("max_macroblocks", ctypes.c_uint),
        ("min_width", ctypes.c_ushort), ("min_height", ctypes.c_ushort), ("histogram", ctypes.c_ubyte),
        ("counter_bits", ctypes.c_ubyte), ("max_bins", ctypes.c_ushort), ("_2", ctypes.c_uint * 10),
    ]  # fmt: skip


@dataclass(frozen=True)
class Capability:
    """The driver's answer for one codec and format on one GPU. Sizes in pixels; `reason` is empty where supported."""

    supported: bool
    reason: str
    engines: int = 0
    min_size: tuple[int, int] = (0, 0)
    max_size: tuple[int, int] = (0, 0)
    max_macroblocks: int = 0

    def refusal(self, height: int, width: int) -> str:
        """Why pictures of this size are not decoded; empty where they are."""
        if not self.supported:
            return self.reason
        small, large = self.min_size, self.max_size
        macroblocks = -(-height // 16) * -(-width // 16)
        if height < small[0] or width < small[1] or height > large[0] or width > large[1]:
            return f"{height}×{width} is outside what NVDEC takes, {small[0]}×{small[1]} to {large[0]}×{large[1]}"
        if macroblocks > self.max_macroblocks:
            return f"{height}×{width} has {macroblocks} macroblocks and NVDEC takes up to {self.max_macroblocks}"
        return ""


@functools.cache
def capability(device: int, codec: str, chroma: str, depth: int) -> Capability:
    """Asks the driver whether GPU `device` decodes this codec with this chroma (gray, 420, 422, 444) and bit depth."""
    if codec not in _CODECS or chroma not in _CHROMA:
        return Capability(False, f"NVDEC has no decoder for {codec} with chroma {chroma}")
    try:
        cuda, nvcuvid = ctypes.CDLL("libcuda.so.1"), ctypes.CDLL("libnvcuvid.so.1")
    except OSError as error:
        return Capability(False, f"{error}; in a container, set NVIDIA_DRIVER_CAPABILITIES=video,compute,utility")
    handle, context, popped = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p()
    caps = _Caps(codec=_CODECS[codec], chroma=_CHROMA[chroma], depth_minus_8=depth - 8)
    if failed := cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(handle), device):
        return Capability(False, f"CUDA error {failed} when GPU {device} was opened")
    if failed := cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), handle):
        return Capability(False, f"CUDA error {failed} when a context on GPU {device} was asked for")
    try:
        failed = cuda.cuCtxPushCurrent_v2(context)
        if not failed:
            failed = nvcuvid.cuvidGetDecoderCaps(ctypes.byref(caps))
            cuda.cuCtxPopCurrent_v2(ctypes.byref(popped))
    finally:
        cuda.cuDevicePrimaryCtxRelease_v2(handle)
    if failed:
        return Capability(False, f"CUDA error {failed} when the driver was asked for NVDEC's {codec} capabilities")
    if not caps.supported or not caps.engines:
        return Capability(False, f"this GPU has no NVDEC decoder for {codec} {chroma} {depth} bit")
    return Capability(
        True, "", caps.engines, (caps.min_height, caps.min_width), (caps.max_height, caps.max_width), caps.max_macroblocks
    )
