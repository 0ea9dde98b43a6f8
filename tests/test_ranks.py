"""The rank of a Loader and of a FrameSampler agrees with torch.distributed: two real processes, with gloo, on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from dali_stream import DaliStreamError, Dataset, FrameSampler, Loader

TIMEOUT_S = 300  # a hang ends here; the processes take a few seconds

# As under Lightning: one process has no variables, and the other WORLD_SIZE and LOCAL_RANK, but neither has RANK.
PROCESSES = """
import json, sys
from datetime import timedelta
from torch import distributed
from dali_stream import DaliStreamError, Dataset, FrameSampler, Loader

root, store, out, rank = sys.argv[1:]
dataset = Dataset(root, cameras=[])
arguments = {"batch_size": 8, "consumers": 8, "last_batch": "partial", "num_threads": 1, "device": "cpu"}

def frames(loader):
    try:
        with loader:
            return [index for batch in loader for index in batch["index"].tolist()]
    except DaliStreamError as error:
        return str(error)

def indices(sampler):
    try:
        return list(sampler)
    except DaliStreamError as error:
        return str(error)

early, early_sampler = Loader(dataset, **arguments), FrameSampler(dataset, batch_size=8)
before = frames(Loader(dataset, **arguments))
group = {"init_method": f"file://{store}", "rank": int(rank), "world_size": 2, "timeout": timedelta(minutes=4)}
distributed.init_process_group("gloo", **group)
found = {"before": before, "early": frames(early), "early sampler": indices(early_sampler)}
found["explicit"] = frames(Loader(dataset, **arguments, rank=0, world_size=1))
found["late"] = frames(Loader(dataset, **arguments))
found["late sampler"] = indices(FrameSampler(dataset, batch_size=8))
late = Loader(dataset, **arguments)
distributed.barrier()
distributed.destroy_process_group()
found["destroyed"] = frames(late)
with open(out, "w") as file:
    json.dump(found, file)
"""

LIGHTNING = """
import json, os, sys
from pathlib import Path
import torch
from lightning.pytorch import LightningModule, Trainer
import dali_stream

root, out = sys.argv[1:]
dataset = dali_stream.Dataset(root, cameras=[])
arguments = {"batch_size": 8, "consumers": 8, "last_batch": "partial", "device": "cpu", "num_threads": 1}

class Module(LightningModule):
    def __init__(self, early):
        super().__init__()
        self.layer, self.seen = torch.nn.Linear(1, 1), []
        self.loader = dali_stream.Loader(dataset, **arguments) if early else None
    def train_dataloader(self):
        self.loader = self.loader or dali_stream.Loader(dataset, **arguments)
        return self.loader
    def training_step(self, batch):
        self.seen.append(batch["index"].tolist())
        return self.layer(batch["timestamp"][:, None]).sum()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.0)

quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
found = []
for early in (True, False):
    module, error = Module(early), None
    trainer = Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, **quiet)
    try:
        trainer.fit(module)
    except dali_stream.DaliStreamError as raised:
        error = str(raised)
    module.loader.close()
    found.append({"seen": module.seen, "error": error})
Path(out, os.environ["LOCAL_RANK"]).write_text(json.dumps(found))
"""


def outputs(commands: Sequence[Sequence[object]], environments: Sequence[Mapping[str, str]]) -> list[str]:
    """Run processes at the same time and return their standard errors. Fail if one fails or all take too long."""
    base = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    processes = [
        subprocess.Popen([sys.executable, *map(str, command)], env=base | dict(environment), stderr=subprocess.PIPE, text=True)
        for command, environment in zip(commands, environments, strict=True)
    ]
    try:
        errors = [process.communicate(timeout=TIMEOUT_S)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * len(processes), errors
    return errors


@pytest.fixture(scope="module")
def two(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Per process, the frames or the error of each Loader and FrameSampler."""
    folder = tmp_path_factory.mktemp("ranks")
    outs = [folder / "0.json", folder / "1.json"]
    commands = [["-c", PROCESSES, demo, folder / "store", out, rank] for rank, out in enumerate(outs)]
    outputs(commands, [{}, {"WORLD_SIZE": "2", "LOCAL_RANK": "1"}])
    return [json.loads(out.read_text()) for out in outs]


