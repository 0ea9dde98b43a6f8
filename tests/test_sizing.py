"""What a node needs: the arithmetic is exact for given work, and `why` prints it for a dataset."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dali_stream import Dataset
from dali_stream.cli import main
from dali_stream.tools import Node, WhyReport
from dali_stream.tools.measuring import Speed
from dali_stream.tools.sizing import PROCESS_BYTES, prediction_range, size_node
from dali_stream.tools.speed_model import Work

# Multiples of 2^-10 s and powers of two, so that floats are exact.
SECONDS = st.integers(0, 4096).map(lambda number: number / 1024)
WORKS = st.builds(
    Work, decode=SECONDS, store=SECONDS, plan=SECONDS, copy=SECONDS, deliver=SECONDS, wait=SECONDS, network=SECONDS
)
STEPS = st.integers(0, 8).map(lambda power: 2.0**-power)


def test_the_worked_example_of_the_page() -> None:
    """8 GPUs, 120 ms a step, batches of 64 samples of two cameras, H.264 of 480×640 with GOP 2, each frame decoded once."""
    work = Work(decode=64 * 2 * 2.76e-3, store=64 * 2 * 0.5e-3, plan=64 * 0.14e-3, copy=64 * 2 * 0.07e-3, deliver=0.01)
    need = Node(ranks=8, cores=96, step_s=0.12).need(work)
    assert need.cores == pytest.approx(8 * (64 * (2 * (3.26 + 0.07) + 0.14) / 120 + 1))
    assert need.use["CPU cores"] == pytest.approx(need.cores / 96)
    assert need.use["decode threads"] == pytest.approx(64 * 2 * 3.26 / 12 / 120)
    assert need.use["planner"] == pytest.approx(64 * 0.14 / 120)
    assert need.first == "CPU cores"
    assert need.enough


@given(work=WORKS, ranks=st.sampled_from([1, 2, 4, 8]), step_s=STEPS, training=st.sampled_from([0.0, 0.5, 1.0]))
def test_as_many_cores_as_are_needed_are_enough_and_fewer_are_not(
    work: Work, ranks: int, step_s: float, training: float
) -> None:
    needed = math.ceil(Node(ranks, 1, step_s, training).need(work).cores)
    for cores in (max(needed, ranks), max(needed, ranks) + 1, needed - 1):
        if cores >= ranks:
            use = Node(ranks, cores, step_s, training).need(work).use
            assert (max(use["CPU cores"], use["decode threads"]) <= 1) == (cores >= needed)


@given(work=WORKS, step_s=STEPS)
def test_what_is_shared_and_what_is_not(work: Work, step_s: float) -> None:
    one, two = (Node(ranks, 8, step_s, 0.0, num_threads=2).need(work).use for ranks in (1, 2))
    assert two["CPU cores"] == 2 * one["CPU cores"]
    assert two["network"] == 2 * one["network"]
    for name in ("decode threads", "planner", "copying"):
        assert two[name] == one[name], "each rank has its own"


@given(work=WORKS)
def test_a_rank_that_has_the_machine_to_itself_works_as_measured(work: Work) -> None:
    measured = replace(work, threads=3, cores=3)
    assert Node(1, 3, 1.0, 0.0).share(measured) == measured


def test_the_memory_the_disk_and_the_network() -> None:
    node = Node(ranks=4, cores=32, step_s=0.25)
    needs = [[node.need(Work(decode, 0.0, 0.0, 0.0)) for decode in seconds] for seconds in ((0.5, 0.1), (0.7, 0.3), (0.6, 0.2))]
    sizing = size_node(
        node, needs, frames=1000, batch_size=16, frame_bytes=300, video_bytes=20.5, memory_budget=4096, frames_budget=300_500
    )
    assert sizing.memory == 4 * (4096 + PROCESS_BYTES)
    assert sizing.memory_for_all_frames == 4 * (300_500 + PROCESS_BYTES)
    assert sizing.frame_cache == 300_000
    assert sizing.videos == 20_500
    assert sizing.network == 4 * 16 * 20.5 * 4
    assert sizing.first.cores == needs[2][0].cores, "the median"
    assert sizing.later.cores == needs[2][1].cores
    low, high = sizing.first.cores_range
    assert low < needs[0][0].cores < needs[1][0].cores < high


@pytest.mark.parametrize("count", [3, 5, 20])
def test_a_range_contains_another_measurement_in_four_of_five_cases(count: int) -> None:
    draw = random.Random(0)
    cases, inside = 4000, 0
    for _ in range(cases):
        *values, another = (math.exp(draw.gauss(1.0, 0.2)) for _ in range(count + 1))
        low, high = prediction_range(values)
        inside += low <= another <= high
    assert inside / cases == pytest.approx(0.8, abs=0.03)


def test_the_error_of_the_model_widens_a_range() -> None:
    assert prediction_range([2.0, 2.0, 2.0], error=0.25) == pytest.approx((1.6, 2.5))


def test_a_node_needs_the_time_of_a_step(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for option in ("--ranks", "--cores"):
        assert main(["why", str(small), option, "8"]) == 2
        assert "step_s (--step-ms) must be given" in capsys.readouterr().err


def printed(node: Node, work: Work, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """The text of the command for a rank with this work in each epoch."""
    needs = [[node.need(work)] * 2] * 3
    sizes = {"frames": 9, "batch_size": 1, "frame_bytes": 300, "video_bytes": 20.5, "memory_budget": 99, "frames_budget": 999}
    speed = Speed(1.0, "decode threads", 0.5, (1.0, 1.0))
    report = WhyReport(speed, speed, 100.0, 10, [], sizing=size_node(node, needs, **sizes))
    monkeypatch.setattr("dali_stream.tools.why", lambda *_, **__: report)
    assert main(["why", "anywhere"]) == 0
    return " ".join(capsys.readouterr().out.split())


def test_later_epochs_of_several_ranks_are_the_second(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In each epoch a rank sees other frames, until it holds all of them."""
    work = Work(decode=0.5, plan=0.0, copy=0.0, deliver=0.0)
    several = printed(Node(8, 96, 0.5), work, monkeypatch, capsys)
    assert "training waits in the first epoch and in the second epoch" in several
    assert "cores, second epoch" in several
    assert "later epochs" not in several
    one = printed(Node(1, 96, 0.5), work, monkeypatch, capsys)
    assert "training waits in the first epoch and in later epochs" in one
    assert "second epoch" not in one


