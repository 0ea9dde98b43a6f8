"""Ranks under a real `accelerate launch`: processes of their own that talk over gloo, on this machine's CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.data_loader import skip_first_batches
from accelerate.state import AcceleratorState

from dali_stream import Dataset, Loader

PROGRAM = """
import json, sys
from pathlib import Path
from accelerate import Accelerator
import dali_stream

accelerator = Accelerator(cpu=True)
root, out, last_batch, steps = sys.argv[1:]
with dali_stream.Loader(dali_stream.Dataset(root, cameras=[]), batch_size=16 // accelerator.num_processes, consumers=8,
                        device="cpu", num_threads=1, last_batch=last_batch) as loader:
    assert accelerator.prepare(loader) is loader
    accelerator.register_for_checkpointing(loader)
    checkpoint = Path(out, "checkpoint")
    if checkpoint.exists():
        accelerator.load_state(checkpoint)
    epochs = []
    for epoch in range(2):
        epochs.append([])
        for batch in loader:
            accelerator.wait_for_everyone()  # as the gradients of a step do: a rank with another number of batches hangs
            epochs[-1].append(batch["index"].tolist())
            if steps != "all" and len(epochs[0]) == int(steps):
                break
        if steps != "all":
            break
    if steps != "all":
        accelerator.save_state(checkpoint)
    result = {"rank": accelerator.process_index, "ranks": accelerator.num_processes, "length": len(loader), "epochs": epochs}
    Path(out, f"{accelerator.process_index}.json").write_text(json.dumps(result | {"state": loader.state_dict()}))
accelerator.wait_for_everyone()
accelerator.end_training()
"""


def launch(processes: int, root: Path, out: Path, last_batch: str = "drop", steps: int | str = "all") -> list[dict[str, Any]]:
    """Return the batches of each rank. Fail if a rank did not start, failed, or hung."""
    out.mkdir(exist_ok=True)
    program = out / "program.py"
    program.write_text(PROGRAM)
    # --multi_gpu is Accelerate's name for processes under torch.distributed; the program asks for the CPU, and so for gloo.
    several = ["--multi_gpu", "--main_process_port", 0] if processes > 1 else []
    command = [sys.executable, "-m", "accelerate.commands.launch", *several, "--num_processes", processes]
    command += ["--num_machines", 1, "--mixed_precision", "no", "--dynamo_backend", "no"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*map(str, command), str(program), str(root), str(out), last_batch, str(steps)],
        capture_output=True, text=True, timeout=300, env=environment, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads((out / f"{rank}.json").read_text()) for rank in range(processes)]
    assert [(each["rank"], each["ranks"]) for each in found] == [(rank, processes) for rank in range(processes)]
    return found


@pytest.fixture(scope="module")
def runs(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, Any]]]:
    """The batches of each rank in a run that one process begins and two end, with a checkpoint in between."""
    out = tmp_path_factory.mktemp("run")
    return [launch(1, demo, out, steps=5), launch(2, demo, out, last_batch="partial")]


@pytest.mark.slow
def test_ranks_share_every_epoch_and_end_it_together(runs: list[list[dict[str, Any]]], demo: Path) -> None:
    found, frames = runs[-1], Dataset(demo).num_frames
    seen = [index for each in found for batch in each["epochs"][1] for index in batch]
    assert sorted(seen) == list(range(frames))  # disjoint, and all of it
    assert {len(each["epochs"][1]) for each in found} == {found[0]["length"]}
    assert {len(each["epochs"][0]) for each in found} == {found[0]["length"] - 5}
    assert all(each["state"] == found[0]["state"] for each in found)


@pytest.mark.slow
def test_a_run_goes_on_with_another_number_of_processes(runs: list[list[dict[str, Any]]], demo: Path) -> None:
    """Through Accelerate's own checkpoints. Together the two parts are one epoch, and each frame comes exactly once."""
    parts = [[index for each in found for batch in each["epochs"][0] for index in batch] for found in runs]
    assert len(parts[0]) == 5 * 16
    assert sorted(index for part in parts for index in part) == list(range(Dataset(demo).num_frames))


@pytest.fixture
def accelerator() -> Iterator[Accelerator]:
    """One of this process, which forgets that it was."""
    yield Accelerator(cpu=True)
    AcceleratorState._reset_state(reset_partial_state=True)


def test_accelerate_leaves_the_loader_as_it_is_or_is_told_why_not(demo: Path, accelerator: Accelerator) -> None:
    """It is split by rank already; what Accelerate would split again would show a rank a W-th of its share."""
    with Loader(demo, batch_size=8, device="cpu") as loader:
        assert accelerator.prepare(loader) is loader
        for wrong in (accelerator.prepare_data_loader, lambda given: skip_first_batches(given, 2)):
            with pytest.raises(AttributeError, match=r"splits batches by rank.*load_state_dict"):
                wrong(loader)
        assert not hasattr(loader, "batch_sampler")


def test_a_state_within_an_accumulation_has_the_samples_and_not_the_gradients(odd: Path, tmp_path: Path) -> None:
    """Two batches make a step. A state that is saved where `sync_gradients` is true has both."""
    saved: list[tuple[int, bool]] = []

    def trained(resumed: int = 0) -> tuple[list[list[int]], torch.Tensor]:
        """The samples and the weights of the rest of six batches. Saves a state after each batch unless it resumes one."""
        AcceleratorState._reset_state(reset_partial_state=True)
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 1)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-6))
        with Loader(Dataset(odd, cameras=[]), batch_size=2, device="cpu") as loader:
            accelerator.register_for_checkpointing(loader)
            if resumed:
                accelerator.load_state(tmp_path / str(resumed))
            seen = []
            for number, batch in zip(range(resumed + 1, 7), loader, strict=False):
                seen.append(batch["index"].tolist())
                with accelerator.accumulate(model):
                    accelerator.backward(model(batch["observation.state"].float()).square().mean())
                    optimizer.step()
                    optimizer.zero_grad()
                if not resumed:
                    accelerator.save_state(tmp_path / str(number))
                    saved.append((number, accelerator.sync_gradients))
        return seen, model.weight.detach().clone()

    seen, weights = trained()
    assert saved == [(number, number % 2 == 0) for number in range(1, 7)]
    for number, at_step in saved[:-1]:
        rest, resumed = trained(number)
        assert rest == seen[number:]
        assert torch.equal(resumed, weights) == at_step


def test_deepspeed_needs_the_batch_size_as_a_number(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Accelerate replaces "auto" by the batch size of a torch DataLoader only. DeepSpeed is not installed here."""

    class NumberIsUsed(Exception):
        pass

    class Prepared:
        """Attributes that Accelerate reads until it knows the batch size."""

        fp8_backend = parallelism_config = None

        def __init__(self, micro_batch: object) -> None:
            settings = {"train_micro_batch_size_per_gpu": micro_batch, "zero_optimization": {"stage": 2}}
            self.deepspeed_plugin = DeepSpeedPlugin(hf_ds_config=settings)

        @property
        def gradient_accumulation_steps(self) -> int:
            raise NumberIsUsed

    deepspeed: Any = ModuleType("deepspeed")
    deepspeed.initialize = None
    monkeypatch.setitem(sys.modules, "deepspeed", deepspeed)
    prepare: Any = Accelerator._prepare_deepspeed
    with Loader(small, batch_size=8, device="cpu") as loader:
        with pytest.raises(ValueError, match="set an integer value in `train_micro_batch_size_per_gpu`"):
            prepare(Prepared("auto"), loader)
        with pytest.raises(NumberIsUsed):
            prepare(Prepared(8), loader)
