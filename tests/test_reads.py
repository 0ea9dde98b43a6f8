"""What the schedule reads, keeps and drops, held against a model that only remembers what it was told."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.slow import examples

from dali_stream import MemoryBudgetError
from dali_stream.mp4.blocks import Blocks, cut
from dali_stream.mp4.clip import span
from dali_stream.mp4.index import VideoIndex, video_index
from dali_stream.order import Order
from dali_stream.order.batches import Batches
from dali_stream.schedule.episodes import NONE, EpisodeTable, Located, OpenEpisode, _Rows
from dali_stream.schedule.items import READ, Items
from dali_stream.schedule.opening import Opening, Storage
from dali_stream.schedule.plan import BatchPlan, BatchPlanner, Limits
from dali_stream.schedule.samples import Samples, samples

CAMERA, ROW, TABLE, BATCH = "top", 10, 4, 6
HUGE = 1 << 40


def index_of(path: str, packets: int, gop: int, open_gops: bool, seed: int) -> VideoIndex:
    """An index of a file; with `open_gops`, the first packet after each keyframe is shown before it."""
    random, every = np.random.default_rng(seed), np.arange(packets)
    size = random.integers(50, 400, packets)
    sync = every[::gop]
    pts = every * 10
    if open_gops:
        leading = sync[1:][sync[1:] + 1 < packets]
        pts[leading], pts[leading + 1] = pts[leading + 1].copy(), pts[leading].copy()
    return video_index(
        path, (b"\0\0\0\0hvc1",), b"", 10,
        offset=48 + np.cumsum(size) - size, size=size, pts=pts, keyframes=sync, config=np.zeros(packets, np.int8),
        index_bytes=100,
    )  # fmt: skip


@dataclass
class Run:
    """A made-up remote dataset, walked as a loader does it."""

    lengths: np.ndarray
    room: int = HUGE  # for encoded video
    opened_room: int = HUGE  # for rows and indices
    kept: int = 0
    gop: int = 4
    open_gops: bool = False
    per_file: int = 2
    block: int = 1500
    look_ahead: int = 16
    cached: bool = True
    failing: frozenset[int] = frozenset()
    steps: list[BatchPlan] = field(default_factory=list)
    held: dict[tuple[str, int], int] = field(default_factory=dict)  # rows and indices by their keys: bytes
    blocks: dict[tuple[int, int], int] = field(default_factory=dict)  # (episode, number): bytes
    fetched: dict[tuple[int, int], int] = field(default_factory=dict)  # how often each block was
    closed: int = 0  # number of episodes that were closed

    def __post_init__(self) -> None:
        self.file = np.arange(len(self.lengths)) // self.per_file
        self.start = np.array([self.lengths[:e][self.file[:e] == self.file[e]].sum() for e in range(len(self.lengths))])
        frames = [int(self.lengths[self.file == file].sum()) for file in range(int(self.file.max()) + 1)]
        self.indices = [index_of(str(f), n, self.gop, self.open_gops, f) for f, n in enumerate(frames)]

    def order(self, epoch: int) -> Order:
        return Order(self.lengths, True, 0, epoch, 4, 2)

    def packets(self, episode: int) -> tuple[np.ndarray, np.ndarray]:
        index = self.indices[self.file[episode]]
        packets = index.display_order[self.start[episode] + np.arange(self.lengths[episode])].astype(np.int64)
        return packets, index.decode_starts(packets)

    def go(self, count: int) -> Run:
        batches = samples(self.order, Batches(int(self.lengths.sum()), BATCH, 1, "pad"), 0, 0, 0)
        windows = {CAMERA: np.array([0, 1])}
        opening = Opening(
            Storage(
                {CAMERA: self.file},
                self.lengths,
                ROW,
                TABLE,
                {CAMERA: 0},
                self.opened_room,
                0,
                self.opened_room // 2,
                self.look_ahead,
            )
        )
        limits = Limits(self.kept, 2, 1000, self.block, self.look_ahead)
        planner = BatchPlanner(
            EpisodeTable(self.lengths, [CAMERA], [CAMERA]),
            batches,
            BATCH,
            windows if self.cached else {},
            limits,
            {} if self.cached else windows,
        )
        planner.observe(video_room=self.room)
        for number in range(count):
            reads = opening.request(planner.ahead(1 + opening.horizon(number)))
            self.close(opening, planner)
            for read in reads:
                assert read.key not in self.held, "read although it is there"
                self.held[read.key] = 0
            for read in opening.due():
                if read.key not in self.held:  # evicted by what arrived before it
                    continue
                if number < read.batch and read.number in self.failing:
                    opening.observe(read.key, None)
                    del self.held[read.key]
                    continue
                size = self.indices[read.number].nbytes if read.camera else int(self.lengths[read.number]) * ROW
                opening.observe(read.key, size)
                self.held[read.key] = size if read.camera else size + int(self.lengths[read.number]) * TABLE
                self.close(opening, planner)
            self.open(opening, planner)
            assert sum(opening.items.bytes_by_kind) <= self.opened_room
            step = planner.plan()
            opening.advance()
            self.carry_out(step)
            assert planner.table.is_open(np.array([e for e, _ in self.blocks], np.int64)).all(), "blocks of a closed episode"
            assert planner.video.bytes == sum(self.blocks.values()) <= self.room
            self.check(step)
            self.steps.append(step)
        return self

    def open(self, opening: Opening, planner: BatchPlanner) -> None:
        for episode in opening.ready():
            packet, keyframe = self.packets(episode)
            blocks = cut(self.indices[self.file[episode]], packet, keyframe, self.block)
            planner.observe([OpenEpisode(episode, {CAMERA: Located(packet, keyframe, blocks)})])

    def close(self, opening: Opening, planner: BatchPlanner) -> None:
        for key in opening.items.take_evicted():
            del self.held[key]
            if not key[0] and planner.table.first_row[key[1]] != NONE:
                planner.observe(closed=[key[1]])
                self.closed += 1

    def carry_out(self, step: BatchPlan) -> None:
        for _, episode, number in step.video.evict:
            del self.blocks[episode, number]
        for fetch in step.video.fetch:
            for place, (start, stop) in enumerate(fetch.ranges):
                key = fetch.episode, fetch.first + place
                assert key not in self.blocks, "fetched although it is there"
                self.blocks[key], self.fetched[key] = stop - start, self.fetched.get(key, 0) + 1
            assert all(a[1] == b[0] for a, b in zip(fetch.ranges, fetch.ranges[1:], strict=False))

    def check(self, step: BatchPlan) -> None:
        """All that decoding the batch's frames takes is in memory."""
        for episode in step.samples.episode.tolist():
            assert self.held["", episode]
            assert self.held[CAMERA, int(self.file[episode])]
        needed = {name[1:] for name in step.video.needed}
        there = {key for key in needed if key in self.blocks}
        assert there == needed
        if not self.cached:
            assert (step.packets[CAMERA] >= 0).all()
            return
        planned = step.frames[CAMERA]
        for episode in np.unique(planned.episode).tolist():
            index = self.indices[self.file[episode]]
            blocks = cut(index, *self.packets(episode), self.block)
            spans = [(int(blocks.start[k]), int(blocks.stop[k])) for e, k in there if e == episode]
            for packet in planned.packet[planned.episode == episode].tolist():
                first, last = span(index, packet)
                for needed in range(first, last + 1):
                    at = int(index.offset[needed])
                    assert any(start <= at and at + index.size(needed) <= stop for start, stop in spans)


