"""Predicted decodes per delivered frame, against what a Loader decodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dali_stream import Loader
from dali_stream.speed.decodes import Decodes, decodes_of

SETTINGS: dict[str, Any] = {"batch_size": 8, "image_size": (64, 80), "image_dtype": "uint8", "device": "cpu"}


def predicted(dataset: Path, **changed: Any) -> tuple[Decodes, Decodes]:
    with Loader(dataset, **SETTINGS | changed) as loader:
        return decodes_of(loader._config, list(loader.routes))


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


def test_a_shorter_gop_decodes_less_where_frames_are_not_cached(demo: Path) -> None:
    budget = {"memory_budget": 4 << 20}
    with Loader(demo, **SETTINGS | budget) as loader:
        long, short = (decodes_of(loader._config, list(loader.routes), gop) for gop in (12, 2))
    for shorter, longer in zip(short, long, strict=True):
        assert shorter.decoded < longer.decoded
    assert decodes_of(loader._config, []) == ((0, 0), (0, 0)), "no camera is decoded on the CPU"
