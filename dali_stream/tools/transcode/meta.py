"""The files below `meta/` of the new dataset: copies, with new encoding entries in info.json."""

from __future__ import annotations

import copy as copies
import json
from collections.abc import Iterable
from typing import Any

from dali_stream.dataset import Dataset
from dali_stream.lerobot import metadata
from dali_stream.lerobot.features import ENCODING
from dali_stream.tools.output.copy import copy, copy_small_files, episode_files, small_files
from dali_stream.tools.output.folder import Folder
from dali_stream.tools.transcode.encoders import Encoder

# Encoding entries of newer LeRobot versions, in addition to codec, pix_fmt, g, crf and preset.
_UNTRUE = ("video.fast_decode", "video.video_backend", "video.extra_options")


def write_meta(folder: Folder, dataset: Dataset, info: dict[str, Any]) -> None:
    """Writes them into the folder's stage."""
    folder.fresh_meta()
    copy_small_files(dataset, folder, small_files(dataset.store))
    for name in episode_files(dataset.store):
        copy(dataset.store, name, folder, f"{folder.stage.name}/{name}")
    with folder.writing(f"{folder.stage.name}/{metadata.INFO}") as file:
        file.write(json.dumps(info, indent=4, ensure_ascii=False).encode())


def renewed(info: dict[str, Any], cameras: Iterable[str], encoder: Encoder, gop: int) -> dict[str, Any]:
    """info.json after encoding these cameras. Unknown keys stay.

    Encoding entries are changed or removed; only codec and pixel format are added.
    """
    info = copies.deepcopy(info)
    new: dict[str, Any] = {"video.g": gop, "video.crf": encoder.quality, "video.preset": encoder.preset or None}
    for camera in cameras:
        for place in ENCODING:
            said = info["features"][camera].get(place)
            if isinstance(said, dict):
                for key in _UNTRUE:
                    said.pop(key, None)
                said |= {key: value for key, value in new.items() if key in said}
                said |= {"video.codec": encoder.codec, "video.pix_fmt": "yuv420p"}
    return info
