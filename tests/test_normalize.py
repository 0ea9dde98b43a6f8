"""Normalisation by the dataset's statistics: the results, the inverse, and the refused cases."""

from __future__ import annotations

import itertools
import json
import logging
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.batches import equal
from support.collection import no_collection
from support.datasets import ODD_CAMERA, SIDE, TOP, read_rows, tree
from support.faults import hang
from support.servers import Handler, Server
from support.slow import slow_after

from dali_stream import Dataset, DatasetError, Loader, Mixture
from dali_stream.cli import main
from dali_stream.decode import torchcodec
from dali_stream.lerobot.stats import QUANTILES, TableStats
from dali_stream.normalize import MODES, Normalizer

ACTION, STATE = "action", "observation.state"


def batches(dataset: Dataset | Path, **arguments: Any) -> list[dict[str, Any]]:
    """One epoch, recorded order."""
    options: dict[str, Any] = {"batch_size": 32, "shuffle": False, "last_batch": "partial", "device": "cpu"}
    with Loader(dataset, **(options | arguments)) as loader:
        return list(loader)


def changed(root: Path, key: str, **statistics: Any) -> Path:
    """A dataset with other statistics of one key."""
    path = root / "meta" / "stats.json"
    stats = json.loads(path.read_text())
    stats[key] |= statistics
    path.write_text(json.dumps({k: {n: v for n, v in s.items() if v is not None} for k, s in stats.items()}))
    return root


@pytest.mark.parametrize("mode", slow_after(1, MODES))
def test_rows_and_frames_by_each_mode(small: Path, mode: str) -> None:
    """Against the formula in float64, windows and scalars too; what is not named stays as it is."""
    dataset = Dataset(small, episodes=[1])
    arguments: dict[str, Any] = {"delta_timestamps": {ACTION: [0.0, 0.05], SIDE: [-0.05, 0.0]}}
    keys = (ACTION, STATE, "observation.object_positions", "next.reward", TOP, SIDE)
    plain, found = batches(dataset, **arguments), batches(dataset, normalize=dict.fromkeys(keys, mode), **arguments)
    for key in keys:
        low, high = (dataset.stats[key][name].astype(np.float64) for name in MODES[mode])
        if key == "next.reward":
            low, high = low[0], high[0]
        if (low == high).any():
            continue
        for batch, original in zip(found, plain, strict=True):
            value = original[key].double().numpy()
            expected = (value - low) / high if mode == "mean_std" else 2 * (value - low) / (high - low) - 1
            assert batch[key].dtype == torch.float32
            np.testing.assert_allclose(batch[key].numpy(), expected, atol=2e-4, rtol=1e-4)
    for batch, original in zip(found, plain, strict=True):
        rest = [{key: value for key, value in each.items() if key not in keys} for each in (batch, original)]
        assert equal(*rest)


