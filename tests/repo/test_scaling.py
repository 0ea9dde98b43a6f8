"""benchmarks/scaling.py: exponents and bends that are known are found, and every axis is measured."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.slow import examples, slow

from dali_stream import Dataset

ROOT = Path(__file__).parents[2]
VALUES = [1, 2, 4, 8, 16, 32, 64]


@pytest.fixture(scope="module")
def scaling() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        import scaling

        yield scaling


@given(exponent=st.floats(-2, 2), factor=st.floats(1e-6, 1e9), noise=st.integers(0, 2**32 - 1))
@examples(50)
def test_a_power_law_is_found_through_noise(scaling: ModuleType, exponent: float, factor: float, noise: int) -> None:
    wrong = np.random.default_rng(noise).uniform(0.95, 1.05, len(VALUES))
    found = scaling.fit(VALUES, factor * np.asarray(VALUES, float) ** exponent * wrong)
    assert found.exponent == pytest.approx(exponent, abs=0.05)
    assert found.at is None


@given(
    before=st.floats(-1, 1), step=st.sampled_from([-1.0, -0.5, 0.5, 1.0]), at=st.integers(2, 4), noise=st.integers(0, 2**32 - 1)
)
@examples(50)
def test_a_bend_is_found_where_it_is(scaling: ModuleType, before: float, step: float, at: int, noise: int) -> None:
    x = np.log(VALUES)
    y = before * x + step * np.maximum(x - x[at], 0)
    found = scaling.fit(VALUES, np.exp(y) * np.random.default_rng(noise).uniform(0.99, 1.01, len(VALUES)))
    assert found.at == VALUES[at]
    assert found.before == pytest.approx(before, abs=0.05)
    assert found.after == pytest.approx(before + step, abs=0.05)


def test_a_fixed_cost_bends_where_the_growing_one_takes_over(scaling: ModuleType) -> None:
    values = [10**power for power in range(1, 8)]
    found = scaling.fit(values, [1e-3 + 1e-6 * value for value in values])
    assert found.at in (100, 1000, 10_000)
    assert found.before < 0.3
    assert found.after > 0.7


@pytest.mark.parametrize(("values", "exponent"), [([1, 2], 1.0), ([1, 4, 8, 16], 1.0), ([5], None)])
def test_few_values_have_no_bend(scaling: ModuleType, values: list[int], exponent: float | None) -> None:
    found = scaling.fit(values, values)
    assert found is None if exponent is None else found == (pytest.approx(exponent), None, None, None)


def test_values_take_turns_and_the_medians_count(scaling: ModuleType) -> None:
    asked: list[int] = []
    rounds = iter([1, 1, 5, 5, 2, 2])  # the cost in each round, of which the second is disturbed

    def cost(value: int) -> dict[str, float]:
        asked.append(value)
        return {"s": next(rounds) * value}

    found = scaling.measured(scaling.Axis("things", [1, 10], cost), rounds=3)
    assert asked == [1, 10, 10, 1, 1, 10]
    assert found["costs"] == {"s": [2, 20]}
    assert found["fits"]["s"]["exponent"] == pytest.approx(1)


def test_a_dataset_of_metadata_is_one(scaling: ModuleType, tmp_path: Path) -> None:
    dataset = Dataset(scaling.write_metadata(tmp_path / "many", 2500))
    assert (dataset.num_episodes, dataset.num_frames) == (2500, 250_000)
    assert len(dataset.table.data.paths) == 25


@pytest.mark.slow
@pytest.mark.parametrize(
    "axes",
    [
        ["batch", "episodes", "ranks"],
        slow(["threads", "batch", "window", "gop", "episodes", "consumers", "pool", "ranks"], id="all"),
    ],
)
def test_every_axis_is_measured(
    scaling: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], axes: list[str]
) -> None:
    out = tmp_path / "reports/scaling.json"
    chosen = ["--axes", ",".join(axes)] if len(axes) < 8 else []
    assert scaling.main(["--quick", "--json", "--out", str(out), *chosen]) == 0
    said = capsys.readouterr().out
    report = json.loads(said.splitlines()[-1])
    assert report == json.loads(out.read_text())
    assert list(report["axes"]) == axes
    for name, axis in report["axes"].items():
        assert f"{name}: {axis['what']}" in said
        for cost, costs in axis["costs"].items():
            assert len(costs) == len(axis["values"])
            assert min(costs) > 0
            assert axis["fits"][cost] is not None or len(costs) == 1
    read = report["axes"]["ranks"]["costs"]["resume_s"]  # half of an epoch, of which each rank has its share
    assert read[0] > read[-1]


def test_an_axis_that_does_not_exist(scaling: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        scaling.main(["--axes", "threads,wheels"])
    assert "must be one of threads, batch, " in capsys.readouterr().err
