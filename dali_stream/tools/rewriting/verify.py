"""Reads the new dataset with the code that a Loader uses, and compares it with the digests of the source."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable

import numpy as np

from dali_stream.dataset import Dataset
from dali_stream.errors import DaliStreamError
from dali_stream.lerobot import metadata
from dali_stream.lerobot.metadata import Episodes
from dali_stream.lerobot.rows import RowReader
from dali_stream.mp4.index import read_index
from dali_stream.tools.output.copy import check_same, read_samples
from dali_stream.tools.output.folder import AGAIN
from dali_stream.tools.rewriting import rows, video
from dali_stream.tools.rewriting.job import Job
from dali_stream.tools.rewriting.meta import copied_files, episode_tables, info, renewed, written_files
from dali_stream.tools.rewriting.report import Side, side
from dali_stream.tools.rewriting.rows import DataFile, EpisodeRows, RowDigest
from dali_stream.tools.rewriting.stores import Recorder, Window
from dali_stream.tools.rewriting.video import VideoFile


def verify(job: Job, data_files: list[DataFile], video_files: dict[str, list[VideoFile]]) -> Side:
    """Returns the new dataset's side of the report. Raises DaliStreamError if anything differs."""
    with contextlib.closing(Dataset(job.folder.stage, data_files_root=job.folder.root)) as out:
        check = _Check(job, out)
        check.meta()
        todo: list[Callable[[], None]] = [functools.partial(check.rows, file) for file in data_files]
        every = [(camera, file) for camera in job.videos for file in video_files[camera]]
        todo += [functools.partial(check.video, camera, file) for camera, file in every]
        total = sum(file.nbytes for file in data_files) + sum(file.nbytes for _, file in every)
        job.work.each("verifying", todo, lambda check: check(), total)
        paths = [*(file.path for file in data_files), *(file.path for _, file in every)]
        nbytes = sum(map(out.data_store.size, paths)) + sum(map(out.store.size, out.store.files("meta")))
        files = len(data_files), len(every)
        return side(str(job.folder.root), files, nbytes, check.indices.reads, check.row_reads.reads)


_REST = "bytes outside its episodes have changed since it was written"  # its head or footer, shared frames


class _Check:
    def __init__(self, job: Job, out: Dataset) -> None:
        self._job, self._out = job, out
        self._table: Episodes = out.read_table(job.videos)
        self.indices, self.row_reads = Recorder(out.data_store), Recorder(out.data_store)
        self._reader = RowReader(out, self.row_reads)

    def meta(self) -> None:
        """Compares counts, tasks, statistics and the episode table."""
        job, out, source = self._job, self._out, self._job.dataset
        expected_info = info(source) | job.layout.info
        for what, same in (
            ("the episodes", np.array_equal(self._table.index, job.table.index)),
            ("the lengths", np.array_equal(self._table.length, job.table.length)),
            ("the features", metadata.read_json(out.store, metadata.INFO) == expected_info),
            ("the tasks", out.tasks == source.tasks and out.subtasks == source.subtasks),
        ):
            if not same:
                raise DaliStreamError(f"{out.store.address}: {what} differ from the source's; {AGAIN}")
        written = written_files(source, job.layout.regular)
        check_same(source.store, out.store, copied_files(source, written))
        for name, data in written.items():
            if out.store.read_all(name) != data:
                raise DaliStreamError(f"{out.store.where(name)}: has changed since it was written; {AGAIN}")
        if self._episode_table(source) != self._episode_table(out):
            raise DaliStreamError(f"{out.store.where('meta/episodes')}: a column differs from the source's; {AGAIN}")

    def _episode_table(self, dataset: Dataset) -> str:
        """A digest of the episode table; of the source's with the new layout applied."""
        digest, layout = RowDigest(), self._job.layout
        for found, _ in episode_tables(dataset, self._table):
            digest.add(renewed(found, self._table, layout) if dataset is not self._out else found)
        return digest.hexdigest()

    def rows(self, file: DataFile) -> None:
        """Compares every row of a data file."""
        job, out, table, seen = self._job, self._out, self._table, set[int]()
        note = job.folder.finished(file.path)
        with job.folder.blaming(file.path, "it cannot be read: "):
            footer = rows.read_footer(out.data_store, file.path)
        if not footer.schema.equals(file.schema, check_metadata=True):
            job.folder.refuse(file.path, "its schema differs from the source's")
        footers = {int(table.data.index[file.episodes[0]]): footer}
        found = EpisodeRows(Window(out.data_store), table, footers, file.episodes)
        for episode in file.episodes:
            index = int(table.index[episode])
            with job.folder.blaming(file.path, f"episode {index}: its rows cannot be read: "):
                if episode not in seen:
                    seen.update(self._reader.read(episode))
                digest = RowDigest().add(found.read(episode)).hexdigest()
            if digest != note["rows"][str(episode)]:
                job.folder.refuse(file.path, f"episode {index}: its rows differ from the source's")
            job.work.advance(file.nbytes // len(file.episodes))
        job.folder.check(file.path, _REST)

    def video(self, camera: str, file: VideoFile) -> None:
        """Compares every packet of a video file."""
        job, out, marks = self._job, self._out, list[bytes]()
        note, files = job.folder.finished(file.path), self._table.video[camera]
        with job.folder.blaming(file.path, f"{camera}: its index cannot be read: "):
            table = read_index(self.indices, file.path)
        for samples in read_samples(out.data_store, table, 0, len(table)):
            marks += map(video.mark, samples)
            job.work.advance(sum(map(len, samples)))
        whole = np.frombuffer(b"".join(marks), np.uint8).reshape(-1, 16)
        for episode in file.episodes:
            what = f"{camera}, episode {self._table.index[episode]}: "
            with job.folder.blaming(file.path, what):
                shown = job.shown_in_copy(camera, episode, self._table.interval(camera, episode), table)
            there = files.paths[files.index[episode]] == file.path
            if not there or video.digest(table, shown, whole) != note["video"][str(episode)]:
                job.folder.refuse(file.path, f"{what}its encoded frames or their times differ from the source's")
        job.folder.check(file.path, _REST)
