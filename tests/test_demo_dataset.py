"""The demo dataset: its format, compared with its files, the identity of every frame, and the simulated scene."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from support.datasets import SIDE, TOP
from support.slow import examples, slow
from torchcodec.decoders import VideoDecoder  # type: ignore[attr-defined]  # exported, but not by __all__

from dali_stream.demo import read_identities, render, scene, stamp, write_demo
from dali_stream.demo.identity import COLUMNS, MIN_SIZE, ROWS, STRIP

SIZE = (128, 160)  # of `demo`
FPS = 20


def read_episodes(root: Path) -> list[dict[str, Any]]:
    return pq.read_table(root / "meta/episodes/chunk-000/file-000.parquet").to_pylist()


def read_rows(root: Path) -> list[dict[str, Any]]:
    return [row for path in sorted(root.glob("data/*/*.parquet")) for row in pq.read_table(path).to_pylist()]


def read_column(rows: list[dict[str, Any]], key: str) -> np.ndarray:
    return np.array([row[key] for row in rows])


def decode(root: Path, episode: dict[str, Any], camera: str) -> np.ndarray:
    """All frames of an episode, found by its metadata's timestamps alone, uint8 (T, H, W, 3)."""
    info = json.loads((root / "meta/info.json").read_text())
    place = {name: episode[f"videos/{camera}/{name}"] for name in ("chunk_index", "file_index")}
    decoder = VideoDecoder(root / info["video_path"].format(video_key=camera, **place), dimension_order="NHWC")
    times = episode[f"videos/{camera}/from_timestamp"] + np.arange(episode["length"]) / info["fps"]
    return decoder.get_frames_played_at((times + 1e-4).tolist()).data.numpy()


# ---------------------------------------------------------------------------------------------------------- format


def test_info_describes_the_files(demo: Path) -> None:
    info = json.loads((demo / "meta/info.json").read_text())
    rows, episodes = read_rows(demo), read_episodes(demo)
    assert (info["codebase_version"], info["fps"], info["splits"]) == ("v3.0", FPS, {"train": "0:6"})
    assert (info["total_episodes"], info["total_frames"]) == (6, len(rows))
    assert [episode["episode_index"] for episode in episodes] == list(range(6))
    assert sum(episode["length"] for episode in episodes) == len(rows)
    columns = {key for key, feature in info["features"].items() if feature["dtype"] != "video"}
    assert columns == set(rows[0])
    for key in columns:
        feature, values = info["features"][key], read_column(rows, key)
        assert list(values.shape[1:] or (1,)) == feature["shape"], key
        assert feature["names"] is None or len(feature["names"]) in (feature["shape"][0], len(feature["shape"]))
    for camera in (TOP, SIDE):
        assert info["features"][camera]["shape"] == [*SIZE, 3]
        assert info["features"][camera]["info"]["video.codec"] == "av1"


def test_parquet_types_are_lerobots(demo: Path) -> None:
    file = pq.ParquetFile(demo / "data/chunk-000/file-000.parquet")
    types = {field.name: str(field.type) for field in file.schema_arrow}
    assert types["observation.state"] == "fixed_size_list<element: float>[8]"
    assert types["action"] == "fixed_size_list<element: float>[4]"
    assert types["observation.object_positions"] == "list<element: list<element: float>>"
    assert (types["timestamp"], types["next.reward"], types["next.done"]) == ("float", "float", "bool")
    assert {types[key] for key in ("index", "frame_index", "episode_index", "task_index")} == {"int64"}
    for group in range(file.num_row_groups):  # one episode each
        assert len(set(file.read_row_group(group)["episode_index"].to_pylist())) == 1


