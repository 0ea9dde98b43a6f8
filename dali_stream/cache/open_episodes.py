"""Opening of episodes: reads their rows and the indices of their video files, and locates their frames.

Rows and indices are read ahead, so that episodes are open before the batches that use them are planned. The look-ahead grows
with the number n of batches that were planned, so that the first batches do not wait for the reads of many others. Batch n
waits for the reads of batches up to n + min(GROWTH · n, look_ahead). By then, reads may have begun for batches up to
n + min(2 · GROWTH · n, 5/4 · look_ahead). The second batch is planned only after the encoded video of the first one has been
fetched.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from dali_stream.cache.frame_files import FrameFiles, Records, image_records, video_records
from dali_stream.cache.indices import IndexCache, size_of
from dali_stream.cache.locate import locate
from dali_stream.cache.pinned import Key, PinnedCache
from dali_stream.checks.arguments import budget_text
from dali_stream.checks.arrays import NONE
from dali_stream.errors import DaliStreamError, DecodeError, MemoryBudgetError
from dali_stream.lerobot.rows import Columns, RowMemory, SourceRows
from dali_stream.lerobot.source import Source
from dali_stream.mp4.index import VideoIndex
from dali_stream.observe.counters import Counters
from dali_stream.observe.tracing import span
from dali_stream.schedule.budget import GROWTH
from dali_stream.schedule.episodes import ROW_SPARE, EpisodeTable, Located, OpenEpisode
from dali_stream.schedule.samples import Samples
from dali_stream.storage import Store
from dali_stream.system.workers import Workers

_log = logging.getLogger("dali_stream")


@dataclass(frozen=True)
class ReadLimits:
    """Limits of the memory of rows and indices, and of the look-ahead.

    Attributes:
        room: Bytes that rows, their entries in the `EpisodeTable`, and indices may take together.
        more: Bytes that they may take beyond `room` if a single batch needs them, at the cost of encoded video. Default: 0.
        index_share: Bytes of `room` for indices. Default: 0.
        index_bytes: {camera: approximate memory of the index of a file, in bytes}. Default: no estimates.
        table_bytes: Memory of a row's entries in the `EpisodeTable`, without its columns, in bytes. Default: 0.
        look_ahead: Maximum number of batches to read ahead. Default: 0.
        block: Approximate size of a block of encoded video in bytes. None if the video is read in place. Default: None.
    """

    room: int
    more: int = 0
    index_share: int = 0
    index_bytes: Mapping[str, int] = field(default_factory=dict)
    table_bytes: int = 0
    look_ahead: int = 0
    block: int | None = None


class _Pinned(NamedTuple):
    """Batch of the look-ahead whose reads have begun, with its episodes, and the rows and indices that it pins."""

    number: int
    epoch: int
    episodes: list[int]
    keys: list[Key]


class OpenEpisodes:
    """Episodes that are open, and the reads for those that the next batches need. Only one thread may use it.

    For each batch, `read_ahead` and then `open` are called. The same calls with the same results of reads always give the same
    decisions.

    Args:
        source: Episodes.
        limits: Limits of the memory and of the look-ahead.
        indices: Cache of the indices of video files, which outlives this object.
        store: Session of the source's store.
        readers: Threads that read.
        memory: Memory for footers and decoded row groups.
        table: Table of the open episodes.
        close: Function that removes an episode from the table.
        substitutes: Whether samples of episodes that cannot be read are substituted, so that these episodes are no error.
        frame_files: {camera: its frames on disk}.
        counters: Counters to add to.

    Attributes:
        table: See above.
        store: See above.
        failed: {episode of the next batch whose rows or indices cannot be read: error}. It is open without rows and packets.
    """

    def __init__(
        self,
        source: Source,
        limits: ReadLimits,
        indices: IndexCache,
        store: Store,
        readers: Workers,
        memory: RowMemory,
        table: EpisodeTable,
        close: Callable[[int], None],
        substitutes: bool,
        frame_files: Mapping[str, FrameFiles],
        counters: Counters,
    ) -> None:
        self.table, self._close_in_table, self._frame_files = table, close, frame_files
        self._told = False  # whether a file without a version was logged
        self._records: dict[tuple[str, int], Records] = {}  # {(camera, open episode): its frames on disk}
        self._source, self._limits, self._indices, self._substitutes = source, limits, indices, substitutes
        self.failed: dict[int, DaliStreamError] = {}
        self.store, self._readers, self._counters = store, readers, counters
        self._reader = SourceRows(source, self.store, memory)
        self._cache = PinnedCache(limits.room, limits.index_share)
        self._video_file = {camera: videos.file for camera, videos in source.videos.items()}
        self._row_bytes = source.row_bytes_of * ROW_SPARE[0] // ROW_SPARE[1] + limits.table_bytes  # by dataset
        self._index_bytes = dict(limits.index_bytes)
        self._rows: dict[int, Columns] = {}  # {episode that is not open yet: its rows}
        self._pinned: deque[_Pinned] = deque()
        self._due = self._requested = NONE  # last batch whose episodes `open` has opened, and last one whose reads have begun
        self._retry = 0  # first batch for which reading ahead is tried again, after the memory was full
        self._read_in = np.full(len(source.lengths), NONE, np.int32)  # last epoch whose batches have read each episode's rows
        self._read_before = set(indices.cached)  # keys of indices
        for key, index in indices.cached.items():
            self._cache.add(key, size_of(index))
            self._expect_size(key[0], size_of(index))
        self._make_room(0)

    @property
    def bytes_by_kind(self) -> tuple[int, int]:
        """Bytes of rows, and of indices, that are in memory or being read."""
        return self._cache.bytes_by_kind

    def horizon(self, number: int) -> int:
        """Return the number of batches after the next batch, `number`, whose reads may begin."""
        # This is farther than `_last_due`, so that reads begin some batches before the planner waits for them.
        return min(2 * GROWTH * number, self._limits.look_ahead * 5 // 4)

    def read_ahead(self, ahead: Sequence[Samples]) -> int:
        """Begin to read the rows and indices that the next batches need, and close episodes to make room for them.

        Args:
            ahead: Next batch, and `horizon` batches after it.

        Returns:
            Number of indices that are read again after an eviction.
        """
        reads: list[tuple[Key, _Pinned, int]] = []
        now = ahead[0].number
        self._release(now)
        for samples in ahead:
            if samples.number > now and (samples.number <= self._requested or now < self._retry):
                continue
            # The next batch is checked even if its reads have begun, since a failed read is repeated for it. Other batches are
            # pinned before room is made, so that none of their own rows and indices are evicted for missing ones.
            batch = self._pinned[0] if samples.number <= self._requested else self._pin(samples)
            missing = [key for key in batch.keys if key not in self._cache]
            sizes = [self._estimate(key) for key in missing]
            if not self._make_room(sum(sizes)):
                if batch.number == now:
                    self._make_room_for_now(sum(sizes))  # the sizes are estimates, so only `open` raises an error
                else:
                    self._unpin_last()
                    # Memory is freed when batches before this one are planned. Trying again only after a quarter of them avoids
                    # attempts that would fail.
                    self._retry = now + 1 + (samples.number - now) // 4
                    break
            for key, size in zip(missing, sizes, strict=True):
                self._cache.add(key, size)
                reads.append((key, batch, now))
        self._reader.expect([number for (camera, number), _, _ in reads if not camera])
        return sum(self._submit(*read) for read in reads)

    def open(self, ahead: Sequence[Samples]) -> None:
        """Open the episodes of the next batch, and those of later batches that are due. Wait for their reads.

        Args:
            ahead: Next batch and some batches after it. Rows of their other episodes that a read returns as well are kept if
                they fit.

        Raises:
            DatasetError: If rows of the next batch are missing or broken, and `substitutes` is False.
            StorageError: If rows or an index of the next batch cannot be read, and `substitutes` is False.
            MemoryBudgetError: If the rows and indices of the next batch alone exceed the memory.
            CancelledError: If the readers were stopped.
        """
        errors: dict[Key, DaliStreamError] = {}
        for batch in self._newly_due():
            for key in filter(self._cache.is_coming, batch.keys):
                try:
                    result = self._cache.take(key)
                except DaliStreamError as error:
                    # The error may be temporary. The read is repeated for each batch that needs it.
                    self._forget(key)
                    if batch.number == ahead[0].number:
                        if not self._substitutes:
                            raise
                        errors[key] = error.with_traceback(None)
                    continue
                if key[0]:
                    self._keep_index(key, result)
                else:
                    self._keep_rows(key, ahead, *result)
        self._make_room_for_now(0)
        if self._cache.free + self._limits.more < 0:
            room, taken = self._limits.room + self._limits.more, sum(self._cache.bytes_by_kind)
            larger = 2 * (taken + self._limits.more)  # rows and indices get up to half of the budget, beside encoded video
            raise MemoryBudgetError(
                f"memory_budget leaves {room} bytes for rows, indices and encoded video, but the rows and indices of one batch "
                f'take {taken}. Use a larger memory_budget, such as "{budget_text(larger)}", or a smaller batch_size'
            )
        for episode in self._pinned[0].episodes if errors else ():
            if failed := [errors[key] for key in (("", episode), *self._keys_of_indices(episode)) if key in errors]:
                self._open_failed(episode, failed[0])
        for batch in self._newly_due():
            for episode in batch.episodes:
                if episode in self._rows and self._has_indices(episode):
                    self.table.open(self._located(episode))
        self._due = max(self._due, self._last_due())

    def look_on_disk(self) -> None:
        """Find out again which frames of the open episodes are on disk, since other processes add frames and remove files."""
        for files in self._frame_files.values():
            files.look()
        for episode in np.flatnonzero(self.table.first_row != NONE).tolist() if self._frame_files else ():
            rows = self.table.rows_of(episode)
            for camera, files in self._frame_files.items():
                own, records = self.table.cameras[camera], self.records(camera, episode)
                if records is not None and not own.stored[rows].all():
                    own.stored[rows] = files.stored(records, own.packet[rows])

    def records(self, camera: str, episode: int) -> Records | None:
        """Return the records of the frames of an open episode on disk. None if they are not stored."""
        return self._records.get((camera, episode))

    def records_of(self, camera: str, episodes: Iterable[int]) -> dict[int, Records]:
        """Return {open episode: records of its frames on disk}. Episodes whose frames are not stored are left out."""
        records = {episode: self.records(camera, episode) for episode in episodes}
        return {episode: own for episode, own in records.items() if own is not None}

    def index(self, camera: str, episode: int) -> VideoIndex:
        """Return the index of an episode's file. Raises DecodeError if the file or the episode cannot be read, see `failed`."""
        if episode in self.failed:
            raise DecodeError(str(self.failed[episode]))
        return self._indices.of(camera, episode, self.store)

    def _release(self, number: int) -> None:
        """Unpin the batches before batch `number`, and close the episodes that could not be read for them."""
        for episode in self.failed:  # the next batch that needs it reads it again
            self._close(episode)
        self.failed = {}
        while self._pinned and self._pinned[0].number < number:
            self._cache.unpin(self._pinned.popleft().keys)

    def _last_due(self) -> int:
        """Return the last batch whose reads must be complete before the next batch is planned."""
        now = self._pinned[0].number
        return min(now + min(GROWTH * now, self._limits.look_ahead), self._requested)

    def _newly_due(self) -> list[_Pinned]:
        """Return the next batch, and the batches that became due when it became the next one."""
        # The episodes of batches up to `_due` were opened before. The next batch is returned again, since its reads may have
        # failed, or it may have been removed from the look-ahead and added again. In both cases `read_ahead` has repeated the
        # reads.
        last = self._last_due()
        later = itertools.takewhile(lambda batch: batch.number <= last, itertools.islice(self._pinned, 1, None))
        return [self._pinned[0], *(batch for batch in later if batch.number > self._due)]

    def _pin(self, samples: Samples) -> _Pinned:
        """Add a batch to the look-ahead, and pin its rows and indices."""
        episodes = sorted(set(samples.episode.tolist()))  # faster than `np.unique` for so few
        keys: list[Key] = [("", episode) for episode in episodes]
        for camera, files in self._video_file.items():
            keys += [(camera, file) for file in sorted(set(files[episodes].tolist())) if file != NONE]
        batch = _Pinned(samples.number, samples.epoch, episodes, keys)
        self._cache.pin(keys)
        self._pinned.append(batch)
        self._requested = batch.number
        return batch

    def _unpin_last(self) -> None:
        """Remove the last batch from the look-ahead. `read_ahead` adds it again later."""
        batch = self._pinned.pop()
        self._cache.unpin(batch.keys)
        self._requested = batch.number - 1

    def _make_room_for_now(self, need: int) -> None:
        """Make room for the next batch. Evict rows and indices of later batches if necessary.

        If even that is not enough, rows and indices exceed their memory at the cost of encoded video.
        """
        self._make_room_for_pinned(need)
        self._make_room(need, as_far_as_possible=True)

    def _make_room_for_pinned(self, need: int) -> None:
        """Make room. If the pinned batches take too much, read less far ahead."""
        while not self._make_room(need) and len(self._pinned) > 1:
            self._unpin_last()

    def _estimate(self, key: Key) -> int:
        """Return the approximate size of rows or of an index in bytes."""
        camera, number = key
        if camera:
            return self._index_bytes.get(camera, 0)
        return int(self._source.lengths[number] * self._row_bytes[self._source.dataset_of[number]])

    def _submit(self, key: Key, batch: _Pinned, now: int) -> bool:
        """Begin the read of rows or of an index. Return whether it reads an index again."""
        camera, number = key
        # Smallest n >= `now` with batch.number <= n + min(GROWTH * n, look_ahead), see `_last_due`. For the same batch, rows
        # and indices precede blocks of video, whose priority is (batch, 1).
        step = max(now, batch.number - self._limits.look_ahead, -(-batch.number // (1 + GROWTH)))
        if camera:
            again = key in self._read_before
            self._read_before.add(key)
        else:
            again = bool(self._read_in[number] == batch.epoch)
            self._read_in[number] = batch.epoch
        read = self._read_index if camera else self._read_rows
        self._cache.set_read(key, self._readers.submit(read, key, batch.number, again, priority=(step, 0)))
        return again and camera != ""

    def _read_rows(self, key: Key, batch: int, again: bool) -> tuple[Columns, bool]:
        """Return the rows of an episode, and whether a file was read for them."""
        sizes = list[int]()
        with span("fetch rows", batch):
            rows = self._reader.read(key[1], sizes.append)
        if self.store.remote and not again:
            self._counters.add(needed_bytes=sum(sizes))
        return rows, any(sizes)

    def _read_index(self, key: Key, batch: int, again: bool) -> VideoIndex | DecodeError:
        with span("fetch index", batch):
            return self._indices.load(*key, self.store)

    def _keep_index(self, key: Key, index: VideoIndex | DecodeError) -> None:
        self._indices.cached[key] = index
        self._cache.resize(key, size_of(index))
        self._expect_size(key[0], size_of(index))
        self._make_room_for_pinned(0)

    def _expect_size(self, camera: str, size: int) -> None:
        """Expect other files of a camera to have an index of this size in bytes. A broken one has size 0, and says nothing."""
        if size:
            self._index_bytes[camera] = size

    def _keep_rows(self, key: Key, ahead: Sequence[Samples], rows: Columns, is_read: bool) -> None:
        """Keep the rows of an episode, and those of other episodes that the same read has decoded.

        Args:
            key: Key of the rows.
            ahead: Batches whose other episodes are kept, if they fit.
            rows: Rows of the episode.
            is_read: Whether they were read from a file, and not taken from row groups in memory.
        """
        self._rows[key[1]] = rows
        self._cache.resize(key, _bytes_of(rows) + self._table_bytes(key[1]))
        self._make_room_for_pinned(0)
        others = {e for e in self._reader.beside(key[1]) if ("", e) not in self._cache} if is_read else None
        if not others:
            return
        for episode in dict.fromkeys(np.concatenate([samples.episode for samples in ahead]).tolist()):  # most urgent first
            if episode in others and (size := self._estimate(("", episode))) <= self._cache.free:  # nothing is evicted for them
                with suppress(DaliStreamError):  # broken rows are an error once a batch needs them
                    if (own := self._reader.read_kept(episode)) is None:  # its row groups were evicted meanwhile
                        return
                    self._rows[episode] = own
                    self._cache.add(("", episode), size, is_used=False)

    def _table_bytes(self, episode: int) -> int:
        """Return the memory of an episode's entries in the `EpisodeTable`, without its columns, in bytes."""
        return int(self._source.lengths[episode]) * self._limits.table_bytes

    def _forget(self, key: Key) -> None:
        """Make sure that repeating a failed read does not count as reading again."""
        if key[0]:
            self._read_before.discard(key)
        else:
            self._read_in[key[1]] = NONE

    def _make_room(self, need: int, as_far_as_possible: bool = False) -> bool:
        """Call `PinnedCache.make_room`, and drop the values that it evicts."""
        is_free = self._cache.make_room(need, as_far_as_possible)
        for key in self._cache.evicted:
            camera, number = key
            if camera:
                del self._indices.cached[key]
            elif self._rows.pop(number, None) is None:  # the episode is open, so its rows are in the table
                self._close(number)
        self._cache.evicted.clear()
        return is_free

    def _has_indices(self, episode: int) -> bool:
        """Return whether the indices of an episode's video files have been read."""
        return all(key in self._cache and not self._cache.is_coming(key) for key in self._keys_of_indices(episode))

    def _keys_of_indices(self, episode: int) -> list[Key]:
        return [(camera, int(files[episode])) for camera, files in self._video_file.items() if files[episode] != NONE]

    def _open_failed(self, episode: int, error: DaliStreamError) -> None:
        """Open an episode that cannot be read: its frames have no packets, and its rows are undefined."""
        self.failed[episode] = error
        self._rows.pop(episode, None)
        if ("", episode) in self._cache:
            self._cache.remove(("", episode))
        if self.table.is_open(np.array(episode)):
            self._close(episode)
        nothing = np.full(int(self._source.lengths[episode]), NONE, np.int64)
        self.table.open(OpenEpisode(episode, dict.fromkeys(self._source.cameras, Located(nothing, nothing))))

    def _located(self, episode: int) -> OpenEpisode:
        """Locate the frames of an episode whose rows were read."""
        source, rows, block = self._source, self._rows.pop(episode), self._limits.block
        cameras = {c: locate(source, c, episode, rows, self._index_or_none(c, episode), block) for c in source.cameras}
        for camera, files in self._frame_files.items():
            index = self._index_or_none(camera, episode)
            if index is not None:
                records = video_records(self.store, index, cameras[camera].packet)
                if records is None and not self._told:
                    self._told = True
                    _log.warning(
                        "frame_cache: %s has no version that the server sends (ETag or Last-Modified), so the frames of such "
                        "files are not stored",
                        self.store.where(index.path),
                    )
            else:
                feature = source.part_of(episode).features.get(camera)
                records = image_records(rows[camera]) if feature is not None and feature.is_image else None
            if records is not None:
                self._records[camera, episode] = records
                cameras[camera] = replace(cameras[camera], stored=files.stored(records, cameras[camera].packet))
        return OpenEpisode(episode, cameras, rows)

    def _close(self, episode: int) -> None:
        self._close_in_table(episode)
        for camera in self._frame_files:
            self._records.pop((camera, episode), None)

    def _index_or_none(self, camera: str, episode: int) -> VideoIndex | None:
        try:
            return None if self._indices.file(camera, episode) == NONE else self.index(camera, episode)
        except DecodeError:  # raised again when a batch needs a frame of the file
            return None


def _bytes_of(columns: Columns) -> int:
    """Return the memory that an episode's rows may take in the `EpisodeTable`, in bytes."""
    arrays = sum(values.nbytes for values in columns.values())
    # Rows may share an object.
    different = {id(value): len(value) for values in columns.values() if values.dtype == object for value in values.flat}
    objects = sum(different.values())
    return arrays * ROW_SPARE[0] // ROW_SPARE[1] + objects
