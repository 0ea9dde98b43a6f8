"""Encoding of the demo's frames to MP4 by torchcodec, with keyframes exactly where they are asked for."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Codec:
    """An FFmpeg encoder and its settings. `options` may hold `{gop}`, which becomes the distance of keyframes."""

    encoder: str
    crf: int | None
    preset: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    min_gop: int = 1
    """SVT-AV1 at GOP 1 marks only the first frame as a keyframe."""
    alone: bool = False
    """Two at a time in a process crash it: SVT-AV1 fills and frees global tables whenever an encoder starts or ends
    (https://github.com/syntalos/syntalos/issues/193 found it in 2.3.0; here 1.4.1 fell in every second run)."""


CODECS = {
    # LeRobot's own encoder and crf; SVT-AV1 cuts no scenes. Three settings guard the identity strip, measured with
    # SVT-AV1 1.4: screen-content mode, which the cells switch on, takes three times as long and, at GOPs of 7 and more,
    # delivers single black cells for white ones; so does preset 12. Temporal filtering mixes neighbouring frames.
    "av1": Codec("libsvtav1", 30, "10", {"svtav1-params": "scm=0:enable-tf=0"}, min_gop=2, alone=True),
    # B-frames stay on: presentation and decoding order differ, as in recordings in the wild. GOPs are closed.
    "h264": Codec("libx264", 23, "veryfast", {"sc_threshold": 0, "keyint_min": "{gop}"}),
    "hevc": Codec(
        "libx265",
        26,
        "ultrafast",
        # Blocks of 8 pixels: with the preset's 16, x265 codes 360 lines as 368, which NVDEC does not get.
        {"x265-params": "open-gop=0:scenecut=0:keyint={gop}:min-keyint={gop}:min-cu-size=8:log-level=none"},
    ),
    # deadline 1 is realtime. Alternate reference frames are frames that are never shown: without them, a packet of
    # the file is a frame.
    "vp9": Codec("libvpx-vp9", 32, None, {"deadline": 1, "cpu-used": 8, "auto-alt-ref": 0, "lag-in-frames": 0, "b": 0}),
    # Part 2, as older recordings have it. A quantiser of 3, in FFmpeg's unit of 1/118; no scene is ever cut.
    "mpeg4": Codec("mpeg4", None, None, {"flags": "+qscale", "global_quality": 3 * 118, "sc_threshold": 1_000_000_000}),
}

_one_at_a_time = threading.Lock()


def encode_video(images: np.ndarray, path: Path, *, codec: str, gop: int, fps: int) -> None:
    """Write frames (N, H, W, 3) uint8 to an MP4 file: yuv420p, BT.601, limited range, a keyframe every `gop`.

    Raises:
        RuntimeError: FFmpeg lacks the encoder or refuses the settings.
    """
    # Imported here: torch takes seconds to load, and the rest of the demo does without it.
    import torch
    from torchcodec.encoders import VideoEncoder  # type: ignore[attr-defined]  # exported, but not by __all__

    settings = CODECS[codec]
    options = {key: value.format(gop=gop) if isinstance(value, str) else value for key, value in settings.options.items()}
    frames = torch.from_numpy(images).permute(0, 3, 1, 2)
    try:
        with _one_at_a_time if settings.alone else nullcontext():
            VideoEncoder(frames, frame_rate=fps).to_file(
                path,
                codec=settings.encoder,
                pixel_format="yuv420p",
                crf=settings.crf,
                preset=settings.preset,
                extra_options={"g": gop, **options},
            )
    except (RuntimeError, ValueError) as error:
        raise RuntimeError(
            f"Cannot encode {path.name} with {settings.encoder}: {error}. FFmpeg's shared libraries must hold this "
            f"encoder (`ffmpeg -encoders` lists them); or choose another codec of {', '.join(CODECS)}."
        ) from error


@contextmanager
def quiet_encoders() -> Iterator[None]:
    """Keep SVT-AV1 from writing its settings to stderr. It takes its log level from the environment alone."""
    if "SVT_LOG" in os.environ:  # somebody wants to see it
        yield
        return
    os.environ["SVT_LOG"] = "1"  # errors only
    try:
        yield
    finally:
        os.environ.pop("SVT_LOG", None)
