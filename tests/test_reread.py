"""The warning that indices of video files are read more than once: given only if they are, and naming only what helps."""

from __future__ import annotations

import itertools
import logging
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.datasets import Camera, build
from support.servers import Server
from support.videos import CAMERA, encode, h264

from dali_stream import Loader

FILES, FRAMES = 40, 800


@pytest.fixture(scope="module")
def many_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 episodes, each in a video file of its own, whose indices and rows do not fit in 1 MiB. Read only."""
    folder = tmp_path_factory.mktemp("many")
    file = encode(np.zeros((FRAMES, 64, 64, 3), np.uint8), folder / "black.mp4", h264(12))
    camera = Camera([file] * FILES, [[FRAMES]] * FILES, (64, 64))
    return build(folder / "data", [FRAMES] * FILES, {}, cameras={CAMERA: camera}, fps=30)


def stream(uri: object, caplog: pytest.LogCaptureFixture, **settings: Any) -> tuple[list[str], int]:
    """The warnings about reading again while 100 batches are delivered, and how many indices are."""
    caplog.clear()
    with caplog.at_level(logging.WARNING, "dali_stream"), Loader(uri, batch_size=2, image_dtype="uint8", **settings) as loader:
        for _ in itertools.islice(loader, 100):
            pass
        again = loader.stats()["indices_read_again"]
    return [record.getMessage() for record in caplog.records if "more than once" in record.getMessage()], again


def test_all_indices_are_kept_for_a_global_shuffle_that_uses_all_files(
    many_files: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Two samples a batch are of two files, but the next batches are of others."""
    warnings, again = stream(many_files, caplog, shuffle="global", memory_budget="200MiB")
    assert (warnings, again) == ([], 0)


@pytest.mark.slow
def test_a_global_shuffle_is_told_neither_of_pools_nor_of_a_cache(many_files: Path, caplog: pytest.LogCaptureFixture) -> None:
    [warning], again = stream(many_files, caplog, shuffle="global", memory_budget="1MiB")
    assert again > 0
    assert "episode_pool_size" not in warning
    assert "cache_dir" not in warning
    assert "shuffle=True for a new run" in warning
    [larger] = re.findall(r'a larger memory_budget, such as "([\w.]+)"', warning)
    assert stream(many_files, caplog, shuffle="global", memory_budget=larger) == ([], 0), "the remedy helps"


@pytest.mark.slow
def test_pools_and_a_cache_are_named_where_there_are_some(many_files: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = {"consumers": 2, "episode_pool_size": 20, "memory_budget": "1MiB"}
    [warning], _ = stream(many_files, caplog, **settings)
    assert "a smaller episode_pool_size" in warning
    assert not re.search("cache_dir|shuffle=True", warning)
    with Server(many_files) as server:
        [warning, *_], _ = stream(server.url, caplog, **settings)
    assert "a smaller episode_pool_size" in warning
    assert "a cache_dir" in warning
