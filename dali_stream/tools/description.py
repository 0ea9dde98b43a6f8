"""`describe`: sizes, features, tasks and video formats of a dataset, without decoding.

It reads metadata and the indices (`moov`) of video files. It needs neither torchcodec nor DALI.
"""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from dali_stream.checks.arguments import positive
from dali_stream.dataset import Dataset
from dali_stream.decode.refusal import refusal_of_torchcodec
from dali_stream.decode.route import DEPTH, IMAGES, Route, choose
from dali_stream.errors import DaliStreamError, DatasetError, DecodeError
from dali_stream.lerobot.episode_table import Files
from dali_stream.lerobot.info import INFO
from dali_stream.lerobot.json_files import read_json
from dali_stream.mp4.format import VideoFormat
from dali_stream.mp4.index import VideoIndex, read_index
from dali_stream.storage import Store
from dali_stream.system import cpu
from dali_stream.system.gpu import gpu_index
from dali_stream.tools.work import spread

LOOK_AT = 32  # maximum number of video files per camera whose index is read
_AT_A_TIME = 16  # concurrent reads, for remote files
_SAME_FPS = 0.01  # relative tolerance, since files with ticks of a millisecond round their frame intervals
_PROFILES = {
    "av1": {0: "Main", 1: "High", 2: "Professional"},
    "h264": {66: "Baseline", 77: "Main", 88: "Extended", 100: "High", 110: "High 10", 122: "High 4:2:2", 244: "High 4:4:4"},
    "hevc": {1: "Main", 2: "Main 10", 3: "Main Still Frame", 4: "Range Extensions"},
    "vp9": {0: "Profile 0", 1: "Profile 1", 2: "Profile 2", 3: "Profile 3"},
}


@dataclass(frozen=True)
class FeatureReport:
    """One feature of `meta/info.json`."""

    dtype: str
    shape: tuple[int, ...]
    names: Any


@dataclass(frozen=True)
class CameraReport:
    """One camera. Fields that describe video are None for a camera with images in Parquet rows.

    Attributes:
        kind: "video" or "image".
        height, width: Size of a frame, in pixels.
        codec, profile, pixel_format: Format of the first episode's file. `pixel_format` is FFmpeg's name.
        other_formats: Formats of other files that differ from the first, as "codec profile pixel_format HxW".
        gop_min, gop_max: Number of frames of the shortest and the longest GOP. The last GOP of a file may be cut short, so it
            does not count as shortest unless it is the only one.
        b_frames: Whether the display order of any file differs from its decode order.
        open_gops: Whether any file has open GOPs, in which frames after a keyframe depend on frames before it.
        files, files_looked_at: Number of files, and of files whose index was read.
        bytes: Size of all files, in bytes.
        route: Decoder that a Loader starts with on this machine, with the default `num_threads`.
        route_change: Reason why a Loader would switch to torchcodec at a later file. Empty if no checked file requires it.
        remarks: Entries of `meta/info.json` that the first file contradicts.
        broken: Reasons why checked files cannot be read.
    """

    kind: Literal["video", "image"]
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
    remarks: tuple[str, ...] = ()
    broken: tuple[str, ...] = ()


