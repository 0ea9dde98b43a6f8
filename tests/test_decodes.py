"""Decodes per delivered frame of a Loader, against those of its schedule alone, as `benchmarks/decodes.py` counts them."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support.batches import check_identities
from support.datasets import TOP, VIDEO, read_lengths
from support.servers import Server

from dali_stream import DaliStreamError, Loader, Mixture
from dali_stream.pipeline.layout import Layout
from dali_stream.schedule.budget import divide, frames_budget, order_horizon
from dali_stream.schedule.episodes import EpisodeTable
from dali_stream.schedule.plan import Limits, Schedule
from dali_stream.schedule.samples import batches_of_rank

SETTINGS: dict[str, Any] = {"batch_size": 8, "image_size": (64, 80), "image_dtype": "uint8", "device": "cpu"}
GOP = 2  # of the demo dataset


@pytest.fixture(scope="module")
def decodes() -> Iterator[ModuleType]:
    """The module of the benchmarks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
        import decodes

        yield decodes


def scheduled(decodes: ModuleType, loader: Loader) -> list[Any]:
    """The work per delivered frame of two epochs, by the schedule of a Loader. Nothing is read or decoded."""
    config, layout = loader._config, Layout(loader._config, loader.routes)
    cameras, sizes = layout.cached, layout.sizes
    parts = divide(config.memory_budget, sizes)
    limits = Limits(parts.kept, config.in_progress, order_horizon(parts, sizes))
    read = batches_of_rank(config.order, config.batches, config.rank, 0, 0)
    windows, lengths = {key: config.windows.of(key) for key in cameras}, config.source.lengths
    schedule = Schedule(EpisodeTable(lengths, cameras), read, config.batches.largest, windows, limits, needed=layout.needed)
    return [decodes.decodes(schedule, lengths, GOP, config.batches.count(epoch)) for epoch in range(2)]


def decoded(loader: Loader) -> tuple[float, float]:
    """Stream an epoch. Return the decoded and the stored frames per delivered frame."""
    before = loader.stats()
    for _ in loader:
        pass
    grown = {key: value - before[key] for key, value in loader.stats().items() if isinstance(value, int)}
    return grown["decoded_frames"] / grown["frames"], grown["stored_frames"] / grown["frames"]


@pytest.mark.parametrize("ways", [(), ("remote", "disk")], ids=" ".join)
def test_frames_of_several_small_batches_share_a_clip(demo: Path, tmp_path: Path, ways: tuple[str, ...]) -> None:
    """While a thread decodes, the batches that wait for it are decoded together afterwards."""
    lengths, folder = read_lengths(demo), tmp_path if "disk" in ways else None
    options = SETTINGS | {"batch_size": 2, "image_size": None, "last_batch": "partial", "frame_cache": folder}
    with ExitStack() as stack:
        root = stack.enter_context(Server(demo)).url if "remote" in ways else demo
        loader = stack.enter_context(Loader(root, num_threads=1, in_process=True, **options))
        for batch in loader:
            check_identities(batch, TOP, None, lengths)
        stats = loader.stats()
    assert stats["frames"] == 2 * sum(lengths.values())  # of two cameras
    assert stats["decoded_frames"] / stats["clips"] > 8
    if "remote" in ways:
        assert stats["fetched_bytes"] < 1.1 * sum(path.stat().st_size for path in demo.rglob("*.*")), "nothing is fetched twice"


@pytest.mark.parametrize("on_error", ["raise", "substitute"])
def test_bytes_that_cannot_be_read_fail_the_same_samples_whatever_shares_their_clip(
    small: Path, monkeypatch: pytest.MonkeyPatch, on_error: str
) -> None:
    """The disk has an error in the middle of a file."""
    bad, pread = (small / VIDEO.format(TOP, 0)).stat().st_size * 6 // 10, os.pread

    def read(descriptor: int, count: int, start: int) -> bytes:
        if TOP in os.readlink(f"/proc/self/fd/{descriptor}") and start < bad + 10 and start + count > bad:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return pread(descriptor, count, start)

    monkeypatch.setattr(os, "pread", read)
    found = list[list[list[bool]]]()
    for prefetch in (None, 2):
        options = {"batch_size": 4, "num_threads": 1, "prefetch": prefetch, "on_error": on_error}
        delivered = list[list[bool]]()
        with Loader(small, in_process=True, seed=5, **SETTINGS | options) as loader, suppress(DaliStreamError):
            for batch in loader:
                delivered.append(batch["is_substitute"].tolist() if on_error == "substitute" else [])
        found.append(delivered)
    assert found[0] == found[1]
    assert (sum(map(sum, found[0])) > 0) == (on_error == "substitute")
    assert len(found[0]) > 3


