"""Pools of the consumers. They determine the order in which a consumer draws the frames of its run."""

from __future__ import annotations

from array import array
from bisect import bisect_right

import numpy as np

from dali_stream.checks.arrays import Int64
from dali_stream.order.rng import philox

_PART = 8  # a part of a run has on average as many frames as _PART * pool episodes, and at most 1.875 times as many


class Run:
    """Frames that one consumer draws: an interval on the line of all episodes, laid end to end.

    A long run is cut into parts. Each part has its own pool and random numbers, so that a resumed run repeats only the draws
    of the current part. Near the end of a part, the pool has few segments left, and consecutive draws are less mixed. The parts
    of different consumers therefore end at different draws, so that this does not affect all samples of a batch.

    Args:
        ends: Number of frames up to the end of each episode, laid end to end, shape (E,).
        start, stop: First place of the run, and the place after its last.
        key: Key of the random numbers.
        pool: Number of segments that the consumer draws from at a time.
        consumer, consumers: Number of the consumer, and number of consumers.
    """

    def __init__(
        self, ends: Int64, start: int, stop: int, key: tuple[int, ...], pool: int, consumer: int, consumers: int
    ) -> None:
        self._ends, self._start, self._key, self._pool = ends, start, key, pool
        length, part = stop - start, _PART * pool * int(ends[-1])
        # length / (average length of a part), rounded to the nearest integer. Integers give the same result on every machine.
        parts = max(1, (2 * length * len(ends) + part) // (2 * part))
        # Bounds are length / parts apart. Each consumer shifts them by a different offset, of up to half this distance.
        shift = 2 * consumer + 1 - consumers
        inner = [length * (2 * consumers * k + shift) // (2 * consumers * parts) for k in range(1, parts)]
        self._bounds = [0, *inner, length]
        self._now: tuple[int, EpisodePool] | None = None  # number and pool of the current part

    def draw(self, first: int, count: int) -> list[int]:
        """Return draws as places on the line of episodes. Calls that continue after the last draw are the cheapest.

        Args:
            first: Number of the first draw.
            count: Number of draws.
        """
        places: list[int] = []
        while count:
            part = bisect_right(self._bounds, first) - 1
            pool, begin, end = self._pool_at(part, first), *self._bounds[part : part + 2]
            # Each draw changes the pool, so the draws before `first` have to be repeated.
            pool.skip(first - begin - pool.drawn)
            drawn = pool.draw(min(count, end - first))
            places += drawn
            first, count = first + len(drawn), count - len(drawn)
        return places

    def _pool_at(self, part: int, draw: int) -> EpisodePool:
        """Return the pool of a part. If the current pool is past `draw`, return a new one, since a pool cannot go back."""
        begin, end = self._bounds[part : part + 2]
        if self._now is None or self._now[0] != part or self._now[1].drawn > draw - begin:
            random = philox("consumer", *self._key, *([part] if part else []))
            pool = EpisodePool(self._ends, (self._start + begin, self._start + end), random, self._pool)
            self._now = part, pool
        return self._now[1]


class EpisodePool:
    """Pool of one part. Each draw takes a frame uniformly from all remaining frames of the pool's segments.

    All frames of the pool are in one flat array. A draw takes one random index, and moves the last frame to the place of the
    drawn frame. The cost of a draw therefore does not depend on the size of the pool. The array contains frame * pool + slot,
    where slot is the number of the frame's segment in the pool. When a segment is drained, the next segment of the run takes
    its slot.

    Args:
        ends: Number of frames up to the end of each episode, laid end to end, shape (E,).
        run: First place of the part, and the place after its last.
        random: Generator of the random numbers.
        pool: Number of segments.
    """

    BLOCK = 65536  # number of draws at a time, which bounds the memory for them
    AHEAD = 64  # minimum number of random numbers to generate at a time

    def __init__(self, ends: Int64, run: tuple[int, int], random: np.random.Philox, pool: int) -> None:
        self.drawn = 0
        pool = min(pool, len(ends))  # more slots would stay empty
        self._ends, self._random, self._pool = ends, random, pool
        self._next, self._stop = run
        self._episode = int(np.searchsorted(ends, self._next, side="right"))
        self._frames, self._ahead = array("q"), list[float]()
        self._left = [0] * pool
        for slot in range(pool):
            self._refill(slot)

    def draw(self, count: int) -> list[int]:
        """Return the next `count` frames as places on the line of episodes."""
        frames, left, pool, drawn = self._frames, self._left, self._pool, []
        last = len(frames)  # entries from here on are obsolete, and are deleted before a refill and after the last draw
        for uniform in self._uniforms(count):
            at = int(uniform * last)
            last -= 1
            frame = frames[at]
            frames[at] = frames[last]
            drawn.append(frame)
            slot = frame % pool
            left[slot] -= 1
            if not left[slot]:
                # A refill appends, so the obsolete entries are deleted first. Deleting them only here keeps a draw cheap.
                del frames[last:]
                self._refill(slot)
                last = len(frames)
        del frames[last:]
        self.drawn += count
        return [frame // pool for frame in drawn]

    def skip(self, count: int) -> None:
        """Skip draws, in blocks that bound the memory."""
        while count:
            block = min(count, self.BLOCK)
            self.draw(block)
            count -= block

    def _uniforms(self, count: int) -> list[float]:
        if (missing := count - len(self._ahead)) > 0:  # a mixture draws only a few frames of each pool at a time
            # The upper 53 bits are converted to a double in [0, 1), as in `Generator.random`. NumPy may change that function,
            # and guarantees only the raw stream.
            raw = self._random.random_raw(max(missing, self.AHEAD))
            self._ahead += ((raw >> np.uint64(11)) * 2.0**-53).tolist()
        uniforms, self._ahead = self._ahead[:count], self._ahead[count:]
        return uniforms

    def _refill(self, slot: int) -> None:
        while self._next < self._stop:
            end = min(int(self._ends[self._episode]), self._stop)
            start, self._next = self._next, end
            self._episode += 1
            if end > start:  # skip episodes without frames
                self._frames.frombytes((np.arange(start, end, dtype=np.int64) * self._pool + slot).tobytes())
                self._left[slot] = end - start
                return
