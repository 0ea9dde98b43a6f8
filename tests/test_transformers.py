"""pipelines/transformers_trainer.py: Hugging Face's Trainer takes its batches from a Loader, and resumes at the next sample."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

import dali_stream

PIPELINES = Path(__file__).parents[1] / "pipelines"
BATCH = 32
Step = tuple[list[int], float]  # `index` of the samples, and the loss


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The program, on two episodes."""
    pytest.importorskip("transformers")
    dataset = dali_stream.Dataset
    monkeypatch.syspath_prepend(str(PIPELINES))
    monkeypatch.setattr(dali_stream, "Dataset", lambda uri: dataset(uri, episodes=[1, 4]))
    return importlib.import_module("transformers_trainer")


def options(dataset: Path, out: Path, *more: object) -> list[str]:
    small = ["--image-size", 32, 32, "--chunk", 8, "--device", "cpu", "--batch-size", BATCH]
    return list(map(str, [dataset, "--out", out, *small, *more]))


@pytest.mark.slow
def test_the_trainer_continues_as_if_it_was_never_cut(
    program: Any, demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of an epoch and at its end: the same samples, and the same losses."""
    policy = importlib.import_module("plain_loop").Policy
    steps, loss = list[Step](), policy.forward

    def forward(self: Any, batch: dict[str, Any]) -> torch.Tensor:
        steps.append((batch["index"].tolist(), (found := loss(self, batch)).item()))
        return found

    def train(out: str, max_steps: int, *more: str) -> list[Step]:
        steps.clear()
        program.main(options(demo, tmp_path / out, "--max-steps", max_steps, *more))
        return [*steps]

    monkeypatch.setattr(policy, "forward", forward)
    epoch = program.dali_stream.Dataset(demo).num_frames // BATCH
    whole = train("whole", epoch + 2)
    cut = train("cut", 2) + train("cut", epoch, "--resume") + train("cut", epoch + 2, "--resume")
    assert [samples for samples, _ in cut] == [samples for samples, _ in whole]
    assert [loss for _, loss in cut] == [loss for _, loss in whole]
    seen = [index for samples, _ in cut[:epoch] for index in samples]
    assert len(set(seen)) == len(seen) == epoch * BATCH


@pytest.mark.slow
def test_a_checkpoint_without_a_loader_is_refused(
    program: Any, demo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "checkpoint-3").mkdir()
    for more, said in (((), "exists already"), (("--resume",), "has no loader.pt")):
        with pytest.raises(SystemExit):
            program.main(options(demo, tmp_path, *more))
        assert said in capsys.readouterr().err
