"""`transcode`: copies rows, encodes and checks videos, then writes metadata."""

from __future__ import annotations

import functools
import os
from typing import Any

import numpy as np
import numpy.typing as npt

from dali_stream.arguments import positive
from dali_stream.dataset import Dataset
from dali_stream.errors import DaliStreamError, DatasetError
from dali_stream.lerobot import metadata
from dali_stream.lerobot.features import Feature
from dali_stream.process import cores
from dali_stream.storage import LocalStore
from dali_stream.tools.output.checks import check_apart, check_outside, identity, read_source
from dali_stream.tools.output.copy import AT_THE_ROOT, check_same, copy, episode_files, small_files
from dali_stream.tools.output.folder import AGAIN, Folder
from dali_stream.tools.output.work import Progress, Work
from dali_stream.tools.transcode.encoders import Codec, Encoder, EncoderChoice
from dali_stream.tools.transcode.ffmpeg import Program, choose
from dali_stream.tools.transcode.meta import renewed, write_meta
from dali_stream.tools.transcode.report import Report
from dali_stream.tools.transcode.report import camera as of_camera
from dali_stream.tools.transcode.video import Copies, Share, VideoFile, Writer

STAGE = ".transcode"
CHANGED = "has changed since it was written"
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
) -> Report:
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
    job.folder = Folder(out, STAGE, job.identity)
    try:
        return job.run()
    finally:
        job.folder.close()


def _files_at_a_time(encoder: Encoder) -> int:
    """NVENC needs several decoding cores; libvpx uses about two cores, the other encoders four or more."""
    return 4 if encoder.nvenc else max(1, cores() // (2 if encoder.codec == "vp9" else 4))


class Job:
    """One run.

    Attributes:
        info: info.json of the source.
        table: the source's episodes, with all cameras.
        store: of the source's rows and videos.
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
        self.info, videos, self.table = read_source(dataset)
        self.dataset, self.program, self.encoder, self.gop = dataset, program, encoder, int(options["gop"])
        self.store = dataset.data_store.session()
        self.reading = Work(progress, self.store.close)
        self.encoding = Work(progress, self._interrupt, jobs)
        self.todo = [(camera, n) for camera in videos for n in range(len(self.table.video[camera].paths))]
        files = [("the rows", path) for path in self.table.data.paths] + [(c, self.path(c, n)) for c, n in self.todo]
        check_apart([*((name, name) for name in ("meta", STAGE, *AT_THE_ROOT)), *files])
        self.timestamps: dict[int, npt.NDArray[np.float32]] = {}
        self.identity = {"dataset": identity(dataset, self.info, self.table), **options, "version of dali_stream": _LAYOUT}

    def run(self) -> Report:
        """All of it."""
        videos = [self.path(*item) for item in self.todo]
        size = self.reading.each("sizes", [*self.table.data.paths, *videos], self.store.size)
        self.copy_rows(size[: -len(videos) or None])
        self.timestamps = self._read_times()
        notes = self.write_videos(size[len(self.table.data.paths) :])
        cameras = {camera: of_camera([notes[item] for item in self.todo if item[0] == camera]) for camera in self.table.video}
        encoded = [camera for camera, found in cameras.items() if found.encoder]
        self.info = renewed(self.info, encoded, self.encoder, self.gop)
        write_meta(self.folder, self.dataset, self.info)
        self.verify()
        self.folder.finish()
        return Report(len(self.table.index), int(self.table.length.sum()), self.encoder.codec, self.gop, cameras)

    def path(self, camera: str, number: int) -> str:
        """The path of a video file, in the source and in the new dataset."""
        return self.table.video[camera].paths[number]

    def _interrupt(self) -> None:
        self.program.kill()
        self.store.close()

    # ---- rows

    def copy_rows(self, sizes: list[int]) -> None:
        """Copies the Parquet files, of these sizes."""
        items = list(zip(self.table.data.paths, sizes, strict=True))
        self.reading.each("rows", items, lambda item: self._copy(*item), sum(sizes))

    def _copy(self, path: str, size: int) -> None:
        if self.folder.finished(path) is None:
            copy(self.store, path, self.folder, path, {}, self.reading.advance)
        else:
            self.reading.advance(size)

    def _read_times(self) -> dict[int, npt.NDArray[np.float32]]:
        """Per episode (position in the table), the timestamps of its rows, which locate its frames in the videos."""
        store, table, found = Copies(str(self.folder.root), self.store), self.table, {}
        names = ["episode_index", "frame_index", "timestamp"]
        for number, path in enumerate(table.data.paths):
            try:
                rows = metadata.read_parquet(store, path, names)
                index, frame, times = (rows[name].to_numpy() for name in names)
            except (DatasetError, KeyError) as error:
                self.folder.check(path, CHANGED)
                raise DatasetError(
                    str(error)
                    if isinstance(error, DatasetError)
                    else f"{store.where(path)}: has no column {error}; copy the dataset again"
                ) from error
            order = np.lexsort((frame, index))
            index, times = index[order], times[order].astype(np.float32)
            for place in table.data.rows(number).tolist():
                first, last = np.searchsorted(index, [table.index[place], table.index[place] + 1])
                if last - first != table.length[place]:
                    raise DatasetError(
                        f"{self.store.where(path)}: episode {table.index[place]}: the metadata has {table.length[place]} rows, "
                        f"and the file {last - first}; copy the dataset again"
                    )
                found[place] = times[first:last]
        return found

    # ---- video

    def write_videos(self, sizes: list[int]) -> dict[tuple[str, int], dict[str, Any]]:
        """Writes and checks the MP4 files, of these source sizes; returns their notes."""
        local = isinstance(self.store, LocalStore)
        weights = [size * (1 if local else 2) for size in sizes]  # fetching counts too
        items = list(zip(self.todo, weights, strict=True))
        notes = self.encoding.each("video", items, lambda item: self._write_video(*item[0], item[1]), sum(weights))
        return dict(zip(self.todo, notes, strict=True))

    def _write_video(self, camera: str, number: int, weight: int) -> dict[str, Any]:
        path, share = self.path(camera, number), Share(self.encoding.advance, weight)
        note: dict[str, Any] | None = self.folder.finished(path)
        if note is None:
            episodes = {
                int(self.table.index[place]): (self.table.interval(camera, place), self.timestamps[place])
                for place in self.table.video[camera].rows(number).tolist()
            }
            file = VideoFile(path, camera, episodes, Feature(self.info["features"][camera]).is_depth)
            writer = Writer(self.program, self.encoder, self.gop, self.dataset.fps, self.store, self.folder)
            note = writer.write(file, share)
        share.finish()
        return note

    # ---- reading back

    def verify(self) -> None:
        """Compares every byte with the checked files, and the metadata with the source's."""
        out, source = Dataset(self.folder.stage, data_files_root=self.folder.root), self.dataset
        try:
            check_same(source.store, out.store, [*small_files(source.store), *episode_files(source.store)])
            counts = out.num_episodes, out.num_frames, out.cameras
            if metadata.read_json(out.store, metadata.INFO) != self.info or counts != (
                source.num_episodes,
                source.num_frames,
                source.cameras,
            ):
                raise DaliStreamError(f"{out.store.where(metadata.INFO)}: has changed since it was written; {AGAIN}")
            paths = [*self.table.data.paths, *(self.path(*item) for item in self.todo)]
            total = sum(map(out.data_store.size, paths))
            check = functools.partial(self.folder.check, how=CHANGED, advance=self.reading.advance)
            self.reading.each("verifying", paths, check, total)
        finally:
            out.close()
