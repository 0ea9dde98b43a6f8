"""`dali-stream` with several datasets, or a mixture file: what info says, preview shows and bench measures."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from accelerate import PartialState
from support.datasets import SIDE, TOP, Column, build
from support.programs import failed, pictures

import dali_stream
from dali_stream.cli import main
from dali_stream.demo import read_identities
from dali_stream.order.state import OrderArguments


@pytest.fixture(autouse=True)
def _one_rank() -> Iterator[None]:
    """Reset the ranks that Accelerate stores during a measurement."""
    yield
    PartialState._reset_state()


@pytest.fixture
def mixture(demo: Path, vp9_demo: Path, tmp_path: Path) -> Path:
    """Two demo datasets with frames of one size, of which one has no top camera: two thirds of the samples."""
    text = f"""
        datasets: {{both: {demo}, side: {{uri: {vp9_demo}, cameras: [{SIDE}]}}}}
        weights: {{both: 1, side: 2}}
        missing: pad
    """
    (path := tmp_path / "mixture.yaml").write_text(text)
    return path


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Datasets of rows: `large/a`, and the small `small/a` and `small/b` with other states."""
    root = tmp_path_factory.mktemp("rows")
    for name, lengths, dtype, width in (
        ("large/a", [300, 400], "float32", 3), ("small/a", [7, 3], "float32", 2), ("small/b", [7], "int64", 2)
    ):  # fmt: skip
        values = np.zeros((sum(lengths), width), dtype)
        build(root / name, lengths, {"observation.state": Column(dtype, [width], values)})
    return root


