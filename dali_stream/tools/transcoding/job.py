"""`transcode`: copies rows, encodes and checks videos, then writes metadata."""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Iterable
from copy import deepcopy
from typing import Any

import numpy as np
import numpy.typing as npt

from dali_stream.arguments import positive
from dali_stream.dataset import Dataset
from dali_stream.errors import DaliStreamError, DatasetError
from dali_stream.lerobot import metadata
from dali_stream.lerobot.features import ENCODING, Feature
from dali_stream.lerobot.rows import RowReader
from dali_stream.process import cores
from dali_stream.storage import LocalStore
from dali_stream.tools.output.checks import check_apart, check_outside, identity, read_source
from dali_stream.tools.output.copy import AT_THE_ROOT, check_same, copy, episode_files, small_files, write_meta
from dali_stream.tools.output.folder import AGAIN, Folder
from dali_stream.tools.output.work import Progress, Work
from dali_stream.tools.transcoding.encoders import Codec, Encoder, EncoderChoice
from dali_stream.tools.transcoding.ffmpeg import Program, choose
from dali_stream.tools.transcoding.report import TranscodeReport
from dali_stream.tools.transcoding.report import camera as of_camera
from dali_stream.tools.transcoding.video import Copies, Share, VideoFile, Writer

STAGE = ".transcode"
CHANGED = "has changed since it was written"
# Encoding entries of newer LeRobot versions, in addition to codec, pix_fmt, g, crf and preset.
_UNTRUE = ("video.fast_decode", "video.video_backend", "video.extra_options")
_LAYOUT = 2  # increased when the same dataset and options are written differently


