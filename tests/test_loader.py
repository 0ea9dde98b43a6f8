"""Batches of the demo: the frame delivered is the frame asked for, every row is that of the file, nothing else is read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from support.batches import as_lerobot, check_identities, equal, samples
from support.datasets import CAMERAS, SIDE, TOP, copied, read_lengths, read_rows

from dali_stream import Dataset, DecodeError, Loader, Order
from dali_stream.cache.buffers import Buffers

FPS = 20
STEPS = {TOP: [-2, -1, 0], SIDE: [0, 1, 30], "action": [0, 1, 2, 3], "observation.object_positions": [-7]}
WINDOWS = {key: [step / FPS for step in steps] for key, steps in STEPS.items()}


def batches_of(dataset: Dataset | Path | str, **arguments: Any) -> list[dict[str, Any]]:
    """One epoch."""
    with Loader(dataset, **({"batch_size": 16, "last_batch": "partial"} | arguments)) as loader:
        return list(loader)


# --------------------------------------------------------------------------------------------------------- identity


@pytest.mark.parametrize("shuffle", [True, "sharded", "global", False])
def test_every_frame_comes_once_and_is_the_one_asked_for(demo: Path, shuffle: bool | str) -> None:
    lengths = read_lengths(demo)
    batches = batches_of(demo, shuffle=shuffle, seed=3, consumers=8)
    for batch in batches:
        for camera in CAMERAS:
            assert batch[camera].shape[1:] == (3, 128, 160)
            check_identities(batch, camera, None, lengths)
    order = Order(list(lengths.values()), shuffle, 3, 0, 8)
    first = np.cumsum([0, *lengths.values()])
    episode, frame = order.read(0, len(order))
    assert samples(batches) == (first[episode] + frame).tolist()
    assert sorted(samples(batches)) == list(range(sum(lengths.values())))


def test_windows_of_both_cameras_are_the_frames_asked_for(demo: Path) -> None:
    lengths = read_lengths(demo)
    for batch in batches_of(demo, delta_timestamps=WINDOWS, image_dtype="uint8", batch_size=64):
        for camera in CAMERAS:
            assert batch[camera].shape[1:] == (3, 3, 128, 160)
            check_identities(batch, camera, STEPS[camera], lengths)


@pytest.mark.parametrize("pipeline", [None, lambda nodes: nodes], ids=["past DALI", "through DALI"])
@pytest.mark.parametrize("dtype", ["uint8", "float32"])
def test_batches_keep_their_values_while_later_ones_are_made(small: Path, dtype: str, pipeline: Any) -> None:
    """Buffers are reused, but a batch that a user still holds must not change, and neither must a part of it."""
    held, copies = [], []
    with Loader(small, batch_size=8, image_dtype=dtype, dali_graph=pipeline) as loader:
        for number, batch in enumerate(loader):
            if number % 3 == 2:  # frees buffers, so that later batches reuse them
                continue
            if number % 3 == 1:
                batch = {key: value[3:4] for key, value in batch.items()}
            held.append(batch)
            copies.append({key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in batch.items()})
    assert all(equal(batch, copy) for batch, copy in zip(held, copies, strict=True))


@pytest.mark.parametrize("pipeline", [None, lambda nodes: nodes], ids=["past DALI", "through DALI"])
def test_memory_of_batches_is_used_again_when_nobody_looks_at_it(
    small: Path, monkeypatch: pytest.MonkeyPatch, pipeline: Any
) -> None:
    """The test blackens each buffer that is handed out. A frame that DALI or the user still needs would turn black."""
    take, places = Buffers.take, []

    def blacken(self: Buffers, *kind: Any) -> np.ndarray:
        array = take(self, *kind)
        array[:] = 0
        places.append(array.ctypes.data)
        return array

    monkeypatch.setattr(Buffers, "take", blacken)
    lengths, held = read_lengths(small), None
    with Loader(small, delta_timestamps={TOP: [-0.05, 0.0]}, image_dtype="uint8", batch_size=4, dali_graph=pipeline) as loader:
        for batch in loader:
            for shown in (held, batch):
                if shown is not None:
                    check_identities(shown, TOP, [-1, 0], lengths)
                    check_identities(shown, SIDE, None, lengths)
            held = batch
    assert len(places) > 40
    assert len(set(places)) <= 8


# --------------------------------------------------------------------------------------------------------------- rows


def test_every_value_is_that_of_the_file(demo: Path) -> None:
    rows, tasks = read_rows(demo), pq.read_table(demo / "meta/tasks.parquet").to_pydict()
    names = dict(zip(tasks["task_index"], tasks["__index_level_0__"], strict=True))
    for batch in batches_of(Dataset(demo, cameras=[])):
        assert set(batch) == {*rows, "task"}
        at = batch["index"].numpy()
        for key, values in rows.items():
            expected = as_lerobot(values[at])
            assert batch[key].numpy().dtype == expected.dtype, key
            np.testing.assert_array_equal(batch[key].numpy(), expected, err_msg=key)
        assert batch["task"] == [names[number] for number in rows["task_index"][at]]


def test_each_camera_has_a_mask_of_its_own(small: Path) -> None:
    """Also where their windows are the same."""
    with Loader(small, batch_size=4, delta_timestamps={key: [-0.05, 0.0] for key in (TOP, SIDE)}) as loader:
        batch = next(iter(loader))
    batch[f"{TOP}_is_pad"][:] = True
    assert not batch[f"{SIDE}_is_pad"].all()


@pytest.mark.slow
def test_windows_of_rows_are_those_of_the_file(demo: Path) -> None:
    rows, lengths = read_rows(demo), np.array(list(read_lengths(demo).values()))
    first = np.cumsum([0, *lengths])
    for batch in batches_of(Dataset(demo, cameras=[TOP]), delta_timestamps={k: v for k, v in WINDOWS.items() if k != SIDE}):
        episode, frame = batch["episode_index"].numpy(), batch["frame_index"].numpy()
        for key, steps in STEPS.items():
            if key == SIDE:
                continue
            wanted = frame[:, None] + np.array(steps)
            pad = (wanted < 0) | (wanted >= lengths[episode][:, None])
            np.testing.assert_array_equal(batch[f"{key}_is_pad"].numpy(), pad)
            assert batch[f"{key}_is_pad"].dtype == torch.bool
            if key != TOP:
                shown = np.clip(wanted, 0, lengths[episode][:, None] - 1) + first[episode][:, None]
                np.testing.assert_array_equal(batch[key].numpy(), rows[key][shown].astype(np.float32))


# ---------------------------------------------------------------------------------------------------------- selection


@pytest.mark.parametrize("camera", [TOP, SIDE])
def test_a_camera_that_is_not_selected_is_not_read(demo_copy: Path, camera: str) -> None:
    [other] = set(CAMERAS) - {camera}
    shutil.rmtree(demo_copy / "videos" / other)
    batches = batches_of(Dataset(demo_copy, cameras=[camera]))
    assert other not in batches[0]
    for batch in batches:
        check_identities(batch, camera, None, read_lengths(demo_copy))


def test_columns_of_images_that_are_not_selected_are_not_read(demo_copy: Path) -> None:
    """A column that the files lack is an error only where somebody wants it."""
    info = json.loads((demo_copy / "meta/info.json").read_text())
    info["features"]["wrist"] = {"dtype": "image", "shape": [128, 160, 3], "names": None}
    (demo_copy / "meta/info.json").write_text(json.dumps(info))
    assert len(samples(batches_of(Dataset(demo_copy, cameras=[TOP])))) == sum(read_lengths(demo_copy).values())


def test_selected_episodes_are_all_that_comes(demo_copy: Path) -> None:
    lengths = read_lengths(demo_copy)
    rows = read_rows(demo_copy)
    dataset = Dataset(demo_copy, episodes=[4, 1])
    assert (dataset.num_episodes, dataset.num_frames) == (2, lengths[1] + lengths[4])
    assert dataset.episodes.tolist() == [1, 4]
    for path in demo_copy.glob("videos/*/*/*.mp4"):
        # Episodes 1 and 4 are in files 0 and 1 of the top camera, and in files 1 and 2 of the side camera.
        if path.name not in (("file-000.mp4", "file-001.mp4") if TOP in str(path) else ("file-001.mp4", "file-002.mp4")):
            path.unlink()
    batches = batches_of(dataset, delta_timestamps=WINDOWS)
    assert sorted(samples(batches)) == rows["index"][np.isin(rows["episode_index"], (1, 4))].tolist()
    for batch in batches:
        for camera in CAMERAS:
            check_identities(batch, camera, STEPS[camera], lengths)


# ------------------------------------------------------------------------------------------------------------ storage


@pytest.fixture
def in_memory(small: Path) -> Any:
    """A demo on fsspec's memory filesystem."""
    files = fsspec.filesystem("memory")
    files.put(str(small), "/loader-test", recursive=True)
    yield "memory://loader-test"
    files.rm("/loader-test", recursive=True)


