"""torchrun on two nodes, and torch.distributed.checkpoint: a Loader's state among a model's tensors, for another world size.

The nodes are two launchers on this machine that meet on 127.0.0.1.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support import forked

from dali_stream import Dataset

pytestmark = pytest.mark.slow
BATCH, STEPS = 16, 5  # samples of a global batch, and batches before the checkpoint

PROGRAM = f"""
import json, os, sys
from pathlib import Path
import torch
import torch.distributed.checkpoint as dcp
from torch import distributed
from torch.distributed.checkpoint.stateful import Stateful
import dali_stream

def main(argv):
    root, out, steps = argv[0], Path(argv[1]), int(argv[2])
    distributed.init_process_group("gloo")
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    dataset = dali_stream.Dataset(root, cameras=[])
    arguments = {{"batch_size": {BATCH} // ranks, "last_batch": "partial", "device": "cpu", "num_threads": 1}}
    with dali_stream.Loader(dataset, **arguments) as loader:
        state = {{"loader": loader, "model": {{"weight": torch.zeros(3)}}}}
        if (out / "checkpoint").exists():
            dcp.load(state, checkpoint_id=out / "checkpoint")
        batches = []
        for batch in loader:
            distributed.all_reduce(state["model"]["weight"].add_(1))  # a rank with another number of batches hangs
            batches.append(batch["index"].tolist())
            if len(batches) == steps:
                dcp.save(state, checkpoint_id=out / "checkpoint")
                break
        found = {{"ranks": ranks, "local": os.environ.get("LOCAL_RANK"), "batches": batches}}
        found["stateful"] = isinstance(loader, Stateful)
        (out / f"{{rank}}.json").write_text(json.dumps(found))
    distributed.barrier()
    distributed.destroy_process_group()

if __name__ == "__main__":
    main(sys.argv[1:])
"""


def run(*commands: list[object], environment: dict[str, str]) -> None:
    """Run programs at the same time. Fail if one fails or all take too long."""
    processes = [
        subprocess.Popen(list(map(str, command)), env=environment, stderr=subprocess.PIPE, text=True) for command in commands
    ]
    try:
        errors = [process.communicate(timeout=300)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * len(processes), errors


def found(out: Path, ranks: int) -> list[dict[str, Any]]:
    """Read the results of all ranks."""
    results = [json.loads((out / f"{rank}.json").read_text()) for rank in range(ranks)]
    assert all(each["stateful"] and each["ranks"] == ranks for each in results)
    return results


def samples(results: list[dict[str, Any]]) -> list[int]:
    return [index for each in results for batch in each["batches"] for index in batch]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("program") / "program.py"
    file.write_text(PROGRAM)
    return file


@pytest.fixture(scope="module")
def saved(program: Path, demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the checkpoint of two nodes with one rank each, after some batches of an epoch."""
    out = tmp_path_factory.mktemp("torchrun")
    node = [sys.executable, "-m", "torch.distributed.run", "--nnodes", 2, "--nproc-per-node", 1, "--local-addr", "127.0.0.1"]
    node += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{forked.free_port()}", "--rdzv-id", "loopback"]
    run(*[[*node, program, demo, out, STEPS]] * 2, environment=forked.environment())
    return out


def test_two_nodes_share_the_batches(saved: Path) -> None:
    results = found(saved, 2)
    assert [each["local"] for each in results] == ["0", "0"]  # each rank is the first of its node
    assert [len(each["batches"]) for each in results] == [STEPS, STEPS]
    assert len(set(samples(results))) == len(samples(results)) == STEPS * BATCH


def test_a_distributed_checkpoint_resumes_on_more_ranks(saved: Path, program: Path, demo: Path, tmp_path: Path) -> None:
    """Each frame of the epoch comes exactly once, before the checkpoint or after it."""
    shutil.copytree(saved / "checkpoint", tmp_path / "checkpoint")
    run(forked.command(4, program.stem, demo, tmp_path, 0), environment=forked.environment(program.parent))
    assert sorted(samples(found(saved, 2)) + samples(found(tmp_path, 4))) == list(range(Dataset(demo).num_frames))
