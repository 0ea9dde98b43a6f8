"""Forecasts of what `memory_budget` brings, against what a Loader decodes with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dali_stream import Loader
from dali_stream.cli import main
from dali_stream.tools.forecast import forecast

SETTINGS: dict[str, Any] = {"batch_size": 8, "image_size": (64, 80), "image_dtype": "uint8", "device": "cpu"}


@pytest.mark.parametrize("budget", [6 << 20, 16 << 20])
def test_forecasts_are_what_a_loader_decodes(demo: Path, budget: int) -> None:
    """In the first epoch, which decodes each frame at least once, and in the second, which finds some frames in memory."""
    with Loader(demo, memory_budget=budget, **SETTINGS) as loader:
        [expected] = forecast(loader, [budget])
        decoded, delivered = [0], [0]
        for _ in range(2):
            for _ in loader:
                pass
            stats = loader.stats()
            decoded.append(stats["decoded_frames"] - decoded[-1])
            delivered.append(stats["frames"] - delivered[-1])
    first, later = (decoded[epoch] / delivered[epoch] for epoch in (1, 2))
    assert first >= 1
    assert expected.first_decodes >= 1
    assert expected.first_decodes == pytest.approx(first, rel=0.1)
    assert expected.decodes == pytest.approx(later, rel=0.15)
    assert later < first, "some frames of the first epoch are in memory"


def test_single_frames_take_at_least_one_decode_each_in_a_first_epoch(demo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The frames of this size fit in 2 GiB, and a part of them in less."""
    assert main(["info", str(demo), "--image-size", "600", "800", "--json"]) == 0
    forecasts = json.loads(capsys.readouterr().out)["memory"]
    parts = [each for each in forecasts if each["kept"]]
    assert len(parts) >= 2
    for each in parts:
        assert each["first_decodes"] >= 1, each
    assert parts[-1]["decodes"] == 0
