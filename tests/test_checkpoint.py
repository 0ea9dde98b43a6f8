"""One checkpoint with model, optimizer and loader, as the documents show it: complete at every moment, and read by torch."""

from __future__ import annotations

import json
import os
import random
import resource
import threading
from collections.abc import Iterator
from contextlib import closing
from itertools import islice
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from support.killing import places_until_killed, start
from support.servers import Server
from support.slow import slow

from dali_stream import Dataset, FrameSampler, Loader, Mixture

KILLS = 6
LENGTHS = [5, 8, 7, 12]


@pytest.fixture(scope="module")
def rows(demo: Path) -> Dataset:
    """The demo without cameras."""
    return Dataset(demo, cameras=[])


def make(dataset: Dataset | Mixture, **arguments: Any) -> Loader:
    return Loader(dataset, **({"batch_size": 8, "num_threads": 1, "device": "cpu", "last_batch": "partial"} | arguments))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


class Run:
    """A training run as in README.md, with a model whose weights depend on all samples so far and on their order."""

    def __init__(self, root: Path, file: Path) -> None:
        self.file, self.model = file, torch.nn.Linear(1, 1, bias=False, dtype=torch.float64)
        torch.nn.init.ones_(self.model.weight)
        self.loader = make(Dataset(root, cameras=[]))
        optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9)
        self.parts: dict[str, Any] = {"model": self.model, "optimizer": optimizer, "loader": self.loader}
        if file.exists():
            for name, state in torch.load(file).items():
                self.parts[name].load_state_dict(state)

    def train(self) -> Iterator[list[int]]:
        """Yield the samples of each batch after its step, endlessly."""
        while True:
            for batch in self.loader:
                samples = batch["index"].tolist()
                loss = self.model(batch["index"].double()[:, None]).mean() / 1000
                self.parts["optimizer"].zero_grad()
                loss.backward()
                self.parts["optimizer"].step()
                yield samples

    def save(self) -> None:
        partial = self.file.with_suffix(".partial")
        torch.save({name: part.state_dict() for name, part in self.parts.items()}, partial)
        os.replace(partial, self.file)

    def close(self) -> None:
        self.loader.close()


def place(file: Path) -> tuple[int, int]:
    """Epoch and position of the loader in a checkpoint."""
    state = torch.load(file)["loader"]
    return state["epoch"], state["position"]


def check(file: Path, root: Path, samples: list[int] | None = None) -> None:
    """Check that a checkpoint has the model and the optimizer of an uninterrupted run, and that this run has the samples."""
    found = torch.load(file)
    with closing(Run(root, file.with_name("none.pt"))) as run:
        seen = []
        for batch in run.train():
            seen += batch
            state = run.loader.state_dict()
            if (state["epoch"], state["position"]) == (found["loader"]["epoch"], found["loader"]["position"]):
                break
            assert (state["epoch"], state["position"]) < (found["loader"]["epoch"], found["loader"]["position"])
        assert samples is None or samples == seen
        assert found["loader"] == state
        assert torch.equal(found["model"]["weight"], run.model.weight)
        momentum = run.parts["optimizer"].state_dict()["state"][0]["momentum_buffer"]
        assert torch.equal(found["optimizer"]["state"][0]["momentum_buffer"], momentum)


# ------------------------------------------------------------------------------------------------------------- resuming


def test_a_run_continues_from_its_checkpoint(demo: Path, tmp_path: Path) -> None:
    """Four processes that are interrupted after some batches each, within epochs and across their ends."""
    file, delivered = tmp_path / "checkpoint.pt", list[int]()
    epoch = len(make(Dataset(demo, cameras=[])))
    for batches in (3, epoch - 3, epoch + 2, 5):
        with closing(Run(demo, file)) as run:
            for samples in islice(run.train(), batches):
                delivered += samples
                run.save()
    assert names(tmp_path) == ["checkpoint.pt"]
    check(file, demo, delivered)


def plain(value: Any) -> bool:
    """Return whether a value consists of the types that every reader of a checkpoint knows."""
    if type(value) is dict:
        return all(type(key) is str and plain(inner) for key, inner in value.items())
    return all(map(plain, value)) if type(value) is list else type(value) in (int, bool, str)


def through_torch(state: dict[str, Any], folder: Path) -> Any:
    torch.save({"loader": state}, folder / "checkpoint.pt")
    return torch.load(folder / "checkpoint.pt", weights_only=True)["loader"]


def through_json(state: dict[str, Any], folder: Path) -> Any:
    return json.loads(json.dumps(state))


READERS = {"torch": through_torch, "JSON": through_json}


