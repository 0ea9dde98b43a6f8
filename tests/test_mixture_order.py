"""The order of a mixture: its shares after every draw, each frame once per pass, the same for any number of ranks."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections import Counter
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.slow import examples, slow

from dali_stream import MixtureOrder
from dali_stream.order import has_consumers
from dali_stream.order.batches import Batches
from dali_stream.order.interleave import Interleave
from dali_stream.order.orders import DatasetOrders, MixtureOrders
from dali_stream.order.shares import Shares, shares
from dali_stream.order.state import OrderArguments

Sample = tuple[int, int]
CONSUMERS = (1, 2, 3, 4, 6, 12)

dataset_lengths = st.lists(st.integers(0, 12) | st.sampled_from((0, 1, 60)), max_size=5).map(lambda some: [*some, 1])
mixtures = st.lists(dataset_lengths, min_size=1, max_size=6)
arguments = st.fixed_dictionaries(
    {
        "shuffle": st.sampled_from((True, "sharded", "global", False)),
        "seed": st.integers(-(2**63), 2**64),
        "consumers": st.sampled_from(CONSUMERS),
        "episode_pool_size": st.integers(1, 12),
    }
)


@st.composite
def shares_of(draw: st.DrawFn, lengths: list[list[int]]) -> Shares:
    """Shares of every kind."""

    def each(values: st.SearchStrategy[Any]) -> list[Any]:
        return draw(st.lists(values, min_size=len(lengths), max_size=len(lengths)))

    frames = [sum(each) for each in lengths]
    kind = draw(st.sampled_from(("union", "repeats", "weights", "temperature")))
    if kind == "union":
        return shares(frames)
    if kind == "repeats":
        return shares(frames, repeats=each(st.sampled_from((0.1, 0.5, 1, 1.25, 3))))
    samples = draw(st.none() | st.integers(1, 300))
    if kind == "weights":
        size = draw(st.sampled_from((st.integers(1, 5), st.integers(1, 10**6), st.floats(0.1, 3))))
        return shares(frames, weights=each(size), epoch_samples=samples)
    return shares(frames, temperature=draw(st.sampled_from((0.5, 1, 2, 3.7, 100))), epoch_samples=samples)


def read(order: MixtureOrder, start: int = 0, count: int | None = None, rank: int = 0, world_size: int = 1) -> list[Sample]:
    episode, frame = order.read(start, len(order) + 1 if count is None else count, rank, world_size)
    assert episode.dtype == frame.dtype == np.int64
    return list(zip(episode.tolist(), frame.tolist(), strict=True))


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def datasets(lengths: list[list[int]], samples: list[Sample]) -> list[int]:
    """The dataset of each sample."""
    owner = [number for number, each in enumerate(lengths) for _ in each]
    return [owner[episode] for episode, _ in samples]


def off(found: list[int], shared: Shares, every: int = 1) -> Fraction:
    """Largest difference between the count of a dataset and its share, at every `every` samples, as an exact fraction."""
    weights = [int(weight) for weight in shared.weights]
    total, counts, most = sum(weights), [0] * len(weights), 0
    for k, dataset in enumerate(found, 1):
        counts[dataset] += 1
        if k % every == 0:
            most = max(most, *(abs(count * total - k * weight) for count, weight in zip(counts, weights, strict=True)))
    return Fraction(most, total)


# ---------------------------------------------------------------------------------------------------------- shares


@given(mixtures, arguments, st.integers(0, 2**20), st.data())
@examples(200)
def test_shares_hold_after_every_position(
    lengths: list[list[int]], given_arguments: dict[str, Any], epoch: int, data: st.DataObject
) -> None:
    """For every consumer, and so on every number of ranks, whether C divides T or not."""
    shared = data.draw(shares_of(lengths))
    found = datasets(lengths, read(MixtureOrder(lengths, shared, epoch=epoch, **given_arguments)))
    assert len(found) == shared.epoch_samples
    if not has_consumers(given_arguments["shuffle"]):  # one sequence, of which an epoch may begin anywhere
        assert off(found, shared, 64 if given_arguments["shuffle"] == "global" else 1) < 3
        return
    consumers = given_arguments["consumers"]
    for world in divisors(consumers):
        for rank in range(world):
            assert off(found[rank::world], shared) < 4 * consumers // world


@pytest.mark.parametrize("kind", ["weights", "union"])
@pytest.mark.parametrize("count", [2, 3, slow(10), slow(50)])
def test_consumers_are_about_two_samples_from_the_shares(kind: str, count: int) -> None:
    """And the deviations of 32 consumers cancel: theirs together is far from 32 times as large."""
    weights = np.random.default_rng(count).integers(1, 1000, count).tolist()
    lengths = [[100] * max(1, weight // 5) for weight in weights] if kind == "union" else [[100] * 64] * count
    frames = [sum(each) for each in lengths]
    shared = shares(frames) if kind == "union" else shares(frames, weights=weights, epoch_samples=32 * 1500)
    found = np.array(datasets(lengths, read(MixtureOrder(lengths, shared), 0, 32 * 1500))[: 32 * 1500 // 32 * 32])
    found = found[: len(found) // 32 * 32].reshape(-1, 32)
    own = np.cumsum(found[None] == np.arange(count)[:, None, None], 1)
    expected = shared.targets[:, None] * np.arange(1, len(found) + 1)
    assert np.abs(own - expected[:, :, None]).max() < 2.5
    assert np.abs(own.sum(2) - 32 * expected).max() < 10


@given(
    st.lists(
        st.lists(st.integers(0, 10) | st.integers(1, 10**6) | st.integers(1, 2**26), min_size=3, max_size=12),
        min_size=1,
        max_size=4,
    ),
    st.integers(0, 2**64),
    st.integers(0, 2**55),
)
@examples(200)
def test_samples_of_each_dataset_count_up(weights: list[list[int]], seed: int, begin: int) -> None:
    """They do for each consumer, from any draw on. After a number of draws equal to their sum, the counts are the weights."""
    columns = min(map(len, weights))
    table = np.array([[*each[:columns], 1] for each in weights], np.int64)
    interleave = Interleave(table, seed)
    for consumer, own in enumerate(table):
        for start in (0, begin):
            draws = np.arange(start, start + 300)
            dataset, sample = interleave.at(np.full(300, consumer), draws)
            for i in range(len(own)):
                assert (np.diff(sample[dataset == i]) == 1).all()
                assert own[i] or not (dataset == i).any()
        total = int(own.sum())
        dataset, sample = interleave.at(np.full(300, consumer), np.arange(total, total + 300))
        for i in range(len(own)):
            first = sample[dataset == i]
            assert not len(first) or first[0] == own[i]


@given(mixtures, arguments, st.data())
@examples(30)
def test_shares_hold_over_many_epochs(lengths: list[list[int]], given_arguments: dict[str, Any], data: st.DataObject) -> None:
    """If an epoch's share is not a whole number, each epoch rounds it up or down so that the total over epochs is right."""
    shared = data.draw(shares_of(lengths))
    epochs = 5 if shared.epoch_samples > 100 else 30
    counts = np.zeros(len(lengths))
    for epoch in range(epochs):
        found = datasets(lengths, read(MixtureOrder(lengths, shared, epoch=epoch, **given_arguments)))
        counts += np.bincount(found, minlength=len(lengths))
        if shared.kind in ("union", "repeats"):
            assert (counts == (epoch + 1) * shared.weights).all()
    assert np.abs(counts - epochs * shared.epoch_samples * shared.targets).max() < 3 * 12


