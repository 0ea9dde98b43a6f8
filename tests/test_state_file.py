"""`write_state` and `load_state`: the file always holds a complete state, whatever happens to the process that writes it."""

from __future__ import annotations

import json
import os
import random
import resource
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from support.batches import samples
from support.killing import places_until_killed, start

from dali_stream import Dataset, FrameSampler, Loader, ResumeError
from dali_stream.storage.state_file import load_state, write_state

KILLS = 10
LENGTHS = [5, 8, 7]


@pytest.fixture(scope="module")
def rows(demo: Path) -> Dataset:
    """The demo without cameras."""
    return Dataset(demo, cameras=[])


def make(dataset: Dataset, **arguments: Any) -> Loader:
    return Loader(dataset, **({"batch_size": 8, "num_threads": 1, "device": "cpu"} | arguments))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# ------------------------------------------------------------------------------------------------------------- resuming


def test_a_loader_continues_from_its_file(rows: Dataset, tmp_path: Path) -> None:
    with make(rows) as whole:
        expected = samples(whole)
    file, delivered = tmp_path / "loader.json", []
    for _ in range(4):  # processes that are interrupted after 3 batches each
        with make(rows) as loader:
            assert load_state(file, loader.load_state_dict) == bool(delivered)
            batches = iter(loader)
            for _ in range(3):
                delivered += next(batches)["index"].tolist()
                write_state(str(file), loader.state_dict())
    assert delivered == expected[: len(delivered)]
    assert len(delivered) == 4 * 3 * 8
    assert names(tmp_path) == ["loader.json"]


def test_a_sampler_continues_from_its_file(tmp_path: Path) -> None:
    expected = list(FrameSampler(LENGTHS))
    first, file = FrameSampler(LENGTHS), tmp_path / "sampler.json"
    assert load_state(file, first.load_state_dict) is False
    indices = iter(first)
    for _ in range(10):
        next(indices)
    write_state(file, first.state_dict(step=2, batch_size=4))  # a DataLoader's workers are 2 indices ahead of it
    second = FrameSampler(LENGTHS)
    assert load_state(file, second.load_state_dict) is True
    assert list(second) == expected[8:]


# ---------------------------------------------------------------------------------------------------------- bad files


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"state\.json is empty\. Remove it"),
        (b'{"version": 1, "epo', r"state\.json is not JSON .* Remove it"),
        (b"\xff\xfe\x00", r"state\.json is not JSON"),
        (b"[]", r"state\.json: state must be that of a "),
        (b'{"version": 1}', r"state\.json: version of the state must be 2, got 1 of .* begin a new epoch"),
        (b'{"version": 2}', r"state\.json: state must be that of a "),
    ],
)
def test_a_damaged_file_is_an_error_that_names_it(rows: Dataset, tmp_path: Path, content: bytes, message: str) -> None:
    (file := tmp_path / "state.json").write_bytes(content)
    with make(rows) as loader:
        with pytest.raises(ResumeError, match=message):
            load_state(file, loader.load_state_dict)
        assert len(samples(loader)) == len(loader) * 8  # the failed attempt has changed nothing
    with pytest.raises(ResumeError, match=message):
        load_state(file, FrameSampler(LENGTHS).load_state_dict)


def test_a_symbolic_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "link.json").symlink_to(tmp_path / "target.json")
    write_state(tmp_path / "link.json", FrameSampler(LENGTHS).state_dict())
    assert (tmp_path / "link.json").is_symlink()
    assert load_state(tmp_path / "target.json", FrameSampler(LENGTHS).load_state_dict)


# ------------------------------------------------------------------------------------- failures and kills while it is written


def test_several_writers_of_one_path_do_not_disturb_each_other(tmp_path: Path) -> None:
    """As processes of a tensor-parallel group, which share rank 0."""
    file, errors = tmp_path / "sampler.json", []

    def write() -> None:
        try:
            for _ in range(50):
                write_state(file, FrameSampler(LENGTHS).state_dict())
                assert load_state(file, FrameSampler(LENGTHS).load_state_dict)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert names(tmp_path) == ["sampler.json"]


def test_a_save_removes_what_killed_saves_have_left(tmp_path: Path) -> None:
    """Old temporary files of its own path, and neither young ones, which another process may be writing, nor others."""
    for folder in (target := tmp_path / "run", tmp_path / "other"):
        folder.mkdir()
    names_left = {".state.json." + "0" * 32: 3600, ".state.json." + "1" * 32: 10, ".other.json." + "2" * 32: 3600}
    names_left |= {".state.json.backup": 3600, "state.json." + "3" * 32: 3600}
    for name, age in names_left.items():
        (target / name).write_text("{")
        os.utime(target / name, (then := time.time() - age, then))
    (tmp_path / "other/state.json").symlink_to(target / "state.json")
    write_state(tmp_path / "other/state.json", FrameSampler(LENGTHS).state_dict())
    assert names(target) == sorted([*list(names_left)[1:], "state.json"])
    assert names(tmp_path / "other") == ["state.json"]


def save_until_killed(root: Path, file: Path, pipe: Connection) -> None:
    """Save the state after each batch, epoch after epoch. Send the position of the first state."""
    with make(Dataset(root, cameras=[])) as loader:
        load_state(file, loader.load_state_dict)
        for epoch in range(1000):
            for i, _ in enumerate(loader):
                write_state(file, loader.state_dict())
                if epoch == i == 0:
                    pipe.send(place(file))


def place(file: Path) -> tuple[int, int]:
    """Epoch and position of the state in a file."""
    state = json.loads(file.read_text())
    return state["epoch"], state["position"]


def save_without_space(root: Path, file: Path, pipe: Connection) -> None:
    with make(Dataset(root, cameras=[])) as loader:
        write_state(file, loader.state_dict())
        next(iter(loader))
        resource.setrlimit(resource.RLIMIT_FSIZE, (16, 16))
        try:
            write_state(file, loader.state_dict())
        except OSError as error:
            pipe.send(str(error))


@pytest.mark.slow
def test_the_file_is_complete_at_every_moment_and_after_a_kill(demo: Path, tmp_path: Path) -> None:
    moments, file = random.Random(3), tmp_path / "loader.json"
    for _ in range(KILLS):
        places = places_until_killed(save_until_killed, demo, file, place, moments)
        assert places == sorted(places)
        with make(Dataset(demo, cameras=[])) as loader:
            assert load_state(file, loader.load_state_dict)


@pytest.mark.slow
def test_a_full_disk_leaves_the_previous_state(demo: Path, tmp_path: Path) -> None:
    process, pipe = start(save_without_space, demo, tmp_path / "loader.json")
    assert os.strerror(27) in pipe.recv()
    process.join()
    assert names(tmp_path) == ["loader.json"]
    assert json.loads((tmp_path / "loader.json").read_text())["position"] == 0
