"""Open files: one limit for all datasets of a process, derived from what the system allows it."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import resource
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
from support.datasets import Column, build
from support.killing import start

from dali_stream import Loader, Mixture

DATASETS, EPISODES = 6, 70


def stream(roots: list[Path], allowed: int, taken: int, hard: int, pipe: Connection) -> None:
    """Stream an epoch with few file descriptors. Send its samples, the most data files that were open at once, and the log."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    logging.basicConfig(level=logging.INFO, stream=(log := io.StringIO()))
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(taken)]
    mixture = Mixture({f"d{number}": root for number, root in enumerate(roots)})
    samples, most = [], 0
    with Loader(mixture, batch_size=20, device="cpu", num_threads=2, last_batch="partial") as loader:
        for batch in loader:
            samples += zip(batch["dataset_index"].tolist(), batch["index"].tolist(), strict=True)
            most = max(most, open_data_files())
    for descriptor in held:
        os.close(descriptor)
    pipe.send((sorted(samples), most, log.getvalue()))


def open_data_files() -> int:
    count = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # another thread has closed it
            count += os.readlink(os.path.join("/proc/self/fd", name)).endswith(".parquet")
    return count


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Datasets with a data file per episode. Read only."""
    folder = tmp_path_factory.mktemp("many")
    wide = {"wide": Column("float32", [2], np.zeros((EPISODES, 2)))}
    return [build(folder / str(n), [1] * EPISODES, wide, version="v2.1") for n in range(DATASETS)]


def streamed(roots: list[Path], allowed: int, taken: int = 0, hard: int | None = None) -> int:
    """Stream an epoch in a process that may have `allowed` descriptors, and return how many data files it kept open.

    The process may raise its limit to `hard` descriptors.
    """
    process, pipe = start(stream, roots, allowed, taken, hard or allowed)
    samples, most, log = pipe.recv()
    process.join()
    # The limit applies to the whole process, so a message reports the change.
    raised = f"raised the soft limit of open files of this process from {allowed} to {hard}"
    assert log.count(raised) == (hard is not None)
    assert samples == [(dataset, row) for dataset in range(DATASETS) for row in range(EPISODES)]
    return int(most)


@pytest.mark.slow
def test_a_mixture_keeps_half_of_the_descriptors_at_most(roots: list[Path]) -> None:
    read_at_the_time = 4  # evicted files are closed after their last user
    assert 60 < streamed(roots, 240) <= 120 + read_at_the_time


@pytest.mark.slow
def test_files_are_closed_when_others_need_the_descriptors(roots: list[Path]) -> None:
    """The program itself holds more than its half."""
    assert streamed(roots, 240, taken=170) <= 60


@pytest.mark.slow
def test_all_files_stay_open_where_the_process_may_raise_its_limit(roots: list[Path]) -> None:
    assert streamed(roots, 240, hard=2000) == DATASETS * EPISODES
