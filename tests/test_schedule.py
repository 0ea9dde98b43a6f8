"""The schedule on its own, held against models that are written without regard to speed."""

from __future__ import annotations

import bisect
import itertools
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from support.slow import examples, slow

from dali_stream.checks.arrays import NONE
from dali_stream.order import Order
from dali_stream.order.batches import Batches
from dali_stream.order.windows import window
from dali_stream.schedule.budget import horizon
from dali_stream.schedule.episodes import EpisodeTable, Located, OpenEpisode
from dali_stream.schedule.frames import FramePlan
from dali_stream.schedule.plan import Limits, Schedule
from dali_stream.schedule.samples import FrameSet, Samples, batches_of_rank, shown_frames

Frame = tuple[int, int]  # episode, frame
CAMERA = "top"


@dataclass
class Run:
    """A small dataset and how it is walked."""

    lengths: np.ndarray
    gop: int
    offsets: np.ndarray
    batch_size: int
    limits: Limits
    reordered: bool = False
    consumers: int = 4
    pool: int = 2
    shuffle: bool | str = True
    position: int = 0
    last_batch: str = "pad"
    lacking: frozenset[Frame] = frozenset()
    close_every: int = 1 << 30  # batches after which all episodes are closed
    rank: int = 0
    world: int = 1
    drops: frozenset[tuple[int, int]] = frozenset()  # (batch, slot that cannot be read and is dropped before it)
    steps: list[tuple[Samples, FramePlan]] = field(default_factory=list)

    def order(self, epoch: int) -> Order:
        return Order(self.lengths, self.shuffle, 0, epoch, self.consumers, self.pool)

    def batches(self):
        batches = Batches(int(self.lengths.sum()), self.batch_size, self.world, self.last_batch)
        return batches_of_rank(self.order, batches, self.rank, 0, self.position)

    @property
    def needed(self) -> dict[str, FrameSet]:
        """See `Layout.needed`. A rank without a sample is padded with those of others."""
        pieces = self.order(0).shard(self.rank, self.world) if self.lengths.sum() >= self.world else None
        no_datasets = np.zeros(len(self.lengths), np.int64)
        return {} if pieces is None else {CAMERA: shown_frames(pieces, self.offsets[None], self.lengths, no_datasets)}

    @property
    def frames(self) -> int:
        """Frames that the rank needs."""
        return len(self.needed[CAMERA]) if self.needed else int(self.lengths.sum())

    def packets(self, episode: int) -> tuple[np.ndarray, np.ndarray]:
        """Packets and keyframes of an episode; `reordered` as with B-frames: the last frame of a GOP is decoded second."""
        frames = np.arange(self.lengths[episode])
        keyframe = frames // self.gop * self.gop
        packet = frames.copy()
        if self.reordered:
            last = np.minimum(keyframe + self.gop, self.lengths[episode]) - 1
            inside = frames > keyframe
            packet = np.where(inside & (frames == last), keyframe + 1, np.where(inside, frames + 1, frames))
        packet, keyframe = packet + 1000, keyframe + 1000
        for e, frame in self.lacking:
            if e == episode and frame < len(packet):
                packet[frame], keyframe[frame] = NONE, NONE
        return packet, keyframe

    def plan(self, count: int) -> Run:
        planner = Schedule(
            EpisodeTable(self.lengths, [CAMERA]),
            self.batches(),
            self.batch_size,
            {CAMERA: self.offsets},
            self.limits,
            needed=self.needed,
        )
        for number in range(count):
            [found] = planner.ahead(1)
            for episode in planner.table.closed(found.episode):
                planner.table.open(OpenEpisode(episode, {CAMERA: Located(*self.packets(episode))}))
            planner.frames[CAMERA].drop(number, self.dropped(number))
            self.steps.append((found, planner.plan().frames[CAMERA]))
            if number % self.close_every == self.close_every - 1:
                for episode in np.flatnonzero(planner.table.first_row != NONE).tolist():
                    planner.table.close(episode)
        return self

    @property
    def slots(self) -> int:
        return self.limits.kept + self.limits.in_progress * self.batch_size * len(self.offsets)

    def dropped(self, number: int) -> list[int]:
        return [slot % self.slots for batch, slot in sorted(self.drops) if batch == number]

    def shown(self, found: Samples) -> list[list[Frame]]:
        frames, _ = window(self.offsets, found.frame, self.lengths[found.episode])
        return [[(e, f) for f in steps] for e, steps in zip(found.episode.tolist(), frames.tolist(), strict=True)]

    def cost(self, step: FramePlan) -> int:
        """Frames that are decoded: each GOP from its keyframe to the last packet that is asked for."""
        deepest: dict[tuple[int, int], int] = {}
        for episode, frame, packet in zip(step.episode.tolist(), step.frame.tolist(), step.packet.tolist(), strict=True):
            key = episode, int(self.packets(episode)[1][frame])
            deepest[key] = max(deepest.get(key, 0), packet - key[1] + 1)
        return sum(deepest.values())


