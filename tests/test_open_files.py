"""Open files: one limit for all datasets of a process, derived from what the system allows it."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.datasets import Column, build

DATASETS, EPISODES = 6, 70
# Streams an epoch with few file descriptors; prints the indices and the most data files that were open at a time.
PROGRAM = """
import contextlib, json, logging, os, sys
import dali_stream
logging.basicConfig(level=logging.INFO)
roots = sys.argv[1:]
held = [os.open(os.devnull, os.O_RDONLY) for _ in range({taken})]
mixture = dali_stream.Mixture({{f"d{{n}}": root for n, root in enumerate(roots)}})
loader = dali_stream.Loader(mixture, batch_size=20, device="cpu", num_threads=2, last_batch="partial")

def open_data_files():
    count = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # another thread has closed it
            count += os.readlink(os.path.join("/proc/self/fd", name)).endswith(".parquet")
    return count

samples, most = [], 0
for batch in loader:
    samples += zip(batch["dataset_index"].tolist(), batch["index"].tolist())
    most = max(most, open_data_files())
print(json.dumps([sorted(samples), most]))
"""


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
    program = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(taken=taken), *map(str, roots)],
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard or allowed)),
    )
    assert program.returncode == 0, program.stderr
    # The limit applies to the whole process, so a message reports the change.
    raised = f"raised the soft limit of open files of this process from {allowed} to {hard}"
    assert program.stderr.count(raised) == (hard is not None)
    samples, most = json.loads(program.stdout)
    assert samples == [[dataset, row] for dataset in range(DATASETS) for row in range(EPISODES)]
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
