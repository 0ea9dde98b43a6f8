"""Remedies that messages name: each was tried on the episode, and whoever follows it gets the frames of the rows."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from support.broken import EPISODES as TABLE
from support.broken import edit_info, edit_table, put
from support.datasets import SIDE, TOP, VIDEO, change_info
from support.doctor import looked_at
from support.slow import slow
from support.tools import prepared
from support.videos import CAMERA, EPISODES, FPS, draw, encode, h264, identities, loader, write_dataset
from support.wild import EVERY, FRAME, change_rows, delivered, expected, with_index, with_times

from dali_stream import DaliStreamError, Dataset, DatasetError, DecodeError, Mixture

CLOCK, TOLERANCE = 'Dataset(clock="frame_index")', "Dataset(tolerance_s=0.0166) accepts"
OUT = "leave the episode out with episodes=, or the camera with cameras="
PRECISE = ("-fps_mode", "passthrough", "-enc_time_base", "1/90000", "-video_track_timescale", "90000")


def one_file_each(folder: Path, edit: Callable[[np.ndarray], np.ndarray], *filters: str, fps: int = FPS) -> Path:
    """The two episodes in a file each, whose frames are edited."""
    lengths = enumerate(EPISODES)
    files = [encode(edit(draw((n,), first=e)), folder / f"{e}.mp4", h264(12), *filters, fps=fps) for e, n in lengths]
    return write_dataset(folder / "data", files, [[n] for n in EPISODES])


def advice(dataset: Path | Dataset) -> str:
    """The message with which a Loader refuses a dataset."""
    with pytest.raises(DecodeError) as raised:
        delivered(dataset)
    message = str(raised.value)
    assert "\n" not in message
    return message


def diagnosis(dataset: Path | Dataset, name: str) -> str:
    """Text and remedy of a finding of `doctor`."""
    finding = looked_at(dataset)[name]
    return f"{finding.text}. {finding.remedy}"


def kept(rows: range, last: int) -> list[int]:
    return list(rows)[: len(rows) - last]


@pytest.mark.parametrize("short", [1, slow(3)])
def test_a_video_that_is_a_few_frames_short(tmp_path: Path, short: int) -> None:
    root = one_file_each(tmp_path, lambda frames: frames[:-short])
    message = advice(root)
    assert f"Dataset(drop_n_last_frames={short}) leaves the last {short} row" in message
    assert re.search(rf"the episode has (31|41) rows, and its video ({31 - short}|{41 - short}) frames", message)
    assert CLOCK not in message
    whole = {e: kept(range(n), short) for e, n in enumerate(EPISODES)}
    shown = delivered(Dataset(root, drop_n_last_frames=short))
    assert sorted(shown.values()) == sorted(expected(whole).values())
    window = {CAMERA: [0.0, 1 / FPS, 2 / FPS]}
    two_more = Dataset(root, drop_n_last_frames=short + 2)  # as the message says
    with loader(two_more, delta_timestamps=window) as batches:
        for batch in batches:
            for step in range(3):
                at = zip(batch["episode_index"].tolist(), (batch["frame_index"] + step).tolist(), strict=True)
                assert identities(batch[CAMERA][:, step]) == list(at)
    assert f". Dataset(drop_n_last_frames={short}) leaves the last" in diagnosis(root, f"{CAMERA} timestamps")
    assert "each row has a frame" in diagnosis(Dataset(root, drop_n_last_frames=short), f"{CAMERA} timestamps")
    with pytest.raises(DecodeError):
        Dataset(root).compute_stats([CAMERA])
    assert Dataset(root, drop_n_last_frames=short).compute_stats([CAMERA])[CAMERA]["count"] == sum(EPISODES) - 2 * short


def test_prepare_names_what_it_has_instead_of_drop_n_last_frames(tmp_path: Path) -> None:
    files = [encode(draw((n - e,), first=e), tmp_path / f"{e}.mp4", h264(12)) for e, n in enumerate(EPISODES)]
    root = write_dataset(tmp_path / "data", files, [[n] for n in EPISODES])
    with pytest.raises(DaliStreamError, match=r"episode 1, frame 40: .* or let --drop-broken find all such episodes") as raised:
        prepared(root, tmp_path / "refused")
    assert "drop_n_last_frames" not in str(raised.value)
    prepared(root, tmp_path / "out", drop_broken=True)
    assert delivered(tmp_path / "out") == expected({0: list(range(EPISODES[0]))})


def test_a_video_that_drifts_by_less_than_half_a_frame(tmp_path: Path) -> None:
    """By the clock of the frame numbers, regular rows would ask for the same times."""
    root = one_file_each(tmp_path, lambda frames: frames, "-vf", "settb=1/90000,setpts=PTS*1.01", *PRECISE)
    message = advice(root)
    assert TOLERANCE in message
    assert CLOCK not in message
    assert delivered(Dataset(root, tolerance_s=0.0166)) == EVERY


@pytest.mark.parametrize("kind", [slow("drift"), slow("half the rate"), "gap"])
def test_a_video_without_frames_for_its_rows(tmp_path: Path, kind: str) -> None:
    """Nothing gives each row its frame, so that only leaving out helps."""
    if kind == "drift":
        root = one_file_each(tmp_path, lambda frames: frames, "-vf", "settb=1/90000,setpts=PTS*1.03", *PRECISE)
    elif kind == "gap":
        choice = "select='not(between(n,10,12))'"
        root = one_file_each(tmp_path, lambda frames: frames, "-vf", f"settb=1/90000,{choice}", *PRECISE)
    else:
        root = one_file_each(tmp_path, lambda frames: frames[::2], fps=FPS // 2)
    message = advice(root)
    assert OUT in message
    assert not [word for word in (CLOCK, TOLERANCE, "drop_n_last_frames") if word in message]
    with loader(Dataset(root, cameras=[])) as batches:
        assert sum(len(batch["index"]) for batch in batches) == sum(EPISODES)
    assert "leave the episode out" in diagnosis(root, f"{CAMERA} timestamps")


@pytest.mark.parametrize("numbers", [FRAME + 1, np.arange(len(FRAME))], ids=["from 1", "through the dataset"])
def test_numbers_of_neighbouring_frames_are_no_remedy(root: Path, numbers: np.ndarray) -> None:
    """In the second one, the first episode does count from 0."""
    change_rows(root, with_index(numbers))
    change_rows(root, with_times((FRAME + 0.4) / FPS))
    message = advice(Dataset(root, episodes=[1]))
    assert "wall-clock" in message
    assert TOLERANCE in message
    assert CLOCK not in message
    assert delivered(Dataset(root, tolerance_s=0.0166)) == EVERY


def test_more_frames_than_rows_leave_the_clock_in_doubt(root: Path) -> None:
    """The rows may be those of other frames than the first ones."""
    stays = list(range(5, EPISODES[0]))
    change_rows(root, lambda table: table.take([*stays, *range(EPISODES[0], len(table))]))
    whole = np.concatenate([np.arange(len(stays)), np.arange(EPISODES[1])])
    change_rows(root, with_index(whole))
    real = np.concatenate([stays, np.arange(EPISODES[1])])
    change_rows(root, with_times((real + 0.4) / FPS))
    shrink(root, len(stays))
    message = advice(Dataset(root, episodes=[0]))
    assert "the episode has 26 rows, and its video 31 frames" in message
    assert CLOCK not in message
    assert TOLERANCE in message
    shown = delivered(Dataset(root, tolerance_s=0.0166))
    assert shown == expected({0: stays, 1: list(range(EPISODES[1]))})


def shrink(root: Path, length: int) -> None:
    """Make the first episode shorter in the metadata."""

    total = length + EPISODES[1]
    columns = {"length": [length, EPISODES[1]], "dataset_from_index": [0, length], "dataset_to_index": [length, total]}
    for name, values in columns.items():
        edit_table(root, TABLE, lambda table, name=name, values=values: put(table, name, values))
    change_rows(root, lambda table: put(table, "index", pa.array(np.arange(total))))
    change_info(root, total_frames=total)


@pytest.mark.parametrize("key", ["action", "task_index", "episode_index"])
def test_only_features_that_may_be_left_out_have_that_as_their_remedy(root: Path, key: str) -> None:
    def gap(table: pa.Table) -> pa.Table:
        values = table[key].to_pylist()
        return put(table, key, pa.array([*values[:40], None, *values[41:]], table.schema.field(key).type))

    change_rows(root, gap)
    with pytest.raises(DatasetError, match=r"1 of .* values are missing") as raised:
        delivered(root)
    assert ("leave the feature out with Dataset.without" in str(raised.value)) == (key == "action")
    if key == "action":
        assert delivered(Dataset(root).without(["action"])) == EVERY


def test_datasets_with_another_required_feature_are_not_told_to_leave_it_out(root: Path, plain: Path) -> None:

    edit_info(root, features__timestamp={"dtype": "int64", "shape": [1], "names": None})
    with pytest.raises(ValueError, match="Convert the datasets to one dtype and shape of timestamp") as raised:
        Mixture({"a": Dataset(plain), "b": Dataset(root)})
    assert "Dataset.without" not in str(raised.value)


def test_a_camera_without_any_file_has_cameras_as_its_remedy(demo_copy: Path) -> None:
    shutil.rmtree(demo_copy / "videos" / SIDE)
    with pytest.raises(DecodeError, match=f"none of .* of camera '{SIDE}' exists.* or leave the camera out with cameras="):
        next(iter(loader(demo_copy)))
    said = f"no episode has {SIDE}: copy or fetch the files, or select other cameras with cameras=['{TOP}']"
    assert said in diagnosis(demo_copy, "files")
    with loader(Dataset(demo_copy, cameras=[TOP])) as batches:
        assert TOP in next(iter(batches))


def test_a_missing_file_has_its_episodes_as_a_remedy(tmp_path: Path) -> None:
    root = one_file_each(tmp_path, lambda frames: frames)
    (root / VIDEO.format(CAMERA, 1)).unlink()
    with pytest.raises(DecodeError, match=r"no such file.* or leave its episodes out with episodes="):
        delivered(root)
    assert delivered(Dataset(root, episodes=[0])) == expected({0: list(range(EPISODES[0]))})
