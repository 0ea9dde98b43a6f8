"""benchmarks/simulate.py: the loader's schedule against a network of queues."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.slow import examples

import dali_stream

ROOT = Path(__file__).parents[1]
SMALL = {"bytes_in_all": 1e10, "episode_s": 4, "fps": 20, "cameras": 2, "bitrate": 4e6}  # 2 MB an episode and camera
STEPS = 16


@pytest.fixture(scope="module")
def parts() -> Iterator[SimpleNamespace]:
    """The program's parts. Their folder is on the path for as long as this module needs it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        import queue_model
        import simulate

        names = ("Network", "Recording", "Training", "simulate")
        yield SimpleNamespace(
            **{name: getattr(queue_model, name) for name in names}, smallest=simulate.smallest, main=simulate.main
        )


@pytest.fixture(scope="module")
def small(parts: SimpleNamespace) -> Any:
    """A made-up dataset of 2500 episodes of 80 frames."""
    return parts.Recording(**SMALL)


def run(parts: SimpleNamespace, recording: Any, megabytes_per_s: float, latency_s: float = 0.02, **changes: Any) -> Any:
    """Some steps of a rank of four, which show 8 MB/s of video."""
    world, ranks = changes.pop("world", 4), changes.pop("ranks", 1)
    training = parts.Training(**{"batch_size": 16, "step_s": 0.1, "steps": STEPS, "consumers": 4, **changes})
    return parts.simulate(recording, training, megabytes_per_s * 1e6, latency_s, world, ranks)


# ---- what holds for any


@pytest.mark.parametrize("changes", [{}, {"mode": "sarm"}, {"mode": "action_chunk"}, {"memory_budget": 90 << 20, "pool": 64}])
def test_more_bandwidth_never_waits_longer(parts: SimpleNamespace, small: Any, changes: dict[str, Any]) -> None:
    waits = [sum(run(parts, small, rate, **changes).waits) for rate in (4, 12, 1000)]
    assert waits == sorted(waits, reverse=True)
    assert waits[0] > 2 * waits[-1]


def test_below_what_is_shown_it_stalls_and_well_above_it_does_not(parts: SimpleNamespace, small: Any) -> None:
    slow, fast = run(parts, small, 4, steps=80), run(parts, small, 40, steps=80)
    assert slow.wait_share == pytest.approx(0.5, abs=0.15)  # half of the bandwidth, twice the time
    assert (fast.wait_share, fast.waiting_steps) == (0.0, 0.0)


@examples(4)
@given(
    megabytes_per_s=st.sampled_from([3.0, 10.0, 300.0]),
    latency_s=st.sampled_from([0.0, 0.05]),
    budget=st.sampled_from([90 << 20, 1 << 30]),
    ranks=st.sampled_from([1, 2]),
    pool=st.sampled_from([8, 64]),
)
def test_bytes_are_conserved(
    parts: SimpleNamespace, small: Any, megabytes_per_s: float, latency_s: float, budget: int, ranks: int, pool: int
) -> None:
    found = run(parts, small, megabytes_per_s, latency_s, memory_budget=budget, ranks=ranks, pool=pool)
    assert found.fetched == sorted(found.fetched)
    assert found.fetched[-1] <= found.seconds * megabytes_per_s * 1e6 * ranks * 1.0001
    shown = STEPS * 16 * small.packet * len(small.cameras) * ranks
    assert found.fetched[-1] > shown
    assert 0 < found.peak_resident <= budget
    assert found.seconds == pytest.approx(sum(found.waits) + STEPS * 0.1)
    assert not found.evicted or budget == 90 << 20
    assert found.decodes >= 1


def test_twice_the_same(parts: SimpleNamespace, small: Any) -> None:
    assert run(parts, small, 7, ranks=2) == run(parts, parts.Recording(**SMALL), 7, ranks=2)


def test_a_decoder_takes_its_time(parts: SimpleNamespace, small: Any) -> None:
    """320 frames a second are shown."""
    assert run(parts, small, 1000, decode_frames_per_s=640.0).wait_share == 0
    slow = run(parts, small, 1000, decode_frames_per_s=160.0, steps=60, warmup=0.0)
    assert slow.wait_share == pytest.approx(1 - 160 / (320 * slow.decodes), abs=0.05)


def test_a_budget_that_holds_no_batch_is_refused(parts: SimpleNamespace, small: Any) -> None:
    with pytest.raises(dali_stream.MemoryBudgetError, match=r"memory_budget must be at least about .*got 1000000"):
        run(parts, small, 1, memory_budget=1_000_000)