def test_rows_agree_with_episodes(demo: Path) -> None:
    rows, episodes = read_rows(demo), read_episodes(demo)
    tasks = pq.read_table(demo / "meta/tasks.parquet").to_pydict()
    names = dict(zip(tasks["task_index"], tasks["__index_level_0__"], strict=True))
    assert read_column(rows, "index").tolist() == list(range(len(rows)))
    for number, episode in enumerate(episodes):
        assert episode["episode_index"] == number
        part = rows[episode["dataset_from_index"] : episode["dataset_to_index"]]
        assert read_column(part, "frame_index").tolist() == list(range(episode["length"]))
        assert set(read_column(part, "episode_index")) == {number}
        assert [names[index] for index in set(read_column(part, "task_index"))] == episode["tasks"]
        expected = (np.arange(episode["length"]) / FPS).astype(np.float32)
        assert np.array_equal(read_column(part, "timestamp").astype(np.float32), expected)
        path = demo / f"data/chunk-{episode['data/chunk_index']:03d}/file-{episode['data/file_index']:03d}.parquet"
        assert number in pq.read_table(path)["episode_index"].to_pylist()
    assert len({episode["length"] for episode in episodes}) > 1


def test_tasks_carry_pandas_metadata(demo: Path) -> None:
    metadata = json.loads(pq.read_schema(demo / "meta/tasks.parquet").metadata[b"pandas"])
    assert metadata["index_columns"] == ["__index_level_0__"]
    assert metadata["columns"][1]["name"] is None


def test_cameras_and_rows_cut_their_files_at_different_episodes(demo: Path) -> None:
    episodes = read_episodes(demo)

    def cuts(key: str) -> set[int]:
        numbers = [episode[key] for episode in episodes]
        return {i for i in range(1, len(numbers)) if numbers[i] != numbers[i - 1]}

    kinds = [cuts("data/file_index"), *(cuts(f"videos/{camera}/file_index") for camera in (TOP, SIDE))]
    assert kinds == [{3}, {2, 5}, {1, 4}]
    assert {len(list(demo.glob(f"videos/{camera}/*/*.mp4"))) for camera in (TOP, SIDE)} == {3}


def test_statistics_are_those_of_the_rows(demo: Path) -> None:
    stats, rows, episodes = json.loads((demo / "meta/stats.json").read_text()), read_rows(demo), read_episodes(demo)
    for key in rows[0]:
        values = read_column(rows, key).astype(np.float64)
        values = values[:, None] if values.ndim == 1 else values
        expected = {"min": values.min(0), "max": values.max(0), "mean": values.mean(0), "std": values.std(0)}
        expected |= {"q01": np.quantile(values, 0.01, axis=0), "q99": np.quantile(values, 0.99, axis=0)}
        for name, value in expected.items():
            np.testing.assert_allclose(stats[key][name], value, rtol=1e-6, atol=1e-6, err_msg=f"{key} {name}")
        assert stats[key]["count"] == [len(rows)]
    state = read_column(rows[: episodes[0]["length"]], "observation.state")
    np.testing.assert_allclose(episodes[0]["stats/observation.state/mean"], state.mean(0), atol=1e-6)


def test_frame_statistics_are_those_of_the_video(demo: Path) -> None:
    stats, episode = json.loads((demo / "meta/stats.json").read_text()), read_episodes(demo)[0]
    assert all(np.shape(value) == (3, 1, 1) for name, value in stats[TOP].items() if name != "count")
    frames = decode(demo, episode, TOP) / 255
    for name, value in (("mean", frames.mean((0, 1, 2))), ("std", frames.std((0, 1, 2)))):
        np.testing.assert_allclose(np.ravel(episode[f"stats/{TOP}/{name}"]), value, atol=0.02)


# -------------------------------------------------------------------------------------------------------- frames


def check_identities(root: Path) -> None:
    for episode in read_episodes(root):
        for number, camera in enumerate((TOP, SIDE)):
            expected = [(episode["episode_index"], frame, number) for frame in range(episode["length"])]
            np.testing.assert_array_equal(read_identities(decode(root, episode, camera)), expected)


def test_every_frame_is_where_the_metadata_says(demo: Path) -> None:
    check_identities(demo)


@pytest.mark.slow
@pytest.mark.parametrize(("codec", "gop"), [("hevc", 8), slow("av1", 2), slow("av1", 16), slow("vp9", 12), slow("h264", 1)])
def test_every_codec_keeps_identities_and_gops(tmp_path: Path, codec: str, gop: int) -> None:
    root = write_demo(tmp_path / "data", episodes=2, size=SIZE, codec=codec, gop=gop, fps=10)
    check_identities(root)
    if shutil.which("ffprobe") is None:
        pytest.skip("keyframes are checked with the ffprobe program")
    for path in root.glob("videos/*/*/*.mp4"):
        command = ["ffprobe", "-v", "error", "-show_entries", "packet=pts,flags", "-of", "csv=p=0", str(path)]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        packets = sorted((int(pts), "K" in flags) for pts, flags in (line.split(",")[:2] for line in output.split()))
        assert [key for _, key in packets] == [frame % gop == 0 for frame in range(len(packets))]