@pytest.mark.parametrize("weights", [[2, 1, 1], [1] * 10, list(range(1, 11)), [3.3, 2.1, 1], [5, *[1] * 9]])
def test_a_batch_has_about_its_share_of_every_dataset(weights: list[float]) -> None:
    """A more even one than by independent draws: the consumers are spread over the datasets at each time."""
    shared = shares([6000] * len(weights), weights=weights, epoch_samples=64 * 600)
    order = MixtureOrder([[100] * 60] * len(weights), shared, consumers=32)
    found = np.array(datasets([[100] * 60] * len(weights), read(order))).reshape(-1, 64)
    counts = np.stack([(found == i).sum(1) for i in range(len(weights))], 1)
    variance = ((counts - 64 * shared.targets) ** 2).mean(0).sum()
    assert variance < 0.9 * (64 * shared.targets * (1 - shared.targets)).sum()


@pytest.mark.parametrize(
    ("given_shares", "weights", "epoch_samples", "passes"),
    [
        ({}, [300, 100], 400, [1, 1]),
        ({"repeats": [1, 2.5]}, [300, 250], 550, [1, 2.5]),
        ({"repeats": [0.1, 0.001]}, [30, 1], 31, [0.1, 0.01]),  # rounded up; 0.1 of 300 is 30 in decimal, not in binary
        ({"weights": [2, 1]}, [2, 1], 400, [8 / 9, 4 / 3]),
        ({"weights": [0.5, 0.3], "epoch_samples": 80}, [5, 3], 80, [1 / 6, 0.3]),
        ({"weights": [10**6, 1]}, [10**6, 1], 400, None),
        ({"weights": [10**9, 1]}, [10**9, 1], 400, None),
        ({"weights": [np.float32(0.1), np.int64(1)]}, [1, 10], 400, None),
        ({"temperature": 1}, [3, 1], 400, [1, 1]),
        ({"temperature": 10**9}, None, 400, [2 / 3, 2]),
        ({"temperature": 2, "epoch_samples": 1}, None, 1, None),
    ],
)
def test_shares_by_kind(
    given_shares: dict[str, Any], weights: list[int] | None, epoch_samples: int, passes: list[float] | None
) -> None:
    found = shares([300, 100], **given_shares)
    assert found.kind == next(iter(given_shares), "union")
    assert weights is None or found.weights.tolist() == weights
    assert found.epoch_samples == epoch_samples
    assert found.targets.sum() == pytest.approx(1)
    assert passes is None or found.passes.tolist() == pytest.approx(passes, abs=1e-6)


