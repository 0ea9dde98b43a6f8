"""The program of docs/trainers/other.md: the Trainer of transformers gets its batches from a Loader, and resumes exactly."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import dali_stream

PAGE = Path(__file__).parents[1] / "docs/trainers/other.md"
BATCH = 32
Step = tuple[list[int], float]  # `index` of the samples, and the loss


@pytest.mark.slow
def test_the_trainer_continues_as_if_it_was_never_cut(demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of an epoch and at its end: the same samples, and the same losses."""
    transformers = pytest.importorskip("transformers")
    [program] = re.findall(r"^```python\n(.*?Trainer.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    dataset, train_step, steps = dali_stream.Dataset(demo, episodes=[1, 4]), transformers.Trainer.training_step, list[Step]()

    def training_step(self: Any, model: Any, inputs: dict[str, Any], *others: Any) -> torch.Tensor:
        loss = train_step(self, model, inputs, *others)
        steps.append((inputs["index"].tolist(), loss.item()))
        return loss

    def train(folder: str, max_steps: int) -> list[Step]:
        steps.clear()
        (tmp_path / folder).mkdir(exist_ok=True)
        monkeypatch.chdir(tmp_path / folder)
        torch.manual_seed(0)
        text = program
        for given, here in (('"path/to/dataset"', "dataset"), ("=16", f"={BATCH}"), ("max_steps=5", f"max_steps={max_steps}")):
            assert text.count(given) == 1
            text = text.replace(given, here)
        exec(compile(text, str(PAGE), "exec"), {"__name__": "page", "dataset": dataset})
        return [*steps]

    monkeypatch.setattr(transformers.Trainer, "training_step", training_step)
    epoch = dataset.num_frames // BATCH
    whole = train("whole", epoch + 2)
    cut = train("cut", 2) + train("cut", epoch) + train("cut", epoch + 2)
    assert [samples for samples, _ in cut] == [samples for samples, _ in whole]
    assert [loss for _, loss in cut] == [loss for _, loss in whole]
    seen = [index for samples, _ in cut[:epoch] for index in samples]
    assert len(set(seen)) == len(seen) == epoch * BATCH