def belady(run: Run, count: int) -> int:
    """Frames decoded for `count` batches by a cache that knows all of the order, and keeps the nearest next uses exactly."""
    batches = [run.shown(found) for found in itertools.islice(run.batches(), 3 * count)]
    uses: dict[Frame, list[int]] = defaultdict(list)
    for number, batch in enumerate(batches):
        for frame in set(itertools.chain.from_iterable(batch)):
            uses[frame].append(number)

    def next_use(frame: Frame, after: int) -> float:
        place = bisect.bisect_right(uses[frame], after)
        return uses[frame][place] if place < len(uses[frame]) else float("inf")

    cache: set[Frame] = set()
    decoded = 0
    for number, batch in enumerate(batches[:count]):
        wanted = set(itertools.chain.from_iterable(batch)) - cache
        gops = {(e, f // run.gop) for e, f in wanted}
        beside = {(e, f) for e, g in gops for f in range(g * run.gop, min((g + 1) * run.gop, int(run.lengths[e])))}
        nearest = sorted(cache | wanted | beside | set(itertools.chain.from_iterable(batch)), key=lambda f: next_use(f, number))
        cache_after = {f for f in nearest[: run.limits.kept] if next_use(f, number) < float("inf")}
        for e, g in gops:
            inside = [f for f in (wanted | (cache_after & beside) - cache) if (f[0], f[1] // run.gop) == (e, g)]
            decoded += max(f for _, f in inside) % run.gop + 1
        cache = cache_after
    return decoded


@st.composite
def runs(draw: st.DrawFn) -> Run:
    lengths = np.array(draw(st.lists(st.integers(1, 40), min_size=1, max_size=8)), np.int64)
    batch_size = draw(st.integers(1, 9))
    consumers = draw(st.integers(1, 4))
    world = draw(st.sampled_from([w for w in (1, 2, 3, 4) if consumers % w == 0]))
    return Run(
        lengths,
        gop=draw(st.sampled_from([1, 2, 7, 100])),
        offsets=np.array(draw(st.lists(st.integers(-12, 12), min_size=1, max_size=4)), np.int64),
        batch_size=batch_size,
        limits=Limits(
            kept=draw(
                st.sampled_from([0, 1, 5, 30, int(lengths.sum()), int(lengths.sum()) * 9 // 10, int(lengths.sum()) // world])
            ),
            in_progress=draw(st.integers(1, 4)),
            horizon=draw(st.sampled_from([0, 10, 1000])),
        ),
        reordered=draw(st.booleans()),
        consumers=consumers,
        rank=draw(st.integers(0, world - 1)),
        world=world,
        shuffle=draw(st.sampled_from([True, "sharded", "global", False])),
        position=draw(st.integers(0, int(lengths.sum()) - 1)),
        close_every=draw(st.sampled_from([1, 3, 1 << 30])),
        lacking=frozenset(draw(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 39)), max_size=2))),
        drops=frozenset(draw(st.lists(st.tuples(st.integers(1, 39), st.integers(0, 400)), max_size=20))),
    )


# Batches whose frames are all cached do not mark their slots, which are dropped while these batches are in progress.
ALL_CACHED = Run(np.array([6]), 1, np.array([0]), 2, Limits(6, 3, 0), drops=frozenset((10, slot) for slot in range(12)))


@examples(60, derandomize=False)
@example(ALL_CACHED)
@given(runs())
def test_each_slot_holds_the_frame_that_a_batch_shows(run: Run) -> None:
    """Also with any frames missing, from any position, in any order and across the end of epochs."""
    held: dict[int, Frame] = {}
    touched: dict[int, int] = defaultdict(lambda: -100)
    for number, (found, step) in enumerate(run.plan(40).steps):
        for slot in run.dropped(number):
            held.pop(slot, None)
        decode = list(zip(step.slot.tolist(), step.episode.tolist(), step.frame.tolist(), step.packet.tolist(), strict=True))
        assert len({slot for slot, *_ in decode}) == len({(e, f) for _, e, f, _ in decode}) == len(decode)
        for slot, episode, frame, packet in decode:
            assert 0 <= slot < run.slots
            assert packet == run.packets(episode)[0][frame]
            assert touched[slot] <= number - run.limits.in_progress  # a batch that is not delivered may still be copied from it
            held[slot], touched[slot] = (episode, frame), number
        misses = 0
        for expected, slots in zip(run.shown(found), step.show.tolist(), strict=True):
            for frame, slot in zip(expected, slots, strict=True):
                if frame in run.lacking:
                    assert slot == NONE
                    misses += 1
                    continue
                assert held[slot] == frame
                misses += (slot, *frame) in {(s, e, f) for s, e, f, _ in decode}
                touched[slot] = number
        assert step.hits == step.show.size - misses


@examples(25, derandomize=False)
@given(runs())
def test_where_all_frames_fit_each_is_decoded_once_and_never_again(run: Run) -> None:
    """With several ranks, if a rank has the same frames in all epochs: memory for these frames is then enough."""
    assume(run.world == 1 or run.shuffle in ("sharded", False))
    run.limits = Limits(run.frames, run.limits.in_progress, 0)
    run.lacking, run.drops = frozenset(), frozenset()
    batches = -(-int(run.lengths.sum()) // run.batch_size // run.world)
    run.plan(4 * batches)
    decoded = [(e, f) for _, step in run.steps for e, f in zip(step.episode.tolist(), step.frame.tolist(), strict=True)]
    assert len(decoded) == len(set(decoded))
    assert sum(run.cost(step) for _, step in run.steps) <= run.lengths.sum()
    assert not any(len(step.slot) for _, step in run.steps[2 * batches :])


@examples(60)
@given(runs())
def test_batches_of_a_sharded_rank_show_the_frames_that_it_needs(run: Run) -> None:
    """And no others, over two epochs."""
    run.shuffle, run.position = "sharded", 0
    assume(run.lengths.sum() >= run.world)
    first = np.cumsum(run.lengths) - run.lengths
    batches = 2 * -(-int(run.lengths.sum()) // run.batch_size // run.world)
    shown = {
        int(first[episode]) + frame
        for found in itertools.islice(run.batches(), batches)
        for steps in run.shown(found)
        for episode, frame in steps
    }
    needed = run.needed[CAMERA]
    frames = np.arange(int(run.lengths.sum()))
    assert sorted(shown) == np.flatnonzero(needed.has(frames)).tolist()
    assert len(shown) == len(needed)


@pytest.mark.parametrize("gop", [2, slow(12)])
@pytest.mark.parametrize("share", [1, 0.9])
def test_memory_for_the_frames_of_a_rank_saves_its_decodes(gop: int, share: float) -> None:
    """In epochs 2 to 4 of 4 ranks, also if a tenth of the frames do not fit."""
    lengths = np.random.default_rng(0).integers(50, 150, 60)
    for rank in (0, 3):
        run = Run(
            lengths, gop, np.array([0]), 16, Limits(1, 2, 0), consumers=32, pool=8, shuffle="sharded", rank=rank, world=4,
            last_batch="drop",
        )  # fmt: skip
        assert run.frames == pytest.approx(lengths.sum() / 4, rel=0.01)
        kept = int(share * run.frames)
        run.limits = Limits(kept, 2, horizon(kept, run.frames))
        epoch = int(lengths.sum()) // 64
        steps = run.plan(4 * epoch).steps
        for number in (1, 2, 3):
            later = steps[number * epoch : (number + 1) * epoch]
            decoded = sum(step.decodes for _, step in later) / (16 * epoch)
            assert decoded < (0.01 if share == 1 else 0.15)


@pytest.mark.parametrize(
    ("gop", "steps", "kept"),
    [slow(2, 1, 100), (2, 8, 200), slow(12, 1, 60), slow(12, 1, 500), slow(30, 1, 300), (30, 4, 400), slow(100, 1, 1500)],
)
def test_decodes_are_near_those_of_a_cache_that_knows_the_future(gop: int, steps: int, kept: int) -> None:
    lengths = np.random.default_rng(gop).integers(60, 120, 40).astype(np.int64)
    limits = Limits(kept, 2, horizon(kept, int(lengths.sum())))
    run = Run(lengths, gop, -7 * np.arange(steps)[::-1], 4, limits, consumers=4, pool=3)
    count = 800 // steps
    own = sum(run.cost(step) for _, step in run.plan(count).steps)
    assert own == sum(step.decodes for _, step in run.steps)
    assert own <= 1.05 * belady(run, count)


def test_a_cache_for_nearly_all_frames_is_full_after_one_epoch() -> None:
    """The cache is full although the first batches are planned before the order of the next epoch has been read."""
    lengths = np.full(12, 100)
    kept = 1140
    run = Run(lengths, 2, np.array([0]), 16, Limits(kept, 2, horizon(kept, 1200)), consumers=8, pool=3, last_batch="drop")
    second = run.plan(2 * 75).steps[75:]
    assert sum(step.hits for _, step in second) > 0.93 * 75 * 16


def test_frames_that_would_be_evicted_unshown_are_not_decoded() -> None:
    """Once the order has been read far ahead. A decoder then stops at the last frame that the batch shows."""
    lengths = np.full(400, 100)
    run = Run(lengths, 2, np.array([0]), 16, Limits(200, 2, horizon(200, 40_000)), shuffle="global")
    steps = run.plan(200).steps
    assert sum(step.decodes for _, step in steps[100:]) < 1.55 * 100 * 16  # 1.5 with GOPs of 2 frames


def test_the_same_run_gives_the_same_steps() -> None:
    def plan() -> list[tuple[Samples, FramePlan]]:
        return Run(np.array([50, 70, 90]), 12, np.array([-3, 0]), 8, Limits(40, 2, 100)).plan(30).steps

    for (_, mine), (_, other) in zip(plan(), plan(), strict=True):
        for name in ("show", "episode", "frame", "packet", "slot"):
            np.testing.assert_array_equal(getattr(mine, name), getattr(other, name))


HUGE = """
import numpy as np
from dali_stream.order.batches import Batches
from dali_stream.schedule.budget import horizon
from dali_stream.checks.arrays import NONE
from dali_stream.order import Order
from dali_stream.schedule.episodes import EpisodeTable
from dali_stream.schedule.plan import Schedule, Limits
from dali_stream.schedule.samples import batches_of_rank
from decodes import plan_next
lengths = np.full(1_000_000, 100)
order = lambda epoch: Order(lengths, True, 0, epoch, 32, 8)
found = batches_of_rank(order, Batches(100_000_000, 64, 8, "drop"), 0, 0, {position})
windows = {{"a": np.zeros(1, np.int64), "b": np.arange(-7, 1)}}
planner = Schedule(EpisodeTable(lengths, windows), found, 64, windows, Limits(28000, 2, 56000))
for _ in range(20):
    plan_next(planner, lengths, 30)
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


@pytest.mark.slow
def test_a_hundred_million_frames_take_little_memory() -> None:
    """Also where a run is resumed in the middle of the epoch."""
    for position in (0, 50_000_000):
        code = HUGE.format(position=position)  # not ru_maxrss, which a process inherits from its parent
        folder = Path(__file__).parents[1] / "benchmarks"  # which `python -c` imports `decodes` from
        done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True)
        assert int(done.stdout) << 10 < 1 << 30