def test_frames_show_the_rows(demo: Path) -> None:
    """The centre of each coloured top face is at the recorded position, projected by the camera."""
    rows, seen = read_rows(demo), 0
    for episode in read_episodes(demo):
        frames = decode(demo, episode, TOP)[:, : int(SIZE[0] * (1 - STRIP))].astype(int)
        part = rows[episode["dataset_from_index"] : episode["dataset_to_index"]]
        for frame, row in list(zip(frames, part, strict=True))[::5]:
            for channel, place in enumerate(row["observation.object_positions"]):
                if np.hypot(*np.subtract(place, row["observation.state"][:2])) < 0.16:
                    continue  # the gripper may hide the block
                ys, xs = np.nonzero(frame[..., channel] > np.delete(frame, channel, axis=2).max(axis=2) + 45)
                expected = render.CAMERAS[TOP].project(np.array([*place, 2 * scene.BLOCK_HALF]), SIZE)
                near = np.hypot(xs + 0.5 - expected[0], ys + 0.5 - expected[1]) < 20
                middle = np.array([xs[near].mean(), ys[near].mean()]) + 0.5
                assert np.abs(middle - expected).max() < 2.0, (episode["episode_index"], row["frame_index"], channel)
                seen += 1
    assert seen > 100


@pytest.mark.parametrize("camera", [TOP, SIDE])
def test_frames_are_of_their_own_moment(demo: Path, camera: str) -> None:
    """The orange wrist is nearer to where the same row says than to where the rows before and after say."""
    rows, errors = read_rows(demo), []
    for episode in read_episodes(demo):
        part = rows[episode["dataset_from_index"] : episode["dataset_to_index"]]
        state = read_column(part, "observation.state")
        places = render.CAMERAS[camera].project(state[:, :3] + (0, 0, 0.12), SIZE)
        picture = decode(demo, episode, camera)[:, : int(SIZE[0] * (1 - STRIP))].astype(int)
        wrist = (picture[..., 0] - picture[..., 2] > 90) & (picture[..., 1] - picture[..., 2] > 56)
        for frame in range(1, episode["length"] - 1):
            ys, xs = np.nonzero(wrist[frame])
            fast = np.linalg.norm(places[frame + 1] - places[frame - 1]) > 3
            if fast and len(xs) > 40 and ys.min() > 1:  # whole in the frame
                middle = np.array([xs.mean(), ys.mean()]) + 0.5
                errors.append([np.linalg.norm(places[frame + shift] - middle) for shift in (-1, 0, 1)])
    before, same, after = np.mean(errors, axis=0)
    assert len(errors) > 30
    assert same < min(before, after) - 0.2, (before, same, after)
    assert same < 3


# -------------------------------------------------------------------------------------------------------- identity

identities = st.tuples(st.integers(0, 2**16 - 1), st.integers(0, 2**12 - 1), st.integers(0, 2**4 - 1))


def stamped(identity: tuple[int, int, int], size: tuple[int, int] = (240, 320)) -> np.ndarray:
    image = np.full((*size, 3), 128, dtype=np.uint8)
    stamp(image, *identity)
    return image


@given(identities, st.integers(0, 2**32 - 1), st.integers(120, 480), st.integers(128, 640), st.floats(0, 30))
@examples(40, derandomize=False)
def test_identity_survives_resize_and_noise(
    identity: tuple[int, int, int], seed: int, height: int, width: int, sigma: float
) -> None:
    image = np.asarray(Image.fromarray(stamped(identity)).resize((width, height), Image.Resampling.BILINEAR))
    noise = np.random.default_rng(seed).normal(0, sigma, image.shape)
    assert read_identities(np.clip(image + noise, 0, 255).astype(np.uint8)[None]).tolist() == [list(identity)]


