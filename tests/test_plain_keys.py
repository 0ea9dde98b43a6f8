"""Datasets whose actions and states have plain keys, `actions` and `state`, or that have no camera: preview and bench."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support.datasets import Column, build, read_rows
from support.programs import failed

from dali_stream import Dataset, DatasetError, Loader
from dali_stream.cli import main

LENGTHS = (60, 70)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Makes a dataset of rows alone with these vectors of three floats."""
    folder = tmp_path_factory.mktemp("rows")

    def made(*keys: str) -> Path:
        root = folder / "-".join(keys)
        values = np.random.default_rng(0).random((sum(LENGTHS), 3), np.float32)
        columns = {key: Column("float32", [3], values + number) for number, key in enumerate(keys)}
        columns["next.reward"] = Column("float32", [1], values[:, 0])
        columns["joint"] = Column("int64", [1], np.arange(sum(LENGTHS)))
        return root if root.exists() else build(root, LENGTHS, columns)

    return made


def plotted(path: Path) -> list[str]:
    """The features that a sheet plots, in order."""
    with Image.open(path) as sheet:
        content: dict[str, Any] = json.loads(sheet.text["dali_stream"])  # type: ignore[attr-defined]  # PNGs have it
    return list(dict.fromkeys(plot["key"] for plot in content["plots"]))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], ["state", "actions"]),
        (["--action", "actions"], ["actions", "state"]),
        (["--action", "joint"], ["joint", "state", "actions"]),
    ],
)
def test_preview_plots_vectors_of_floats(
    options: list[str], expected: list[str], rows: Callable[..., Path], tmp_path: Path
) -> None:
    assert main(["preview", str(rows("state", "actions")), "--out", str(tmp_path / "a.png"), *options]) == 0
    assert plotted(tmp_path / "a.png") == expected


def test_preview_plots_a_mixture_without_cameras(rows: Callable[..., Path], tmp_path: Path) -> None:
    first, second = rows("state", "actions"), rows("actions")
    assert main(["preview", str(first), str(second), "--out", str(tmp_path / "a.png")]) == 0
    assert plotted(tmp_path / "a.png") == ["state", "actions"]


def bench(capsys: pytest.CaptureFixture[str], root: Path, *options: str) -> dict[str, Any]:
    line = ["bench", str(root), "--mode", "action_chunk", "--num-batches", "2", "--warmup", "1", "--batch-size", "4"]
    assert main([*line, *options, "--json"]) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


def test_bench_measures_rows_without_a_camera(rows: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    report = bench(capsys, rows("state", "actions"))
    assert (report["frames"], report["samples"], report["decoded_per_delivered_frame"]) == (0, 8, None)
    assert report["samples_per_s"] > 0
    assert bench(capsys, rows("a", "b"), "--action", "b")["samples"] == 8


def test_bench_names_the_features_that_may_be_the_actions(
    rows: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    line = failed(capsys, ["bench", rows("a", "b"), "--mode", "action_chunk"], 2)
    assert "Give it with --action. Vectors of floats: a, b" in line
    line = failed(capsys, ["bench", rows("left_action", "right_action"), "--mode", "action_chunk"], 2)
    assert "Vectors of floats: left_action, right_action" in line
    line = failed(capsys, ["bench", rows("a", "b"), "--mode", "action_chunk", "--action", "c"], 2)
    assert "--action must be a feature with numbers, got 'c'. Available: a, b, next.reward" in line


def test_a_misspelt_mode_is_an_error(rows: Callable[..., Path]) -> None:
    with pytest.raises(ValueError, match=r"normalize must be one of 'mean_std', 'min_max', 'quantiles' or None, .*got 'bogus'"):
        Loader(rows("state", "actions"), device="cpu", normalize="bogus")
    with pytest.raises(ValueError, match=r"normalize must be one of .* for a single dataset, got 'min_max_per_dataset'"):
        Loader(rows("state", "actions"), device="cpu", normalize="min_max_per_dataset")


def test_a_mode_without_a_feature_is_a_warning(rows: Callable[..., Path], caplog: pytest.LogCaptureFixture) -> None:
    """The warning names the features, and a mode for one of them is followed."""
    root = rows("state", "actions")
    with Loader(root, device="cpu", normalize="min_max") as loader:
        assert loader.normalizer.modes == {}
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "normalize={'state': 'min_max'}. Float features: state, actions, next.reward" in record.getMessage()
    stats = Dataset(root).compute_stats()
    with Loader(Dataset(root, stats=stats), device="cpu", batch_size=10, normalize={"state": "min_max"}) as loader:
        batch = next(iter(loader))
    plain = read_rows(root)["state"]
    low, high = stats["state"]["min"], stats["state"]["max"]
    for index, row in zip(batch["index"].tolist(), batch["state"].numpy(), strict=True):
        np.testing.assert_allclose(row, (np.array(plain[index]) - low) / (high - low) * 2 - 1, atol=1e-5)


@pytest.mark.parametrize("shares", [0.8, [0.8, 0.2], "0.8", {"train": "0.8"}, {"train": None}, {"train": float("nan")}])
def test_shares_of_another_form_are_refused(shares: Any, rows: Callable[..., Path]) -> None:
    with pytest.raises(ValueError, match=r"shares must be (a dict such as {'train': 0.8, 'val': 0.2}|positive numbers)"):
        Dataset(rows("state", "actions")).split(shares)
    assert [len(part.episodes) for part in Dataset(rows("state", "actions")).split({"train": 0.5, "val": 0.5}).values()] == [
        1,
        1,
    ]


def test_an_unknown_command_is_answered_with_a_similar_one(capsys: pytest.CaptureFixture[str]) -> None:
    line = failed(capsys, ["inof"], 2)
    assert "Did you mean 'info'? See dali-stream --help" in line


def test_an_unknown_scheme_is_the_same_error_for_source_and_target(
    rows: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(DatasetError, match=r"nonsense://x: unknown scheme nonsense://"):
        Dataset("nonsense://x")
    line = failed(capsys, ["prepare", rows("state", "actions"), "nonsense://x"], 1)
    assert "nonsense://x: unknown scheme nonsense://. Allowed: a local folder" in line
