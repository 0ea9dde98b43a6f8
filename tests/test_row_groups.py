"""Row groups of a Parquet file: their metadata is kept compressed, and reads the same rows as pyarrow's own."""

from __future__ import annotations

import io
import itertools
import json
import re
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.batches import samples
from support.datasets import ROWS as ROWS_FILE
from support.datasets import Column, build, change_info, read_rows
from support.rows import delivered
from support.servers import Handler, Server
from support.slow import examples

from dali_stream import Dataset, DatasetError, Loader, Mixture
from dali_stream.lerobot.parquet_footer import RowGroups
from dali_stream.lerobot.rows import RowMemory, RowReader, check_rising
from dali_stream.storage.local import LocalStore

ROWS = 6  # of a group
POOLS: list[pa.MemoryPool] = []  # kept, since a pool must outlive what is allocated from it: pyarrow has no reference to it

COLUMNS = {
    "observation.state": lambda n: pa.array([[float(i), -1.0] for i in range(n)], pa.list_(pa.float32())),
    "action": lambda n: pa.FixedSizeListArray.from_arrays(pa.array(np.arange(n * 2, dtype=np.float32)), 2),
    "index": lambda n: pa.array(np.arange(n)),
    "text": lambda n: pa.array([f"row {i}" if i % 3 else None for i in range(n)]),
    "image": lambda n: pa.array([{"bytes": bytes([i % 256]) * 40, "path": "a.png"} for i in range(n)]),
    "done": lambda n: pa.array([i % 5 == 0 for i in range(n)]),
    "mapped": lambda n: pa.array([[("a", i)] for i in range(n)], pa.map_(pa.string(), pa.int32())),
}
WRITTEN = st.fixed_dictionaries(
    {
        "compression": st.sampled_from(["none", "snappy", "gzip", "zstd", "lz4", "brotli"]),
        "use_dictionary": st.booleans(),
        "write_statistics": st.booleans(),
        "write_page_index": st.booleans(),
        "write_page_checksum": st.booleans(),
        "store_schema": st.booleans(),
        "data_page_size": st.sampled_from([16, 1 << 20]),
        "data_page_version": st.sampled_from(["1.0", "2.0"]),
        "version": st.sampled_from(["1.0", "2.6"]),
    }
)


def file_of(table: pa.Table, **written: Any) -> tuple[bytes, bytes]:
    """A Parquet file with groups of `ROWS` rows, and its footer."""
    out = io.BytesIO()
    pq.write_table(table, out, row_group_size=ROWS, **written)
    data = out.getvalue()
    return data, data[-8 - int.from_bytes(data[-8:-4], "little") : -8]


def numbers(groups: int) -> pa.Table:
    return pa.table({"index": np.arange(groups * ROWS), "value": np.linspace(0, 1, groups * ROWS)})


def rows(data: bytes, groups: RowGroups, wanted: list[int]) -> pa.Table:
    metadata, found = groups.metadata(wanted)
    return pq.ParquetFile(pa.BufferReader(data), metadata=metadata).read_row_groups(found)


@pytest.mark.slow
@given(
    st.lists(st.sampled_from([*COLUMNS]), min_size=1, unique=True),
    st.integers(0, 20),
    st.integers(9, 40),
    st.dictionaries(st.text(max_size=5), st.text(max_size=30), max_size=3),
    WRITTEN,
    st.data(),
)
@examples(100)
def test_rows_are_those_that_pyarrow_reads(
    names: list[str], more: int, count: int, pairs: dict[str, str], written: dict[str, Any], data: st.DataObject
) -> None:
    n = count * ROWS - 2
    table = pa.table({name: COLUMNS[name](n) for name in names} | {f"number {i}": np.arange(n) for i in range(more)})
    file, footer = file_of(table.replace_schema_metadata(pairs), **written)
    whole = pq.ParquetFile(pa.BufferReader(file))
    groups = RowGroups(footer)
    assert groups.rows.tolist() == [ROWS] * (count - 1) + [ROWS - 2]
    assert groups.nbytes < len(footer)  # it was cut
    wanted = sorted(data.draw(st.sets(st.integers(0, count - 1), min_size=1)))
    read = rows(file, groups, wanted)
    assert read.equals(whole.read_row_groups(wanted), check_metadata=True)
    metadata, found = groups.metadata(wanted)
    for place, group in zip(found, wanted, strict=True):
        assert metadata.row_group(place).equals(whole.metadata.row_group(group))


