"""A training process that is killed at any moment: what was saved is enough to continue, and nothing is lost or seen twice."""

from __future__ import annotations

import json
import os
import random
import signal
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from support.batches import samples
from support.killing import start
from support.servers import Server

from dali_stream import Dataset, Loader
from dali_stream.demo import write_demo

KILLS = 5
ARGUMENTS: dict[str, Any] = {"batch_size": 4, "consumers": 8, "episode_pool_size": 2, "seed": 5}


def stream(url: str, cache: Path, journal: Path, ends: bool, pipe: Connection) -> None:
    """Streams until it is killed, or to the end of the epoch that it is in. A line of the journal holds a batch and the state
    after it, as a training program saves its step and the loader's state together."""
    lines = journal.read_text().split("\n")[:-1]
    out = os.open(journal, os.O_WRONLY | os.O_APPEND)
    dataset = Dataset(url, cache_dir=cache, cache_bytes="1500kB")
    with Loader(dataset, **ARGUMENTS) as loader:
        if lines:
            loader.load_state_dict(json.loads(lines[-1])["state"])
        pipe.send("ready")
        while True:
            for number, batch in enumerate(loader):
                line = {"samples": batch["index"].tolist(), "state": loader.state_dict()}
                os.write(out, json.dumps(line).encode() + b"\n")
                if number == 0:
                    pipe.send("delivers")
            if ends:
                break


@pytest.mark.slow
def test_killed_runs_together_are_the_uninterrupted_order(tmp_path: Path) -> None:
    """Every other run is killed after its first batch, and the others at any moment."""
    root, journal, cache = (
        write_demo(tmp_path / "demo", episodes=12, size=(120, 128), codec="h264"),
        tmp_path / "journal",
        tmp_path / "cache",
    )
    journal.touch()
    moments = random.Random(7)
    with Server(root, bytes_per_s=500_000) as server:  # so slow that most kills hit something that is being fetched
        for number in range(KILLS):
            process, pipe = start(stream, server.url, cache, journal, False)
            assert pipe.recv() == "ready"
            if number % 2:
                assert pipe.recv() == "delivers"
            process.join(moments.uniform(0.0, 0.8))
            process.kill()
            process.join()
            assert process.exitcode == -signal.SIGKILL
        process, _ = start(stream, server.url, cache, journal, True)
        process.join()
        assert process.exitcode == 0
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    found = [index for line in lines for index in line["samples"]]
    with Loader(root, **ARGUMENTS) as loader:
        expected: list[int] = []
        while len(expected) < len(found):
            expected += samples(loader)
    assert found == expected
    assert sum(path.stat().st_blocks * 512 for path in cache.rglob("*-*") if path.is_file()) <= 1_500_000  # sparse files