def ids(batch: dict[str, Any]) -> list[tuple[int, int]]:
    """(dataset, index) of the samples of a batch."""
    index = batch["index"].tolist()
    return list(zip(batch["dataset_index"].tolist() if "dataset_index" in batch else [0] * len(index), index, strict=True))


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("shuffle", [True, slow("global"), slow(False)])
@pytest.mark.parametrize("mixed", [False, slow(True)])
def test_a_state_is_read_by_torch_and_from_json(
    mixed: bool, shuffle: bool | str, reader: str, rows: Dataset, tmp_path: Path
) -> None:
    """On one rank, then on two, then on one again: the order of an uninterrupted run, and the same state on both ranks."""
    dataset = Mixture({"a": rows, "b": rows}, repeats={"a": 1, "b": 0.5}) if mixed else rows
    options: dict[str, Any] = {"consumers": 8, "shuffle": shuffle}
    with make(dataset, **options) as loader:
        expected = [each for batch in loader for each in ids(batch)]
    delivered = []
    with make(dataset, **options) as loader:
        delivered += [each for batch in islice(loader, 3) for each in ids(batch)]
        state = loader.state_dict()
    assert plain(state)
    read = READERS[reader](state, tmp_path)
    assert read == state
    ranks = []
    for rank in range(2):
        with make(dataset, batch_size=4, rank=rank, world_size=2, **options) as loader:
            loader.load_state_dict(read)
            ranks.append(([ids(batch) for batch in islice(loader, 2)], loader.state_dict()))
    assert ranks[0][1] == ranks[1][1]
    delivered += [each for two in zip(*(batches for batches, _ in ranks), strict=True) for pair in zip(*two, strict=True)
                  for each in pair]  # fmt: skip
    assert plain(ranks[1][1])
    read = READERS[reader](ranks[1][1], tmp_path)
    with make(dataset, **options) as loader:
        loader.load_state_dict(read)
        assert loader.state_dict() == ranks[1][1]
        delivered += [each for batch in loader for each in ids(batch)]
    assert delivered == expected


def test_a_run_is_saved_while_its_server_does_not_respond(demo: Path) -> None:
    with Server(demo) as server:
        loader = make(Dataset(server.url))
        batches = iter(loader)
        next(batches)
        for thread in threading.enumerate():
            if thread.name == "dali_stream state":
                thread.join()
    with loader:
        state = loader.state_dict()
    with make(Dataset(demo)) as again:
        again.load_state_dict(state)
        assert again.batch_index == 1


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("shuffle", [True, "global", False])
@pytest.mark.parametrize("mixed", [False, True])
def test_a_state_of_a_sampler_is_read_by_torch_and_from_json(
    mixed: bool, shuffle: bool | str, reader: str, rows: Dataset, tmp_path: Path
) -> None:
    """As `test_a_state_is_read_by_torch_and_from_json`."""
    dataset = Mixture({"a": rows, "b": rows}, repeats={"a": 1, "b": 0.5}) if mixed else LENGTHS
    options: dict[str, Any] = {"consumers": 8, "shuffle": shuffle, "drop_n_last_frames": 0 if mixed else 1}
    expected = list(FrameSampler(dataset, **options, rank=0, world_size=1))
    sampler = FrameSampler(dataset, **options, rank=0, world_size=1)
    delivered = list(islice(sampler, 10))
    state = sampler.state_dict(step=2, batch_size=4)  # a DataLoader's workers are 2 indices ahead of it
    assert plain(state)
    ranks = []
    for rank in range(2):
        sampler = FrameSampler(dataset, **options, rank=rank, world_size=2)
        sampler.load_state_dict(READERS[reader](state, tmp_path))
        ranks.append((list(islice(sampler, 4)), sampler.state_dict()))
    assert ranks[0][1] == ranks[1][1]
    assert plain(ranks[1][1])
    resumed = FrameSampler(dataset, **options, rank=0, world_size=1)
    resumed.load_state_dict(READERS[reader](ranks[1][1], tmp_path))
    middle = [index for pair in zip(ranks[0][0], ranks[1][0], strict=True) for index in pair]
    assert delivered[:8] + middle + list(resumed) == expected


# ------------------------------------------------------------------------------------- failures and kills while it is written


def save_until_killed(root: Path, file: Path, pipe: Connection) -> None:
    """Save the run after each batch, epoch after epoch. Send the place of the first checkpoint."""
    run = Run(root, file)
    for number, _ in enumerate(run.train()):
        run.save()
        if number == 0:
            pipe.send(place(file))


def save_without_space(root: Path, file: Path, pipe: Connection) -> None:
    run = Run(root, file)
    batches = run.train()
    next(batches)
    run.save()
    next(batches)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16, 16))
    try:
        run.save()
    except (OSError, RuntimeError) as error:  # torch.save has errors of its own
        pipe.send(type(error).__name__)


@pytest.mark.slow
def test_a_checkpoint_is_complete_at_every_moment_and_after_a_kill(demo: Path, tmp_path: Path) -> None:
    moments, file = random.Random(3), tmp_path / "checkpoint.pt"
    for _ in range(KILLS):
        places = places_until_killed(save_until_killed, demo, file, place, moments)
        assert places == sorted(places)
        assert places[-1] > places[0]
        check(file, demo)


@pytest.mark.slow
def test_a_full_disk_leaves_the_previous_checkpoint(demo: Path, tmp_path: Path) -> None:
    process, pipe = start(save_without_space, demo, tmp_path / "checkpoint.pt")
    assert pipe.recv() in ("OSError", "RuntimeError")
    process.join()
    assert place(tmp_path / "checkpoint.pt") == (0, 8)
    check(tmp_path / "checkpoint.pt", demo)
