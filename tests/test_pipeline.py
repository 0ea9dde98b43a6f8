"""The user's graph function: what it gets, what becomes of what it returns, and what it may not return."""

from __future__ import annotations

import subprocess
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from nvidia.dali import fn, types
from support.batches import check_identities
from support.datasets import CAMERAS, SIDE, TOP, read_lengths, read_rows
from support.own_process import SAFETY_S

from dali_stream import DaliStreamError, Dataset, Loader
from dali_stream.pipeline.batch import FinishedBatch
from dali_stream.pipeline.producer import Producer

Nodes = dict[str, Any]
ACTION = "action"


@pytest.fixture(scope="module")
def dataset(demo: Path) -> Dataset:
    return Dataset(demo, episodes=[0])


def first(dataset: Dataset | Path, pipeline: Any = None, **arguments: Any) -> dict[str, Any]:
    """The first batch, recorded order."""
    with Loader(dataset, **({"batch_size": 6, "shuffle": False, "dali_graph": pipeline} | arguments)) as loader:
        return next(iter(loader))


def test_the_function_gets_a_node_per_key(dataset: Dataset) -> None:
    seen: list[str] = []

    def look(nodes: Nodes) -> Nodes:
        seen.extend(nodes)
        return nodes

    deltas = {TOP: [0.0, 0.05], ACTION: [0.0, 0.05]}
    batch, plain = first(dataset, look, delta_timestamps=deltas), first(dataset, delta_timestamps=deltas)
    assert set(seen) == set(batch) - {"task"} | {"sample"}  # text goes past DALI; numbers for augmentation are not delivered
    assert f"{ACTION}_is_pad" in seen
    assert all(torch.equal(batch[key], plain[key]) for key in set(seen) - {"sample"})


def test_what_returns_unchanged_is_what_it_is_without_a_function(dataset: Dataset) -> None:
    batch, plain = first(dataset, lambda nodes: nodes), first(dataset)
    assert list(batch) == list(plain)
    assert all(torch.equal(batch[key], plain[key]) for key in batch if key != "task")


