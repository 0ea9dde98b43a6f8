"""Every kind of column against pyarrow: images in rows, text, all dtypes, one to four axes, single and as windows."""

from __future__ import annotations

import json
import shutil
import subprocess
from decimal import Decimal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from support.batches import as_lerobot, check_identities, equal, samples
from support.datasets import (
    ODD_CAMERA,
    ODD_SIZE,
    ROWS,
    SIDE,
    TOP,
    Column,
    build,
    change_info,
    copied,
    read_lengths,
    read_rows,
    write_odd,
)  # fmt: skip
from support.tools import prepared
from support.videos import hevc

from dali_stream import Dataset, DatasetError, DecodeError, Loader
from dali_stream.demo import read_identities
from dali_stream.lerobot.dataset_files import NEEDED

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
            np.testing.assert_array_equal(picture[:112], noise[:112])  # the identity strip is below


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


# ------------------------------------------------------------------------ how values are stored

LENGTHS = (3, 2)
COUNT = sum(LENGTHS)


def one_column(root: Path, dtype: str, shape: list[int], values: object) -> Path:
    """A dataset with the column `x`."""
    return build(root, LENGTHS, {"x": Column(dtype, shape, values)})


def delivered(dataset: Path | Dataset, key: str = "x") -> object:
    """All values of a feature, in recorded order."""
    with Loader(dataset, batch_size=COUNT, shuffle=False, last_batch="partial") as loader:
        return next(iter(loader))[key]


NUMPY = ["bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64"]
SHAPES: list[list[int]] = [[], [1], [3], [2, 3], [2, 1, 2], [1, 2, 1, 2], [2, 1, 1, 1, 2]]


@pytest.mark.parametrize("dtype", NUMPY)
def test_numbers_of_every_dtype_and_shape(tmp_path: Path, dtype: str) -> None:
    rng, columns = np.random.default_rng(0), {}
    for shape in SHAPES:
        size = (COUNT, *shape)
        values = rng.normal(0, 100, size) if "float" in dtype else rng.integers(0, 2 if dtype == "bool" else 100, size)
        columns[f"x{shape}"] = Column(dtype, shape, values.astype(dtype))
    root = build(tmp_path, LENGTHS, columns)
    with Loader(root, batch_size=COUNT, shuffle=False) as loader:
        batch = next(iter(loader))
    for key, column in columns.items():
        expected = as_lerobot(column.values.reshape(COUNT, *(column.shape if column.shape != [1] else [])))
        assert batch[key].numpy().dtype == expected.dtype
        np.testing.assert_array_equal(batch[key].numpy(), expected, err_msg=key)


ARROW: dict[str, tuple[str, list[int], pa.Array]] = {
    "a list of one": ("float64", [1], pa.array([[float(i)] for i in range(COUNT)])),
    "a fixed-size list of one": ("float32", [1], pa.array([[float(i)] for i in range(COUNT)], pa.list_(pa.float32(), 1))),
    "a list of one for a scalar": ("int64", [], pa.array([[i] for i in range(COUNT)])),
    "lists": ("float32", [2], pa.array([[i, i + 0.5] for i in range(COUNT)], pa.list_(pa.float32()))),
    "large lists": ("float64", [2], pa.array([[i, i + 0.5] for i in range(COUNT)], pa.large_list(pa.float64()))),
    "fixed-size lists": ("int16", [2], pa.array([[i, -i] for i in range(COUNT)], pa.list_(pa.int16(), 2))),
    "lists of fixed-size lists": (
        "int8",
        [2, 1],
        pa.array([[[i], [-i]] for i in range(COUNT)], pa.list_(pa.list_(pa.int8(), 1))),
    ),
    "whole numbers as floats": ("int64", [1], pa.array([float(i) for i in range(COUNT)])),
    "numbers of 0 and 1 for bool": ("bool", [2], pa.array([[i % 2, 1] for i in range(COUNT)])),
    "bool for numbers": ("float32", [1], pa.array([i % 2 == 0 for i in range(COUNT)])),
    "NaN and infinity": ("float32", [1], pa.array([0.0, np.nan, np.inf, -np.inf, 1.0], pa.float32())),
    "the largest of int64": ("uint64", [1], pa.array([2**63 - 1] * COUNT, pa.uint64())),
    "categories": ("int64", [1], pa.array([7, 8, 7, 8, 7]).dictionary_encode()),
    # LeRobot casts these with Arrow.
    "decimals": ("float32", [1], pa.array([Decimal(f"{i}.25") for i in range(COUNT)], pa.decimal128(38, 2))),
    "decimals of 256 bits": ("float64", [1], pa.array([Decimal(f"{i}.5") for i in range(COUNT)], pa.decimal256(60, 1))),
    "decimals for integers": ("int64", [1], pa.array([Decimal(i) for i in range(COUNT)], pa.decimal128(18, 0))),
    "decimals with zeros for integers": ("int32", [1], pa.array([Decimal(f"{i}.00") for i in range(COUNT)])),
    "lists of decimals": ("float32", [2], pa.array([[Decimal(i), Decimal(-i)] for i in range(COUNT)])),
}  # fmt: skip
# Times and durations are delivered in their own unit.
TIMES = {
    "times": pa.timestamp("us"), "times of a zone": pa.timestamp("ms", "UTC"), "durations": pa.duration("ns"),
    "times of a day": pa.time64("us"),
}  # fmt: skip


