"""Encoding of the demo's frames to MP4 with torchcodec, with keyframes at exactly the requested distance."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dali_stream.system.torchcodec_import import explained_import


@dataclass(frozen=True)
class Codec:
    """FFmpeg encoder with its settings.

    Attributes:
        encoder: FFmpeg's name of the encoder.
        crf: Constant rate factor, or None if the encoder has none.
        preset: Preset of the encoder. Default: none.
        options: Further options. `{gop}` in a value is replaced by the distance of keyframes. Default: none.
        min_gop: Minimum distance of keyframes, in frames. Default: 1.
        alone: Whether only one of these encoders may run at a time in a process. Default: False.
    """

    encoder: str
    crf: int | None
    preset: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    min_gop: int = 1
    """With a distance of 1, SVT-AV1 marks only the first frame as a keyframe."""
    alone: bool = False
    """SVT-AV1 fills and frees global tables whenever an encoder starts or ends, so two encoders at a time crash the process
    (https://github.com/syntalos/syntalos/issues/193 describes it for 2.3.0, and 1.4.1 crashed in every second run)."""


CODECS = {
    # The encoder and crf are LeRobot's defaults. SVT-AV1 has no scene detection. Three settings keep the identity strip
    # readable, as measured with SVT-AV1 1.4. scm=0 disables the screen-content mode, which the strip would trigger. It takes
    # three times as long, and turns single white cells black at GOPs of 7 or more frames. Preset 12 also turns them black, and
    # preset 10 does not. enable-tf=0 disables temporal filtering, which mixes adjacent frames.
    "av1": Codec("libsvtav1", 30, "10", {"svtav1-params": "scm=0:enable-tf=0"}, min_gop=2, alone=True),
    # B-frames are enabled, so display order and decode order differ, as in real recordings. GOPs are closed.
    "h264": Codec("libx264", 23, "veryfast", {"sc_threshold": 0, "keyint_min": "{gop}"}),
    "hevc": Codec(
        "libx265",
        26,
        "ultrafast",
        # min-cu-size=8 replaces the preset's blocks of 16 pixels, with which x265 codes 360 lines as 368. NVDEC is not used
        # for such files.
        {"x265-params": "open-gop=0:scenecut=0:keyint={gop}:min-keyint={gop}:min-cu-size=8:log-level=none"},
    ),
    # Deadline 1 means realtime. Alternate reference frames are disabled, because they are never displayed. Without them, each
    # packet of the file is one frame.
    "vp9": Codec("libvpx-vp9", 32, None, {"deadline": 1, "cpu-used": 8, "auto-alt-ref": 0, "lag-in-frames": 0, "b": 0}),
    # MPEG-4 Part 2, as in older recordings. The quantizer is 3, which FFmpeg counts in 118ths. Scene detection is disabled.
    "mpeg4": Codec("mpeg4", None, None, {"flags": "+qscale", "global_quality": 3 * 118, "sc_threshold": 1_000_000_000}),
}

_one_at_a_time = threading.Lock()


def encode_video(images: np.ndarray, path: Path, *, codec: str | Codec, gop: int, fps: int) -> None:
    """Encode frames to an MP4 file in yuv420p, BT.601 and limited range.

    Args:
        images: RGB frames, uint8, shape (N, H, W, 3).
        path: Path of the file.
        codec: Key in `CODECS`, or an encoder with its settings.
        gop: Distance of keyframes, in frames.
        fps: Frames per second.

    Raises:
        TorchcodecError: If torchcodec or FFmpeg cannot be loaded.
        RuntimeError: If FFmpeg lacks the encoder or refuses the settings.
    """
    # Imported on use, because torch takes seconds to load, and the rest of the demo does not require it.
    import torch

    with explained_import():
        from torchcodec.encoders import VideoEncoder  # type: ignore[attr-defined]  # exported, but not by __all__

    settings = CODECS[codec] if isinstance(codec, str) else codec
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
            f"encoder (`ffmpeg -encoders` lists them), or choose another codec of {', '.join(CODECS)}."
        ) from error


@contextmanager
def quiet_encoders() -> Iterator[None]:
    """Prevent SVT-AV1 from writing its settings to stderr. Its log level can be set only in the environment."""
    if "SVT_LOG" in os.environ:  # the user has set a log level
        yield
        return
    os.environ["SVT_LOG"] = "1"  # errors only
    try:
        yield
    finally:
        os.environ.pop("SVT_LOG", None)