def test_a_temperature_gives_powers_of_the_frames() -> None:
    frames = np.array([100_000_000, 40_000, 900, 1])
    for temperature in (1.5, 2, 3, 7.25):
        expected = frames ** (1 / temperature)
        found = shares(frames, temperature=temperature).targets
        np.testing.assert_allclose(found, expected / expected.sum(), rtol=2e-3)


def test_a_temperature_that_leaves_a_dataset_out_is_an_error() -> None:
    """Also if the power is so small that its decimal form is 0."""
    for temperature in (0.1, 0.01):
        with pytest.raises(ValueError, match="number 1 must be at least 1e-06 times the largest"):
            shares([1000, 1], temperature=temperature)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            {"weights": [1, 1], "repeats": [1, 1]},
            "At most one of weights, repeats and temperature must be passed, got weights and repeats",
        ),
        (
            {"weights": [1, 1], "repeats": [1, 1], "temperature": 2},
            "At most one .* must be passed, got weights and repeats and temperature",
        ),
        ({"weights": [1, 0]}, "weights of dataset 'fold' must be .*above 0, got 0. .* leave it out of the mixture"),
        ({"weights": [-0.5, 1]}, "weights of dataset 'pick' must be .*, got -0.5"),
        ({"weights": [1, float("inf")]}, "weights of dataset 'fold' must be .*, got inf"),
        ({"weights": [1, float("nan")]}, "weights of dataset 'fold' must be .*, got nan"),
        ({"weights": [1, "2"]}, "weights of dataset 'fold' must be a finite number above 0, got '2'"),
        ({"weights": [1, 10**400]}, "weights of dataset 'fold' must be a finite number above 0, got 10{79}"),
        ({"weights": [1, True]}, "weights of dataset 'fold' must be .*, got True"),
        ({"weights": [1]}, "weights must have one number for each of 2 datasets, got 1"),
        (
            {"weights": [1e10, 0.5]},
            "weight of dataset 'fold' must be at least 1e-06 times .* of dataset 'pick', got 5e-11 times",
        ),
        ({"temperature": 0.1}, "weight at temperature 0.1 of dataset 'fold' must be .*, got 1e-20 times"),
        ({"repeats": [0, 1]}, "repeats of dataset 'pick' must be .*, got 0"),
        ({"repeats": [1, -1]}, "repeats of dataset 'fold' must be .*, got -1"),
        ({"repeats": [1e14, 1]}, "An epoch of the mixture must have at most .* samples, got"),
        ({"frames": [1 << 30, (1 << 30) + 1]}, "must have at most 2147483648 samples, got 2147483649"),
        ({"temperature": 0}, "temperature must be a finite number above 0, got 0"),
        ({"temperature": -2}, "temperature must be .*, got -2"),
        ({"temperature": float("nan")}, "temperature must be .*, got nan"),
        ({"epoch_samples": 10}, "epoch_samples must be None without weights, .*, got 10"),
        ({"repeats": [1, 1], "epoch_samples": 10}, "epoch_samples must be None with repeats, .*, got 10"),
        ({"weights": [1, 1], "epoch_samples": 0}, "epoch_samples must be a positive integer, got 0"),
        ({"weights": [1, 1], "epoch_samples": 1.5}, "epoch_samples must be a positive integer, got 1.5"),
        ({"frames": [3, 0]}, "Dataset 'fold' has no frames to sample. Leave it out of the mixture"),
        ({"frames": [], "names": []}, "A mixture must have one or more datasets"),
    ],
)
def test_bad_shares_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        shares(**({"frames": [300, 3], "names": ["pick", "fold"]} | wrong))


