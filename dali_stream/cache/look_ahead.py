"""Batches ahead whose rows and indices are pinned, and the memory that these take.

The look-ahead grows with the number n of batches that were planned, so that the first batches do not wait for the reads of many
others. Batch n waits for the reads of batches up to n + min(GROWTH · n, look_ahead). By then, reads may have begun for batches
up to n + min(2 · GROWTH · n, 5/4 · look_ahead). The second batch is planned only after the encoded video of the first one has
been fetched.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from dali_stream.cache.account import Key, MemoryAccount
from dali_stream.checks.arrays import NONE
from dali_stream.lerobot.source import Source
from dali_stream.schedule.budget import GROWTH
from dali_stream.schedule.episodes import ROW_SPARE
from dali_stream.schedule.samples import Samples


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


class BatchAhead(NamedTuple):
    """Batch that is planned later and whose reads have begun, with its episodes, and the rows and indices that it pins."""

    number: int
    epoch: int
    episodes: list[int]
    keys: list[Key]


class LookAhead:
    """Batches whose reads have begun. Their rows and indices are pinned in memory, and others are evicted for them.

    Args:
        source: Episodes.
        limits: Limits of the memory and of the look-ahead.

    Attributes:
        account: Sizes of the rows and indices that are in memory or being read, and which of them were evicted.
    """

    def __init__(self, source: Source, limits: ReadLimits) -> None:
        self._lengths, self._dataset_of, self._limits = source.lengths, source.dataset_of, limits
        self.account = MemoryAccount(limits.room, limits.index_share)
        self._video_file = {camera: videos.file for camera, videos in source.videos.items()}
        self._row_bytes = source.row_bytes_of * ROW_SPARE[0] // ROW_SPARE[1] + limits.table_bytes  # by dataset
        self._index_bytes = dict(limits.index_bytes)
        self._batches: deque[BatchAhead] = deque()
        self._due = self._requested = NONE  # last batch whose episodes are open, and last one whose reads have begun
        self._retry = 0  # first batch for which reading ahead is tried again, after the memory was full

    @property
    def next(self) -> BatchAhead:
        """The batch that is planned next."""
        return self._batches[0]

    def horizon(self, number: int) -> int:
        """Return the number of batches after the next batch, `number`, whose reads may begin."""
        # This is farther than `_last_due`, so that reads begin some batches before the planner waits for them.
        return min(2 * GROWTH * number, self._limits.look_ahead * 5 // 4)

    def first_waiting(self, batch: int) -> int:
        """Return the number of the first batch that waits for the reads of a batch."""
        # Smallest n >= the next batch with batch <= n + min(GROWTH * n, look_ahead), see `_last_due`.
        return max(self.next.number, batch - self._limits.look_ahead, -(-batch // (1 + GROWTH)))

    def extend(self, ahead: Sequence[Samples]) -> list[tuple[Key, BatchAhead]]:
        """Pin the rows and indices of the next batches, and add those that are missing to `account`. Evict others for them.

        Args:
            ahead: Next batch, and `horizon` batches after it.

        Returns:
            Keys of the rows and indices to read, each with the batch that needs it.
        """
        reads: list[tuple[Key, BatchAhead]] = []
        now = ahead[0].number
        while self._batches and self.next.number < now:
            self.account.unpin(self._batches.popleft().keys)
        for samples in ahead:
            if samples.number > now and (samples.number <= self._requested or now < self._retry):
                continue
            # The next batch is checked even if its reads have begun, since a failed read is repeated for it. Other batches are
            # pinned before room is made, so that none of their own rows and indices are evicted for missing ones.
            batch = self.next if samples.number <= self._requested else self._pin(samples)
            missing = [key for key in batch.keys if key not in self.account]
            sizes = [self.estimate(key) for key in missing]
            if not self.account.make_room(sum(sizes)):
                if batch.number == now:
                    self.make_room_for_now(sum(sizes))  # the sizes are estimates, so only `OpenEpisodes.open` raises an error
                else:
                    self._unpin_last()
                    # Memory is freed when batches before this one are planned. Trying again only after a quarter of them avoids
                    # attempts that would fail.
                    self._retry = now + 1 + (samples.number - now) // 4
                    break
            for key, size in zip(missing, sizes, strict=True):
                self.account.add(key, size)
                reads.append((key, batch))
        return reads

    def due(self) -> list[BatchAhead]:
        """Return the next batch, and the batches that became due when it became the next one."""
        # The episodes of batches up to `_due` were opened before. The next batch is returned again, since its reads may have
        # failed, or it may have been removed from the look-ahead and added again. In both cases `extend` has returned its
        # reads again.
        last = self._last_due()
        later = itertools.takewhile(lambda batch: batch.number <= last, itertools.islice(self._batches, 1, None))
        return [self.next, *(batch for batch in later if batch.number > self._due)]

    def opened(self) -> None:
        """Note that the episodes of the batches that are due were opened."""
        self._due = max(self._due, self._last_due())

    def expect_size(self, camera: str, size: int) -> None:
        """Expect other files of a camera to have an index of this size in bytes. A broken one has size 0, and says nothing."""
        if size:
            self._index_bytes[camera] = size

    def keys_of_indices(self, episode: int) -> list[Key]:
        """Return the keys of the indices of an episode's video files."""
        return [(camera, int(files[episode])) for camera, files in self._video_file.items() if files[episode] != NONE]

    def table_bytes(self, episode: int) -> int:
        """Return the memory of an episode's entries in the `EpisodeTable`, without its columns, in bytes."""
        return int(self._lengths[episode]) * self._limits.table_bytes

    def make_room_for_now(self, need: int) -> None:
        """Make room for the next batch. Evict rows and indices of later batches if necessary.

        If even that is not enough, rows and indices exceed their memory at the cost of encoded video.
        """
        self.make_room_for_pinned(need)
        self.account.make_room(need, as_far_as_possible=True)

    def make_room_for_pinned(self, need: int) -> None:
        """Make room. If the pinned batches take too much, read less far ahead."""
        while not self.account.make_room(need) and len(self._batches) > 1:
            self._unpin_last()

    def _last_due(self) -> int:
        """Return the last batch whose reads must be complete before the next batch is planned."""
        now = self.next.number
        return min(now + min(GROWTH * now, self._limits.look_ahead), self._requested)

    def _pin(self, samples: Samples) -> BatchAhead:
        """Add a batch, and pin its rows and indices."""
        episodes = sorted(set(samples.episode.tolist()))  # faster than `np.unique` for so few
        keys: list[Key] = [("", episode) for episode in episodes]
        for camera, files in self._video_file.items():
            keys += [(camera, file) for file in sorted(set(files[episodes].tolist())) if file != NONE]
        batch = BatchAhead(samples.number, samples.epoch, episodes, keys)
        self.account.pin(keys)
        self._batches.append(batch)
        self._requested = batch.number
        return batch

    def _unpin_last(self) -> None:
        """Remove the last batch. `extend` adds it again later."""
        batch = self._batches.pop()
        self.account.unpin(batch.keys)
        self._requested = batch.number - 1

    def estimate(self, key: Key) -> int:
        """Return the approximate size of rows or of an index in bytes."""
        camera, number = key
        if camera:
            return self._index_bytes.get(camera, 0)
        return int(self._lengths[number] * self._row_bytes[self._dataset_of[number]])