@given(identities, st.sets(st.integers(0, ROWS * COLUMNS - 1), min_size=1, max_size=3))
@examples(60, derandomize=False)
def test_checksum_finds_up_to_three_flipped_cells(identity: tuple[int, int, int], flipped: set[int]) -> None:
    image = stamped(identity)
    for cell in flipped:
        row, column = divmod(cell, COLUMNS)
        rows = np.rint((1 - STRIP + np.array([row, row + 1]) * STRIP / ROWS) * image.shape[0]).astype(int)
        columns = np.rint(np.array([column, column + 1]) / COLUMNS * image.shape[1]).astype(int)
        image[slice(*rows), slice(*columns)] = 251 - image[slice(*rows), slice(*columns)]
    with pytest.raises(ValueError, match="No readable identity"):
        read_identities(image[None])


@pytest.mark.parametrize("value", [0, 128, 255])
def test_a_blank_frame_has_no_identity(value: int) -> None:
    with pytest.raises(ValueError, match="1 of 2 frames, the first at position 1"):
        read_identities(np.stack([stamped((1, 2, 3)), np.full((240, 320, 3), value, dtype=np.uint8)]))


def test_wrong_frames_are_refused() -> None:
    image = stamped((1, 2, 3))
    for wrong in (image.transpose(2, 0, 1)[None], image.astype(np.float32)[None], image[None, :100], image):
        with pytest.raises(ValueError, match=r"must have shape|must be uint8|must have at least"):
            read_identities(wrong)
    with pytest.raises(ValueError, match="No readable identity"):
        read_identities(image[None, :, ::-1])
    for identity in ((-1, 0, 0), (65536, 0, 0), (0, 4096, 0), (0, 0, 16)):
        with pytest.raises(ValueError, match=r"must be from 0 to .* bits hold, got"):
            stamp(image, *identity)
    with pytest.raises(ValueError, match=r"Frames must have at least .*, got"):
        stamp(np.zeros((MIN_SIZE[0] - 2, 320, 3), np.uint8), 0, 0, 0)


# ----------------------------------------------------------------------------------------------------------- scene


def test_the_expert_succeeds(demo: Path) -> None:
    for number, entry in enumerate(read_episodes(demo)):
        episode = scene.record_episode(0, number, FPS)
        colour, side = (name for name in entry["tasks"][0].split() if name.strip(".") in scene.COLOURS + scene.SIDES)
        block, goal = scene.COLOURS.index(colour), episode.goals[scene.SIDES.index(side.strip("."))]
        assert episode.done.tolist() == [False] * (len(episode) - 1) + [True]
        assert np.linalg.norm(episode.block_positions[-1, block] - goal) < scene.SUCCESS_DISTANCE + 1e-3
        assert np.linalg.norm(episode.block_positions[0, block] - goal) > 0.05
        assert (episode.reward[0], episode.reward[-1]) == (0, 1)
        others = np.delete(np.arange(3), block)
        assert np.abs(episode.block_positions[-1, others] - episode.block_positions[0, others]).max() < 0.02


@pytest.mark.parametrize("fps", [5, 20, 60])
def test_actions_lead_from_state_to_state(fps: int) -> None:
    """Position and velocity follow the recorded command through a first-order lag of 80 ms."""
    episode = scene.record_episode(3, 1, fps)
    position, velocity = episode.state[:, :4].astype(np.float64), episode.state[:, 4:].astype(np.float64)
    decay = np.exp(-1 / fps / 0.08)
    error = velocity[:-1] - episode.action[:-1]
    np.testing.assert_allclose(velocity[1:], episode.action[:-1] + error * decay, atol=1e-5)
    np.testing.assert_allclose(position[1:], position[:-1] + episode.action[:-1] / fps + error * 0.08 * (1 - decay), atol=1e-5)


def test_blocks_move_only_by_contact() -> None:
    for number in range(6):
        episode = scene.record_episode(1, number, FPS)
        moved = np.linalg.norm(np.diff(episode.block_positions, axis=0), axis=-1).max(axis=1) > 1e-6
        for frame in np.flatnonzero(moved):
            assert episode.state[frame + 1, 2] < 2 * scene.BLOCK_HALF or episode.state[frame, 2] < 2 * scene.BLOCK_HALF
            fingers = scene.finger_positions(episode.state[frame + 1].astype(np.float64))
            gaps = np.linalg.norm(fingers[:, None] - episode.block_positions[frame + 1][None], axis=-1)
            assert gaps.min() < np.sqrt(2) * scene.BLOCK_HALF + scene.FINGER_RADIUS + 0.002
        assert moved.any()


