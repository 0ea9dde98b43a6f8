"""Selection of episodes and frames: episode_filter, frames, drop_n_first_frames, drop_n_last_frames and split."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import lerobot_reader
from support.batches import check_identities, samples
from support.datasets import SIDE, TOP, build, change_episodes, change_info, copied, read_lengths
from support.servers import Server
from support.slow import examples
from support.tools import prepared
from support.videos import identities, one_file_each
from support.wild import EVERY, delivered

from dali_stream import Dataset, DatasetError, FrameSampler, Loader, Order, ResumeError
from dali_stream.lerobot import frame_ranges
from dali_stream.lerobot.frame_ranges import FrameRanges
from dali_stream.order.selected import SelectedOrder

ORDER: dict[str, Any] = {"consumers": 4, "episode_pool_size": 2, "seed": 3}
KEPT = {0: [(0, 4), (10, 11)], 2: [(5, 9)], "5": [[1, 3]]}
KEPT_FRAMES = [(0, 0), (0, 1), (0, 2), (0, 3), (0, 10), (2, 5), (2, 6), (2, 7), (2, 8), (5, 1), (5, 2)]


@st.composite
def ranges(draw: st.DrawFn) -> tuple[list[int], FrameRanges, list[tuple[int, int]]]:
    """Lengths, ranges in them, and (episode, frame) of all that the ranges hold."""
    lengths = draw(st.lists(st.integers(0, 20), min_size=1, max_size=8))
    rows, frames = [], []
    for episode, length in enumerate(lengths):
        edges = sorted(draw(st.sets(st.integers(0, length), max_size=6)))
        for start, stop in zip(edges[::2], edges[1::2], strict=False):
            rows.append((episode, start, stop))
            frames += [(episode, frame) for frame in range(start, stop)]
    table = np.array(rows, np.int64).reshape(-1, 3)
    return lengths, FrameRanges(len(lengths), *table.T), frames


@examples(200)
@given(ranges(), st.sampled_from((True, "global", False)), st.sampled_from((1, 2, 4)), st.integers(0, 30))
def test_each_frame_of_the_ranges_once_on_any_ranks(
    selected: tuple[list[int], FrameRanges, list[tuple[int, int]]], shuffle: bool | str, world: int, start: int
) -> None:
    _, kept, frames = selected
    orders = [SelectedOrder(kept, shuffle, 1, 2, 4, 2) for _ in range(world)]
    shares = [list(zip(*map(list, order.read(0, 1000, rank, world)), strict=True)) for rank, order in enumerate(orders)]
    assert sorted(pair for share in shares for pair in share) == frames
    if shuffle is False:
        assert shares[0] == frames[::world]
    [after] = [list(zip(*map(list, orders[0].read(start, 1000, 0, world)), strict=True))]
    assert after == shares[0][-(-start // world) :]


@examples(100)
@given(ranges(), st.integers(0, 5), st.integers(0, 5))
def test_ranges_are_cut_as_sets_of_frames_are(
    selected: tuple[list[int], FrameRanges, list[tuple[int, int]]], first: int, last: int
) -> None:
    lengths, kept, frames = selected
    inner = kept.within(np.full(len(lengths), first), np.array(lengths) - last)
    expected = [(episode, frame) for episode, frame in frames if first <= frame < lengths[episode] - last]
    assert _frames(inner) == expected
    some = np.arange(0, len(lengths), 2)
    assert _frames(kept.of(some)) == [(episode // 2, frame) for episode, frame in frames if episode % 2 == 0]
    assert _frames(frame_ranges.whole(np.array(lengths))) == [(e, f) for e, length in enumerate(lengths) for f in range(length)]


def _frames(kept: FrameRanges) -> list[tuple[int, int]]:
    episode = np.repeat(np.arange(kept.episodes), kept.counts)
    number = np.concatenate([np.arange(count) for count in kept.counts])
    return list(zip(episode.tolist(), kept.frames(episode, number).tolist(), strict=True))


@pytest.mark.parametrize("as_file", [False, True])
@pytest.mark.parametrize("remote", [False, True])
def test_an_epoch_shows_the_frames_that_were_given(demo: Path, tmp_path: Path, as_file: bool, remote: bool) -> None:
    frames: Any = KEPT
    if as_file:
        frames = tmp_path / "keep_ranges.json"
        frames.write_text(json.dumps({str(key): value for key, value in KEPT.items()}))
    with Server(demo) as server:
        dataset = Dataset(server.url if remote else demo, frames=frames)
        assert dataset.num_frames == len(dataset) == len(KEPT_FRAMES)
        with Loader(dataset, batch_size=4, last_batch="partial", **ORDER) as loader:
            assert len(loader) == 3
            batches = list(loader)
    lengths = read_lengths(demo)
    for batch in batches:
        for camera in (TOP, SIDE):
            check_identities(batch, camera, None, lengths)
    assert _shown(batches) == KEPT_FRAMES


def test_windows_show_the_frames_around_the_ranges(demo: Path) -> None:
    deltas = [-0.2, 0.0, 0.2]
    dataset = Dataset(demo, frames=KEPT, drop_n_first_frames=1)
    offsets = [round(delta * dataset.fps) for delta in deltas]
    with Loader(dataset, batch_size=4, last_batch="partial", delta_timestamps={TOP: deltas}, **ORDER) as loader:
        batches = list(loader)
    for batch in batches:
        check_identities(batch, TOP, offsets, read_lengths(demo))
        expected = [[offset + frame < 0 for offset in offsets] for frame in batch["frame_index"].tolist()]
        assert batch[f"{TOP}_is_pad"].tolist() == expected
    assert _shown(batches) == [(episode, frame) for episode, frame in KEPT_FRAMES if frame]


def test_a_run_on_ranges_resumes_on_other_ranks(demo: Path) -> None:
    dataset = Dataset(demo, cameras=[], drop_n_first_frames=3, drop_n_last_frames=2)
    with Loader(dataset, batch_size=8, last_batch="partial", **ORDER) as loader:
        order = samples(loader)
    with Loader(dataset, batch_size=8, **ORDER) as loader:
        begun = samples([next(iter(loader))])
        state = loader.state_dict()
    rest = []
    for rank in range(2):
        with Loader(dataset, batch_size=4, last_batch="partial", rank=rank, world_size=2, **ORDER) as loader:
            loader.load_state_dict(state)
            rest.append(samples(loader))
    assert begun + [index for pair in zip(*rest, strict=False) for index in pair] == order[: 8 + 2 * len(rest[1])]
    more = {"drop_n_first_frames": 3, "drop_n_last_frames": 2, "frames": {0: [(0, 40)]}}
    for other in ({}, {"drop_n_first_frames": 3}, more):
        with Loader(Dataset(demo, cameras=[], **other), batch_size=8, **ORDER) as loader, pytest.raises(ResumeError):
            loader.load_state_dict(state)


def test_a_sampler_of_the_dataset_has_the_same_frames(demo: Path) -> None:
    dataset = Dataset(demo, cameras=[], frames=KEPT, drop_n_last_frames=1)
    with Loader(dataset, batch_size=2, last_batch="partial", **ORDER) as loader:
        expected = samples(loader)
    sampler = FrameSampler(dataset, **ORDER)
    assert list(sampler) == expected
    with pytest.raises(ResumeError, match=r"The state is of .*episodes"):
        FrameSampler(Dataset(demo, cameras=[], frames={0: [(0, 11)]}), **ORDER).load_state_dict(sampler.state_dict())
    dropping = FrameSampler(Dataset(demo, cameras=[], drop_n_first_frames=4), drop_n_last_frames=2, **ORDER)
    assert list(dropping) == list(FrameSampler(Dataset(demo, cameras=[]), drop_n_first_frames=4, drop_n_last_frames=2, **ORDER))


def test_without_ranges_the_order_is_that_of_the_lengths(demo: Path) -> None:
    lengths = np.array([9, 0, 4, 30])
    expected = Order(lengths - np.minimum(lengths, 3), True, 1, 0, 4, 2).read(0, 100)
    episode, frame = SelectedOrder(frame_ranges.whole(lengths).dropping(lengths, 2, 1), True, 1, 0, 4, 2).read(0, 100)
    assert (episode.tolist(), (frame - 2).tolist()) == (expected[0].tolist(), expected[1].tolist())
    assert Dataset(demo).fingerprint == Dataset(demo, drop_n_first_frames=0, episode_filter=lambda episode: True).fingerprint


def _shown(batches: list[Any]) -> list[tuple[int, int]]:
    keys = ("episode_index", "frame_index")
    return sorted(pair for batch in batches for pair in zip(*(batch[key].tolist() for key in keys), strict=True))


# ------------------------------------------------------------------------------------------- episodes without all cameras

LENGTHS, LACKING = (5, 4, 6), f"videos/{SIDE}/"


@pytest.fixture(scope="module")
def lacking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three episodes and two cameras, one of which has no video of episode 1, as L2D has such. Read only."""
    folder = tmp_path_factory.mktemp("lacking")
    cameras = one_file_each(folder, [TOP, SIDE], LENGTHS, 10)
    root = build(folder / "data", LENGTHS, {}, cameras=cameras)
    change_episodes(root, lambda table: without_places(table, 1))
    (root / f"{LACKING}chunk-000/file-001.mp4").unlink()
    return root


