"""The training program: what it writes, what it refuses, and an end in the middle."""

from __future__ import annotations

import importlib
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support.datasets import copied
from support.train import ENVIRONMENT, ROOT, SMALL, journal, losses, saved, train_here
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dali_stream import Dataset, Loader, Mixture
from dali_stream.demo import write_demo

STEPS = 8


@pytest.fixture(scope="module")
def finished(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of 8 steps that nothing interrupted."""
    out = tmp_path_factory.mktemp("train") / "run"
    train_here(demo, out, "--max-steps", STEPS, "--val-episodes", 2, "--save-every", 4)
    return out


@pytest.mark.slow
def test_a_run_leaves_its_checkpoint_journal_and_pictures(finished: Path, demo: Path) -> None:
    assert list(losses(finished)) == list(range(1, STEPS + 1))
    state = saved(finished)
    assert state["step"] == STEPS
    assert (state["loader"]["epoch"], state["loader"]["position"]) == (0, 8 * STEPS)
    assert all(0 <= entry["wait_share"] <= 1 and entry["samples_per_s"] > 0 for entry in journal(finished) if "loss" in entry)
    assert np.asarray(Image.open(finished / "chunks.png")).std() > 10  # something is drawn


@pytest.mark.slow
def test_tensorboard_has_what_the_journal_has(finished: Path) -> None:
    events = EventAccumulator(str(finished / "tensorboard/dali_stream"))
    events.Reload()
    found = {event.step: event.value for event in events.Scalars("loss")}
    assert found == pytest.approx(losses(finished), rel=1e-6)
    assert [event.step for event in events.Scalars("val_error")] == [4, 8]


@pytest.mark.slow
def test_validation_is_of_the_episodes_held_out(finished: Path, demo: Path) -> None:
    """Predicting the mean is wrong by what the episodes' own actions say, by the statistics of the other episodes."""
    with Loader(Dataset(demo, cameras=[], episodes=[1, 4]), batch_size=10**9, shuffle=False, last_batch="partial",
                delta_timestamps={"action": [step / 20 for step in range(8)]}, device="cpu") as loader:  # fmt: skip
        batch = next(iter(loader))
    stats = Dataset(demo, cameras=[], episodes=[0, 2, 3, 5]).compute_stats(["action"])["action"]
    wrong = np.abs((batch["action"].numpy() - stats["mean"]) / stats["std"])[~batch["action_is_pad"].numpy()]
    found = [entry["mean_error"] for entry in journal(finished) if "mean_error" in entry]
    assert found == pytest.approx([wrong.mean()] * 2, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("step", "training"), [(4, False), (4, True), (8, False)])
def test_a_validation_that_was_interrupted_is_done_again(
    program: Any, finished: Path, demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int, training: bool
) -> None:
    """SIGTERM comes in the middle of it, or in the training step that it is due after."""
    policy = importlib.import_module("plain_loop").Policy
    predict, steps, cut = policy.predict, [], []

    def interrupted(self: Any, batch: dict[str, Any]) -> torch.Tensor:
        steps.extend([batch] * self.training)
        if len(steps) == step and self.training == training and not cut:
            cut.append(step)
            signal.raise_signal(signal.SIGTERM)
        return predict(self, batch)

    monkeypatch.setattr(policy, "predict", interrupted)
    line = [demo, "--out", tmp_path, *SMALL, "--max-steps", STEPS, "--val-episodes", 2, "--save-every", 4]
    with pytest.raises(SystemExit) as ended:
        program.main([*map(str, line)])
    assert ended.value.code == 143
    assert saved(tmp_path)["step"] == step
    assert len(validations(tmp_path)) == step // 4 - 1
    for _ in range(2):  # the second has nothing left to do
        program.main([*map(str, line), "--resume"])
        assert validations(tmp_path) == {step: pytest.approx(error, rel=1e-4) for step, error in validations(finished).items()}


def validations(out: Path) -> dict[int, float]:
    """{step: error} of a run's journal, which has each validation once."""
    found = [(entry["step"], entry["val_error"]) for entry in journal(out) if "val_error" in entry]
    assert len(dict(found)) == len(found)
    return dict(found)


# The second has one camera, smaller frames and other tasks.
MIXTURE = """
datasets:
  both: {both}
  side: {{uri: {side}, cameras: [observation.images.side]}}
weights: {{both: 2, side: 1}}
missing: pad
"""


@pytest.fixture
def mixture(demo: Path, small: Path, tmp_path: Path) -> Path:
    (path := tmp_path / "mixture.yaml").write_text(MIXTURE.format(both=demo, side=small))
    return path


@pytest.mark.slow
def test_a_mixture_trains_and_continues_bit_for_bit(
    program: Any, mixture: Path, demo: Path, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two datasets with other cameras: one run as a whole, and one that SIGTERM interrupts after 3 steps."""
    line = [*map(str, [mixture, *SMALL, "--max-steps", 6, "--val-episodes", 1, "--save-every", 6])]
    program.main([*line, "--out", str(tmp_path / "whole")])
    policy = importlib.import_module("plain_loop").Policy
    predict, seen = policy.predict, []

    def interrupted(self: Any, batch: dict[str, Any]) -> torch.Tensor:
        seen.append(batch)
        if len(seen) == 3:
            signal.raise_signal(signal.SIGTERM)
        return predict(self, batch)

    monkeypatch.setattr(policy, "predict", interrupted)
    with pytest.raises(SystemExit) as ended:
        program.main([*line, "--out", str(tmp_path / "parts")])
    assert ended.value.code == 143
    assert list(losses(tmp_path / "parts")) == [1, 2, 3]
    monkeypatch.setattr(policy, "predict", predict)
    program.main([*line, "--out", str(tmp_path / "parts"), "--resume"])
    first, second = (saved(tmp_path / name) for name in ("whole", "parts"))
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert first["model"].keys() == second["model"].keys()
    assert all(torch.equal(value, second["model"][key]) for key, value in first["model"].items())
    assert first["loader"] == second["loader"]
    assert sum(int((batch["dataset_index"] == 0).sum()) for batch in seen) == 2 * 3 * 8 // 3
    for batch in seen:
        assert batch["observation.images.top_is_missing"].tolist() == (batch["dataset_index"] == 1).tolist()
    check_validation(tmp_path / "whole", demo, small)


def check_validation(out: Path, demo: Path, small: Path) -> None:
    """Predicting the mean is wrong by what the episodes held out say, each once, on the scale of what is trained on."""
    held_out, rest = ({"both": [3], "side": [1]}, {"both": [0, 1, 2, 4, 5], "side": [0]})
    roots = {"both": demo, "side": small}
    train = {name: Dataset(root, cameras=[], episodes=rest[name]) for name, root in roots.items()}
    known = {name: Dataset(root, cameras=[], episodes=rest[name], stats=train[name].compute_stats(["action"]))
             for name, root in roots.items()}  # fmt: skip
    stats = Mixture(known, weights={"both": 2, "side": 1}).stats["action"]
    val = Mixture({name: Dataset(root, cameras=[], episodes=held_out[name]) for name, root in roots.items()})
    with Loader(
        val, batch_size=len(val), shuffle=False, delta_timestamps={"action": [step / 20 for step in range(8)]}
    ) as loader:
        batch = next(iter(loader))
    wrong = np.abs((batch["action"].numpy() - stats["mean"]) / stats["std"])[~batch["action_is_pad"].numpy()]
    [found] = [entry["mean_error"] for entry in journal(out) if "mean_error" in entry]
    assert found == pytest.approx(wrong.mean(), rel=1e-4)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--val-episodes", 2], "dataset 'side': --val-episodes must be 0 to 1, to leave one episode to train on, got 2"),
        (["--dataset", "revision=main"], "--dataset must not be given with a mixture file"),
    ],
)
def test_what_does_not_go_with_a_mixture_is_said_in_a_line(
    program: Any, mixture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[object], said: str
) -> None:
    with pytest.raises(SystemExit):
        program.main([*map(str, [mixture, "--out", tmp_path / "run", *SMALL, *arguments])])
    assert said in capsys.readouterr().err


def test_a_run_continues_without_what_cannot_be_decoded(program: Any, small: Path, tmp_path: Path) -> None:
    root = copied(small, tmp_path)
    video = sorted((root / "videos").rglob("*.mp4"))[0]
    data = video.read_bytes()
    start = data.index(b"mdat") + 4
    video.write_bytes(data[:start] + bytes(len(data) // 4) + data[start + len(data) // 4 :])
    line = [*map(str, [root, "--out", tmp_path / "run", *SMALL, "--max-steps", 4])]
    with pytest.raises(SystemExit, match=video.name):
        program.main(line)
    shutil.rmtree(tmp_path / "run")
    program.main([*line, "--loader", "on_error=substitute"])
    assert len(journal(tmp_path / "run")) == 4


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--max-steps", 0], "argument --max-steps: must be 1 or more, got 0"),
        (["--val-episodes", 6], "--val-episodes must be 0 to 5, to leave one episode to train on, got 6"),
        (["--batch-size", 1000], "batch_size=1000 on 1 rank needs 1000 frames"),
        (["--dataset", "clok=timestamp"], "Dataset has no argument 'clok'"),
        (["--loader", "frame_cach=/tmp"], "Loader has no argument 'frame_cach'. Did you mean 'frame_cache'?"),
        (["--loader", "batch_size=9", "rank=0"], "must not set what the program itself sets, got batch_size, rank"),
        (["--dataset", "uri=elsewhere"], "must not set what the program itself sets, got uri"),
        (["--out", __file__], "argument --out: must be a folder, got the file"),
        (["--loader", "shuffle"], "argument --loader: must be NAME=VALUE, got 'shuffle'"),
        (["--loader", "shuffle=[a"], "must be NAME=VALUE with a value in YAML, got 'shuffle=[a'"),
    ],
)
def test_what_does_not_go_together_is_said_in_a_line(
    program: Any,
    demo: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[object],
    said: str,
) -> None:
    with pytest.raises(SystemExit) as ended:
        program.main([*map(str, [demo, "--out", tmp_path, *SMALL, *arguments])])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "already exists. Continue from it with --resume"),
        (["--resume", "--chunk", 9], "--chunk was 8 and is 9; Use the arguments of the run"),
        (["--resume", "--seed", 1], "order of the state must be"),
        (["--resume", "--val-episodes", 1], "The state is of another dataset or of other episodes"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(
    program: Any,
    finished: Path,
    demo: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[object],
    said: str,
) -> None:
    with pytest.raises(SystemExit):
        program.main([*map(str, [demo, "--out", finished, *SMALL, "--val-episodes", 2, *arguments])])
    assert said in capsys.readouterr().err
    assert losses(finished)  # still holds the run


@pytest.mark.slow
def test_the_recipe_for_a_cpu_starts_two_processes(program: Any, small: Path, tmp_path: Path) -> None:
    """The line in the program's docstring and in the docs."""
    [recipe] = re.findall(r"^(accelerate launch .*--device cpu)", program.__doc__, re.MULTILINE)
    assert f"\n{recipe}\n" in (ROOT / "docs/training.md").read_text()
    given = {"URI": small, "DIR": tmp_path / "run", "pipelines/train.py": ROOT / "pipelines/train.py"}
    words = [str(given.get(word, word)) for word in recipe.split()]
    line = [sys.executable, "-m", "accelerate.commands.launch", *words[2:], "--max-steps", "2", *map(str, SMALL), "--log-with"]
    done = subprocess.run(line, env=ENVIRONMENT, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "processes: 2 on cpu; episodes: 2 to train on" in done.stderr
    assert list(losses(tmp_path / "run")) == [1, 2]


@pytest.mark.slow
def test_the_policy_learns(tmp_path: Path) -> None:
    """As `make train-demo` does, with less of everything: episodes that it has never seen, clearly better than the mean."""
    root = write_demo(tmp_path / "demo", episodes=8, size=(120, 128), codec="h264")  # which is encoded faster than AV1
    options = ["--chunk", 20, "--batch-size", 16, "--max-steps", 100, "--val-episodes", 2]
    train_here(root, tmp_path / "run", *options, "--learning-rate", 3e-3, "--log-every", 50)
    [found] = [entry for entry in journal(tmp_path / "run") if "val_error" in entry]
    assert found["val_error"] < 0.85 * found["mean_error"]