@pytest.mark.slow
def test_a_loader_made_before_the_process_group_fails_in_every_process(two: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(two):
        for name, owner in (("early", "Loader"), ("early sampler", "FrameSampler")):
            error = found[name]
            assert error.startswith(f"This {owner} was made as rank 0 of 1, but torch.distributed has rank {rank} of 2. ")
            assert all(remedy in error for remedy in ("after the process group", "train_dataloader()", "rank= and world_size="))


@pytest.mark.slow
def test_a_loader_made_after_the_process_group_has_its_rank(two: list[dict[str, Any]], demo: Path) -> None:
    frames = Dataset(demo).num_frames
    assert sorted(two[0]["late"] + two[1]["late"]) == list(range(frames))
    assert len(set(two[0]["late sampler"] + two[1]["late sampler"])) == frames // 2 * 2
    for found in two:  # it may be iterated after the process group is gone
        assert found["destroyed"] == found["late"]


@pytest.mark.slow
def test_explicit_ranks_may_differ_from_the_process_group(two: list[dict[str, Any]], demo: Path) -> None:
    """As in tensor parallelism, where several processes need the same samples."""
    assert sorted(two[0]["explicit"]) == list(range(Dataset(demo).num_frames))
    assert two[0]["explicit"] == two[1]["explicit"]


@pytest.mark.slow
def test_world_size_without_rank_fails_without_a_process_group_too(two: list[dict[str, Any]], demo: Path) -> None:
    assert sorted(two[0]["before"]) == list(range(Dataset(demo).num_frames))  # neither variable is set: 0 of 1
    assert two[1]["before"].startswith("WORLD_SIZE is 2 in the environment, but RANK is not set. Set both, or make the Loader")


@pytest.mark.parametrize(("name", "value", "missing"), [("WORLD_SIZE", "2", "RANK"), ("RANK", "1", "WORLD_SIZE")])
def test_one_variable_alone_is_an_error_of_the_first_iteration(
    demo: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str, missing: str
) -> None:
    """Not of the constructor: an error before the rendezvous would leave the other processes waiting."""
    monkeypatch.setenv(name, value)
    dataset, message = Dataset(demo, cameras=[]), f"{name} is {value} in the environment, but {missing} is not set"
    # 7 consumers cannot be shared by two ranks. Nothing but the iteration may depend on the variable.
    with Loader(dataset, batch_size=7, consumers=7) as loader, pytest.raises(DaliStreamError, match=message):
        iter(loader)
    with pytest.raises(DaliStreamError, match=message):
        list(FrameSampler(dataset, consumers=7))
    with Loader(dataset, rank=0, world_size=1) as explicit:
        next(iter(explicit))


def test_variables_of_a_single_process_need_not_both_be_set(demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    with Loader(Dataset(demo, cameras=[])) as loader:
        next(iter(loader))


@pytest.mark.slow
def test_lightning(demo: Path, tmp_path: Path) -> None:
    """Its launcher sets RANK nowhere, and initializes torch.distributed in `fit`. An early Loader fails; the recipe works."""
    pytest.importorskip("lightning")
    (program := tmp_path / "program.py").write_text(LIGHTNING)
    outputs([[program, demo, tmp_path]], [{"OMP_NUM_THREADS": "1"}])
    early, late = zip(*(json.loads((tmp_path / str(rank)).read_text()) for rank in range(2)), strict=True)
    for rank, found in enumerate(early):
        assert f"was made as rank 0 of 1, but torch.distributed has rank {rank} of 2." in found["error"]
        assert found["seen"] == []
    assert [found["error"] for found in late] == [None, None]
    assert sorted(index for found in late for batch in found["seen"] for index in batch) == [*range(Dataset(demo).num_frames)]
