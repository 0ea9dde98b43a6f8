"""FrameSampler: the Loader's orders under PyTorch's own DataLoader, each kept frame once, resumed on any number of ranks."""

from __future__ import annotations

import gc
import json
import logging
import subprocess
import sys
import tracemalloc
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from support.batches import samples
from support.datasets import build, read_lengths
from support.slow import examples
from torch.utils.data import BatchSampler, ConcatDataset, DataLoader

import dali_stream
from dali_stream import Dataset, FrameSampler, Loader, Mixture, Order, ResumeError

SHUFFLES = (True, "sharded", "global", False)
WORLDS = (1, 2, 3, 4, 6, 12)  # the divisors of the consumers below
LENGTHS = [5, 1, 0, 8, 7, 30]  # 51 frames
ORDER: dict[str, Any] = {"consumers": 12, "episode_pool_size": 2}

arguments = st.fixed_dictionaries(
    {
        "shuffle": st.sampled_from(SHUFFLES),
        "seed": st.integers(-5, 2**40),
        "consumers": st.just(12),
        "episode_pool_size": st.integers(1, 5),
        "drop_n_first_frames": st.integers(0, 4),
        "drop_n_last_frames": st.integers(0, 4),
    }
)
lengths = st.lists(st.integers(0, 25), min_size=1, max_size=10)


class Frames(torch.utils.data.Dataset[int]):
    """Item i is i."""

    def __getitem__(self, index: int) -> int:
        return index


def make(episode_lengths: Any = LENGTHS, rank: int = 0, world: int = 1, **options: Any) -> FrameSampler:
    return FrameSampler(episode_lengths, rank=rank, world_size=world, **(ORDER | options))


def load(sampler: FrameSampler, batch_size: int = 4, **options: Any) -> DataLoader[int]:
    return DataLoader(Frames(), batch_size=batch_size, sampler=sampler, **options)


def epoch_order(epoch: int = 0, episode_lengths: list[int] = LENGTHS, **options: Any) -> list[int]:
    """The global index of every position, out of `Order` alone."""
    first, last = options.pop("drop_n_first_frames", 0), options.pop("drop_n_last_frames", 0)
    kept = [max(length - first - last, 0) for length in episode_lengths]
    episode, frame = Order(kept, epoch=epoch, **(ORDER | options)).read(0, sum(kept))
    return (np.cumsum([0, *episode_lengths])[episode] + first + frame).tolist()


def kept_frames(episode_lengths: list[int], first: int, last: int) -> list[int]:
    starts = np.cumsum([0, *episode_lengths])
    return [int(starts[e]) + f for e, n in enumerate(episode_lengths) for f in range(first, n - last)]