@pytest.mark.slow
@pytest.mark.parametrize("changed", [{"memory_budget": 6 << 20}, {"memory_budget": 16 << 20}, {"consumers": 4}])
def test_a_loader_decodes_what_its_schedule_says(demo: Path, decodes: ModuleType, changed: dict[str, Any]) -> None:
    """In the first epoch, which decodes each frame at least once, and in the second, which finds some frames in memory."""
    with Loader(demo, prefetch=2, **SETTINGS | changed) as loader:  # few batches of the next epoch count for this one
        expected = scheduled(decodes, loader)
        found = [decoded(loader) for _ in range(2)]
    for planned, epoch, close in zip(expected, found, (0.1, 0.15), strict=True):
        assert tuple(planned) == pytest.approx(epoch, rel=close)
        assert epoch[1] <= epoch[0]
    assert min(found[0][0], expected[0].decoded) >= 1
    assert found[1][0] < found[0][0], "some frames of the first epoch are in memory"


def assert_later_epochs_decode_what_was_not_shown(loader: Loader, decodes: ModuleType) -> None:
    """With memory for all frames. No text says that later epochs decode nothing."""
    expected, found, texts = scheduled(decodes, loader), [], []
    for _ in range(3):
        found.append(decoded(loader))
        texts.append(str(loader.bottleneck()))
    assert loader._batch_source.keeps_all
    assert 0 < found[1][0] < found[0][0]
    assert tuple(expected[0]) == pytest.approx(found[0], rel=0.1)
    assert tuple(expected[1]) == pytest.approx(found[1], rel=0.25, abs=0.02)
    assert not any("decode nothing" in text for text in texts), texts


@pytest.mark.slow
def test_later_epochs_of_a_mixture_decode_what_earlier_ones_have_not_shown(demo: Path, decodes: ModuleType) -> None:
    parts = {"few": {"uri": demo, "episodes": [0]}, "many": {"uri": demo, "episodes": [1, 2, 3, 4, 5]}}
    with (
        closing(Mixture(parts, weights={"few": 3, "many": 1})) as mixture,
        Loader(mixture, prefetch=2, **SETTINGS) as loader,
    ):
        assert_later_epochs_decode_what_was_not_shown(loader, decodes)


def test_later_epochs_of_a_rank_decode_what_earlier_ones_have_not_shown(demo: Path, decodes: ModuleType) -> None:
    with Loader(demo, rank=1, world_size=4, prefetch=2, **SETTINGS) as loader:
        assert_later_epochs_decode_what_was_not_shown(loader, decodes)


def test_a_rank_with_memory_for_its_shard_decodes_it_once(demo: Path, decodes: ModuleType) -> None:
    """And so does the schedule alone. Memory for the frames of the rank is much less than for all frames."""
    options = SETTINGS | {"rank": 1, "world_size": 4, "prefetch": 2, "last_batch": "partial", "image_size": None}
    with Loader(demo, **options) as loader:
        for_all = frames_budget(Layout(loader._config, loader.routes).sizes)
    with Loader(demo, shuffle="sharded", **options) as loader:
        enough = frames_budget(Layout(loader._config, loader.routes).sizes)
        frames = 2 * len(Layout(loader._config, loader.routes).needed[TOP])
        assert frames == pytest.approx(2 * loader.dataset.num_frames / 4, rel=0.05)
    assert for_all - enough == pytest.approx(0.75 * 2 * loader.dataset.num_frames * 128 * 160 * 3, rel=0.1)
    with Loader(demo, shuffle="sharded", memory_budget=enough, **options) as loader:
        first, later = scheduled(decodes, loader)
        assert (first.stored, later.decoded) == (pytest.approx(1), 0)
        for _ in loader:
            pass
        after = loader.stats()["decoded_frames"]
        for _ in range(3):
            for batch in loader:
                check_identities(batch, TOP, None, read_lengths(demo))
        stats = loader.stats()
    assert stats["decoded_frames"] == after
    assert stats["stored_frames"] == frames
    assert after < 1.1 * frames, "GOPs at the cuts are decoded from their keyframes"
    with Loader(demo, shuffle="sharded", memory_budget=enough - 1, **options) as loader:
        next(iter(loader))
        assert not loader._batch_source.keeps_all


def test_the_end_of_the_first_epoch_tells_what_shards_save(demo: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Once, on rank 0, if the memory of all ranks holds the frames together. The remedy is followed."""
    caplog.set_level(logging.INFO, "dali_stream")

    def told(epochs: int = 2, **changed: Any) -> tuple[int, int]:
        caplog.clear()
        with Loader(demo, **{"world_size": 4, "rank": 0, "prefetch": 2} | SETTINGS | changed) as loader:
            for _ in range(epochs):
                before = loader.stats()["decoded_frames"]
                for _ in loader:
                    pass
            return caplog.text.count('A new run with shuffle="sharded"'), loader.stats()["decoded_frames"] - before

    with Loader(demo, shuffle="sharded", world_size=4, rank=0, prefetch=2, **SETTINGS) as loader:
        enough = frames_budget(Layout(loader._config, loader.routes).sizes)
    for memory in ({}, {"memory_budget": enough}):
        count, decoded = told(3, **memory)
        assert count == 1
        assert decoded > 0
        assert "the memory of the 4 ranks holds all decoded frames together" in caplog.text
        count, decoded = told(3, shuffle="sharded", last_batch="partial", **memory)
        assert (count, decoded) == (0, 0)
    for silent in ({"memory_budget": enough // 2}, {"rank": 1}, {"world_size": 1}, {"shuffle": "global"}, {"shuffle": False}):
        assert told(1, **silent)[0] == 0, silent