# ---------------------------------------------------------------------------------------------------- exactly once


@given(mixtures, arguments, st.integers(0, 3), st.data())
@examples(150)
def test_each_frame_comes_exactly_once_per_pass(
    lengths: list[list[int]], given_arguments: dict[str, Any], more_epochs: int, data: st.DataObject
) -> None:
    """After each epoch, all frames of a dataset have come equally often, or once more if the current pass has reached them.

    With weights, a consumer may be a few samples ahead of another, and so in an earlier or later pass.
    """
    shared = data.draw(shares_of(lengths))
    counts: Counter[Sample] = Counter()
    starts = np.cumsum([0, *map(len, lengths)]).tolist()
    consumers = given_arguments["consumers"] if has_consumers(given_arguments["shuffle"]) else 1
    together = consumers == 1 or shared.kind in ("union", "repeats")
    for epoch in range(more_epochs + 1):
        counts.update(read(MixtureOrder(lengths, shared, epoch=epoch, **given_arguments)))
        for first, each in zip(starts, lengths, strict=False):
            came = [counts[first + episode, frame] for episode, length in enumerate(each) for frame in range(length)]
            passes = 0 if together else -(-3 * consumers // len(came))
            assert min(came) >= sum(came) // len(came) - passes
            assert max(came) <= -(-sum(came) // len(came)) + passes
    frames = {(e, f) for e, length in enumerate(length for each in lengths for length in each) for f in range(length)}
    assert set(counts) <= frames


@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), arguments, st.integers(1, 300), st.integers(1, 5))
@examples(100)
def test_passes_of_a_single_dataset_follow_each_other(
    lengths: list[int], given_arguments: dict[str, Any], epoch_samples: int, epochs: int
) -> None:
    """The dataset takes all positions, so a pass has as many positions as the dataset has frames, wherever epochs end."""
    shared, frames = shares([sum(lengths)], weights=[1], epoch_samples=epoch_samples), sum(lengths)
    given_arguments = given_arguments | ({"shuffle": True} if given_arguments["shuffle"] == "global" else {})
    found = [one for epoch in range(epochs) for one in read(MixtureOrder([lengths], shared, epoch=epoch, **given_arguments))]
    for start in range(0, len(found), frames):
        assert len(set(found[start : start + frames])) == len(found[start : start + frames])


@given(mixtures, arguments, st.integers(0, 9))
@examples(60)
def test_an_epoch_of_the_union_is_every_frame_once(
    lengths: list[list[int]], given_arguments: dict[str, Any], epoch: int
) -> None:
    found = read(MixtureOrder(lengths, shares([sum(each) for each in lengths]), epoch=epoch, **given_arguments))
    assert sorted(found) == [
        (e, f) for e, length in enumerate(length for each in lengths for length in each) for f in range(length)
    ]


