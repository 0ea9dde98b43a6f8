"""Mixtures: each sample equals that of its own dataset's Loader, the shares hold, and runs resume on other ranks."""

from __future__ import annotations

import ast
import json
import pickle
import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from support.batches import check_identities, equal
from support.datasets import (
    ODD_CAMERA,
    ODD_SIZE,
    SIDE,
    TOP,
    Column,
    build,
    change_episodes,
    change_info,
    copied,
    image_file,
    noise,
    read_lengths,
    read_rows,
    write_odd,
    write_wide,
)
from support.faults import reset_inside, short, status
from support.killing import start
from support.servers import Server
from support.slow import slow

from dali_stream import Dataset, DatasetError, DecodeError, Loader, Mixture, ResumeError
from dali_stream.lerobot.rows import RowMemory, SourceRows

WRIST = "observation.images.wrist"
KEYS = {"rows": {ODD_CAMERA: WRIST, "scalar": "action"}}
LOADER: dict[str, Any] = {
    "image_size": (48, 64),
    "image_dtype": "uint8",
    "consumers": 4,
    "episode_pool_size": 4,
    "num_threads": 2,
}
WINDOWS = {TOP: [-0.1, 0.0], "action": [0.0, 0.1, 0.3], "observation.state": [-0.2, 0.0]}
ADDED = ("dataset", "dataset_index")


@pytest.fixture(scope="session")
def datasets(demo: Path, h264_demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Dataset]:
    """Three that differ: in codec, cameras, widths, columns, tasks, and one in its fps."""
    rows = write_odd(tmp_path_factory.mktemp("mixture") / "rows")
    return {
        "demo": Dataset(demo, episodes=[1, 3]),
        "h264": Dataset(h264_demo, episodes=[2]).without([SIDE]),
        "rows": Dataset(rows, stats=Dataset(rows).compute_stats()),
    }


@pytest.fixture(scope="session")
def alone(datasets: Mapping[str, Dataset]) -> Mapping[str, Mapping[int, dict[str, Any]]]:
    """Per dataset and `index`, the sample that its own Loader delivers."""
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for name, dataset in datasets.items():
        named = {new: old for old, new in KEYS.get(name, {}).items()}
        deltas = {named.get(key, key): seconds for key, seconds in WINDOWS.items() if named.get(key, key) in dataset.features}
        options = LOADER | {"shuffle": False, "batch_size": 1}
        with Loader(dataset, delta_timestamps=deltas, **{k: v for k, v in options.items() if "pool" not in k}) as loader:
            found[name] = {batch["index"].item(): batch for batch in loader}
    return found


def mixture(datasets: Mapping[str, Any], **arguments: Any) -> Mixture:
    return Mixture(datasets, **{"keys": {name: KEYS[name] for name in KEYS if name in datasets}, "missing": "pad"} | arguments)


