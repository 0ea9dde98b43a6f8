"""Writing the new dataset: rows, then video, then metadata."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dali_stream.dataset import Dataset
from dali_stream.errors import DaliStreamError, DatasetError
from dali_stream.lerobot import metadata
from dali_stream.lerobot.dataset import CLOCKS
from dali_stream.lerobot.metadata import read_parquet
from dali_stream.lerobot.rows import RowReader
from dali_stream.mp4 import muxer
from dali_stream.mp4.index import Int64, VideoIndex, read_index
from dali_stream.mp4.timing import Interval
from dali_stream.storage import LocalStore
from dali_stream.tools.output.checks import check_apart, content_hash, identity, inside, read_source, shown
from dali_stream.tools.output.copy import read_samples, write_meta
from dali_stream.tools.output.folder import AGAIN, Folder
from dali_stream.tools.output.work import Progress, Work
from dali_stream.tools.rewriting import meta, rows, video
from dali_stream.tools.rewriting.meta import DATA_PATH, VIDEO_PATH, Layout
from dali_stream.tools.rewriting.report import Reads, RewriteReport, Side, side
from dali_stream.tools.rewriting.rows import DataFile, EpisodeRows, Parquet
from dali_stream.tools.rewriting.stores import Recorder, Window
from dali_stream.tools.rewriting.video import Source, VideoFile

_LAYOUT = 1  # increased when the same dataset and options are written differently
_TABLES = 16  # video indices kept in memory


class Job:
    """One run.

    Attributes:
        store: of the source's rows and videos.
        table: the source's episodes, with all cameras.
        videos: keys of the cameras with MP4s.
        layout: paths and columns of the new dataset; complete after `write`.
        identity: must be the same in a run that is resumed.
    """

    folder: Folder

    def __init__(
        self, dataset: Dataset, data_file_size: int, video_file_size: int, progress: Progress | None, regular: bool
    ) -> None:
        self.info, self.videos, self.table = read_source(dataset)
        self.dataset, self.store = dataset, dataset.data_store.session()
        self.work = Work(progress, self.store.close)
        self._sizes = data_file_size, video_file_size
        size = self.info.get("chunks_size")
        chunks_size = size if type(size) is int and 0 < size < 1000 else 1000  # three digits sort by name
        self.layout = Layout(chunks_size, dataset.fps, regular)
        check_apart((camera, self.layout.path(VIDEO_PATH, 0, inside(camera, camera))) for camera in self.videos)
        self.table_of = functools.lru_cache(_TABLES)(lambda path: read_index(self.store, path))
        self.order: Int64 = np.lexsort((self.table.index, self.table.first_row))
        self.timestamps: dict[int, npt.NDArray[np.float32]] = {}  # that locate frames in the new files
        self._source_times = self.timestamps  # and in the source's
        self.identity = {
            "dataset": identity(dataset, self.info, self.table),
            "data file size": data_file_size,
            "video file size": video_file_size,
            "regular timestamps": regular,
            "version of dali_stream": _LAYOUT,
        }

    def write(self) -> tuple[list[DataFile], dict[str, list[VideoFile]]]:
        """Writes all files, metadata last; returns those with rows, and those with video per camera."""
        data_files, self._row_reads = self._copy_rows()
        video_files, self._index_reads = self._copy_videos()
        self._describe(data_files, video_files)
        new = {metadata.INFO: json.dumps(meta.info(self.dataset) | self.layout.info, indent=4).encode()}
        written = meta.written_files(self.dataset, self.layout.regular)
        write_meta(self.dataset, self.folder, meta.copied_files(self.dataset, written), written | new)
        meta.write_episodes(self.folder, self.dataset, self.table, self.layout, self._sizes[0])
        return data_files, video_files

    def report(self, out: Side) -> RewriteReport:
        """The report, with the source beside `out`."""
        table, dataset = self.table, self.dataset
        paths = [path for camera in self.videos for path in table.video[camera].paths]
        nbytes = sum(map(dataset.store.size, dataset.store.files("meta")))
        nbytes += sum(map(self.store.size, [*table.data.paths, *paths]))
        files = len(table.data.paths), len(paths)
        before = side(dataset.store.address, files, nbytes, self._index_reads, self._row_reads)
        return RewriteReport(len(table.index), int(table.length.sum()), tuple(self.videos), before, out)

    # ---- rows

    def _copy_rows(self) -> tuple[list[DataFile], Reads]:
        """Writes the Parquet files; returns them, and the ranges that a Loader reads of the source's."""
        store, table = self.store, self.table
        sources = self.work.each("footers", table.data.paths, functools.partial(rows.read_footer, store))
        if self.dataset.is_v2:  # the pandas index in it says which rows a file has, so that no two schemas are equal
            sources = [replace(each, schema=rows.without_pandas(each.schema)) for each in sources]
        rows.check_columns(store, self.info["features"], self.videos, sources)
        files = rows.plan(table, sources, self.order, self._sizes[0], functools.partial(self.layout.path, DATA_PATH))
        copied = functools.partial(self._write_rows, dict(enumerate(sources)))
        reads = self.work.each("rows", files, copied, sum(file.nbytes for file in files))
        for file in files:
            times = self._read_back(file)
            parts = np.split(times, np.cumsum(table.length[file.episodes])[:-1])
            self.timestamps |= dict(zip(file.episodes, parts, strict=True))
        if self.layout.regular and self.dataset.clock == "timestamp":
            self._source_times = self._read_source_times()
        return files, set().union(*reads)

    @property
    def _new_clock(self) -> str:
        return "timestamp" if self.layout.regular else self.dataset.clock

    def _read_source_times(self) -> dict[int, npt.NDArray[np.float32]]:
        """Read the timestamps that the new files no longer have."""
        reader, times = RowReader(self.dataset, self.store, keys=set(CLOCKS)), dict[int, npt.NDArray[np.float32]]()
        for episode in range(len(self.table.index)):
            if episode not in times:
                times |= {number: columns["timestamp"] for number, columns in reader.read(episode).items()}
        return times

    def _read_back(self, file: DataFile) -> npt.NDArray[np.float32]:
        """Return the times of a written file, which locate its frames in the videos."""
        try:
            columns = read_parquet(LocalStore(str(self.folder.root)), file.path, list(CLOCKS))
            times = rows.times(columns, self._new_clock, self.dataset.fps)
        except DatasetError:
            times = np.empty(0, np.float32)
        if content_hash(times.tobytes()) != self.folder.finished(file.path)["times"]:
            self.folder.discard(file.path)
            raise DaliStreamError(
                f"{self.folder.root / file.path}: has changed since it was written. The file was removed; {AGAIN}"
            )
        return times

    def _write_rows(self, footers: dict[int, Parquet], file: DataFile) -> Reads:
        note = self.folder.finished(file.path)
        if note is None:
            note, times, seen, window = {}, list[bytes](), set[int](), Window(self.store)
            recorder = Recorder(window)
            whole, loader = EpisodeRows(window, self.table, footers, file.episodes), RowReader(self.dataset, recorder)

            def read(episode: int) -> pa.Table:
                """Read an episode with all columns, and also as a Loader does, whose reads are recorded."""
                found = whole.read(episode)
                if self.layout.regular:
                    found = rows.with_regular_timestamps(found, self.dataset.fps)
                times.append(rows.times(found, self._new_clock, self.dataset.fps).tobytes())
                if episode not in seen:
                    seen.update(loader.read(episode))
                self.work.advance(file.nbytes // len(file.episodes))
                return found

            with self.folder.writing(file.path, note) as out:
                digests = rows.write(out, file, read)
                note |= {"rows": {str(e): digest for e, digest in digests.items()}, "reads": sorted(recorder.reads)}
                note["times"] = content_hash(b"".join(times))
        else:
            self.work.advance(file.nbytes)
        return {(path, start, stop) for path, start, stop in note["reads"]}

    # ---- video

    def _copy_videos(self) -> tuple[dict[str, list[VideoFile]], Reads]:
        """Writes the MP4 files; returns them per camera, and the ranges that a Loader reads of the source's indices."""
        recorder = Recorder(self.store)
        todo = [(camera, n) for camera in self.videos for n in range(len(self.table.video[camera].paths))]
        found = self.work.each("indices", todo, lambda item: self._read_source(recorder, *item))
        sources = dict(zip(todo, found, strict=True))
        files = {camera: self._plan_videos(camera, sources) for camera in self.videos}
        every = [(camera, file) for camera in self.videos for file in files[camera]]
        total = sum(file.nbytes for _, file in every)
        self.work.each("video", every, lambda item: self._write_video(*item), total)
        return files, recorder.reads

    def shown(self, camera: str, episode: int, interval: Interval, table: VideoIndex) -> Int64:
        """Return the packets of an episode's rows in a file of the source, where it has this interval."""
        where = f"{self.store.where(table.path)}: {camera}, episode {self.table.index[episode]}"
        return shown(where, table, interval, self._source_times[episode], self.dataset.fps, self.dataset.tolerance_s)

    def shown_in_copy(self, camera: str, episode: int, interval: Interval, table: VideoIndex) -> Int64:
        """Return the same in a new file. A copy with regular timestamps must be readable with the default tolerance."""
        where = f"{self.folder.root / table.path}: {camera}, episode {self.table.index[episode]}"
        tolerance_s = None if self.layout.regular else self.dataset.tolerance_s
        return shown(where, table, interval, self.timestamps[episode], self.dataset.fps, tolerance_s)

    def _read_source(self, recorder: Recorder, camera: str, number: int) -> Source:
        files = self.table.video[camera]

        def of_rows(table: VideoIndex) -> dict[int, Int64]:
            return {e: self.shown(camera, e, self.table.interval(camera, e), table) for e in files.rows(number).tolist()}

        return video.read_source(recorder, files.paths[number], self.dataset.fps, of_rows)

    def _plan_videos(self, camera: str, sources: dict[tuple[str, int], Source]) -> list[VideoFile]:
        index = self.table.video[camera].index
        episodes = [(episode, sources[camera, int(index[episode])]) for episode in self.order.tolist()]
        return video.plan(episodes, self._sizes[1], lambda n: self.layout.path(VIDEO_PATH, n, camera))

    def _write_video(self, camera: str, file: VideoFile) -> None:
        if self.folder.finished(file.path) is not None:
            self.work.advance(file.nbytes)
            return
        note: dict[str, Any] = {}
        with self.folder.writing(file.path, note) as out:
            out.write(muxer.head(video.track(file, self.table_of)))
            marks = []
            for run in file.runs:
                found: list[bytes] = []
                for samples in read_samples(self.store, self.table_of(run.source.path), run.start, run.stop):
                    out.writelines(samples)
                    found += map(video.mark, samples)
                    self.work.advance(sum(map(len, samples)))
                marks.append(np.frombuffer(b"".join(found), np.uint8).reshape(-1, 16))
            note["video"] = {str(e): self.digest(camera, e, file.runs[n], marks[n]) for e, n in file.episodes.items()}

    def digest(self, camera: str, episode: int, run: video.Run, marks: npt.NDArray[np.uint8]) -> str:
        """Digest of an episode's packets in the source."""
        table = self.table_of(run.source.path)
        shown = self.shown(camera, episode, self.table.interval(camera, episode), table)
        return video.digest(table, shown, marks, run.start)

    # ---- metadata

    def _describe(self, data_files: list[DataFile], video_files: dict[str, list[VideoFile]]) -> None:
        """Completes the layout."""
        table, layout, count = self.table, self.layout, len(self.table.index)
        number, first = np.zeros(count, np.int64), np.zeros(count, np.int64)
        for n, file in enumerate(data_files):
            number[file.episodes] = n
        first[self.order] = np.cumsum(table.length[self.order]) - table.length[self.order]
        layout.put("data/", number)
        layout.columns |= {"dataset_from_index": first, "dataset_to_index": first + table.length}
        for camera, files in video_files.items():
            number, clock, shift, end = np.zeros((4, count), np.int64)
            for n, of_video in enumerate(files):
                for episode, run in of_video.episodes.items():
                    at = of_video.runs[run]
                    number[episode], clock[episode], shift[episode] = n, at.source.timescale, at.shift
                    end[episode] = at.source.times(*at.source.spans[episode])[1] + at.source.frame + at.shift
            layout.put(f"videos/{camera}/", number)
            layout.moved[f"videos/{camera}/from_timestamp"] = clock, shift
            if self.dataset.is_v2:  # an episode ends with its file
                layout.columns[f"videos/{camera}/to_timestamp"] = end / clock
            else:
                layout.moved[f"videos/{camera}/to_timestamp"] = clock, shift
        layout.info = {
            "total_episodes": count,
            "total_frames": int(table.length.sum()),
            "chunks_size": layout.chunks_size,
            "data_files_size_in_mb": max(1, round(self._sizes[0] / (1 << 20))),
            "video_files_size_in_mb": max(1, round(self._sizes[1] / (1 << 20))),
            "data_path": DATA_PATH,
        } | ({"video_path": VIDEO_PATH} if self.videos else {})