def information(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[dict[str, Any], str]:
    """Output of `info` as JSON, and as text."""
    line = ["info", *map(str, arguments)]
    assert main([*line, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert main(line) == 0
    return found, " ".join(capsys.readouterr().out.split())


# ---- info


def test_info_of_a_file_has_the_share_of_each_dataset_and_in_what_they_differ(
    mixture: Path, demo: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found, text = information(capsys, mixture)
    frames = [dali_stream.Dataset(demo).num_frames, dali_stream.Mixture.from_file(mixture).datasets["side"].num_frames]
    parts = found["datasets"]
    assert (found["kind"], found["epoch_samples"], list(parts)) == ("weights", sum(frames), ["both", "side"])
    assert [part["frames"] for part in parts.values()] == frames
    assert [part["hours"] for part in parts.values()] == pytest.approx([count / 20 / 3600 for count in frames])
    assert [part["share"] for part in parts.values()] == pytest.approx([1 / 3, 2 / 3])
    assert [part["passes"] for part in parts.values()] == pytest.approx(
        [share * sum(frames) / count for share, count in zip((1 / 3, 2 / 3), frames, strict=True)]
    )
    assert found["differences"] == {TOP: {"both": "video 128×160", "side": None}}
    assert found["warning"] == ""
    assert f"mixture 2 datasets, {sum(frames)} frames" in text
    assert all(said in text for said in ("33.3%", "66.7%", f"{TOP} video 128×160 missing missing: pad"))


def test_info_of_several_datasets_is_of_their_union_whatever_they_have(rows: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found, text = information(capsys, rows / "large/a", rows / "small/a", rows / "small/b")
    assert (found["kind"], found["epoch_samples"]) == ("union", 717)
    assert {name: part["passes"] for name, part in found["datasets"].items()} == {"large/a": 1, "small/a": 1, "b": 1}
    key = "observation.state"
    assert found["differences"] == {key: {"large/a": "float32 (3,)", "small/a": "float32 (2,)", "b": "int64 (2,)"}}
    assert (found["conflicts"], found["warning"]) == ([key], "")
    assert f"{key} float32 (3,) float32 (2,) int64 (2,) cannot be one" in text
    found, text = information(capsys, rows / "large/a", rows / "small/a")
    assert (list(found["differences"]), found["conflicts"]) == ([key], [])
    assert f"{key} float32 (3,) float32 (2,) missing: pad" in text


def test_info_warns_of_a_dataset_that_is_repeated_more_than_ten_times_as_often(
    rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Equal weights of 700 and 10 frames: 70 times as often. Weights of 7 and 1: exactly 10 times."""
    for weights, said in (("{many: 1, few: 1}", "few 70 times as often as those of many"), ("{many: 7, few: 1}", "")):
        text = f"datasets: {{many: {rows}/large/a, few: {rows}/small/a}}\nweights: {weights}\nmissing: pad"
        (path := tmp_path / "mixture.yml").write_text(text)
        found, text = information(capsys, path)
        assert said in found["warning"]
        assert bool(found["warning"]) == ("Warning: " in text) == bool(said)


def test_info_of_frames_of_several_sizes_names_image_size(demo: Path, small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found, text = information(capsys, demo, small)
    assert found["sizes"] == [TOP, SIDE]
    assert f"{TOP} video 128×160 video 120×128 image_size" in text


def test_options_hold_for_each_dataset(rows: Path, mixture: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found, _ = information(capsys, rows / "large/a", rows / "small/a", "--episodes", "0")
    assert [part["frames"] for part in found["datasets"].values()] == [300, 7]
    found, _ = information(capsys, mixture, "--episodes", "1")
    assert [part["episodes"] for part in found["datasets"].values()] == [1, 1]


def test_what_does_not_go_together_is_one_line(
    rows: Path, demo: Path, mixture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (bad := tmp_path / "bad.json").write_text('{"datasets": {"a": "x"}, "weight": {"a": 1}}')
    for arguments, code, said in (
        (["info", rows / "large/a", rows / "large/a"], 2, "Datasets must differ, got "),
        (["info", mixture, demo], 2, "A mixture file must be the only URI, got "),
        (
            ["info", mixture, "--data-files-root", demo],
            2,
            "data_files_root belongs to one dataset. Write it into the mixture file",
        ),
        (["info", bad], 2, "bad.json: Unknown key 'weight' in the file"),
        (["info", tmp_path / "none.yaml"], 2, "none.yaml: No such file"),
        (["info", demo, tmp_path / "none"], 1, "dataset 'none': "),
    ):
        assert said in failed(capsys, arguments, code)


def test_a_list_of_differences_has_its_lines(
    rows: Path, demo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["preview", str(rows / "large/a"), str(rows / "small/b")]) == 2
    first, *lines, last = capsys.readouterr().err.splitlines()
    assert first.startswith("dali-stream: ")
    assert "Features with the same key must be compatible" in first
    assert last.startswith("Give one of them another key")
    assert len(lines) > 1
    names = [f"a_name_that_takes_its_place_{number}" for number in range(4)]
    entries = {name: {"uri": str(rows / "large/a" if number else demo)} for number, name in enumerate(names)}
    (path := tmp_path / "mixture.json").write_text(json.dumps({"datasets": entries}))
    assert main(["preview", str(path)]) == 2
    _, *lines, _ = capsys.readouterr().err.splitlines()
    place = lines.index(f"  {TOP}")
    assert lines[place + 1 : place + 5] == [
        f"    {name}: {'missing' if number else 'video 128×160'}" for number, name in enumerate(names)
    ]


# ---- stats


def test_stats_of_a_mixture_file_are_those_of_each_dataset(
    rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Written into the file as the command says, they normalize the mixture."""
    key, missing = "observation.state", tmp_path / "none.json"
    entries = {"many": {"uri": str(rows / "large/a"), "episodes": [1]}, "few": {"uri": str(rows / "small/a")}}
    (path := tmp_path / "mixture.json").write_text(json.dumps({"datasets": entries, "missing": "pad"}))
    assert main(["stats", str(path)]) == 0
    found = json.loads(capsys.readouterr().out)
    for name, arguments in entries.items():
        own = dali_stream.Dataset(**arguments).compute_stats()
        assert {feature: list(each) for feature, each in found[name].items()} == {k: list(v) for k, v in own.items()}
        for feature, each in own.items():
            for statistic, value in each.items():
                np.testing.assert_array_equal(found[name][feature][statistic], value)
    assert found["many"][key]["count"] == [400]
    assert main(["stats", str(path), "--out", str(missing)]) == 0
    assert "2 datasets with 3 episodes" in capsys.readouterr().out
    assert json.loads(missing.read_text()) == found
    # Statistics under which the state 0 becomes the number of its dataset.
    for number, name in enumerate(entries):
        of_state = {"mean": -number, "std": 1.0, "min": -number - 1, "max": -number + 1}
        found[name][key] |= {statistic: [value] * len(found[name][key]["mean"]) for statistic, value in of_state.items()}
        entries[name]["stats"] = found[name]
    path.write_text(json.dumps({"datasets": entries, "missing": "pad"}))
    with dali_stream.Loader(
        dali_stream.Mixture.from_file(path), batch_size=50, normalize={key: "mean_std_per_dataset"}
    ) as loader:
        for batch in loader:
            number = (np.array(batch["dataset"]) == "few").astype(np.float32)
            np.testing.assert_allclose(batch[key][:, 0], number)


# ---- preview and bench


def test_preview_shows_samples_with_the_name_of_their_dataset(
    mixture: Path, demo: Path, vp9_demo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "sheet.png"
    assert main(["preview", str(mixture), "--out", str(out), "--batch-size", "12", "--window", f"{TOP}=-0.1,0"]) == 0
    assert f"12 samples of {TOP}, {SIDE}" in capsys.readouterr().out
    found = pictures(out)
    assert len(found) == 12 * 3
    names = {said["sample"]: said["dataset"] for said, _ in found}
    assert sorted(names.values()) == ["both"] * 4 + ["side"] * 8
    for said, picture in found:
        if (said["dataset"], said["camera"]) == ("side", TOP):
            assert not picture[40:].any(), "a camera that is missing is black below its mark"
            continue
        frame = max(said["frame"] - 2, 0) if (said["camera"], said["step"]) == (TOP, 0) else said["frame"]
        assert read_identities(picture[None]).tolist() == [[said["episode"], frame, [TOP, SIDE].index(said["camera"])]]


@pytest.mark.slow
def test_bench_measures_a_mixture_and_the_shares_that_came(
    mixture: Path, demo: Path, small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--batch-size", "12", "--num-batches", "5", "--warmup", "1", "--device", "cpu"]
    assert main(["bench", str(mixture), *options, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    both, side = (found["datasets"][name] for name in ("both", "side"))
    assert both["samples"] + side["samples"] == found["samples"] == 60
    opened = dali_stream.Mixture.from_file(mixture)
    order = opened.orders().of(0, OrderArguments(True, 0, found["consumers"], found["episode_pool_size"]))
    episodes, _ = order.read(12, 60)  # after the warm-up
    assert [both["samples"], side["samples"]] == np.bincount(opened.dataset_of[episodes]).tolist()
    assert both["delivered"] == both["samples"] / 60
    assert (both["share"], side["share"]) == pytest.approx((1 / 3, 2 / 3))
    assert found["frames"] == 2 * both["samples"] + side["samples"], "frames that are missing do not count"
    assert (found["source"], found["fps"]) == ("mixture", {"both": 20, "side": 20})
    assert found["cameras"] == {TOP: [128, 160], SIDE: [128, 160]}
    assert main(["bench", str(demo), str(small), *options, "--mode", "action_chunk"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "dataset the mixture of" in text
    assert text.count("its share is") == 2