def without_places(table: pa.Table, episode: int, kind: str = "null", name: str = LACKING) -> pa.Table:
    """The episode table without the place of an episode's video, as Arrow's null, or as pandas and others write it.

    pandas has no integers with a missing value, and writes double with a null.
    """
    for place, column in enumerate(table.column_names):
        if column.startswith(name):
            values = [None if number == episode else value for number, value in enumerate(table[column].to_pylist())]
            if kind == "NaN":
                values = np.array(values, float)  # type: ignore[assignment]
            written = pa.array(values, pa.float64() if kind == "pandas" else None, from_pandas=False)
            table = table.set_column(place, column, written)
    return table


def whole(root: Path | Dataset, **options: Any) -> list[tuple[int, int, str]]:
    """(episode, frame, camera) of each frame of an epoch, after its pixels have been compared with them."""
    found = []
    with Loader(root, batch_size=2, last_batch="partial", image_dtype="uint8", consumers=1, **options) as loader:
        for batch in loader:
            rows = list(zip(batch["episode_index"].tolist(), batch["frame_index"].tolist(), strict=True))
            for camera in (key for key in (TOP, SIDE) if key in batch):
                assert identities(batch[camera]) == rows
                found += [(*row, camera) for row in rows]
    return sorted(found)


def every(episodes: list[int], cameras: list[str]) -> list[tuple[int, int, str]]:
    return sorted((e, frame, camera) for e in episodes for frame in range(LENGTHS[e]) for camera in cameras)


