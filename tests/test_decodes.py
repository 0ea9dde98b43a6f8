"""Predicted decodes per delivered frame, against what a Loader decodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dali_stream import Loader
from dali_stream.pipeline.decodes import Decodes, decodes_of

SETTINGS: dict[str, Any] = {"batch_size": 8, "image_size": (64, 80), "image_dtype": "uint8", "device": "cpu"}


def predicted(dataset: Path, **changed: Any) -> Decodes:
    with Loader(dataset, **SETTINGS | changed) as loader:
        return decodes_of(loader._config, list(loader.routes))


@pytest.mark.parametrize("changed", [{"memory_budget": 6 << 20}, {"memory_budget": 16 << 20}, {"consumers": 4}])
def test_predictions_are_what_a_loader_decodes(demo: Path, changed: dict[str, Any]) -> None:
    """In the first epoch, which decodes each frame at least once, and in the second, which finds some frames in memory."""
    expected = predicted(demo, **changed)
    with Loader(demo, **SETTINGS | changed) as loader:
        decoded, delivered = [0], [0]
        for _ in range(2):
            for _ in loader:
                pass
            stats = loader.stats()
            decoded.append(stats["decoded_frames"] - decoded[-1])
            delivered.append(stats["frames"] - delivered[-1])
    first, later = (decoded[epoch] / delivered[epoch] for epoch in (1, 2))
    assert first >= 1
    assert expected.first >= 1
    assert expected.first == pytest.approx(first, rel=0.1)
    assert expected.later == pytest.approx(later, rel=0.15)
    assert later < first, "some frames of the first epoch are in memory"


def test_a_shorter_gop_decodes_less_where_frames_are_not_cached(demo: Path) -> None:
    budget = {"memory_budget": 4 << 20}
    with Loader(demo, **SETTINGS | budget) as loader:
        long, short = (decodes_of(loader._config, list(loader.routes), gop) for gop in (12, 2))
    assert short.first < long.first
    assert short.later < long.later
    assert decodes_of(loader._config, []) == (0, 0), "no camera is decoded on the CPU"
