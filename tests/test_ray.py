"""pipelines/ray_train.py on a Ray cluster of two nodes on this machine, one of which dies."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import dali_stream

pytest.importorskip("ray", reason="Ray is not installed here; INSTALL=develop-all make install installs it")
pytestmark = pytest.mark.slow
PIPELINES = Path(__file__).parents[1] / "pipelines"
BATCH, SAVE_EVERY, DIES_AT = 16, 4, 10  # samples of a step, steps between checkpoints, and the step at which a node dies

# Each worker notes what its policy is trained on. The one that is not on the program's own node dies with its node.
PROGRAM = f"""
import json, os, signal, sys
from pathlib import Path
import ray
import ray_train
from ray.cluster_utils import Cluster

notes, whole = Path(sys.argv[1]), ray_train.train

def recorded(arguments):
    import torch
    from plain_loop import Policy

    ranks, rank, trained = torch.distributed.get_world_size(), torch.distributed.get_rank(), []
    loss = Policy.forward

    def forward(self, batch):
        trained.append(batch["index"].tolist())
        (notes / f"{{ranks}}-{{rank}}.json").write_text(json.dumps(trained))
        if len(trained) == {DIES_AT} and ray.get_runtime_context().get_node_id() != node:
            os.kill(os.getppid(), signal.SIGKILL)  # raylet, the process of the node
            os.kill(os.getpid(), signal.SIGKILL)
        return loss(self, batch)

    Policy.forward = forward
    whole(arguments)

# A node whose raylet is gone is known to be dead after 1.5 s, and not after 20. Until then Ray tries to have two workers.
settings = {{"health_check_initial_delay_ms": 0, "health_check_period_ms": 300}}
cluster = Cluster(True, head_node_args={{"num_cpus": 1, "include_dashboard": False, "_system_config": settings}})
cluster.add_node(num_cpus=1)
ray.init(cluster.address)
node = ray.get_runtime_context().get_node_id()
ray_train.train = recorded
try:
    ray_train.main(sys.argv[2:])
finally:
    ray.shutdown()
    cluster.shutdown()
"""


def test_a_run_that_exists_is_continued_only_with_resume(
    demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(PIPELINES))
    with pytest.raises(SystemExit):
        importlib.import_module("ray_train").main([str(demo), "--out", str(tmp_path)])
    assert "Continue from it with --resume" in capsys.readouterr().err


def test_a_run_continues_when_a_node_dies(demo: Path, tmp_path: Path) -> None:
    """With one worker, from the last checkpoint. Each frame of the epoch is trained on exactly once."""
    (program := tmp_path / "program.py").write_text(PROGRAM)
    (notes := tmp_path / "notes").mkdir()
    steps = dali_stream.Dataset(demo).num_frames // BATCH
    options = ["--workers", 1, 2, "--batch-size", BATCH, "--max-steps", steps, "--save-every", SAVE_EVERY]
    options += ["--max-failures", 1, "--image-size", 32, 32, "--chunk", 8, "--device", "cpu"]
    command = [sys.executable, program, notes, demo, "--out", tmp_path / "run", *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(PIPELINES)}
    environment |= {"RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2", "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "40"}
    environment |= {"RAY_AUTH_MODE": "disabled"}  # else it writes a token to the home folder
    environment |= {"RAY_worker_niceness": "0"}  # with the default of 15, workers get next to no time beside other tests
    done = subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    first, second, alone = (json.loads((notes / name).read_text()) for name in ("2-0.json", "2-1.json", "1-0.json"))
    assert max(len(first), len(second)) == DIES_AT
    saved = steps - len(alone)  # steps before the checkpoint; those after it are repeated
    assert saved in (SAVE_EVERY, 2 * SAVE_EVERY)  # Ray may not have seen the last checkpoint when the worker died
    trained = [index for batches in (first[:saved], second[:saved], alone) for batch in batches for index in batch]
    assert len(set(trained)) == len(trained) == steps * BATCH