@pytest.mark.parametrize("kind", TIMES)
def test_times_for_integers(tmp_path: Path, kind: str) -> None:
    numbers = [10**15 + 7 * i if kind.startswith("times of a zone") else 7 * i for i in range(COUNT)]
    found = delivered(one_column(tmp_path, "int64", [1], pa.array(numbers, TIMES[kind])))
    assert isinstance(found, torch.Tensor)
    assert found.tolist() == numbers


@pytest.mark.parametrize("rows_per_group", [1, 2, 5])
def test_columns_that_every_dataset_has_may_be_decimals(tmp_path: Path, rows_per_group: int) -> None:
    """Statistics of their row groups are no integers, so they do not tell where an episode is."""
    root = one_column(tmp_path / "data", "float32", [1], np.arange(COUNT))
    expected = {key: delivered(root, key) for key in ("x", *NEEDED)}
    table = pq.read_table(root / ROWS)
    kinds = {"timestamp": pa.decimal128(12, 3), "episode_index": pa.decimal128(18, 0), "index": pa.decimal256(60, 0)}
    for key, kind in kinds.items():
        values = pa.array([Decimal(f"{value:.3f}") for value in table[key].to_pylist()]).cast(kind)
        table = table.set_column(table.column_names.index(key), key, values)
    # Metadata that name no rows of a file, so that episodes are searched by `episode_index`.
    pq.write_table(table.take([*range(LENGTHS[0], COUNT), *range(LENGTHS[0])]), root / ROWS, row_group_size=rows_per_group)
    for dataset in (root, tmp_path / "copy"):
        if dataset != root:
            prepared(root, dataset)
            kinds_of_copy = {field.name: field.type for field in pq.read_schema(dataset / ROWS)}
            assert not any(pa.types.is_decimal(kind) for kind in kinds_of_copy.values())
        for key, values in expected.items():
            np.testing.assert_allclose(delivered(dataset, key), values, atol=5e-4, err_msg=key)


@pytest.mark.parametrize("stored", ARROW)
def test_numbers_are_read_however_they_are_stored(tmp_path: Path, stored: str) -> None:
    dtype, shape, values = ARROW[stored]
    found = delivered(one_column(tmp_path, dtype, shape, values))
    expected = np.array(values.to_pylist()).reshape(COUNT, *(shape if shape != [1] else []))
    assert isinstance(found, torch.Tensor)
    assert found.dtype == {"f": torch.float32, "b": torch.bool}.get(np.dtype(dtype).kind, torch.int64)
    np.testing.assert_array_equal(found.numpy(), expected)


class Matrix(pa.ExtensionType):  # type: ignore[misc]
    """As the library `datasets` registers one when it is imported."""

    def __init__(self) -> None:
        super().__init__(pa.list_(pa.list_(pa.float32())), "datasets.features.features.Array2DExtensionType")

    def __arrow_ext_serialize__(self) -> bytes:
        return b""

    @classmethod
    def __arrow_ext_deserialize__(cls, storage_type: pa.DataType, serialized: bytes) -> Matrix:
        return cls()