def split(batch: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The samples of a batch, each as a batch of one."""
    for row in range(len(batch["dataset"])):
        yield {key: values[row : row + 1] for key, values in batch.items()}


def check(sample: dict[str, Any], alone: Mapping[str, Mapping[int, dict[str, Any]]]) -> None:
    """Check that a sample of a mixture equals that of its dataset's own Loader in all keys."""
    [name] = sample["dataset"]
    assert sample["dataset_index"].item() == list(alone).index(name)
    expected = {KEYS.get(name, {}).get(key, key): value for key, value in alone[name][sample["index"].item()].items()}
    for key, value in sample.items():
        own = expected.pop(key.removesuffix("_is_pad") + "_is_pad" if key.endswith("_is_pad") else key, None)
        if key in ADDED or key.endswith(("_is_missing", "_dim_is_pad")):
            continue
        if (lacks := sample.get(f"{key}_is_missing")) is not None and lacks.item():
            assert own is None
            assert value == [""] if isinstance(value, list) else not value.any(), key
        elif (padded := sample.get(f"{key}_dim_is_pad")) is not None:
            width = int((~padded).sum())
            assert torch.equal(value[..., :width].flatten(), own.flatten()), key
            assert not value[..., width:].any()
        elif own is not None:
            assert value == own if isinstance(value, list) else torch.equal(value, own), key
        else:  # a mask of a window on what this dataset lacks, a text of what it lacks
            assert key.endswith("_is_pad") or value == [""], key
    left = [key for key in expected if not key.endswith("_is_pad")]
    assert not left


@pytest.mark.slow
@pytest.mark.parametrize("shuffle", [True, "sharded", "global", False])
def test_every_frame_of_every_dataset_once_and_as_it_is_alone(
    datasets: Mapping[str, Dataset], alone: Mapping[str, Mapping[int, dict[str, Any]]], shuffle: bool | str
) -> None:
    found = []
    with Loader(
        mixture(datasets), batch_size=8, delta_timestamps=WINDOWS, shuffle=shuffle, last_batch="partial", **LOADER
    ) as loader:
        for batch in loader:
            for sample in split(batch):
                check(sample, alone)
                found.append((*sample["dataset"], sample["index"].item()))
    assert sorted(found) == sorted((name, index) for name, samples in alone.items() for index in samples)
    assert len(loader.dataset) == len(found) == loader.dataset.num_frames


@pytest.mark.slow
@pytest.mark.parametrize("budget", ["12MB", "4GiB"])
def test_batches_are_the_same_with_any_threads_and_memory(datasets: Mapping[str, Dataset], budget: str) -> None:
    options = {"batch_size": 6, "delta_timestamps": WINDOWS, "seed": 5}
    with (
        Loader(mixture(datasets), **options, **LOADER) as first,
        Loader(mixture(datasets), **options, **LOADER | {"num_threads": 1, "memory_budget": budget, "prefetch": 1}) as second,
    ):
        for _ in range(2):
            for one, other in zip(first, second, strict=True):
                assert equal(one, other)


@pytest.mark.slow
def test_a_camera_may_be_video_here_and_images_there(
    datasets: Mapping[str, Dataset], alone: Mapping[str, Mapping[int, dict[str, Any]]]
) -> None:
    mixed = mixture(datasets, keys={"rows": KEYS["rows"] | {ODD_CAMERA: TOP}}, weights=dict.fromkeys(datasets, 1))
    assert (mixed.cameras, tuple(mixed.source.videos), mixed.source.images) == ((TOP, SIDE), (TOP, SIDE), (TOP,))
    seen = set()
    with Loader(mixed, batch_size=8, delta_timestamps={TOP: [-0.1, 0.0]}, **LOADER | {"memory_budget": "64MB"}) as loader:
        for sample in (sample for batch in loader for sample in split(batch)):
            [name], index = sample["dataset"], sample["index"].item()
            before = index - {"demo": 2, "h264": 2, "rows": 1}[name] if not sample[f"{TOP}_is_pad"][0, 0] else None
            for step, of in enumerate((before, index)):
                if of is not None:
                    own = alone[name][of][ODD_CAMERA if name == "rows" else TOP]
                    assert torch.equal(sample[TOP][0, step], own[0, -1] if own.ndim == 5 else own[0])
                    seen.add(name)
    assert seen == set(datasets)


def test_masks_say_what_a_dataset_lacks(datasets: Mapping[str, Dataset]) -> None:
    mixed = mixture(datasets)
    assert mixed.features["action"].shape == (4,)
    assert mixed.cameras == (TOP, SIDE, WRIST)
    with Loader(mixed, batch_size=8, **LOADER) as loader:
        batch = next(iter(loader))
        assert loader.routes[TOP].decoder == "torchcodec"
        has = {"demo": 2, "h264": 1, "rows": 1}
        assert loader.stats()["frames"] == sum(has[name] for name in batch["dataset"])
    for key, there in ((TOP, ("demo", "h264")), (SIDE, ("demo",)), (WRIST, ("rows",)), ("matrix", ("rows",))):
        assert batch[f"{key}_is_missing"].tolist() == [name not in there for name in batch["dataset"]]
    assert "action_is_missing" not in batch
    assert batch["action_dim_is_pad"].tolist() == [
        [False, True, True, True] if name == "rows" else [False] * 4 for name in batch["dataset"]
    ]
    assert batch["matrix"].shape == (8, 2, 3)


@pytest.mark.slow
def test_weights_repeats_and_temperature_set_what_an_epoch_has(datasets: Mapping[str, Dataset]) -> None:
    frames = {name: len(dataset) for name, dataset in datasets.items()}
    for arguments, expected in (
        ({"repeats": {"demo": 0.5, "h264": 1, "rows": 3}}, [-(-frames["demo"] // 2), frames["h264"], 3 * frames["rows"]]),
        ({"weights": {"demo": 2, "h264": 1, "rows": 1}, "epoch_samples": 96}, [48, 24, 24]),
        ({"temperature": 1e9, "epoch_samples": 96}, [32, 32, 32]),
    ):
        mixed = mixture(datasets, **arguments)
        with Loader(mixed, batch_size=4, last_batch="partial", **LOADER) as loader:
            names = [name for batch in loader for name in batch["dataset"]]
        assert [names.count(name) for name in datasets] == expected
        assert len(names) == len(mixed) == sum(expected)


def test_a_rank_has_the_shares_too_and_only_episodes_of_its_own(datasets: Mapping[str, Dataset]) -> None:
    mixed = mixture(datasets, weights={"demo": 2, "h264": 1, "rows": 1}, epoch_samples=160)
    everything = []
    for rank in range(4):
        with Loader(mixed, batch_size=4, rank=rank, world_size=4, **LOADER) as loader:
            names = []
            for batch in loader:
                names += batch["dataset"]
                for name, share in (("demo", 0.5), ("h264", 0.25), ("rows", 0.25)):
                    assert abs(names.count(name) - share * len(names)) <= 1  # one consumer of four
                everything += zip(batch["dataset"], batch["index"].tolist(), strict=True)
    assert len(everything) == 160


@pytest.mark.parametrize("clock", ["own", "nearest"])
def test_a_window_is_laid_out_on_each_datasets_clock(tmp_path: Path, clock: str) -> None:
    """0.1 s is one frame at 10 fps, two at 20 fps, and between two at 15 fps."""
    roots = {}
    for fps in (10, 20) if clock == "own" else (10, 20, 15):
        values = np.arange(60, dtype=np.float32)
        roots[f"fps {fps}"] = build(tmp_path / str(fps), [30, 30], {"value": Column("float32", [1], values)}, fps=fps)
    mixed = Mixture(roots, nearest=clock == "nearest")
    steps = {"fps 10": 2, "fps 20": 4, "fps 15": 3}
    with Loader(mixed, batch_size=8, delta_timestamps={"value": [0.0, 0.2]}, consumers=4) as loader:
        for batch in loader:
            for sample in split(batch):
                now, later = sample["value"][0].tolist()
                last = 30 * (1 + int(now) // 30) - 1
                assert later == min(now + steps[sample["dataset"][0]], last)
                assert sample["value_is_pad"][0].tolist() == [False, now + steps[sample["dataset"][0]] > last]
    with pytest.raises(ValueError, match=r"dataset 'fps 10': .*multiples of 1/fps = 0.1 s.*nearest=True"):
        Loader(Mixture(roots), batch_size=8, delta_timestamps={"value": [0.05]})


def test_texts_are_those_of_the_samples_dataset(tmp_path: Path) -> None:
    roots = {
        name: build(tmp_path / name, [6], {}, labels={"task": [f"do {name}"]} | subtasks)
        for name, subtasks in (("a", {}), ("b", {}))
    }
    roots["c"] = write_odd(tmp_path / "c", lengths=(4, 4))
    with Loader(Mixture(roots, missing="pad"), batch_size=4, image_size=(16, 16), consumers=2) as loader:
        for sample in (sample for batch in loader for sample in split(batch)):
            name, index = sample["dataset"][0], sample["index"].item()
            assert sample["task"] == [f"do {name}" if name != "c" else f"task {index // 4}"]
            assert sample["subtask"] == ([""] if name != "c" else [f"subtask {sample['subtask_index'].item()}"])
            assert sample["note"] == ([""] if name != "c" else [f"note {index}"])


def test_a_dataset_without_a_table_of_subtasks_has_empty_ones(tmp_path: Path) -> None:
    roots = {name: write_odd(tmp_path / name, lengths=(4, 4)) for name in ("a", "b")}
    (roots["b"] / "meta/subtasks.parquet").unlink()
    with Loader(Mixture(roots), batch_size=16, image_size=(16, 16), consumers=2) as loader:
        for batch in loader:
            assert 1 in batch["subtask_index"]
            for name, subtask, number in zip(batch["dataset"], batch["subtask"], batch["subtask_index"].tolist(), strict=True):
                assert subtask == ("" if name == "b" else f"subtask {number}")


@pytest.mark.slow
@pytest.mark.parametrize("per_dataset", [True, False])
@pytest.mark.parametrize("mode", ["mean_std", *map(slow, ("min_max", "quantiles"))])
def test_normalizes_by_own_or_by_merged_statistics(datasets: Mapping[str, Dataset], mode: str, per_dataset: bool) -> None:
    weights = {"demo": 3, "h264": 1, "rows": 2}
    mixed = mixture(datasets, weights=weights, epoch_samples=48)
    plain = {"batch_size": 8, **LOADER}
    chosen = dict.fromkeys(("action", "observation.state"), f"{mode}_per_dataset" if per_dataset else mode)
    with Loader(mixed, **plain) as raw, Loader(mixed, normalize=chosen, **plain) as loader:
        for before, after in zip(raw, loader, strict=True):
            for row, name in enumerate(before["dataset"]):
                for key in chosen:
                    padded = before[f"{key}_dim_is_pad"][row]
                    stats = _statistics(datasets, name, key) if per_dataset else mixed.stats[key]
                    first, second = (
                        np.resize(np.ravel(stats[which]), len(padded)) if per_dataset else stats[which]
                        for which in {"mean_std": ("mean", "std"), "min_max": ("min", "max"), "quantiles": ("q01", "q99")}[mode]
                    )
                    shift, scale = (first, second) if mode == "mean_std" else ((first + second) / 2, (second - first) / 2)
                    expected = (before[key][row].numpy() - shift) / np.where(scale == 0, 1, scale)
                    np.testing.assert_allclose(after[key][row].numpy(), np.where(padded, 0, expected), rtol=1e-4, atol=1e-4)
            back = loader.normalizer.inverse(after)
            for key in chosen:
                torch.testing.assert_close(back[key], before[key], rtol=1e-4, atol=1e-3)
        if per_dataset:
            with pytest.raises(ValueError, match="must contain 'dataset_index'"):
                loader.normalizer.inverse({"action": after["action"]})


def _statistics(datasets: Mapping[str, Dataset], name: str, key: str) -> Mapping[str, np.ndarray]:
    named = {new: old for old, new in KEYS.get(name, {}).items()}
    return datasets[name].stats[named.get(key, key)]


def test_merged_statistics_are_those_of_the_mixed_samples(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    values = {"a": rng.normal(0, 1, (4000, 3)), "b": rng.normal(5, 3, (1000, 2))}
    roots = {
        name: build(tmp_path / name, [len(rows)], {"action": Column("float32", [rows.shape[1]], rows)})
        for name, rows in values.items()
    }
    opened = {name: Dataset(root, stats=Dataset(root).compute_stats(["action"])) for name, root in roots.items()}
    merged = Mixture(opened, weights={"a": 1, "b": 3}, missing="pad").stats["action"]
    sample = np.concatenate([rng.choice(values["a"], 50_000)[:, :2], rng.choice(values["b"], 150_000)])
    np.testing.assert_allclose(merged["mean"][:2], sample.mean(0), atol=0.05)
    np.testing.assert_allclose(merged["std"][:2], sample.std(0), atol=0.05)
    np.testing.assert_array_equal(merged["min"][:2], sample.min(0).astype(np.float32))
    np.testing.assert_array_equal(merged["max"][:2], sample.max(0).astype(np.float32))
    for name, level in (("q01", 0.01), ("q10", 0.1), ("q50", 0.5), ("q90", 0.9), ("q99", 0.99)):
        np.testing.assert_allclose(merged[name][:2], np.quantile(sample, level, axis=0), atol=0.6)
    np.testing.assert_allclose(merged["mean"][2], values["a"][:, 2].mean(), atol=1e-3)  # only one has it


def test_merged_statistics_are_those_that_all_datasets_have(tmp_path: Path) -> None:
    root = build(tmp_path, [4], {"action": Column("float32", [2], np.zeros((4, 2)))})
    own = {"a": {"min": [0, 0], "max": [1, 1]}, "b": {"mean": [0, 0], "std": [1, 1]}}
    assert Mixture({name: Dataset(root, stats={"action": stats}) for name, stats in own.items()}).stats == {}


def test_merged_scales_need_the_dataset_where_one_lacks_some(tmp_path: Path) -> None:
    roots = {
        str(width): build(tmp_path / str(width), [4], {"action": Column("float32", [width], np.ones((4, width)))}, stats=True)
        for width in (2, 3)
    }
    with Loader(Mixture(roots, missing="pad"), batch_size=4, consumers=2, normalize="min_max") as loader:
        with pytest.raises(ValueError, match=r"must contain 'dataset_index'.* or is missing from some"):
            loader.normalizer.inverse({"action": torch.zeros(1, 3)})
        back = loader.normalizer.inverse({"action": torch.zeros(2, 3), "dataset_index": torch.tensor([0, 1])})
    assert back["action"].tolist() == [[1, 1, 0], [1, 1, 1]]


@pytest.mark.slow
@pytest.mark.parametrize(("first", "then"), [(2, 4), slow(1, 2), slow(4, 1)])
def test_resumes_at_the_very_next_sample_on_other_ranks(datasets: Mapping[str, Dataset], first: int, then: int) -> None:
    mixed = mixture(datasets, weights={"demo": 2, "h264": 1, "rows": 1}, epoch_samples=96)

    def loaders(world: int) -> list[Loader]:
        return [Loader(mixed, batch_size=8 // world, rank=r, world_size=world, **LOADER) for r in range(world)]

    def batches(ranks: list[Loader], count: int) -> Iterator[list[tuple[str, int]]]:
        for parts in zip(*ranks, strict=True):
            samples = zip(*(zip(part["dataset"], part["index"].tolist(), strict=True) for part in parts), strict=True)
            yield [sample for turn in samples for sample in turn]
            if (count := count - 1) == 0:
                return

    [whole] = loaders(1)
    expected = [batch for _ in range(2) for batch in batches([whole], 99)]
    before, after = loaders(first), loaders(then)
    found = list(batches(before, 5))
    states = [loader.state_dict() for loader in before]
    assert all(state == states[0] for state in states)
    own = {key: value for key, value in states[0].items() if key not in ("contents", "source")}  # these are for messages
    assert len(str(own)) < 500
    for loader in after:
        loader.load_state_dict(states[0])
    found += [batch for _ in range(2) for batch in batches(after, 99)]
    assert found == expected
    other = Loader(mixture(datasets, weights={"demo": 1, "h264": 1, "rows": 1}, epoch_samples=96), batch_size=8, **LOADER)
    with pytest.raises(ResumeError, match="weights"):
        other.load_state_dict(states[0])
    for loader in (whole, other, *before, *after):
        loader.close()


@pytest.mark.slow
def test_streams_from_http_with_faults_and_a_local_one_beside(
    datasets: Mapping[str, Dataset], alone: Mapping[str, Mapping[int, dict[str, Any]]], demo: Path, h264_demo: Path
) -> None:
    faults = [None, None, status(503), None, reset_inside, None, None, short, None] * 3
    with Server(demo, faults=faults) as one, Server(h264_demo, faults=faults) as two:
        mixed = mixture({
            "demo": Dataset(one.url, episodes=[1, 3]),
            "h264": Dataset(two.url, episodes=[2]).without([SIDE]),
            "rows": datasets["rows"],
        })  # fmt: skip
        with Loader(mixed, batch_size=8, delta_timestamps=WINDOWS, last_batch="partial", **LOADER) as loader:
            for sample in (sample for batch in loader for sample in split(batch)):
                check(sample, alone)
            assert loader.stats()["retries"] > 0
        assert not any(SIDE in request.path for request in two.requests)


def test_rows_of_all_datasets_share_the_limit_of_what_is_read_at_once(tmp_path: Path) -> None:
    with Server(write_wide(tmp_path, [30] * 2, 4), latency_s=0.1) as server:
        mixed = Mixture({"a": server.url, "b": server.url})
        reader = SourceRows(mixed.source, mixed.source.data_store.session(), RowMemory(at_once=1))
        for episode in (0, 2):  # with the footer
            reader.read(episode)
        server.peak = 0
        with ThreadPoolExecutor(2) as pool:
            assert [rows["episode_index"][0] for rows in pool.map(reader.read, (1, 3))] == [1, 1]
        assert server.peak == 1
        mixed.close()


@pytest.mark.parametrize("copied", [False, True])
def test_requests_are_counted_once_and_with_those_of_a_copy(tmp_path: Path, copied: bool) -> None:
    """Parts of one dataset share its connections, and a copy reads over connections of its own."""
    with Server(write_wide(tmp_path, [30] * 4, 4)) as server:
        mixed = Mixture(Dataset(server.url).split({"a": 0.5, "b": 0.5}))
        mixed = pickle.loads(pickle.dumps(mixed)) if copied else mixed
        with Loader(mixed, batch_size=8, consumers=4, num_threads=1) as loader:
            before, counted = len(server.requests), loader.stats()["requests"]
            assert len(list(loader)) == len(loader)
            counted = loader.stats()["requests"] - counted
            # The dataset has no statistics, and the answer that a file is missing is not counted.
            made = [request for request in server.requests[before:] if request.path != "/meta/stats.json"]
    assert len(made) == counted > 0


def test_datasets_that_differ_are_an_error_that_lists_how(datasets: Mapping[str, Dataset], demo: Path) -> None:
    with pytest.raises(ValueError, match="Datasets must have the same features, got:") as error:
        Mixture(datasets, keys=KEYS)
    text = str(error.value)
    assert f"\n  {SIDE}\n    demo: video 128×160\n    h264: missing\n    rows: missing\n" in text
    assert re.search(r"\n  observation.state\n    demo: float32 \(8,\)\n.*\n    rows: float64 \(3,\)\n", text)
    assert "timestamp" not in text
    same = Mixture({"a": demo, "b": Dataset(demo, episodes=[1])})
    assert list(same.source.constants) == ["dataset_index"]


OTHER_KEYS = {"action": "actions", "observation.state": "state", TOP: "top", SIDE: "image.side"}


def with_other_keys(root: Path) -> Path:
    """The dataset with `OTHER_KEYS` in its metadata and rows. Video files are found by them, too."""
    features = json.loads((root / "meta/info.json").read_text())["features"]
    change_info(root, features={OTHER_KEYS.get(key, key): feature for key, feature in features.items()})
    for camera in (TOP, SIDE):
        change_episodes(
            root, lambda t, own=camera: t.rename_columns([name.replace(own, OTHER_KEYS[own]) for name in t.column_names])
        )
        (root / "videos" / camera).rename(root / "videos" / OTHER_KEYS[camera])
    for path in root.glob("data/*/*.parquet"):
        table = pq.read_table(path)
        pq.write_table(table.rename_columns([OTHER_KEYS.get(name, name) for name in table.column_names]), path)
    return root


def other_keys_of(caplog: pytest.LogCaptureFixture, datasets: Mapping[str, Any], **arguments: Any) -> str:
    """The warning of a mixture with features that look the same under other keys, or an empty text."""
    caplog.clear()
    Mixture(datasets, **{"missing": "pad"} | arguments).close()
    return "\n".join(each.getMessage() for each in caplog.records if "look the same" in each.getMessage())


def test_the_same_features_under_other_keys_cause_a_warning(
    small: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = with_other_keys(copied(small, tmp_path))
    text = other_keys_of(caplog, {"a": small, "b": other})
    for key, its in OTHER_KEYS.items():
        assert f"'{key}' (a) and '{its}' (b)" in text
    keys = ast.literal_eval(text.partition("If they are the same, pass keys=")[2])
    assert keys == {"b": {its: key for key, its in OTHER_KEYS.items()}}
    options: dict[str, Any] = {"batch_size": 8, "last_batch": "partial", **LOADER, "image_size": None}
    with (
        Loader(Mixture({"a": small, "b": small}), **options) as expected,
        Loader(Mixture({"a": small, "b": other}, keys=keys, missing="pad"), **options) as followed,
    ):
        for one, two in zip(expected, followed, strict=True):
            assert equal(one, two)
            check_identities(two, TOP, None, read_lengths(small))
    assert not other_keys_of(caplog, {"a": small, "b": other}, keys=keys)
    cameras = {"top": TOP, "image.side": SIDE}
    text = other_keys_of(caplog, {"a": small, "b": other, "c": other}, keys={"b": cameras})
    assert ast.literal_eval(text.partition("pass keys=")[2]) == {  # what most datasets have is the common key
        "a": {"action": "actions", "observation.state": "state"},
        "b": cameras,
        "c": cameras,
    }


def test_features_that_differ_cause_no_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def made(name: str, *keys: str, dtype: str = "float32") -> Dataset:
        return Dataset(build(tmp_path / name, [4], {key: Column(dtype, [2], np.zeros((4, 2), dtype)) for key in keys}))

    first = made("a", "action", "observation.state", "left.position")
    for other in (
        made("b", "action", "observation.state"),
        made("c", "action", "observation.environment_state", "right.position"),
        made("d", "action", "observation.state", "state"),  # it has both, so they are two features
    ):
        assert not other_keys_of(caplog, {"a": first, "b": other})
    text = other_keys_of(caplog, {"a": first, "b": made("e", "actions", dtype="int64")})
    assert text.endswith("'action' (a) and 'actions' (b), which can have one key only after their types are made equal")


def test_what_cannot_be_one_feature_is_an_error(tmp_path: Path) -> None:
    zeros, scalars = np.zeros((4, 6)), np.zeros(4)
    a = build(tmp_path / "a", [4], {"x": Column("float32", [2, 3], zeros.reshape(4, 2, 3)), "y": Column("int64", [1], scalars)})
    b = build(tmp_path / "b", [4], {"x": Column("float32", [6], zeros), "y": Column("float32", [1], scalars)})
    with pytest.raises(
        ValueError,
        match=r"compatible, got:\n(.|\n)*x\n +a: float32 \(2, 3\)\n +b: float32 \(6,\)\n +y\n +a: int64\n +b: float32",
    ):
        Mixture({"a": a, "b": b}, missing="pad")
    left_out = Mixture({"a": Dataset(a).without(["x", "y"]), "b": b}, missing="pad")
    assert set(left_out.source.constants) == {"dataset_index", "x_is_missing", "y_is_missing"}


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"weights": {"a": 1}}, "weights must name each dataset, got none for 'b'"),
        ({"weights": {"a": 1, "b": 1, "c": 1}}, "Unknown dataset 'c' in weights. Available: a, b"),
        ({"weights": {"a": 0, "b": 1}}, "'a' must be .*, got 0"),
        ({"weights": [1, 2]}, "dict by the names"),
        ({"weights": {"a": 1, "b": 1}, "temperature": 2}, "one of weights, repeats and temperature"),
        ({"repeats": {"a": 1, "b": -1}}, "'b' must be .*, got -1"),
        ({"epoch_samples": 10}, "epoch_samples"),
        ({"temperature": 0}, "temperature must be .*, got 0"),
        ({"keys": {"c": {}}}, "Unknown dataset 'c' in keys"),
        ({"keys": {"a": {"nothing": "x"}}}, "must rename features of dataset 'a', got 'nothing'. Available: "),
        ({"keys": {"a": {"index": "x"}}}, "must rename features of dataset 'a', got 'index'"),
        ({"keys": {"a": {TOP: SIDE}}}, "must give each feature its own key, got .* for both"),
        ({"keys": {"a": {TOP: "dataset"}}}, "must not rename 'observation.images.top' to 'dataset', because batches have"),
        ({"missing": "zeros"}, "missing must be one of .*, got 'zeros'"),
        ({"weigths": {"a": 1, "b": 1}}, "Did you mean 'weights'"),
    ],
)
def test_bad_arguments_are_errors_that_say_what_is_allowed(demo: Path, arguments: dict[str, Any], match: str) -> None:
    with pytest.raises((ValueError, TypeError), match=match):
        Mixture({"a": demo, "b": demo}, **arguments)


def test_sizes_that_differ_need_image_size(demo: Path, written: Callable[..., Path]) -> None:
    mixed = Mixture({"a": demo, "b": written(episodes=2, size=(120, 128))})
    with pytest.raises(
        ValueError,
        match=r"image_size must be \(height, width\) .*differ in size, got None:(.|\n)*a: video 128×160\n +b: video 120×128",
    ):
        Loader(mixed)


def test_an_error_names_the_dataset(demo: Path, tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="dataset 'b': "):
        Mixture({"a": demo, "b": tmp_path / "nowhere"})
    for wrong, match in (
        (None, "dataset 'b' must be a Dataset, an address, or a dict .*, got None"),
        (Mixture({"a": demo}), "dataset 'b' must be a Dataset, an address, or a dict .*, got Mixture"),
        ({"uri": demo, "episode": [1]}, "dataset 'b': .*Did you mean 'episodes'"),
        ({"episodes": [1]}, "dataset 'b': .*'uri'"),
    ):
        with pytest.raises((ValueError, TypeError), match=match):
            Mixture({"a": demo, "b": wrong})
    with pytest.raises(ValueError, match="dict of one or more datasets"):
        Mixture({})
    with pytest.raises(ValueError, match=r"a Mixture, got .*Use Loader\(dali_stream.Mixture\(datasets\)"):
        Loader({"a": demo})
    with pytest.raises(ValueError, match=r"Mixture.from_file\(path\)"):
        Loader(tmp_path / "mixture.yaml")
    with pytest.raises(TypeError, match="is not indexable"):
        Mixture({"a": demo})[0]


def test_a_frame_that_cannot_be_decoded_is_named_with_its_dataset(tmp_path: Path) -> None:
    whole = [image_file(noise(0, frame)) for frame in range(4)]
    roots = {}
    for name, files in (("a", whole), ("b", [*whole[:2], b"no image", whole[3]])):
        values = [{"bytes": data, "path": None} for data in files]
        roots[name] = build(tmp_path / name, [4], {TOP: Column("image", [*ODD_SIZE, 3], values)})
    with (
        Loader(Mixture(roots), batch_size=8, consumers=2, num_threads=1) as loader,
        pytest.raises(DecodeError, match=f"{TOP}: dataset 'b', episode 0, frame 2: the image must be a PNG, JPEG or WebP"),
    ):
        next(iter(loader))


def test_an_unknown_key_of_a_window_is_no_matter_of_one_dataset(demo: Path) -> None:
    with pytest.raises(ValueError, match=r"^Unknown key 'nothing' in delta_timestamps"):
        Loader(Mixture({"a": demo}), delta_timestamps={"nothing": [0]})


def test_rows_of_the_right_dataset_are_read(datasets: Mapping[str, Dataset]) -> None:
    rows = {name: read_rows(Path(dataset.uri)) for name, dataset in datasets.items()}
    with Loader(mixture(datasets), batch_size=8, **LOADER) as loader:
        for sample in (sample for batch in loader for sample in split(batch)):
            [name] = sample["dataset"]
            assert rows[name]["episode_index"][sample["index"].item()] == sample["episode_index"].item()


@pytest.mark.slow
def test_every_frame_of_real_recordings(g1: Path, small: Path) -> None:
    """Episodes of 30 fps AV1, of the same in v2.1, and of 10 fps H.264 with GOP 68 and two cameras; and the demo. Two ranks."""
    shared = g1.parent
    opened = {
        "g1": Dataset(g1, episodes=[9]),
        "v21": Dataset(shared / "g1_v21", episodes=[1]),
        "franka": Dataset(shared / "franka", episodes=range(2)),
        "demo": Dataset(small),
    }
    camera = "observation.images.cam_high"
    keys = {"g1": {camera: TOP}, "v21": {camera: TOP}}
    options = LOADER | {"image_size": (24, 32), "memory_budget": "2GiB"}
    alone = {}
    for name, dataset in opened.items():
        with Loader(dataset, batch_size=1, shuffle=False, **{k: v for k, v in options.items() if "pool" not in k}) as loader:
            batches = {batch["index"].item(): batch for batch in loader}
            alone[name] = {i: {keys.get(name, {}).get(k, k): v for k, v in batch.items()} for i, batch in batches.items()}
    found = []
    for rank in range(2):
        with Loader(
            Mixture(opened, keys=keys, missing="pad"), batch_size=16, rank=rank, world_size=2, last_batch="partial", **options
        ) as loader:
            for sample in (sample for batch in loader for sample in split(batch)):
                check(sample, alone)
                found.append((*sample["dataset"], sample["index"].item()))
    assert sorted(found) == sorted((name, index) for name, samples in alone.items() for index in samples)


def stream_rank(urls: dict[str, str], options: dict[str, Any], state: dict[str, Any], pipe: Connection) -> None:
    """Stream the share of a rank until the process is killed. Send the samples of each batch and the state after it."""
    mixture = Mixture({name: Dataset(url) for name, url in urls.items()}, weights={"demo": 3, "h264": 1}, epoch_samples=200)
    with Loader(mixture, **options) as loader:
        if state:
            loader.load_state_dict(state)
        while True:
            for batch in loader:
                pipe.send((list(zip(batch["dataset"], batch["index"].tolist(), strict=True)), loader.state_dict()))


@pytest.mark.slow
def test_killed_ranks_continue_as_others_over_http_with_faults(demo: Path, h264_demo: Path) -> None:
    """1, 2 and 1 processes, each killed: together they are the order that nobody interrupted."""
    faults = [None] * 20 + [status(503), None, reset_inside, None, short]
    found: list[tuple[str, int]] = []
    state: dict[str, Any] = {}
    options = {"image_size": (24, 32), "consumers": 4, "episode_pool_size": 4, "num_threads": 1, "seed": 2}
    with Server(demo, faults=faults * 4) as one, Server(h264_demo, faults=faults * 4) as two:
        urls = {"demo": one.url, "h264": two.url}
        for world in (1, 2, 1):
            own = options | {"batch_size": 8 // world, "world_size": world}
            ranks = [start(stream_rank, urls, own | {"rank": rank}, state) for rank in range(world)]
            for _ in range(9):
                shares, states = zip(*(pipe.recv() for _, pipe in ranks), strict=True)
                assert all(each == states[0] for each in states)
                state = states[0]
                found += [sample for turn in zip(*shares, strict=True) for sample in turn]
            for process, _ in ranks:
                process.kill()
                process.join()
    mixed = Mixture({"demo": demo, "h264": h264_demo}, weights={"demo": 3, "h264": 1}, epoch_samples=200)
    expected: list[tuple[str, int]] = []
    with Loader(mixed, **options | {"batch_size": 8}) as loader:
        while len(expected) < len(found):
            expected += [pair for batch in loader for pair in zip(batch["dataset"], batch["index"].tolist(), strict=True)]
    assert len(found) == 3 * 9 * 8
    assert found == expected[: len(found)]


def test_an_error_of_any_class_names_its_dataset(odd: Path, tmp_path: Path) -> None:
    """Also one of a subclass that takes other arguments than a message."""

    def undecodable(episode: dict[str, Any]) -> bool:
        return bool(b"\xff".decode())

    with pytest.raises(ValueError, match=r"^dataset 'one': .*can't decode byte 0xff") as caught:
        Mixture({"one": {"uri": odd, "episode_filter": undecodable}})
    assert isinstance(caught.value.__cause__, ValueError)
