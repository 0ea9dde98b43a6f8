"""Predicted decodes per delivered frame, against what a Loader decodes."""

from __future__ import annotations

import logging
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from support.batches import check_identities
from support.datasets import TOP, read_lengths

from dali_stream import Loader, Mixture
from dali_stream.schedule.budget import frames_budget
from dali_stream.tools.decodes import Decodes, decodes_of

SETTINGS: dict[str, Any] = {"batch_size": 8, "image_size": (64, 80), "image_dtype": "uint8", "device": "cpu"}


def predicted(dataset: Path, **changed: Any) -> tuple[Decodes, Decodes]:
    with Loader(dataset, **SETTINGS | changed) as loader:
        return decodes_of(loader._config, list(loader.routes))


@pytest.mark.slow
@pytest.mark.parametrize("changed", [{"memory_budget": 6 << 20}, {"memory_budget": 16 << 20}, {"consumers": 4}])
def test_predictions_are_what_a_loader_decodes(demo: Path, changed: dict[str, Any]) -> None:
    """In the first epoch, which decodes each frame at least once, and in the second, which finds some frames in memory."""
    expected = predicted(demo, **changed)
    found = []
    with Loader(demo, **SETTINGS | changed) as loader:
        for _ in range(2):
            before = loader.stats()
            for _ in loader:
                pass
            grown = {key: value - before[key] for key, value in loader.stats().items() if isinstance(value, int)}
            found.append(Decodes(*(grown[key] / grown["frames"] for key in ("decoded_frames", "stored_frames"))))
    for predicted_epoch, epoch, close in zip(expected, found, (0.1, 0.15), strict=True):
        assert tuple(predicted_epoch) == pytest.approx(tuple(epoch), rel=close)
        assert epoch.stored <= epoch.decoded
    first, later = found
    assert min(first.decoded, expected[0].decoded) >= 1
    assert later.decoded < first.decoded, "some frames of the first epoch are in memory"


def assert_later_epochs_decode_what_was_not_shown(loader: Loader) -> None:
    """With memory for all frames. No text says that later epochs decode nothing."""
    expected = decodes_of(loader._config, list(loader.routes))
    found, texts = [], []
    for _ in range(3):
        before = loader.stats()
        for _ in loader:
            pass
        after = loader.stats()
        found.append(Decodes(*((after[key] - before[key]) / (after["frames"] - before["frames"])
                               for key in ("decoded_frames", "stored_frames"))))  # fmt: skip
        texts.append(str(loader.bottleneck()))
    assert loader._source.keeps_all
    assert 0 < found[1].decoded < found[0].decoded
    assert tuple(expected[0]) == pytest.approx(tuple(found[0]), rel=0.1)
    assert tuple(expected[1]) == pytest.approx(tuple(found[1]), rel=0.25, abs=0.02)
    assert not any("decode nothing" in text for text in texts), texts


@pytest.mark.slow
def test_later_epochs_of_a_mixture_decode_what_earlier_ones_have_not_shown(demo: Path) -> None:
    parts = {"few": {"uri": demo, "episodes": [0]}, "many": {"uri": demo, "episodes": [1, 2, 3, 4, 5]}}
    with (
        closing(Mixture(parts, weights={"few": 3, "many": 1})) as mixture,
        Loader(mixture, prefetch=2, **SETTINGS) as loader,
    ):
        assert_later_epochs_decode_what_was_not_shown(loader)


def test_later_epochs_of_a_rank_decode_what_earlier_ones_have_not_shown(demo: Path) -> None:
    with Loader(demo, rank=1, world_size=4, prefetch=2, **SETTINGS) as loader:
        assert_later_epochs_decode_what_was_not_shown(loader)


def test_a_rank_with_memory_for_its_shard_decodes_it_once(demo: Path) -> None:
    """And so does the prediction. Memory for the frames of the rank is much less than for all frames."""
    options = SETTINGS | {"rank": 1, "world_size": 4, "prefetch": 2, "last_batch": "partial", "image_size": None}
    with Loader(demo, **options) as loader:
        for_all = frames_budget(loader._config.sizes(list(loader.routes)))
    with Loader(demo, shuffle="sharded", **options) as loader:
        enough = frames_budget(loader._config.sizes(list(loader.routes)))
        frames = 2 * len(loader._config.needed(list(loader.routes))[TOP])
        assert frames == pytest.approx(2 * loader.dataset.num_frames / 4, rel=0.05)
    assert for_all - enough == pytest.approx(0.75 * 2 * loader.dataset.num_frames * 128 * 160 * 3, rel=0.1)
    with Loader(demo, shuffle="sharded", memory_budget=enough, **options) as loader:
        first, later = decodes_of(loader._config, list(loader.routes))
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
        assert not loader._source.keeps_all


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
        enough = frames_budget(loader._config.sizes(list(loader.routes)))
    for memory in ({}, {"memory_budget": enough}):
        count, decoded = told(3, **memory)
        assert count == 1
        assert decoded > 0
        assert "the memory of the 4 ranks holds all decoded frames together" in caplog.text
        count, decoded = told(3, shuffle="sharded", last_batch="partial", **memory)
        assert (count, decoded) == (0, 0)
    for silent in ({"memory_budget": enough // 2}, {"rank": 1}, {"world_size": 1}, {"shuffle": "global"}, {"shuffle": False}):
        assert told(1, **silent)[0] == 0, silent


def test_a_shorter_gop_decodes_less_where_frames_are_not_cached(demo: Path) -> None:
    budget = {"memory_budget": 4 << 20}
    with Loader(demo, **SETTINGS | budget) as loader:
        long, short = (decodes_of(loader._config, list(loader.routes), gop) for gop in (12, 2))
    for shorter, longer in zip(short, long, strict=True):
        assert shorter.decoded < longer.decoded
    assert decodes_of(loader._config, []) == ((0, 0), (0, 0)), "no camera is decoded on the CPU"
