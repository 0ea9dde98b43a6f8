"""Questions to libraries and to the driver. They run in separate processes, since they may crash. See `isolated`."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dali_stream.decode import capability
from dali_stream.mp4.clip import Clip
from dali_stream.mp4.format import VideoFormat

CODECS = {  # FFmpeg's name of the codec: its software decoders
    "h264": ("h264",),
    "hevc": ("hevc",),
    "av1": ("libdav1d", "libaom-av1", "libgav1"),
    "vp9": ("vp9", "libvpx-vp9"),
    "mpeg4": ("mpeg4",),
}


def driver() -> dict[str, Any]:
    """Return the driver's CUDA version and GPUs, or an error with its remedy and code. The code is 0 if no driver loads."""
    try:
        return {"cuda": capability.cuda_version(), "gpus": [dataclasses.asdict(gpu) for gpu in capability.gpus()]}
    except capability.DriverError as error:
        return {"failed": str(error), "remedy": error.remedy, "code": error.code}


def nvdec() -> list[dict[str, Any]]:
    """Return the capability of each GPU's NVDEC for each format, or the reason why the driver does not report it."""
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
    """Return torch's version, the CUDA version of its build (None for a build without CUDA), and whether it finds a GPU."""
    import torch

    return {"version": str(torch.__version__), "cuda": torch.version.cuda, "finds_gpu": bool(torch.cuda.is_available())}


def torchcodec() -> dict[str, Any]:
    """Return torchcodec's version. Its decoders load FFmpeg."""
    import torchcodec
    import torchcodec.decoders

    return {"version": str(torchcodec.__version__)}


def ffmpeg() -> dict[str, Any] | None:
    """Return the path, version and decoders of the FFmpeg libraries that torchcodec loads or could load. None without FFmpeg.

    The memory map shows which libraries are loaded. The program ffmpeg may belong to another installation.
    """
    if not _mapped_avcodec():
        # The newest FFmpeg that torchcodec could load. These are the versions of libavdevice in FFmpeg 8 to 4. This library
        # depends on all other libraries of FFmpeg, whereas media players often include only libavcodec.
        for version in (62, 61, 60, 59, 58):
            with contextlib.suppress(OSError):
                ctypes.CDLL(f"libavdevice.so.{version}")
                break
    path = _mapped_avcodec()
    if not path:
        return None
    avcodec = ctypes.CDLL(path)
    # Since FFmpeg 4, the first field of AVCodecDescriptor is the id (an int), and that of AVCodec is the name (a char *).
    avcodec.avcodec_descriptor_get_by_name.restype = ctypes.POINTER(ctypes.c_int)
    avcodec.avcodec_find_decoder.restype = ctypes.POINTER(ctypes.c_char_p)
    decoders: dict[str, str | None] = dict.fromkeys(CODECS)
    for codec in CODECS:
        identifier = avcodec.avcodec_descriptor_get_by_name(codec.encode())
        if identifier and (decoder := avcodec.avcodec_find_decoder(identifier.contents.value)):
            decoders[codec] = decoder.contents.value.decode()
    version = avcodec.avcodec_version() >> 16
    release = f"with libavcodec {version}"
    if hasattr(avcodec, "av_version_info"):  # a function of libavutil, on which libavcodec depends
        avcodec.av_version_info.restype = ctypes.c_char_p
        release = avcodec.av_version_info().decode(errors="replace")
    return {"version": release, "libavcodec": version, "path": path, "decoders": decoders}


def _mapped_avcodec() -> str:
    """Return the path of the loaded libavcodec. Empty if none is loaded."""
    path = re.search(r"/\S*/libavcodec[^/\s]*\.so[.\d]*", Path("/proc/self/maps").read_text())
    return path[0] if path else ""


def decode(clip: Clip, video: VideoFormat, dali: bool, gpu: int | None) -> npt.NDArray[np.uint8]:
    """Decode the first requested frame of a packed clip. Return it with shape (H, W, 3).

    Args:
        clip: Packed clip.
        video: Format of the video.
        dali: Whether to decode with DALI instead of torchcodec.
        gpu: Index of the CUDA device that decodes. None for the CPU.
    """
    if dali:
        from dali_stream.decode import dali as decoder

        [frames] = decoder.decode([decoder.encoded(clip)], gpu, 1)
    else:
        from dali_stream.decode.torchcodec import decode_clip

        frames = decode_clip(clip, video, "cpu" if gpu is None else f"cuda:{gpu}")
    frame: npt.NDArray[np.uint8] = frames[0]
    return frame
