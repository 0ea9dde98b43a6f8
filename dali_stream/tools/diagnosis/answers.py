"""Questions to libraries and to the driver. Each function runs in a process of its own, which it may crash (see `isolated`)."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dali_stream import process
from dali_stream.decode import capability
from dali_stream.decode.route import Rates
from dali_stream.decode.speed import RequestClips, Speeds
from dali_stream.mp4.clip import Clip
from dali_stream.mp4.format import VideoFormat

CODECS = {  # FFmpeg's codec: its software decoders
    "h264": ("h264",),
    "hevc": ("hevc",),
    "av1": ("libdav1d", "libaom-av1", "libgav1"),
    "vp9": ("vp9", "libvpx-vp9"),
    "mpeg4": ("mpeg4",),
}


def driver() -> dict[str, Any]:
    """Return the driver's CUDA version and its GPUs, or its failure, remedy and error code. It is 0 if it was not loaded."""
    try:
        return {"cuda": capability.cuda_version(), "gpus": [dataclasses.asdict(gpu) for gpu in capability.gpus()]}
    except capability.DriverError as error:
        return {"failed": str(error), "remedy": error.remedy, "code": error.code}


def nvdec() -> list[dict[str, Any]]:
    """Return NVDEC's capability for each format, per GPU, or why the driver does not report it."""
    answers: list[dict[str, Any]] = []
    for gpu in capability.gpus():
        try:
            formats = capability.capabilities(gpu.index).items()
            names = ("codec", "chroma", "depth")
            answers.append({"decoders": [dict(zip(names, form, strict=True)) | vars(each) for form, each in formats]})
        except capability.DriverError as error:
            answers.append({"error": str(error), "remedy": error.remedy})
    return answers


def dali() -> dict[str, Any]:
    """Return DALI's version."""
    import nvidia.dali

    return {"version": str(nvidia.dali.__version__)}


def torch() -> dict[str, Any]:
    """Return torch's version, the CUDA version of its build (None: without CUDA), and whether it finds a GPU."""
    import torch

    return {"version": str(torch.__version__), "cuda": torch.version.cuda, "finds_gpu": bool(torch.cuda.is_available())}


def torchcodec() -> dict[str, Any]:
    """Return torchcodec's version, and path, version and decoders of the FFmpeg libraries that it has loaded."""
    import torchcodec
    import torchcodec.decoders

    return {"version": str(torchcodec.__version__), "ffmpeg": _mapped_ffmpeg()}


def ffmpeg() -> dict[str, Any]:
    """Return the newest FFmpeg that torchcodec could load, for a torchcodec that does not load."""
    for version in (62, 61, 60, 59, 58):  # FFmpeg 8 to 4. libavdevice needs all others, and players ship only libavcodec
        with contextlib.suppress(OSError):
            ctypes.CDLL(f"libavdevice.so.{version}")
            break
    return {"ffmpeg": _mapped_ffmpeg()}


def _mapped_ffmpeg() -> dict[str, Any] | None:
    # From this process's memory map: the program ffmpeg may belong to another FFmpeg.
    paths = _mapped("libavcodec")
    return _ffmpeg(ctypes.CDLL(paths[0]), paths[0]) if paths else None


def _mapped(library: str) -> list[str]:
    return re.findall(rf"/\S*/{library}[^/\s]*\.so[.\d]*", Path("/proc/self/maps").read_text())


def _ffmpeg(avcodec: ctypes.CDLL, path: str) -> dict[str, Any]:
    """Version and decoders of a libavcodec.

    The first fields of AVCodecDescriptor (an int, the id) and of AVCodec (a char *, the name) are stable since FFmpeg 4.
    """
    avcodec.avcodec_descriptor_get_by_name.restype = ctypes.POINTER(ctypes.c_int)
    avcodec.avcodec_find_decoder.restype = ctypes.POINTER(ctypes.c_char_p)
    avcodec.avcodec_find_decoder_by_name.restype = ctypes.c_void_p
    decoders = {}
    for codec, names in CODECS.items():
        identifier = avcodec.avcodec_descriptor_get_by_name(codec.encode())
        default = avcodec.avcodec_find_decoder(identifier.contents.value) if identifier else None
        decoders[codec] = {
            "default": default.contents.value.decode() if default else None,
            "software": [name for name in names if avcodec.avcodec_find_decoder_by_name(name.encode())],
        }
    version = avcodec.avcodec_version() >> 16
    release = _release(path) or f"with libavcodec {version}"
    return {"version": release, "libavcodec": version, "path": path, "decoders": decoders}


def _release(libavcodec: str) -> str:
    """FFmpeg's version, from the libavutil next to libavcodec. Empty without one."""
    for path in _mapped("libavutil"):
        if Path(path).parent == Path(libavcodec).parent:
            version_info = ctypes.CDLL(path).av_version_info
            version_info.restype = ctypes.c_char_p
            return str(version_info().decode(errors="replace"))
    return ""


def decode(clip: Clip, video: VideoFormat, dali: bool, gpu: int | None) -> npt.NDArray[np.uint8]:
    """Decode the first request of a packed clip with torchcodec or DALI. Return the frame, (H, W, 3)."""
    if dali:
        from dali_stream.decode import dali as decoder

        [frames] = decoder.decode([decoder.encoded(clip)], gpu, 1)
    else:
        from dali_stream.decode.torchcodec import decode_clip

        frames = decode_clip(clip, video)
    frame: npt.NDArray[np.uint8] = frames[0]
    return frame


def speed(clips: RequestClips, video: VideoFormat, gop: int, gpu: int | None, cameras: int) -> Rates:
    """Return the speeds of DALI and of torchcodec, measured now or earlier. See `decode.speed.Speeds`."""
    return Speeds(process.cores(), cameras, gpu).of(video, gop, lambda: clips)