@pytest.mark.parametrize("shuffle", [True, "sharded", "global", False])
def test_half_a_pass_is_followed_by_the_other_half(shuffle: bool | str) -> None:
    lengths = [[10, 7, 13], [40]]
    shared = shares([30, 40], repeats=[0.5, 1])
    halves = [
        [sample for sample in read(MixtureOrder(lengths, shared, shuffle, 3, epoch, 4)) if sample[0] < 3] for epoch in range(4)
    ]
    assert [len(set(half)) for half in halves] == [15] * 4
    everything = {(e, f) for e, length in enumerate(lengths[0]) for f in range(length)}
    assert set(halves[0]) | set(halves[1]) == set(halves[2]) | set(halves[3]) == everything
    if shuffle:
        assert set(halves[0]) != set(halves[2]), "each pass has an order of its own"


@given(mixtures, arguments, st.integers(1, 4), st.data())
@examples(100)
def test_a_consumer_has_the_same_frames_in_all_passes(
    lengths: list[list[int]], given_arguments: dict[str, Any], epochs: int, data: st.DataObject
) -> None:
    """If it is sharded: no consumer has a frame of another one, but for fewer than 2 C frames of each dataset.

    In the union, whose consumers have equally many samples of a dataset in all epochs, there are no exceptions.
    """
    shared, consumers = data.draw(shares_of(lengths)), given_arguments["consumers"]
    given_arguments = given_arguments | {"shuffle": "sharded"}
    owners: dict[Sample, set[int]] = {}
    for epoch in range(epochs):
        for position, sample in enumerate(read(MixtureOrder(lengths, shared, epoch=epoch, **given_arguments))):
            consumer = (position + (0 if shared.kind in ("union", "repeats") else epoch * shared.epoch_samples)) % consumers
            owners.setdefault(sample, set()).add(consumer)
    world = data.draw(st.sampled_from(divisors(consumers)))
    for rank in range(world):
        found = MixtureOrder(lengths, shared, **given_arguments).shard(rank, world)
        assert found is not None
        pieces = zip(*(values.tolist() for values in found), strict=True)
        shard = [(episode, frame) for episode, start, stop in pieces for frame in range(start, stop)]
        shown = {sample for sample, own in owners.items() if any(consumer % world == rank for consumer in own)}
        assert len(set(shard)) == len(shard)
        assert shown <= set(shard)
        if shared.kind == "union":
            assert shown == set(shard)
    moved = [sample for sample, own in owners.items() if len(own) > 1]
    if shared.kind == "union":
        assert not moved
    for count in np.bincount(datasets(lengths, moved) or [0]):
        assert count < 2 * consumers


@pytest.mark.parametrize("shuffle", [True, "sharded"])
def test_runs_that_are_drawn_in_parts_are_complete(shuffle: bool | str) -> None:
    """A run of more frames than a pool is replayed for."""
    lengths = [[300] * 100, [7]]
    found = read(MixtureOrder(lengths, shares([30_000, 7]), shuffle, consumers=2, episode_pool_size=1))
    assert len(set(found)) == len(found) == 30_007


def test_unshuffled_datasets_come_in_recorded_order() -> None:
    lengths = [[3, 0, 2], [2]]
    shared = shares([5, 2], weights=[2, 1], epoch_samples=9)
    found = [read(MixtureOrder(lengths, shared, False, seed, epoch)) for seed in (0, 5) for epoch in (0, 1)]
    first, second = found[:2]
    assert found[2:] == [first, second], "the seed makes no difference"
    recorded = [(0, 0), (0, 1), (0, 2), (2, 0), (2, 1)]
    assert [sample for sample in first + second if sample[0] < 3] == (recorded * 3)[:12]
    assert [sample for sample in first + second if sample[0] == 3] == [(3, 0), (3, 1)] * 3


# ---------------------------------------------------------------------------------------------- ranks and positions


