"""What a dataset is, without decoding any of it: sizes, features, tasks, and what its videos are made of.

Only metadata and the indices (`moov`) of video files are read. Neither torchcodec nor DALI is needed.
"""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from dali_stream import process
from dali_stream.dataset import Dataset
from dali_stream.decode.route import Route, choose, refusal
from dali_stream.lerobot import metadata
from dali_stream.mp4.format import VideoFormat
from dali_stream.mp4.format import describe as describe_format
from dali_stream.mp4.index import VideoIndex, read_index
from dali_stream.storage import Store

LOOK_AT = 32  # video files per camera: each is a read of its index, which may be far away
_AT_A_TIME = 16  # reads under way: each waits for its answer, where the files are remote
_PROFILES = {
    "av1": {0: "Main", 1: "High", 2: "Professional"},
    "h264": {66: "Baseline", 77: "Main", 88: "Extended", 100: "High", 110: "High 10", 122: "High 4:2:2", 244: "High 4:4:4"},
    "hevc": {1: "Main", 2: "Main 10", 3: "Main Still Frame", 4: "Range Extensions"},
    "vp9": {0: "Profile 0", 1: "Profile 1", 2: "Profile 2", 3: "Profile 3"},
}


@dataclass(frozen=True)
class FeatureReport:
    """One feature as `meta/info.json` has it."""

    dtype: str
    shape: tuple[int, ...]
    names: Any


@dataclass(frozen=True)
class CameraReport:
    """One camera. What only videos have is None for a camera whose frames are images in Parquet rows.

    Attributes:
        kind: "video" or "image".
        height, width: of a frame, in pixels.
        codec, profile, pixel_format: of the first episode's file; `pixel_format` is FFmpeg's name.
        other_formats: formats of other files that differ from the first, as "codec profile pixel_format HxW".
        gop_min, gop_max: frames of the shortest and the longest GOP. A file's last GOP ends with the file, so it
            does not count as shortest unless it is the only one.
        b_frames: whether any file shows frames in another order than it decodes them in.
        open_gops: whether in any file frames after a keyframe refer to those before it.
        files, files_looked_at: how many there are, and how many of them all of this was read from.
        bytes: of all its files.
        route: the decoder that a Loader begins with on this machine.
        route_change: why a Loader would leave that route for torchcodec at a later file; empty if none of those looked
            at makes it.
    """

    kind: str
    height: int
    width: int
    route: Route
    codec: str | None = None
    profile: str | None = None
    pixel_format: str | None = None
    other_formats: tuple[str, ...] = ()
    gop_min: int | None = None
    gop_max: int | None = None
    b_frames: bool | None = None
    open_gops: bool | None = None
    files: int = 0
    files_looked_at: int = 0
    bytes: int = 0
    route_change: str = ""


@dataclass(frozen=True)
class DatasetReport:
    """A dataset, or the part of it that is selected.

    Attributes:
        uri, address: as given, and where that is.
        episode_frames: (fewest, most) frames of an episode.
        data_files: Parquet files of the selected episodes.
        bytes: {"data", "videos", "meta"}: of the files of the selected episodes and cameras; all of `meta/`.
    """

    uri: str
    address: str
    fingerprint: str
    codebase_version: str
    robot_type: str | None
    fps: float
    episodes: int
    frames: int
    duration_s: float
    episode_frames: tuple[int, int]
    data_files: int
    tasks: dict[int, str]
    features: dict[str, FeatureReport]
    cameras: dict[str, CameraReport]
    bytes: dict[str, int]

    def as_dict(self) -> dict[str, Any]:
        """The same as plain dicts and lists, which JSON can hold."""
        return dataclasses.asdict(self)