def test_matrices_are_read_where_the_library_datasets_is_imported(tmp_path: Path) -> None:
    numbers = np.random.default_rng(0).random((COUNT, 2, 3), np.float32)
    values = pa.ExtensionArray.from_storage(Matrix(), pa.array(numbers.tolist(), Matrix().storage_type))
    root = one_column(tmp_path, "float32", [2, 3], values)
    pa.register_extension_type(Matrix())
    try:
        assert isinstance(pq.read_table(root / ROWS)["x"].type, Matrix)
        np.testing.assert_array_equal(delivered(root), numbers)
    finally:
        pa.unregister_extension_type("datasets.features.features.Array2DExtensionType")


@pytest.mark.parametrize("shape", [[], [1], [2]])
def test_numbers_of_every_shape_are_normalized(tmp_path: Path, shape: list[int]) -> None:
    root = one_column(tmp_path, "float32", shape, np.arange(COUNT * (shape or [1])[0]).reshape(COUNT, *shape))
    dataset = Dataset(root, stats=Dataset(root).compute_stats(["x"]))
    with Loader(dataset, batch_size=COUNT, normalize={"x": "min_max"}) as loader:
        batch = next(iter(loader))
    assert batch["x"].shape == (COUNT, *(shape if shape != [1] else []))
    torch.testing.assert_close(batch["x"].sort(0).values.reshape(COUNT, -1)[:, 0], torch.linspace(-1, 1, COUNT))


def test_columns_that_every_dataset_has_may_be_lists_of_one(tmp_path: Path) -> None:
    root = one_column(tmp_path, "float32", [1], np.arange(COUNT))
    expected = [delivered(root, key) for key in NEEDED]
    table = pq.read_table(root / ROWS)
    for key in NEEDED:
        table = table.set_column(table.column_names.index(key), key, pa.array([[value] for value in table[key].to_pylist()]))
    pq.write_table(table, root / ROWS)
    for key, values in zip(NEEDED, expected, strict=True):
        np.testing.assert_array_equal(delivered(root, key), values)


TEXTS: dict[str, tuple[list[int], pa.Array]] = {
    "texts": ([1], pa.array(["a", "", "ö", "d", "e"])),
    "large texts": ([1], pa.array(list("abcde"), pa.large_string())),
    "categories": ([1], pa.array(list("abaab")).dictionary_encode()),
    "lists of one": ([1], pa.array([[text] for text in "abcde"])),
    "lists": ([2], pa.array([[text, text.upper()] for text in "abcde"])),
    "nested lists": ([1, 2], pa.array([[[text, text.upper()]] for text in "abcde"])),
    "bytes": ([1], pa.array([text.encode() for text in ("a", "", "ö", "d", "e")])),
    "large bytes": ([1], pa.array([b"a"] * 5, pa.large_binary())),
    "bytes of one size": ([1], pa.array([b"ab"] * 5, pa.binary(2))),
    "lists of bytes": ([2], pa.array([[text.encode(), b"x"] for text in "abcde"])),
}


@pytest.mark.parametrize("stored", TEXTS)
def test_text_is_delivered_as_lists_of_str(tmp_path: Path, stored: str) -> None:
    shape, values = TEXTS[stored]
    kind = pa.list_(pa.string()) if stored == "lists of bytes" else pa.string() if "bytes" in stored else values.type
    expected = values.cast(kind).to_pylist() if stored != "lists of one" else list("abcde")
    assert delivered(one_column(tmp_path, "string", shape, values)) == expected


