"""Row groups of a Parquet file: their metadata is kept compressed, and reads the same rows as pyarrow's own."""

from __future__ import annotations

import io
import queue
import re
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.datasets import Column, build
from support.opened import open_episodes
from support.slow import examples

from dali_stream import Dataset, DatasetError
from dali_stream.lerobot.row_file import RowFile
from dali_stream.lerobot.row_groups import RowGroups
from dali_stream.lerobot.row_memory import RowMemory
from dali_stream.lerobot.rows import RowReader, check_rising
from dali_stream.order.order import Order
from dali_stream.schedule.opening import Opening, Storage
from dali_stream.schedule.samples import Samples
from dali_stream.storage import LocalStore

ROWS = 6  # of a group

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
        lambda footer: footer + b"\0",  # such as a signature behind it
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


class CountingStore(LocalStore):
    """A store that counts the bytes that are read of data files, and lists the files whose footers are read."""

    rows_read = 0

    def __init__(self, root: Path) -> None:
        super().__init__(str(root))
        self.footers: list[str] = []

    def read(self, path: str, start: int, stop: int) -> bytes:
        data = super().read(path, start, stop)
        if path.startswith("data/"):
            self.rows_read += len(data)
            self.footers += [path] if data.endswith(b"PAR1") else []
        return data


def test_a_row_group_is_decoded_once_for_all_of_its_episodes(shared_group: Path) -> None:
    dataset, store = Dataset(shared_group), CountingStore(shared_group)
    reader = RowReader(dataset, store)
    first = reader.read(2)
    once = store.rows_read
    rows = [reader.read(episode)[episode] for episode in range(4)]
    assert store.rows_read == once
    assert [*first] == [0, 1, 2, 3]  # the others come along with the first read
    assert [*reader.read(1)] == [1]
    assert np.concatenate([each["index"] for each in rows]).tolist() == list(range(24))
    assert np.concatenate([each["action"] for each in rows]).ravel().tolist() == list(range(48))


def test_the_bytes_of_a_row_group_are_counted_once(shared_group: Path) -> None:
    store = CountingStore(shared_group)
    reader = RowReader(Dataset(shared_group), store)
    assert 0 < reader.read(0).release(0).take_bytes() <= store.rows_read
    assert reader.read(1).release(1).take_bytes() == 0


def test_a_row_group_that_does_not_fit_is_read_again(shared_group: Path) -> None:
    dataset, store = Dataset(shared_group), CountingStore(shared_group)
    memory = RowMemory(at_once=100, kept=100)
    reader = RowReader(dataset, store, memory)
    reader.read(0)
    once = store.rows_read
    found = reader.read(1)
    assert (store.rows_read > once, memory.nbytes) == (True, 0)
    again = store.rows_read
    assert reader.read(0)[0]["index"].tolist() == list(range(5))  # while it is referenced, it is there
    assert store.rows_read == again
    assert found.sizes() == {episode: length * dataset.row_bytes for episode, length in enumerate([5, 7, 3, 9])}
    found.release(1)
    assert found[1]["index"].tolist() == list(range(5, 12))
    assert not found.sizes()
    with pytest.raises(KeyError):
        found[0]


def test_a_row_group_that_does_not_fit_is_a_warning_once(shared_group: Path, caplog: pytest.LogCaptureFixture) -> None:
    dataset = Dataset(shared_group)
    reader = RowReader(dataset, memory=RowMemory(at_once=100, kept=99))
    for episode in (0, 1, 2):
        reader.read(episode)
    [said] = [record.getMessage() for record in caplog.records]
    assert re.search(
        r"file-000\.parquet: a row group has \d{3,} bytes, and memory_budget leaves 100 for rows, so it is read", said
    )
    RowReader(dataset, memory=RowMemory(at_once=1 << 20, kept=0)).read(0)
    assert len(caplog.records) == 1


