"""Opening of episodes: reads their rows and the indices of their video files, and locates their frames."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any

import numpy as np
import numpy.typing as npt

from dali_stream.cache.indices import IndexCache
from dali_stream.cache.locate import locate
from dali_stream.counters import Counters
from dali_stream.errors import DaliStreamError, DecodeError
from dali_stream.lerobot.combined import row_reader
from dali_stream.lerobot.rows import Columns, Found, RowMemory
from dali_stream.lerobot.source import Source
from dali_stream.mp4.index import VideoIndex
from dali_stream.schedule.episodes import ROW_SPARE, EpisodeTable, OpenEpisode
from dali_stream.schedule.opening import Opening, Read
from dali_stream.schedule.room import Key
from dali_stream.schedule.samples import Samples
from dali_stream.storage import Store
from dali_stream.workers import Workers

Int64 = npt.NDArray[np.int64]


class OpenEpisodes:
    """Open episodes. They are opened and closed as `Opening` decides. Only one thread may use an object of this class.

    Many episodes share a video file, so indices are cached per file, in `IndexCache`.

    Args:
        source: Episodes.
        indices: Cache of the indices of video files, which outlives this object.
        store: Session of the source's store. Default: a new session.
        readers: Threads that read. None to read in the thread of the caller.
        memory: Memory for decoded row groups. Default: a new one that is not shared.
        block: Bytes of a block of encoded video. None if it is read in place.
        counters: Counters to add to.

    Attributes:
        table: Table of the open episodes, for the planner.
    """

    def __init__(
        self,
        source: Source,
        indices: IndexCache,
        store: Store | None = None,
        readers: Workers | None = None,
        memory: RowMemory | None = None,
        block: int | None = None,
        counters: Counters | None = None,
    ) -> None:
        self._source, self._indices, self._block, self._counters = source, indices, block, counters or Counters()
        self._store, self._readers = store or source.data_store.session(), readers or Workers("", 0)
        self.table = EpisodeTable(source.lengths, source.cameras, () if block is None else source.videos)
        self._rows: dict[int, Columns] = {}  # {episode that is not open yet: its rows}
        self._reader = row_reader(source, self._store, memory)
        self._coming: dict[Key, Future[Any]] = {}
        self._late: dict[Key, Future[Any]] = {}  # reads of indices that were evicted before they ended
        self._open: set[int] = set()

    def begin(self, opening: Opening, ahead: Iterable[Samples]) -> list[int]:
        """Begin to read the rows and indices that the next batches need. Return the episodes that were closed.

        Args:
            opening: Schedule of the reads.
            ahead: Next batch and those after it, see `Opening.request`.
        """
        reads = opening.request(ahead)
        for key in [key for key, late in self._late.items() if late.done()]:
            del self._late[key]
            if key not in opening.room:  # it was not requested again meanwhile
                self._indices.drop(*key)
        closed = self._evict(opening.room.take_evicted())
        for read in reads:
            call = self._read_index if read.camera else self._read_rows
            self._coming[read.key] = self._readers.submit(call, read, priority=(read.step, 0))
        return closed

    def finish(self, opening: Opening, ahead: Sequence[Samples]) -> tuple[Iterator[OpenEpisode], list[int]]:
        """Wait for the reads that are due before the next batch is planned.

        Args:
            opening: Schedule of the reads.
            ahead: Next batch and some batches after it. If a read returns rows of their episodes in addition, these are kept.

        Returns:
            Episodes that are opened, each when it is asked for so that its rows are in memory once, and numbers of the episodes
            that were closed before.

        Raises:
            DatasetError: If rows of the next batch are missing or broken.
            StorageError: If rows or an index of the next batch cannot be read.
            CancelledError: If the readers were stopped.
        """
        closed: list[int] = []
        soon: list[int] = []  # episodes of the batches ahead, most urgent first
        for read in opening.due():
            if (coming := self._coming.pop(read.key, None)) is None:  # evicted for the results of earlier reads
                continue
            try:
                result = coming.result()
            except (DaliStreamError, CancelledError):
                if read.batch == ahead[0].number:
                    raise
                opening.observe(read.key, None)  # the read is repeated for the batch that needs it
                continue
            if read.camera:
                opening.observe(read.key, result)
            else:
                others = {e: size * ROW_SPARE[0] // ROW_SPARE[1] for e, size in result.sizes().items() if e != read.number}
                if others and not soon:
                    soon = list(dict.fromkeys(np.concatenate([samples.episode for samples in ahead]).tolist()))
                others = {episode: others[episode] for episode in soon if episode in others}
                kept = opening.observe(read.key, _bytes_of(result[read.number]), others)
                self._rows[read.number] = result[read.number]
                for episode in kept:
                    try:
                        self._rows[episode] = {key: values.copy() for key, values in result[episode].items()}
                    except (KeyError, DaliStreamError):  # evicted meanwhile, or broken, which is reported when a batch needs it
                        opening.observe(("", episode), None)
            closed += self._evict(opening.room.take_evicted())
        ready = [episode for episode in opening.ready() if episode not in self._open]
        return map(self._opened, ready), closed

    def load(self, episodes: Iterable[int]) -> dict[int, OpenEpisode]:
        """Read and open episodes, for a program without a schedule.

        Raises:
            DatasetError: If rows are missing or broken.
            StorageError: If rows or an index cannot be read.
        """
        opened = {}
        for episode in episodes:
            self._rows[episode] = self._reader.read(episode)[episode]
            self.table.open(one := self._opened(episode))
            opened[episode] = one
        return opened

    def index(self, camera: str, episode: int) -> VideoIndex:
        """Return the index of the file that contains an episode. Raises DecodeError if the file has no valid index."""
        return self._indices.of(camera, episode, self._store)

    def _opened(self, episode: int) -> OpenEpisode:
        """Locate the frames of an episode whose rows were read."""
        self._open.add(episode)
        source, rows = self._source, self._rows.pop(episode)
        cameras = {c: locate(source, c, episode, rows, self._index_or_none(c, episode), self._block) for c in source.cameras}
        return OpenEpisode(episode, cameras, rows)

    def _index_or_none(self, camera: str, episode: int) -> VideoIndex | None:
        try:
            return self.index(camera, episode) if self._indices.has_file(camera, episode) else None
        except DecodeError:  # reported when a frame of the file is decoded
            return None

    def _evict(self, keys: Iterable[Key]) -> list[int]:
        """Drop rows and indices that the schedule has evicted. Return the episodes among them that were open."""
        closed: list[int] = []
        for camera, number in keys:
            coming = self._coming.pop((camera, number), None)
            if camera and coming is not None:
                self._late[camera, number] = coming  # its read will add the index to the cache, from which `begin` drops it
            elif camera:
                self._indices.drop(camera, number)
            elif number in self._open:
                self._open.remove(number)
                closed.append(number)
            else:
                self._rows.pop(number, None)
        return closed

    def _read_rows(self, read: Read) -> Found:
        found = self._reader.read(read.number)
        # The result may wait long for its batch, and must not keep whole row groups in memory until then.
        group = found.release(read.number)
        if self._store.remote and not read.again:
            self._counters.add(needed_bytes=group.take_bytes())
        return found

    def _read_index(self, read: Read) -> int:
        try:
            return self._indices.read(read.camera, read.number, self._store).nbytes
        except DecodeError:  # reported when a frame of the file is decoded
            return 0


def _bytes_of(columns: Columns) -> int:
    """Return the memory that an episode's rows may take in the `EpisodeTable`, in bytes."""
    arrays = sum(values.nbytes for values in columns.values())
    objects = sum(len(value) for values in columns.values() if values.dtype == object for value in values.flat)
    return arrays * ROW_SPARE[0] // ROW_SPARE[1] + objects
