"""Opening of episodes: reads their rows and the indices of their video files, and locates their frames."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any

import numpy as np
import numpy.typing as npt

from dali_stream.cache.indices import IndexCache, size_of
from dali_stream.cache.locate import locate
from dali_stream.errors import DaliStreamError, DecodeError
from dali_stream.lerobot.row_memory import Columns, Found, RowMemory
from dali_stream.lerobot.source import Source
from dali_stream.lerobot.source_rows import SourceRows
from dali_stream.mp4.index import VideoIndex
from dali_stream.mp4.none import NONE
from dali_stream.observe.counters import Counters
from dali_stream.observe.tracing import span
from dali_stream.schedule.episodes import ROW_SPARE, EpisodeTable, OpenEpisode
from dali_stream.schedule.items import Key
from dali_stream.schedule.opening import Opening, Read
from dali_stream.schedule.samples import Samples
from dali_stream.storage import Store
from dali_stream.system.workers import Workers

Int64 = npt.NDArray[np.int64]


class OpenEpisodes:
    """Open episodes. `Opening` decides when they are opened and closed. Only one thread may use an object of this class.

    Many episodes share a video file, so indices are cached per file, in `IndexCache`.

    Args:
        opening: Schedule of the reads.
        source: Episodes.
        indices: Cache of the indices of video files, which outlives this object.
        store: Session of the source's store.
        readers: Threads that read.
        memory: Memory for decoded row groups.
        block: Approximate size of a block of encoded video in bytes. None if the video is read in place.
        counters: Counters to add to.

    Attributes:
        table: Table of the open episodes, for the planner.
    """

    def __init__(
        self,
        opening: Opening,
        source: Source,
        indices: IndexCache,
        store: Store,
        readers: Workers,
        memory: RowMemory,
        block: int | None,
        counters: Counters,
    ) -> None:
        self._opening, self._source, self._indices, self._block = opening, source, indices, block
        self._store, self._readers, self._counters = store, readers, counters
        self.table = EpisodeTable(source.lengths, source.cameras, () if block is None else source.videos)
        self._rows: dict[int, Columns] = {}  # {episode that is not open yet: its rows}
        self._reader = SourceRows(source, self._store, memory)
        self._coming: dict[Key, Future[Any]] = {}
        for key, index in indices.cached.items():
            opening.observe(key, size_of(index))

    def begin(self, ahead: Iterable[Samples]) -> tuple[list[int], int]:
        """Begin to read the rows and indices that the next batches need.

        Args:
            ahead: Next batch and those after it, see `Opening.request`.

        Returns:
            Episodes that were closed, and number of indices that are read again after an eviction.
        """
        reads = self._opening.request(ahead)
        closed = self._evict()
        self._reader.expect([read.number for read in reads if not read.camera])
        for read in reads:
            call = self._read_index if read.camera else self._read_rows
            # For the same batch, rows and indices precede blocks of video, whose priority is (batch, 1).
            self._coming[read.key] = self._readers.submit(call, read, priority=(read.step, 0))
        return closed, sum(read.again for read in reads if read.camera)

    def finish(self, ahead: Sequence[Samples]) -> tuple[Iterator[OpenEpisode], list[int]]:
        """Wait for the reads that are due before the next batch is planned.

        Args:
            ahead: Next batch and some batches after it. Rows of their other episodes that a read returns as well are kept if
                they fit.

        Returns:
            Iterator over the opened episodes, and numbers of the episodes that must be closed before. The iterator opens one
            episode per step, so that the rows of only one episode are in memory twice.

        Raises:
            DatasetError: If rows of the next batch are missing or broken.
            StorageError: If rows or an index of the next batch cannot be read.
            CancelledError: If the readers were stopped.
        """
        closed: list[int] = []
        soon: list[int] = []  # episodes of the batches ahead, most urgent first
        for read in self._opening.due():
            if (coming := self._coming.pop(read.key, None)) is None:  # evicted to make room for earlier results
                continue
            try:
                result = coming.result()
            except (DaliStreamError, CancelledError):
                if read.batch == ahead[0].number:
                    raise
                # The error may be temporary. The read is repeated for the batch that needs it, and may raise it then.
                self._opening.observe(read.key, None)
                continue
            kept: list[int] = []
            if read.camera:
                self._indices.cached[read.key] = result
                self._opening.observe(read.key, size_of(result))
            else:
                self._rows[read.number] = result[read.number]
                others = {e: size * ROW_SPARE[0] // ROW_SPARE[1] for e, size in result.sizes().items() if e != read.number}
                if others and not soon:
                    soon = list(dict.fromkeys(np.concatenate([samples.episode for samples in ahead]).tolist()))
                others = {episode: others[episode] for episode in soon if episode in others}
                # `result` caches only the episode that it converted last, so the requested episode is used before the others.
                kept = self._opening.observe(read.key, _bytes_of(result[read.number]), others)
            closed += self._evict()
            for episode in kept:
                try:
                    self._rows[episode] = {key: values.copy() for key, values in result[episode].items()}
                except (KeyError, DaliStreamError):  # evicted meanwhile, or broken, which is an error once a batch needs it
                    self._opening.observe(("", episode), None)
        ready = self._opening.ready()
        return map(self._opened, ready), closed + self._evict()

    def index(self, camera: str, episode: int) -> VideoIndex:
        """Return the index of the file that contains an episode. Raises DecodeError if the file has no valid index."""
        return self._indices.of(camera, episode, self._store)

    def _opened(self, episode: int) -> OpenEpisode:
        """Locate the frames of an episode whose rows were read."""
        source, rows = self._source, self._rows.pop(episode)
        cameras = {c: locate(source, c, episode, rows, self._index_or_none(c, episode), self._block) for c in source.cameras}
        return OpenEpisode(episode, cameras, rows)

    def _index_or_none(self, camera: str, episode: int) -> VideoIndex | None:
        try:
            return None if self._indices.file(camera, episode) == NONE else self.index(camera, episode)
        except DecodeError:  # raised again when a batch needs a frame of the file
            return None

    def _evict(self) -> list[int]:
        """Drop rows and indices that the schedule has evicted. Return the episodes that must be closed for this."""
        closed: list[int] = []
        for camera, number in self._opening.items.take_evicted():
            if self._coming.pop((camera, number), None) is not None:  # the result of a read is dropped
                continue
            if camera:
                del self._indices.cached[camera, number]
            elif self._rows.pop(number, None) is None:  # the episode is open, so its rows are in the table
                closed.append(number)
        return closed

    def _read_rows(self, read: Read) -> Found:
        with span("fetch rows", read.batch):
            rows = self._reader.read(read.number)
        # The result may be needed only much later. Until then, it must not keep whole row groups in memory.
        group = rows.release(read.number)
        if self._store.remote and not read.again:
            self._counters.add(needed_bytes=group.take_bytes())
        return rows

    def _read_index(self, read: Read) -> VideoIndex | DecodeError:
        with span("fetch index", read.batch):
            return self._indices.load(read.camera, read.number, self._store)


def _bytes_of(columns: Columns) -> int:
    """Return the memory that an episode's rows may take in the `EpisodeTable`, in bytes."""
    arrays = sum(values.nbytes for values in columns.values())
    objects = sum(len(value) for values in columns.values() if values.dtype == object for value in values.flat)
    return arrays * ROW_SPARE[0] // ROW_SPARE[1] + objects