IMPOSSIBLE: dict[str, tuple[str, list[int], pa.Array, str]] = {
    "uint64 above int64": (
        "uint64", [1], pa.array([0, 0, 0, 2**63, 0], pa.uint64()), r"int64 in batches, got 9223372036854775808 \(uint64\)",
    ),
    "a fraction for an integer": ("int64", [1], pa.array([0, 0, 0, 0.5, 0]), r"must hold int64, .*got 0.5 \(double\)"),
    "NaN for an integer": ("int64", [1], pa.array([0, 0, 0, np.nan, 0]), r"must hold int64, .*got nan \(double\)"),
    "2 for bool": ("bool", [1], pa.array([0, 0, 0, 2, 0]), r"must hold bool, .*got 2 \(int64\)"),
    "a list of two for one number": ("float32", [1], pa.array([[0.0]] * 3 + [[0.0, 1.0]] * 2), r"have shape \[1\], .*another"),
    "a list of none for one number": ("float32", [1], pa.array([[0.0]] * 3 + [[], [0.0]]), r"must have shape \[1\], .*another"),
    "a number for a list": ("float32", [2], pa.array([0.0] * 5), r"must have shape \[2\], as meta/info.json says, got double"),
    "a missing number": ("float32", [1], pa.array([0.0, 0.0, 0.0, None, 0.0]), "1 of 2 values are missing"),
    "a missing number in a list": ("float32", [2], pa.array([[0.0, 1.0]] * 4 + [[0.0, None]]), "1 of its numbers are missing"),
    "text for numbers": ("float32", [1], pa.array(list("abcde")), "must hold float32 .*, got string"),
    "a missing text": ("string", [1], pa.array(["", "", "", None, ""]), "1 of 2 values are missing"),
    "bytes that are no text": ("string", [1], pa.array([b"\xff"] * 5), "must hold string .*, got binary .* UTF8"),
    "a decimal fraction for an integer": (
        "int64", [1], pa.array([Decimal("0.5")] * 5), r"must hold int64 .*, got decimal128\(1, 1\) .* data loss",
    ),
    "times for floats": ("float32", [1], pa.array([0] * 5, pa.timestamp("us")), r"must hold float32 .*, got timestamp\[us\]"),
}  # fmt: skip


@pytest.mark.parametrize("stored", IMPOSSIBLE)
def test_a_value_that_its_feature_cannot_have_is_an_error_with_a_remedy(tmp_path: Path, stored: str) -> None:
    dtype, shape, values, said = IMPOSSIBLE[stored]
    dataset = Dataset(one_column(tmp_path, dtype, shape, values), episodes=[1])
    with pytest.raises(DatasetError, match=rf"file-000.parquet: episode 1: x:? .*{said}.*leave the feature out with .*without"):
        delivered(dataset)
    assert delivered(dataset.without(["x"]), "index").tolist() == [3, 4]  # type: ignore[attr-defined]


@pytest.mark.parametrize("dtype", ["binary", "bytes", "timestamp[s]", None, ["float32"], {}])
def test_a_column_of_another_dtype_is_passed_over_with_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, dtype: object
) -> None:
    plain, root = (one_column(tmp_path / name, "float32", [1], np.arange(COUNT)) for name in ("plain", "more"))
    info = json.loads((root / "meta/info.json").read_text())
    change_info(root, features={"y": {"dtype": dtype}} | info["features"])
    table = pq.read_table(root / ROWS)
    pq.write_table(table.append_column("y", pa.array([b"\xff"] * COUNT)), root / ROWS)
    with Loader(plain, batch_size=2) as expected, Loader(root, batch_size=2) as found:
        assert all(equal(*pair) for pair in zip(expected, found, strict=True))
    [said] = [record.getMessage() for record in caplog.records]
    assert f"feature 'y' has dtype {str(dtype)!r}, which is not read. Batches will lack it" in said


def test_features_can_be_left_out(odd: Path) -> None:
    rest = Dataset(odd).without(["matrix", "note", ODD_CAMERA])
    assert rest.cameras == ()
    assert rest.fingerprint == Dataset(odd).fingerprint
    with Loader(odd, batch_size=4) as whole, Loader(rest, batch_size=4) as part:
        for expected, batch in zip(whole, part, strict=True):
            assert expected.keys() - batch.keys() == {"matrix", "note", ODD_CAMERA}
            assert equal({key: expected[key] for key in batch}, batch)


@pytest.mark.parametrize("key", ["nothing", "timestamp", "index"])
def test_what_every_dataset_has_cannot_be_left_out(odd: Path, key: str) -> None:
    with pytest.raises(ValueError, match=rf"can be left out, got '{key}'. Available: observation.image, note, "):
        Dataset(odd).without([key])