def test_what_looks_like_the_beginning_of_a_group_in_its_statistics_does_no_harm() -> None:
    _, footer = file_of(numbers(20))
    first = footer.index(b"\x19\x2c\x26")
    beginning = footer[first : footer.index(b"index", first) + 5]
    table = pa.table({"index": np.arange(20 * ROWS), "value": pa.array([beginning + bytes([i]) for i in range(20 * ROWS)])})
    file, footer = file_of(table)
    assert footer.count(beginning) > 20
    groups = RowGroups(footer)
    for group in range(20):
        assert rows(file, groups, [group]).equals(table.slice(group * ROWS, ROWS))


@pytest.mark.parametrize(
    "change",
    [
        lambda footer: footer + b"\0",  # such as a signature after it
        lambda footer: footer[:-1] + b"\x1c\x00\x00",  # a field that newer versions have
        lambda footer: b"",
    ],
)
def test_a_footer_of_another_form_is_left_to_pyarrow(change: Any) -> None:
    table = numbers(20)
    file, footer = file_of(table)
    changed = change(footer)
    metadata = None if changed else pq.read_metadata(pa.BufferReader(file))
    groups = RowGroups(changed, metadata)
    assert groups.metadata([3]) == (groups.sample, [3])
    assert groups.sample.num_row_groups == 20
    assert rows(file, groups, [3, 7]).equals(pa.concat_tables([table.slice(3 * ROWS, ROWS), table.slice(7 * ROWS, ROWS)]))


def test_row_groups_take_little_memory() -> None:
    file, footer = file_of(numbers(5000))
    groups = RowGroups(footer)
    assert groups.nbytes < len(footer) / 2
    assert rows(file, groups, [4321])["index"].to_pylist() == list(range(4321 * ROWS, 4322 * ROWS))


@pytest.fixture
def shared_group(tmp_path: Path) -> Path:
    """A dataset whose data file has one row group with all episodes, as LeRobot's converter writes it."""
    action = Column("float32", [2], np.arange(48).reshape(-1, 2))
    return build(tmp_path / "set", [5, 7, 3, 9], {"action": action}, rows_per_group=24)


@pytest.fixture
def many_groups(tmp_path: Path) -> Path:
    """A dataset of 40 episodes of 5 rows, four to a row group."""
    return build(tmp_path / "set", [5] * 40, {"action": Column("float32", [2], np.zeros((200, 2)))}, rows_per_group=20)


def data_spans(server: Server) -> list[tuple[int, int]]:
    """The byte ranges of rows that were asked for in the only data file, in rising order."""
    stop = len(server.content(ROWS_FILE)) - 8  # type: ignore[arg-type]
    footer = stop - int.from_bytes(server.part(ROWS_FILE, stop, stop + 4), "little")
    asked = [request.range for request in server.requests if request.path == f"/{ROWS_FILE}" and request.range]
    spans = [tuple(map(int, each.removeprefix("bytes=").split("-"))) for each in asked]
    return sorted((start, last + 1) for start, last in spans if start and last < footer)


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("name", ["shared_group", "many_groups"])
def test_each_row_group_is_read_once_and_by_itself(name: str, shuffle: bool, request: pytest.FixtureRequest) -> None:
    """For all of its episodes, in two epochs. Its bytes count once among those that batches need."""
    root = request.getfixturevalue(name)
    footer = pq.read_metadata(root / ROWS_FILE)
    groups = [footer.row_group(number) for number in range(footer.num_row_groups)]
    sizes = [sum(group.column(i).total_compressed_size for i in range(group.num_columns)) for group in groups]
    expected = read_rows(root)
    with Server(root) as server, Loader(server.url, batch_size=4, shuffle=shuffle, consumers=2) as loader:
        for _ in range(2):
            seen = []
            for batch in loader:
                np.testing.assert_array_equal(batch["action"].numpy(), expected["action"][batch["index"].numpy()].tolist())
                seen += batch["index"].tolist()
            assert sorted(seen) == list(range(len(expected["index"])))
        spans = data_spans(server)
        needed = loader.stats()["needed_bytes"]
    assert all(first[1] <= second[0] for first, second in itertools.pairwise(spans)), "bytes came twice"
    assert len(spans) == len(groups)
    assert max(stop - start for start, stop in spans) <= max(sizes)
    assert 0 < needed <= sum(stop - start for start, stop in spans)


