"""Which decoder a camera's frames go through, and why."""

from __future__ import annotations

from dataclasses import dataclass

from dali_stream.video.boxes import UPRIGHT
from dali_stream.video.capability import capability
from dali_stream.video.format import VideoFormat
from dali_stream.video.table import SampleTable

DECODE = ("auto", "dali", "torchcodec")
DALI_ON_CPU = ("vp8", "vp9", "mjpeg")


@dataclass(frozen=True)
class Route:
    """Attributes: `decoder`, "dali" (NVDEC on a GPU) or "torchcodec" (FFmpeg on the CPU); `reason`, one sentence."""

    decoder: str
    reason: str


def choose(decode: str, gpu: int | None, video: VideoFormat, table: SampleTable) -> Route:
    """The route of a camera.

    Args:
        decode: "auto", "dali" or "torchcodec".
        gpu: index of the CUDA device; None where batches are made on the CPU.
        video: what the camera's file says of its video.
        table: the sample table of that file.

    Raises:
        ValueError: `decode` is "dali" and DALI cannot decode this video here.
    """
    if decode == "torchcodec":
        return Route("torchcodec", 'decode="torchcodec" asks for it')
    refused = refusal(gpu, video, table)
    if not refused:
        where = "DALI's CPU decoder" if gpu is None else "NVDEC"
        if decode == "dali" or gpu is not None:
            return Route("dali", f"{where} decodes {_name(video)} of {video.height}×{video.width}")
        refused = "batches are made on the CPU, where FFmpeg decodes every codec"
    if decode == "dali":
        raise ValueError(f'decode="dali": {refused}. Use decode="auto", which takes torchcodec for such cameras')
    return Route("torchcodec", refused)


def refusal(gpu: int | None, video: VideoFormat, table: SampleTable) -> str:
    """Why DALI must not decode this video; empty where it may."""
    if gpu is None:
        if video.codec not in DALI_ON_CPU:
            return f"DALI decodes {', '.join(DALI_ON_CPU)} on a CPU, and this is {video.codec}"
    elif refused := capability(gpu, video.codec, video.chroma, video.depth).refusal(video.height, video.width):
        return refused
    if len(table.configs) > 1:
        return f"the file has {len(table.configs)} sample descriptions, and a clip for DALI is made of one"
    if table.track_header[:36] != UPRIGHT:
        return "the file says that its pictures are to be turned, which DALI does not do"
    if table.open_gops:
        return "open GOPs: a clip may begin with pictures that NVDEC would show and FFmpeg drops"
    if gpu is not None and video.codec == "av1" and max_gop(table) > 2:
        # DALI pairs times with pictures first in, first out; hidden frames of AV1, which encoders use in longer GOPs,
        # would shift them. Read in DALI's source, not seen on a GPU.
        return f"AV1 with GOPs of up to {max_gop(table)} may hold hidden frames, which shift the frames that DALI counts"
    return ""


def max_gop(table: SampleTable) -> int:
    """Pictures of the longest GOP."""
    ends = [*table.sync[1:].tolist(), len(table)]
    return max(stop - start for start, stop in zip(table.sync.tolist(), ends, strict=True))


def _name(video: VideoFormat) -> str:
    return f"{video.codec} {video.chroma} {video.depth} bit"
