"""Options of `prepare`, and its presets. By default, `prepare` changes nothing."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from dali_stream.checks.arguments import one_of, picture_size, positive
from dali_stream.tools.preparation.encoders import CODECS, ENCODERS

# All GPUs decode `--for cpu`. At 224x224 and 37 dB PSNR, a Loader delivered 3,665 frames/s of H.264 with GOP 2, 2,488 with
# GOP 1, and 4,416 of AV1 with GOP 2 (4 episodes of a robot's camera, 2 cores of an AMD EPYC, 2026-11-25). `--for nvdec` is
# based on figures of vendors, and was not measured. `--for hub` has the settings with which LeRobot records.
PRESETS: dict[str, dict[str, Any]] = {
    "cpu": {"codec": "h264", "gop": 2, "crf": 18},
    "nvdec": {"codec": "hevc", "gop": 2, "crf": 20},
    "hub": {"codec": "av1", "gop": 2, "crf": 30},
}


@dataclass(frozen=True)
class Options:
    """Changes that `prepare` makes to a dataset.

    If any of the first five is not None, videos are encoded again, except depth maps and videos that were recorded with the
    same settings.

    Attributes:
        size: (height, width) of all cameras. Default: as recorded.
        codec: "h264", "hevc", "av1" or "vp9". Default: as recorded.
        gop: GOP length in frames. Default: 2.
        crf: Quality on the encoder's scale. Lower is better. Default: a quality close to the source.
        encoder: "cpu" or "nvenc". Default: "cpu".
        file_mb: Approximate size of a file in MiB. Default: 100 for rows and 200 for video.
        rows_per_group: Maximum number of rows of a row group. Only an episode with more rows is split over several groups.
            Default: about 32 MiB of rows.
        images_to_video: Whether cameras whose frames are images in rows become videos. Default: False.
        drop_broken: Whether to check all episodes first, and to leave out those that cannot be read. Default: False.
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
        """Whether an option requires that videos are encoded again."""
        return any(value is not None for value in (self.size, self.codec, self.gop, self.crf, self.encoder))

    def checked(self) -> Options:
        """Return the options with a normalized `size`. Raises ValueError if an option is not allowed."""
        for name, allowed in (("codec", CODECS), ("encoder", ENCODERS)):
            if getattr(self, name) is not None:
                one_of(name, getattr(self, name), allowed)
        for name in ("gop", "rows_per_group"):
            if getattr(self, name) is not None:
                positive(name, getattr(self, name))
        if self.file_mb is not None and not self.file_mb > 0:
            raise ValueError(f"file_mb must be a number above 0, got {self.file_mb}")
        return replace(self, size=picture_size(self.size))

    def with_preset(self, name: str | None) -> Options:
        """Return a copy in which the options of a preset replace the options that are None."""
        if name is None:
            return self
        one_of("for_", name, tuple(PRESETS))
        return replace(self, **{key: value for key, value in PRESETS[name].items() if getattr(self, key) is None})

    def as_dict(self) -> dict[str, Any]:
        """Return the options that differ from their defaults, as a dict for JSON."""
        return {each.name: value for each in fields(self) if (value := getattr(self, each.name)) != each.default}