@pytest.mark.parametrize(
    ("episodes", "at_once", "kept", "is_kept", "warnings"),
    [(1, 1 << 20, 1 << 20, False, 0), (2, 1 << 20, 1 << 20, True, 0), (2, 1 << 20, 1000, True, 0), (3, 1000, 1000, False, 1)],
)
def test_a_row_group_is_kept_if_it_fits_and_has_other_episodes(
    tmp_path: Path, episodes: int, at_once: int, kept: int, is_kept: bool, warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    """If it is kept, it is not read again for its other episodes."""
    memory = RowMemory(at_once, kept)
    action = Column("float32", [90], np.zeros((30, 90)))
    with Server(build(tmp_path / "set", [5] * 6, {"action": action}, rows_per_group=5 * episodes)) as server:
        reader = RowReader(Dataset(server.url), memory=memory)
        assert reader.read(0)["index"].tolist() == list(range(5))
        assert (memory.nbytes > 1000) == is_kept
        before, last = len(server.requests), episodes - 1
        assert reader.beside(0) == list(range(1, episodes)) * is_kept
        assert (reader.read_kept(last) is not None) == is_kept
        assert len(server.requests) == before
        assert reader.read(last)["index"].tolist() == list(range(5 * last, 5 * last + 5))
        assert (len(server.requests) == before) == is_kept
    assert sum("so it is read again for each of its episodes" in record.getMessage() for record in caplog.records) == warnings


@pytest.fixture
def wide_groups(tmp_path: Path) -> Path:
    """A dataset of five row groups that take 40 KB each, with two episodes in each of them."""
    return build(tmp_path / "set", [5] * 10, {"wide": Column("float32", [1000], np.zeros((50, 1000)))}, rows_per_group=10)


def test_the_row_groups_that_were_used_last_are_kept(wide_groups: Path) -> None:
    """The memory holds two row groups, including a row group that is being read."""
    memory, kept = RowMemory(100_000, 100_000), []

    def note(handler: Handler, data: bytes, fields: dict[str, str]) -> None:
        kept.append(memory.nbytes)
        handler.reply(206, data, fields)

    with Server(wide_groups) as server:
        reader = RowReader(Dataset(server.url), memory=memory)
        for episode, is_read in ((0, True), (2, True), (1, False), (4, True), (5, False), (0, False), (3, True), (1, False)):
            server.set_faults([note])
            before = len(server.requests)
            reader.read(episode)
            assert (len(server.requests) > before) == is_read
            assert 40_000 < memory.nbytes <= 100_000
    assert max(kept) < 60_000


def test_the_rows_of_an_episode_do_not_keep_its_row_group_in_memory(wide_groups: Path) -> None:
    reader = RowReader(Dataset(wide_groups), memory=RowMemory(1000, 1000))
    before = pa.total_allocated_bytes()
    rows = reader.read(3)
    assert rows["wide"].shape == (5, 1000)
    assert pa.total_allocated_bytes() == before


def test_as_many_row_groups_are_read_at_a_time_as_fit(wide_groups: Path) -> None:
    """The memory holds two row groups. The server sends every other one only after a request for the next one."""
    changed, requested, reading, counts = threading.Condition(), list[str](), set[str](), list[int]()

    def answer(handler: Handler, data: bytes, fields: dict[str, str]) -> None:
        span = handler.headers["Range"]
        with changed:
            requested.extend({span} - {*requested})
            reading.add(span)
            counts.append(len(reading))
            changed.notify_all()
            number = requested.index(span)
            is_answered = changed.wait_for(lambda: number % 2 or len(requested) > number + 1, 30)
            reading.discard(span)
        if not is_answered:
            return handler.reply(403, b"")
        return handler.reply(206, data, fields)

    with Server(wide_groups) as server, ThreadPoolExecutor(4) as pool:
        reader = RowReader(Dataset(server.url), memory=RowMemory(100_000, 100_000))
        server.set_faults([answer] * 99)
        assert [rows["episode_index"][0] for rows in pool.map(reader.read, [2, 4, 6, 8])] == [2, 4, 6, 8]
    assert max(counts) == 2


def test_only_the_selected_episodes_of_a_row_group_are_delivered(many_groups: Path) -> None:
    """All have the same length, so each could pass for another."""
    for selected in ([0, 2], [1, 2, 39], [3]):
        rows = delivered(Dataset(many_groups, episodes=selected))
        assert rows["index"].tolist() == [5 * episode + frame for episode in selected for frame in range(5)]
        assert rows["episode_index"].tolist() == np.repeat(selected, 5).tolist()


def test_an_episode_over_several_row_groups_is_read_once(tmp_path: Path) -> None:
    wide = Column("float32", [2500], np.random.default_rng(0).random((9, 2500)))
    root = build(tmp_path / "set", [3, 6], {"action": wide}, rows_per_group=4)
    size, group = (root / ROWS_FILE).stat().st_size, pq.read_metadata(root / ROWS_FILE).row_group(0).total_byte_size
    with Server(root) as server:
        assert delivered(Dataset(server.url, episodes=[1]))["action"].shape == (6, 2500)
        sent = sum(request.sent for request in server.requests if request.path == f"/{ROWS_FILE}")
    assert sent < (1 << 16) + size + group / 2


def test_a_file_of_an_episode_is_read_once(tmp_path: Path) -> None:
    root = build(tmp_path / "set", [3] * 4, {"action": Column("float32", [2], np.zeros((12, 2)))}, version="v2.1")
    with Server(root) as server, Loader(server.url, batch_size=3, consumers=1) as loader:
        assert all(sorted(samples(loader)) == list(range(12)) for _ in range(2))
        requests = Counter(request.path for request in server.requests if request.path.endswith(".parquet"))
    assert [*requests.values()] == [1] * 4


def test_an_episode_with_more_rows_than_promised_is_refused(shared_group: Path) -> None:
    table = pq.read_table(shared_group / ROWS_FILE)
    episodes = table["episode_index"].to_numpy().copy()
    episodes[15] = 2
    at = table.column_names.index("episode_index")
    pq.write_table(table.set_column(at, "episode_index", pa.array(episodes)), shared_group / ROWS_FILE, row_group_size=24)
    assert delivered(Dataset(shared_group, episodes=[1]))["index"].tolist() == list(range(5, 12))
    for episode, promised, held in ((2, 3, 4), (3, 9, 8)):
        with pytest.raises(DatasetError, match=f"Invalid episode {episode} in .*: must have {promised} rows, .*, got {held}"):
            delivered(Dataset(shared_group, episodes=[episode]))


@pytest.mark.parametrize(
    ("seconds", "row"),
    [
        ([-5.0], None), ([0.0, 0.1, 0.3], None), ([-np.inf, 0.0], 0), ([np.nan], 0), ([np.nan, 1.0], 0),
        ([0.0, 0.0], 1), ([0.0, 0.1, np.nan, 0.3], 2), ([0.0, 0.2, 0.1, 0.1], 2),
    ],
)  # fmt: skip
def test_the_first_timestamp_that_does_not_rise_is_named(seconds: list[float], row: int | None) -> None:
    if row is None:
        check_rising("here", np.array(seconds))
    else:
        with pytest.raises(DatasetError, match=f"Invalid timestamp of row {row} in here: must be (greater than|a finite)"):
            check_rising("here", np.array(seconds))


@pytest.fixture
def own_groups(tmp_path: Path) -> Path:
    """A dataset of 12 episodes, each with its own row group, as LeRobot records it."""
    values = np.random.default_rng(0).random((78, 3))
    return build(tmp_path / "set", range(1, 13), {"action": Column("float32", [3], values)})


def assert_alone(root: Path, broken: int, said: str) -> None:
    """Only one episode is an error, although row groups of several episodes are read with one call."""
    first, count = broken * (broken + 1) // 2, 78
    with Loader(root, batch_size=1, shuffle=False, device="cpu") as loader:
        epoch = iter(loader)
        assert samples(itertools.islice(epoch, first)) == list(range(first))
        with pytest.raises(DatasetError, match=said):
            next(epoch)
    others = Dataset(root, episodes=[episode for episode in range(12) if episode != broken])
    assert delivered(others, batch_size=16)["index"].tolist() == [*range(first), *range(first + broken + 1, count)]


@pytest.fixture
def spans(own_groups: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The row groups in which each read of rows begins and ends."""
    spans: list[list[int]] = []
    read, footer = LocalStore.read, pq.read_metadata(own_groups / ROWS_FILE)
    groups = [footer.row_group(number) for number in range(footer.num_row_groups)]
    ends = np.cumsum([4, *(sum(group.column(i).total_compressed_size for i in range(group.num_columns)) for group in groups)])

    def note(store: LocalStore, path: str, start: int, stop: int) -> bytes:
        if path == ROWS_FILE and stop <= ends[-1]:
            spans.append([int(ends.searchsorted(at, "right")) - 1 for at in (start, stop - 1)])
        return read(store, path, start, stop)

    monkeypatch.setattr(LocalStore, "read", note)
    return spans


def test_row_groups_of_the_next_episodes_are_read_together(own_groups: Path, spans: list[list[int]]) -> None:
    expected, rows = read_rows(own_groups), delivered(Dataset(own_groups, episodes=[1, 3, 4]), batch_size=11)
    assert spans == [[1, 4]]
    for key, values in rows.items():
        if key != "task":
            wanted = expected[key][np.isin(expected["episode_index"], [1, 3, 4])]
            np.testing.assert_array_equal(values, np.array(wanted.tolist(), values.dtype), err_msg=key)


def test_row_groups_that_are_read_together_fit_in_the_memory(own_groups: Path, spans: list[list[int]]) -> None:
    footer = pq.read_metadata(own_groups / ROWS_FILE)
    two = sum(footer.row_group(number).total_byte_size for number in (1, 3))
    reader = RowReader(Dataset(own_groups), memory=RowMemory(two))
    reader.expect([1, 3, 4])
    assert [reader.read(episode)["episode_index"][0] for episode in (1, 3, 4)] == [1, 3, 4]
    assert spans == [[1, 3], [4, 4]]


def test_a_broken_row_group_is_an_error_of_its_episode_only(own_groups: Path) -> None:
    data = bytearray((own_groups / ROWS_FILE).read_bytes())
    column = pq.read_metadata(own_groups / ROWS_FILE).row_group(4).column(0)
    start = column.dictionary_page_offset or column.data_page_offset
    data[start : start + column.total_compressed_size] = bytes(column.total_compressed_size)
    (own_groups / ROWS_FILE).write_bytes(data)
    assert_alone(own_groups, 4, "Invalid Parquet file")


@pytest.mark.parametrize(("name", "values"), [("frame_index", [None, 2]), ("action", [[0.0, 1.0]] * 2), ("index", [None, 1])])
def test_broken_values_are_an_error_of_their_episode_only(own_groups: Path, name: str, values: list[Any]) -> None:
    table = pq.read_table(own_groups / ROWS_FILE)
    column = table[name].cast(pa.list_(pa.float32())) if name == "action" else table[name]
    replaced = pa.chunked_array([column[:1].combine_chunks(), pa.array(values, column.type), column[3:].combine_chunks()])
    broken = table.set_column(table.column_names.index(name), name, replaced)
    with pq.ParquetWriter(own_groups / ROWS_FILE, broken.schema) as file:
        for episode in range(12):
            file.write_table(broken.slice(episode * (episode + 1) // 2, episode + 1))
    assert_alone(own_groups, 1, f"episode 1: {name}|{name} in .*episode 1")


@pytest.fixture(scope="module")
def many_megabytes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """38 row groups of 8 MB with 800 episodes of one row each, in a file of a few MB."""
    root = build(tmp_path_factory.mktemp("large") / "set", [1] * 30_000, {}, rows_per_group=100)
    rows = pq.read_table(root / ROWS_FILE)
    wide = pa.FixedSizeListArray.from_arrays(pa.array(np.zeros(100 * 2500, np.float32)), 2500)
    rows = rows.append_column("wide", pa.chunked_array([wide] * 300))
    pq.write_table(rows, root / ROWS_FILE, row_group_size=800, compression="zstd")
    feature = {"wide": {"dtype": "float32", "shape": [2500], "names": None}}
    change_info(root, features=json.loads((root / "meta/info.json").read_text())["features"] | feature)
    return root


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["local", "remote", "mixture"])
def test_row_groups_take_little_memory_beside_the_budget(many_megabytes: Path, kind: str) -> None:
    """A batch needs rows of nearly all row groups. 128 MiB of them are kept, and no more are read than fit."""
    pool, before = pa.proxy_memory_pool(pa.default_memory_pool()), pa.default_memory_pool()
    POOLS.append(pool)
    pa.set_memory_pool(pool)
    try:
        with Server(many_megabytes) as server:
            uri = str(many_megabytes) if kind == "local" else server.url
            source = Mixture({"a": uri, "b": uri}) if kind == "mixture" else Dataset(uri)
            with Loader(source, batch_size=600, shuffle="global", memory_budget="32MiB", device="cpu", prefetch=1) as loader:
                batch = next(iter(loader))
                assert len(set((batch["index"] // 800).tolist())) > 30
                assert loader.stats()["resident_bytes"] <= 32 << 20
        assert pool.max_memory() <= (128 + 32) << 20
    finally:
        pa.set_memory_pool(before)


@pytest.mark.slow
def test_a_row_group_that_is_too_large_to_be_kept_is_read_again_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = build(tmp_path / "set", [5000] * 3, {}, rows_per_group=15_000)
    values = np.zeros(15_000 * 2500, np.float32)
    values[: len(values) // 6] = np.random.default_rng(0).random(len(values) // 6, np.float32)
    rows = pq.read_table(root / ROWS_FILE)
    rows = rows.append_column("wide", pa.FixedSizeListArray.from_arrays(pa.array(values), 2500))
    pq.write_table(rows, root / ROWS_FILE, row_group_size=15_000, compression="zstd", use_dictionary=False)
    feature = {"wide": {"dtype": "float32", "shape": [2500], "names": None}}
    change_info(root, features=json.loads((root / "meta/info.json").read_text())["features"] | feature)
    with Loader(root, batch_size=3000, shuffle=False, memory_budget="120MiB", device="cpu", prefetch=1) as loader:
        for batch in loader:
            expected = values.reshape(15_000, 2500)[batch["index"].numpy()]
            np.testing.assert_array_equal(batch["wide"].numpy(), expected)
    [said] = [record.getMessage() for record in caplog.records if "row group" in record.getMessage()]
    assert re.search(r"file-000\.parquet: a row group has 15\d{7} bytes, and memory_budget leaves \d{9} for rows, so it", said)


@pytest.mark.parametrize(
    "damage",
    [
        b"\x16" + b"\xff" * 300_000 + b"\0",  # a number of 300,001 bytes
        b"\x19\xf1" + b"\xff\xff\xff\xff\xff\x7f",  # a list of 2^41 truth values
        b"\x1c" * 3000 + b"\0" * 3000,  # structures in structures
    ],
)
def test_a_damaged_footer_is_left_to_pyarrow_at_once(damage: bytes) -> None:
    _, footer = file_of(numbers(20))
    with pytest.raises((OSError, ValueError)):
        RowGroups(footer[:-1] + damage + b"\0")


def test_negative_numbers_of_rows_are_not_cut() -> None:
    _, footer = file_of(numbers(20))
    changed = footer.replace(b"\x16\x0c\x26", b"\x16\x0b\x26")  # 6 rows, as a variable-length integer: -6
    assert changed != footer
    assert RowGroups(changed).rows.min() == -6