@given(mixtures, arguments, st.integers(0, 5), st.data())
@examples(100)
def test_every_world_size_and_every_slice_is_of_the_same_order(
    lengths: list[list[int]], given_arguments: dict[str, Any], epoch: int, data: st.DataObject
) -> None:
    """One object read forwards, backwards and by several ranks in turn gives what a fresh one gives from the beginning."""
    shared = data.draw(shares_of(lengths))
    whole = read(MixtureOrder(lengths, shared, epoch=epoch, **given_arguments))
    order = MixtureOrder(lengths, shared, epoch=epoch, **given_arguments)
    worlds = divisors(given_arguments["consumers"]) if has_consumers(given_arguments["shuffle"]) else [1, 2, 5]
    world = data.draw(st.sampled_from(worlds), "every rank of this world")
    for rank in range(world):
        assert read(MixtureOrder(lengths, shared, epoch=epoch, **given_arguments), 0, None, rank, world) == whole[rank::world]
    for _ in range(4):
        world = data.draw(st.sampled_from(worlds), "world_size")
        rank = data.draw(st.integers(0, world - 1), "rank")
        start = data.draw(st.integers(0, len(whole) + 3), "start")
        count = data.draw(st.integers(0, len(whole) + 3), "count")
        served = [g for g in range(start, len(whole)) if g % world == rank][:count]
        assert read(order, start, count, rank, world) == [whole[g] for g in served]


def test_seeds_and_epochs_give_orders_of_their_own() -> None:
    lengths, shared = [[50, 1], [70]], shares([51, 70], weights=[1, 1])
    for shuffle in (True, "sharded", "global"):
        orders = [read(MixtureOrder(lengths, shared, shuffle, seed, epoch, 4)) for seed in range(3) for epoch in range(3)]
        assert len({tuple(order) for order in orders}) == 9


def test_numpy_integers_are_taken() -> None:
    lengths = [np.array([50, 1], np.int32), np.array([70], np.uint8)]
    shared = shares(np.array([51, 70], np.int32), weights=np.array([2, 1]), epoch_samples=np.int64(64))  # type: ignore[arg-type]
    order = MixtureOrder(lengths, shared, True, np.int64(3), np.int64(9), np.int64(4), np.int64(2))  # type: ignore[arg-type]
    plain = shares([51, 70], weights=[2, 1], epoch_samples=64)
    assert read(order) == read(MixtureOrder([[50, 1], [70]], plain, True, 3, 9, 4, 2))


class Thirds:
    """Every third frame, as ranges of frames are."""

    def __init__(self, counts: list[int]) -> None:
        self.counts = np.array(counts)

    def frames(self, episode: Any, number: Any) -> Any:
        return 3 * number + episode % 3


def test_ranges_say_which_frames_the_samples_are() -> None:
    lengths = [[5, 4], [6, 2]]
    shared = shares([9, 8])
    plain = read(MixtureOrder(lengths, shared, consumers=2))
    ranged = read(MixtureOrder(lengths, shared, consumers=2, ranges=[None, Thirds(lengths[1])]))
    assert ranged == [(e, f) if e < 2 else (e, 3 * f + (e - 2) % 3) for e, f in plain]


# ---------------------------------------------------------------------------------------------------------- golden


def digest(order: MixtureOrder) -> str:
    return hashlib.sha256(np.stack(order.read(0, len(order))).tobytes()).hexdigest()[:16]


def golden() -> dict[str, str]:
    lengths = [[40, 0, 25], [1], [90, 35, 60]]
    frames = [65, 1, 185]
    kinds = {
        "union": shares(frames),
        "repeats": shares(frames, repeats=[1.5, 20, 0.3]),
        "weights": shares(frames, weights=[2, 0.5, 1], epoch_samples=500),
        "temperature": shares(frames, temperature=2),
    }
    found = {name: digest(MixtureOrder(lengths, shared, True, 42, 7, 4, 3)) for name, shared in kinds.items()}
    return (
        found
        | {f"{shuffle}": digest(MixtureOrder(lengths, kinds["weights"], shuffle, 42, 7)) for shuffle in ("global", False)}
        | {f"sharded {name}": digest(MixtureOrder(lengths, shared, "sharded", 42, 7, 4, 3)) for name, shared in kinds.items()}
    )


GOLDEN = {
    "union": "9a0c46d2ee0cd61a",
    "repeats": "d4e4b0606cfb657a",
    "weights": "e9b1bfbc72965e1a",
    "temperature": "eddbbc74468bbddd",
    "global": "683b9011bfb7e6dd",
    "False": "d3518043ca64160d",
    "sharded union": "f02a16ac07f189e8",
    "sharded repeats": "1e870b00596e5dca",
    "sharded weights": "d953eeb89bed924c",
    "sharded temperature": "0f90a71208d96ac3",
}