def saved(state: dict[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(state))


# ----------------------------------------------------------------------------------------------------- exactly once


@given(lengths, arguments, st.sampled_from(WORLDS), st.integers(0, 3))
@examples(100)
def test_ranks_share_the_kept_frames_and_never_see_the_dropped(
    episode_lengths: list[int], options: dict[str, Any], world: int, epoch: int
) -> None:
    kept = kept_frames(episode_lengths, options["drop_n_first_frames"], options["drop_n_last_frames"])
    assume(len(kept) >= world)
    ranks = [make(episode_lengths, rank, world, **options) for rank in range(world)]
    for sampler in ranks:
        sampler.set_epoch(epoch)
    shares = [list(sampler) for sampler in ranks]
    assert {len(share) for share in shares} == {len(sampler) for sampler in ranks} == {len(kept) // world}
    served = [index for turn in zip(*shares, strict=True) for index in turn]
    order = epoch_order(epoch, episode_lengths, **options)
    assert sorted(order) == kept
    assert served == order[: len(served)], "position g is served by rank g mod W"
    assert all(type(index) is int for index in served)


def test_a_dataset_gives_the_lengths_of_its_selected_episodes(demo: Path) -> None:
    whole = [length for _, length in sorted(read_lengths(demo).items())]
    assert list(make(Dataset(demo, cameras=[]))) == epoch_order(0, whole)
    assert list(make(Dataset(demo, cameras=[], episodes=[1, 4]))) == epoch_order(0, [whole[1], whole[4]])


def test_orders_longer_than_a_block_are_whole() -> None:
    episode_lengths = [3000, 1, 9000, 2500]
    shares = [list(make(episode_lengths, rank, 3, drop_n_first_frames=1)) for rank in range(3)]
    order = epoch_order(0, episode_lengths, drop_n_first_frames=1)
    assert [share == order[rank:14496:3] for rank, share in enumerate(shares)] == [True] * 3


# ----------------------------------------------------------------------------------------------------------- epochs


def test_a_loop_without_set_epoch_goes_on_to_the_next_epoch() -> None:
    sampler = make()
    assert [list(sampler) for _ in range(3)] == [epoch_order(epoch) for epoch in range(3)]
    next(iter(sampler))  # an epoch that is left early is over
    assert list(sampler) == epoch_order(4)


def test_set_epoch_says_what_comes_next() -> None:
    sampler = make()
    for epoch in (5, 0, 0, 2):
        sampler.set_epoch(epoch)
        assert list(sampler) == epoch_order(epoch)
    assert list(sampler) == epoch_order(3)


def test_set_epoch_keeps_a_place_in_that_epoch_and_warns_of_leaving_it(caplog: pytest.LogCaptureFixture) -> None:
    first = make()
    next(islice(it := iter(first), 9, None))
    state = first.state_dict(step=10, batch_size=1)
    del it
    for epoch, expected in ((0, epoch_order(0)[10:]), (1, epoch_order(1))):
        sampler = make()
        sampler.load_state_dict(state)
        sampler.set_epoch(epoch)
        assert ("discards the resumed position 10 of epoch 0" in caplog.text) == bool(epoch)
        assert list(sampler) == expected


# --------------------------------------------------------------------------------------------------- as the Loader


@pytest.mark.parametrize("shuffle", SHUFFLES)
@pytest.mark.parametrize("last_batch", ["drop", "partial"])
def test_a_dataloader_has_the_batches_of_a_loader(small: Path, shuffle: bool | str, last_batch: str) -> None:
    dataset, order = Dataset(small, cameras=[]), {"shuffle": shuffle, "seed": 3, **ORDER}
    for rank, world in ((0, 1), (1, 3)):
        if last_batch == "partial" and world > 1:
            continue  # a Loader deals the last positions, fewer than ranks, to some of the ranks
        sampler = FrameSampler(dataset, rank=rank, world_size=world, **order)
        dataloader = load(sampler, 7, drop_last=last_batch == "drop")
        with Loader(
            dataset, batch_size=7, last_batch=last_batch, rank=rank, world_size=world, num_threads=1, **order
        ) as loader:
            assert len(dataloader) == len(loader)
            for _ in range(2):
                assert [batch.tolist() for batch in dataloader] == [samples([batch]) for batch in loader]


def test_workers_that_persist_deliver_epoch_after_epoch() -> None:
    dataloader = load(make(rank=1, world=2), num_workers=2, persistent_workers=True, drop_last=True)
    for epoch in range(3):
        share = epoch_order(epoch)[1:50:2]
        assert [batch.tolist() for batch in dataloader] == [share[i : i + 4] for i in range(0, 24, 4)]


def test_batch_samplers_and_loaders_without_batches_take_it() -> None:
    dataloader = DataLoader(Frames(), batch_sampler=BatchSampler(make(), 10, drop_last=False))
    assert [len(batch) for batch in dataloader] == [10, 10, 10, 10, 10, 1]
    assert torch.cat(list(dataloader)).tolist() == epoch_order(1)
    assert list(DataLoader(Frames(), batch_size=None, sampler=make(), num_workers=1)) == epoch_order(0)


# ---------------------------------------------------------------------------------------------------------- mixtures


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Dataset]:
    """Datasets without video, of which one shows only some episodes and another only some frames."""
    root = tmp_path_factory.mktemp("parts")
    for name, lengths in (("a", [6, 8, 4]), ("b", [9, 5, 7, 12]), ("c", [3])):
        build(root / name, lengths, {})
    return {
        "a": Dataset(root / "a", drop_n_last_frames=1),
        "b": Dataset(root / "b", episodes=[0, 2, 3]),
        "c": Dataset(root / "c"),
    }


def concatenated(parts: dict[str, Dataset]) -> ConcatDataset[tuple[int, int, int]]:
    """Map-style datasets with the same episodes, one after the other; an item is (dataset, episode, frame)."""
    lists = [
        [(d, episode, frame) for episode, n in zip(part.episodes.tolist(), part.lengths, strict=True) for frame in range(n)]
        for d, part in enumerate(parts.values())
    ]
    return ConcatDataset(lists)  # type: ignore[arg-type]


def delivered(batch: dict[str, Any]) -> list[tuple[int, int, int]]:
    return list(zip(*(batch[key].tolist() for key in ("dataset_index", "episode_index", "frame_index")), strict=True))


SHARES: list[dict[str, Any]] = [
    {},
    {"weights": {"a": 2, "b": 1, "c": 1}, "epoch_samples": 60},
    {"repeats": {"a": 1, "b": 0.5, "c": 3}},
]


@pytest.mark.parametrize("shuffle", SHUFFLES)
@pytest.mark.parametrize("shares", SHARES, ids=["union", "weights", "repeats"])
def test_a_mixture_has_the_batches_of_a_loader(parts: dict[str, Dataset], shares: dict[str, Any], shuffle: bool | str) -> None:
    mixture, frames, order = Mixture(parts, **shares), concatenated(parts), {"shuffle": shuffle, "seed": 3, **ORDER}
    for rank, world in ((0, 1), (1, 3)):
        sampler = FrameSampler(mixture, rank=rank, world_size=world, **order)
        dataloader = DataLoader(frames, batch_size=4, sampler=sampler, drop_last=True, collate_fn=list)
        with Loader(mixture, batch_size=4, rank=rank, world_size=world, num_threads=1, **order) as loader:
            assert len(dataloader) == len(loader)
            for _ in range(2):
                assert list(dataloader) == [delivered(batch) for batch in loader]
            assert loader.state_dict()["order"].items() <= sampler.state_dict(step=0, batch_size=4)["order"].items()


def test_a_mixture_with_a_batch_size_has_the_defaults_of_a_loader(parts: dict[str, Dataset]) -> None:
    mixture = Mixture(parts, temperature=2, epoch_samples=90)
    sampler = FrameSampler(mixture, batch_size=5, rank=1, world_size=2)
    dataloader = DataLoader(concatenated(parts), batch_size=5, sampler=sampler, drop_last=True, collate_fn=list)
    with Loader(mixture, batch_size=5, rank=1, world_size=2, num_threads=1) as loader:
        assert list(dataloader) == [delivered(batch) for batch in loader]


def test_a_mixture_resumes_on_other_ranks_at_the_very_next_sample(parts: dict[str, Dataset]) -> None:
    mixture = Mixture(parts, weights={"a": 2, "b": 1, "c": 1}, epoch_samples=60)
    whole = make(mixture)
    orders = [list(whole) for _ in range(3)]
    list(first := make(mixture))
    list(islice(it := iter(first), 24))
    state = saved(first.state_dict(step=3, batch_size=8))
    del it
    ranks = [make(mixture, rank, 4) for rank in range(4)]
    for sampler in ranks:
        sampler.load_state_dict(state)
    assert [index for turn in zip(*ranks, strict=True) for index in turn] == orders[1][24:]
    assert [index for turn in zip(*ranks, strict=True) for index in turn] == orders[2]


def test_what_does_not_fit_a_mixture_is_refused(parts: dict[str, Dataset]) -> None:
    state = make(mixture := Mixture(parts)).state_dict(step=0, batch_size=1)
    said = r"must be 0 for a mixture, got drop_n_first_frames=0 and drop_n_last_frames=3\. Pass them to each Dataset"
    with pytest.raises(ValueError, match=said):
        make(mixture, drop_n_last_frames=3)
    with pytest.raises(
        ValueError,
        match=r"an epoch of the mixture of c must have .* each of world_size=3 ranks, got 2 samples. .* larger epoch_samples",
    ):
        make(Mixture({"c": parts["c"]}, temperature=1, epoch_samples=2), world=3)
    with pytest.raises(ResumeError, match=r"order of the state must be .*mixture.* Resume with the same arguments"):
        make(Mixture(parts, repeats={"a": 2, "b": 1, "c": 1})).load_state_dict(state)
    for others in ({"b": parts["b"], "a": parts["a"], "c": parts["c"]}, parts | {"b": parts["a"]}):
        with pytest.raises(ResumeError, match=r"The state is of .*episodes"):
            make(Mixture(others)).load_state_dict(state)


# ----------------------------------------------------------------------------------- shuffle, consumers and pools by default


@pytest.mark.parametrize(("batch_size", "world"), [(7, 1), (5, 3), (4, 1)])
def test_with_its_batch_size_it_has_the_batches_of_a_loader_with_defaults(demo: Path, batch_size: int, world: int) -> None:
    dataset, ranks = Dataset(demo, cameras=[]), {"rank": world - 1, "world_size": world}
    sampler = FrameSampler(dataset, batch_size=batch_size, **ranks)
    with Loader(dataset, batch_size=batch_size, num_threads=1, **ranks) as loader:
        assert [b.tolist() for b in load(sampler, batch_size, drop_last=True)] == [samples([batch]) for batch in loader]
        saved = loader.state_dict()["order"].items()
    assert saved <= sampler.state_dict(step=0, batch_size=batch_size)["order"].items()


def test_without_a_batch_size_it_is_a_permutation_of_all_frames() -> None:
    assert list(FrameSampler(LENGTHS, rank=0, world_size=1)) == epoch_order(0, shuffle="global")
    for options in ({"shuffle": True}, {"consumers": 32}, {"episode_pool_size": 8}):  # pools are asked for, and what they had
        found = list(FrameSampler(LENGTHS, rank=0, world_size=1, **options))
        assert found == epoch_order(0, consumers=32, episode_pool_size=8)


@pytest.mark.parametrize("batch_size", [None, 4, 6])
@pytest.mark.parametrize("order", [{"shuffle": False}, {"shuffle": "global"}, {"consumers": 32, "episode_pool_size": 8}, ORDER])
def test_a_resumed_run_keeps_the_order_of_its_state(batch_size: int | None, order: dict[str, Any]) -> None:
    first = FrameSampler(LENGTHS, rank=0, world_size=1, **order)
    list(islice(it := iter(first), 8))
    state = saved(first.state_dict(step=2, batch_size=4))
    del it
    second = FrameSampler(LENGTHS, batch_size=batch_size, rank=0, world_size=1)
    second.load_state_dict(state)
    assert list(second) == epoch_order(0, **order)[8:]
    assert list(second) == epoch_order(1, **order)


def test_a_run_on_ranks_that_do_not_divide_the_consumers_of_its_state_is_refused() -> None:
    state = FrameSampler(LENGTHS, batch_size=8, rank=0, world_size=1).state_dict(step=0, batch_size=8)
    for options in ({"batch_size": 4}, {}):
        with pytest.raises(
            ResumeError, match=r"world_size must divide consumers=8 of the state, got 3. .* on 1, 2, 4, 8 ranks"
        ):
            FrameSampler(LENGTHS, rank=0, world_size=3, **options).load_state_dict(state)


def test_a_checkpoint_of_plain_numbers_has_the_order_that_was_chosen_for_them() -> None:
    order = list(FrameSampler(LENGTHS, batch_size=6, rank=0, world_size=1))
    sampler = FrameSampler(LENGTHS, batch_size=1, rank=0, world_size=3)
    sampler.resume(epoch=0, batch=2, batch_size=6, world_size=1)
    assert list(sampler) == order[12::3]
    with pytest.raises(ValueError, match=r"world_size must divide consumers=6, got 4\. Allowed"):
        FrameSampler(LENGTHS, batch_size=1, rank=0, world_size=4).resume(epoch=0, batch=2, batch_size=6, world_size=1)


def test_consumers_that_do_not_divide_the_global_batch_get_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    for options in ({"batch_size": 6}, {"consumers": 12}, {"batch_size": 6, "consumers": 12, "shuffle": "global"}):
        list(FrameSampler(LENGTHS, rank=0, world_size=2, **options))
    assert caplog.records == []
    list(FrameSampler(LENGTHS, batch_size=6, consumers=8, rank=0, world_size=2))
    [record] = caplog.records
    assert record.getMessage().startswith(
        "consumers=8 does not divide the global batch of 12 samples (batch_size 6, 2 ranks): "
    )


# ----------------------------------------------------------------------------------------------------------- resume


@given(lengths, arguments, st.data())
@examples(100)
def test_any_position_resumes_on_other_ranks_at_the_very_next(
    episode_lengths: list[int], options: dict[str, Any], data: st.DataObject
) -> None:
    """A run on changing numbers of ranks and batch sizes walks one epoch, without a gap and without a repetition."""
    epoch = data.draw(st.integers(0, 2), "epoch")
    assume(len(kept_frames(episode_lengths, options["drop_n_first_frames"], options["drop_n_last_frames"])) >= max(WORLDS))
    order, served, state = epoch_order(epoch, episode_lengths, **options), [], None
    for world in [*data.draw(st.lists(st.sampled_from(WORLDS), min_size=1, max_size=3), "world sizes"), 1]:
        left = (len(order) - len(served)) // world
        batch_size = data.draw(st.integers(1, 8), "batch size")
        steps = -(-left // batch_size) if world == 1 else data.draw(st.integers(0, left // batch_size), "steps")
        turn = [(len(served) + i) % world for i in range(world)]  # whose position is next
        ranks = [make(episode_lengths, rank, world, **options) for rank in turn]
        states, shares = [], []
        for sampler in ranks:
            if state is not None:
                sampler.load_state_dict(state)
            sampler.set_epoch(epoch)
            shares.append(list(islice(it := iter(sampler), steps * batch_size)))
            states.append(json.dumps(sampler.state_dict(step=steps, batch_size=batch_size)))
            del it
        assert len(set(states)) == 1, "ranks disagree"
        state = json.loads(states[0])
        served += [index for indices in zip(*shares, strict=True) for index in indices]
        assert (state["epoch"], state["position"]) == (epoch, len(served))
    assert served == order


def test_a_state_counts_what_was_delivered_and_not_what_workers_have_taken_ahead() -> None:
    for step, batch in enumerate(load(first := make(), num_workers=2, prefetch_factor=3), 1):
        if step == 3:
            state = saved(first.state_dict(step=step, batch_size=4))
            assert batch.tolist() == epoch_order()[8:12]
            break
    second = make()
    second.load_state_dict(state)
    dataloader = load(second, 5)
    assert torch.cat(list(dataloader)).tolist() == epoch_order()[12:]
    assert second.state_dict(step=8, batch_size=5)["position"] == 51, "of a smaller last batch, what it has"
    assert torch.cat(list(dataloader)).tolist() == epoch_order(1)
    assert len(second) == 51


def test_the_state_of_an_epochs_end_leads_to_the_next_epoch() -> None:
    first = make(world=2)
    steps = len(list(load(first, 5)))
    second = make(world=2)
    second.load_state_dict(saved(first.state_dict(step=steps, batch_size=5)))
    assert list(second) == []  # so a training program that counts epochs itself stays in step
    assert list(second) == epoch_order(1)[:50:2]


def test_positions_that_no_turn_of_the_ranks_took_are_served_on_fewer() -> None:
    list(first := make(world=4))
    state = first.state_dict(step=12, batch_size=1)
    second = make()
    second.load_state_dict(state)
    assert list(second) == epoch_order()[48:]


def test_a_resumed_sampler_before_its_first_step_has_the_state_it_loaded() -> None:
    list(islice(first := make(), 0))
    assert first.state_dict(step=0, batch_size=4)["position"] == 0
    list(islice(it := iter(first), 8))
    state = first.state_dict(step=2, batch_size=4)
    del it
    second = make(world=3)
    second.load_state_dict(state)
    assert second.state_dict(step=0, batch_size=64) == state


@pytest.mark.parametrize("world", WORLDS)
def test_a_checkpoint_of_plain_numbers_resumes_with_a_warning(world: int, caplog: pytest.LogCaptureFixture) -> None:
    for rank in range(world):
        sampler = make(rank=rank, world=world, drop_n_last_frames=1)
        sampler.resume(epoch=2, batch=3, batch_size=2, world_size=4)
        order = epoch_order(2, drop_n_last_frames=1)[24:]
        assert list(sampler) == order[(rank - 24) % world : len(order) // world * world : world]
    warning = caplog.records[0].getMessage()
    assert caplog.records[0].levelno == logging.WARNING
    assert "position 24 of epoch 2, from batch=3, batch_size=2, world_size=4" in warning
    assert "assumes that the episodes, shuffle, seed, consumers" in warning
    assert "only while batch_size * world_size stays 8" in warning


# --------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"episode_lengths": [5, 1, 8, 7, 30]}, "The state is of .*episodes.* Resume with the dataset"),
        ({"seed": 1}, r"this sampler: seed was 0 in the run and is 1 here\. Resume with the same arguments"),
        ({"consumers": 24}, "order of the state must be"),
        ({"episode_pool_size": 3}, "order of the state must be"),
        ({"shuffle": "global"}, "order of the state must be"),
        ({"shuffle": False}, "order of the state must be"),
        ({"drop_n_first_frames": 1}, "order of the state must be .*drop_n_first_frames was 0 in the run and is 1 here"),
        ({"drop_n_last_frames": 1}, "order of the state must be"),
    ],
)
def test_a_state_of_another_order_is_refused(options: dict[str, Any], message: str) -> None:
    state = make().state_dict(step=0, batch_size=1)
    with pytest.raises(ResumeError, match=message):
        make(**options).load_state_dict(state)


BROKEN = [{"epoch": -1}, {"epoch": True}, {"epoch": "0"}, {"position": -1}, {"position": 52}, {"position": 2.0}, {"version": 9}]


@pytest.mark.parametrize("change", [*BROKEN, {"epoch": None}, {"order": None}, {"episode_lengths": None}])
def test_a_damaged_state_is_refused(change: dict[str, Any]) -> None:
    state = make().state_dict(step=0, batch_size=1)
    for damaged in (state | change, {key: value for key, value in state.items() if key not in change}):
        with pytest.raises(ResumeError):
            make().load_state_dict(damaged)


def test_what_is_no_state_is_refused(demo: Path) -> None:
    with Loader(Dataset(demo, cameras=[]), num_threads=1) as loader:
        others = [loader.state_dict(), None, [], {}, "state"]
    for other in others:
        with pytest.raises(ResumeError, match="state must be that of a FrameSampler"):
            make().load_state_dict(other)  # type: ignore[arg-type]


def test_a_place_comes_before_the_first_index() -> None:
    sampler = make()
    next(iter(sampler))
    with pytest.raises(
        ResumeError, match=r"load_state_dict must be called before iteration begins\. Call it on a new FrameSampler"
    ):
        sampler.load_state_dict(sampler.state_dict(step=0, batch_size=1))
    with pytest.raises(ResumeError, match="resume must be called before iteration begins"):
        sampler.resume(epoch=0, batch=0, batch_size=1, world_size=1)


def test_a_step_beyond_what_was_given_out_is_refused() -> None:
    """Such as a count from the start of training, or from before a resume."""
    sampler = make()
    list(islice(it := iter(sampler), 8))
    with pytest.raises(
        ValueError, match=r"step must be within the 8 indices .*, got step=3 with batch_size=4.* the current loop"
    ):
        sampler.state_dict(step=3, batch_size=4)
    list(it)
    assert sampler.state_dict(step=13, batch_size=4)["position"] == 51
    with pytest.raises(ValueError, match=r"must be within the 51 indices .*, got step=14 with batch_size=4"):
        sampler.state_dict(step=14, batch_size=4)
    with pytest.raises(ValueError, match=r"must be within the 0 indices .*, got step=1"):
        make().state_dict(step=1, batch_size=4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch": 8}, r"batch must be at most 6, .* with batch_size=2 on 4 ranks, got 8. For .*divmod\(count"),
        ({"batch": -1}, "batch must be a nonnegative integer, got -1"),
        ({"epoch": 0.5}, "epoch must be a nonnegative integer, got 0.5"),
        ({"batch_size": 0}, "batch_size must be a positive integer, got 0"),
        ({"world_size": 5}, "world_size must divide consumers=12, got 5. Allowed"),
    ],
)
def test_numbers_that_no_run_has_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make().resume(**({"epoch": 0, "batch": 3, "batch_size": 2, "world_size": 4} | change))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"drop_n_first_frames": -1}, "drop_n_first_frames must be a nonnegative integer, got -1"),
        ({"drop_n_last_frames": 1.5}, "drop_n_last_frames must be a nonnegative integer, got 1.5"),
        (
            {"drop_n_first_frames": 20, "drop_n_last_frames": 10},
            "6 episodes with 51 frames, .* must leave a frame for each of world_size=1 ranks, got 0 frames. Drop fewer",
        ),
        (
            {"drop_n_first_frames": 20, "drop_n_last_frames": 5, "world": 6},
            "must leave a frame for each of world_size=6 ranks, got 5 frames",
        ),
        ({"shuffle": "pool"}, "shuffle must be .*, got 'pool'"),
        ({"seed": 0.5}, "seed must be an integer, got 0.5"),
        ({"consumers": 0}, "consumers must be a positive integer, got 0"),
        ({"world": 5}, "world_size must divide consumers=12, got 5. Allowed with these consumers: 1, 2, 3"),
        ({"rank": 2, "world": 2}, "rank must be .*, got rank=2 and world_size=2"),
        ({"batch_size": 4, "world": 0}, "rank must be .*, got rank=0 and world_size=0"),
        ({"batch_size": 0}, "batch_size must be a positive integer, got 0"),
        ({"rank": None}, "must both be passed or both be None, got None"),
        ({"episode_lengths": [3, -1]}, "episode_lengths must be .*, got -1 for episode 1"),
        ({"episode_lengths": "lerobot/pusht"}, "episode_lengths must be a list of integers, got shape"),
    ],
)
def test_bad_arguments_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**options)


