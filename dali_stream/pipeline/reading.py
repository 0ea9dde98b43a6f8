"""Reader that carries out the schedule: it opens episodes, and fetches encoded video."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from concurrent.futures import Future, wait

from dali_stream.cache.frames_on_disk import FramesOnDisk
from dali_stream.cache.look_ahead import ReadLimits
from dali_stream.cache.open_episodes import OpenEpisodes
from dali_stream.cache.video import BlockCache
from dali_stream.checks.arguments import budget_text
from dali_stream.lerobot.rows import RowMemory
from dali_stream.observe.counters import Counters
from dali_stream.order import Shuffle, has_consumers
from dali_stream.pipeline.config import Config
from dali_stream.schedule.budget import Parts, Sizes, look_ahead, reads_budget
from dali_stream.schedule.plan import BatchPlan, Schedule
from dali_stream.storage import Store
from dali_stream.storage.retry import PER_HOST
from dali_stream.system.workers import Workers

_log = logging.getLogger("dali_stream")
# Number of threads for remote data. While the caches fill, a batch needs many small blocks, so the number of parallel requests
# limits the rate: with round trips of 50 ms, 32 threads read 64 KiB blocks at 42 MB/s at most, however fast the network is.
FETCHERS = PER_HOST
_RESERVED = 8  # number of further threads. They read what a batch waits for while all others repeat failed reads ahead
_SOON = 256  # number of batches ahead whose episodes are kept if a read for another episode also returns their rows


class Reading:
    """Reader of the rows, indices and encoded video that the plans need.

    Only the planner's thread may call its methods, except for `stop` and `join`. It calls `start`, and then for each batch
    `read_ahead`, `open` and `fetch` in this order.

    Args:
        config: Configuration of the loader.
        sizes: Sizes of the dataset and of its batches.
        parts: Division of `memory_budget`.
        schedule: Schedule of the batches. Nothing else opens and closes episodes in its table.
        on_disk: {camera: its frames on disk}.
        counters: Counters to add to.

    Attributes:
        parts: See above.
        episodes: Open episodes.
        video: Encoded video of remote files.
        names: Result of `Source.names`, which `start` requests.
    """

    def __init__(
        self,
        config: Config,
        sizes: Sizes,
        parts: Parts,
        schedule: Schedule,
        on_disk: Mapping[str, FramesOnDisk],
        counters: Counters,
    ) -> None:
        source, remote = config.source, config.source.data_store.remote
        self.parts, self._schedule, self._counters = parts, schedule, counters
        # Without threads, `Workers` reads in the planner's thread, which is faster for local files.
        self._store = source.data_store.session()
        self._readers = Workers("dali_stream fetch", FETCHERS if remote else 0, reserved=_RESERVED if remote else 0)
        self._look_ahead = look_ahead(config.batches.batch_size) if remote else 0
        self.video = video = BlockCache(
            schedule,
            parts.block,
            self._look_ahead,
            self._store,
            self._readers,
            lambda key, episode: source.path(key, config.indices.file(key, episode)),
            counters,
        )

        # A method of this object would be a reference cycle, and keep rows and video in memory until a garbage collection.
        def close(episode: int) -> None:
            video.close(episode)  # before the table, in which it looks up the blocks and their next uses
            schedule.table.close(episode)

        self.episodes = OpenEpisodes(
            source,
            ReadLimits(
                room=parts.opened,
                more=parts.encoded - parts.opened,
                index_share=parts.indices,
                index_bytes={camera: index.nbytes for camera, index in sizes.indices.items()},
                table_bytes=config.table_bytes,
                look_ahead=self._look_ahead,
                block=parts.block if remote else None,
            ),
            config.indices,
            self._store,
            self._readers,
            RowMemory(at_once=parts.opened),
            schedule.table,
            close,
            config.max_substitutes is not None,
            on_disk,
            counters,
        )
        self._source = source
        self.names: Future[dict[str, list[dict[int, str]]]] = Future()
        self._first: list[Future[None]] = []  # fetches for the first batch
        self._remedies = _reread_remedies(
            reads_budget(parts, sizes), config.arguments.shuffle, remote, source.cache_dir is not None
        )

    def start(self) -> None:
        """Begin to read the names of the tasks."""
        self.names = self._readers.submit(self._source.names)

    def read_ahead(self, number: int) -> None:
        """Begin to read rows and indices for batch `number` and batches after it, and close episodes to make room for them.

        Local rows are read at once. Before the second batch, this waits for the encoded video of the first one. Batches in
        progress do not need open episodes: their rows have been copied, and the packets of their frames are known.
        """
        self._readers.set_due((number, 1))  # the priorities of rows and indices, and of video, that the batch waits for
        again = self.episodes.read_ahead(self._schedule.ahead(1 + self.episodes.horizon(number)))
        self._count_again("indices_read_again", again, "indices are read")
        wait(self._first)  # the encoded video of the first batch is fetched alone, so that training starts soon
        self._first = []

    def open(self) -> None:
        """Open the episodes of the next batch, and those of later batches that are due. Wait for their reads."""
        self.episodes.open(self._schedule.already_read(_SOON))  # `read_ahead` has read at least the next one
        # Encoded video may take the memory that rows and indices do not use. Their sizes are known now.
        self.video.others = sum(self.episodes.bytes_by_kind)
        self.video.room = self.parts.encoded - self.video.others

    def fetch(self, plan: BatchPlan) -> Mapping[str, Store]:
        """Begin to fetch the encoded video of a batch, and of batches after it.

        Returns:
            {camera: store from which the batch reads its encoded video}, without cameras whose files are read in place.

        Raises:
            MemoryBudgetError: If memory_budget does not hold the encoded video of the batch.
        """
        stores = self.video.request(plan.samples, plan.decoded, self._schedule.already_read(self._look_ahead))
        if not plan.samples.number:
            self._first = self.video.requests
        self._count_again("evicted_early", self.video.evicted_early, "bytes are fetched")
        self.video.evicted_early = 0
        return stores

    def stop(self) -> None:
        """Cancel all reads, without waiting. Threads that wait for a read get an error."""
        self._readers.stop()
        if self._store.remote:
            self._store.close()
        self._end_names()

    def join(self) -> None:
        """Wait for the threads to end, after `stop`."""
        while not self.names.done():
            wait([self.names], timeout=0.1)
            self._end_names()  # again, since the thread may have begun another read
        self._readers.join()

    def _end_names(self) -> None:
        """End the reads of names, which are made through the stores of the datasets, since these keep the names."""
        if not self.names.cancel() and not self.names.done():
            for part in self._source.parts:
                part.dataset.close()

    def _count_again(self, counter: str, count: int, what: str) -> None:
        """Count data that must be read again, since memory_budget did not hold it until its next use. Warn the first time.

        Args:
            counter: Name of the counter.
            count: Number to add.
            what: Subject and verb of the warning, such as "indices are read".
        """
        if count and not getattr(self._counters, counter):
            _log.warning(
                "memory_budget leaves %d bytes for rows, indices of video files and encoded video, which is less than the "
                "episodes in use need: %s more than once. The batches stay the same%s",
                *(self.parts.encoded, what, self._remedies),
            )
        self._counters.add(**{counter: count})


def _reread_remedies(larger: int | None, shuffle: Shuffle, remote: bool, cached: bool) -> str:
    """Return the end of a message that says how to avoid reading rows, indices or encoded video repeatedly.

    Args:
        larger: Memory budget that holds the rows, indices and encoded video in use, in bytes. None if a larger budget would
            not help.
        shuffle: Argument of the Loader.
        remote: Whether the dataset is read over a network.
        cached: Whether the dataset has a `cache_dir`.

    Returns:
        Text to append to a sentence. Empty if nothing would help.
    """
    remedies = [f'a larger memory_budget, such as "{budget_text(larger)}"'] if larger else []
    if has_consumers(shuffle):
        remedies.append("a smaller episode_pool_size for a new run")
    if shuffle == "global":
        remedies.append("shuffle=True for a new run, which draws from few episodes at a time")
    if remote and not cached:
        remedies.append("a cache_dir on a local disk")
    return f". Give {' or '.join(remedies)}" if remedies else ""