@pytest.mark.parametrize(("reads", "size", "waits"), [(60, 40, False), (60, 41, True), (60, 60, True), (0, 1000, False)])
def test_row_groups_are_read_at_the_same_time_up_to_a_limit(
    reads: int, size: int, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A single one may have more."""
    happened: queue.Queue[str] = queue.Queue()

    class Condition(threading.Condition):
        def wait(self, timeout: float | None = None) -> bool:
            happened.put("waits")
            return super().wait(timeout)

    with monkeypatch.context() as patch:
        patch.setattr(threading, "Condition", Condition)
        memory = RowMemory(at_once=100)

    def read() -> None:
        with memory.turn(size):
            happened.put("reads")

    with memory.turn(reads):
        other = threading.Thread(target=read)
        other.start()
        assert happened.get() == ("waits" if waits else "reads")
    other.join()
    if waits:
        assert happened.get() == "reads"


def test_the_row_group_that_was_read_last_is_kept(shared_group: Path) -> None:
    store = CountingStore(shared_group)
    reader = RowReader(Dataset(shared_group), store, RowMemory(kept=100))
    reader.read(0)
    once = store.rows_read
    assert reader.read(1)[1]["index"][0] == 5
    assert store.rows_read == once


def test_kept_row_groups_stay_within_their_bytes(many_groups: Path) -> None:
    reader = RowReader(Dataset(many_groups), memory=(memory := RowMemory(kept=5000)))
    sizes = []
    for episode in range(40):
        assert reader.read(episode)[episode]["index"][0] == 5 * episode
        sizes.append(memory.nbytes)
    assert 1000 < max(sizes) <= 5000


def test_the_row_groups_that_were_used_last_are_kept(many_groups: Path) -> None:
    store = CountingStore(many_groups)
    reader = RowReader(Dataset(many_groups), store, memory := RowMemory(kept=100))

    def is_read(episode: int) -> bool:
        before = store.rows_read
        reader.read(episode)
        return store.rows_read > before

    assert is_read(0)
    one = memory.nbytes
    assert is_read(4)
    assert memory.nbytes == one  # the last one, although it is larger than what may be kept
    reader = RowReader(Dataset(many_groups), store, memory := RowMemory(kept=3 * one // 2))
    assert [is_read(episode) for episode in (0, 4, 1)] == [True] * 3
    assert memory.nbytes == one
    reader = RowReader(Dataset(many_groups), store, RowMemory(kept=2 * one))
    assert [is_read(episode) for episode in (0, 4, 1, 8)] == [True, True, False, True]
    assert [is_read(episode) for episode in (2, 9, 4)] == [False, False, True]


def test_only_the_selected_episodes_of_a_row_group_are_delivered(many_groups: Path) -> None:
    """All have the same length, so each could pass for another."""
    for selected in ([0, 2], [1, 2, 39], [3]):
        store = CountingStore(many_groups)
        dataset = Dataset(many_groups, episodes=selected)
        reader = RowReader(dataset, store, memory := RowMemory())
        for number, episode in enumerate(selected):
            found = reader.read(number)
            assert found[number]["index"].tolist() == list(range(5 * episode, 5 * episode + 5))
            assert {*found} <= {i for i, each in enumerate(selected) if each // 4 == episode // 4}
        assert (memory.nbytes > 0) == (len(selected) > 1)  # of a single episode, nothing is needed again


def test_each_row_group_is_read_once_and_by_itself(many_groups: Path) -> None:
    store = CountingStore(many_groups)
    reader = RowReader(Dataset(many_groups), store)
    [path] = many_groups.glob("data/*/*.parquet")
    footer = pq.ParquetFile(path).metadata
    groups = [footer.row_group(number) for number in range(footer.num_row_groups)]
    largest = max(sum(group.column(i).total_compressed_size for i in range(group.num_columns)) for group in groups)
    reader.read(39)
    reads = []
    for episode in range(36):
        before = store.rows_read
        reader.read(episode)
        reads.append(store.rows_read - before)
    assert [bool(size) for size in reads] == [episode % 4 == 0 for episode in range(36)]
    assert max(reads) <= largest


def test_an_episode_over_several_row_groups_is_read_once(tmp_path: Path) -> None:
    wide = Column("float32", [2500], np.random.default_rng(0).random((9, 2500)))
    root = build(tmp_path / "set", [3, 6], {"action": wide}, rows_per_group=4)
    store = CountingStore(root)
    [path] = root.glob("data/*/*.parquet")
    assert RowReader(Dataset(root), store).read(1)[1]["action"].shape == (6, 2500)
    footer, group = 1 << 16, pq.ParquetFile(path).metadata.row_group(0).total_byte_size
    assert store.rows_read < footer + path.stat().st_size + group / 2


def test_an_episode_with_more_rows_than_promised_is_refused(shared_group: Path) -> None:
    [path] = shared_group.glob("data/*/*.parquet")
    table = pq.read_table(path)
    episodes = table["episode_index"].to_numpy().copy()
    episodes[15] = 2
    at = table.column_names.index("episode_index")
    pq.write_table(table.set_column(at, "episode_index", pa.array(episodes)), path, row_group_size=24)
    reader = RowReader(Dataset(shared_group))
    assert reader.read(1)[1]["index"].tolist() == list(range(5, 12))
    for episode, promised, held in ((2, 3, 4), (3, 9, 8)):
        with pytest.raises(DatasetError, match=f"Invalid episode {episode} in .*: must have {promised} rows, .*, got {held}"):
            reader.read(episode)


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


class Sized:
    """Stands for decoded row groups of this many bytes."""

    def __init__(self, nbytes: int) -> None:
        self.lengths, self.nbytes = {0: 1, 1: 1}, nbytes


def test_by_default_128_mb_of_decoded_row_groups_are_kept() -> None:
    memory, sizes = RowMemory(), []
    for number in range(4):
        memory.put((number,), Sized(32 << 20 if number else 64 << 20))  # type: ignore[arg-type]
        sizes.append(memory.nbytes >> 20)
    assert sizes == [64, 96, 128, 96]


def test_footers_of_the_files_that_were_used_last_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The dataset has a file for each episode, and has read the footer of the first one when it was opened."""
    monkeypatch.setattr(RowReader, "FILES", 2)
    root = build(tmp_path / "set", [3] * 4, {"action": Column("float32", [2], np.zeros((12, 2)))}, version="v2.1")
    store = CountingStore(root)
    reader = RowReader(Dataset(root), store)
    for episode in (0, 1, 0, 2, 0, 1):
        assert reader.read(episode)[episode]["index"].tolist() == list(range(3 * episode, 3 * episode + 3))
    assert [int(path[-9:-8]) for path in store.footers] == [1, 2, 1]


def test_kept_row_groups_make_room_for_those_that_are_read(many_groups: Path) -> None:
    reader = RowReader(Dataset(many_groups), memory=(memory := RowMemory(at_once=8000, kept=5000)))
    for episode in range(40):
        reader.read(episode)
    assert memory.nbytes > 2000
    for size, left in (3000, 5000), (6000, 2000), (9000, 0):
        with memory.turn(size):
            assert memory.nbytes <= left
    reader.read(0)
    assert memory.nbytes > 0


def test_reads_that_wait_for_their_batch_keep_their_own_rows_only(tmp_path: Path) -> None:
    """A batch of 40 episodes, each in another row group of about 1 MB, which has 10 episodes."""
    wide = Column("float32", [2500], np.zeros((4000, 2500)))
    dataset = Dataset(build(tmp_path / "set", [10] * 400, {"action": wide}, rows_per_group=100))
    order, first = Order(dataset.lengths), np.arange(0, 400, 10)
    batch = Samples(0, 0, order, np.arange(40), episode=first, frame=np.zeros(40, np.int64), padded=0)
    opening = Opening(Storage({}, dataset.lengths, dataset.row_bytes, 0, {}, 1 << 30))
    episodes = open_episodes(opening, dataset, RowMemory(8 << 20, 2 << 20))
    before = pa.total_allocated_bytes()
    episodes.begin([batch])
    taken = pa.total_allocated_bytes() - before
    opened, _ = episodes.finish([batch])
    assert [each.number for each in opened] == first.tolist()
    assert taken < 4 << 20  # what is kept, and the rows of the episodes; all of the row groups are 40 MB


@pytest.fixture
def own_groups(tmp_path: Path) -> Path:
    """A dataset of 12 episodes, each with its own row group, as LeRobot records it."""
    values = np.random.default_rng(0).random((78, 3))
    return build(tmp_path / "set", range(1, 13), {"action": Column("float32", [3], values)})


@pytest.fixture
def groups_read(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The row groups of each call that reads from a file."""
    calls: list[list[int]] = []
    read = RowFile.read

    def note(self: RowFile, groups: Sequence[int]) -> tuple[pa.Table, int]:
        calls.append(list(groups))
        return read(self, groups)

    monkeypatch.setattr(RowFile, "read", note)
    return calls


def assert_alone(reader: RowReader, root: Path, episodes: Sequence[int]) -> None:
    """Check that a reader reads the same rows as one that reads each episode by itself."""
    for episode in episodes:
        found, alone = reader.read(episode), RowReader(Dataset(root)).read(episode)
        assert [*found] == [*alone] == [episode]
        for key, values in alone[episode].items():
            np.testing.assert_array_equal(found[episode][key], values)
            assert found[episode][key].dtype == values.dtype


def test_row_groups_of_the_next_episodes_are_read_together(own_groups: Path, groups_read: list[list[int]]) -> None:
    reader = RowReader(Dataset(own_groups))
    reader.expect([1, 3, 4])
    assert_alone(reader, own_groups, [1, 3, 4])
    assert groups_read == [[1, 3, 4], [1], [3], [4]]
    reader.read(1)  # it is not expected any more
    assert groups_read[4:] == [[1]]


def test_row_groups_that_are_read_together_stay_within_the_limit(own_groups: Path, groups_read: list[list[int]]) -> None:
    size = pq.read_metadata(next(own_groups.glob("data/*/*.parquet"))).row_group(9).total_byte_size
    reader = RowReader(Dataset(own_groups), memory=RowMemory(at_once=5 * size // 2))
    reader.expect([7, 8, 9, 10, 11])
    for episode in (7, 8, 9, 10, 11):
        reader.read(episode).release(episode)
    assert groups_read == [[7, 8], [9, 10], [11]]


def test_row_groups_of_several_episodes_are_not_read_together(many_groups: Path, groups_read: list[list[int]]) -> None:
    reader = RowReader(Dataset(many_groups))
    reader.expect([0, 5, 6])
    for episode in (0, 5, 6):
        reader.read(episode)
    assert groups_read == [[0], [1]]


def test_a_broken_row_group_is_an_error_of_its_episode_only(own_groups: Path) -> None:
    [path] = own_groups.glob("data/*/*.parquet")
    data = bytearray(path.read_bytes())
    column = pq.read_metadata(path).row_group(4).column(0)
    start = column.dictionary_page_offset or column.data_page_offset
    data[start : start + column.total_compressed_size] = bytes(column.total_compressed_size)
    path.write_bytes(data)
    reader = RowReader(Dataset(own_groups))
    reader.expect([2, 4, 5])
    assert_alone(reader, own_groups, [2])
    with pytest.raises(DatasetError, match="Invalid Parquet file"):
        reader.read(4)
    assert_alone(reader, own_groups, [5])


@pytest.mark.parametrize(("name", "values"), [("frame_index", [None, 2]), ("action", [[0.0, 1.0]] * 2), ("index", [None, 1])])
def test_broken_values_are_an_error_of_their_episode_only(own_groups: Path, name: str, values: list[Any]) -> None:
    [path] = own_groups.glob("data/*/*.parquet")
    table = pq.read_table(path)
    column = table[name].cast(pa.list_(pa.float32())) if name == "action" else table[name]
    replaced = pa.chunked_array([column[:1].combine_chunks(), pa.array(values, column.type), column[3:].combine_chunks()])
    broken = table.set_column(table.column_names.index(name), name, replaced)
    with pq.ParquetWriter(path, broken.schema) as file:
        for episode in range(12):
            file.write_table(broken.slice(episode * (episode + 1) // 2, episode + 1))
    reader = RowReader(Dataset(own_groups))
    reader.expect(range(12))
    assert_alone(reader, own_groups, [0])
    with pytest.raises(DatasetError, match=f"episode 1: {name}|{name} in .*episode 1"):
        reader.read(1)
    assert_alone(reader, own_groups, range(2, 12))


@pytest.mark.parametrize(
    "damage",
    [
        b"\x16" + b"\xff" * 300_000 + b"\0",  # a number without end
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
