"""Options of `prepare`: each change is one, and none is the default. Presets are constants from a committed report."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from dali_stream.arguments import one_of, picture_size, positive
from dali_stream.tools.preparation.encoders import CODECS, ENCODERS

# `--for cpu` is one step finer than the setting of benchmarks/results/prepare_codecs_2cores.json that a Loader reads as fast as
# AV1, and that all GPUs decode. `--for nvdec` follows from vendors' figures, and was not measured. `--for hub` are the settings
# with which LeRobot records.
PRESETS: dict[str, dict[str, Any]] = {
    "cpu": {"codec": "h264", "gop": 2, "crf": 18},
    "nvdec": {"codec": "hevc", "gop": 2, "crf": 20},
    "hub": {"codec": "av1", "gop": 2, "crf": 30},
}


@dataclass(frozen=True)
class Options:
    """Changes to make.

    Attributes:
        size: (height, width) of all cameras. Default: as recorded.
        codec: "h264", "hevc", "av1" or "vp9". Default: as recorded.
        gop: Distance of keyframes in frames. Default: 2.
        crf: Quality on the encoder's scale, lower is better. Default: close to the source.
        encoder: "cpu" or "nvenc".
        file_mb: Approximate size of a file in MiB. Default: 100 for rows and 200 for video.
        rows_per_group: Rows of a row group, which holds whole episodes. Default: about 32 MiB of rows.
        images_to_video: Whether cameras whose frames are images in rows become videos.
        drop_broken: Whether to check all episodes first, and to leave out those that cannot be read.
    """

    size: tuple[int, int] | None = None
    codec: str | None = None
    gop: int | None = None
    crf: int | None = None
    encoder: str | None = None
    file_mb: float | None = None
    rows_per_group: int | None = None
    images_to_video: bool = False
    drop_broken: bool = False

    @property
    def encodes(self) -> bool:
        """Whether an option asks for another encoding of the videos."""
        return any(value is not None for value in (self.size, self.codec, self.gop, self.crf, self.encoder))

    def checked(self) -> Options:
        """Return the options themselves. Raises ValueError if one is not allowed."""
        if self.codec is not None:
            one_of("codec", self.codec, CODECS)
        if self.encoder is not None:
            one_of("encoder", self.encoder, ENCODERS)
        for name in ("gop", "rows_per_group"):
            if getattr(self, name) is not None:
                positive(name, getattr(self, name))
        if self.file_mb is not None and not self.file_mb > 0:
            raise ValueError(f"file_mb must be a number above 0, got {self.file_mb}")
        return replace(self, size=picture_size(self.size))

    def with_preset(self, name: str | None) -> Options:
        """Return the options, completed by those of a preset."""
        if name is None:
            return self
        one_of("for_", name, tuple(PRESETS))
        return replace(self, **{key: value for key, value in PRESETS[name].items() if getattr(self, key) is None})

    def as_dict(self) -> dict[str, Any]:
        """Return what differs from the defaults, for JSON."""
        values = {field.name: (getattr(self, field.name), field.default) for field in fields(self)}
        return {name: list(v) if isinstance(v, tuple) else v for name, (v, default) in values.items() if v != default}