@pytest.mark.slow
def test_the_same_batches_come_from_anywhere(small: Path, in_memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments: dict[str, Any] = {"image_dtype": "uint8", "delta_timestamps": {"action": WINDOWS["action"]}}
    with Loader(small, batch_size=16, **arguments) as loader:
        expected = list(loader)
    monkeypatch.chdir(small.parent)
    monkeypatch.setenv("HF_LEROBOT_HOME", str(small.parent.parent))
    hub_id = f"{small.parent.name}/{small.name}"
    for uri in (str(small), f"file://{small}", in_memory, small.name, hub_id, Dataset(small)):
        with Loader(uri, batch_size=16, **arguments) as loader:
            assert all(equal(a, b) for a, b in zip(expected, loader, strict=True)), uri
    assert Dataset(in_memory).fingerprint == Dataset(small).fingerprint


@pytest.mark.slow
def test_data_files_may_lie_elsewhere(small: Path, in_memory: str, tmp_path: Path) -> None:
    expected = batches_of(small)
    shutil.copytree(small / "meta", tmp_path / "meta-only/meta")
    for files in (small, in_memory):
        found = batches_of(Dataset(tmp_path / "meta-only", data_files_root=files))
        assert all(equal(a, b) for a, b in zip(found, expected, strict=True))


# -------------------------------------------------------------------------------------------------------- substitution


def test_a_broken_file_is_an_error_or_is_substituted(demo: Path, tmp_path: Path) -> None:
    root = copied(demo, tmp_path)
    broken = root / f"videos/{TOP}/chunk-000/file-001.mp4"
    broken.write_bytes(broken.read_bytes()[:200])
    with pytest.raises(DecodeError, match=rf"{TOP}: episode \d, frame \d+: .*file-001.mp4: "):
        batches_of(root, last_batch="drop")
    lengths = read_lengths(root)
    held = [episode for episode in lengths if 2 <= episode < 5]  # by the broken file
    with Loader(root, batch_size=64, shuffle="global", on_error="substitute") as loader:
        batches = list(loader)
        assert loader.stats()["substituted"] > 0
    for batch in batches:
        for camera in CAMERAS:
            check_identities(batch, camera, None, lengths)
        assert not set(batch["episode_index"].tolist()) & set(held)
