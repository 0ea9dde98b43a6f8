"""Results on the speed of NVDEC and of the CPU, as a Loader measures it when it starts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from dali_stream.decode.route import Route
from dali_stream.decode.speed import RequestClips
from dali_stream.mp4.format import VideoFormat
from dali_stream.tools.diagnosis import answers
from dali_stream.tools.diagnosis.report import OK, WARNING, Result
from dali_stream.tools.isolated import Answer, call_each


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
        Results by name, and {camera: {where: speeds}} for the report.
    """
    calls = [partial(answers.speed, each.clips, each.video, each.gop, each.gpu, cameras) for each in speeds]
    results: dict[str, Result] = {}
    facts: dict[str, Any] = {}
    for each, answer in zip(speeds, call_each(calls, limit_s), strict=True):
        results[f"{each.camera} speed on {each.where}"] = _result(answer)
        facts.setdefault(each.camera, {})[each.where] = {} if answer.error else dataclasses.asdict(answer.value)
    return results, facts


def _result(answer: Answer) -> Result:
    if answer.error:
        return WARNING, f"it could not be measured: {answer.reason}", 'use Loader(decode="torchcodec") if the Loader fails, too'
    text = str(answer.value)
    if advice := Route("dali", "", answer.value).advice:
        comparison, _, remedy = advice.partition(". ")
        return WARNING, f"{text}. {comparison}", f"{remedy[0].lower()}{remedy[1:]}"
    return OK, text, ""