def test_the_rank_is_that_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert list(FrameSampler(LENGTHS, **ORDER)) == epoch_order()[2::3]


# ------------------------------------------------------------------------------------------------------------ scale


@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_only_the_boundaries_of_episodes_are_in_memory(shuffle: bool | str) -> None:
    """A million episodes with a hundred million frames: a list of their indices alone would take 800 MB."""
    episode_lengths = np.full(1_000_000, 100)
    tracemalloc.start()
    try:
        sampler = FrameSampler(episode_lengths, shuffle=shuffle, drop_n_first_frames=1, rank=1, world_size=8)
        first = list(islice(iter(sampler), 1000))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(sampler) == 99_000_000 // 8
    assert len(set(first)) == 1000
    assert peak < 100e6, "about ten numbers per episode"


def test_the_package_is_imported_without_torch() -> None:
    code = "import sys, dali_stream; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert dali_stream.FrameSampler is FrameSampler


# ------------------------------------------------------------------------------ what does not go through a DataLoader


class Streamed(torch.utils.data.IterableDataset[dict[str, Any]]):
    """Makes a Loader where it is iterated."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def __iter__(self) -> Any:
        with Loader(Dataset(self.root, cameras=[]), batch_size=8, num_threads=1) as loader:
            yield from loader


@pytest.fixture
def _quick_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A DataLoader whose workers failed waits 5 s for each of them when it is dropped, whatever its dataset is."""
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.2)


