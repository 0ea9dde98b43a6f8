"""`on_error="substitute"`: which samples are replaced and by which, the mask, the share, and resuming."""

from __future__ import annotations

import gc
import itertools
import re
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from support.batches import Batch, equal
from support.datasets import ODD_CAMERA, ODD_SIZE, ROWS, SIDE, TOP, Column, build, copied, image_file, noise
from support.slow import slow

import dali_stream
from dali_stream import Dataset, DecodeError, Loader
from dali_stream.demo import read_identities

LENGTHS = (9, 7, 11)
BROKEN = {4, 11, 12, 20}  # `index` of the samples whose image is damaged
OPTIONS: dict[str, Any] = {
    "batch_size": 6, "consumers": 4, "episode_pool_size": 2, "image_dtype": "uint8", "device": "cpu", "last_batch": "partial",
}  # fmt: skip


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """27 images, 4 of which are damaged, and a column named as the mask. Read only."""
    places = [(episode, frame) for episode, length in enumerate(LENGTHS) for frame in range(length)]
    files = [image_file(noise(*place)) for place in places]
    values = [{"bytes": file[: len(file) // 2] if i in BROKEN else file, "path": None} for i, file in enumerate(files)]
    columns = {
        ODD_CAMERA: Column("image", [*ODD_SIZE, 3], values),
        "number": Column("float32", [2], np.arange(54).reshape(27, 2)),
        "note": Column("string", [1], [f"note {i}" for i in range(27)]),
    }
    return build(tmp_path_factory.mktemp("broken"), LENGTHS, columns)


def batches(root: Path | Dataset, **options: Any) -> list[Batch]:
    with Loader(root, on_error="substitute", **(OPTIONS | options)) as loader:
        return list(loader)


def order(root: Path, **options: Any) -> list[list[int]]:
    """`index` of each batch, as it is without damage."""
    with Loader(Dataset(root, cameras=[]), **(OPTIONS | options)) as loader:
        return [batch["index"].tolist() for batch in loader]


@pytest.mark.parametrize("pipeline", [None, lambda nodes: nodes])
def test_substitutes_are_whole_samples_of_their_batch_and_marked(root: Path, pipeline: Any) -> None:
    marked = 0
    for planned, batch in zip(order(root), batches(root, dali_graph=pipeline), strict=True):
        index, mask = batch["index"].tolist(), batch["is_substitute"]
        assert (mask.dtype, mask.shape) == (torch.bool, (len(planned),))
        assert mask.tolist() == [number in BROKEN for number in planned]
        kept = [number for number, wrong in zip(planned, mask.tolist(), strict=True) if not wrong]
        for wanted, found, wrong in zip(planned, index, mask.tolist(), strict=True):
            assert found in kept if wrong else found == wanted
        assert batch["number"][:, 0].tolist() == [2 * number for number in index]
        assert batch["note"] == [f"note {number}" for number in index]
        shown = read_identities(batch[ODD_CAMERA].movedim(1, -1).numpy())[:, :2].tolist()
        assert shown == torch.stack([batch["episode_index"], batch["frame_index"]], 1).tolist()
        marked += int(mask.sum())
    assert marked == len(BROKEN)


def test_a_batch_with_substitutes_is_made_again(root: Path) -> None:
    with Loader(root, on_error="substitute", **OPTIONS) as loader:
        found = list(loader)
        assert sum(int(batch["is_substitute"].sum()) for batch in found) == len(BROKEN) == loader.stats()["substituted"]
        assert all(equal(loader.batch_at(0, number), batch) for number, batch in enumerate(found))
        assert loader.stats()["substituted"] == len(BROKEN)


def test_they_are_the_same_in_either_memory_format(root: Path) -> None:
    for a, b in zip(batches(root), batches(root, memory_format="contiguous"), strict=True):
        assert torch.equal(a[ODD_CAMERA], b[ODD_CAMERA])
        assert b[ODD_CAMERA].is_contiguous()


def test_they_are_counted(root: Path) -> None:
    with Loader(root, on_error="substitute", **OPTIONS) as loader:
        list(loader)
        assert loader.stats()["substituted"] == len(BROKEN)
        list(loader)
        assert loader.stats()["substituted"] == 2 * len(BROKEN)


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The messages on substitutes since the last call."""
    found = [record.getMessage() for record in caplog.records if "substituted by" in record.getMessage()]
    caplog.clear()
    return found


def test_the_first_is_logged_at_once_and_all_of_them_when_the_epoch_ends(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    damaged = rf"{ODD_CAMERA}: episode \d, frame \d+: the image is damaged"
    with Loader(root, on_error="substitute", **OPTIONS) as loader:
        for batch in loader:
            if batch["is_substitute"].any():
                [first] = logged(caplog)
                assert re.match(rf"a sample was substituted by another of its batch: {damaged}", first)
                break
        [summary] = logged(caplog)
        assert re.match(rf"epoch 0, {ODD_CAMERA}: \d samples? could not be read or decoded, substituted by", summary)
        assert loader.stats()["substituted"] == int(re.findall(r": (\d) sample", summary)[0])
        for epoch in (1, 2):
            list(loader)
            [summary] = logged(caplog)
            assert re.match(rf"epoch {epoch}, {ODD_CAMERA}: 4 samples could .* The first error: {damaged}", summary)
    assert logged(caplog) == []


def test_a_loop_of_exactly_one_epoch_is_summed_up_too(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It does not ask for another batch after the last one, so the epoch ends with the loader."""
    with Loader(root, on_error="substitute", **OPTIONS) as loader:
        iterator = iter(loader)
        for _ in range(len(loader)):
            next(iterator)
    assert [message.partition(" could")[0] for message in logged(caplog)[1:]] == [f"epoch 0, {ODD_CAMERA}: 4 samples"]


def test_each_damaged_file_has_its_line(written: Callable[..., Path], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = copied(written(episodes=2, size=(128, 160), codec="h264", gop=30), tmp_path)
    damaged = [root / f"videos/{camera}/chunk-000/file-000.mp4" for camera in (TOP, SIDE)]
    for file in damaged:
        data = bytearray(file.read_bytes())
        middle = len(data) // 2
        data[middle : middle + 400] = bytes(400)
        file.write_bytes(data)
    with Loader(root, on_error="substitute", batch_size=8, image_dtype="uint8", device="cpu") as loader:
        list(loader)
        substituted = loader.stats()["substituted"]
    _, *summaries = logged(caplog)
    assert 1 < len(summaries) <= 2
    for summary in summaries:
        [file] = [file for file in damaged if str(file) in summary]
        damaged.remove(file)
    assert sum(int(re.findall(r": (\d+) samples? could", summary)[0]) for summary in summaries) == substituted


@pytest.mark.parametrize("changes", [{"num_threads": 1, "prefetch": 1}, {"memory_budget": "3MiB"}])
def test_they_are_the_same_in_every_run(root: Path, changes: dict[str, Any]) -> None:
    assert all(itertools.starmap(equal, zip(batches(root), batches(root, **changes), strict=True)))


def test_they_are_the_same_in_a_resumed_run(root: Path) -> None:
    whole = batches(root)
    with Loader(root, on_error="substitute", **OPTIONS) as loader:
        list(itertools.islice(loader, 2))
        state = loader.state_dict()
    with Loader(root, on_error="substitute", **OPTIONS) as resumed:
        resumed.load_state_dict(state)
        assert all(equal(*pair) for pair in zip(resumed, whole[2:], strict=True))


def test_two_ranks_substitute_their_own_samples(root: Path) -> None:
    for rank in (0, 1):
        found = batches(root, rank=rank, world_size=2, batch_size=3)
        for planned, batch in zip(order(root, rank=rank, world_size=2, batch_size=3), found, strict=True):
            assert batch["is_substitute"].tolist() == [number in BROKEN for number in planned]


def kept(kind: type) -> list[Any]:
    """Objects of a kind in memory: images, or tracebacks of this package, which refer to packets and pixels."""
    gc.collect()
    found = [each for each in gc.get_objects() if issubclass(type(each), kind)]
    package = str(Path(dali_stream.__file__).parent)  # a checkout may have the same name
    return [each for each in found if kind is Image.Image or each.tb_frame.f_code.co_filename.startswith(package)]


KINDS = types.TracebackType, Image.Image
# A decode thread and the planner work ahead, and each may just be about to handle an error.
IN_PROGRESS = 24


def test_broken_images_are_not_kept(tmp_path: Path) -> None:
    """Their errors are kept for as long as their frames would be."""
    places = [(0, frame) for frame in range(96)]
    files = [image_file(noise(*place)) for place in places]
    values = [{"bytes": file if i % 8 == 0 else file[: len(file) // 2], "path": None} for i, file in enumerate(files)]
    root = build(tmp_path, (96,), {ODD_CAMERA: Column("image", [*ODD_SIZE, 3], values)})
    options, before = OPTIONS | {"batch_size": 16, "shuffle": False}, [len(kept(kind)) for kind in KINDS]
    with Loader(root, on_error="substitute", max_substitutes=1, num_threads=1, **options) as loader:
        list(loader)
        assert loader.stats()["substituted"] == 84
        tracebacks, images = (len(kept(kind)) - had for kind, had in zip(KINDS, before, strict=True))
        assert tracebacks < IN_PROGRESS
        assert images < 4


def without_frames(file: Path, rows: Path) -> None:
    """Half of the rows are between two frames."""
    table = pq.read_table(rows)
    late = np.where(table["frame_index"].to_numpy() % 2, 0.02, 0).astype(np.float32)
    times = pa.array(table["timestamp"].to_numpy() + late)
    pq.write_table(table.set_column(table.column_names.index("timestamp"), "timestamp", times), rows)


def no_video(file: Path, rows: Path) -> None:
    """The file of one of the episodes is something else."""
    file.write_bytes(b"no video" * 100)


@pytest.mark.parametrize("decode", ["dali", slow("torchcodec")])
@pytest.mark.parametrize("breaks", [without_frames, no_video])
def test_broken_videos_are_not_kept(vp9_demo: Path, tmp_path: Path, breaks: Callable[[Path, Path], None], decode: str) -> None:
    root = copied(vp9_demo, tmp_path)
    breaks(next(root.glob(f"videos/{SIDE}/*/file-001.mp4")), root / ROWS)
    options: dict[str, Any] = {"batch_size": 16, "device": "cpu", "decode": decode, "num_threads": 1, "max_substitutes": 1}
    before = len(kept(types.TracebackType))
    with Loader(Dataset(root, cameras=[SIDE]), on_error="substitute", **options) as loader:
        list(loader)
        assert loader.stats()["substituted"] > 40
        assert len(kept(types.TracebackType)) - before < IN_PROGRESS


def test_a_larger_share_of_a_batch_is_an_error(root: Path) -> None:
    most = max(sum(number in BROKEN for number in planned) for planned in order(root, batch_size=9))
    assert most > 1
    assert len(batches(root, batch_size=9, max_substitutes=most / 9)) == 3
    with pytest.raises(DecodeError) as raised:
        batches(root, batch_size=9, max_substitutes=(most - 0.5) / 9)
    said = f"{most} of the 9 samples of a batch cannot be read or decoded, but max_substitutes="
    assert str(raised.value).startswith(said)
    assert f"allows only {most - 1} substitutes. The first error: {ODD_CAMERA}: episode " in str(raised.value)


def test_a_batch_without_a_whole_sample_is_an_error(root: Path) -> None:
    with pytest.raises(DecodeError, match=f"^{ODD_CAMERA}: episode 0, frame 4: the image is damaged"):
        batches(root, batch_size=1, shuffle=False)


def test_without_substitutes_there_is_no_mask(root: Path) -> None:
    with Loader(Dataset(root, cameras=[]), **OPTIONS) as loader:
        assert "is_substitute" not in next(iter(loader))


def test_a_column_with_the_key_of_the_mask_gives_way_to_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = build(tmp_path, (4,), {"is_substitute": Column("float32", [1], np.arange(4) + 1)})
    [batch] = batches(root, batch_size=4)
    assert batch["is_substitute"].tolist() == [False] * 4
    said = "left out of the batches: the dataset's 'is_substitute', whose key is that of the mask of substituted samples"
    assert [record.getMessage() for record in caplog.records] == [said]
    with Loader(root, **OPTIONS | {"shuffle": False}) as loader:
        assert next(iter(loader))["is_substitute"].tolist() == [1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize("share", [0, -0.1, 1.1, True, "half", float("nan")])
def test_a_share_that_is_none_is_refused(root: Path, share: object) -> None:
    with pytest.raises(ValueError, match=r"max_substitutes must be greater than 0 and at most 1, got"):
        batches(root, max_substitutes=share)