@pytest.mark.parametrize(("name", "said"), [("plan", "the planner"), ("deliver", "copying"), ("network", "the network")])
def test_what_more_cores_do_not_change_is_named(
    name: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    work = replace(Work(decode=0.0, plan=0.1, copy=0.0, deliver=0.0), **{name: 60.0})
    assert f"{said} is too slow, and more cores do not change that" in printed(Node(1, 96, 0.5), work, monkeypatch, capsys)


@pytest.mark.slow
@pytest.mark.alone
def test_the_command_sizes_a_node(written: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    dataset = written(episodes=4, size=(128, 160), codec="h264", gop=30)
    arguments = ["why", str(dataset), *["--batch-size", "8", "--device", "cpu", "--anyway", "--image-size", "64x80"]]
    assert main([*arguments, *["--ranks", "2", "--cores", "64", "--step-ms", "500", "--json"]]) == 0
    report = json.loads(capsys.readouterr().out)
    sizing = report["sizing"]
    assert sizing["node"] == {"ranks": 2, "cores": 64, "step_s": 0.5, "training_cores": 1.0, "num_threads": None}
    for need in (sizing["first"], sizing["later"]):
        low, high = need["cores_range"]
        assert low < need["cores"] < high < 64
        assert need["cores"] > 2, "two training programs"
        assert need["use"]["CPU cores"] <= need["cores"] / 64 <= 1
    whole = Dataset(dataset)
    assert sizing["frame_cache"] == whole.num_frames * len(whole.cameras) * 64 * 80 * 3
    assert main([*arguments, *["--ranks", "2", "--cores", "1", "--step-ms", "1"]]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "of 1 core: not enough" in text
    assert "Extrapolated: another number of cores or ranks" in text