@pytest.mark.parametrize("kind", ["null", "pandas", "NaN"])
def test_a_camera_without_video_in_an_episode(lacking: Path, tmp_path: Path, kind: str) -> None:
    """It is an error only if both are selected, and both ways on that the message names lead on."""
    root = copied(lacking, tmp_path)
    change_episodes(root, lambda table: without_places(table, 1, kind))
    with pytest.raises(DatasetError) as caught:
        Dataset(root)
    said = str(caught.value)
    assert f"No video of camera '{SIDE}' in episode 1: " in said
    assert f"Leave such episodes out with episodes=, or the camera with cameras=['{TOP}']" in said
    assert whole(Dataset(root, episodes=[0, 2])) == every([0, 2], [TOP, SIDE])
    assert whole(Dataset(root, cameras=[TOP])) == every([0, 1, 2], [TOP])
    assert whole(Dataset(root, episode_filter=lambda episode: episode["episode_index"] != 1)) == every([0, 2], [TOP, SIDE])
    assert whole(Dataset(root, episode_filter=pc.field(f"{LACKING}file_index").is_valid())) == every([0, 2], [TOP, SIDE])
    with pytest.raises(DatasetError, match="No video of camera"):
        Dataset(root, episodes=[1, 2])


def test_a_camera_without_any_video(lacking: Path, tmp_path: Path) -> None:
    """Its columns have no type then."""
    root = copied(lacking, tmp_path)
    for episode in range(3):
        change_episodes(root, lambda table, episode=episode: without_places(table, episode))
    with pytest.raises(DatasetError, match=rf"No video of camera '{SIDE}' in episode 0, and of 2 other episodes"):
        Dataset(root)
    assert whole(Dataset(root, cameras=[TOP])) == every([0, 1, 2], [TOP])


def test_two_cameras_without_video_are_both_left_out(lacking: Path, tmp_path: Path) -> None:
    root = copied(lacking, tmp_path)
    change_episodes(root, lambda table: without_places(table, 2, name=f"videos/{TOP}/"))
    with pytest.raises(DatasetError, match=r"or the camera with cameras=\[\]"):
        Dataset(root)
    assert whole(Dataset(root, episodes=[0])) == every([0], [TOP, SIDE])


