"""What transcoding changed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class TranscodedCamera:
    """One camera.

    Attributes:
        files: number of MP4s, of which `copied` were copied, since they meet the request or are depth maps.
        frames: of all its files.
        bytes_before, bytes_after: of all its files.
        codec_before, codec_after: several are separated by commas.
        encoder: FFmpeg's name; empty if all files were copied.
        psnr_min, psnr_mean: dB over RGB, of the compared frames; None if all files were copied.
        episodes: per episode index of encoded files, its (min, mean).
    """

    files: int
    copied: int
    frames: int
    bytes_before: int
    bytes_after: int
    codec_before: str
    codec_after: str
    encoder: str
    psnr_min: float | None
    psnr_mean: float | None
    episodes: dict[int, tuple[float, float]]


@dataclass(frozen=True)
class TranscodeReport:
    """A dataset. `codec` and `gop` are as requested."""

    episodes: int
    frames: int
    codec: str
    gop: int
    cameras: dict[str, TranscodedCamera]

    def as_dict(self) -> dict[str, Any]:
        """The same as dicts and lists for JSON."""
        return dataclasses.asdict(self)


def camera(notes: Sequence[dict[str, Any]]) -> TranscodedCamera:
    """Sums up the notes of its files."""
    episodes = {
        int(e): (low, mean) for note in notes for e, (low, mean) in sorted(note["psnr"].items(), key=lambda e: int(e[0]))
    }
    means = [mean for _, mean in episodes.values()]

    def names(key: str) -> str:
        return ", ".join(sorted({note[key] for note in notes} - {""}))

    return TranscodedCamera(
        files=len(notes),
        copied=sum(not note["encoder"] for note in notes),
        frames=sum(note["frames"] for note in notes),
        bytes_before=sum(note["bytes_before"] for note in notes),
        bytes_after=sum(note["bytes_after"] for note in notes),
        codec_before=names("codec_before"),
        codec_after=names("codec_after"),
        encoder=names("encoder"),
        psnr_min=min((low for low, _ in episodes.values()), default=None),
        psnr_mean=sum(means) / len(means) if means else None,
        episodes=episodes,
    )
