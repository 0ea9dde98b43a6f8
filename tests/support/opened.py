"""Open episodes, for tests of what uses them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dali_stream import Dataset
from dali_stream.cache.indices import IndexCache
from dali_stream.cache.look_ahead import ReadLimits
from dali_stream.cache.open_episodes import OpenEpisodes
from dali_stream.lerobot.rows import RowMemory
from dali_stream.observe.counters import Counters
from dali_stream.schedule.episodes import EpisodeTable, OpenEpisode
from dali_stream.schedule.samples import Samples
from dali_stream.system.workers import Workers


class Recorded(EpisodeTable):
    """A table that notes the episodes that are opened."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.opened: list[OpenEpisode] = []

    def open(self, opened: OpenEpisode) -> None:
        self.opened.append(opened)
        super().open(opened)


def open_episodes(dataset: Dataset, limits: ReadLimits, memory: RowMemory | None = None) -> OpenEpisodes:
    """Episodes none of which is open yet. They are read in the thread of the caller."""
    table, source = Recorded(dataset.lengths, dataset.cameras), dataset.source
    store, fetchers = dataset.data_store.session(), Workers("", 0)
    reads = IndexCache(source), store, fetchers, memory or RowMemory()
    return OpenEpisodes(source, limits, *reads, table, lambda episode: None, False, {}, Counters())


def batch_of(dataset: Dataset, number: int, episodes: Sequence[int]) -> Samples:
    """The first frames of some episodes, as a batch."""
    first = np.zeros(len(episodes), np.int64)
    return Samples(number, 0, first, episode=np.array(episodes), frame=first, padded=0)


def open_all(dataset: Dataset) -> tuple[OpenEpisodes, list[OpenEpisode]]:
    """Open all episodes of a dataset."""
    episodes = open_episodes(dataset, ReadLimits(1 << 40))
    batch = batch_of(dataset, 0, range(len(dataset.lengths)))
    episodes.read_ahead([batch])
    episodes.open([batch])
    assert isinstance(episodes.table, Recorded)
    return episodes, episodes.table.opened