def test_a_copy_of_the_episodes_with_all_videos(lacking: Path, tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=f"No video of camera '{SIDE}' in episode 1"):
        prepared(lacking, tmp_path / "refused")
    prepared(lacking, tmp_path / "out", episodes=[0, 2])
    found = lerobot_reader.read(tmp_path / "out")
    for index, expected in enumerate([(e, frame) for e in (0, 2) for frame in range(LENGTHS[e])]):
        assert [identities(found[index][camera][None]) for camera in (TOP, SIDE)] == [[expected]] * 2


# -------------------------------------------------------------------------------------------- numbers of another type


@pytest.mark.parametrize("columns", [["episode_index"], None])
def test_integers_of_the_episode_table_that_are_stored_as_double(root: Path, columns: list[str] | None) -> None:
    """pandas stores integers so if one of them is missing."""

    def doubled(table: pa.Table) -> pa.Table:
        for place, name in enumerate(table.column_names):
            if pa.types.is_integer(table[name].type) and name in (columns or table.column_names):
                table = table.set_column(place, name, table[name].cast(pa.float64()))
        return table

    change_episodes(root, doubled)
    assert delivered(root) == EVERY
    seen: list[Any] = []
    dataset = Dataset(root, episode_filter=lambda episode: seen.append(episode["episode_index"]) or seen[-1] == 1)
    assert [(number, type(number)) for number in seen] == [(0, int), (1, int)]
    assert dataset.episodes.tolist() == [1]
    assert Dataset(root, episode_filter=pc.field("episode_index") == 1).episodes.tolist() == [1]


# ----------------------------------------------------------------------------------------------------- episode_filter


@pytest.mark.parametrize(
    "episode_filter",
    [
        lambda episode: episode["length"] > 60,
        pc.field("length") > 60,
        lambda episode: np.bool_(episode["length"] > 60),
    ],
)
@pytest.mark.parametrize("remote", [False, True])
def test_a_filter_takes_what_listing_the_episodes_would(demo: Path, episode_filter: Any, remote: bool) -> None:
    expected = [episode for episode, length in read_lengths(demo).items() if length > 60]
    assert 0 < len(expected) < 6
    with Server(demo) as server:
        dataset = Dataset(server.url if remote else demo, episode_filter=episode_filter)
        assert dataset.episodes.tolist() == expected
        assert dataset.fingerprint == Dataset(demo, episodes=expected).fingerprint
    both = Dataset(demo, episode_filter=episode_filter, episodes=[0, 1, 2, 3])
    assert both.episodes.tolist() == [episode for episode in expected if episode < 4]


def test_other_files_beside_the_episode_table_are_ignored(demo_copy: Path) -> None:
    (demo_copy / "meta/episodes/chunk-000/.DS_Store").write_bytes(b"not Parquet")
    assert Dataset(demo_copy, episode_filter=lambda episode: episode["episode_index"] == 2).episodes.tolist() == [2]


def test_a_filter_sees_tasks_and_statistics(demo: Path) -> None:
    columns = Dataset(demo).episode_columns(stats=True)
    task = columns["tasks"].to_pylist()[2][0]
    expected = [row["episode_index"] for row in columns.to_pylist() if task in row["tasks"]]
    assert Dataset(demo, episode_filter=lambda episode: task in episode["tasks"]).episodes.tolist() == expected
    frames = pc.list_element(pc.field("stats/action/count"), 0) > 60
    assert Dataset(demo, episode_filter=frames).episodes.tolist() == [e for e, n in read_lengths(demo).items() if n > 60]


# -------------------------------------------------------------------------------------------------------------- split


@pytest.mark.parametrize("shares", [{"train": 0.9, "val": 0.1}, {"a": 1 / 3, "b": 1 / 3, "c": 1 / 3}, {"a": 0.5, "b": 0.25}])
def test_a_split_has_each_episode_at_most_once(demo: Path, shares: dict[str, float]) -> None:
    dataset = Dataset(demo, cameras=[], episodes=[0, 1, 2, 4, 5], drop_n_first_frames=2)
    parts = dataset.split(shares, seed=7)
    taken = [episode for part in parts.values() for episode in part.episodes.tolist()]
    assert len(set(taken)) == len(taken) == round(5 * sum(shares.values()))
    assert list(parts) == list(shares)
    assert len({part.fingerprint for part in parts.values()} | {dataset.fingerprint}) == len(shares) + 1
    lengths = read_lengths(demo)
    for part in parts.values():
        assert part.num_frames == sum(lengths[episode] - 2 for episode in part.episodes.tolist())
        same = Dataset(demo, cameras=[], episodes=part.episodes.tolist(), drop_n_first_frames=2)
        assert part.fingerprint == same.fingerprint
        with Loader(part, batch_size=8, last_batch="partial", consumers=1) as loader:
            assert {int(e) for batch in loader for e in batch["episode_index"]} == set(part.episodes.tolist())
    again = dataset.split(shares, seed=7)
    assert [part.episodes.tolist() for part in again.values()] == [part.episodes.tolist() for part in parts.values()]
    others = [tuple(dataset.split(shares, seed=seed)[next(iter(shares))].episodes.tolist()) for seed in range(9)]
    assert len(set(others)) > 1


