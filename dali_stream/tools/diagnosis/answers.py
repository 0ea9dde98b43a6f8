"""What libraries and the driver report. Each function runs in a process of its own, which it may crash (see `isolated`).

This file is run by its path: the process imports nothing of this package until a function needs it.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import re
from pathlib import Path
from typing import Any

CODECS = {  # FFmpeg's codec: its software decoders
    "h264": ("h264",),
    "hevc": ("hevc",),
    "av1": ("libdav1d", "libaom-av1", "libgav1"),
    "vp9": ("vp9", "libvpx-vp9"),
    "mpeg4": ("mpeg4",),
}


def driver() -> dict[str, Any]:
    """The driver's CUDA version and its GPUs; or the failure, its remedy, and the driver's error code (0: not loaded)."""
    from dali_stream.decode import capability

    try:
        return {"cuda": capability.cuda_version(), "gpus": [dataclasses.asdict(gpu) for gpu in capability.gpus()]}
    except capability.DriverError as error:
        return {"failed": str(error), "remedy": error.remedy, "code": error.code}


def nvdec() -> dict[str, Any]:
    """Per GPU, NVDEC's capability for each format, or why the driver does not report it."""
    from dali_stream.decode import capability

    found: list[dict[str, Any]] = []
    for gpu in capability.gpus():
        try:
            caps = capability.capabilities(gpu.index)
            keys = ("codec", "chroma", "depth")
            found.append({"decoders": [dict(zip(keys, key, strict=True)) | vars(cap) for key, cap in caps.items()]})
        except capability.DriverError as error:
            found.append({"failed": str(error), "remedy": error.remedy})
    return {"gpus": found}


def dali() -> dict[str, Any]:
    """DALI's version."""
    import nvidia.dali

    return {"version": str(nvidia.dali.__version__)}


def torch() -> dict[str, Any]:
    """torch's version, the CUDA version it is built for (None: without CUDA), and whether it finds a GPU."""
    import torch

    return {"version": str(torch.__version__), "cuda": torch.version.cuda, "finds_gpu": bool(torch.cuda.is_available())}


def torchcodec() -> dict[str, Any]:
    """torchcodec's version, and the FFmpeg libraries it has loaded: folder, version and decoders."""
    import torchcodec
    import torchcodec.decoders

    return {"version": str(torchcodec.__version__), "ffmpeg": _mapped_ffmpeg()}


def ffmpeg() -> dict[str, Any]:
    """FFmpeg where torchcodec has not loaded it: the newest version that it could load."""
    for version in (62, 61, 60, 59, 58):  # FFmpeg 8 to 4. libavdevice needs all others; players ship only libavcodec
        with contextlib.suppress(OSError):
            ctypes.CDLL(f"libavdevice.so.{version}")
            break
    return {"ffmpeg": _mapped_ffmpeg()}


def _mapped_ffmpeg() -> dict[str, Any] | None:
    # From this process's memory map: the program ffmpeg may belong to another FFmpeg.
    mapped = _mapped("libavcodec")
    return _ffmpeg(ctypes.CDLL(mapped[0]), mapped[0]) if mapped else None


def _mapped(library: str) -> list[str]:
    return re.findall(rf"/\S*/{library}[^/\s]*\.so[.\d]*", Path("/proc/self/maps").read_text())


def _ffmpeg(avcodec: ctypes.CDLL, path: str) -> dict[str, Any]:
    """Version and decoders of a libavcodec. These parts of avcodec.h, codec.h and codec_desc.h are stable since FFmpeg 4."""

    class Descriptor(ctypes.Structure):  # the beginning of AVCodecDescriptor
        _fields_ = [("id", ctypes.c_int)]

    class Codec(ctypes.Structure):  # the beginning of AVCodec
        _fields_ = [("name", ctypes.c_char_p)]

    avcodec.avcodec_descriptor_get_by_name.restype = ctypes.POINTER(Descriptor)
    avcodec.avcodec_find_decoder.restype = ctypes.POINTER(Codec)
    avcodec.avcodec_find_decoder_by_name.restype = ctypes.c_void_p
    decoders = {}
    for codec, names in CODECS.items():
        known = avcodec.avcodec_descriptor_get_by_name(codec.encode())
        chosen = avcodec.avcodec_find_decoder(known.contents.id) if known else None
        decoders[codec] = {
            "default": chosen.contents.name.decode() if chosen else None,
            "software": [name for name in names if avcodec.avcodec_find_decoder_by_name(name.encode())],
        }
    version = avcodec.avcodec_version() >> 16
    return {
        "version": _release(path) or f"with libavcodec {version}",
        "libavcodec": version,
        "path": path,
        "decoders": decoders,
    }


def _release(libavcodec: str) -> str:
    """FFmpeg's version, from the libavutil next to libavcodec; empty without one."""
    for path in _mapped("libavutil"):
        if Path(path).parent == Path(libavcodec).parent:
            told = ctypes.CDLL(path).av_version_info
            told.restype = ctypes.c_char_p
            return str(told().decode(errors="replace"))
    return ""


def decode(clip: str, frame: int, video: dict[str, Any], dali: bool, gpu: int | None, out: str) -> dict[str, Any]:
    """Decodes one frame of a packed clip with torchcodec or DALI, and saves it as NumPy array (H, W, 3) in `out`."""
    import numpy as np

    from dali_stream.mp4.clip import Clip

    packed = Clip(bytearray(Path(clip).read_bytes()), [frame], 0)
    if dali:
        from dali_stream.decode import dali as by_dali

        [frames] = by_dali.decode([by_dali.encoded(packed)], gpu, 1)
    else:
        from dali_stream.decode.torchcodec import decode_clip
        from dali_stream.mp4.format import VideoFormat

        frames = decode_clip(packed, VideoFormat(**video))
    np.save(out, frames[0])
    return {"shape": frames[0].shape}


def speed(clips: list[dict[str, Any]], video: dict[str, Any], gop: int, gpu: int | None, cameras: int) -> dict[str, Any]:
    """Speeds of DALI on all clips but the last, and of torchcodec on the last one, measured or known (see `decode.speed`)."""
    from dali_stream import process
    from dali_stream.decode.speed import RequestClips, Speeds
    from dali_stream.mp4.clip import Clip
    from dali_stream.mp4.format import VideoFormat

    *singles, packed = (Clip(bytearray(Path(clip["path"]).read_bytes()), clip["frames"], 0) for clip in clips)
    speeds = Speeds(process.cores(), cameras, gpu)
    return dataclasses.asdict(speeds.of(VideoFormat(**video), gop, lambda: RequestClips(singles, packed)))
