"""Why a loader is slow: a stage that is slowed down is named, and its remedy helps as the model predicts.

Stages are slowed down by waiting, which does not depend on what else the machine does.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support.servers import Server

from dali_stream import Dataset, Loader
from dali_stream.cli import main
from dali_stream.decode import torchcodec_decoder
from dali_stream.run.bottleneck import Bottleneck
from dali_stream.system import process
from dali_stream.tools import why
from dali_stream.tools.speed_model import Work, work_of

SETTINGS: dict[str, Any] = {"batch_size": 8, "image_size": (32, 40), "image_dtype": "uint8", "device": "cpu"}
STEP_S = 0.02


@pytest.fixture
def slow_decoding(monkeypatch: pytest.MonkeyPatch) -> float:
    """Each decoded frame takes 5 ms more."""
    decode, seconds = torchcodec_decoder.decode_in_parts, 0.005

    def slow(*arguments: Any) -> Iterator[Any]:
        for part in decode(*arguments):
            time.sleep(part.decoded * seconds)
            yield part

    monkeypatch.setattr(torchcodec_decoder, "decode_in_parts", slow)
    return seconds


class Run(NamedTuple):
    """Measured epochs: batches per second, what limits them, the work of a batch, and the decodes per delivered frame."""

    rate: float
    limit: Bottleneck
    work: Work
    decoded: float


def run(dataset: Any, epochs: int, step_s: float = 0.0, skip: int = 0, **changed: Any) -> Run:
    """Measure the epochs after `skip`."""
    with Loader(dataset, **SETTINGS | changed) as loader:
        for epoch in range(epochs):
            if epoch <= skip:
                seen: dict[str, Any] = {}
            for _ in loader:
                seen = seen or loader.stats()  # after the first batch, whose time includes starting
                time.sleep(step_s)
        now, limit, config = loader.stats(), loader.bottleneck(seen), loader._config
    assert limit is not None
    grown = {key: now[key] - seen[key] for key in now if key != "first_batch_s"}
    work = work_of(grown, config.num_threads, process.cores(), config.source.data_store.remote, graph=False)
    rate = grown["batches"] / (grown["wait_s"] + grown["training_s"])
    return Run(rate, limit, work, grown["decoded_frames"] / grown["frames"])


def assert_helps_as_predicted(before: Run, change: Callable[[Work], Work], after: Run) -> None:
    gain = before.work.seconds / change(before.work).seconds
    assert gain > 1.2, before.limit.text
    assert after.rate / before.rate == pytest.approx(gain, rel=0.25), before.limit.text


@pytest.mark.slow
@pytest.mark.alone
def test_one_thread(demo: Path, slow_decoding: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dali_stream.system.process.cores", lambda: 2)
    before = run(demo, 1, num_threads=1)
    assert before.limit.stage == "decode"
    assert "num_threads=2" in before.limit.text
    assert_helps_as_predicted(before, lambda work: work.with_threads(2), run(demo, 1, num_threads=2))


@pytest.mark.slow
@pytest.mark.alone
def test_a_tiny_budget(demo: Path, slow_decoding: float) -> None:
    before = run(demo, 3, STEP_S, skip=1, memory_budget="500kB")
    assert before.limit.stage == "decode"
    budget = re.search(r'memory_budget="([\w.]+)", which holds all decoded frames', before.limit.text)
    assert budget, before.limit.text
    after = run(demo, 3, STEP_S, skip=1, memory_budget=budget[1])
    assert after.limit.stage == "training"
    assert_helps_as_predicted(before, lambda work: work.scaled(decode=0.0, store=0.0), after)


@pytest.mark.slow
@pytest.mark.alone
def test_long_gops(written: Callable[..., Path], slow_decoding: float) -> None:
    """With little memory, so that most frames of a GOP are decoded again for each frame."""
    options = {"memory_budget": "500kB", "num_threads": 2}
    long, short = (written(episodes=4, size=(128, 160), codec="h264", gop=gop) for gop in (12, 2))
    before = run(long, 1, **options)
    assert before.limit.stage == "decode"
    assert "--gop 2" in before.limit.text
    after = run(short, 1, **options)
    assert_helps_as_predicted(before, lambda work: work.scaled(decode=1.5 / before.decoded), after)


@pytest.mark.slow
@pytest.mark.alone
def test_a_slow_server(demo: Path, tmp_path: Path) -> None:
    """A run needs no bytes of the server if an earlier run has left them in cache_dir."""
    with Server(demo, bytes_per_s=200_000.0) as server:
        before = run(server.url, 1, STEP_S)
        assert before.limit.stage in ("read", "rows")
        assert "cache_dir" in before.limit.text
        run(Dataset(server.url, cache_dir=tmp_path), 1)
        after = run(Dataset(server.url, cache_dir=tmp_path), 1, STEP_S)
    assert_helps_as_predicted(before, lambda work: work.scaled(network=0.0), after)


def test_a_slow_consumer(demo: Path) -> None:
    limit = run(Dataset(demo, episodes=[0, 1]), 1, 0.1).limit
    assert limit.stage == "training"
    assert "A faster loader would not help" in limit.text


def test_the_busiest_resource_determines_the_model() -> None:
    work = Work(decode=0.2, plan=0.001, copy=0.01, deliver=0.01, threads=2, cores=16)
    assert work.limit == "decode threads"
    assert work.seconds == pytest.approx(0.1, rel=0.01)
    assert work.times(1.2).seconds == pytest.approx(0.12)
    assert work.scaled(decode=0.5).times(1.2).seconds == pytest.approx(0.06, rel=0.01), "in proportion"
    assert work.scaled(decode=0.0).limit == "copying"
    assert Work(0.2, 0.001, 0.01, 0.01, network=0.3, threads=2, cores=16).limit == "network"
    assert Work(0.2, 0.1, 0.1, 0.1, threads=4, cores=2).limit == "CPU cores"


@pytest.mark.slow
@pytest.mark.alone
def test_the_command_predicts_what_each_remedy_brings(written: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    dataset = written(episodes=4, size=(128, 160), codec="h264", gop=30)
    settings = "--image-size 64x80 --batch-size 8 --memory-budget 4MiB --device cpu"
    arguments = ["why", str(dataset), *settings.split(), "--anyway"]  # whatever else this machine does
    assert main([*arguments, "--num-threads", "1", "--step-ms", "0.01", "--epochs", "3", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["needed"] == pytest.approx(100_000)
    remedies = {remedy["name"]: remedy for remedy in report["remedies"]}
    gains = [remedy["gain"] for remedy in report["remedies"]]
    assert gains == sorted(gains, reverse=True)
    for remedy in remedies.values():
        low, high = remedy["gain_range"]
        assert low <= remedy["gain"] <= high
        assert remedy["gain"] > 1, "what does not help is no remedy"
    for speed in (report["first"], report["later"], *(each["first"] for each in remedies.values())):
        low, high = speed["range"]
        assert low <= speed["batches_per_s"] <= high
    assert {'memory_budget="8MiB"', 'memory_budget="16MiB"', "frame_cache=DIR", "prepare --for cpu"} <= set(remedies)
    assert "prepare --for cpu --size 64x80" in remedies
    assert remedies['memory_budget="16MiB"']["later"]["decodes"] < remedies['memory_budget="8MiB"']["later"]["decodes"]
    assert remedies["prepare --for cpu"]["first"]["decodes"] < report["first"]["decodes"]
    assert "MB of video" in remedies["prepare --for cpu"]["price"]
    assert main([*arguments, "--step-ms", "0.01"]) == 0
    text = capsys.readouterr().out
    assert "training waits in the first epoch and in later epochs" in text
    assert "prepare --for cpu" in text


@pytest.mark.slow
@pytest.mark.alone
def test_later_epochs_of_a_recording_and_its_prepared_copy_are_equally_fast(demo: Path) -> None:
    """Both copy the same frames from memory. Measured apart from each other, they differed by up to a factor of 2."""
    found = why(demo, loader=SETTINGS, anyway=True)
    prepared = [remedy for remedy in found.remedies if remedy.prepare]
    assert found.later.decodes <= 0.05 * found.first.decodes
    for remedy in prepared:
        assert remedy.later.batches_per_s == found.later.batches_per_s
        assert remedy.gain_range[0] <= remedy.gain <= remedy.gain_range[1]


@pytest.fixture
def busy_machine() -> Iterator[None]:
    """Other processes use all cores."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in os.sched_getaffinity(0)]
    yield
    for other in others:
        other.kill()
        other.wait()


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="the use of the cores is read from /proc")
def test_nothing_is_predicted_beside_other_processes(
    small: Path, busy_machine: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["why", str(small), "--image-size", "32x40", "--batch-size", "8", "--device", "cpu"]) == 1
    error = capsys.readouterr().err
    assert re.search(r"other processes used \d+% of the cores of this process .* [\d.e+]+ to [\d.e+]+ batches/s", error)
    assert "Run this while nothing else uses the machine" in error