def test_the_order_is_the_same_in_every_version() -> None:
    """Saved states of users point into this order: these digests never change."""
    assert golden() == GOLDEN


@pytest.mark.slow
def test_the_order_is_the_same_in_every_process() -> None:
    code = "import sys; sys.path.insert(0, 'tests'); from test_mixture_order import *; print(golden())"
    for hash_seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=False,
            env={"PYTHONHASHSEED": hash_seed, "PYTHONPATH": ":".join(filter(None, sys.path))},
        )
        assert done.stdout.strip() == repr(GOLDEN), done.stderr


# ---------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"shuffle": "pool"}, "shuffle must be .*, got 'pool'"),
        ({"seed": 1.5}, "seed must be .*, got 1.5"),
        ({"epoch": -1}, "epoch must be from 0 to .*, got -1"),
        ({"epoch": 2**62}, "epoch must be from 0 to .*, got 4611686018427387904"),
        ({"consumers": 0}, "consumers must be a positive integer, got 0"),
        ({"episode_pool_size": 0}, "episode_pool_size must be a positive integer, got 0"),
        ({"episode_lengths": [[3, 4], [-1]]}, "episode_lengths must be .*, got -1 for episode 0"),
        ({"episode_lengths": [[3, 4], [6]]}, r"episode_lengths must have \[7, 5\] frames per dataset, as shares, got \[7, 6\]"),
        ({"episode_lengths": [[3, 4]]}, r"episode_lengths must have .* frames per dataset, as shares, got \[7\]"),
        ({"ranges": [None]}, "ranges must have one entry for each of 2 datasets, got 1"),
    ],
)
def test_bad_arguments_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MixtureOrder(**({"episode_lengths": [[3, 4], [5]], "shares": shares([7, 5])} | wrong))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"start": -1}, "start and count must be nonnegative, got -1 and"),
        ({"count": -2}, "start and count must be nonnegative, got .* and -2"),
        ({"rank": 2, "world_size": 2}, "rank must be .*, got rank=2 and world_size=2"),
        ({"world_size": 5}, r"world_size must divide consumers=12, got 5\. Allowed .*: 1, 2, 3, 4, 6, 12\."),
    ],
)
def test_bad_reads_are_refused(wrong: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MixtureOrder([[3, 4], [5]], shares([7, 5]), consumers=12).read(**({"start": 0, "count": 1} | wrong))


def test_an_unknown_argument_names_the_nearest() -> None:
    with pytest.raises(TypeError, match="consumers"):
        MixtureOrder([[3, 4], [5]], shares([7, 5]), consumer=4)  # type: ignore[call-arg]


def test_each_rank_has_its_part_of_the_open_episodes() -> None:
    orders = MixtureOrders([np.full(1000, 10)] * 2, [None, None], shares([10_000, 10_000]))
    arguments = OrderArguments(True, 0, 32, 8)
    for ranks in (1, 2, 8):
        in_use = orders.episodes_in_use(arguments, Batches(20_000, 64 // ranks, ranks, "drop"))
        assert in_use == 32 * (2 * 4 + 2) // ranks  # of each dataset 4 segments, and one that takes the place of another


@pytest.mark.parametrize(("shuffle", "expected"), [(True, 24), ("sharded", 24), ("global", 4), (False, 2)])
def test_the_pools_of_a_rank_are_its_open_episodes(shuffle: bool | str, expected: int) -> None:
    """An order without pools has those of a batch."""
    arguments, batches = OrderArguments(shuffle, 0, 12, 3), Batches(3000, 4, 2, "drop")  # type: ignore[arg-type]
    for orders in (DatasetOrders(np.full(300, 10)), MixtureOrders([np.full(300, 10)], [None], shares([3000]))):
        assert orders.episodes_in_use(arguments, batches) == expected


def test_no_sample_beyond_the_end() -> None:
    for shuffle in (True, "global", False):
        order = MixtureOrder([[3, 4], [5]], shares([7, 5]), shuffle)
        assert read(order, 12, 3) == read(order, 50, 3) == read(order, 3, 0) == []
