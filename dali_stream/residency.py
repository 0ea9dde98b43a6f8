"""What batches are made from: the rows, the video indices and, of remote files, the encoded video of the episodes in use.

Rows lie in an arena; a camera's frames are one more column of it: the sample in the episode's MP4 that shows each row.
Encoded pictures of local files stay where they are and are read when a clip is packed. Of remote ones they come ahead of
time (see `encoded`), and so do rows and indices: `expect` has them fetched, `load` waits for them.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dali_stream import windows
from dali_stream.arena import Arena, Columns
from dali_stream.blocks import BLOCK
from dali_stream.counters import Counters
from dali_stream.dataset import Dataset
from dali_stream.encoded import Encoded
from dali_stream.errors import DecodeError
from dali_stream.rows import RowReader
from dali_stream.storage import Store
from dali_stream.storage.retry import PER_HOST
from dali_stream.tables import Tables
from dali_stream.video.table import LACKING, SampleTable
from dali_stream.video.timing import find_samples
from dali_stream.workers import Workers

Int64 = npt.NDArray[np.int64]
_log = logging.getLogger("dali_stream")
SAMPLE = "sample in the video of "  # prefix of the columns that map rows to samples
UNMAPPED = -2  # nobody has looked yet
# Threads. While the pools fill, a batch misses blocks all over them, and waits for as many round trips as these do not do at
# once: at 50 ms 16 threads bring 21 MB/s, however fast the network is.
FETCHERS = PER_HOST
FETCHERS_AHEAD = 10
HEADROOM = 16  # the share of the budget that nothing is planned for


Samples = dict[str, npt.NDArray[np.int32]]  # per camera, of one episode


class _Fetched(NamedTuple):
    rows: Columns
    samples: Samples


class Coming(NamedTuple):
    """What will be asked of an episode in an epoch: these frames, from batch `number` on."""

    number: int
    epoch: int
    frames: Int64


def row_share(dataset: Dataset, budget: int) -> int:
    """Bytes for rows: a quarter beside encoded video in memory, and else all but a quarter for indices."""
    return budget // 4 if dataset.data_store.remote and dataset.videos else budget - budget // 4


def block_bytes(budget: int, pictures: int) -> int:
    """Bytes of a block of encoded video: small, where a batch of them would fill the budget."""
    return min(BLOCK, budget // 32 // pictures)


class Residency:
    """What is at hand. Used by one thread, the planner, but for `store`, which is for all.

    Args:
        dataset: the selected part of a dataset.
        budget: bytes that all of it may take. Rows of local data, and of data without video, get three quarters
            and indices one; else they get one quarter each at most, and encoded video all that they leave.
        tables: the indices, which outlive this.
        windows: per camera, the frames shown for a sample, relative to it.
        batch_size: samples of a batch.
        counters: what to add to.

    Attributes:
        store: where encoded video is to be read.
    """

    def __init__(
        self,
        dataset: Dataset,
        budget: int,
        tables: Tables,
        windows: dict[str, Int64],
        batch_size: int,
        counters: Counters,
    ) -> None:
        self._dataset, self._budget, self._tables, self._windows = dataset, budget, tables, windows
        self._counters = counters
        remote = dataset.data_store.remote
        self._row_budget = row_share(dataset, budget)
        self._arena = Arena(dataset.lengths, self._row_budget)
        self._source = dataset.data_store.session()
        self._reader = RowReader(dataset, self._source, self._count_needed if remote else None, self._row_budget)
        self._fetchers = Workers("dali_stream fetch", FETCHERS, FETCHERS_AHEAD) if remote else None
        self._fetching: dict[int, tuple[int, Future[_Fetched]]] = {}  # per episode, the epoch it is for
        self._arrived: OrderedDict[int, Columns] = OrderedDict()  # rows that came along in a row group; the oldest go
        self._lock = threading.Lock()
        self._counted: set[object] = set()  # what has been needed in this epoch
        self._expected: dict[int, set[int]] = {}
        self._missing_tables: dict[tuple[str, int], Future[SampleTable]] = {}
        self._epoch = self._number = 0
        self._encoded = None
        if self._fetchers:
            pictures = batch_size * max((len(windows.get(camera, (0,))) for camera in dataset.videos), default=1)
            self._encoded = Encoded(self._source, self._fetchers, self._room, counters, block_bytes(budget, pictures))
        self.store: Store = self._encoded or self._source

    # ---- ahead of time

    def expect(self, number: int, epoch: int, episode: Int64, served: Callable[[int], Int64]) -> None:
        """Batch `number` will show these episodes: has them fetched, the first first. Local data has no need.

        `served` gives the frames of an episode that all batches of the epoch together will ask for.
        """
        if self._fetchers is None:
            return
        expected = self._expected.setdefault(epoch, set())
        for e in dict.fromkeys(episode.tolist()):
            if e not in expected:
                expected.add(e)
                self._expect(e, Coming(number, epoch, served(e)))

    def room_ahead(self) -> bool:
        """Whether more may be fetched that `load` has not asked for yet."""
        return self._fetchers is not None and self._bytes_of(self._fetching) < self._row_budget // 4

    def turn(self, epoch: int, number: int) -> None:
        """The batches from here on are of this epoch; `number` counts batches over all epochs."""
        self._number = number
        if epoch != self._epoch and self._encoded:
            self._encoded.turn(epoch)
            with self._lock:
                self._counted.clear()
            self._expected = {e: episodes for e, episodes in self._expected.items() if e >= epoch}
            self._fetching = {e: fetching for e, fetching in self._fetching.items() if fetching[0] >= epoch}
        self._epoch = epoch

    # ---- for the batch that is made now

    def load(self, episodes: Int64) -> None:
        """Makes the rows of these episodes resident; others go where the budget wants it, the longest unused first.

        Raises:
            DatasetError: rows are missing or broken.
            StorageError: they cannot be fetched.
            MemoryBudgetError: these episodes alone exceed the budget.
        """
        needed = set(episodes.tolist())
        missing = [episode for episode in sorted(needed) if episode not in self._arena]
        coming = {episode: self._fetched(episode) for episode in missing} if self._fetchers else {}
        for episode in missing:
            if episode in coming:
                fetched = coming[episode].result()
                self._admit(episode, fetched.rows, needed)
                self._map_rows(episode, fetched.samples)
            elif episode not in self._arena:
                for found, columns in self._reader.read(episode).items():
                    if found not in self._arena:
                        self._admit(found, columns, needed)
        # Indices that the budget did not keep come again, for this batch alone.
        self._missing_tables = self._read_tables(needed, self._number) if self._fetchers else {}
        self._read_again(len(self._missing_tables))
        for episode in sorted(needed):
            self._map_rows(episode, {})
            self._arena.touch(episode)
        if self._encoded:
            self._encoded.shrink()

    def gather(self, key: str, episode: Int64, frame: Int64) -> npt.NDArray[Any]:
        """Values of a feature: `episode` is (B,), `frame` (B,) or (B, T); the result has the shape of `frame` in front."""
        return self._arena.gather(key, episode, frame)

    def samples(self, camera: str, episode: Int64, frame: Int64) -> Int64:
        """Samples that show these (B, T) frames in their episodes' files; `LACKING` where nothing is shown then."""
        return self.gather(SAMPLE + camera, episode, frame).astype(np.int64)

    def table(self, camera: str, episode: int) -> SampleTable:
        """The sample table of the file that holds an episode. Raises DecodeError where it has none."""
        future = self._missing_tables.get((camera, episode))
        if future is not None:
            return future.result()
        if not self._tables.has(camera, episode):
            self._read_again(1)
        return self._tables.of(camera, episode, self._source)

    def hold(self, camera: str, uses: Iterable[tuple[int, SampleTable, Int64]]) -> Callable[[], None]:
        """Has the encoded video of these (episode, table, samples) stay until the returned function is called."""
        if self._encoded is None:
            return lambda: None
        named = ((table, self._cuts(camera, episode, table), samples) for episode, table, samples in uses)
        return self._encoded.hold((self._number, 1), self._epoch, named)

    def resident_bytes(self) -> int:
        """Memory that all of it takes."""
        encoded = self._encoded.nbytes if self._encoded else 0
        return self._arena.nbytes + self._tables.nbytes + self._ahead_bytes() + encoded

    def stop(self) -> None:
        """Wakes whoever waits for what is fetched, with an error. Does not wait itself."""
        if self._fetchers and self._encoded:
            self._fetchers.stop()
            self._encoded.stop()
            self._source.close()

    def join(self) -> None:
        """Waits for the threads to end, after `stop`."""
        if self._fetchers:
            self._fetchers.join()

    # ---- fetching

    def _read_tables(self, episodes: Iterable[int], number: int) -> dict[tuple[str, int], Future[SampleTable]]:
        """Has the indices of these episodes' files read that are not at hand, all at once."""
        assert self._fetchers is not None  # local data is read when it is needed
        missing = (key for key in itertools.product(self._dataset.videos, episodes) if not self._tables.has(*key))
        return {key: self._fetchers.submit(self._tables.of, *key, self._source, priority=(number, 0)) for key in missing}

    def _read_again(self, count: int) -> None:
        """Counts indices that were there when the rows of their episodes were, and that the budget did not keep."""
        if count and not self._counters.indices_read_again:
            _log.warning(
                "memory_budget leaves %d bytes for the indices of video files, which is less than those of the episodes in use "
                "take: they are read more than once. The order stays the same. Give a larger memory_budget or a smaller "
                "episode_pool_size", self._tables.budget,
            )  # fmt: skip
        self._counters.indices_read_again += count

    def _fetched(self, episode: int) -> Future[_Fetched]:
        """The rows of an episode that is needed now."""
        _, future = self._fetching.pop(episode, (0, None))
        if future is None or (future.done() and future.exception()):  # what failed ahead of time gets its chance
            self._fetch(episode, self._number, self._epoch)
            _, future = self._fetching.pop(episode)
        return future

    def _fetch(self, episode: int, number: int, epoch: int) -> None:
        assert self._fetchers is not None  # local data is read when it is needed
        self._read_tables([episode], number)  # the job below shares what this is at
        self._fetching[episode] = epoch, self._fetchers.submit(self._fetch_rows, episode, priority=(number, 0))

    def _expect(self, episode: int, coming: Coming) -> None:
        assert self._fetchers is not None  # see `expect`
        known: Samples | Future[_Fetched]
        if episode in self._arena:
            known = {camera: self._arena.rows(SAMPLE + camera, episode).copy() for camera in self._dataset.videos}
        else:
            if episode not in self._fetching:
                self._fetch(episode, coming.number, coming.epoch)
            known = self._fetching[episode][1]
            self._fetching[episode] = coming.epoch, known
        self._fetchers.submit(self._order_video, episode, known, coming, priority=(coming.number, 0))

    def _fetch_rows(self, episode: int) -> _Fetched:
        """Fetchers: rows of an episode, and the samples that show them."""
        rows = self._read_rows(episode)
        samples = {camera: self._map(camera, episode, rows["timestamp"]) for camera in self._dataset.videos}
        if self._encoded:
            self._encoded.shrink()  # the room that rows and indices have taken
        return _Fetched(rows, samples)

    def _read_rows(self, episode: int) -> Columns:
        """Fetchers: the rows of one episode. Others of its row group are kept, as far as there is room for them."""
        with self._lock:
            found = self._arrived.pop(episode, None)
        if found is None:
            rows = self._reader.read(episode)
            found = rows[episode]
            self._keep({other: columns for other, columns in rows.items() if other != episode and other not in self._arena})
        return found

    def _keep(self, rows: dict[int, Columns]) -> None:
        """Rows that came along, in arrays of their own: views would hold on to the whole row group."""
        most, kept = self._row_budget // 4, 0
        with self._lock:
            for episode, columns in rows.items():
                size = self._bytes_of([episode])
                if (kept := kept + size) > most:
                    break
                while self._arrived and self._bytes_of(self._arrived) + size > most:
                    self._arrived.popitem(last=False)
                self._arrived[episode] = {key: np.array(values) for key, values in columns.items()}

    def _count_needed(self, key: object, count: int) -> None:
        """Counts what an epoch needs once, however often it is read."""
        with self._lock:
            fresh = key not in self._counted
            self._counted.add(key)
        if fresh:
            self._counters.add(needed_bytes=count)

    def _order_video(self, episode: int, known: Samples | Future[_Fetched], coming: Coming) -> None:
        """Fetchers: has the encoded video fetched that an episode will need. Its rows were asked for before this."""
        assert self._encoded is not None  # see `expect`
        for camera, shown in (known.result().samples if isinstance(known, Future) else known).items():
            with contextlib.suppress(DecodeError):  # reported when a frame of it is asked for
                table = self._tables.of(camera, episode, self._source)
                offsets = self._windows.get(camera, np.zeros(1, np.int64))
                frames, _ = windows.window(offsets, coming.frames, np.full(len(coming.frames), len(shown)))
                samples = shown[frames].astype(np.int64).reshape(-1)
                samples = samples[samples >= 0]
                self._encoded.expect((coming.number,), coming.epoch, table, self._cuts(camera, episode, table), samples)

    def _cuts(self, camera: str, episode: int, table: SampleTable) -> Callable[[], Int64]:
        def cuts() -> Int64:
            files = self._dataset.table.video[camera]
            episodes = files.rows(int(files.index[self._dataset.rows[episode]]))
            samples, _ = table.nearest(self._dataset.table.start[camera][episodes])
            return table.head[samples].astype(np.int64)

        return cuts

    def _room(self) -> int:
        """Bytes for encoded video. A part of the budget stays free for rows and indices that are about to come."""
        taken = self._arena.nbytes + self._tables.nbytes + self._ahead_bytes()
        return self._budget - self._budget // HEADROOM - taken

    def _bytes_of(self, episodes: Iterable[int]) -> int:
        """An estimate of what the rows of these episodes take."""
        return sum(int(self._dataset.lengths[episode]) for episode in list(episodes)) * self._dataset.row_bytes

    def _ahead_bytes(self) -> int:
        """Rows that have come or will, and are not yet asked for."""
        return self._bytes_of(self._fetching) + self._bytes_of(self._arrived)

    # ---- rows and samples

    def _admit(self, episode: int, columns: Columns, needed: set[int]) -> None:
        unmapped = np.full(len(columns["timestamp"]), UNMAPPED, np.int32)
        with self._lock:
            self._arrived.pop(episode, None)
        self._arena.admit(episode, columns | {SAMPLE + camera: unmapped for camera in self._dataset.videos}, needed)

    def _map_rows(self, episode: int, known: dict[str, npt.NDArray[np.int32]]) -> None:
        """Fills in the samples of an episode's rows, unless that has been done."""
        for camera in self._dataset.videos:
            column = self._arena.rows(SAMPLE + camera, episode)
            if column[0] == UNMAPPED:
                timestamp = self._arena.rows("timestamp", episode)
                column[:] = known[camera] if camera in known else self._map(camera, episode, timestamp)

    def _map(self, camera: str, episode: int, timestamp: npt.NDArray[np.float32]) -> npt.NDArray[np.int32]:
        """Per row, the sample that is its frame."""
        try:
            table = self._tables.of(camera, episode, self._source)
        except DecodeError:  # reported when a frame of it is asked for
            return np.full(len(timestamp), LACKING, np.int32)
        interval = self._dataset.table.interval(camera, self._dataset.rows[episode])
        return find_samples(table, interval, timestamp, self._dataset.fps).astype(np.int32)
