"""Opening of episodes: reads their rows and the indices of their video files, and locates their frames.

Rows and indices are read ahead, so that episodes are open before the batches that use them are planned. `LookAhead` decides how
far.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from dali_stream.cache.account import Key
from dali_stream.cache.frames_on_disk import FramesOnDisk
from dali_stream.cache.indices import IndexCache, size_of
from dali_stream.cache.look_ahead import BatchAhead, LookAhead, ReadLimits
from dali_stream.checks.arguments import budget_text
from dali_stream.checks.arrays import NONE
from dali_stream.errors import DaliStreamError, DecodeError, MemoryBudgetError
from dali_stream.lerobot.rows import Columns, RowMemory, SourceRows
from dali_stream.lerobot.source import Source
from dali_stream.mp4.blocks import cut
from dali_stream.mp4.index import VideoIndex
from dali_stream.observe.counters import Counters
from dali_stream.observe.tracing import span
from dali_stream.schedule.episodes import ROW_SPARE, EpisodeTable, Located, OpenEpisode
from dali_stream.schedule.samples import Samples
from dali_stream.storage import Store
from dali_stream.system.workers import Workers


def locate(
    source: Source,
    camera: str,
    episode: int,
    rows: Mapping[str, npt.NDArray[np.generic]],
    index: VideoIndex | None,
    block: int | None = None,
) -> Located:
    """Return the locations of an episode's frames.

    Args:
        source: Episodes.
        camera: Name of the camera.
        episode: Number of the episode.
        rows: {key: values of the episode's rows}. It must have the keys "timestamp" and "frame_index".
        index: Index of the episode's video file. None if the frames are images, if the dataset of the episode lacks the camera,
            or if the file is broken. In the last two cases, no frame has a packet: frames of a missing camera are zeros, and
            decoding a frame of a broken file raises an error.
        block: Approximate size of a block of encoded video in bytes. None if the video is read in place. Default: None.
    """
    length = int(source.lengths[episode])
    if index is None:
        feature = source.part_of(episode).features.get(camera)
        if feature is not None and feature.is_image:
            return Located(np.arange(length), np.arange(length))  # each image is a GOP of its own
        nothing = np.full(length, NONE, np.int64)
        return Located(nothing, nothing)
    times = source.episode_times(camera, episode, index, rows)
    packet = times.packets()
    part = source.part_of(episode)
    part.dataset.warn_of_cut(part.keys[camera], episode - part.first, times)
    exists = packet != NONE
    if exists.all():
        keyframe = index.decode_starts(packet)
    else:
        keyframe = np.full(length, NONE, np.int64)
        keyframe[exists] = index.decode_starts(packet[exists])
    return Located(packet, keyframe, None if block is None else cut(index, packet, keyframe, block))


class OpenEpisodes:
    """Episodes that are open, and the reads for those that the next batches need. Only one thread may use it.

    For each batch, `read_ahead` and then `open` are called. The same calls with the same results of reads always give the same
    decisions.

    Args:
        source: Episodes.
        limits: Limits of the memory and of the look-ahead.
        indices: Cache of the indices of video files, which outlives this object.
        store: Session of the source's store.
        fetchers: Threads that read.
        memory: Memory for footers and decoded row groups.
        table: Table of the open episodes.
        close_video: Function that evicts the encoded video of an open episode.
        substitutes: Whether samples of episodes that cannot be read are substituted, so that these episodes are no error.
        on_disk: {camera: its frames on disk}.
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
        fetchers: Workers,
        memory: RowMemory,
        table: EpisodeTable,
        close_video: Callable[[int], None],
        substitutes: bool,
        on_disk: Mapping[str, FramesOnDisk],
        counters: Counters,
    ) -> None:
        self.table, self._close_video, self._on_disk = table, close_video, on_disk
        self._source, self._limits, self._indices, self._substitutes = source, limits, indices, substitutes
        self.failed: dict[int, DaliStreamError] = {}
        self.store, self._fetchers, self._counters = store, fetchers, counters
        self._reader = SourceRows(source, self.store, memory)
        self._rows = dict[int, Columns]()  # {episode that is not open yet: its rows}
        self._ahead = LookAhead(source, limits)
        self._account = self._ahead.account
        self._read_in = np.full(len(source.lengths), NONE, np.int32)  # last epoch whose batches have read each episode's rows
        self._read_before = set(indices.cached)  # keys of indices
        for key, index in indices.cached.items():
            self._account.add(key, size_of(index))
            self._ahead.expect_size(key[0], size_of(index))
        self._account.make_room(0)
        self._drop_evicted()

    @property
    def bytes_by_kind(self) -> tuple[int, int]:
        """Bytes of rows, and of indices, that are in memory or being read."""
        return self._account.bytes_by_kind

    def horizon(self, number: int) -> int:
        """See `LookAhead.horizon`."""
        return self._ahead.horizon(number)

    def read_ahead(self, ahead: Sequence[Samples]) -> int:
        """Begin to read the rows and indices that the next batches need, and close episodes to make room for them.

        Args:
            ahead: Next batch, and `horizon` batches after it.

        Returns:
            Number of indices that are read again after an eviction.
        """
        for episode in self.failed:  # the next batch that needs it reads it again
            self._close(episode)
        self.failed = {}
        reads = self._ahead.extend(ahead)
        self._drop_evicted()
        self._reader.expect([number for (camera, number), _ in reads if not camera])
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
            CancelledError: If the threads that read were stopped.
        """
        errors: dict[Key, DaliStreamError] = {}
        for batch in self._ahead.due():
            for key in filter(self._account.is_coming, batch.keys):
                try:
                    result = self._account.take(key)
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
        self._ahead.make_room_for_now(0)
        self._drop_evicted()
        if self._account.free + self._limits.more < 0:
            room, taken = self._limits.room + self._limits.more, sum(self._account.bytes_by_kind)
            larger = 2 * (taken + self._limits.more)  # rows and indices get up to half of the budget, beside encoded video
            raise MemoryBudgetError(
                f"memory_budget leaves {room} bytes for rows, indices and encoded video, but the rows and indices of one batch "
                f'take {taken}. Use a larger memory_budget, such as "{budget_text(larger)}", or a smaller batch_size'
            )
        for episode in self._ahead.next.episodes if errors else ():
            if failed := [errors[key] for key in (("", episode), *self._ahead.keys_of_indices(episode)) if key in errors]:
                self._open_failed(episode, failed[0])
        for batch in self._ahead.due():
            for episode in batch.episodes:
                if episode in self._rows and self._has_indices(episode):
                    self.table.open(self._located(episode))
        self._ahead.opened()

    def index(self, camera: str, episode: int) -> VideoIndex:
        """Return the index of an episode's file. Raises DecodeError if the file or the episode cannot be read, see `failed`."""
        if episode in self.failed:
            raise DecodeError(str(self.failed[episode]))
        return self._indices.of(camera, episode, self.store)

    def _submit(self, key: Key, batch: BatchAhead) -> bool:
        """Begin the read of rows or of an index. Return whether it reads an index again."""
        camera, number = key
        # For the same batch, rows and indices precede blocks of video, whose priority is (batch, 1).
        priority = self._ahead.first_waiting(batch.number), 0
        if camera:
            again = key in self._read_before
            self._read_before.add(key)
        else:
            again = bool(self._read_in[number] == batch.epoch)
            self._read_in[number] = batch.epoch
        read = self._read_index if camera else self._read_rows
        self._account.set_read(key, self._fetchers.submit(read, key, batch.number, again, priority=priority))
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
        self._account.resize(key, size_of(index))
        self._ahead.expect_size(key[0], size_of(index))
        self._ahead.make_room_for_pinned(0)
        self._drop_evicted()

    def _keep_rows(self, key: Key, ahead: Sequence[Samples], rows: Columns, is_read: bool) -> None:
        """Keep the rows of an episode, and those of other episodes that the same read has decoded.

        Args:
            key: Key of the rows.
            ahead: Batches whose other episodes are kept, if they fit.
            rows: Rows of the episode.
            is_read: Whether they were read from a file, and not taken from row groups in memory.
        """
        self._rows[key[1]] = rows
        self._account.resize(key, _bytes_of(rows) + self._ahead.table_bytes(key[1]))
        self._ahead.make_room_for_pinned(0)
        self._drop_evicted()
        others = {e for e in self._reader.beside(key[1]) if ("", e) not in self._account} if is_read else None
        if not others:
            return
        for episode in dict.fromkeys(np.concatenate([samples.episode for samples in ahead]).tolist()):  # most urgent first
            size = self._ahead.estimate(("", episode))
            if episode in others and size <= self._account.free:  # nothing is evicted for them
                with suppress(DaliStreamError):  # broken rows are an error once a batch needs them
                    if (own := self._reader.read_kept(episode)) is None:  # its row groups were evicted meanwhile
                        return
                    self._rows[episode] = own
                    self._account.add(("", episode), size, is_used=False)

    def _drop_evicted(self) -> None:
        """Drop the rows and indices that `LookAhead` has evicted. Call this before anything is added."""
        for camera, number in self._account.take_evicted():
            if camera:
                del self._indices.cached[camera, number]
            elif self._rows.pop(number, None) is None:  # the episode is open, so its rows are in the table
                self._close(number)

    def _close(self, episode: int) -> None:
        self._close_video(episode)  # before the table, in which it looks up the blocks and their next uses
        self.table.close(episode)
        for frames in self._on_disk.values():
            frames.close_episode(episode)

    def _forget(self, key: Key) -> None:
        """Make sure that repeating a failed read does not count as reading again."""
        if key[0]:
            self._read_before.discard(key)
        else:
            self._read_in[key[1]] = NONE

    def _has_indices(self, episode: int) -> bool:
        """Return whether the indices of an episode's video files have been read."""
        return all(key in self._account and not self._account.is_coming(key) for key in self._ahead.keys_of_indices(episode))

    def _open_failed(self, episode: int, error: DaliStreamError) -> None:
        """Open an episode that cannot be read: its frames have no packets, and its rows are undefined."""
        self.failed[episode] = error
        self._rows.pop(episode, None)
        if ("", episode) in self._account:
            self._account.remove(("", episode))
        if self.table.is_open(np.array(episode)):
            self._close(episode)
        nothing = np.full(int(self._source.lengths[episode]), NONE, np.int64)
        self.table.open(OpenEpisode(episode, dict.fromkeys(self._source.cameras, Located(nothing, nothing))))

    def _located(self, episode: int) -> OpenEpisode:
        """Locate the frames of an episode whose rows were read."""
        source, rows, block = self._source, self._rows.pop(episode), self._limits.block
        cameras = {c: locate(source, c, episode, rows, self._index_or_none(c, episode), block) for c in source.cameras}
        for camera, frames in self._on_disk.items():
            feature, located = source.part_of(episode).features.get(camera), cameras[camera]
            images = rows[camera] if feature is not None and feature.is_image else None
            index = self._index_or_none(camera, episode)
            stored = frames.open_episode(episode, self.store, index, images, located.packet)
            cameras[camera] = replace(located, stored=stored)
        return OpenEpisode(episode, cameras, rows)

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