# ------------------------------------------------------------------------ video: depth maps, and shapes of channels first


def test_unmarked_depth_video_is_passed_over_with_one_line_and_refused_where_it_is_selected(
    demo_copy: Path, caplog: pytest.LogCaptureFixture
) -> None:
    features = json.loads((demo_copy / "meta/info.json").read_text())["features"]
    features[SIDE]["info"] |= {"video.pix_fmt": "gray12le"}
    change_info(demo_copy, features=features)
    shutil.rmtree(demo_copy / "videos" / SIDE)  # so no byte of it is read
    with Loader(demo_copy, batch_size=4) as loader:
        assert SIDE not in next(iter(loader))
    [said] = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert f"feature '{SIDE}' has more than 8 bits per value, but is not marked as depth" in said
    with pytest.raises(ValueError, match=f"Camera '{SIDE}' has more than 8 bits per value.* Available: {TOP}$"):
        Dataset(demo_copy, cameras=[TOP, SIDE])


@pytest.mark.slow
def test_depth_video_without_a_mark_is_an_error(demo_copy: Path) -> None:
    """And not frames of 8 bits: all bits of a distance matter."""
    for file in (demo_copy / "videos" / SIDE).rglob("*.mp4"):
        gray = hevc(2, pixels="gray12le")
        command = ["ffmpeg", "-v", "error", "-i", str(file), *gray, "-y", str(file.with_suffix(".gray.mp4"))]
        subprocess.run(command, check=True)
        file.with_suffix(".gray.mp4").rename(file)
    with (
        Loader(demo_copy, batch_size=4) as loader,
        pytest.raises(DecodeError, match=rf"{SIDE}.*unless it is marked as depth, got 12 bits"),
    ):
        next(iter(loader))
    with Loader(Dataset(demo_copy, cameras=[TOP]), batch_size=4) as loader:
        assert TOP in next(iter(loader))


@pytest.mark.parametrize("image_size", [None, (120, 130)])
def test_video_whose_shape_is_channels_first(demo_copy: Path, image_size: tuple[int, int] | None) -> None:
    features = json.loads((demo_copy / "meta/info.json").read_text())["features"]
    for camera in (TOP, SIDE):
        height, width, channels = features[camera]["shape"]
        features[camera] |= {"shape": [channels, height, width], "names": ["channels", "height", "width"]}
    change_info(demo_copy, features=features)
    options = {"image_size": image_size, "delta_timestamps": {SIDE: [-0.05, 0.0]}, "image_dtype": "uint8", "device": "cpu"}
    lengths = read_lengths(demo_copy)
    with Loader(demo_copy, batch_size=8, **options) as loader:
        for batch, _ in zip(loader, range(6), strict=False):
            assert batch[TOP].shape == (8, 3, *(image_size or (128, 160)))
            check_identities(batch, TOP, None, lengths)
            check_identities(batch, SIDE, [-1, 0], lengths)


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


def test_a_column_named_sample_is_refused_where_frames_are_augmented(odd: Path, tmp_path: Path) -> None:
    root = with_column(copied(odd, tmp_path), "sample", "one")
    with pytest.raises(ValueError, match=r"the feature 'sample'.*Leave it out with dataset.without\(\['sample'\]\)"):
        Loader(root, batch_size=4, dali_graph=lambda nodes: nodes)
    with Loader(Dataset(root).without(["sample"]), batch_size=4, dali_graph=lambda nodes: nodes) as loader:
        assert "sample" not in next(iter(loader))


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
    with pytest.raises(
        ValueError, match=r"delta_timestamps must not have 'one_is_pad'.*the mask of the window on 'one' is delivered"
    ):
        Loader(root, batch_size=4, delta_timestamps={"one": [0.0, 0.1], "one_is_pad": [0.0, 0.1]})
    with Loader(root, batch_size=4, delta_timestamps={"one_is_pad": [0.0, 0.1]}) as loader:
        assert next(iter(loader))["one_is_pad_is_pad"].shape == (4, 2)