def describe(dataset: Dataset, *, look_at: int = LOOK_AT) -> DatasetReport:
    """Looks at a dataset's metadata and at the indices of its video files.

    Args:
        dataset: the selected part of a dataset.
        look_at: video files per camera to read the index of; where there are more, they are spread over all.

    Raises:
        DatasetError: a file is missing or its metadata is broken.
        DecodeError: a video file's index cannot be read.
    """
    if look_at < 1:
        raise ValueError(f"look_at is {look_at}; it is the number of video files per camera to look at, 1 or more")
    info = metadata.read_json(dataset.store, metadata.INFO)
    cameras = {key: _camera(dataset, key, look_at) for key in dataset.cameras}
    data_files = _paths(dataset, dataset.table.data)
    robot_type = info.get("robot_type")
    return DatasetReport(
        uri=dataset.uri,
        address=dataset.store.address,
        fingerprint=dataset.fingerprint,
        codebase_version=str(info["codebase_version"]),
        robot_type=None if robot_type is None else str(robot_type),
        fps=dataset.fps,
        episodes=dataset.num_episodes,
        frames=dataset.num_frames,
        duration_s=dataset.num_frames / dataset.fps,
        episode_frames=(int(dataset.lengths.min()), int(dataset.lengths.max())),
        data_files=len(data_files),
        tasks=dict(sorted(dataset.tasks.items())),
        features={
            key: FeatureReport(feature.dtype, feature.shape, feature.get("names")) for key, feature in dataset.features.items()
        },
        cameras=cameras,
        bytes={
            "data": _bytes(dataset.data_store, data_files),
            "videos": sum(camera.bytes for camera in cameras.values()),
            "meta": _bytes(dataset.store, dataset.store.files("meta")),
        },
    )


def _paths(dataset: Dataset, files: metadata.Files) -> list[str]:
    """Files of the selected episodes, that of the first episode first."""
    return [files.paths[i] for i in dict.fromkeys(files.index[dataset.rows].tolist())]


def _camera(dataset: Dataset, key: str, look_at: int) -> CameraReport:
    if key not in dataset.videos:
        height, width = dataset.picture_size(key)
        return CameraReport("image", height, width, Route("torchcodec", "its frames are images in Parquet rows"))
    paths, chosen = video_files(dataset, key, look_at)
    with ThreadPoolExecutor(_AT_A_TIME) as pool:
        tables = list(pool.map(lambda path: read_index(dataset.data_store, path), chosen))
    return describe_video(tables, dataset.data_store, process.gpu("auto"), len(paths), _bytes(dataset.data_store, paths))


def video_files(dataset: Dataset, key: str, look_at: int = LOOK_AT) -> tuple[list[str], list[str]]:
    """The video files of a camera, and those of them to look at: the first episode's, the last's, and others between."""
    paths = _paths(dataset, dataset.table.video[key])
    chosen = np.unique(np.linspace(0, len(paths) - 1, min(look_at, len(paths))).round().astype(int)).tolist()
    return paths, [paths[i] for i in chosen]


def describe_video(tables: list[VideoIndex], store: Store, gpu: int | None, files: int, size: int) -> CameraReport:
    """What a camera's videos are.

    Args:
        tables: of the files that were looked at, one or more.
        store: where they are.
        gpu: index of the CUDA device that the route is for; None for the CPU.
        files, size: how many files the camera has, and their bytes.

    Raises:
        DecodeError: a sample description is broken.
    """
    formats = [describe_format(config) for table in tables for config in table.configs]
    first = formats[0]
    route = choose("auto", gpu, first, tables[0], store)
    shortest, longest = zip(*map(_gops, tables), strict=True)
    return CameraReport(
        kind="video",
        height=first.height,
        width=first.width,
        route=route,
        codec=first.codec,
        profile=_profile(first),
        pixel_format=first.pixel_format,
        other_formats=tuple(dict.fromkeys(_name(video) for video in formats if video != first)),
        gop_min=min(shortest),
        gop_max=max(longest),
        b_frames=any(table.reordered for table in tables),
        open_gops=any(table.open_gops for table in tables),
        files=files,
        files_looked_at=len(tables),
        bytes=size,
        route_change=_route_change(route, gpu, tables),
    )


def _bytes(store: Store, paths: list[str]) -> int:
    with ThreadPoolExecutor(_AT_A_TIME) as pool:
        return sum(pool.map(store.size, paths))


def _route_change(route: Route, gpu: int | None, tables: list[VideoIndex]) -> str:
    if route.decoder == "dali":
        for table in tables:
            for config in table.configs:
                if refused := refusal(gpu, describe_format(config), table):
                    return f"{table.path}: {refused}"
    return ""


def _gops(table: VideoIndex) -> tuple[int, int]:
    """(shortest, longest) GOP of a file, in frames."""
    lengths = np.diff(np.append(table.sync, len(table)))
    return int((lengths[:-1] if len(lengths) > 1 else lengths).min()), int(lengths.max())


def _profile(video: VideoFormat) -> str | None:
    if video.profile is None:
        return None
    return _PROFILES.get(video.codec, {}).get(video.profile, str(video.profile))


def _name(video: VideoFormat) -> str:
    profile = _profile(video)
    return " ".join([video.codec, *([profile] if profile else []), video.pixel_format, f"{video.height}x{video.width}"])
