"""Datasets of LeRobot v2.0 and v2.1, as they are and converted: the batches are those of v3.0, bit for bit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import videos as data
from support.batches import Batch, equal
from support.datasets import (
    SIDE,
    TOP,
    V2_ROWS,
    Column,
    build,
    change_info,
    copied,
    episode_table,
    tree,
    v2_path,
    write_lines,
    write_odd,
)
from support.servers import Server
from support.slow import slow
from support.tools import prepared

import dali_stream
from dali_stream import DaliStreamError, Dataset, DatasetError
from dali_stream.cli import main
from dali_stream.lerobot import json_files, v2

LENGTHS = (9, 6, 11, 7, 8)
VERSIONS = ("v2.0", "v2.1")
WINDOWS = {TOP: [-0.2, 0.0], "action": [0.0, 0.1, 0.9], "next.done": [-0.1, 0.0]}
EPISODES, STATS, TASKS = "meta/episodes.jsonl", "meta/episodes_stats.jsonl", "meta/tasks.jsonl"


@pytest.fixture(scope="module")
def write(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path, str], Path]:
    """Writes the same episodes in any version."""
    cameras = data.one_file_each(tmp_path_factory.mktemp("videos"), (TOP, SIDE), LENGTHS, fps=10)
    rng, count = np.random.default_rng(0), sum(LENGTHS)
    columns = {
        "action": Column("float32", [2], rng.normal(size=(count, 2))),
        "observation.state": Column("float64", [3], rng.normal(size=(count, 3))),
        "next.done": Column("bool", [1], rng.integers(0, 2, count)),
        "note": Column("string", [1], [f"note {row}" for row in range(count)]),
    }

    def write(root: Path, version: str) -> Path:
        return build(root, LENGTHS, columns, cameras=cameras, labels={"task": ["push", "pull"]}, version=version, stats=True)

    return write


@pytest.fixture(scope="module")
def roots(write: Callable[[Path, str], Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """v2.0, v2.1 and v3.0 of the same episodes, and the first two converted. Read only."""
    folder = tmp_path_factory.mktemp("roots")
    made = {version: write(folder / version, version) for version in (*VERSIONS, "v3.0")}
    for version in VERSIONS:
        made[f"converted {version}"] = convert(made[version], folder / f"converted-{version}")
    return made


@pytest.fixture
def root(roots: dict[str, Path], tmp_path: Path) -> Path:
    """A copy of v2.1 to change."""
    return copied(roots["v2.1"], tmp_path)


def convert(source: Path | str, out: Path, **options: Any) -> Path:
    prepared(source, out, **options)
    return out


def batches(source: Path | str | Dataset, **options: Any) -> Iterator[Batch]:
    with data.loader(source, **{"batch_size": 4, **options}) as loader:
        yield from loader


def assert_same(first: Path | str | Dataset, second: Path | str | Dataset, most: int = 1 << 30, **options: Any) -> None:
    """Check that the batches of an epoch are the same, comparing at most `most` of them."""
    count = 0
    for count, (left, right) in enumerate(zip(batches(first, **options), batches(second, **options), strict=True), start=1):
        assert equal(left, right)
        if count == most:
            break
    assert count


# ---- the same batches


SHARES: dict[str, list[dict[str, Any]]] = {
    "frames": [{}],
    "windows": [{"delta_timestamps": WINDOWS}],
    "frames on two ranks": [{"rank": rank, "world_size": 2} for rank in range(2)],
    "windows on two ranks": [{"rank": rank, "world_size": 2, "delta_timestamps": WINDOWS} for rank in range(2)],
}


@pytest.fixture(scope="module")
def expected(roots: dict[str, Path]) -> dict[str, list[Batch]]:
    """The batches of v3.0, by the names in `SHARES`; those of two ranks one after the other."""
    return {name: [b for share in shares for b in batches(roots["v3.0"], **share)] for name, shares in SHARES.items()}


@pytest.mark.parametrize("shares", SHARES)
@pytest.mark.parametrize("version", [*VERSIONS, slow("converted v2.0"), slow("converted v2.1")])
def test_the_same_batches(version: str, shares: str, roots: dict[str, Path], expected: dict[str, list[Batch]]) -> None:
    found = [batch for share in SHARES[shares] for batch in batches(roots[version], **share)]
    assert len(found) == len(expected[shares]) > 0
    assert all(map(equal, found, expected[shares]))


@pytest.mark.parametrize("version", VERSIONS)
def test_images_in_rows_and_every_dtype(version: str, odd: Path, tmp_path: Path) -> None:
    root = write_odd(tmp_path / "odd", version=version)
    shutil.copy(odd / "meta/subtasks.parquet", root / "meta")  # v2.x has none
    assert_same(root, odd, decode="auto")
    assert_same(convert(root, tmp_path / "out"), odd, decode="auto")


@pytest.mark.parametrize("version", VERSIONS)
def test_remote_data_takes_one_request_per_file_of_rows(version: str, roots: dict[str, Path]) -> None:
    with Server(roots[version]) as server:
        assert_same(server.url, roots["v3.0"], delta_timestamps=WINDOWS)
        rows = [request.path for request in server.requests if request.path.startswith("/data/")]
        assert sorted(rows) == [f"/{v2_path(V2_ROWS, episode)}" for episode in range(len(LENGTHS))]


def test_index_takes_one_request_per_file_of_rows(roots: dict[str, Path], tmp_path: Path) -> None:
    with Server(roots["v2.1"]) as server:
        report = dali_stream.tools.index(Dataset(server.url, cache_dir=tmp_path))
        rows = [request.path for request in server.requests if request.path.startswith("/data/")]
        assert sorted(rows) == [f"/{v2_path(V2_ROWS, episode)}" for episode in range(len(LENGTHS))]
    assert report.broken == {}


def test_no_byte_of_another_camera_is_read(roots: dict[str, Path]) -> None:
    with Server(roots["v2.1"]) as server:
        assert_same(Dataset(server.url, cameras=[TOP], episodes=[1, 3]), Dataset(roots["v3.0"], cameras=[TOP], episodes=[1, 3]))
        assert not [request.path for request in server.requests if SIDE in request.path]
        assert {request.path[-13:] for request in server.requests if ".mp4" in request.path} == {
            "de_000001.mp4",
            "de_000003.mp4",
        }


@pytest.mark.slow
def test_more_files_than_are_kept_open(tmp_path: Path) -> None:
    lengths = [2, 1] * 200
    root = build(tmp_path / "many", lengths, {"wide": Column("float32", [2], np.zeros((600, 2)))}, version="v2.1")
    found = [index for batch in batches(root, batch_size=100) for index in batch["index"].tolist()]
    assert sorted(found) == list(range(600))


def test_frames_tasks_and_the_version(roots: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    for version in VERSIONS:
        dataset, same = Dataset(roots[version]), Dataset(roots["v3.0"])
        assert (dataset.version, same.version) == (version, "v3.0")
        assert (dataset.tasks, dataset.lengths.tolist()) == (same.tasks, list(LENGTHS))
        assert main(["info", str(roots[version])]) == 0
        assert f"LeRobot {version}," in capsys.readouterr().out


# ---- the recording, as it was recorded and converted by LeRobot


@pytest.fixture(scope="session")
def g1_v21(g1: Path) -> Path:
    """The first 6 episodes of `g1` in v2.1."""
    return g1.with_name("g1_v21")


CAMERA = "observation.images.cam_high"


DELTAS = {CAMERA: [-1 / 30, 0.0], "action": [n / 30 for n in range(20)]}


@pytest.mark.slow
@pytest.mark.parametrize(("deltas", "rank", "ranks"), [(None, 0, 1), (DELTAS, 1, 2)])
def test_a_recording(deltas: Any, rank: int, ranks: int, g1: Path, g1_v21: Path) -> None:
    part = Dataset(g1, episodes=range(6))
    assert_same(g1_v21, part, most=4, delta_timestamps=deltas, rank=rank, world_size=ranks)
    with Server(g1_v21) as server:
        assert_same(server.url, part, most=2, delta_timestamps=deltas, rank=rank, world_size=ranks)


@pytest.mark.slow
def test_every_frame_of_a_recording(g1: Path, g1_v21: Path, tmp_path: Path) -> None:
    """Of two episodes, neither of which is the first one of its files of v3.0."""
    assert_same(Dataset(g1_v21, episodes=[1]), Dataset(g1, episodes=[1]), batch_size=32)
    converted = convert(g1_v21, tmp_path / "out")
    assert_same(Dataset(converted, episodes=[2]), Dataset(g1_v21, episodes=[2]), batch_size=32)


def test_a_recording_has_the_fingerprint_of_its_conversion(g1_v21: Path, tmp_path: Path) -> None:
    assert Dataset(convert(g1_v21, tmp_path / "out")).fingerprint == Dataset(g1_v21).fingerprint


# ---- fingerprint and states


def test_the_fingerprint_is_that_of_the_conversion(roots: dict[str, Path]) -> None:
    found = {version: Dataset(root).fingerprint for version, root in roots.items()}
    assert found["v2.1"] == found["v3.0"] == found["converted v2.1"]
    assert found["v2.0"] == found["converted v2.0"]


def test_the_fingerprint_depends_on_what_is_read(root: Path) -> None:
    seen = [Dataset(root).fingerprint, Dataset(root, episodes=[0, 1]).fingerprint]
    lines = (root / STATS).read_text()
    (root / STATS).write_text(lines.replace('"max": [', '"max": [1', 1))
    seen.append(Dataset(root).fingerprint)
    (root / STATS).write_text(lines)
    (root / TASKS).write_text((root / TASKS).read_text().replace("push", "lift"))
    seen.append(Dataset(root).fingerprint)
    assert len(set(seen)) == 4


@pytest.mark.parametrize(("first", "second"), [("v2.1", "converted v2.1"), ("converted v2.0", "v2.0"), ("v3.0", "v2.1")])
def test_a_state_resumes_on_the_conversion(first: str, second: str, roots: dict[str, Path]) -> None:
    expected = list(batches(roots["v3.0"]))
    with data.loader(roots[first], batch_size=4) as loader:
        run = iter(loader)
        for _ in range(3):
            next(run)
        state = json.loads(json.dumps(loader.state_dict()))
    with data.loader(roots[second], batch_size=4) as loader:
        loader.load_state_dict(state)
        rest = list(loader)
    assert len(rest) == len(expected) - 3
    assert all(map(equal, rest, expected[3:]))


# ---- statistics


def test_statistics_of_episodes_are_aggregated(roots: dict[str, Path]) -> None:
    found, whole = Dataset(roots["v2.1"]).stats, Dataset(roots["v3.0"]).stats
    assert found.keys() == whole.keys()
    for key, expected in whole.items():
        for name in ("min", "max", "count"):
            assert found[key][name].tolist() == expected[name].tolist(), (key, name)
        for name in ("mean", "std"):
            np.testing.assert_allclose(found[key][name], expected[name], rtol=1e-12, atol=1e-12)
    np.testing.assert_equal(Dataset(roots["converted v2.1"]).stats, found)


def test_quantiles_are_weighted_by_frames() -> None:
    parts = [
        {"x": {name: np.array([float(value)]) for name in ("min", "max", "mean", "std", "q50")} | {"count": np.array([n])}}
        for value, n in ((1, 1), (5, 3))
    ]
    assert v2.aggregate(parts)["x"]["q50"].tolist() == [4.0]


def test_v21_with_the_statistics_of_v20(root: Path, roots: dict[str, Path]) -> None:
    (root / STATS).unlink()
    assert Dataset(root).stats == {}
    shutil.copy(roots["v2.0"] / "meta/stats.json", root / "meta")
    np.testing.assert_equal(Dataset(root).stats, Dataset(roots["v2.0"]).stats)
    assert Dataset(root).fingerprint == Dataset(roots["v2.0"]).fingerprint


def test_statistics_of_some_episodes_are_logged(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    lines = (root / STATS).read_text().splitlines(keepends=True)
    (root / STATS).write_text("".join(lines[:3]))
    assert Dataset(root).stats["action"]["count"].tolist() == [sum(LENGTHS[:3])]
    assert "has statistics of 3 episodes, although the dataset has 5" in caplog.text


def test_normalize(roots: dict[str, Path]) -> None:
    options: dict[str, Any] = {"normalize": {"action": "min_max", "observation.state": "mean_std"}}
    assert_same(roots["v2.1"], roots["converted v2.1"], **options)


# ---- broken metadata


def line(root: Path, path: str, number: int, text: str) -> None:
    """Puts another line in the place of one."""
    lines = (root / path).read_text().splitlines()
    lines[number] = text
    (root / path).write_text("\n".join(lines))


BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no episodes.jsonl": (lambda root: (root / EPISODES).unlink(), r"episodes\.jsonl: no such file"),
    "an empty episodes.jsonl": (lambda root: (root / EPISODES).write_text(""), r"No episodes in .*episodes\.jsonl"),
    "half a line": (
        lambda root: line(root, EPISODES, 2, '{"episode_index": 2, "le'),
        r"Invalid JSON in .*episodes\.jsonl, line 3: ",
    ),
    "a list": (lambda root: line(root, EPISODES, 1, "[]"), r"episodes\.jsonl, line 2: must be a JSON object, got list"),
    "an LFS pointer": (
        lambda root: (root / EPISODES).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:12\nsize 3\n"),
        r"episodes\.jsonl",
    ),
    "no index": (
        lambda root: line(root, EPISODES, 1, '{"length": 6}'),
        "Invalid episode_index in .*line 2: must be .* integer, got None",
    ),
    "an index twice": (
        lambda root: line(root, EPISODES, 1, '{"episode_index": 0, "length": 6}'),
        "Invalid episode 0 in .*: episode_index must be nonnegative and not duplicated",
    ),
    "an index of text": (
        lambda root: line(root, EPISODES, 1, '{"episode_index": "1"}'),
        "Invalid episode_index in .*line 2: .*, got 1$",
    ),
    "a negative index": (
        lambda root: line(root, EPISODES, 1, '{"episode_index": -1, "length": 6}'),
        "Invalid episode_index in .*, got -1$",
    ),
    "no length": (lambda root: line(root, EPISODES, 1, '{"episode_index": 1}'), "Invalid length in .*line 2: .*, got None"),
    "a length of 0": (
        lambda root: line(root, EPISODES, 1, '{"episode_index": 1, "length": 0}'),
        "Invalid episode 1 in .*: length must be",
    ),
    "a bool for a length": (
        lambda root: line(root, EPISODES, 1, '{"episode_index": 1, "length": true}'),
        "Invalid length in .*, got True",
    ),
    "another length": (
        lambda root: line(root, EPISODES, 1, '{"episode_index": 1, "length": 7}'),
        r"Invalid total_frames in .*: must be 42, .* in .*episodes\.jsonl, got 41",
    ),
    "an episode less": (
        lambda root: line(root, EPISODES, 4, ""),
        r"total_episodes in .*: must be 4, .* in .*episodes\.jsonl, got 5",
    ),
    "a task of a number": (
        lambda root: line(root, TASKS, 1, '{"task_index": 1, "task": 3}'),
        r"tasks\.jsonl, line 2: task must be text, got 3",
    ),
    "a task twice": (
        lambda root: line(root, TASKS, 1, '{"task_index": 0, "task": "x"}'),
        "line 2: task_index 0 is duplicated",
    ),
    "half a line of statistics": (lambda root: line(root, STATS, 1, '{"episode'), r"JSON in .*episodes_stats\.jsonl, line 2: "),
    "statistics of text": (
        lambda root: line(root, STATS, 1, '{"episode_index": 1, "stats": 3}'),
        r"Invalid statistics of episode 1 in .*episodes_stats\.jsonl, line 2: must be ",
    ),
    "statistics without count": (
        lambda root: line(root, STATS, 1, '{"episode_index": 1, "stats": {"action": {"min": [1]}}}'),
        r"Invalid statistics in .*episodes_stats\.jsonl: each episode must have .* for 'action'",
    ),
    "statistics twice": (
        lambda root: line(root, STATS, 1, '{"episode_index": 0, "stats": {}}'),
        "episode_index 0 is duplicated",
    ),
    "a path of v3.0": (
        lambda root: change_info(root, data_path="data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"),
        "path template data_path in .*: unknown field {file_index:03d}. Allowed fields: .*{episode_index:06d}",
    ),
    "one file for all episodes": (
        lambda root: change_info(root, data_path="data/{episode_chunk:03d}.parquet"),
        "path template data_path in .*: missing field {episode_index}",
    ),
    "one file for all cameras": (
        lambda root: change_info(root, video_path="videos/{episode_index:06d}.mp4"),
        "path template video_path in .*: missing field {video_key}",
    ),
    "a path out of the dataset": (
        lambda root: change_info(root, data_path="../{episode_index:06d}"),
        "must be a path within the dataset",
    ),
    "chunks of no episodes": (
        lambda root: change_info(root, chunks_size=0),
        "Invalid chunks_size in .*: must be the number of episodes in a chunk, got 0",
    ),
    "no chunks": (lambda root: change_info(root, chunks_size=None), "Invalid chunks_size in .*, got None"),
    "no path of the videos": (
        lambda root: change_info(root, video_path=None),
        "Invalid video_path in .* for video features, got null",
    ),
    "rows of another episode": (
        lambda root: shutil.copy(root / v2_path(V2_ROWS, 0), root / v2_path(V2_ROWS, 1)),
        r"Invalid episode 1 in .*episode_000001\.parquet: must have 6 rows, as the metadata says, got 0",
    ),
    "no rows": (lambda root: (root / v2_path(V2_ROWS, 3)).unlink(), r"chunk-001/episode_000003\.parquet: no such file"),
}


def read_all(root: Path) -> None:
    dataset = Dataset(root, cameras=[TOP])
    assert dataset.fingerprint
    list(batches(dataset))


@pytest.mark.parametrize("name", BROKEN)
def test_broken_metadata_is_named(name: str, root: Path) -> None:
    change, said = BROKEN[name]
    change(root)
    with pytest.raises(DatasetError, match=said):
        read_all(root)


def test_lines_of_any_order_and_blank_ones(root: Path) -> None:
    expected = Dataset(root)
    for path in (EPISODES, TASKS, STATS):
        lines = (root / path).read_text().splitlines()
        (root / path).write_text("\r\n\n".join(reversed(lines)))
    assert Dataset(root).fingerprint == expected.fingerprint
    assert Dataset(root).table.data.paths == expected.table.data.paths


def test_lines_are_read_across_parts(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = Dataset(root).fingerprint
    monkeypatch.setattr(json_files, "_PART", 7)
    assert Dataset(root).fingerprint == expected


def test_indices_with_gaps(root: Path, roots: dict[str, Path]) -> None:
    """Episodes that were taken out of the metadata: rows are read by their episode_index."""
    kept = [0, 2, 4]
    entries = [json.loads(text) for text in (root / EPISODES).read_text().splitlines()]
    write_lines(root / EPISODES, [entries[episode] for episode in kept])
    change_info(root, total_episodes=3, total_frames=sum(LENGTHS[e] for e in kept))
    assert_same(root, Dataset(roots["v3.0"], episodes=kept))


# ---- converting


def test_the_conversion_is_laid_out_as_v3(roots: dict[str, Path]) -> None:
    files = set(tree(roots["converted v2.1"]))
    videos = {f"videos/{key}/chunk-000/file-000.mp4" for key in (TOP, SIDE)}
    names = {"meta/info.json", "meta/stats.json", "meta/tasks.parquet", "meta/episodes/chunk-000/file-000.parquet"} | {
        "meta/prepare.json"
    }
    assert files == {"data/chunk-000/file-000.parquet", *videos, *names}
    info = json.loads((roots["converted v2.1"] / "meta/info.json").read_text())
    assert info["codebase_version"] == "v3.0"
    assert not {"total_chunks", "total_videos"} & info.keys()
    assert info["features"]["action"]["fps"] == 10
    assert "fps" not in info["features"][TOP]


def test_what_episodes_have_of_their_own_is_kept(root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    entries = [json.loads(text) for text in (root / EPISODES).read_text().splitlines()]
    parts = [[{"start": 0, "skill": "push"}], None, [], [{"start": 3, "skill": "pull"}], None]
    more = zip(entries, parts, [1, "x", 2, None, {}], strict=True)
    write_lines(root / EPISODES, [entry | {"parts": part, "odd": odd} for entry, part, odd in more])
    table = episode_table(convert(root, tmp_path / "out"))
    assert table["parts"] == parts
    assert "'odd' cannot be a column" in caplog.text
    assert "odd" not in table


def test_a_remote_dataset_is_converted(roots: dict[str, Path], tmp_path: Path) -> None:
    with Server(roots["v2.1"]) as server:
        assert tree(convert(server.url, tmp_path / "out")) == tree(roots["converted v2.1"])


def test_an_interrupted_conversion_resumes(roots: dict[str, Path], tmp_path: Path) -> None:
    def interrupt(status: Any) -> None:
        if status.done == status.total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(roots["v2.1"], tmp_path / "out", progress=interrupt)
    assert not (tmp_path / "out/meta/info.json").exists()
    written = {
        path: (tmp_path / "out" / path).stat().st_mtime_ns for path in tree(tmp_path / "out") if not path.startswith("meta/")
    }
    convert(roots["v2.1"], tmp_path / "out")
    assert written == {path: (tmp_path / "out" / path).stat().st_mtime_ns for path in written}
    assert tree(tmp_path / "out") == tree(roots["converted v2.1"])


def test_the_command(roots: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prepare", str(roots["v2.1"]), str(tmp_path / "out"), "--jobs", "1"]) == 0
    assert f"5 episodes, {sum(LENGTHS)} frames; 3 files written and verified" in capsys.readouterr().out
    assert tree(tmp_path / "out") == tree(roots["converted v2.1"])
    assert main(["prepare", str(tmp_path / "out"), str(tmp_path / "again"), "--jobs", "1"]) == 0
    old, new = tree(tmp_path / "out"), tree(tmp_path / "again")
    assert {name for name in old if old[name] != new[name]} == {"meta/prepare.json"}


def test_tasks_that_are_no_texts_are_not_converted(root: Path, tmp_path: Path) -> None:
    line(root, EPISODES, 1, '{"episode_index": 1, "length": 6, "tasks": [3]}')
    with pytest.raises(DatasetError, match=r"episodes\.jsonl: episode 1: tasks must be a list of texts, got \[3\]"):
        convert(root, tmp_path / "out")


def test_episodes_are_selected_by_what_only_some_have(root: Path) -> None:
    line(root, EPISODES, 2, json.dumps({"episode_index": 2, "length": LENGTHS[2], "tasks": ["push"], "good": True}))
    assert Dataset(root, episode_filter=lambda episode: episode["good"]).episodes.tolist() == [2]


def test_a_dataset_without_cameras_and_tasks(tmp_path: Path) -> None:
    root = build(tmp_path / "rows", (3, 4), {"x": Column("float32", [2], np.ones((7, 2)))}, version="v2.0")
    (root / TASKS).unlink()
    change_info(root, video_path="videos/{video_key}/{episode_index}.mp4")
    dataset = Dataset(root)
    assert (dataset.tasks, dataset.stats, dataset.cameras, dataset.num_frames) == ({}, {}, (), 7)
    with pytest.raises(
        DaliStreamError, match=r"a Loader does not read the new dataset: .*No file .*, which must name task_index 0"
    ):
        convert(root, tmp_path / "out")
