"""The plan assigns episodes to output files. It is stored in OUT before any output file is written. See `state`.

A plan is JSON: the header, and one task per output file:

    {"path": path of the output file,
     "episodes": [{"old": index in the source, "new": index, "length": rows, "data": Parquet file, "place": first row in it,
                   "first": first `index`,
                   "video": MP4 file, "start": seconds in it}]                   (video)
     "rows_per_group": rows of a row group,                                      (rows)
     "camera": key,                                                              (video)
     "files": {MP4 file: [[index, start, rows, end in seconds or null] of each episode in it, whether it is in the task]}}
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, NamedTuple

import numpy as np

from dali_stream.checks.arrays import Int64
from dali_stream.dataset import Dataset
from dali_stream.errors import DaliStreamError, DatasetError
from dali_stream.lerobot import v3
from dali_stream.lerobot.episode_table import Files
from dali_stream.lerobot.features import Feature
from dali_stream.lerobot.info import FRAME_INDEX, INFO
from dali_stream.lerobot.json_files import read_json
from dali_stream.mp4.counting import TOLERANCE
from dali_stream.mp4.index import read_index
from dali_stream.storage.store import checked
from dali_stream.system.cpu import reading_threads
from dali_stream.tools.preparation import packets, rows
from dali_stream.tools.preparation.encoders import CODECS, encoder
from dali_stream.tools.preparation.options import Options
from dali_stream.tools.preparation.place import Json, content_hash
from dali_stream.tools.work import grouped, in_threads

VERSION = 4  # must be increased when the output for the same dataset and options changes
_log = logging.getLogger("dali_stream")
DATA_MB, VIDEO_MB = 100, 200  # default sizes of files, as in LeRobot


@dataclass
class Plan:
    """Plan of a run.

    Attributes:
        header: Values that all tasks share, and that must be the same when a run continues. It contains no credentials.
        tasks: Tasks, one per output file.
    """

    header: Json
    tasks: list[Json]


class FileProperties(NamedTuple):
    """Properties of a source file, which the plan needs.

    Attributes:
        kind: Digest of the properties that all sources of a new file must share.
        frame_bytes: Mean size of an encoded row or frame, in bytes.
    """

    kind: str
    frame_bytes: float


def header(dataset: Dataset, options: Options, every_camera: bool) -> Json:
    """Return the header of a plan.

    Args:
        dataset: Source.
        options: Options of the run.
        every_camera: Whether the caller selected no cameras. Depth maps, which a `Dataset` does not read, are then copied too.

    Raises:
        ValueError: If an option is not possible for the dataset.
        DatasetError: If the metadata are broken.
    """
    info = read_json(dataset.store, INFO)
    features = {
        key: feature
        for key, feature in info["features"].items()
        if (every_camera or feature.get("dtype") not in ("video", "image") or key in dataset.cameras)
        and key not in dataset.absent
    }
    features.setdefault(FRAME_INDEX, dict(dataset.features[FRAME_INDEX]))
    cameras = {key: spec for key, feature in features.items() if (spec := _camera(key, Feature(feature), options)) is not None}
    _check_apart(cameras)
    in_rows = {key: feature for key, feature in features.items() if key not in cameras and feature.get("dtype") != "video"}
    regular = dataset.clock == "frame_index" or dataset.tolerance_s > TOLERANCE / dataset.fps
    size = info.get("chunks_size")
    return {
        "version": VERSION,
        "dataset": _identity(dataset, info),
        "options": options.as_dict(),
        "cameras": cameras,
        "columns": {key: (feature.get("dtype"), _list_depth(feature.get("shape"))) for key, feature in in_rows.items()},
        "features": features,
        "is_v2": dataset.info.is_v2,
        "fps": dataset.fps,
        "clock": dataset.clock,
        "tolerance_s": dataset.tolerance_s,
        "regular": regular,
        "chunks_size": size if type(size) is int and 0 < size < 1000 else 1000,  # numbers of files have three digits
    }


def _list_depth(shape: Any) -> int:
    """Return the number of nested lists of a value. A value of shape (1,) is stored as a number, as in LeRobot."""
    return len(shape) if isinstance(shape, list) and shape != [1] else 0


def encoded_cameras(head: Json) -> list[str]:
    """Return the keys of the cameras that are encoded."""
    return [key for key, spec in head["cameras"].items() if spec["mode"] != "copy"]


def _camera(key: str, feature: Feature, options: Options) -> Json | None:
    """Return how the video of a camera is written, or None if the new dataset has no video of it.

    The result has the entry "mode": "copy", "encode", or "images" for images in rows that become a video. For the last two, it
    also has the "size", "gop" and "encoder".
    """
    if feature.is_image and not options.images_to_video:
        if options.size is not None and not feature.is_depth:  # depth is copied unchanged, as video and as images
            raise ValueError(f"size must be None for {key!r}, whose frames are images in rows. Give --images-to-video too")
        return None
    if not feature.is_video and not feature.is_image:
        return None
    if feature.is_image and feature.is_depth:
        raise ValueError(f"images_to_video must be False for {key!r}, a depth camera. Leave it out with --cameras")
    if feature.is_image and feature.channels == 4:
        raise ValueError(
            f"images_to_video must be False for {key!r}, whose images are transparent. Leave it out with --cameras"
        )
    if feature.is_video and (feature.is_depth or feature.is_unmarked_depth or not options.encodes):
        return {"mode": "copy"}
    recorded = feature.encoding[1]
    size = options.size or feature.frame_size
    codec = options.codec or ("h264" if feature.is_image else recorded.get("video.codec", ""))
    if codec not in CODECS:
        raise ValueError(f"codec of {key!r} must be one of {', '.join(CODECS)}, got {codec!r}. Give one with --codec")
    gop = options.gop or 2
    chosen = encoder(codec, gop, options.crf, nvenc=options.encoder == "nvenc", size=size)
    requested = {"video.codec": codec, "video.g": gop, "video.crf": chosen.quality, "video.encoder": chosen.name}
    if feature.is_video and size == feature.frame_size and recorded | requested == recorded:
        return {"mode": "copy"}
    mode = "images" if feature.is_image else "encode"
    return {"mode": mode, "size": list(size), "gop": gop, "encoder": dataclasses.asdict(chosen)}


def _identity(dataset: Dataset, info: Json) -> str:
    table = dataset.table
    files = [[camera, own.paths, own.index.tolist(), table.start[camera].tolist()] for camera, own in table.video.items()]
    return content_hash(json.dumps([dataset.fingerprint, dataset.cameras, info, files], sort_keys=True).encode())


def _check_apart(keys: Collection[str]) -> None:
    """Check that the files of each camera have separate paths inside OUT. Raises DatasetError if they do not."""
    rename = "Nothing was written, so rename it in meta/info.json and meta/episodes"
    places: dict[PurePosixPath, str] = {}
    for key in sorted(keys, key=len):
        try:
            place = PurePosixPath(checked(key))
        except DatasetError:
            raise DatasetError(f"{key[:80]!r} is a path outside the output folder. {rename}") from None
        for other in {place, *place.parents} & places.keys():
            raise DatasetError(f"{key[:80]!r} would be written to the same path as {places[other][:80]!r}. {rename}")
        places[place] = key


def path_of(template: str, number: int, head: Json, key: str = "") -> str:
    """Return the path of an output file.

    Args:
        template: Template of the path, such as `v3.VIDEO_PATH`.
        number: Number of the file, from 0.
        head: Header of the plan.
        key: Key of the camera. Default: "", for rows.
    """
    chunk, file = divmod(number, head["chunks_size"])
    return template.format(chunk_index=chunk, file_index=file, video_key=key)


class FilePlanner:
    """Assigns episodes to output files. The constructor reads the index or footer of all source files that are copied.

    A file that cannot be read gets a kind of its own, so that only the task that copies it fails.

    Args:
        dataset: Source.
        head: Header of the plan.
    """

    def __init__(self, dataset: Dataset, head: Json) -> None:
        self._head, self._store = head, dataset.data_store
        self._table = dataset.read_table([key for key, spec in head["cameras"].items() if spec["mode"] != "images"])
        # Episodes keep their order in the files of the source, so that tasks read these files sequentially.
        order = np.lexsort((self._table.index, self._table.first_row))
        self._order: Int64 = order[np.isin(order, dataset.rows)]
        self._table.check_videos(dataset.rows, dataset.cameras, dataset.store)
        # Image columns of cameras that were not selected are listed, too.
        self._in_rows = {key for key, feature in dataset.info.features.items() if not feature.is_video} | head["columns"].keys()
        self._unlisted = set[str]()
        self._surveyed = {"": self._look(self._table.data, self._look_at_rows)}
        for name in sorted(self._unlisted):
            _log.warning(
                "%s has no feature %.80r for this column of the rows, so LeRobot does not read the dataset. The copy "
                "lacks the column. To keep it, add the feature first",
                dataset.store.where(INFO), name,
            )  # fmt: skip
        for camera, spec in head["cameras"].items():
            if spec["mode"] == "copy":
                self._surveyed[camera] = self._look(self._table.video[camera], self._look_at_video)

    def _look(self, files: Files, look: Callable[[str], FileProperties]) -> dict[str, FileProperties]:
        used = set(files.index[self._order].tolist())
        jobs = {path: functools.partial(look, path) for number, path in enumerate(files.paths) if number in used}
        with contextlib.closing(in_threads(jobs, reading_threads(self._store.remote), self._store.close)) as reads:
            return {path: source.result() for path, source in reads}

    def _look_at_rows(self, path: str) -> FileProperties:
        try:
            footer = rows.read_footer(self._store, path)
            rows.check_columns(self._store, self._head["features"], footer)
        except DatasetError:
            return FileProperties(path, 1)
        self._unlisted |= set(footer.schema.names) - self._in_rows
        schema = rows.new_schema(footer.schema, self._head["columns"], self._head["is_v2"])
        return FileProperties(content_hash(schema.serialize().to_pybytes() + footer.codec.encode()), footer.row_bytes)

    def _look_at_video(self, path: str) -> FileProperties:
        try:
            index = read_index(self._store, path)
            return FileProperties(packets.kind(index), float(index.size().mean()))
        except DaliStreamError:
            return FileProperties(path, 1)

    def tasks(self, frame_bytes: Mapping[str, float], dropped: Mapping[int, str]) -> list[Json]:
        """Return the tasks.

        Args:
            frame_bytes: {camera: size of a frame in bytes} of the cameras that are encoded.
            dropped: {index in the source: reason} of the episodes to leave out.
        """
        table = self._table
        order = self._order[~np.isin(table.index[self._order], list(dropped))]
        length = table.length[order]
        # This assumes that a file has its episodes in order and no other rows. Readers check it. See `rows.EpisodeRows`.
        lowest = np.full(len(table.data.paths), np.iinfo(np.int64).max)
        np.minimum.at(lowest, table.data.index, table.first_row)
        new = np.searchsorted(np.sort(order), order)  # LeRobot counts episodes from 0
        columns: dict[str, list[Any]] = {
            "old": table.index[order].tolist(),
            "new": new.tolist(),
            "length": length.tolist(),
            "data": [table.data.paths[number] for number in table.data.index[order]],
            "place": (table.first_row - lowest[table.data.index])[order].tolist(),
            "first": (np.cumsum(length) - length).tolist(),
        }
        episodes = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        tasks = list(self._files(episodes, 0))
        for camera in self._head["cameras"]:
            videos = [each | self._video(camera, e) for each, e in zip(episodes, order.tolist(), strict=True)]
            tasks += [each | {"camera": camera} for each in self._files(videos, frame_bytes.get(camera, 1), camera)]
        return tasks

    def trials(self) -> list[Json]:
        """Return the task with the first episode, for each camera that is encoded. See `video.trial`."""
        tasks = {task.get("camera"): task for task in reversed(self.tasks({}, {}))}
        return [tasks[camera] for camera in encoded_cameras(self._head)]

    def _video(self, camera: str, episode: int) -> Json:
        if camera not in self._table.video:  # the frames are images in rows
            return {}
        files = self._table.video[camera]
        return {"video": files.paths[files.index[episode]], "start": float(self._table.start[camera][episode])}

    def _in_file(self, camera: str, path: str) -> list[list[Any]]:
        """Return the columns of all episodes of an MP4 file, see the top of the module."""
        number, start, length, end = self._table.in_file(camera, self._table.video[camera].number(path))
        ends = [stop if np.isfinite(stop) else None for stop in end.tolist()]
        return [list(each) for each in zip(number.tolist(), start.tolist(), length.tolist(), ends, strict=True)]

    def _files(self, episodes: list[Json], frame_bytes: float, camera: str = "") -> Iterator[Json]:
        """Yield tasks for these episodes. The sources of a file have the same kind, and files have about the same size.

        Args:
            episodes: Episodes in the order in which they are written.
            frame_bytes: Size of an encoded frame in bytes. It is not used for sources that are copied.
            camera: Key of the camera. Default: "", for rows.
        """
        surveyed, unknown = self._surveyed.get(camera, {}), FileProperties("", frame_bytes)
        template, default_mb, place = (v3.VIDEO_PATH, VIDEO_MB, "video") if camera else (v3.DATA_PATH, DATA_MB, "data")

        def source(episode: Json) -> FileProperties:
            return surveyed.get(episode.get(place, ""), unknown)

        def nbytes(episode: Json) -> float:
            return float(episode["length"] * source(episode).frame_bytes)

        most = (self._head["options"].get("file_mb") or default_mb) * (1 << 20)
        for number, part in enumerate(grouped(episodes, most, nbytes, lambda episode: source(episode).kind)):
            task: Json = {"path": path_of(template, number, self._head, camera), "episodes": part}
            if camera in self._table.video:
                task["files"] = {path: self._in_file(camera, path) for path in dict.fromkeys(each["video"] for each in part)}
            if not camera:
                size, length = sum(map(nbytes, part)), sum(episode["length"] for episode in part)
                default = max(1, int(rows.ROW_GROUP / max(size / length, 1)))
                task["rows_per_group"] = self._head["options"].get("rows_per_group") or default
            yield task
