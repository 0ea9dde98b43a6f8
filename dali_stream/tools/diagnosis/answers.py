"""Questions to libraries and to the driver. They run in separate processes, since they may crash. See `isolated`."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt

from dali_stream.decode import capability
from dali_stream.mp4.clip import Clip
from dali_stream.mp4.format import VideoFormat
from dali_stream.system.torchcodec_import import TorchcodecError, explained_import


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
    """Return torchcodec's version, and the major version of the FFmpeg that its decoders load, or an error with its remedy."""
    try:
        with explained_import():
            import torchcodec
            import torchcodec.decoders
    except TorchcodecError as error:
        if isinstance(error.__cause__, ModuleNotFoundError):
            raise error.__cause__ from None
        return {"failed": error.cause, "remedy": error.remedy}
    return {"version": str(torchcodec.__version__), "ffmpeg": torchcodec.ffmpeg_major_version}


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


def decode_depth(key: str, clip: Clip, video: VideoFormat) -> npt.NDArray[np.uint8]:
    """Decode the first requested frame of a packed clip of the depth camera `key`. Return the highest 8 of 12 bits as RGB.

    Raises:
        DaliStreamError: If PyAV cannot be imported.
    """
    from dali_stream.decode import depth

    depth.pyav(key)
    [(_, codes, _)] = depth.decode_clip_in_parts(clip, video, len(clip.frames))
    return np.repeat((codes.numpy()[0] >> 4).astype(np.uint8), 3, axis=-1)
