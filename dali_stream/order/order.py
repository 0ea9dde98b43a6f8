"""Order of frames: a pure function from a position of the epoch to (episode, frame).

With N frames, C consumers and W ranks, position g (0 <= g < N) is draw g // C of consumer g % C, and rank r serves the
positions g with g % W == r. The order does not depend on W, so any number of ranks that divides C produces the same epoch.

Random numbers are the raw stream of Philox, which NumPy keeps stable across versions. The key of Philox is a hash of the
purpose of the numbers, the seed and the epoch.
"""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, TypeGuard

import numpy as np
import numpy.typing as npt

from dali_stream.checks.arguments import known_arguments, positive
from dali_stream.checks.arrays import Int64
from dali_stream.order.pool import Run
from dali_stream.order.rng import mix, philox
from dali_stream.order.shard import Pieces, Shard, pieces

Shuffle = bool | str
"""True (pools of episodes), "sharded" (the same, with the same frames for a consumer in all epochs), "global" (one permutation
of all frames) or False (recorded order)."""
SHUFFLES = ("global", "sharded")  # values of `shuffle` besides True and False
_CONSUMERS, _SEGMENTS = 32, 256  # targets of `default_pools`
_AHEAD = 2048  # number of samples of a rank that are computed together, which reduces the overhead of NumPy calls
_RANKS = 1 << 16  # largest world size that an error message suggests