def test_a_split_of_the_datasets_own(demo_copy: Path) -> None:
    change_info(demo_copy, splits={"train": "0:4", "test": "4:6"})
    parts = Dataset(demo_copy, episodes=[1, 2, 5]).split()
    assert {name: part.episodes.tolist() for name, part in parts.items()} == {"train": [1, 2], "test": [5]}
    for splits, message in (
        ({}, "has no splits"),
        ({"train": "all"}, "Invalid split 'train' in .*: must be a range such as '0:40', got 'all'"),
        ({"train": [0, 4]}, "must be a range such as '0:40', got"),
    ):
        change_info(demo_copy, splits=splits)
        with pytest.raises(DatasetError, match=message):
            Dataset(demo_copy).split()
    change_info(demo_copy, splits={"train": "6:9"})
    with pytest.raises(ValueError, match="split 'train' contains none of the 6 selected episodes"):
        Dataset(demo_copy).split()


# ------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"frames": {9: [(0, 1)]}}, "Unknown episode 9 in frames. Available: 6 episodes, from 0 to 5"),
        ({"frames": {"gs://bucket--a": [(0, 1)]}}, "Keys of frames must be episode indices, got 'gs://bucket--a'"),
        (
            {"frames": {0: [(0, 4), (3, 6)]}},
            r"frames\[0\] must have nonempty ranges in increasing order, without overlap .*, got \[3, 6\) after frame 4",
        ),
        ({"frames": {0: [(4, 4)]}}, r"frames\[0\] must have nonempty ranges .*, got \[4, 4\)"),
        ({"frames": {0: [(0, 10_000)]}}, r"within the \d+ frames of the episode, got \[0, 10000\)"),
        ({"frames": {0: [(-1, 4)]}}, r"ranges .*, got \[-1, 4\)"),
        ({"frames": {0: [(0.0, 4)]}}, r"frames\[0\] must have ranges \(start, stop\) in frames, got \(0.0, 4\)"),
        ({"frames": {0: [3]}}, r"must have ranges \(start, stop\) in frames, got 3"),
        ({"frames": {3: [(0, 5)], "3": [(2, 6)]}}, "Each episode must be in frames once, got 3 twice"),
        ({"frames": {0: "0:4"}}, r"frames\[0\] must be a list of .*, got 0:4"),
        ({"frames": [(0, 4)]}, "frames must be {episode index.*, got"),
        ({"frames": "no/such.json"}, "frames must be a readable JSON file, got 'no/such.json'"),
        ({"frames": {}}, "must leave at least one of the"),
        ({"drop_n_first_frames": 10_000}, "must leave at least one of the"),
        ({"drop_n_last_frames": -1}, "drop_n_last_frames must be a nonnegative integer, got -1"),
        ({"episode_filter": lambda episode: False}, "episode_filter accepts none of 6 episodes"),
        ({"episode_filter": "length > 5"}, "episode_filter must be a function of an episode's columns"),
        ({"episode_filter": pc.field("size") > 5}, "Available columns: episode_index, "),
    ],
)
def test_a_selection_that_makes_no_sense_is_refused(demo: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Dataset(demo, cameras=[], **arguments)


@pytest.mark.parametrize(
    ("split", "message"),
    [
        (lambda dataset: dataset.split({"train": 0.9, "val": 0.2}), "sum of at most 1, got"),
        (lambda dataset: dataset.split({"train": 0}), "must be positive numbers"),
        (lambda dataset: dataset.split({}), "shares must be positive numbers with a sum of at most 1"),
        (lambda dataset: dataset.split({"train": 0.99, "val": 0.01}), "split 'val' contains none of the 6 selected episodes"),
        (lambda dataset: dataset.split({"train": 0.5}, seed=-1), "seed must be a nonnegative integer, got -1"),
    ],
)
def test_shares_that_make_no_sense_are_refused(demo: Path, split: Callable[[Dataset], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        split(Dataset(demo, cameras=[]))