def transcode(
    dataset: Dataset,
    out: str | os.PathLike[str],
    *,
    codec: Codec = "hevc",
    gop: int = 2,
    encoder: EncoderChoice = "auto",
    crf: int | None = None,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> TranscodeReport:
    """Re-encodes a dataset's videos into a local folder, and verifies it.

    Files, episodes and times stay the same. Frames become 8 bit 4:2:0 in BT.601, which DALI converts correctly on a GPU. Files
    that already meet the request, depth maps and rows are copied byte for byte. An interrupted run resumes when it is started
    again with the same arguments. The folder becomes a dataset only after verification.

    Args:
        dataset: a whole dataset, local or remote. Files of a remote one are fetched one by one, and removed when done.
        out: a folder that is empty, does not exist, or holds the unfinished copy of an earlier run.
        codec: "hevc", "h264", "av1" or "vp9".
        gop: distance of keyframes in frames; for AV1 on the CPU at least 2.
        encoder: "nvenc", "cpu", or "auto" for NVENC where it works.
        crf: quality on the encoder's scale, lower is better; None: a default per encoder, close to the source.
        jobs: files at a time; None: enough to keep the encoder busy.
        progress: called as (stage, done, total).

    Returns:
        What changed: per camera bytes and codec before and after, and PSNR.

    Raises:
        ValueError: an argument is invalid, `out` holds something else or overlaps the source, or only a part of the dataset
            is selected.
        DatasetError, DecodeError: the source is broken, or has sound. The message names file and camera.
        StorageError: the source cannot be read.
        DaliStreamError: ffmpeg or an encoder is missing, or verification failed. The message names file, camera, episode and
            frame.
    """
    check_outside(dataset, out)
    program = Program()
    sizes = sorted({dataset.picture_size(camera) for camera in dataset.videos})
    chosen = choose(program, codec, gop, crf, encoder, sizes)
    at_a_time = positive("jobs", jobs) if jobs is not None else _files_at_a_time(chosen)
    options = {"codec": codec, "gop": gop, "encoder": encoder, "crf": crf}
    job = Job(dataset, program, chosen, options, at_a_time, progress)
    with contextlib.closing(Folder(out, STAGE, job.identity)) as job.folder:
        return job.run()


def _files_at_a_time(encoder: Encoder) -> int:
    """NVENC needs several decoding cores; libvpx uses about two cores, the other encoders four or more."""
    return 4 if encoder.nvenc else max(1, cores() // (2 if encoder.codec == "vp9" else 4))


class Job:
    """One run.

    Attributes:
        info: info.json of the source.
        table: the source's episodes, with all cameras.
        store: of the source's rows and videos.
        videos: (camera, path) of each video file, in the source and in the new dataset.
        identity: must be the same in a run that is resumed.
    """

    folder: Folder

    def __init__(
        self,
        dataset: Dataset,
        program: Program,
        encoder: Encoder,
        options: dict[str, Any],
        jobs: int,
        progress: Progress | None,
    ) -> None:
        self.info, _, self.table = read_source(dataset)
        self.dataset, self.program, self.encoder, self.gop = dataset, program, encoder, int(options["gop"])
        self.store = dataset.data_store.session()
        self.reading = Work(progress, self.store.close)
        self.encoding = Work(progress, self._interrupt, jobs)
        self.videos = [(camera, path) for camera, files in self.table.video.items() for path in files.paths]
        own = [(name, name) for name in ("meta", STAGE, *AT_THE_ROOT)]
        check_apart([*own, *(("the rows", path) for path in self.table.data.paths), *self.videos])
        self.identity = {"dataset": identity(dataset, self.info, self.table), **options, "version of dali_stream": _LAYOUT}

    def _interrupt(self) -> None:
        self.program.kill()
        self.store.close()

    def run(self) -> TranscodeReport:
        """All of it."""
        table, rows = self.table, self.table.data.paths
        paths = [*rows, *(path for _, path in self.videos)]
        sizes = dict(zip(paths, self.reading.each("sizes", paths, self.store.size), strict=True))
        self.reading.each("rows", rows, lambda path: self._copy(path, sizes[path]), sum(sizes[path] for path in rows))
        timestamps = self._read_times()
        fetched = 1 if isinstance(self.store, LocalStore) else 2  # fetching counts too
        files = [
            (self._video(camera, path, number, timestamps), sizes[path] * fetched)
            for camera, its in table.video.items()
            for number, path in enumerate(its.paths)
        ]
        writer = Writer(self.program, self.encoder, self.gop, self.dataset.fps, self.store, self.folder)
        total = sum(weight for _, weight in files)
        notes = self.encoding.each("video", files, lambda item: self._write(writer, *item), total)
        of = {camera: [note for (c, _), note in zip(self.videos, notes, strict=True) if c == camera] for camera in table.video}
        cameras = {camera: of_camera(own) for camera, own in of.items()}
        encoded = [camera for camera, found in cameras.items() if found.encoder]
        self.info = renewed(self.info, encoded, self.encoder, self.gop)
        source = self.dataset.store
        new = {metadata.INFO: json.dumps(self.info, indent=4, ensure_ascii=False).encode()}
        write_meta(self.dataset, self.folder, [*small_files(source), *episode_files(source)], new)
        self._verify(paths)
        self.folder.finish()
        return TranscodeReport(len(table.index), int(table.length.sum()), self.encoder.codec, self.gop, cameras)

    def _copy(self, path: str, size: int) -> None:
        """Copies a Parquet file of this size."""
        if self.folder.finished(path) is None:
            copy(self.store, path, self.folder, path, {}, self.reading.advance)
        else:
            self.reading.advance(size)

    def _read_times(self) -> dict[int, npt.NDArray[np.float32]]:
        """Per episode (position in the table), the timestamps of its rows, which locate its frames in the videos."""
        files, found = self.table.data, dict[int, npt.NDArray[np.float32]]()
        reader = RowReader(self.dataset, Copies(str(self.folder.root), self.store), keys={"frame_index", "timestamp"})
        for episode in range(len(self.table.index)):
            if episode not in found:
                try:
                    found |= {number: rows["timestamp"] for number, rows in reader.read(episode).items()}
                except DatasetError:
                    self.folder.check(files.paths[files.index[episode]], CHANGED)
                    raise
        return found

    def _video(self, camera: str, path: str, number: int, timestamps: dict[int, npt.NDArray[np.float32]]) -> VideoFile:
        """A camera's video file of this number."""
        table = self.table
        episodes = {
            int(table.index[place]): (table.interval(camera, place), timestamps[place])
            for place in table.video[camera].rows(number).tolist()
        }
        return VideoFile(path, camera, episodes, Feature(self.info["features"][camera]).is_depth)

    def _write(self, writer: Writer, file: VideoFile, weight: int) -> dict[str, Any]:
        """Writes and checks an MP4 file; returns its note."""
        share = Share(self.encoding.advance, weight)
        note: dict[str, Any] = self.folder.finished(file.path) or writer.write(file, share)
        share.finish()
        return note

    def _verify(self, paths: list[str]) -> None:
        """Reads the new dataset back: compares every byte with the checked files, and the metadata with the source's."""
        out, source = Dataset(self.folder.stage, data_files_root=self.folder.root), self.dataset
        with contextlib.closing(out):
            check_same(source.store, out.store, [*small_files(source.store), *episode_files(source.store)])
            counts = [(each.num_episodes, each.num_frames, each.cameras) for each in (out, source)]
            if metadata.read_json(out.store, metadata.INFO) != self.info or counts[0] != counts[1]:
                raise DaliStreamError(f"{out.store.where(metadata.INFO)}: has changed since it was written; {AGAIN}")
            check = functools.partial(self.folder.check, how=CHANGED, advance=self.reading.advance)
            self.reading.each("verifying", paths, check, sum(map(out.data_store.size, paths)))


def renewed(info: dict[str, Any], cameras: Iterable[str], encoder: Encoder, gop: int) -> dict[str, Any]:
    """info.json after encoding these cameras. Unknown keys stay.

    Encoding entries are changed or removed; only codec and pixel format are added.
    """
    info = deepcopy(info)
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