@pytest.mark.slow
@pytest.mark.alone
def test_the_command_takes_a_mixture_file(demo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    entries = {"few": {"uri": str(demo), "episodes": [0]}, "many": {"uri": str(demo), "episodes": [1, 2, 3, 4, 5]}}
    (path := tmp_path / "mixture.json").write_text(json.dumps({"datasets": entries, "weights": {"few": 3, "many": 1}}))
    settings = ["--image-size", "32x40", "--batch-size", "8", "--device", "cpu", "--anyway"]
    assert main(["why", str(path), *settings, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert 0 < report["later"]["decodes"] < report["first"]["decodes"], "an epoch shows only some frames"
    assert report["notes"] == ["prepare is not measured for a mixture. Run `dali-stream why URI` on each of its datasets"]
    low, high = report["first"]["range"]
    assert low <= report["first"]["batches_per_s"] <= high
    assert main(["why", str(path), *settings, "--data-files-root", str(demo)]) == 2
    assert "data_files_root belongs to one dataset" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"ranks": 0, "step_s": 0.1}, "ranks must be a positive integer, got 0"),
        ({"node_cores": -4, "step_s": 0.1}, "node_cores must be a positive integer, got -4"),
        ({"step_s": 0.0}, "step_s must be greater than 0, got 0.0"),
        ({"epochs": 0}, "epochs must be a positive integer, got 0"),
    ],
)
def test_bad_arguments(small: Path, given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        why(small, **given)


def test_bad_arguments_of_the_command(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["why", str(small), "--step-ms", "0"]) == 2
    assert "--step-ms must be greater than 0, got 0" in capsys.readouterr().err
    assert main(["why", str(small), "--batch-size", "500", "--device", "cpu"]) == 2
    assert "batch" in capsys.readouterr().err


@pytest.mark.slow
def test_arguments_of_the_dataset_that_prepare_lacks_are_left_out(demo: Path) -> None:
    found = why(demo, dataset={"drop_n_last_frames": 1, "give_up_after_s": 5.0}, loader=SETTINGS, anyway=True)
    assert not found.notes