def test_the_whole_dataset_has_mean_0_and_deviation_1(demo: Path) -> None:
    dataset = Dataset(demo, cameras=[])
    whole = torch.cat([batch[STATE] for batch in batches(dataset, normalize={STATE: "mean_std"})]).double()
    np.testing.assert_allclose(whole.mean(0), 0, atol=1e-4)
    np.testing.assert_allclose(whole.std(0, correction=0), 1, atol=1e-3)
    whole = torch.cat([batch[ACTION] for batch in batches(dataset, normalize={ACTION: "min_max"})])
    np.testing.assert_allclose([whole.amin(0).numpy(), whole.amax(0).numpy()], [[-1] * 4, [1] * 4], atol=1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_there_and_back(demo: Path, mode: str) -> None:
    dataset = Dataset(demo)
    with Loader(dataset, batch_size=16, normalize={ACTION: mode, TOP: mode}, delta_timestamps={ACTION: [0.0, 0.05]}) as loader:
        assert loader.normalizer.modes == {ACTION: mode, TOP: mode}
        batch = next(iter(loader))
        back = loader.normalizer.inverse(batch)
    with Loader(dataset, batch_size=16, delta_timestamps={ACTION: [0.0, 0.05]}) as loader:
        plain = next(iter(loader))
    for key in (ACTION, TOP):
        torch.testing.assert_close(back[key], plain[key], atol=1e-5, rtol=1e-5)
    assert torch.equal(back["index"], plain["index"])
    predicted = torch.zeros(5, 4)
    assert loader.normalizer.inverse({ACTION: predicted})[ACTION].shape == (5, 4)


@pytest.mark.parametrize("several", [False, True], ids=["one dataset", "mixture"])
def test_a_saved_normalizer_needs_no_dataset(demo: Path, demo_copy: Path, tmp_path: Path, several: bool) -> None:
    """Through a checkpoint of torch and through JSON, with the same results to the last bit."""
    dataset: Any = Dataset(demo)
    if several:
        dataset = Mixture({"a": demo, "b": changed(demo_copy, ACTION, min=[-9.0] * 4)})
    mode = f"min_max{'_per_dataset' * several}"
    with Loader(dataset, batch_size=8, device="cpu", normalize={ACTION: mode, TOP: mode}) as loader:
        batch, normalizer = next(iter(loader)), loader.normalizer
    torch.save({"normalizer": normalizer.state_dict()}, tmp_path / "policy.pt")
    saved = torch.load(tmp_path / "policy.pt", weights_only=True)["normalizer"]
    for state in (saved, json.loads(json.dumps(saved))):
        loaded = Normalizer.from_state_dict(state)
        assert loaded.modes == normalizer.modes
        assert equal(loaded.inverse(batch), normalizer.inverse(batch))
        assert equal(loaded(batch), normalizer(batch))


@pytest.mark.parametrize(
    "change",
    [
        {"shift": [0.0]},
        {"scale": None},
        {"shape": [3]},
        {"shift": ["x"] * 4},
        {"scale": [0.0] * 4},
        {"scale": [float("inf")] * 4},
        {"shift": [float("nan")] * 4},
        {"mode": None},
        {"mode": "x"},
        {"shift": [[[0.0] * 4]], "scale": [[[1.0] * 4]]},
    ],
)
def test_a_state_of_something_else_is_refused(demo: Path, change: dict[str, Any]) -> None:
    state = Normalizer(Dataset(demo), {ACTION: "min_max"}).state_dict()
    with pytest.raises(ValueError, match=r"^state must be the result of Normalizer\.state_dict, got "):
        Normalizer.from_state_dict({ACTION: {**state[ACTION], **change}})
    with pytest.raises(ValueError, match=r"^state must be the result of Normalizer\.state_dict, got "):
        Normalizer.from_state_dict({ACTION: "min_max"})  # type: ignore[dict-item]


def test_one_mode_for_all_is_for_the_action_and_what_is_observed(demo: Path) -> None:
    normalizer = Normalizer(Dataset(demo), "mean_std")
    assert set(normalizer.modes) == {ACTION, STATE, "observation.object_positions", "observation.object_yaws"}
    assert Normalizer(Dataset(demo), None).modes == {}
    assert Normalizer(Dataset(demo), {ACTION: None, STATE: "min_max"}).modes == {STATE: "min_max"}


def test_a_dimension_that_never_changes_is_named_and_comes_out_as_0(demo_copy: Path, caplog: pytest.LogCaptureFixture) -> None:
    std = Dataset(demo_copy).stats[ACTION]["std"].tolist()
    changed(demo_copy, ACTION, std=[*std[:2], 0.0, std[3]], mean=[0.0, 0.0, 0.25, 0.0])
    with caplog.at_level(logging.WARNING, "dali_stream"):
        [first, *_] = batches(Dataset(demo_copy, cameras=[]), normalize={ACTION: "mean_std"})
    [said] = [record.getMessage() for record in caplog.records if "never changes" in record.getMessage()]
    assert said.startswith("action: dimension 2 (vz) never changes")
    [plain, *_] = batches(Dataset(demo_copy, cameras=[]))
    assert torch.isfinite(first[ACTION]).all()
    torch.testing.assert_close(first[ACTION][:, 2], plain[ACTION][:, 2] - 0.25)


@pytest.mark.parametrize("mode", ["mean_std", "quantiles"])
def test_a_deviation_that_rounding_left_behind_is_none(demo_copy: Path, caplog: pytest.LogCaptureFixture, mode: str) -> None:
    """LeRobot's deviation of what is always -1.57 is 6.6e-4, since it is added up in float32; min and max are exact."""
    near = {name: Dataset(demo_copy).stats[ACTION][name].tolist() for name in ("mean", "std", "min", "max", "q01", "q99")}
    values = {"mean": -1.5699, "std": 6.6e-4, "min": -1.57, "max": -1.57, "q01": -1.571, "q99": -1.5701}
    changed(demo_copy, ACTION, **{name: [*was[:2], values[name], was[3]] for name, was in near.items()})
    with caplog.at_level(logging.WARNING, "dali_stream"):
        normalizer = Normalizer(Dataset(demo_copy), {ACTION: mode})
    assert "action: dimension 2 (vz) never changes by the dataset's statistics (min is max)" in caplog.text
    recorded = {ACTION: torch.tensor([[0.0, 0.0, -1.57, 0.0]])}
    assert normalizer(recorded)[ACTION][0, 2] == 0
    assert torch.allclose(normalizer.inverse(normalizer(recorded))[ACTION], recorded[ACTION], atol=1e-6)


def test_it_is_done_behind_the_users_function(demo: Path) -> None:
    dataset = Dataset(demo, episodes=[0])
    doubled = batches(dataset, dali_graph=lambda nodes: nodes | {ACTION: nodes[ACTION] * 2.0}, normalize={ACTION: "min_max"})
    normalizer = Normalizer(dataset, {ACTION: "min_max"})
    for batch, plain in zip(doubled, batches(dataset), strict=True):
        torch.testing.assert_close(batch[ACTION], normalizer({ACTION: plain[ACTION] * 2})[ACTION])
    with pytest.raises(ValueError, match=r"action must have a shape that ends in \(4,\) to be normalized, got \(32, 1\)"):
        batches(dataset, dali_graph=lambda nodes: nodes | {ACTION: nodes[ACTION][0:1]}, normalize={ACTION: "min_max"})


@pytest.mark.parametrize("normalize", ["min_max", {ACTION: "min_max"}])
def test_what_the_users_function_renames_is_not_left_as_it_is(demo: Path, normalize: Any) -> None:
    def renamed(nodes: dict[str, Any]) -> dict[str, Any]:
        return {"actions" if key == ACTION else key: node for key, node in nodes.items()}

    with pytest.raises(ValueError, match=r"normalize has the key 'action', but dali_graph returned only .*actions"):
        batches(Dataset(demo, cameras=[]), dali_graph=renamed, normalize=normalize)


@pytest.mark.parametrize(
    ("normalize", "message"),
    [
        ("std", r"normalize must be one of 'mean_std', 'min_max', 'quantiles' or None, .* got 'std'"),
        ({ACTION: "zscore"}, r"normalize\['action'\] must be one of .*, got 'zscore'"),
        ({"acton": "min_max"}, r"normalize must name float features, got 'acton'\. Available: observation"),
        ({"index": "min_max"}, "normalize must name float features, got 'index'"),
        (True, "normalize must be one of 'mean_std', 'min_max', 'quantiles', a dict .*, got True"),
        ([ACTION], r"normalize must be one of .*, got \['action'\]"),
        ({ACTION: ["min_max"]}, r"normalize\['action'\] must be one of .* got \['min_max'\]"),
    ],
)
def test_what_cannot_be_normalised(demo: Path, normalize: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Loader(demo, batch_size=4, normalize=normalize)


def test_frames_are_normalised_as_floats(demo: Path) -> None:
    with pytest.raises(ValueError, match=f'image_dtype must be "float32" to normalize {TOP}, got .uint8.'):
        Loader(demo, batch_size=4, normalize={TOP: "mean_std"}, image_dtype="uint8")


def test_statistics_that_are_missing_or_wrong(demo_copy: Path) -> None:
    changed(demo_copy, ACTION, q01=None)
    with pytest.raises(ValueError, match=r"normalize needs q01 of action, but meta/stats.json has min, max, .* of it"):
        Loader(demo_copy, batch_size=4, normalize={ACTION: "quantiles"})
    (kept := demo_copy / "meta/kept.json").write_bytes((demo_copy / "meta/stats.json").read_bytes())
    (demo_copy / "meta/stats.json").unlink()
    how = r"Dataset\(uri, stats=dataset\.compute_stats\(\)\), or `dali-stream stats URI"
    with pytest.raises(ValueError, match=rf"needs mean of .*, but meta/stats\.json is missing or empty\. Compute it: {how}"):
        Loader(demo_copy, batch_size=4, normalize="mean_std")
    kept.rename(demo_copy / "meta/stats.json")
    changed(demo_copy, ACTION, mean=[1.0, 2.0])
    with pytest.raises(
        DatasetError,
        match=r"Invalid mean of action in .*stats.json: must be .*of shape \(4,\), got \[1.0, 2.0\] of shape \(2,\)",
    ):
        Loader(demo_copy, batch_size=4, normalize={ACTION: "mean_std"})
    changed(demo_copy, ACTION, mean=[1.0, 2.0, float("nan"), 0.0])
    with pytest.raises(DatasetError, match="finite numbers"):
        Loader(demo_copy, batch_size=4, normalize={ACTION: "mean_std"})


# ---- statistics of one's own


@pytest.mark.slow
def test_statistics_of_the_selected_episodes(demo: Path) -> None:
    """Rows against NumPy; cameras against all of their frames."""
    dataset, rows = Dataset(demo, episodes=[1, 4]), read_rows(demo)
    found, chosen = dataset.compute_stats(), np.isin(rows["episode_index"], [1, 4])
    assert {key: {name: value.shape for name, value in each.items()} for key, each in found.items()} == {
        key: {name: value.shape for name, value in each.items()} for key, each in dataset.stats.items()
    }
    for key, column in rows.items():
        values = np.array(column[chosen].tolist(), np.float64).reshape(chosen.sum(), -1)
        expected = {"min": values.min(0), "max": values.max(0), "mean": values.mean(0), "std": values.std(0)}
        expected |= {f"q{q:02}": np.quantile(values, q / 100, axis=0) for q in (1, 10, 50, 90, 99)} | {"count": [chosen.sum()]}
        for name, value in expected.items():
            np.testing.assert_allclose(found[key][name].ravel(), value, rtol=1e-6, atol=1e-6, err_msg=f"{key} {name}")
    for camera in (TOP, SIDE):
        frames = torch.cat([batch[camera] for batch in batches(dataset)]).double()
        assert found[camera]["count"].tolist() == [len(frames)]
        for name, value in (("mean", frames.mean((0, 2, 3))), ("std", frames.std((0, 2, 3)))):
            np.testing.assert_allclose(found[camera][name].ravel(), value, atol=1e-4)


def test_statistics_are_lerobots(g1: Path) -> None:
    """This recording's were computed by LeRobot, with its frames sampled in its own way."""
    dataset = Dataset(g1)
    for key, found in dataset.compute_stats([ACTION, STATE, "timestamp", "frame_index"]).items():
        for name, value in dataset.stats[key].items():
            assert found[name].shape == value.shape
            np.testing.assert_allclose(found[name], value, atol=1e-6, rtol=1e-6)


def test_statistics_of_parts_are_those_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bounded memory: beyond a number of values, quantiles are those of every n-th row."""
    rng = np.random.default_rng(0)
    values = np.cumsum(rng.normal(size=(1000, 3)), axis=0, dtype=np.float32) + 1e4
    parts = np.split(values, np.sort(rng.choice(np.arange(1, 1000), 9, replace=False)))
    for kept, every in ((TableStats.KEPT, 1), (300, 10)):
        monkeypatch.setattr(TableStats, "KEPT", kept)
        found = TableStats(len(values))
        for part in parts:
            found.add(part)
        whole = values.astype(np.float64)
        expected = {"min": whole.min(0), "max": whole.max(0), "mean": whole.mean(0), "std": whole.std(0), "count": [1000]}
        expected |= {name: np.quantile(whole[::every], share, axis=0) for name, share in QUANTILES.items()}
        for name, value in found.result().items():
            np.testing.assert_allclose(value, expected[name], rtol=1e-12, err_msg=name)


def test_the_command_writes_statistics_that_a_dataset_takes(
    demo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, out = tree(demo), tmp_path / "stats.json"
    options = ["--episodes", "1,4", "--cameras", TOP]
    assert main(["stats", str(demo), *options, "--out", str(out)]) == 0
    assert "features in 2 episodes" in capsys.readouterr().out
    assert main(["stats", str(demo), *options]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(out.read_text())
    assert tree(demo) == before  # it writes into the dataset only if told to
    given, own = Dataset(demo, stats=json.loads(out.read_text())).stats, Dataset(demo, episodes=[1, 4]).compute_stats()
    assert set(own) - set(given) == {SIDE}
    assert all(np.array_equal(given[key][name], own[key][name]) for key in given for name in own[key])
    assert main(["stats", str(demo), "--out", str(out)]) == 2
    error = capsys.readouterr().err
    assert "--out must be a new file in an existing folder" in error
    assert error.endswith("which exists\n")


@pytest.mark.slow
def test_the_command_adds_statistics_to_a_dataset_without_any(demo_copy: Path) -> None:
    """At the place where LeRobot has them; the progress ends at the number of episodes."""
    path, done = demo_copy / "meta/stats.json", []
    path.unlink()
    assert main(["stats", str(demo_copy), "--out", str(path)]) == 0
    dataset = Dataset(demo_copy)
    own = dataset.compute_stats(progress=lambda *counts: done.append(counts))
    assert done == [(number + 1, dataset.num_episodes) for number in range(dataset.num_episodes)]
    assert all(np.array_equal(value, own[key][name]) for key, each in dataset.stats.items() for name, value in each.items())
    with Loader(dataset, batch_size=4, normalize="mean_std") as loader:
        next(iter(loader))


@pytest.mark.slow
def test_statistics_decode_each_gop_of_an_episode_once(h264_demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With GOPs of 12 frames, all of which are sampled."""
    decode, decoded = torchcodec.decode_in_parts, []

    def counted(*arguments: Any, **options: Any) -> Iterator[Any]:
        for part in decode(*arguments, **options):
            decoded.append(part.decoded)
            yield part

    monkeypatch.setattr(torchcodec, "decode_in_parts", counted)
    dataset = Dataset(h264_demo)
    found = dataset.compute_stats()
    assert found[TOP]["count"].tolist() == [dataset.num_frames]
    # Some more are decoded where an episode begins within a GOP.
    assert len(dataset.cameras) * dataset.num_frames <= sum(decoded) < 1.1 * len(dataset.cameras) * dataset.num_frames
    frames = torch.cat([batch[TOP] for batch in batches(dataset)]).double()
    np.testing.assert_allclose(found[TOP]["mean"].ravel(), frames.mean((0, 2, 3)), atol=1e-4)


def test_statistics_of_images_in_rows_and_of_remote_data(odd: Path) -> None:
    local = Dataset(odd).compute_stats()
    assert local[ODD_CAMERA]["mean"].shape == (3, 1, 1)
    assert local[ODD_CAMERA]["count"].tolist() == [21]
    assert "note" not in local
    with Server(odd) as server:
        remote = Dataset(server.url).compute_stats([ODD_CAMERA, "matrix"])
    assert list(remote) == [ODD_CAMERA, "matrix"]
    for key, found in remote.items():
        for name, value in found.items():
            np.testing.assert_array_equal(value, local[key][name])


def test_control_c_ends_the_reads_for_statistics(demo: Path) -> None:
    """A server that never answers must not delay it."""

    def interrupt(handler: Handler, data: bytes, fields: dict[str, str]) -> None:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        handler.wait()

    with Server(demo) as server:
        dataset = Dataset(server.url, give_up_after_s=86_400)
        server.set_faults(itertools.chain([interrupt], itertools.repeat(hang)))
        with no_collection(), pytest.raises(KeyboardInterrupt):
            dataset.compute_stats([STATE])
        for thread in threading.enumerate():  # Ctrl-C while the pool starts one leaves it to end by itself
            if thread.name.startswith("dali_stream stats"):
                thread.join()


def test_validation_has_no_part_in_statistics_that_are_given(demo: Path) -> None:
    stats = Dataset(demo, episodes=[0, 1, 2]).compute_stats([STATE])
    train = Dataset(demo, episodes=[0, 1, 2], stats=stats)
    validation = Dataset(demo, episodes=[3], stats={key: {n: v.tolist() for n, v in s.items()} for key, s in stats.items()})
    whole = torch.cat([batch[STATE] for batch in batches(train, normalize={STATE: "mean_std"})]).double()
    np.testing.assert_allclose(whole.mean(0), 0, atol=1e-4)
    np.testing.assert_allclose(whole.std(0, correction=0), 1, atol=1e-3)
    for found, plain in zip(batches(validation, normalize={STATE: "mean_std"}), batches(validation), strict=True):
        expected = (plain[STATE].double().numpy() - stats[STATE]["mean"]) / stats[STATE]["std"]
        np.testing.assert_allclose(found[STATE], expected, atol=2e-4, rtol=1e-4)


def test_parts_get_the_statistics_of_the_training_part_without_being_opened_again(demo: Path) -> None:
    dataset = Dataset(demo)
    assert dataset.stats, "read before, and by the parts"
    parts = dataset.split({"train": 0.5, "val": 0.5})
    stats = parts["train"].compute_stats([STATE])
    for part in parts.values():
        own, opened = part.with_stats(stats), Dataset(demo, episodes=part.episodes.tolist(), stats=stats)
        assert own.store is part.store
        assert own.fingerprint == part.fingerprint == opened.fingerprint
        for found, expected in zip(*(batches(each, normalize={STATE: "mean_std"}) for each in (own, opened)), strict=True):
            torch.testing.assert_close(found[STATE], expected[STATE], rtol=0, atol=0)
    assert parts["val"].stats[STATE]["count"] != stats[STATE]["count"], "the part itself keeps its own"
    with pytest.raises(ValueError, match="stats must be"):
        parts["val"].with_stats({STATE: [1, 2]})  # type: ignore[dict-item]


def test_statistics_that_are_given_change_no_order_and_no_state(demo: Path) -> None:
    plain = Dataset(demo, episodes=[0, 1])
    own = Dataset(demo, episodes=[0, 1], stats=plain.compute_stats([ACTION]))
    assert own.fingerprint == plain.fingerprint
    with Loader(plain, batch_size=16) as loader:
        next(iter(loader))
        state = loader.state_dict()
    with Loader(own, batch_size=16, normalize={ACTION: "mean_std"}) as loader:
        loader.load_state_dict(state)
        assert next(iter(loader))["index"].shape == (16,)


@pytest.mark.parametrize(
    ("stats", "message"),
    [
        ("mine.json", r"stats must be {key: {statistic: numbers}} .*, got mine.json"),
        ({ACTION: [1, 2]}, "stats must be {key: {statistic: numbers}} .*, got {'action'"),
        ({STATE: {"mean": [0.0]}}, "normalize needs mean of action, but stats= has nothing of it"),
        (
            {ACTION: {"mean": [0.0], "std": [1.0]}},
            r"mean of action in stats= must be .* of shape \(4,\), got \[0.0\] of shape \(1,\)",
        ),
    ],
)
def test_statistics_that_are_none(demo: Path, stats: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Normalizer(Dataset(demo, stats=stats), {ACTION: "mean_std"})


def test_statistics_of_what_has_none(odd: Path) -> None:
    with pytest.raises(ValueError, match=r"Unknown key 'note', or one without numbers\. Available: observation\.image, "):
        Dataset(odd).compute_stats(["note"])
