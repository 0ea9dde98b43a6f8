"""Predicted decodes per delivered frame, against what a Loader decodes."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from dali_stream import Loader, Mixture
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


def test_a_shorter_gop_decodes_less_where_frames_are_not_cached(demo: Path) -> None:
    budget = {"memory_budget": 4 << 20}
    with Loader(demo, **SETTINGS | budget) as loader:
        long, short = (decodes_of(loader._config, list(loader.routes), gop) for gop in (12, 2))
    for shorter, longer in zip(short, long, strict=True):
        assert shorter.decoded < longer.decoded
    assert decodes_of(loader._config, []) == ((0, 0), (0, 0)), "no camera is decoded on the CPU"