# ---- the parts


@given(
    jobs=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 3), st.integers(1, 300)), min_size=1, max_size=60),
    latency=st.sampled_from([0.0, 0.5]),
)
@examples(50)
def test_a_link_is_shared_and_a_sooner_need_comes_first(
    parts: SimpleNamespace, jobs: list[tuple[int, int, int]], latency: float
) -> None:
    network = parts.Network(100.0, latency)
    submitted = [network.submit((priority,), trips, size) for priority, trips, size in jobs]
    ends = [network.wait(job) for job in submitted]
    total = sum(size for _, _, size in jobs)
    assert max(ends) >= total / 100 - 1e-9
    assert network.fetched(max(ends)) == total
    assert network.requests == sum(trips for _, trips, _ in jobs)
    assert all(end >= trips * latency + size / 100 - 1e-9 for end, (_, trips, size) in zip(ends, jobs, strict=True))
    if not latency:
        assert max(ends) == pytest.approx(total / 100)
        queued = sorted(submitted)[32:]  # behind those that the fetch threads begin with
        assert [job.done for job in queued] == sorted(job.done for job in queued)


@given(enough=st.floats(0.1, 10))
@examples(50)
def test_the_smallest_bandwidth_is_found(parts: SimpleNamespace, enough: float) -> None:
    assert enough <= parts.smallest(lambda bandwidth: bandwidth >= enough, 1.0) <= enough * 1.0701


def test_no_bandwidth_is_enough(parts: SimpleNamespace) -> None:
    assert parts.smallest(lambda bandwidth: False, 1.0) is None


# ---- the program

CLUSTER = "--nodes 2 --gpus-per-node 2 --dataset-tb 0.01 --episode-seconds 4 --cameras 1 --batch-size 16 --step-ms 100"


def test_the_program_says_what_would_be_enough(parts: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    assert parts.main([*CLUSTER.split(), "--minutes", "0.05", "--bandwidth-gbps", "0.02", "--json"]) == 0
    said = capsys.readouterr().out
    report = json.loads(said.splitlines()[-1])
    assert said.startswith("stalls: 4 ranks on 2 nodes")
    assert not report["keeps_up"]
    assert report["smallest_gbps"] > report["needed_gbps"] == pytest.approx(2 * 160 * 16667 * 8e-9)
    assert f"{report['smallest_gbps']:.2f} Gbit/s a node keep up as it is" in report["advice"]


def test_the_program_does_not_judge_while_the_pools_fill(parts: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    """There is bandwidth enough, and 2 s a request: until the pools are full it waits, and what comes then is not known."""
    assert parts.main([*CLUSTER.split(), "--minutes", "0.05", "--latency-ms", "2000", "--json"]) == 0
    said = capsys.readouterr().out
    report = json.loads(said.splitlines()[-1])
    assert said.startswith("undecided: 4 ranks on 2 nodes")
    assert (report["keeps_up"], report["smallest_gbps"]) == (None, None)
    assert any(line.startswith("the pools were not full") for line in report["advice"])


@pytest.mark.parametrize("given", [["--latency-ms", "nan"], ["--latency-ms", "-5"], ["--step-ms", "inf"], ["--nodes", "0"]])
def test_numbers_that_cannot_be_are_refused(parts: SimpleNamespace, given: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        parts.main(given)


@pytest.mark.slow
def test_the_program_says_which_budget_or_pool_would_do(parts: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    given = "--gpus-per-node 1 --dataset-tb 0.01 --cameras 1 --batch-size 32 --consumers 1 --pool 32"
    given += " --memory-budget 130MiB --minutes 0.05 --bandwidth-gbps 1 --step-ms 100 --json"
    assert parts.main(given.split()) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["pool_bytes"] == 32 * 900 * 16667
    assert report["evicted_early"] > 0
    assert any(line.startswith("memory_budget 1.2 GiB") for line in report["advice"])
    assert any(line.startswith("episode_pool_size 3 ") for line in report["advice"])


def test_the_program_says_what_is_wrong_in_one_line(parts: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, what in (
        ("--nodes 3 --consumers 32 --dataset-tb 0.01", "must divide consumers=32, got 24"),
        ("--fps 1e9", "3e+10 frames"),
        ("--dataset-tb 1e300", "1e+300 TB"),
    ):
        assert parts.main(arguments.split()) == 1
        said = capsys.readouterr().err
        assert said.count("\n") == 1
        assert what in said
