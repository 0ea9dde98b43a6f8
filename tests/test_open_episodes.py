"""Opening of episodes ahead of the batches that need them, if reads fail."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.opened import open_episodes

from dali_stream import Dataset, StorageError
from dali_stream.lerobot.row_memory import Found
from dali_stream.lerobot.rows import RowReader
from dali_stream.order import Order
from dali_stream.schedule.opening import Opening, Storage
from dali_stream.schedule.samples import Samples


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
