"""Open episodes, for tests of what uses them."""

from __future__ import annotations

from typing import Any

import numpy as np

from dali_stream import Dataset
from dali_stream.cache.indices import IndexCache
from dali_stream.cache.open_episodes import OpenEpisodes, ReadLimits
from dali_stream.lerobot.row_memory import RowMemory
from dali_stream.observe.counters import Counters
from dali_stream.order import Order
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


def open_all(dataset: Dataset) -> tuple[OpenEpisodes, list[OpenEpisode]]:
    """Open all episodes of a dataset. They are read in the thread of the caller."""
    table = Recorded(dataset.lengths, dataset.cameras)
    source, reads = dataset.source, (dataset.data_store.session(), Workers("", 0), RowMemory())
    indices, limits = IndexCache(source), ReadLimits(1 << 40)
    episodes = OpenEpisodes(source, limits, indices, *reads, table, table.close, False, {}, Counters())
    numbers = np.arange(len(dataset.lengths))
    batch = Samples(0, 0, Order(dataset.lengths), numbers, episode=numbers, frame=np.zeros_like(numbers), padded=0)
    episodes.read_ahead([batch])
    episodes.open([batch])
    return episodes, table.opened
