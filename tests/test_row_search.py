"""Rows are found by their episode_index where the metadata names the wrong file of rows, or none."""

from __future__ import annotations

import itertools
import re
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import videos as data
from support.clouds import Hub
from support.datasets import EPISODE_TABLE, ROWS, Column, build, change_episodes
from support.doctor import looked_at
from support.rows import delivered
from support.servers import Server
from support.slow import examples
from support.tools import prepared

from dali_stream import Dataset, DatasetError, Loader
from dali_stream.lerobot.rows import RowMemory, RowReader

LENGTHS = (6, 4, 7, 5, 8)
ENDS = np.cumsum((0, *LENGTHS)).tolist()


def file(number: int) -> str:
    return f"data/chunk-{number // 1000:03d}/file-{number % 1000:03d}.parquet"


def write_rows(root: Path, parts: Sequence[Sequence[int]], named: Sequence[int] | None, **written: Any) -> Path:
    """Puts rows [start, stop) of the only data file into files of their own, and names these files in the metadata."""
    rows = pq.read_table(root / ROWS)
    (root / ROWS).unlink()
    for number, (start, stop) in enumerate(parts):
        (root / file(number)).parent.mkdir(exist_ok=True)
        pq.write_table(rows.slice(start, stop - start), root / file(number), **{"row_group_size": 5, **written})
    columns = ["data/file_index", "data/chunk_index"]
    change_episodes(root, lambda table: table.drop_columns(columns))
    if named is not None:
        numbers = np.array(named)
        change_episodes(root, lambda table: table.append_column(columns[0], pa.array(numbers % 1000)))
        change_episodes(root, lambda table: table.append_column(columns[1], pa.array(numbers // 1000)))
    return root


def plain(root: Path, lengths: Sequence[int] = LENGTHS) -> Path:
    action = np.arange(2 * sum(lengths)).reshape(-1, 2)
    return build(root, lengths, {"action": Column("float32", [2], action)})


def assert_rows(root: Path | str, lengths: Sequence[int] = LENGTHS) -> None:
    """Each episode has its own rows, in their order."""
    rows, count = delivered(root), sum(lengths)
    assert rows["index"].tolist() == list(range(count))
    assert rows["episode_index"].tolist() == np.repeat(np.arange(len(lengths)), lengths).tolist()
    assert rows["action"].ravel().tolist() == list(range(2 * count))


ONE_EACH = [*itertools.pairwise(ENDS)]
LAYOUTS: dict[str, tuple[list[tuple[int, int]], list[int] | None]] = {
    "one too late": (ONE_EACH, [1, 2, 3, 4, 5]),
    "one too early": (ONE_EACH, [0, 0, 1, 2, 3]),
    "never counted": (ONE_EACH, [0] * 5),
    "another chunk": (ONE_EACH, [1000, 1001, 1002, 1003, 1004]),
    "no column": (ONE_EACH, None),
    "backwards": (ONE_EACH, [4, 3, 2, 1, 0]),
    "an episode in two files, the last one named": ([(0, 8), (8, 20), (20, 30)], [0, 1, 1, 2, 2]),
    "an episode in two files, the first one named": ([(0, 8), (8, 20), (20, 30)], [0, 0, 1, 1, 2]),
    "an episode in three files": ([(0, 12), (12, 14), (14, 30)], [0, 0, 1, 2, 2]),
    "a file without rows": ([(0, 8), (8, 8), (8, 30)], [0, 1, 1, 1, 1]),
}


@pytest.mark.parametrize("statistics", [True, False])
@pytest.mark.parametrize("name", LAYOUTS)
def test_rows_are_found_in_the_files_that_the_metadata_does_not_name(name: str, statistics: bool, tmp_path: Path) -> None:
    parts, named = LAYOUTS[name]
    assert_rows(write_rows(plain(tmp_path / "set"), parts, named, write_statistics=statistics))


def add_copy(root: Path, path: str, episode: int) -> None:
    """Appends the rows of an episode to a data file, whose rows are then one row group. The copy has other actions."""
    rows = pa.concat_tables([pq.read_table(each) for each in sorted(root.glob("data/*/*.parquet"))])
    own = rows.filter(pc.equal(rows["episode_index"], episode))
    stale = pa.array([[value + 1000 for value in row] for row in own["action"].to_pylist()], own["action"].type)
    own = own.set_column(own.column_names.index("action"), "action", stale)
    table = pa.concat_tables([pq.read_table(root / path), own])
    pq.write_table(table, root / path, row_group_size=len(table))


def test_rows_of_an_episode_are_not_those_of_a_copy_in_another_file(tmp_path: Path) -> None:
    """The copy is read together with the other episodes of its file, before the episode's own rows or after them."""
    root = write_rows(plain(tmp_path / "set"), [(0, ENDS[3]), (ENDS[3], ENDS[5])], [0, 0, 0, 1, 1], row_group_size=100)
    add_copy(root, file(0), 3)
    dataset = Dataset(root)
    options: dict[str, Any] = {"batch_size": 1, "consumers": 1, "episode_pool_size": 2, "device": "cpu"}
    for seed in range(20):
        with Loader(dataset, seed=seed, **options) as loader:
            for batch in loader:
                assert batch["action"][0].tolist() == [2 * int(batch["index"]), 2 * int(batch["index"]) + 1]


def test_two_copies_of_an_episode_in_a_row_group_are_an_error(tmp_path: Path) -> None:
    root = write_rows(plain(tmp_path / "set"), [(0, ENDS[5])], [0] * 5, row_group_size=100)
    add_copy(root, file(0), 1)
    with pytest.raises(DatasetError, match=rf"Invalid episode 1 in {re.escape(str(root / file(0)))}: must have 4 rows.* got 8"):
        delivered(root)


@given(st.data())
@examples(25)
def test_any_cuts_and_any_names(tmp_path_factory: pytest.TempPathFactory, draw: st.DataObject) -> None:
    lengths = draw.draw(st.lists(st.integers(1, 9), min_size=1, max_size=6))
    total = sum(lengths)
    cuts = [0, *sorted(draw.draw(st.lists(st.integers(0, total), max_size=5))), total]
    named = draw.draw(st.lists(st.integers(0, 6), min_size=len(lengths), max_size=len(lengths)))
    root = plain(tmp_path_factory.mktemp("cut") / "set", lengths)
    size = draw.draw(st.integers(1, 9))
    write_rows(root, [*itertools.pairwise(cuts)], named, row_group_size=size)
    assert_rows(root, lengths)


@pytest.mark.parametrize(
    ("name", "found"), [("one too late", "in {}"), ("an episode in two files, the last one named", "in {} and {}")]
)
def test_a_search_is_a_warning_once(name: str, found: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert_rows(write_rows(plain(tmp_path / "set"), *LAYOUTS[name]))
    [said] = [record.getMessage() for record in caplog.records]
    assert f"{file(1)}: the metadata names this file for episode {int('two' in name)}, whose rows are" in said
    assert f"rows are {found.format(file(0), file(1))}. " in said


def test_files_out_of_order_are_found_on_a_disk(tmp_path: Path) -> None:
    order = [2, 0, 4, 1, 3]
    root = write_rows(plain(tmp_path / "set"), [ONE_EACH[episode] for episode in order], [0] * 5)
    with Server(root) as server, pytest.raises(DatasetError, match="again to a local folder, where all files are searched"):
        assert_rows(server.url)
    assert_rows(root)


def test_an_episode_whose_rows_are_apart_in_one_file(tmp_path: Path) -> None:
    root = plain(tmp_path / "set")
    rows = pq.read_table(root / ROWS)
    pq.write_table(rows.take([*range(3), *range(6, 30), *range(3, 6)]), root / ROWS, row_group_size=4)
    assert_rows(root)


def test_missing_or_repeated_rows_are_an_error(tmp_path: Path) -> None:
    fewer = write_rows(plain(tmp_path / "fewer"), [(0, 8), (9, 20), (20, 30)], [0, 0, 1, 1, 2])
    more = write_rows(plain(tmp_path / "more"), [(0, 8), (7, 20), (20, 30)], [0, 0, 1, 1, 2])
    for root, count in ((fewer, 3), (more, 5)):
        assert delivered(Dataset(root, episodes=[0]))["index"].tolist() == list(range(6))
        with pytest.raises(DatasetError, match=f"Invalid episode 1 in .*: must have 4 rows, .* got {count}"):
            delivered(root)


def test_a_missing_file_whose_rows_are_nowhere_is_named(tmp_path: Path) -> None:
    root = write_rows(plain(tmp_path / "set"), ONE_EACH, [0, 1, 2, 3, 4])
    (root / file(2)).unlink()
    with pytest.raises(DatasetError, match=f"{file(2)}: no such file"):
        delivered(root)
    assert delivered(Dataset(root, episodes=[3]))["index"].tolist() == list(range(*ONE_EACH[3]))


def test_hidden_files_and_files_elsewhere_are_no_data_files(tmp_path: Path) -> None:
    root = write_rows(plain(tmp_path / "set"), ONE_EACH, [1, 2, 3, 4, 5])
    for name in ("data/chunk-000/._file-000.parquet", "data/backup.parquet", "data/old/chunk-000/file-000.parquet"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(root / file(0), root / name)
    assert_rows(root)


# ---- over a network


def data_requests(server: Server) -> list[str]:
    return [request.path.strip("/") for request in server.requests if "/data/" in request.path]


def test_rows_where_the_metadata_says_take_no_request_more(tmp_path: Path) -> None:
    root = write_rows(plain(tmp_path / "set"), ONE_EACH, range(5))
    with Server(root) as server:
        assert_rows(server.url)
        requests = Counter(data_requests(server))
    assert {*requests} == {file(episode) for episode in range(5)}
    assert max(requests.values()) <= 3  # its size, its footer and its rows


@pytest.mark.parametrize("name", ["one too late", "one too early", "an episode in two files, the last one named"])
def test_the_neighbours_of_a_file_are_found_on_a_web_server(name: str, tmp_path: Path) -> None:
    parts, named = LAYOUTS[name]
    with Server(write_rows(plain(tmp_path / "set"), parts, named)) as server:
        assert_rows(server.url)


def test_the_bytes_of_an_episode_in_two_files_count_once(tmp_path: Path) -> None:
    parts, named = LAYOUTS["an episode in two files, the first one named"]
    with Server(write_rows(plain(tmp_path / "set"), parts, named)) as server:
        reader = RowReader(Dataset(server.url))
        sizes: list[int] = []
        reader.read(1, sizes.append)
        sent = sum(request.sent for request in server.requests if "/data/" in request.path)
    [size] = sizes
    assert 0 < size < sent


def pairs(root: Path, named: Sequence[int]) -> Path:
    """A dataset of four files with two episodes of six rows each."""
    return write_rows(plain(root, [6] * 8), [(at, at + 12) for at in range(0, 48, 12)], named, row_group_size=6)


def test_the_footers_of_the_files_that_were_used_last_are_kept(tmp_path: Path) -> None:
    with Server(pairs(tmp_path / "set", [0, 0, 1, 1, 2, 2, 3, 3])) as server:
        reader = RowReader(Dataset(server.url), memory=RowMemory(files=2))
        requests = []
        for number in (1, 2, 1, 3, 3, 1, 2):
            server.requests.clear()
            assert reader.read(2 * number)["index"].tolist() == list(range(12 * number, 12 * number + 6))
            requests.append(len(server.requests))
    assert requests == [3, 3, 1, 3, 1, 1, 2]  # for the size of a file at first, for its footer, and for the rows


def test_a_file_without_the_rows_of_an_episode_is_not_read_for_the_next_one(tmp_path: Path) -> None:
    with Server(pairs(tmp_path / "set", [1, 1, 2, 2, 3, 3, 4, 4])) as server:
        reader = RowReader(Dataset(server.url))
        for episode, files in ((0, {file(0), file(1)}), (1, {file(0)})):
            server.requests.clear()
            assert reader.read(episode)["index"].tolist() == list(range(6 * episode, 6 * episode + 6))
            assert {*data_requests(server)} == files


@pytest.fixture(scope="module")
def many_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of 300 data files, none of which the metadata names."""
    root = plain(tmp_path_factory.mktemp("many") / "set", [2] * 300)
    return write_rows(root, [(2 * e, 2 * e + 2) for e in range(300)], None)


@pytest.fixture
def many_remote(many_files: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Hub, str]]:
    """The same on the Hub, and its address."""
    with Hub({"datasets/owner/robot": many_files}) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        yield hub, "hf://datasets/owner/robot"


def test_a_search_among_many_remote_files_reads_few_footers(many_remote: tuple[Hub, str]) -> None:
    hub, address = many_remote
    made = []
    for episodes in ([250], [250, 251]):
        hub.cdn.requests.clear()
        dataset = Dataset(address, episodes=episodes)
        assert len({*data_requests(hub.cdn)}) <= 1  # the first file, whose columns tell which features can be read
        assert delivered(dataset, batch_size=2)["index"].tolist() == list(range(500, 500 + 2 * len(episodes)))
        made.append(data_requests(hub.cdn))
    assert len({*made[0]}) <= 12
    assert len(made[1]) - len(made[0]) <= 6  # what is known of the files narrows the search


def test_a_loader_reads_what_it_has_to_search(many_remote: tuple[Hub, str]) -> None:
    dataset = Dataset(many_remote[1], episodes=[3, 70, 71, 205, 299])
    with Loader(dataset, batch_size=5, consumers=1) as loader:
        seen = [value for batch in loader for value in batch["index"].tolist()]
    assert sorted(seen) == [6, 7, 140, 141, 142, 143, 410, 411, 598, 599]


def test_row_groups_out_of_order_take_few_requests(tmp_path: Path) -> None:
    """The file has 400 groups. Without statistics in the footer, one request reads the episode indices of many groups."""
    lengths = [5] * 400
    for statistics, most in ((True, 5), (False, 12)):
        root = plain(tmp_path / f"set {statistics}", lengths)
        rows = pq.read_table(root / ROWS)
        turned = pa.concat_tables([rows.slice(1000), rows.slice(0, 1000)])
        pq.write_table(turned, root / ROWS, row_group_size=5, write_statistics=statistics)
        with Server(root) as server:
            dataset = Dataset(server.url, episodes=[100])
            server.requests.clear()
            assert delivered(dataset)["index"].tolist() == list(range(500, 505))
            assert len(data_requests(server)) <= most, data_requests(server)


# ---- frames, tools


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two episodes in one video file. Their rows are in two files, and the metadata names a third one."""
    folder = tmp_path_factory.mktemp("recording")
    root = data.write_dataset(folder / "set", [data.encode(data.draw(), folder / "a.mp4", data.av1(2))])
    return write_rows(root, [(0, 40), (40, data.FRAMES)], [1, 2])


def test_the_frames_are_those_of_the_rows(recording: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    prepared(recording, tmp_path / "out")
    for root, is_searched in ((recording, True), (tmp_path / "out", False)):
        caplog.clear()
        with data.loader(root, batch_size=12) as loader:
            seen = [(episode, frame, data.identities(picture[None])[0]) for episode, frame, picture in data.samples(loader)]
        assert sorted(seen) == [
            (episode, frame, data.identity(31 * episode + frame))
            for episode, n in enumerate(data.EPISODES)
            for frame in range(n)
        ]
        assert ("the metadata names this file" in caplog.text) == is_searched


@pytest.mark.parametrize("name", LAYOUTS)
def test_prepare_writes_metadata_that_names_the_right_files(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prepared(write_rows(plain(tmp_path / "set"), *LAYOUTS[name]), tmp_path / "out")
    caplog.clear()
    assert_rows(tmp_path / "out")
    assert "the metadata names this file" not in caplog.text


def test_doctor_calls_rows_whole_only_if_it_has_found_them(recording: Path, tmp_path: Path) -> None:
    findings = looked_at(recording)
    assert findings["files"].status == "warning"
    assert f"1 of 3 files missing: {file(2)}. The rows of their episodes are in other files" in findings["files"].text
    assert findings["rows"].status == "warning"
    assert re.search(
        f"2 checked episodes of 2, but not in the files that the metadata names, such as {file(1)}", findings["rows"].text
    )
    assert "dali-stream prepare URI OUT" in findings["rows"].remedy
    prepared(recording, tmp_path / "out")
    assert {looked_at(tmp_path / "out")[name].status for name in ("files", "rows")} == {"ok"}
    lost = Path(shutil.copytree(recording, tmp_path / "lost"))
    (lost / file(1)).unlink()
    findings = looked_at(lost)
    assert {findings[name].status for name in ("files", "rows")} == {"problem"}
    assert "Invalid episode 1 in " in findings["rows"].text
    assert "must have 41 rows, as the metadata says, got 9" in findings["rows"].text


# ---- columns of the metadata


def test_columns_that_nothing_needs_may_be_missing(recording: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(recording, tmp_path / "set"))
    unused = ["dataset_from_index", "dataset_to_index", f"videos/{data.CAMERA}/to_timestamp"]
    change_episodes(root, lambda table: table.drop_columns([*unused, "data/file_index", "data/chunk_index"]))
    with data.loader(recording, batch_size=12) as whole, data.loader(root, batch_size=12) as fewer:
        for expected, batch in zip(whole, fewer, strict=True):
            assert torch.equal(expected[data.CAMERA], batch[data.CAMERA])
            assert torch.equal(expected["index"], batch["index"])


# ---- files of the episode table


@pytest.mark.parametrize(
    "stray",
    [
        "meta/episodes/file-000.parquet",
        "meta/episodes/backup/chunk-000/file-000.parquet",
        "meta/episodes/.ipynb_checkpoints/file-000-checkpoint.parquet",
        "meta/episodes/chunk-000/._file-000.parquet",
        "meta/episodes/chunk-000/.ipynb_checkpoints/file-000-checkpoint.parquet",
    ],
)
def test_files_that_lerobot_does_not_read_are_ignored(stray: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = plain(tmp_path / "set")
    (root / stray).parent.mkdir(parents=True, exist_ok=True)
    (root / stray).write_bytes(b"not Parquet" if "._" in stray else (root / EPISODE_TABLE).read_bytes())
    caplog.set_level("INFO", "dali_stream")
    assert_rows(root)
    is_hidden = "/." in stray and stray.count("/") == 3
    assert (stray in caplog.text) == is_hidden
    prepared(root, tmp_path / "out")
    assert_rows(tmp_path / "out")
    assert Dataset(root).episode_columns(stats=True)["length"].to_pylist() == list(LENGTHS)


def test_two_files_with_the_same_episode_are_both_named(tmp_path: Path) -> None:
    root = plain(tmp_path / "set")
    copy = root / "meta/episodes/backup/file-000.parquet"
    copy.parent.mkdir()
    shutil.copy(root / EPISODE_TABLE, copy)
    with pytest.raises(DatasetError) as caught:
        Dataset(root)
    assert str(copy) in str(caught.value)
    assert f"{EPISODE_TABLE} has it, too" in str(caught.value)
    assert "Move the file that is a copy out of meta/episodes" in str(caught.value)
    copy.parent.rename(root / "backup")  # as the error says
    assert_rows(root)
