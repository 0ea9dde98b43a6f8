"""Opening of episodes ahead of the batches that need them, if reads fail or return more, and blocks of their video."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.datasets import build
from support.opened import open_episodes

from dali_stream import Dataset, StorageError
from dali_stream.cache.video import BlockCache
from dali_stream.lerobot.row_memory import Found
from dali_stream.lerobot.rows import RowReader
from dali_stream.order import Order
from dali_stream.schedule.opening import Opening, Storage
from dali_stream.schedule.samples import Samples
from dali_stream.schedule.video import Fetch
from dali_stream.storage import LocalStore
from dali_stream.workers import Workers


@pytest.fixture
def opened(odd: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int, dict[int, int]], list[int]]:
    """Function that opens what batch n needs, where batch n shows episode n, and returns the opened episodes.

    Its second argument is {episode: number of its reads that still fail}.
    """
    dataset, failures = Dataset(odd, cameras=[]), dict[int, int]()
    opening = Opening(Storage({}, dataset.lengths, 100, 0, {}, 1 << 20, look_ahead=16))
    episodes, read = open_episodes(opening, dataset), RowReader.read
    batches = [
        Samples(n, 0, Order(dataset.lengths), np.array([n]), np.array([n]), np.array([0]), 0)
        for n in range(len(dataset.lengths))
    ]

    def fail(self: RowReader, episode: int) -> Found:
        if failures.get(episode):
            failures[episode] -= 1
            raise StorageError("the server is away")
        return read(self, episode)

    monkeypatch.setattr(RowReader, "read", fail)

    def step(number: int, fails: dict[int, int]) -> list[int]:
        failures.update(fails)
        ahead = batches[number : number + 1 + opening.horizon(number)]
        episodes.begin(ahead)
        numbers = [episode.number for episode in episodes.finish(ahead)[0]]
        opening.advance()
        return numbers

    return step


def test_a_read_ahead_that_fails_is_repeated_for_its_batch(opened: Callable[[int, dict[int, int]], list[int]]) -> None:
    assert opened(0, {}) == [0]
    assert opened(1, {2: 1}) == [1, 3], "batch 1 does not need episode 2"
    assert opened(2, {}) == [2]
    assert opened(3, {}) == []


def test_a_read_that_fails_again_for_its_batch_is_an_error(opened: Callable[[int, dict[int, int]], list[int]]) -> None:
    assert opened(0, {}) == [0]
    assert opened(1, {2: 2}) == [1, 3]
    with pytest.raises(StorageError, match="the server is away"):
        opened(2, {})


@pytest.mark.parametrize("shown", [[0], [0, 3]])
def test_rows_of_later_batches_that_a_read_returns_as_well_are_kept(tmp_path: Path, shown: list[int]) -> None:
    """8 episodes share a row group. Those of the batches ahead are opened without reading it again, and others are dropped."""
    dataset = Dataset(build(tmp_path / "set", [5] * 8, {}, rows_per_group=40))
    opening = Opening(Storage({}, dataset.lengths, 100, 0, {}, 1 << 20))
    episodes = open_episodes(opening, dataset)
    batches = [
        Samples(n, 0, Order(dataset.lengths), np.array([n]), np.array([episode]), np.array([0]), 0)
        for n, episode in enumerate(shown)
    ]
    episodes.begin(batches[:1])
    [only] = episodes.finish(batches)[0]
    assert only.number == 0
    sizes = sum(values.nbytes for values in only.columns.values()) * 5 // 4
    assert opening.items.bytes_by_kind == (len(shown) * sizes, 0)
    opening.advance()
    for batch in batches[1:]:
        assert opening.request([batch]) == [], "its rows are in memory"
        assert [each.number for each in episodes.finish([batch])[0]] == [3]


def test_a_file_that_became_shorter_while_its_blocks_were_fetched_ends_there(tmp_path: Path) -> None:
    """Bytes after the end of the file are missing, instead of being those of another block."""
    data = bytes(range(100))
    (tmp_path / "video.mp4").write_bytes(data)
    store = LocalStore(str(tmp_path))
    cache = BlockCache(store, Workers("", 0), lambda camera, episode: "video.mp4")
    names = [("top", 0, number) for number in range(3)]
    cache.fetch(0, [Fetch(0, "top", 0, 0, [(10, 40)])])
    os.truncate(tmp_path / "video.mp4", 60)
    cache.fetch(0, [Fetch(0, "top", 0, 1, [(40, 70)]), Fetch(0, "top", 0, 2, [(70, 90)])])
    view = cache.view(0, names)["top"]
    assert view.read("video.mp4", 20, 50) == data[20:50]
    (tmp_path / "video.mp4").write_bytes(data)
    assert view.read("video.mp4", 20, 90) == data[20:60]