@pytest.mark.usefixtures("_quick_end")
def test_a_loader_is_made_in_the_main_process_and_not_in_workers(demo: Path) -> None:
    with Loader(Dataset(demo, cameras=[]), batch_size=8) as loader:
        expected = samples(loader)
    assert samples(DataLoader(Streamed(demo), batch_size=None)) == expected
    with pytest.raises(dali_stream.DaliStreamError, match=r"worker \d of the 2 of a torch DataLoader.*without a DataLoader"):
        next(iter(DataLoader(Streamed(demo), batch_size=None, num_workers=2)))


@pytest.mark.usefixtures("_quick_end")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("batch_size", [4, None])
def test_a_dataset_or_a_loader_in_a_dataloader_is_an_error_with_advice(
    demo: Path, workers: int, batch_size: int | None
) -> None:
    dataset = Dataset(demo)
    with Loader(dataset, batch_size=8) as loader:
        advice = {dataset: r"Iterate dali_stream.Loader\(.*FrameSampler", loader: r"Iterate it, .* takes the place of a torch"}
        for given, said in advice.items():
            with pytest.raises(TypeError, match=said):
                next(iter(DataLoader(given, batch_size=batch_size, num_workers=workers, shuffle=True)))
            with pytest.raises(TypeError, match=said):
                given[0]
    gc.collect()  # the DataLoaders that the errors held
    assert len(dataset) == dataset.num_frames
    with pytest.raises(TypeError, match="is not indexable"):
        list(dataset)