def test_the_frames_of_a_batch_are_copied_while_dali_has_those_of_the_batch_before(
    dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the first batch is returned, the run of the second one starts, and then the third one is copied."""
    copied, finish = threading.Semaphore(0), Producer.next

    def counted(self: Producer) -> FinishedBatch:
        batch = finish(self)
        copied.release()
        return batch

    monkeypatch.setattr(Producer, "next", counted)
    with Loader(dataset, batch_size=6, dali_graph=lambda nodes: nodes) as loader:
        batches = iter(loader)
        next(batches)
        for _ in range(3):
            assert copied.acquire(timeout=SAFETY_S)


def test_a_flip(dataset: Dataset) -> None:
    plain = first(dataset, image_dtype="uint8")
    batch = first(dataset, lambda nodes: nodes | {TOP: fn.flip(nodes[TOP], horizontal=1)}, image_dtype="uint8")
    assert torch.equal(batch[TOP], plain[TOP].flip(-1))
    assert torch.equal(batch[SIDE], plain[SIDE])


def test_a_crop_of_a_window(dataset: Dataset) -> None:
    def crop(nodes: Nodes) -> Nodes:
        return nodes | {TOP: fn.crop(nodes[TOP], crop=(64, 80), crop_pos_x=0, crop_pos_y=0)}

    arguments: dict[str, Any] = {"delta_timestamps": {TOP: [-0.05, 0.0, 0.05]}}
    batch, plain = first(dataset, crop, **arguments), first(dataset, **arguments)
    assert batch[TOP].shape == (6, 3, 3, 64, 80)
    assert torch.equal(batch[TOP], plain[TOP][..., :64, :80])


def test_a_change_of_dtype(dataset: Dataset) -> None:
    def half(nodes: Nodes) -> Nodes:
        return nodes | {key: fn.cast(nodes[key], dtype=types.FLOAT16) for key in (TOP, ACTION)}

    batch, plain = first(dataset, half), first(dataset)
    for key in (TOP, ACTION):
        assert batch[key].dtype == torch.float16
        assert torch.equal(batch[key], plain[key].half())


@pytest.mark.parametrize("image_dtype", ["uint8", "float32"])
def test_channels_first_of_the_function_stay_where_they_are(dataset: Dataset, image_dtype: str) -> None:
    mean, std = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]

    def normalise(nodes: Nodes) -> Nodes:
        scale = 255 if image_dtype == "uint8" else 1
        where = {"mean": [m * scale for m in mean], "std": [s * scale for s in std], "crop": (100, 120)}
        return nodes | {TOP: fn.crop_mirror_normalize(nodes[TOP], output_layout="CHW", dtype=types.FLOAT, **where)}

    batch, plain = first(dataset, normalise, image_dtype=image_dtype), first(dataset, image_dtype="float32")
    assert batch[TOP].shape == (6, 3, 100, 120)
    expected = (plain[TOP][:, :, 14:114, 20:140] - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]
    torch.testing.assert_close(batch[TOP], expected, atol=1e-5, rtol=1e-5)


def test_windows_with_channels_first_stay_as_they_are(dataset: Dataset) -> None:
    def normalise(nodes: Nodes) -> Nodes:
        return nodes | {TOP: fn.crop_mirror_normalize(nodes[TOP], output_layout="FCHW", dtype=types.FLOAT)}

    arguments: dict[str, Any] = {"delta_timestamps": {TOP: [0.0, 0.05]}}
    batch, plain = first(dataset, normalise, **arguments), first(dataset, **arguments)
    assert torch.equal(batch[TOP], plain[TOP])


def test_keys_are_added_and_dropped(dataset: Dataset) -> None:
    def change(nodes: Nodes) -> Nodes:
        small = fn.resize(nodes[TOP], size=(32, 40))
        return {"small": small, "twice": nodes[ACTION] * 2, SIDE: nodes[SIDE], "index": nodes["index"]}

    batch, plain = first(dataset, change), first(dataset)
    assert set(batch) == {"small", "twice", SIDE, "index", "task"}
    assert batch["small"].shape == (6, 3, 32, 40)
    assert torch.equal(batch["twice"], plain[ACTION] * 2)
    assert torch.equal(batch[SIDE], plain[SIDE])


@pytest.mark.parametrize(
    ("kept", "image_dtype"), [((TOP,), "uint8"), ((SIDE,), "float32"), (("index",), "uint8"), ((TOP, "index"), "uint8")]
)
def test_what_is_kept_does_not_depend_on_what_is_dropped(dataset: Dataset, kept: tuple[str, ...], image_dtype: str) -> None:
    def epoch(function: Any) -> list[dict[str, Any]]:
        with Loader(dataset, batch_size=6, dali_graph=function, image_dtype=image_dtype, device="cpu") as loader:
            return list(loader)

    plain = epoch(None)
    found = epoch(lambda nodes: {key: nodes[key] for key in kept})
    assert len(found) == len(plain) > 2
    for batch, whole in zip(found, plain, strict=True):
        assert set(batch) == {*kept, "task"}
        assert all(torch.equal(batch[key], whole[key]) for key in kept)


def test_rows_can_be_computed_with(dataset: Dataset, demo: Path) -> None:
    mean, std = (dataset.stats[ACTION][name].astype(np.float32) for name in ("mean", "std"))

    def normalise(nodes: Nodes) -> Nodes:
        return nodes | {
            ACTION: (nodes[ACTION] - types.Constant(mean)) / types.Constant(std),
            "matrix": fn.transpose(nodes["observation.object_positions"], perm=[1, 0]),
            "index": nodes["index"] + 1000,
            "next.done": nodes["next.done"] ^ True,
        }

    batch, rows = first(dataset, normalise), read_rows(demo)
    np.testing.assert_allclose(batch[ACTION], (rows[ACTION][:6] - mean) / std, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(
        batch["matrix"], rows["observation.object_positions"][:6].astype(np.float32).transpose(0, 2, 1)
    )
    assert batch["index"].tolist() == list(range(1000, 1006))
    assert batch["next.done"].tolist() == [not done for done in rows["next.done"][:6]]


def test_arguments_per_sample_come_from_rows(dataset: Dataset) -> None:
    """Values that differ from sample to sample can be data of the rows, which a resumed run reads again."""

    def brighten(nodes: Nodes) -> Nodes:
        return nodes | {TOP: fn.brightness(nodes[TOP], brightness=fn.cast(nodes["frame_index"], dtype=types.FLOAT))}

    batch, plain = first(dataset, brighten), first(dataset)
    torch.testing.assert_close(batch[TOP], plain[TOP] * torch.arange(6.0)[:, None, None, None])


def test_every_batch_of_every_epoch_goes_through_the_function(demo: Path) -> None:
    dataset, lengths = Dataset(demo, episodes=[1, 2]), read_lengths(demo)
    calls = []

    def offset(nodes: Nodes) -> Nodes:
        calls.append(1)
        return nodes | {"next": nodes["index"] + 1}

    with Loader(dataset, batch_size=16, dali_graph=offset, last_batch="partial") as loader:
        for _ in range(2):
            for batch in loader:
                assert torch.equal(batch["next"], batch["index"] + 1)
                for camera in CAMERAS:
                    check_identities(batch, camera, None, lengths)
    assert len(calls) == 1, "it describes the graph; it is not called per batch"


def test_frames_of_the_dali_route_go_through_the_function(vp9_demo: Path) -> None:
    dataset = Dataset(vp9_demo, episodes=[0])
    arguments: dict[str, Any] = {"decode": "dali", "device": "cpu", "delta_timestamps": {SIDE: [0.0, 0.05]}}

    def change(nodes: Nodes) -> Nodes:
        left = fn.crop_mirror_normalize(nodes[TOP], output_layout="CHW", mirror=1, dtype=types.FLOAT)
        return nodes | {TOP: left, SIDE: fn.flip(nodes[SIDE], horizontal=1)}

    batch, plain = first(dataset, change, **arguments), first(dataset, **arguments)
    for key in (TOP, SIDE):
        assert torch.equal(batch[key], plain[key].flip(-1))


# ------------------------------------------------------------------------------------------------------------------ errors


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda nodes: None, "dali_graph must return a dict of DALI DataNodes by key, got NoneType"),
        (lambda nodes: list(nodes.values()), "got list"),
        (lambda nodes: {}, "got dict"),
        (lambda nodes: {"index": 3}, "dali_graph must return DALI DataNodes by key, got 'index': int"),
        (lambda nodes: {3: nodes["index"]}, "got 3: DataNode"),
        (lambda nodes: nodes | {"index": np.zeros(3)}, "got 'index': ndarray"),
    ],
)
def test_wrong_values_are_refused(dataset: Dataset, returned: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        first(dataset, returned)


def test_an_error_of_the_function_comes_through(dataset: Dataset) -> None:
    own: dict[str, float] = {}
    with pytest.raises(ZeroDivisionError):
        first(dataset, lambda nodes: nodes | {ACTION: nodes[ACTION] * (1 / 0)})
    with pytest.raises(KeyError, match=ACTION):  # of another dict
        first(dataset, lambda nodes: nodes | {ACTION: nodes[ACTION] * own[ACTION]})


def test_a_key_that_the_function_does_not_get_is_an_error_that_names_the_others(dataset: Dataset) -> None:
    def wrong(nodes: Nodes) -> Nodes:
        return {"wrist": nodes["observation.images.wrist"]}

    with pytest.raises(
        ValueError,
        match=r"dali_graph raised KeyError: 'observation\.images\.wrist' \(.*, line \d+, in wrong\)\. Keys of its argument: ",
    ) as raised:
        first(dataset, wrong)
    named = str(raised.value).partition("argument: ")[2].split(", ")
    assert {TOP, SIDE, ACTION, "index", "sample"} < set(named)
    cause = raised.value.__cause__
    assert isinstance(cause, KeyError)
    assert [frame.name for frame in traceback.extract_tb(cause.__traceback__)][-1] == "wrong"  # the user's line


def test_an_operator_that_fails_is_named(dataset: Dataset) -> None:
    def wrong(nodes: Nodes) -> Nodes:
        return nodes | {TOP: fn.crop(nodes[TOP], crop=(4000, 10), out_of_bounds_policy="error")}

    with pytest.raises(DaliStreamError, match="An operator of the DALI pipeline failed: Slice can't be placed"):
        first(dataset, wrong)


def test_a_video_decoder_of_the_function_that_fails_is_an_error(dataset: Dataset) -> None:
    """No camera uses DALI, so none can move to torchcodec, and retries would never end."""
    no_video = np.frombuffer(b"no video", np.uint8)

    def wrong(nodes: Nodes) -> Nodes:
        return nodes | {"video": fn.decoders.video(types.Constant(no_video, device="cpu"), device="cpu")}

    with pytest.raises(DaliStreamError, match=r"An operator of the DALI pipeline failed: .*video"):
        first(dataset, wrong)


@pytest.mark.parametrize("key", [TOP, ACTION])
def test_samples_of_different_shapes_are_refused(dataset: Dataset, key: str) -> None:
    def ragged(nodes: Nodes) -> Nodes:
        length = fn.cast(nodes["frame_index"] % 3 + 1, dtype=types.INT32)
        return nodes | {"cut": fn.slice(nodes[key], start=[0], shape=length, axes=[0])}

    with pytest.raises(DaliStreamError, match=r"must return samples of one shape for 'cut', got \(1,.*\) and \(2,.*fn.pad"):
        first(dataset, ragged)


def test_a_node_under_another_name_is_refused(dataset: Dataset) -> None:
    def rename(nodes: Nodes) -> Nodes:
        nodes[TOP].name = "top"
        return nodes

    with pytest.raises(DaliStreamError, match=r"DALI does not build the graph: .*'top' is not known.*change its key"):
        first(dataset, rename)


def test_a_camera_under_another_key_is_not_said_to_be_dropped(dataset: Dataset, caplog: pytest.LogCaptureFixture) -> None:
    def rename(nodes: Nodes) -> Nodes:
        return {"top": fn.flip(nodes[TOP]), "index": nodes["index"]}

    assert first(dataset, rename)["top"].shape == (6, 3, 128, 160)
    assert [record.getMessage().split(",")[0] for record in caplog.records] == [f"dali_graph drops {SIDE}"]


def test_a_loader_goes_on_after_the_function_failed(dataset: Dataset) -> None:
    """The error ends that epoch. The next iteration builds the graph again."""
    fail = [True]

    def once(nodes: Nodes) -> Nodes:
        if fail.pop():
            raise ZeroDivisionError
        return nodes

    with Loader(dataset, batch_size=6, dali_graph=once) as loader:
        with pytest.raises(ZeroDivisionError):
            next(iter(loader))
        fail.append(False)
        assert len(list(loader)) == len(loader)


WITHOUT_DALI = """
import sys
from pathlib import Path

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "nvidia":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
import dali_stream

root = sys.argv[1]
with dali_stream.Loader(root, batch_size=8, device="cpu", image_size=(32, 40)) as loader:
    index = [number for batch in loader for number in batch["index"].tolist()]
assert len(set(index)) == len(index) == 8 * len(loader)
for arguments in ({"dali_graph": lambda nodes: nodes}, {"decode": "dali"}):
    try:
        dali_stream.Loader(root, batch_size=8, device="cpu", **arguments)
    except dali_stream.DaliStreamError as error:
        assert "NVIDIA DALI cannot be imported" in str(error) and "nvidia-dali-cuda120" in str(error), error
    else:
        raise AssertionError(arguments)
"""


@pytest.mark.slow
def test_a_loader_on_a_cpu_works_without_dali(vp9_demo: Path) -> None:
    subprocess.run([sys.executable, "-c", WITHOUT_DALI, str(vp9_demo)], check=True)
