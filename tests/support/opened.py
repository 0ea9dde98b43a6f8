"""Open episodes, for tests of what uses them."""

from __future__ import annotations

import numpy as np

from dali_stream import Dataset
from dali_stream.cache.indices import IndexCache
from dali_stream.cache.open_episodes import OpenEpisodes
from dali_stream.lerobot.row_memory import RowMemory
from dali_stream.observe.counters import Counters
from dali_stream.order import Order
from dali_stream.schedule.episodes import OpenEpisode
from dali_stream.schedule.opening import Opening, Storage
from dali_stream.schedule.samples import Samples
from dali_stream.system.workers import Workers


def open_episodes(opening: Opening, dataset: Dataset, memory: RowMemory | None = None) -> OpenEpisodes:
    """Return open episodes that are read in the thread of the caller."""
    store = dataset.data_store.session()
    source, memory = dataset.source, memory or RowMemory()
    return OpenEpisodes(opening, source, IndexCache(source), store, Workers("", 0), memory, None, Counters())


def open_all(dataset: Dataset) -> tuple[OpenEpisodes, list[OpenEpisode]]:
    """Open all episodes of a dataset."""
    files = {camera: videos.file for camera, videos in dataset.source.videos.items()}
    opening = Opening(Storage(files, dataset.lengths, 0, 0, {}, 1 << 40))
    episodes, numbers = open_episodes(opening, dataset), np.arange(len(dataset.lengths))
    batch = Samples(0, 0, Order(dataset.lengths), numbers, episode=numbers, frame=np.zeros_like(numbers), padded=0)
    episodes.begin([batch])
    opened = list(episodes.finish([batch])[0])
    for one in opened:
        episodes.table.open(one)
    return episodes, opened
