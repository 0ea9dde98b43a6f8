"""Findings on the speed of NVDEC beside the CPU, as a Loader measures it when it starts."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dali_stream.decode.route import Rates, Route
from dali_stream.decode.speed import RequestClips
from dali_stream.mp4.format import VideoFormat
from dali_stream.tools.diagnosis import answers
from dali_stream.tools.diagnosis.report import OK, WARNING, Result
from dali_stream.tools.isolated import Answer, Call, call_each


@dataclass(frozen=True)
class Speed:
    """Speeds to measure. `gop` is the median length of the GOPs; `gpu` is None for DALI's decoder on the CPU."""

    camera: str
    where: str
    clips: RequestClips
    video: VideoFormat
    gop: int
    gpu: int | None


def measure(speeds: Sequence[Speed], cameras: int, limit_s: float) -> tuple[dict[str, Result], dict[str, Any]]:
    """Measure speeds in another process. `cameras` is the number of cameras of the dataset that are video.

    Returns:
        Findings by name, and {camera: {where: speeds}} for the report.
    """
    if not speeds:
        return {}, {}
    with tempfile.TemporaryDirectory(prefix="dali-stream-doctor-") as folder:
        calls = [_call(speed, cameras, Path(folder, str(number))) for number, speed in enumerate(speeds)]
        answered = call_each(calls, limit_s)
    facts: dict[str, Any] = {}
    for speed, answer in zip(speeds, answered, strict=True):
        facts.setdefault(speed.camera, {})[speed.where] = dict(answer.value)
    return {
        f"{speed.camera} speed on {speed.where}": _finding(answer) for speed, answer in zip(speeds, answered, strict=True)
    }, facts


def _call(speed: Speed, cameras: int, folder: Path) -> Call:
    folder.mkdir()
    clips = []
    for number, clip in enumerate((*speed.clips.singles, speed.clips.packed)):
        path = folder / f"{number}.mp4"
        path.write_bytes(clip.data)
        clips.append({"path": str(path), "frames": clip.frames})
    video = dataclasses.asdict(speed.video)
    return (
        str(answers.__file__),
        "speed",
        {"clips": clips, "video": video, "gop": speed.gop, "gpu": speed.gpu, "cameras": cameras},
    )


def _finding(answer: Answer) -> Result:
    if answer.error:
        return WARNING, f"it could not be measured: {answer.reason}", 'use Loader(decode="torchcodec") if the Loader fails, too'
    rates = Rates(**answer.value)
    if advice := Route("dali", "", rates).advice:
        told, _, remedy = advice.partition(". ")
        return WARNING, f"{rates}. {told}", f"{remedy[0].lower()}{remedy[1:]}"
    return OK, str(rates), ""