@dataclass(frozen=True)
class DatasetReport:
    """A dataset, or its selected part.

    Attributes:
        uri, address: Address of the dataset as the caller wrote it, and as it was resolved.
        fingerprint: See `Dataset`. Empty if the tasks cannot be read.
        episode_frames: Number of frames of the shortest and the longest episode.
        data_files: Number of Parquet files of the selected episodes.
        bytes: Sizes in bytes: "data" and "videos" of the selected episodes and cameras, and "meta" of the whole dataset.
        missing: Files of the selected episodes and cameras that do not exist. In a source without listings (HTTP), at most 32
            files are checked.
        broken: Reasons why metadata cannot be read.
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
    missing: tuple[str, ...] = ()
    broken: tuple[str, ...] = ()

    @property
    def whole(self) -> bool:
        """Whether no checked file is missing or broken."""
        return not (self.missing or self.broken or any(camera.broken for camera in self.cameras.values()))

    def as_dict(self) -> dict[str, Any]:
        """Return the report as dicts and lists for JSON."""
        return dataclasses.asdict(self)


def describe(dataset: Dataset, *, look_at: int = 32) -> DatasetReport:
    """Describe a dataset from its metadata and the indices of its video files.

    Args:
        dataset: Dataset, or a selected part of one.
        look_at: Maximum number of video files per camera whose index is read. They are evenly spread over all files. Default:
            32.

    Returns:
        Counts, features and tasks, and for each camera its video format and the decoder that this machine uses.

    Raises:
        ValueError: If `look_at` is less than 1.
        DatasetError: If a path in the metadata leads out of the dataset.
        StorageError: If the source cannot be reached.
    """
    positive("look_at", look_at)
    info = read_json(dataset.store, INFO)
    missing, _ = missing_files(dataset)
    tasks: dict[int, str] = {}
    fingerprint, broken = "", []
    try:
        tasks, fingerprint = dict(sorted(dataset.tasks.items())), dataset.fingerprint
    except DatasetError as error:
        broken.append(str(error))
    cameras = {key: _camera(dataset, key, look_at) for key in dataset.cameras}
    data_files = used(dataset, dataset.table.data)
    return DatasetReport(
        uri=dataset.uri,
        address=dataset.store.address,
        fingerprint=fingerprint,
        codebase_version=str(info["codebase_version"]),
        robot_type=None if info.get("robot_type") is None else str(info["robot_type"]),
        fps=dataset.fps,
        episodes=dataset.num_episodes,
        frames=dataset.num_frames,
        duration_s=dataset.num_frames / dataset.fps,
        episode_frames=(int(dataset.lengths.min()), int(dataset.lengths.max())),
        data_files=len(data_files),
        tasks=tasks,
        features={
            key: FeatureReport(feature.dtype, feature.shape, feature.get("names")) for key, feature in dataset.features.items()
        },
        cameras=cameras,
        bytes={
            "data": _bytes(dataset.data_store, data_files),
            "videos": sum(camera.bytes for camera in cameras.values()),
            "meta": _bytes(dataset.store, dataset.store.files("meta")),
        },
        missing=tuple(missing),
        broken=tuple(broken),
    )


def missing_files(dataset: Dataset, deep: bool = False) -> tuple[list[str], int]:
    """Return which Parquet and video files of the selected episodes and cameras do not exist, and the number of checked files.

    A source with listings needs one listing per folder. Without listings (HTTP), each file needs a request, so at most 32
    files are checked, evenly spread over all.

    Args:
        dataset: Dataset, or a selected part of one.
        deep: Whether to check all files of a source without listings. Default: False.

    Raises:
        DatasetError: If a path leads out of the dataset.
        StorageError: If the source cannot be reached.
    """
    paths = [path for files in (dataset.table.data, *dataset.table.video.values()) for path in used(dataset, files)]
    store = dataset.data_store
    if store.remote and store.listings:
        existing = {name for folder in {path.partition("/")[0] for path in paths} for name in store.files(folder)}
        return [path for path in paths if path not in existing], len(paths)
    if store.remote and not deep:
        paths = paths[:: -(-len(paths) // LOOK_AT)]
    with ThreadPoolExecutor(_AT_A_TIME) as pool:
        return [path for path, exists in zip(paths, pool.map(store.exists, paths), strict=True) if not exists], len(paths)


def used(dataset: Dataset, files: Files) -> list[str]:
    """Return the paths of the files of the selected episodes, in the order of the episodes and each once."""
    return [files.paths[i] for i in dict.fromkeys(files.index[dataset.rows].tolist())]


def _camera(dataset: Dataset, key: str, look_at: int) -> CameraReport:
    if key not in dataset.videos:
        return CameraReport("image", *dataset.features[key].frame_size, IMAGES)
    paths = used(dataset, dataset.table.video[key])
    with ThreadPoolExecutor(_AT_A_TIME) as pool:
        read = list(pool.map(lambda number: _index(dataset, paths[number]), spread(len(paths), look_at)))
    tables = [each for each in read if isinstance(each, VideoIndex)]
    broken = tuple(str(each) for each in read if isinstance(each, DaliStreamError))
    size = _bytes(dataset.data_store, paths)
    if not tables:
        route = Route("torchcodec", "none of its checked files can be read")
        return CameraReport("video", *dataset.features[key].frame_size, route, files=len(paths), bytes=size, broken=broken)
    return dataclasses.replace(
        describe_video(tables, dataset.data_store, gpu_index("auto"), dataset.features[key].is_depth),
        files=len(paths),
        bytes=size,
        remarks=contradictions(dataset, key, tables[0]),
        broken=broken,
    )


def _index(dataset: Dataset, path: str) -> VideoIndex | DaliStreamError:
    try:
        return read_index(dataset.data_store, path)
    except (DatasetError, DecodeError) as error:
        return error


_CODECS = {
    "avc": "h264", "avc1": "h264", "libx264": "h264", "h265": "hevc", "hev1": "hevc", "hvc1": "hevc", "libx265": "hevc",
    "av01": "av1", "libsvtav1": "av1", "libaom-av1": "av1", "vp09": "vp9", "libvpx-vp9": "vp9", "mp4v": "mpeg4",
}  # fmt: skip


def contradictions(dataset: Dataset, key: str, table: VideoIndex) -> tuple[str, ...]:
    """Return the entries of `meta/info.json` about a camera's codec, frame size and fps that contradict a file."""
    video, feature = table.format(), dataset.features[key]
    encoding = feature.encoding[1]
    codec = str(encoding.get("video.codec", video.codec)).lower()
    remarks = []
    if _CODECS.get(codec, codec) != video.codec:
        remarks.append(f"video.codec {codec}, and the file has {video.codec}")
    size = (encoding.get("video.height", video.height), encoding.get("video.width", video.width))
    for name, stated in (("shape", dataset.features[key].frame_size), ("video.height and video.width", size)):
        if stated != (video.height, video.width):
            remarks.append(f"{name} {stated[0]}×{stated[1]}, and the file has {video.height}×{video.width}")
    fps = table.timescale / float(np.median(np.diff(table.shown_at()))) if len(table) > 1 else dataset.fps
    for name, rate in (("fps", dataset.fps), ("video.fps", encoding.get("video.fps", fps))):
        if not isinstance(rate, (int, float)) or abs(rate - fps) > _SAME_FPS * fps:
            remarks.append(f"{name} {rate}, and the file has {fps:.4g}")
    where = dataset.data_store.where(table.path)
    return tuple(f"{where}: meta/info.json has {each}" for each in remarks)