@pytest.mark.slow
def test_lengths_differ_and_lie_in_the_stated_range() -> None:
    lengths = [len(scene.record_episode(0, number, FPS)) for number in range(16)]
    assert len(set(lengths)) > 8
    assert min(lengths) >= 50
    assert max(lengths) <= 140


# --------------------------------------------------------------------------------------------------------- writing


@pytest.mark.slow
def test_the_same_seed_writes_the_same_rows(tmp_path: Path) -> None:
    options: dict[str, Any] = {"episodes": 4, "size": (120, 128), "codec": "h264", "gop": 30, "fps": 5}
    first, second, third = (write_demo(tmp_path / name, seed=seed, **options) for name, seed in (("a", 7), ("b", 7), ("c", 8)))
    names = sorted(path.relative_to(first) for path in first.rglob("*") if path.suffix in (".parquet", ".json"))
    assert len(names) == 6
    for name in names:
        assert (first / name).read_bytes() == (second / name).read_bytes(), name
    data = "data/chunk-000/file-000.parquet"
    assert (first / data).read_bytes() != (third / data).read_bytes()


def test_an_existing_dataset_is_not_overwritten(demo: Path, tmp_path: Path) -> None:
    with pytest.raises(FileExistsError, match="Remove it, or choose another folder"):
        write_demo(demo)
    file = tmp_path / "file"
    file.write_text("mine")
    with pytest.raises(FileExistsError):
        write_demo(file)
    assert file.read_text() == "mine"


def test_progress_counts_every_camera(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    calls: list[tuple[int, int]] = []
    root = write_demo(
        tmp_path / "empty", episodes=3, size=(120, 128), codec="h264", fps=5, progress=lambda *call: calls.append(call)
    )
    total = 2 * len(read_rows(root))
    assert [call[1] for call in calls] == [total] * 4
    assert [call[0] for call in calls] == sorted(call[0] for call in calls)
    assert calls[-1][0] == total
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]


def test_an_interrupted_run_leaves_nothing(tmp_path: Path) -> None:
    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_demo(tmp_path / "data", episodes=3, size=(120, 128), codec="h264", fps=5, progress=stop)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"episodes": 0}, r"episodes must be an integer from 1 to .*, got 0"),
        ({"episodes": 2.0}, r"episodes must be an integer .*, got 2\.0"),
        ({"size": (118, 320)}, r"size must be .*at least \(120, .*, got \(118, 320\)"),
        ({"size": (241, 320)}, "both even"),
        ({"size": (240,)}, "size must be"),
        ({"codec": "mpeg2"}, "codec must be one of av1, h264, hevc, vp9, .*got 'mpeg2'"),
        ({"gop": 0, "codec": "h264"}, "gop must be an integer"),
        ({"gop": 1}, "from 2 to 10000 with codec av1"),
        ({"fps": 0}, "fps must be an integer from 5 to 60, got 0"),
        ({"seed": -1}, "seed must be an integer"),
    ],
)
def test_bad_arguments_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        write_demo(tmp_path / "data", **options)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_av1_files_are_encoded_one_at_a_time(tmp_path: Path) -> None:
    """200 encoders of SVT-AV1 from two threads: without a lock, every fifth run dies of a segmentation fault."""
    program = f"""
import faulthandler
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from dali_stream.demo.encode import encode_video, quiet_encoders

faulthandler.enable()
frames = np.random.default_rng(0).integers(0, 256, (3, 64, 64, 3), dtype=np.uint8)
with quiet_encoders(), ThreadPoolExecutor(2) as pool:
    jobs = [
        pool.submit(encode_video, frames, Path({str(tmp_path)!r}) / f"{{i}}.mp4", codec="av1", gop=2, fps=30)
        for i in range(200)
    ]
    for job in jobs:
        job.result()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(list(tmp_path.glob("*.mp4"))) == 200
