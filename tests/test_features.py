"""Every kind of column against pyarrow: images in rows, text, all dtypes, one to four axes, single and as windows."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from support.batches import as_lerobot, equal, samples
from support.datasets import ODD_CAMERA, ODD_SIZE, SIDE, TOP, copied, read_lengths, read_rows, write_odd

from dali_stream import Dataset, Loader
from dali_stream.demo import read_identities

TABULAR = [
    "observation.state", "scalar", "half", "matrix", "cube", "tesseract", "one", "flag", "flags", "small", "bytes",
    "subtask_index", "timestamp", "frame_index", "episode_index", "index", "task_index",
]  # fmt: skip


@pytest.mark.parametrize("rows_per_group", [1, 4, 100])
def test_every_value_is_that_of_the_file(tmp_path: Path, rows_per_group: int) -> None:
    odd = write_odd(tmp_path / "data", rows_per_group=rows_per_group)
    rows = read_rows(odd)
    with Loader(odd, batch_size=3, last_batch="partial", consumers=4) as loader:
        batches = list(loader)
    assert sorted(samples(batches)) == rows["index"].tolist() == list(range(21))
    for batch in batches:
        at = batch["index"].numpy()
        for key in TABULAR:
            expected = as_lerobot(rows[key][at])
            assert batch[key].numpy().dtype == expected.dtype, key
            np.testing.assert_array_equal(batch[key].numpy(), expected, err_msg=key)
        assert batch["note"] == rows["note"][at].tolist()
        assert batch["task"] == [f"task {n}" for n in rows["task_index"][at]]
        assert batch["subtask"] == [f"subtask {n}" for n in rows["subtask_index"][at]]


@pytest.mark.parametrize("key", [key for key in TABULAR if key not in ("subtask_index", "task_index")])
@pytest.mark.parametrize("offsets", [[0], [-3, 0, 1]])
def test_every_window_is_that_of_the_file(odd: Path, key: str, offsets: list[int]) -> None:
    rows, lengths = read_rows(odd), read_lengths(odd)
    first = {episode: int(rows["index"][rows["episode_index"] == episode][0]) for episode in lengths}
    with Loader(odd, batch_size=7, shuffle="global", delta_timestamps={key: [n / 10 for n in offsets]}) as loader:
        batches = list(loader)
    for batch in batches:
        # The windowed key may be `index` itself, so the current row is known by its note.
        at = np.array([int(note.split()[1]) for note in batch["note"]])
        episode, frame = rows["episode_index"][at], rows["frame_index"][at]
        last = np.array([lengths[e] - 1 for e in episode])
        wanted = frame[:, None] + np.array(offsets)
        shown = np.clip(wanted, 0, last[:, None]) + np.array([first[e] for e in episode])[:, None]
        np.testing.assert_array_equal(batch[key].numpy(), as_lerobot(rows[key][shown]))
        np.testing.assert_array_equal(batch[f"{key}_is_pad"].numpy(), (wanted < 0) | (wanted > last[:, None]))


@pytest.mark.parametrize("image_dtype", ["uint8", "float32"])
def test_images_in_rows_are_exact(odd: Path, image_dtype: str) -> None:
    with Loader(odd, batch_size=7, image_dtype=image_dtype) as loader:
        assert loader.routes[ODD_CAMERA].reason == "its frames are images in Parquet rows"
        batches = list(loader)
    for batch in batches:
        images = batch[ODD_CAMERA]
        assert images.shape == (7, 3, *ODD_SIZE)
        assert images.dtype == (torch.uint8 if image_dtype == "uint8" else torch.float32)
        pixels = images if image_dtype == "uint8" else images * 255
        found = pixels.round().to(torch.uint8).movedim(1, -1).numpy()
        expected = np.stack([batch["episode_index"], batch["frame_index"], np.zeros(7, np.int64)], 1)
        np.testing.assert_array_equal(read_identities(found), expected)
        for picture, (episode, frame, _) in zip(found, expected.tolist(), strict=True):
            noise = np.random.default_rng([episode, frame]).integers(0, 256, (*ODD_SIZE, 3), np.uint8)
            np.testing.assert_array_equal(picture[:112], noise[:112])  # below lies the strip of the identity


def test_windows_of_images_keep_a_time_axis_of_one(odd: Path) -> None:
    """LeRobot drops it for videos and not for images."""
    for steps in ([0.0], [-0.1, 0.0]):
        with Loader(odd, batch_size=7, delta_timestamps={ODD_CAMERA: steps}, shuffle=False) as loader:
            batch = next(iter(loader))
        assert batch[ODD_CAMERA].shape == (7, len(steps), 3, *ODD_SIZE)
        found = batch[ODD_CAMERA].mul(255).round().to(torch.uint8).movedim(2, -1).flatten(0, 1).numpy()
        assert read_identities(found)[-1].tolist() == [2, 0, 0]
        assert batch[f"{ODD_CAMERA}_is_pad"][-1].tolist() == [step < 0 for step in steps]


def test_a_dataset_without_cameras_streams(odd: Path) -> None:
    dataset = Dataset(odd, cameras=[])
    with Loader(dataset, batch_size=4, last_batch="partial") as loader:
        assert loader.routes == {}
        batches = list(loader)
    assert sorted(samples(batches)) == list(range(21))
    assert ODD_CAMERA not in batches[0]


def test_text_has_no_window(odd: Path) -> None:
    with pytest.raises(ValueError, match="Unknown key 'note' in delta_timestamps"):
        Loader(odd, batch_size=4, delta_timestamps={"note": [0.0]})


def test_a_window_over_the_task_index_keeps_the_task_of_the_current_frame(odd: Path) -> None:
    with Loader(odd, batch_size=4, delta_timestamps={"task_index": [-0.1, 0.0]}) as loader:
        for batch in loader:
            assert batch["task_index"].shape == (4, 2)
            assert batch["task"] == [f"task {n}" for n in batch["task_index"][:, -1].tolist()]


# ------------------------------------------------------------------------ keys that the dataset and the Loader both have


def with_column(root: Path, key: str, like: str) -> Path:
    """Adds a feature that is a copy of another one."""
    file, info = root / "data/chunk-000/file-000.parquet", json.loads((root / "meta/info.json").read_text())
    table = pq.read_table(file)
    pq.write_table(table.append_column(key, table[like]), file, row_group_size=4)
    info["features"][key] = info["features"][like]
    (root / "meta/info.json").write_text(json.dumps(info))
    return root


@pytest.mark.parametrize("like", ["flag", "scalar", "observation.state", "note", ODD_CAMERA])
def test_a_column_with_the_key_of_a_mask_gives_way_to_the_mask(
    odd: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, like: str
) -> None:
    root = with_column(copied(odd, tmp_path), "one_is_pad", like)
    windows = {"one": [-0.1, 0.0]}
    with (
        Loader(odd, batch_size=4, delta_timestamps=windows) as expected,
        Loader(root, batch_size=4, delta_timestamps=windows) as found,
    ):
        for plain, batch in zip(expected, found, strict=True):
            assert equal(batch, plain)
    assert [record.getMessage() for record in caplog.records] == [
        "left out of the batches: the dataset's 'one_is_pad', whose key is that of the mask of the window on 'one'"
    ]


@pytest.mark.parametrize("like", ["flag", "note", ODD_CAMERA])
def test_a_column_with_the_key_of_a_mask_is_delivered_where_there_is_no_mask(
    odd: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, like: str
) -> None:
    root = with_column(copied(odd, tmp_path), "one_is_pad", like)
    with Loader(root, batch_size=4, delta_timestamps={"scalar": [-0.1, 0.0]}) as loader:
        for batch in loader:
            same = batch["one_is_pad"] == batch[like]
            assert same if isinstance(same, bool) else same.all()
    assert caplog.records == []


@pytest.mark.parametrize("like", ["one", "scalar", "observation.state"])
def test_a_column_named_sample_is_delivered_where_nothing_is_augmented(odd: Path, tmp_path: Path, like: str) -> None:
    with Loader(with_column(copied(odd, tmp_path), "sample", like), batch_size=4) as loader:
        for batch in loader:
            assert batch["sample"].equal(batch[like])


def test_a_video_with_the_key_of_a_mask_is_not_read(demo_copy: Path) -> None:
    def renamed(text: str) -> str:
        return text.replace(SIDE, "action_is_pad")

    info = demo_copy / "meta/info.json"
    info.write_text(renamed(info.read_text()))
    for file in demo_copy.glob("meta/episodes/*/*.parquet"):
        table = pq.read_table(file)
        pq.write_table(table.rename_columns([renamed(name) for name in table.column_names]), file)
    shutil.rmtree(demo_copy / "videos" / SIDE)
    assert Dataset(demo_copy).videos == (TOP, "action_is_pad")
    with Loader(demo_copy, batch_size=4, delta_timestamps={"action": [0.0, 0.05]}) as loader:
        assert next(iter(loader))["action_is_pad"].shape == (4, 2)
        assert list(loader.routes) == [TOP]
        loader.bottleneck()


@pytest.mark.parametrize("like", ["note", "flag"])
@pytest.mark.parametrize("key", ["task", "subtask"])
def test_a_column_with_the_key_of_a_text_gives_way_to_the_text(odd: Path, tmp_path: Path, key: str, like: str) -> None:
    with Loader(with_column(copied(odd, tmp_path), key, like), batch_size=4) as loader:
        for batch in loader:
            assert batch[key] == [f"{key} {number}" for number in batch[f"{key}_index"].tolist()]


def test_windows_on_a_key_and_on_the_key_of_its_mask_are_refused(odd: Path, tmp_path: Path) -> None:
    root = with_column(copied(odd, tmp_path), "one_is_pad", "flag")
    with pytest.raises(ValueError, match=r"delta_timestamps has 'one_is_pad'.*the mask of the window on 'one' is delivered"):
        Loader(root, batch_size=4, delta_timestamps={"one": [0.0, 0.1], "one_is_pad": [0.0, 0.1]})
    with Loader(root, batch_size=4, delta_timestamps={"one_is_pad": [0.0, 0.1]}) as loader:
        assert next(iter(loader))["one_is_pad_is_pad"].shape == (4, 2)
