"""Copies of a dataset have files of their own. A loader, or an open file, cannot be copied."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
from support.batches import equal, samples
from support.datasets import TOP
from support.slow import slow_after
from support.traces import handles, needs_proc, nothing_left

from dali_stream import Dataset, Loader
from dali_stream.storage import LocalStore

pytestmark = [needs_proc, pytest.mark.usefixtures("warm")]


COPIES = {"copy": copy.copy, "deepcopy": copy.deepcopy, "pickle": lambda given: pickle.loads(pickle.dumps(given))}


def test_a_refused_copy_of_a_loader_costs_it_nothing(demo: Path) -> None:
    dataset = Dataset(demo, episodes=[0], cameras=[TOP])
    with Loader(dataset, batch_size=8) as loader:
        expected = list(loader)
    with Loader(dataset, batch_size=8) as loader:
        batches = iter(loader)
        found = [next(batches)]
        while not (before := {number: path for number, path in handles().items() if path.startswith(str(demo))}):
            found.append(next(batches))
        for copied in COPIES.values():
            beside = [] if copied is copy.copy else [(dataset, loader)]  # of which the first is copied, and dropped
            for given in (loader, *beside):
                with pytest.raises(TypeError, match=r"^A Loader cannot be copied or pickled, because .* make another Loader"):
                    copied(given)
        assert before.items() <= handles().items()  # the planner may open another file meanwhile
        found += batches
    assert all(equal(first, second) for first, second in zip(found, expected, strict=True))


@pytest.mark.parametrize("how", slow_after(1, COPIES))
def test_a_copy_of_a_dataset_has_files_of_its_own(demo: Path, how: str) -> None:
    file = f"videos/{TOP}/chunk-000/file-000.mp4"
    with nothing_left():
        dataset = Dataset(demo, episodes=[1, 4], cameras=[])
        expected, fingerprint = dataset.store.read(file, 0, 100), dataset.fingerprint
        before = handles()
        twin = COPIES[how](dataset)
        assert repr(twin) == repr(dataset)
        assert twin.fingerprint == fingerprint
        assert twin.store is twin.data_store
        assert handles() == before
        assert twin.store.read(file, 0, 100) == expected
        assert len(handles()) == len(before) + 1
        with Loader(twin, batch_size=8) as loader:
            assert len(samples(loader)) == len(twin) // 8 * 8
        assert twin.store.read(file, 0, 100) == expected
        del twin, loader
        assert handles() == before
        assert dataset.store.read(file, 0, 100) == expected
        dataset.close()


def test_an_open_file_is_not_copied(demo: Path) -> None:
    """Two objects with one descriptor would close it twice, the second time somebody else's file."""
    store = LocalStore(str(demo))
    store.read("meta/info.json", 0, 1)
    handle, before = store._open_files.get("meta/info.json"), handles()
    for copied in COPIES.values():
        with pytest.raises(TypeError, match="an open file cannot be copied"):
            copied(handle)
    assert handles() == before
    del handle
    store.close()