class EpochOrder(ABC):
    """Order of one epoch. It is computed in blocks, and the last block is cached.

    Args:
        positions: Number of positions of the epoch.
        consumers: Number of consumers, which the world size must divide. None if every world size is allowed.
    """

    def __init__(self, positions: int, consumers: int | None) -> None:
        self._positions, self._consumers = positions, consumers
        self._block: tuple[tuple[int, int, int], Int64] | None = None  # (rank, world size, number), samples
        self._lock = threading.Lock()  # because drawing changes the pools

    def __len__(self) -> int:
        return self._positions

    def read(
        self, start: int, count: int, rank: int = 0, world_size: int = 1
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the next `count` samples that `rank` serves at or after position `start`.

        Calls that continue where the last one ended are the cheapest. For any other position, each consumer of the rank
        repeats a few thousand draws, because its pools restart only at fixed positions.

        Args:
            start: Position in the epoch, counted over all ranks.
            count: Number of samples.
            rank: Rank that reads. Default: 0.
            world_size: Number of ranks. Default: 1.

        Returns:
            Episode numbers, and frame indices within these episodes, both int64, shape (count,), or shorter at the end of the
            epoch. In a mixture, episodes are numbered over all datasets, one dataset after the other.

        Raises:
            ValueError: If `start` or `count` is negative, if `rank` is not in [0, world_size), or if `world_size` does not
                divide `consumers`.
        """
        if start < 0 or count < 0:
            raise ValueError(f"start and count must be nonnegative, got {start} and {count}")
        check_world(rank, world_size, self._consumers)
        # Sample i of the rank has position i * world_size + rank. -((-x) // n) is x / n, rounded up.
        first = -((rank - start) // world_size)  # number of the sample among those of the rank
        stop = min(first + count, -((rank - self._positions) // world_size))
        samples = [np.empty((2, 0), np.int64)]
        with self._lock:
            # Blocks begin at fixed samples for any `start`, so that consecutive calls continue in the cached block.
            for block in range(first // _AHEAD, -(-stop // _AHEAD)):
                begin = block * _AHEAD
                samples.append(self._read_block(rank, world_size, block)[:, max(first - begin, 0) : stop - begin])
        episode, frame = np.concatenate(samples, 1)
        return episode, frame

    def shard(self, rank: int = 0, world_size: int = 1) -> Pieces | None:
        """Return the frames that a rank samples in every epoch, for `shuffle="sharded"`.

        Args:
            rank: Number of the rank. Default: 0.
            world_size: Number of ranks. Default: 1.

        Returns:
            Episode numbers, and the ranges [start, stop) of frames within these episodes, all int64, shape (S,). In a mixture,
            they include all frames that are divided among the consumers in each pass. None for any other `shuffle`, with which
            a rank samples other frames in each epoch.
        """
        check_world(rank, world_size, self._consumers)
        return self._shard(np.arange(rank, self._consumers or 0, world_size))

    @abstractmethod
    def _shard(self, consumers: Int64) -> Pieces | None:
        """Return the frames that some consumers sample in every epoch. See `shard`."""

    def _read_block(self, rank: int, world_size: int, block: int) -> Int64:
        key = (rank, world_size, block)
        if self._block is None or self._block[0] != key:
            first, stop = ((block + more) * _AHEAD * world_size + rank for more in (0, 1))
            self._block = key, self._samples(np.arange(first, min(stop, self._positions), world_size, dtype=np.int64))
        return self._block[1]

    @abstractmethod
    def _samples(self, positions: Int64) -> Int64:
        """Return episodes and frames, shape (2, N), of positions that a rank serves one after the other."""


class Order(EpochOrder):
    """Order of one epoch of a dataset.

    With `shuffle=True`, the episodes are permuted, laid end to end and cut into one run for each consumer. The part of an
    episode in a run is a segment. A consumer draws uniformly from the frames of a pool of segments, and replaces an empty
    segment with the next one of its run. A long run is cut into parts, and each part begins with a new pool.

    With `shuffle="sharded"`, the episodes are permuted and cut into runs once for all epochs, by the seed alone. In each epoch,
    a consumer permutes the segments of its own run, and draws from a pool of them as before. It has the same frames in all
    epochs, and so has a rank, as long as the number of ranks stays the same.

    Args:
        episode_lengths: Number of frames of each episode, in recorded order, shape (E,).
        shuffle: True lets every consumer draw uniformly from a pool of episodes, "sharded" does the same with the same frames
            for a consumer in all epochs, "global" permutes all frames, and False keeps the recorded order. Default: True.
        seed: Seed of the random numbers. Default: 0.
        epoch: Number of the epoch, from 0. Default: 0.
        consumers: Number of logical consumers C, which does not depend on the hardware. "global" and False have no consumers,
            and ignore it. Default: 32.
        episode_pool_size: Number of segments that a consumer draws from at a time. "global" and False ignore it. Default: 8.

    Raises:
        ValueError: If an argument is out of range.
    """

    @known_arguments
    def __init__(
        self,
        episode_lengths: Sequence[int] | npt.NDArray[np.integer[Any]],
        shuffle: Shuffle = True,
        seed: int = 0,
        epoch: int = 0,
        consumers: int = 32,
        episode_pool_size: int = 8,
    ) -> None:
        lengths = checked_lengths(episode_lengths)
        check_order_arguments(shuffle, seed, consumers, episode_pool_size)
        if epoch < 0:
            raise ValueError(f"epoch must be nonnegative, got {epoch}")
        frames, key = int(lengths.sum()), (seed, epoch)
        super().__init__(frames, consumers if has_consumers(shuffle) else None)
        if has_consumers(shuffle):
            self._episodes = dealt(len(lengths), shuffle, (seed,), epoch)
            ends = np.cumsum(lengths[self._episodes])
            made = Shard if shuffle == "sharded" else Run
            self._laid: _Pools | Permutation | None = _Pools(ends, frames, key, consumers, episode_pool_size, made)
        else:
            self._episodes = np.arange(len(lengths))
            ends = np.cumsum(lengths)
            self._laid = Permutation(frames, key) if shuffle == "global" else None
        self._ends, self._sharded = ends, shuffle == "sharded"
        self._starts = ends - lengths[self._episodes]

    def _samples(self, positions: Int64) -> Int64:
        laid = positions if self._laid is None else self._laid.at(positions)
        # side="right", because an end is exclusive. This also skips episodes without frames, whose end equals the end before.
        run = np.searchsorted(self._ends, laid, side="right")
        return np.stack([self._episodes[run], laid - self._starts[run]])

    def _shard(self, consumers: Int64) -> Pieces | None:
        if not self._sharded:
            return None
        start, stop = (run_start(len(self), self._consumers or 1, consumers + more) for more in (0, 1))
        return pieces(self._episodes, self._starts, self._ends, start, stop)


def has_consumers(shuffle: Shuffle) -> bool:
    """Return whether an order has consumers that draw from pools of episodes. The world size must then divide their number."""
    return shuffle is True or shuffle == "sharded"


def is_shuffle(value: object) -> TypeGuard[Shuffle]:
    """Return whether a value is one of those that `shuffle` may have."""
    return isinstance(value, bool) or (isinstance(value, str) and value in SHUFFLES)


def dealt(episodes: int, shuffle: Shuffle, key: tuple[int, ...], epoch: int) -> Int64:
    """Return the permutation of the episodes that are laid end to end and cut into the runs of the consumers.

    Args:
        episodes: Number of episodes E.
        shuffle: True for a permutation of each epoch, "sharded" for the same one in all epochs.
        key: Key of the random numbers.
        epoch: Number of the epoch or, in a mixture, of the pass.

    Returns:
        Numbers of the episodes, shape (E,).
    """
    random = philox("shards", *key) if shuffle == "sharded" else philox("episodes", *key, epoch)
    # Sorting raw random numbers gives the same permutation in every NumPy version, unlike `Generator.permutation`.
    return np.argsort(random.random_raw(episodes), kind="stable")


def default_pools(
    batch_size: int, world_size: int, consumers: int | None = None, episode_pool_size: int | None = None
) -> tuple[int, int]:
    """Return (consumers, episode_pool_size). Values that are None are chosen for the size of the global batch.

    The global batch has batch_size * world_size samples. `consumers` is the divisor of the global batch that is a multiple of
    world_size and nearest to 32 by ratio. Each global batch then takes equally many samples from every consumer, so that
    consecutive batches do not draw from different groups of episodes. `episode_pool_size` is the smallest number for which
    consumers * episode_pool_size, the number of segments that a batch is drawn from, is at least 256 and at least twice the
    global batch.

    Args:
        batch_size: Number of samples per batch and rank.
        world_size: Number of ranks.
        consumers: Number of consumers, or None to choose it. Default: None.
        episode_pool_size: Number of segments that a consumer draws from at a time, or None to choose it. Default: None.

    Raises:
        ValueError: If `consumers` or `episode_pool_size` is not a positive integer.
    """
    if consumers is None:
        pairs = ((k, batch_size // k) for k in range(1, math.isqrt(batch_size) + 1) if batch_size % k == 0)
        multiples = [world_size * k for pair in pairs for k in pair]
        consumers = min(multiples, key=lambda c: abs(math.log(c / _CONSUMERS)))
    consumers = positive("consumers", consumers)
    if episode_pool_size is None:
        episode_pool_size = -(-max(_SEGMENTS, 2 * batch_size * world_size) // consumers)
    return consumers, positive("episode_pool_size", episode_pool_size)


def check_order_arguments(shuffle: Shuffle, seed: int, consumers: int, episode_pool_size: int) -> None:
    """Raise ValueError if an argument of an order is out of range."""
    if not is_shuffle(shuffle):
        raise ValueError(
            'shuffle must be True (episode pool), "sharded" (episode pool, with the same episodes in all epochs), "global" or '
            f"False (recorded order), got {shuffle!r}"
        )
    if not isinstance(seed, (int, np.integer)):
        raise ValueError(f"seed must be an integer, got {seed!r}")
    positive("consumers", consumers)
    positive("episode_pool_size", episode_pool_size)


def check_world(rank: int, world_size: int, consumers: int | None) -> None:
    """Raise ValueError if `rank` or `world_size` is out of range, or if `world_size` does not divide `consumers`.

    Args:
        rank: Number of the rank.
        world_size: Number of ranks.
        consumers: Number of consumers. None if the order has no consumers, so that every world size is allowed.
    """
    if world_size < 1 or not 0 <= rank < world_size:
        raise ValueError(f"rank must be at least 0 and below world_size, got rank={rank} and world_size={world_size}")
    if consumers is not None and consumers % world_size:
        raise ValueError(
            f"world_size must divide consumers={consumers}, got {world_size}. Allowed with these consumers: "
            f"{allowed_worlds(consumers)}. Choose consumers as a multiple of every world size you may run on, because a "
            "resumed run keeps it"
        )


def allowed_worlds(consumers: int) -> str:
    """Return the 20 smallest world sizes that divide `consumers`, for an error message."""
    return ", ".join(map(str, [w for w in range(1, min(consumers, _RANKS) + 1) if consumers % w == 0][:20]))


class Permutation:
    """Keyed permutation of [0, n). Each value is computed separately, so the permutation takes no memory.

    A Feistel network permutes the smallest power of two that is at least n. It is applied until the value is below n (cycle
    walking, Black and Rogaway 2002). The power of two is less than 2n, so this takes less than two steps on average.

    Args:
        n: Number of values.
        key: Key of the random numbers.
    """

    ROUNDS = 8

    def __init__(self, n: int, key: tuple[int, ...]) -> None:
        bits = max(n - 1, 0).bit_length()
        self._n = n
        self._low = np.uint64(bits // 2)
        self._low_mask = np.uint64((1 << bits // 2) - 1)
        self._high_mask = np.uint64((1 << (bits - bits // 2)) - 1)
        self._keys = philox("permutation", *key).random_raw(2 * self.ROUNDS).reshape(-1, 2)

    def at(self, positions: Int64) -> Int64:
        value = self._step(positions.astype(np.uint64))
        # A value that is not below n is permuted again. This ends, because the cycle returns to the position, which is below n.
        outside = np.flatnonzero(value >= self._n)
        while len(outside):
            value[outside] = self._step(value[outside])
            outside = outside[value[outside] >= self._n]
        return value.astype(np.int64)

    def _step(self, value: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        # Each line of a round changes one half by a function of the other half, so no two values become equal.
        low, high = value & self._low_mask, value >> self._low
        for for_low, for_high in self._keys:
            low ^= mix(high ^ for_low) & self._low_mask
            high ^= mix(low ^ for_high) & self._high_mask
        return high << self._low | low


def run_start(frames: int, consumers: int, index: Int64) -> Int64:
    """Return the first place of a consumer's run, for consumers from 0 to C. Run c ends where run c + 1 begins."""
    short, longer = divmod(frames, consumers)
    start: Int64 = index * short + np.minimum(index, longer)
    return start


class _Pools:
    """Consumers that draw from pools of episode segments (see `Order`).

    The permuted episodes are laid end to end, and cut into one run for each consumer. The place of a frame is its index on this
    line. Each run has N // C frames, and the first N % C runs have one more.

    Args:
        ends: Number of frames up to the end of each permuted episode, shape (E,).
        frames: Number of frames N.
        key: Seed and epoch.
        consumers: Number of consumers C.
        pool: Number of segments that a consumer draws from at a time.
        made: Class of the runs.
    """

    def __init__(
        self, ends: Int64, frames: int, key: tuple[int, int], consumers: int, pool: int, made: type[Run | Shard]
    ) -> None:
        self._ends, self._frames, self._key, self._count, self._pool = ends, frames, key, consumers, pool
        self._made = made
        self._runs: dict[int, Run | Shard] = {}

    def at(self, positions: Int64) -> Int64:
        """Return the places of some positions. These must be an arithmetic progression whose step divides `consumers`."""
        laid = np.empty(len(positions), np.int64)
        # The positions of a rank visit its consumers in turn, so every `turn`-th position belongs to the same consumer. These
        # are consecutive draws, so a pool is called once per block and not once per frame.
        turn = self._count // int(positions[1] - positions[0]) if len(positions) > 1 else 1
        for i in range(min(turn, len(positions))):
            draw, consumer = divmod(int(positions[i]), self._count)
            laid[i::turn] = self._run(consumer).draw(draw, len(laid[i::turn]))
        return laid

    def _run(self, index: int) -> Run | Shard:
        run = self._runs.get(index)
        if run is None:
            start, stop = run_start(self._frames, self._count, np.array([index, index + 1])).tolist()
            run = self._made(self._ends, start, stop, (*self._key, index), self._pool, index, self._count)
            self._runs[index] = run
        return run


def checked_lengths(episode_lengths: Sequence[int] | npt.NDArray[np.integer[Any]]) -> Int64:
    """Return the lengths of episodes as int64. Raises ValueError unless they are a list of nonnegative integers."""
    lengths = np.asarray(episode_lengths)
    if lengths.ndim != 1 or not (np.issubdtype(lengths.dtype, np.integer) or lengths.size == 0):
        raise ValueError(f"episode_lengths must be a list of integers, got shape {lengths.shape} and dtype {lengths.dtype}")
    lengths = lengths.astype(np.int64)
    if (lengths < 0).any():
        raise ValueError(
            f"episode_lengths must be nonnegative, got {lengths[lengths < 0][0]} for episode {int(np.argmax(lengths < 0))}"
        )
    return lengths
