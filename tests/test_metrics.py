"""`Loader.metrics`: what happened since the last call, as TensorBoard and the like take it."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from support.servers import Server
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from dali_stream import Dataset, Loader

MEMORY = ("row_bytes", "index_bytes", "encoded_bytes", "frame_cache_bytes")


def test_metrics_are_of_what_happened_since_the_last_call(small: Path, tmp_path: Path) -> None:
    """An epoch that decodes all frames, nothing, and an epoch that decodes none; all of it in TensorBoard."""
    options = {"batch_size": 20, "decode": "torchcodec", "last_batch": "partial", "prefetch": 1}
    with Loader(small, device="cpu", num_threads=1, **options) as loader:
        found = []
        for epochs in (1, 0, 1):
            before = loader.stats()
            for _ in itertools.chain.from_iterable(itertools.repeat(loader, epochs)):
                pass
            now = loader.stats()
            found.append(loader.metrics())
            seconds = sum(now[name] - before[name] for name in ("wait_s", "training_s"))
            rate = found[-1]["samples_per_s"] * seconds if epochs else found[-1]["samples_per_s"]
            assert rate == pytest.approx(epochs * Dataset(small).num_frames)
            assert {name: found[-1][name] for name in MEMORY} == {name: now[name] for name in MEMORY}
    first, idle, second = found
    assert all(type(value) is float for value in (*first.values(), *idle.values(), *second.values()))
    assert first["decodes_per_frame"] >= 1
    assert 0 < first["wait_share"] <= 1
    # Hits and decodes of the batches made ahead are counted before these batches.
    assert first["frame_cache_hit_share"] < 0.8 < second["frame_cache_hit_share"] <= 1
    assert second["decodes_per_frame"] == 0
    assert {name for name, value in idle.items() if value} == {
        "row_bytes",
        "index_bytes",
        "frame_cache_bytes",
        "resident_bytes",
    }
    with SummaryWriter(str(tmp_path)) as board:
        for step, metrics in enumerate(found):
            for name, value in metrics.items():
                board.add_scalar(f"loader/{name}", value, step)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    for name in first:
        values = [event.value for event in events.Scalars(f"loader/{name}")]
        assert values == pytest.approx([metrics[name] for metrics in found], rel=1e-6)


def test_bytes_come_from_the_network_once_and_then_from_the_disk(small: Path, tmp_path: Path) -> None:
    found = []
    with Server(small) as server:
        for _ in range(2):
            dataset = Dataset(server.url, cache_dir=tmp_path)
            with Loader(dataset, batch_size=20, device="cpu", num_threads=1, shuffle=False) as loader:
                for _ in loader:  # all of it, since how far a loader fetches ahead depends on the network
                    pass
                found.append(loader.metrics())
    assert found[0]["network_bytes"] > 10_000
    assert found[1]["network_bytes"] < found[0]["network_bytes"] / 10
    assert found[1]["disk_cache_bytes"] > 10_000