# ------------------------------------------------------------------------------------------- torchdata's StatefulDataLoader


def stateful(sampler: FrameSampler, workers: int = 0) -> Any:
    module = pytest.importorskip("torchdata.stateful_dataloader")
    return module.StatefulDataLoader(Frames(), batch_size=4, sampler=sampler, num_workers=workers)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("done", [0, 3, 12])
def test_a_stateful_data_loader_resumes_after_what_it_delivered(done: int, workers: int) -> None:
    """Its workers take indices ahead; its state is that of the batch it delivered, also on other ranks."""
    expected = epoch_order()
    running = stateful(make(), workers)
    batches = iter(running)
    first = [i for batch in islice(batches, done) for i in batch.tolist()]
    state = json.loads(json.dumps(running.state_dict()))
    assert first == expected[: 4 * done]
    resumed = stateful(make(), workers)
    resumed.load_state_dict(state)
    assert [i for batch in resumed for i in batch.tolist()] == expected[4 * done :]
    assert [i for batch in resumed for i in batch.tolist()] == epoch_order(1)


@pytest.mark.parametrize("world", [1, 4])
def test_a_stateful_data_loader_of_two_ranks_resumes_on_others(world: int) -> None:
    """Each frame comes exactly once, except for a remainder at the end with fewer frames than ranks."""
    running = [stateful(make(rank=rank, world=2)) for rank in range(2)]
    batches = [iter(loader) for loader in running]
    seen = [i for each in batches for batch in islice(each, 3) for i in batch.tolist()]
    resumed = [stateful(make(rank=rank, world=world)) for rank in range(world)]
    for loader in resumed:
        loader.load_state_dict(running[0].state_dict())
        seen += [i for batch in loader for i in batch.tolist()]
    expected, left = epoch_order(), sum(LENGTHS) - 2 * 3 * 4
    assert sorted(seen) == sorted(expected[: len(expected) - left % world])


def test_state_without_arguments_is_behind_the_last_index() -> None:
    sampler = make()
    first = list(islice(iter(sampler), 7))
    resumed = make()
    resumed.load_state_dict(sampler.state_dict())
    assert first + list(resumed) == epoch_order()


@pytest.mark.parametrize("given", [{"step": 1}, {"batch_size": 4}])
def test_a_state_takes_both_arguments_or_none(given: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"step and batch_size must both be passed .* or both be None"):
        make().state_dict(**given)