LENGTHS = st.lists(st.integers(3, 40), min_size=3, max_size=12).map(np.array)


@examples(60)
@given(
    lengths=LENGTHS,
    room=st.sampled_from([14_000, 30_000, 60_000, HUGE]),
    opened_room=st.sampled_from([6_000, 20_000, HUGE]),
    kept=st.sampled_from([0, 20, 10_000]),
    gop=st.sampled_from([1, 2, 7]),
    open_gops=st.booleans(),
    per_file=st.sampled_from([1, 3]),
    cached=st.booleans(),
    failing=st.frozensets(st.integers(0, 11), max_size=3),
)
def test_all_that_a_batch_reads_is_there_and_within_the_room(
    lengths: np.ndarray, room: int, opened_room: int, kept: int, gop: int, open_gops: bool, per_file: int, cached: bool,
    failing: frozenset[int],
) -> None:  # fmt: skip
    run = Run(
        lengths, room, opened_room, kept, gop, open_gops and gop > 2, per_file, block=min(1500, room // 100), cached=cached,
        failing=failing,
    )  # fmt: skip
    batches = -(-int(lengths.sum()) // BATCH)
    try:
        run.go(min(3 * batches, 60))
    except MemoryBudgetError:
        assert room < 60_000 or opened_room < 20_000
        return
    if room == opened_room == HUGE:
        assert max(run.fetched.values()) == 1 or kept >= lengths.sum(), "fetched again although it fits"


@pytest.mark.parametrize("opened_room", [10_000, 15_000, 20_000])
@pytest.mark.parametrize("kept", [0, 40])
def test_episodes_are_closed_and_opened_again(opened_room: int, kept: int) -> None:
    """Rows and indices of 24 episodes take 33 kB. `go` checks what each batch finds in memory."""
    run = Run(np.full(24, 20), opened_room=opened_room, per_file=1, kept=kept).go(150)
    assert run.closed > 20
    assert max(run.fetched.values()) > 1, "encoded video of a closed episode was used again"
    early = sum(step.video.evicted_early for step in run.steps)
    assert 0 < early <= sum(len(step.video.evict) for step in run.steps), "the order was known when they were closed"


@examples(20)
@given(lengths=LENGTHS, open_gops=st.booleans())
def test_what_is_decoded_once_is_fetched_once_and_not_kept(lengths: np.ndarray, open_gops: bool) -> None:
    run = Run(lengths, kept=10_000, open_gops=open_gops).go(3 * -(-int(lengths.sum()) // BATCH) + 20)
    assert set(run.fetched.values()) == {1}
    assert not run.steps[-1].video.fetch
    assert not run.blocks


@pytest.mark.parametrize(("size", "fits"), [(100, True), (9_000, False)])
def test_only_what_was_read_can_be_too_much(size: int, fits: bool) -> None:
    """An estimate that is larger than the room is no error."""
    lengths = np.full(4, 30)
    opening = Opening(Storage({}, lengths, 10_000, 0, {}, 20_000))
    batch = next(iter(samples(lambda epoch: Order(lengths), Batches(120, 120, 1, "pad"), 0, 0, 0)))
    opening.request([batch])
    due = opening.due()
    assert {read.number for read in due} == {0, 1, 2, 3}
    for read in due:
        opening.observe(read.key, size)
    if fits:
        assert sorted(opening.ready()) == [0, 1, 2, 3]
    else:
        with pytest.raises(MemoryBudgetError, match=r"leaves 20000 bytes .* the rows and indices of one batch take 36000\."):
            opening.ready()


def test_items_are_evicted_whole_or_not_at_all() -> None:
    items = Items(4, {CAMERA: np.array([0, 0, 1, 1])}, room=100, index_share=0)
    items.set(np.array([0, 1, 4]), np.array([30, 40, 20]), READ)
    assert items.bytes_by_kind == (70, 20)
    assert items.free == 10
    items.pin(np.array([0]))
    assert not items.make_room(80), "row 1 and the index have 60 bytes, which makes 70"
    assert items.take_evicted() == []
    assert items.make_room(25), "indices have more than their share, so they are evicted first"
    assert items.take_evicted() == [(CAMERA, 0)]
    assert items.bytes_by_kind == (70, 0)
    assert not items.make_room(80, as_far_as_possible=True)
    assert items.take_evicted() == [("", 1)]
    assert (items.bytes_by_kind, items.free) == ((30, 0), 70)
    items.unpin(np.array([0]))
    assert items.make_room(100)
    assert (items.bytes_by_kind, items.free) == ((0, 0), 100)


def test_reads_are_estimated_by_rows_and_tables_and_measured_when_they_are_complete() -> None:
    """A batch of the look-ahead gives way if a read turns out larger, and the next batch does not."""
    lengths = np.full(8, 10)
    opening = Opening(Storage({}, lengths, 6, 4, {}, 420, look_ahead=16))
    ahead = [
        Samples(number, 0, Order(lengths), np.arange(2), np.arange(2) + 2 * number, np.zeros(2, np.int64), 0)
        for number in range(4)
    ]
    opening.request(ahead[:1])
    assert opening.items.bytes_by_kind == (2 * 10 * (6 + 4), 0)
    for read in opening.due():
        opening.observe(read.key, 60)
    assert opening.items.bytes_by_kind == (2 * (60 + 10 * 4), 0)
    assert opening.ready() == [0, 1]
    opening.advance()
    requested = {read.number for read in opening.request(ahead[1:3])}
    assert requested == {2, 3, 4, 5}
    assert opening.items.free == 20, "rows 0 and 1 were evicted"
    opening.observe(("", 2), 150)
    assert opening.items.free == 420 - 190 - 100 - 100, "row 4 of the batch after it is evicted"
    assert set(opening.items.take_evicted()) == {("", 0), ("", 1), ("", 4)}
    opening.observe(("", 3), 300)
    assert opening.items.free == 420 - 190 - 340 - 100, "the next batch may exceed the memory"
    assert opening.items.take_evicted() == []


def test_repeating_a_failed_read_is_not_reading_again() -> None:
    """It says nothing about the memory. Rows and the index of their file are read once more for the batch that needs them."""
    lengths = np.full(2, 30)
    opening = Opening(Storage({CAMERA: np.zeros(2, np.int32)}, lengths, 10, 0, {CAMERA: 100}, 20_000))
    batch = next(iter(samples(lambda epoch: Order(lengths), Batches(60, 60, 1, "pad"), 0, 0, 0)))
    reads = opening.request([batch])
    assert {read.key for read in reads} == {("", 0), ("", 1), (CAMERA, 0)}
    for read in reads:
        opening.observe(read.key, None)
    assert opening.items.bytes_by_kind == (0, 0)
    repeated = opening.request([batch])
    assert {read.key for read in repeated} == {read.key for read in reads}
    assert not any(read.again for read in repeated)


def batches_of_two(count: int) -> list[Samples]:
    """Batches 0, 1, ...: batch n shows the first frames of episodes 2 n and 2 n + 1."""
    order, start = Order(np.full(2 * count, 10)), np.zeros(2, np.int64)
    return [Samples(n, 0, order, np.arange(2), np.arange(2) + 2 * n, start, 0) for n in range(count)]


def test_an_episode_is_not_opened_without_the_index_of_its_file() -> None:
    """The index of a batch of the look-ahead cannot be read. Its episodes are opened when it can."""
    opening = Opening(Storage({CAMERA: np.arange(8)}, np.full(8, 10), 10, 0, {CAMERA: 100}, 20_000, look_ahead=16))
    ahead = batches_of_two(4)
    opened = []
    for number in range(3):
        opening.request(ahead[number : number + 3])
        for read in opening.due():
            fails = read.key == (CAMERA, 5) and number < read.batch
            opening.observe(read.key, None if fails else 100)
        opened.append(opening.ready())
        opening.advance()
    assert [sorted(episodes) for episodes in opened] == [[0, 1], [2, 3, 4, 6, 7], [5]]


def test_reads_that_take_all_of_the_memory_are_all_kept() -> None:
    """The estimate was less than the size, but all rows of the look-ahead fit to the byte."""
    opening = Opening(Storage({}, np.full(8, 10), 10, 0, {}, 4 * 120, look_ahead=16))
    ahead = batches_of_two(2)
    opening.request(ahead)
    for episode in range(4):
        assert opening.observe(("", episode), 120) == []
    assert opening.items.free == 0
    assert opening.items.take_evicted() == []
    assert opening.ready() == [0, 1]
    opening.advance()
    assert opening.ready() == [2, 3]


def test_rows_that_a_read_returns_as_well_are_kept_if_they_fit() -> None:
    opening = Opening(Storage({}, np.full(8, 10), 10, 0, {}, 350))
    opening.request(batches_of_two(1))
    assert opening.observe(("", 0), 100, {}) == []
    assert opening.observe(("", 1), 100, {5: 151, 4: 100, 6: 51, 7: 50}) == [4, 7], "150 bytes are free"
    assert (opening.items.bytes_by_kind, opening.items.free) == ((350, 0), 0)


@pytest.mark.parametrize(("cameras", "fetched"), [(0, 0), (1, 0), (3, 0), (1, 1), (3, 2)])
def test_the_size_of_a_row_is_that_of_its_entries(cameras: int, fetched: int) -> None:
    names = [f"camera {n}" for n in range(cameras)]
    table = EpisodeTable(np.full(2, 50), names, names[:fetched])
    frame, blocks = np.arange(50), Blocks(np.zeros(1, np.int64), np.ones(1, np.int64), np.zeros(50, int), np.zeros(50, int))
    table.open(OpenEpisode(0, {n: Located(frame, frame, blocks if n in names[:fetched] else None) for n in names}))
    arrays = [table.episode, *(values for camera in table.cameras.values() for values in vars(camera).values())]
    assert EpisodeTable.row_bytes(cameras, fetched) == sum(values.itemsize for values in arrays if len(values))


@examples(60)
@given(st.lists(st.tuples(st.integers(0, 40), st.booleans()), max_size=200))
def test_rows_of_open_episodes_do_not_overlap(steps: list[tuple[int, bool]]) -> None:
    """And those of closed ones are used again: the table has room for no more than what was open at once, and gaps."""
    rows, held, most = _Rows(), list[tuple[int, int]](), 0
    for count, closes in steps:
        if closes and held:
            rows.give_back(*held.pop(count % len(held)))
        else:
            held.append((rows.take(count), count))
        taken = sorted((first, first + count) for first, count in held if count)
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(taken))
        assert not taken or taken[-1][1] <= rows.used
        most = max(most, sum(count for _, count in held))
    for first, count in held:
        rows.give_back(first, count)
    assert rows.take(most) == 0


@pytest.mark.parametrize("spread", [0.0, 0.3, 0.8])
def test_tables_are_not_much_larger_than_the_open_episodes(spread: float) -> None:
    lengths = np.random.default_rng(0).lognormal(5.5, spread, 6000).astype(int) + 1
    rows, held = _Rows(), list[tuple[int, int]]()
    for number, count in enumerate(lengths.tolist()):
        held.append((rows.take(count), count))
        if len(held) > 500:
            rows.give_back(*held.pop(number * 7919 % 500))
    assert rows.used < 1.4 * sum(count for _, count in held)


def test_the_first_batch_has_storage_for_itself_and_more_is_read_from_batch_to_batch() -> None:
    run = Run(np.full(40, 30), look_ahead=12, per_file=1).go(30)
    first = run.steps[0].video
    fetched = [(f.episode, f.first + k) for f in first.fetch for k in range(len(f.ranges))]
    assert sorted(fetched) == sorted(name[1:] for name in first.needed)
    distances = [max([f.batch - n for f in step.video.fetch], default=0) for n, step in enumerate(run.steps)]
    assert all(distance <= 2 * number for number, distance in enumerate(distances))
    assert max(distances) == 12
    assert all(f.batch >= n for n, step in enumerate(run.steps) for f in step.video.fetch)


def test_what_is_used_farthest_in_the_future_goes() -> None:
    """Two epochs with room for two thirds of the video: about a third of it is fetched twice."""
    lengths = np.full(12, 40)
    free = Run(lengths, cached=False, gop=1, per_file=1, block=600).go(160)
    video = sum(free.blocks.values())
    tight = Run(lengths, room=video * 2 // 3, cached=False, gop=1, per_file=1, block=600, look_ahead=4).go(160)
    assert set(free.fetched.values()) == {1}
    assert sum(tight.fetched.values()) < 1.5 * len(free.fetched)


def test_the_same_calls_give_the_same_plan() -> None:
    lengths = np.random.default_rng(0).integers(5, 50, 20)
    one, other = (Run(lengths, room=40_000, kept=30, per_file=1).go(60) for _ in range(2))
    for first, second in zip(one.steps, other.steps, strict=True):
        assert dataclasses.asdict(first.video) == dataclasses.asdict(second.video)


@pytest.mark.parametrize("gop", [1, 4, 30])
def test_blocks_are_whole_gops_that_hold_what_their_frames_need(gop: int) -> None:
    index = index_of("", 200, gop, gop > 2, 0)
    packets = index.display_order[20:150].astype(np.int64)
    found = cut(index, packets, index.decode_starts(packets), 1000)
    assert len(found.start) <= len(packets)
    assert (found.start[1:] == found.stop[:-1]).all()
    keyframes = set(index.offset[index.keyframes].tolist())
    assert set(found.start.tolist()) <= keyframes
    for frame, packet in enumerate(packets.tolist()):
        first, last = span(index, packet)
        assert found.start[found.first[frame]] <= index.offset[first]
        assert index.end[last] <= found.stop[found.last[frame]]


@examples(60)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=2, max_size=12).map(np.array),
    steps=st.lists(st.integers(0, 11), max_size=60),
    fetched=st.booleans(),
)
def test_the_table_holds_what_was_opened_and_little_more(lengths: np.ndarray, steps: list[int], fetched: bool) -> None:
    """Episodes are opened and closed in any order. Closed ones leave no more than a quarter of free rows after an opening."""
    table, opened = EpisodeTable(lengths, [CAMERA], [CAMERA] if fetched else []), set[int]()
    for step in steps:
        episode = step % len(lengths)
        if episode in opened:
            table.close(episode)
            opened.remove(episode)
            continue
        frame = np.arange(lengths[episode])
        blocks = Blocks(np.array([episode]), np.array([episode + 1]), 0 * frame, 0 * frame) if fetched else None
        located = Located(100 * episode + frame, frame // 4 * 4, blocks)
        columns = {"value": 1000.0 * episode + frame, "text": np.array([f"{episode} {f}" for f in frame], object)}
        table.open(OpenEpisode(episode, {CAMERA: located}, columns))
        opened.add(episode)
        held = int(lengths[[*opened]].sum())
        assert table._rows.live == held
        assert table._rows.used <= held * 5 / 4
        for each in opened:
            frames = np.arange(lengths[each])
            rows = table.rows(table.first_frame[each] + frames)
            assert table.frames(rows).tolist() == (table.first_frame[each] + frames).tolist()
            camera = table.cameras[CAMERA]
            assert camera.packet[rows].tolist() == (100 * each + frames).tolist()
            assert (camera.gops(rows) - rows[0]).tolist() == (frames // 4 * 4).tolist()
            assert camera.members(camera.gops(rows[:1])).tolist() == rows[:4].tolist()
            whole = np.full(len(frames), each)
            assert table.gather("value", whole, frames).tolist() == (1000.0 * each + frames).tolist()
            assert table.gather("text", whole, frames).tolist() == [f"{each} {f}" for f in frames]
            if fetched:
                [block] = table.blocks.entries(CAMERA, each).tolist()
                assert set(camera.first_block[rows].tolist()) == {block}
        if fetched:
            assert len(table.rows_with_blocks(CAMERA)) == held
