"""One frame per camera, decoded by every decoder of this machine that a Loader could choose for it."""

from __future__ import annotations

import dataclasses
import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dali_stream.mp4.clip import Clip
from dali_stream.mp4.format import VideoFormat
from dali_stream.tools.doctor import answers
from dali_stream.tools.isolated import Call, call_each

# Of luma, since decoders upsample chroma differently: in RGB, DALI and FFmpeg differ by 31 dB in saturated colours. Measured in
# luma, VP9 on a CPU: 45.4 to 46.7 dB between the two, on drawn frames and on the G1 recording; at most 22 for the next frame of
# a moving drawn scene; 32 for BT.601 taken for BT.709 in saturated colours. A wrong matrix in muted colours, and a neighbouring
# frame of a still scene, are not detected.
LEAST_PSNR_DB = 35.0
_LUMA = (0.299, 0.587, 0.114)  # of RGB, BT.601


@dataclass(frozen=True)
class Decoders:
    """Decoders that load on this machine. `gpus`: {name: index} of those with known NVDEC capabilities, one of each kind."""

    torchcodec: bool
    dali: bool
    gpus: Mapping[str, int]


@dataclass(frozen=True)
class Task:
    """A frame to decode, the first request of `clip`. `routes` are (name, whether DALI decodes, on which GPU)."""

    camera: str
    clip: Clip
    video: VideoFormat
    routes: Sequence[tuple[str, bool, int | None]]


@dataclass(frozen=True)
class Decoded:
    """Attributes: `error`, empty on success; `psnr_db` against the first decoder that succeeded (None: this is the first)."""

    error: str = ""
    psnr_db: float | None = None


def decode(tasks: Sequence[Task], limit_s: float) -> dict[str, dict[str, Decoded]]:
    """{camera: {route: result}}. A process per route decodes all cameras; if it crashes, another continues."""
    found: dict[str, dict[str, Decoded]] = {task.camera: {} for task in tasks}
    decoded: dict[str, npt.NDArray[np.uint8]] = {}
    with tempfile.TemporaryDirectory(prefix="dali-stream-doctor-") as folder:
        for number, task in enumerate(tasks):
            Path(folder, f"{number}.mp4").write_bytes(task.clip.data)
        for route in dict.fromkeys(route for task in tasks for route in task.routes):
            own = [number for number, task in enumerate(tasks) if route in task.routes]
            calls = [_call(tasks[number], number, route, folder) for number in own]
            for number, answer in zip(own, call_each(calls, limit_s), strict=True):
                camera = tasks[number].camera
                if answer.error:
                    found[camera][route[0]] = Decoded(answer.reason)
                    continue
                frame = np.load(_out(folder, number))
                first = decoded.setdefault(camera, frame)
                found[camera][route[0]] = Decoded("", None if first is frame else psnr(first, frame))
    return found


def psnr(one: npt.NDArray[np.uint8], other: npt.NDArray[np.uint8]) -> float:
    """Peak signal to noise ratio in dB of two frames' luma; 0 where their shapes differ, 99 where they are equal."""
    if one.shape != other.shape:
        return 0.0
    error = float(np.mean(((one.astype(np.float64) - other) @ _LUMA) ** 2))
    return round(10 * math.log10(255**2 / error), 1) if error else 99.0


def _out(folder: str, number: int) -> str:
    return str(Path(folder, f"{number}.npy"))


def _call(task: Task, number: int, route: tuple[str, bool, int | None], folder: str) -> Call:
    clip, video = str(Path(folder, f"{number}.mp4")), dataclasses.asdict(task.video)
    arguments = {"clip": clip, "frame": task.clip.frames[0], "video": video, "dali": route[1], "gpu": route[2]}
    return str(answers.__file__), "decode", arguments | {"out": _out(folder, number)}