def describe_video(tables: list[VideoIndex], store: Store, gpu: int | None, is_depth: bool = False) -> CameraReport:
    """Describe the video files of a camera, without their number and size.

    Args:
        tables: Indices of one or more files.
        store: Storage of the files.
        gpu: Index of the CUDA device for which the route is chosen. None for the CPU.
        is_depth: Whether the camera records depth. Default: False.

    Returns:
        The report. Its `files` and `bytes` are 0.

    Raises:
        DecodeError: If a sample description is broken.
    """
    formats = [table.format(number) for table in tables for number in range(len(table.configs))]
    first = formats[0]
    route = DEPTH if is_depth else choose("auto", gpu, cpu.cores(), first, tables[0], store)
    # The end of a file cuts its last GOP short, so this GOP says nothing about the distance of keyframes.
    shortest = [int(table.gop_lengths[: max(len(table.keyframes) - 1, 1)].min()) for table in tables]
    formats_of = ((table, table.format(number)) for table in tables for number in range(len(table.configs)))
    reasons = ((table.path, refusal_of_torchcodec(gpu, video, table)) for table, video in formats_of)
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
        gop_max=max(table.longest_gop for table in tables),
        b_frames=any(table.reordered for table in tables),
        open_gops=any(table.open_gops for table in tables),
        files_looked_at=len(tables),
        route_change=next((f"{path}: {reason}" for path, reason in reasons if reason), "")
        if route.decoder not in ("torchcodec", "pyav")
        else "",
    )


def _bytes(store: Store, paths: list[str]) -> int:
    """Return the size of the files that exist."""
    with ThreadPoolExecutor(_AT_A_TIME) as pool:
        return sum(pool.map(lambda path: store.size(path) if store.exists(path) else 0, paths))


def _profile(video: VideoFormat) -> str | None:
    return None if video.profile is None else _PROFILES.get(video.codec, {}).get(video.profile, str(video.profile))


def _name(video: VideoFormat) -> str:
    parts = (video.codec, _profile(video), video.pixel_format, f"{video.height}x{video.width}")
    return " ".join(filter(None, parts))
