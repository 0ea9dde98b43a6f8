"""A run that is resumed continues at the very next sample: from every position, in every mode, on any number of ranks."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from support.batches import check_identities, equal, samples
from support.datasets import CAMERAS, TOP, change_info, copied, read_lengths
from support.slow import examples, slow, slow_after

from dali_stream import Dataset, Loader, Mixture, Order, ResumeError, tools
from dali_stream.lerobot import v3
from dali_stream.order import default_pools

SHUFFLES = (True, "sharded", "global", False)
LAST_BATCH = ("drop", "partial", "pad")
CONSUMERS = 12
LENGTHS = (5, 1, 8, 7)


@pytest.fixture(scope="module")
def rows(odd: Path) -> Dataset:
    """21 frames without images."""
    return Dataset(odd, cameras=[])


def make(dataset: Dataset, **arguments: Any) -> Loader:
    return Loader(dataset, **({"batch_size": 4, "consumers": CONSUMERS, "episode_pool_size": 2, "num_threads": 1} | arguments))


def resumed(dataset: Dataset, state: dict[str, Any], **arguments: Any) -> Loader:
    """A new loader that continues from `state`, converted to JSON and back as for a file."""
    loader = make(dataset, **arguments)
    loader.load_state_dict(json.loads(json.dumps(state)))
    return loader


def epoch_order(shuffle: bool | str, epoch: int) -> list[int]:
    """The `index` of every position, out of `Order` alone."""
    episode, frame = Order(LENGTHS, shuffle, 0, epoch, CONSUMERS, 2).read(0, sum(LENGTHS))
    return (np.cumsum([0, *LENGTHS])[episode] + frame).tolist()


# ------------------------------------------------------------------------------------------------------- one world size


@pytest.mark.parametrize("shuffle", [True, *map(slow, ("sharded", "global", False))])
@pytest.mark.parametrize("last_batch", LAST_BATCH)
def test_every_state_of_two_epochs_leads_to_the_very_next_batch(rows: Dataset, shuffle: bool | str, last_batch: str) -> None:
    arguments: dict[str, Any] = {"shuffle": shuffle, "last_batch": last_batch}
    batches, states = [], []
    with make(rows, **arguments) as loader:
        states.append(loader.state_dict())
        for _ in range(2):
            for batch in loader:
                batches.append(batch)
                states.append(loader.state_dict())
        states[-1] = loader.state_dict()  # the second epoch is over now, and the third is next
        batches += list(loader)
    per_epoch = len(batches) // 3
    for taken, state in enumerate(states):
        with resumed(rows, state, **arguments) as loader:
            assert (loader.epoch, loader.batch_index) == divmod(taken, per_epoch)  # of an epoch's last batch, the next epoch
            rest = list(loader)
            end = (taken // per_epoch + 1) * per_epoch
            assert len(rest) == end - taken
            assert all(equal(a, b) for a, b in zip(rest, batches[taken:end], strict=True))


@pytest.mark.parametrize("last_batch", slow_after(1, LAST_BATCH))
def test_every_step_of_two_epochs_leads_to_the_very_next_batch(rows: Dataset, last_batch: str) -> None:
    """As with a checkpoint that has only the number of steps: 8 samples a step, on 1, 2 and 4 ranks."""
    arguments: dict[str, Any] = {"last_batch": last_batch, "consumers": 8}
    with make(rows, batch_size=8, **arguments) as loader:
        steps, whole = len(loader), [sorted(samples([batch])) for _ in range(3) for batch in loader]
    # With "pad", the samples that fill the last batch depend on the number of ranks.
    for step, world in itertools.product(range(2 * steps + 1), (1,) if last_batch == "pad" else (1, 2, 4)):
        global_batches: list[list[int]] = [[] for _ in whole[step:]]
        for rank in range(world):
            with make(rows, batch_size=8 // world, rank=rank, world_size=world, **arguments) as loader:
                loader.resume(epoch=step // steps, batch=step % steps)
                assert (loader.epoch, loader.batch_index) == divmod(step, steps)
                for found, batch in zip(global_batches, (batch for _ in range(3) for batch in loader), strict=False):
                    found += samples([batch])
        assert list(map(sorted, global_batches)) == whole[step:]


def test_a_step_that_no_epoch_has_is_refused(rows: Dataset) -> None:
    with make(rows) as loader:
        with pytest.raises(ValueError, match=r"batch must be at most 5, .* got 6\. For .*divmod\(count, len\(loader\)\)"):
            loader.resume(epoch=0, batch=6)
        with pytest.raises(ValueError, match=r"epoch must be .*, got -1"):
            loader.resume(epoch=-1, batch=0)
        loader.resume(epoch=3, batch=5)
        assert (loader.epoch, loader.batch_index) == (4, 0)
        next(iter(loader))
        with pytest.raises(ResumeError, match="resume must be called before iteration begins"):
            loader.resume(epoch=0, batch=0)


def test_a_resume_without_a_state_names_where_no_sample_repeats(rows: Dataset, caplog: pytest.LogCaptureFixture) -> None:
    """A run of another order repeats samples when it is resumed within an epoch, but not at the step that the warning names."""
    whole = set(range(rows.num_frames))
    with make(rows, batch_size=8, seed=1, last_batch="partial") as other:
        seen = samples(itertools.islice(other, 2))
    with make(rows, batch_size=8, last_batch="partial") as loader:
        loader.resume(epoch=0, batch=2)
        assert set(seen) & set(samples(loader)), "samples repeat"
        steps = len(loader)
    assert "Samples of this epoch may repeat, and others may be missing" in caplog.text
    [(step, epoch, batch)] = re.findall(r"from a checkpoint at step (\d+), or with epoch=(\d+), batch=(\d+)", caplog.text)
    assert divmod(int(step), steps) == (int(epoch), int(batch))
    caplog.clear()
    with make(rows, batch_size=8, last_batch="partial") as loader:
        loader.resume(epoch=int(epoch), batch=int(batch))
        assert sorted(samples(loader)) == sorted(whole)
    with make(rows, batch_size=8, last_batch="partial") as loader:
        loader.resume(epoch=0, batch=steps)  # as a checkpoint at the end of an epoch says it
        assert sorted(samples(loader)) == sorted(whole)
    assert "may repeat" not in caplog.text


def test_resumed_epochs_roll_over(rows: Dataset) -> None:
    with make(rows, last_batch="partial") as loader:
        it = iter(loader)
        next(it)
        state = loader.state_dict()
    with resumed(rows, state, last_batch="partial") as loader:
        assert samples(loader) == epoch_order(True, 0)[4:]
        for epoch in (1, 2):
            assert (loader.state_dict()["epoch"], loader.state_dict()["position"]) == (epoch, 0)
            assert samples(loader) == epoch_order(True, epoch)


def test_epoch_and_batch_index_say_where_the_loader_is(rows: Dataset) -> None:
    with make(rows) as loader:
        places = [(loader.epoch, loader.batch_index)]
        for _ in range(2):
            places += [(loader.epoch, loader.batch_index) for _ in loader]
            places.append((loader.epoch, loader.batch_index))
    assert len(loader) == 5
    assert places == [(0, 0), *((0, n) for n in range(1, 6)), (1, 0), *((1, n) for n in range(1, 6)), (2, 0)]


def test_batch_index_tells_what_is_left_of_an_epoch_resumed_with_another_batch_size(rows: Dataset) -> None:
    with make(rows) as loader:
        next(it := iter(loader))
        state = loader.state_dict()
        del it
    for batch_size in (1, 3, 4, 5, 17):
        with resumed(rows, state, batch_size=batch_size, last_batch="partial") as loader:
            left = len(loader) - loader.batch_index
            assert left == len(list(loader)) == -(-17 // batch_size)


@pytest.mark.parametrize("cut", [0, 3, 5, 6, 10])
def test_the_loop_of_the_readme_resumes_as_it_stands(rows: Dataset, cut: int) -> None:
    """Wherever it was cut, and also where it was done: the same batches in all, and no more epochs than were asked for."""

    def train(state: dict[str, Any] | None, stop: int) -> tuple[list[int], dict[str, Any] | None]:
        seen: list[int] = []
        with make(rows) as loader:
            if state:
                loader.load_state_dict(state)
            for _ in range(loader.epoch, 2):
                for batch in loader:
                    seen += samples([batch])
                    state = json.loads(json.dumps(loader.state_dict()))
                    if len(seen) == 4 * stop:
                        return seen, state
        return seen, state

    first, state = train(None, cut) if cut else ([], None)
    again, _ = train(state, 10**9)
    assert first + again == train(None, 10**9)[0] == epoch_order(True, 0)[:20] + epoch_order(True, 1)[:20]


def test_what_a_break_leaves_out_is_told_once(rows: Dataset, caplog: pytest.LogCaptureFixture) -> None:
    def told() -> list[str]:
        return [record.getMessage() for record in caplog.records if "left out" in record.getMessage()]

    with make(rows) as loader:
        for _ in range(2):
            for number, _ in enumerate(loader, 1):
                if number == len(loader):
                    break  # on the last batch: nothing is left
        next(it := iter(loader))
        next(it)  # an iterator that is kept continues
        assert told() == []
        del it
        for _ in range(3):
            next(iter(loader))
            assert [text.partition(". ")[0] for text in told()] == [
                "the last iteration ended before its epoch: 3 of 5 batches of epoch 2 are left out, and epoch 3 begins"
            ]


def test_a_batch_is_shown_without_a_change_to_the_loader(demo: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As the warning after `next(iter(loader))` says."""
    options: dict[str, Any] = {"batch_size": 4, "num_threads": 1, "device": "cpu", "image_size": (32, 32)}
    with Loader(demo, **options) as loader:
        expected = list(itertools.islice(iter(loader), 2))
    with Loader(demo, **options) as loader:
        next(iter(loader))
        next(iter(loader))
        assert "use loader.batch_at(epoch, batch)" in caplog.messages[-1]
    with Loader(demo, **options) as loader:
        for number in (1, 0):
            shown = loader.batch_at(0, number)
            assert shown.keys() == expected[number].keys()
            for key, value in shown.items():
                assert value == expected[number][key] if isinstance(value, list) else value.equal(expected[number][key])
        assert (loader.epoch, loader.batch_index) == (0, 0)
        assert next(iter(loader))["index"].equal(expected[0]["index"])


def test_leaving_a_loop_early_begins_the_next_epoch(rows: Dataset) -> None:
    with make(rows, last_batch="partial") as loader:
        for epoch in range(3):
            for number, batch in enumerate(loader):
                assert samples([batch]) == epoch_order(True, epoch)[4 * number : 4 * number + 4]
                if number == epoch:
                    break
        state = loader.state_dict()
        assert (state["epoch"], state["position"]) == (2, 12)
        assert samples(loader) == epoch_order(True, 3)
    with resumed(rows, state, last_batch="partial") as loader:  # what was saved is a place in the epoch that was left
        assert samples(loader) == epoch_order(True, 2)[12:]


def test_a_state_of_a_resumed_loader_is_that_of_the_uninterrupted_one(rows: Dataset) -> None:
    with make(rows) as loader:
        states = [loader.state_dict() for _ in loader]
    with resumed(rows, states[1]) as loader:
        assert loader.state_dict() == states[1]
        assert [loader.state_dict() for _ in loader] == states[2:]


def test_another_batch_size_goes_on_at_the_same_sample(rows: Dataset) -> None:
    with make(rows) as loader:
        next(it := iter(loader))
        state = loader.state_dict()
        del it
    with resumed(rows, state, batch_size=3, last_batch="partial", num_threads=2) as loader:
        assert samples(loader) == epoch_order(True, 0)[4:]


# ------------------------------------------------------------------------------------------------------ any world sizes


def run_ranks(
    dataset: Dataset, state: dict[str, Any] | None, world: int, steps: int, **arguments: Any
) -> tuple[list[list[int]], dict[str, Any]]:
    """Runs `world` ranks for `steps` batches: the samples of each step over all ranks, and the state they agree on."""
    found: list[list[int]] = [[] for _ in range(steps)]
    states = []
    for rank in range(world):
        with make(dataset, rank=rank, world_size=world, **arguments) as loader:
            if state is not None:
                loader.load_state_dict(json.loads(json.dumps(state)))
            count = 0
            if steps:
                for count, batch in enumerate(loader, 1):
                    found[count - 1] += samples([batch])
                    if count == steps:
                        break
            states.append((count, json.dumps(loader.state_dict())))
    assert len(set(states)) == 1, "ranks disagree"
    return found, json.loads(states[0][1])


@given(
    shuffle=st.sampled_from(SHUFFLES),
    last_batch=st.sampled_from(("drop", "pad")),
    phases=st.lists(st.tuples(st.sampled_from((1, 2, 3, 4)), st.integers(1, 2), st.integers(1, 3)), min_size=2, max_size=4),
)
@examples(20, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_other_numbers_of_ranks_continue_the_same_order(
    rows: Dataset, shuffle: bool | str, last_batch: str, phases: list[tuple[int, int, int]]
) -> None:
    state, position = None, 0
    for world, steps, batch_size in phases:
        if position + world * batch_size * steps > sum(LENGTHS):
            break
        arguments: dict[str, Any] = {"shuffle": shuffle, "last_batch": last_batch, "batch_size": batch_size}
        found, state = run_ranks(rows, state, world, steps, **arguments)
        for step in found:
            stop = position + world * batch_size
            assert sorted(step) == sorted(epoch_order(shuffle, 0)[position:stop])
            position = stop
        assert (state["epoch"], state["position"]) == (0, position)


@pytest.mark.parametrize("shuffle", [slow(True), "sharded"])
def test_killed_runs_of_4_2_and_8_ranks_have_each_frame_once_per_epoch(demo: Path, shuffle: bool | str) -> None:
    """Each phase is killed some batches after its last state, across the ends of epochs, and continues with other ranks."""
    dataset, served = Dataset(demo, cameras=[]), [list[int]() for _ in range(3)]
    state, epoch, batches = None, 0, dataset.num_frames // 8
    options: dict[str, Any] = {"shuffle": shuffle, "consumers": 8, "last_batch": "partial"}
    for world, steps in ((4, batches // 2), (2, batches), (8, batches), (2, batches)):
        found, state = run_ranks_on(dataset, state, world, steps, killed_after=3, batch_size=8 // world, **options)
        for epoch, step in found:
            served[epoch] += step
    assert (epoch, [sorted(epoch) for epoch in served]) == (2, [list(range(dataset.num_frames))] * 3)


def run_ranks_on(
    dataset: Dataset, state: dict[str, Any] | None, world: int, steps: int, killed_after: int, **arguments: Any
) -> tuple[list[tuple[int, list[int]]], dict[str, Any]]:
    """Run `world` ranks for `steps` batches, also of later epochs, up to the end of epoch 2, and a few more that are lost.

    Returns:
        Epoch and samples of each step over all ranks, and the state after these steps.
    """
    found: dict[int, tuple[int, list[int]]] = {}
    states: set[str] = set()
    for rank in range(world):
        with make(dataset, rank=rank, world_size=world, **arguments) as loader:
            if state is not None:
                loader.load_state_dict(state)
            last = loader.state_dict()
            count = 0
            while loader.epoch < 3 and count < steps + killed_after:
                for batch in loader:
                    count += 1
                    if count <= steps:
                        found.setdefault(count, (loader.epoch, []))[1].extend(samples([batch]))
                        last = loader.state_dict()
                    if count == steps + killed_after:
                        break
            states.add(json.dumps(last))
    assert len(states) == 1, "ranks disagree"
    return [found[count] for count in sorted(found)], json.loads(states.pop())


@pytest.mark.parametrize("shuffle", [True, "sharded"])
def test_the_global_batch_of_a_step_does_not_depend_on_the_world_size(rows: Dataset, shuffle: bool | str) -> None:
    """In two epochs. The mean gradient of several processes is therefore that of one process."""
    expected = [sorted(epoch_order(shuffle, epoch)[g : g + 6]) for epoch in (0, 1) for g in (0, 6, 12)]
    for world in (1, 2, 3, 6):
        first, state = run_ranks(rows, None, world, 3, batch_size=6 // world, shuffle=shuffle)
        second, _ = run_ranks(rows, state, world, 3, batch_size=6 // world, shuffle=shuffle)
        assert list(map(sorted, first + second)) == expected


@pytest.mark.parametrize(("first", "then"), [slow(1, 2), slow(2, 1), (4, 2), slow(2, 4), (3, 4)])
@pytest.mark.parametrize("last_batch", LAST_BATCH)
def test_an_epoch_shared_by_two_world_sizes_is_served_once(rows: Dataset, last_batch: str, first: int, then: int) -> None:
    arguments: dict[str, Any] = {"batch_size": 2, "last_batch": last_batch}
    before, state = run_ranks(rows, None, first, 1, **arguments)
    after, end = run_ranks(rows, state, then, 30, **arguments)
    served, expected = list(itertools.chain(*before, *after)), epoch_order(True, 0)
    assert (end["epoch"], end["position"]) == (1, 0)
    if last_batch == "drop":
        whole = 2 * first + (21 - 2 * first) // (2 * then) * 2 * then
        assert sorted(served) == sorted(expected[:whole])
    elif last_batch == "partial":
        assert sorted(served) == list(range(21))
    else:
        assert set(served) == set(range(21))


def test_fewer_frames_left_than_ranks_are_left_out_with_a_warning(rows: Dataset, caplog: pytest.LogCaptureFixture) -> None:
    """Each rank needs as many batches as the others, and no earlier batch can take the remaining frames."""
    _, state = run_ranks(rows, None, 1, 5, last_batch="partial")
    assert state["position"] == 20
    after, _ = run_ranks(rows, state, 2, 1, last_batch="partial")
    assert [sorted(step) for step in after[:1]] == [sorted(epoch_order(True, 1)[: len(after[0])])]
    assert "left out: 1 frame of epoch 0, fewer" in caplog.text


def test_frames_of_a_run_resumed_on_two_ranks_are_the_right_ones(small: Path) -> None:
    lengths = read_lengths(small)
    arguments: dict[str, Any] = {"batch_size": 16, "last_batch": "partial"}
    served = []
    with Loader(small, **arguments) as loader:
        for number, batch in enumerate(loader):
            served += samples([batch])
            if number == 4:
                break
        state = loader.state_dict()
    for rank in range(2):
        with Loader(small, rank=rank, world_size=2, **arguments) as loader:
            loader.load_state_dict(state)
            for batch in loader:
                served += samples([batch])
                for camera in CAMERAS:
                    check_identities(batch, camera, None, lengths)
    assert sorted(served) == list(range(sum(lengths.values())))


# ----------------------------------------------------------------------------------- consumers and pools by default


def plain(dataset: Dataset, batch_size: int, world: int = 1, **arguments: Any) -> Loader:
    return Loader(dataset, batch_size=batch_size, rank=0, world_size=world, num_threads=1, last_batch="pad", **arguments)


def pools(loader: Loader) -> tuple[int, int]:
    order = loader.state_dict()["order"]
    return order["consumers"], order["episode_pool_size"]


def pooled_order(epoch: int, consumers: int, pool: int) -> list[int]:
    episode, frame = Order(LENGTHS, True, 0, epoch, consumers, pool).read(0, sum(LENGTHS))
    return (np.cumsum([0, *LENGTHS])[episode] + frame).tolist()


def test_the_default_order_is_that_of_the_global_batch(rows: Dataset) -> None:
    for batch_size, world, options, expected in (
        (64, 1, {}, (32, 8)),
        (8, 1, {}, (8, 32)),
        (4, 3, {}, (12, 22)),
        (64, 1, {"consumers": 16}, (16, 16)),
        (64, 1, {"episode_pool_size": 3}, (32, 3)),
    ):
        with plain(rows, batch_size, world, **options) as loader:
            assert pools(loader) == expected
    with plain(rows, 3) as loader:
        assert samples(loader) == pooled_order(0, *default_pools(3, 1))


@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_resumed_run_keeps_the_pools_of_its_state_in_all_epochs(rows: Dataset, world: int) -> None:
    with plain(rows, 4, episode_pool_size=2) as loader:
        next(it := iter(loader))
        state = loader.state_dict()
        del it
    for options in ({}, {"consumers": 4}, {"episode_pool_size": 2}):
        with plain(rows, 6, world, **options) as loader:
            assert pools(loader) != (4, 2)
            loader.load_state_dict(json.loads(json.dumps(state)))
            for epoch in (0, 1):
                order = pooled_order(epoch, 4, 2)[0 if epoch else 4 :: world]
                assert samples(loader)[: len(order)] == order
                assert pools(loader) == (4, 2)


def test_a_state_of_the_defaults_before_resumes_in_its_order(rows: Dataset) -> None:
    """Loaders had consumers=32 and episode_pool_size=8 whatever the batch, and their states say so."""
    with plain(rows, 3) as loader:
        state = loader.state_dict() | {"position": 6}
        state["order"] = {"shuffle": True, "seed": 0, "consumers": 32, "episode_pool_size": 8}
    with plain(rows, 3) as loader:
        loader.load_state_dict(state)
        assert samples(loader) == pooled_order(0, 32, 8)[6:]


def test_a_world_size_that_does_not_divide_the_consumers_of_the_state_is_refused(rows: Dataset) -> None:
    with plain(rows, 6) as loader:
        state = loader.state_dict()
    with plain(rows, 4, 4) as loader:
        before = pools(loader)
        with pytest.raises(
            ResumeError, match=r"world_size must divide consumers=6 of the state, got 4. .* on 1, 2, 3, 6 ranks"
        ):
            loader.load_state_dict(state)
        assert pools(loader) == before


def test_given_pools_that_are_not_those_of_the_state_are_refused(rows: Dataset) -> None:
    with plain(rows, 6) as loader:
        state = loader.state_dict()
    for options in ({"consumers": 3}, {"episode_pool_size": 5}, {"seed": 1}, {"shuffle": "global"}):
        with plain(rows, 6, **options) as loader, pytest.raises(ResumeError, match="order of the state must be"):
            loader.load_state_dict(state)
    for damage in ({"consumers": 0}, {"consumers": 2.0}, {"episode_pool_size": True}, {"shuffle": "pool"}, {"consumers": None}):
        with plain(rows, 6) as loader, pytest.raises(ResumeError, match="order of the state must be"):
            loader.load_state_dict(state | {"order": state["order"] | damage})


def test_consumers_that_do_not_divide_the_global_batch_get_one_warning(rows: Dataset, caplog: pytest.LogCaptureFixture) -> None:
    def told() -> list[str]:
        found = [record.getMessage() for record in caplog.records if "does not divide the global batch" in record.getMessage()]
        caplog.clear()
        return found

    for arguments in ({}, {"consumers": 3}, {"consumers": 12, "shuffle": False}, {"consumers": 12, "shuffle": "global"}):
        with plain(rows, 3, **arguments):
            assert told() == []
    with plain(rows, 3, consumers=12) as loader:
        list(loader)
        [text] = told()
        assert text.startswith("consumers=12 does not divide the global batch of 3 samples (batch_size 3, 1 rank): ")
        assert text.endswith("a multiple of 12. A new run can also leave consumers out, which makes it 3")
        state = loader.state_dict()
    with plain(rows, 3) as loader:
        assert told() == []
        loader.load_state_dict(state)
        assert len(told()) == 1, "it is the state's order now"


# --------------------------------------------------------------------------------------------------------------- refusals


def test_a_state_of_something_else_is_refused(odd: Path, rows: Dataset, demo: Path) -> None:
    with make(rows) as loader:
        next(it := iter(loader))
        state = loader.state_dict()
        del it
    others = [
        (Dataset(demo, cameras=[]), {}, "of another dataset or of other episodes"),
        (Dataset(odd, cameras=[], episodes=[0, 2]), {}, "of another dataset or of other episodes"),
        (rows, {"seed": 1}, r"this loader: seed was 0 in the run and is 1 here\. Resume with the same arguments"),
        (rows, {"consumers": 24}, "order of the state must be .*: consumers was 12 in the run and is 24 here"),
        (rows, {"episode_pool_size": 3}, "order of the state must be"),
        (rows, {"shuffle": "global"}, "order of the state must be"),
        (rows, {"shuffle": "sharded"}, "order of the state must be .*: shuffle was True in the run and is sharded here"),
        (rows, {"shuffle": False}, "order of the state must be"),
    ]
    for dataset, arguments, message in others:
        with make(dataset, **arguments) as loader:
            with pytest.raises(ResumeError, match=message):
                loader.load_state_dict(state)
            assert len(samples(loader)) > 0, "the loader is as before"


def change_tasks(root: Path) -> dict[str, Any]:
    path = root / "meta/tasks.parquet"
    tasks = v3.read_names(Dataset(root).store, v3.TASKS, "task_index")
    first = min(tasks)
    table = v3.tasks_table({**tasks, first: "another task"})
    pq.write_table(table, path)
    return {}


def change_statistics(root: Path, key: str) -> dict[str, Any]:
    path = root / "meta/stats.json"
    stats = json.loads(path.read_text())
    stats.setdefault(key, {})["count"] = [1000]
    path.write_text(json.dumps(stats))
    return {}


def change_features(root: Path) -> dict[str, Any]:
    change_info(root, fps=2 * Dataset(root).fps)
    return {}


CHANGES: dict[str, tuple[Callable[[Path], dict[str, Any]], str]] = {
    "tasks": (change_tasks, "tasks"),
    "statistics": (lambda root: change_statistics(root, "action"), "statistics"),
    "features": (change_features, "features or fps"),
    "selection": (lambda root: {"episodes": [0]}, r"selection of episodes \(episodes=, episode_filter=\)"),
    "ranges": (
        lambda root: {"drop_n_last_frames": 1},
        r"sampled frames \(frames=, drop_n_first_frames=, drop_n_last_frames=\)",
    ),
    "two": (lambda root: change_tasks(root) | {"drop_n_last_frames": 1}, r"sampled frames .*, tasks"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_part_of_a_dataset_that_differs_is_named(small: Path, tmp_path: Path, change: str) -> None:
    root = copied(small, tmp_path)
    with make(Dataset(root)) as loader:
        state = loader.state_dict()
    with make(Mixture({"one": small, "other": root})) as loader:
        mixed = loader.state_dict()
    changing, words = CHANGES[change]
    arguments = changing(root)
    with (
        make(Dataset(root, **arguments)) as loader,
        pytest.raises(ResumeError, match=f"These parts differ: {words}\\. Resume with"),
    ):
        loader.load_state_dict(state, allow_other_frames=True)  # these are not about frames
    words = f"other: {words.replace(', tasks', ', other: tasks')}"
    mixture = Mixture({"one": small, "other": Dataset(root, **arguments)})
    with make(mixture) as loader, pytest.raises(ResumeError, match=f"These parts differ: {words}"):
        loader.load_state_dict(mixed)


@pytest.mark.slow
def test_other_statistics_of_a_camera_are_allowed_by_name(
    small: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = copied(small, tmp_path)
    with make(Dataset(small), device="cpu") as loader:
        expected = samples(loader)
    with make(Dataset(small), device="cpu") as loader:
        next(it := iter(loader))
        del it
        state = loader.state_dict()
    change_statistics(root, TOP)
    with make(Dataset(root), device="cpu") as loader:
        with pytest.raises(ResumeError, match=r"These parts differ: statistics of cameras\. .*, allow_other_frames=True\)"):
            loader.load_state_dict(state)
        loader.load_state_dict(state, allow_other_frames=True)
        assert "has other frames than the run had for the same rows" in caplog.text
        assert samples(loader) == expected[4:]


def test_a_state_without_the_parts_of_its_dataset_is_refused_all_the_same(odd: Path, rows: Dataset) -> None:
    with make(rows) as loader:
        state = loader.state_dict()
    for contents in ({}, {"contents": None}, {"contents": "no"}):
        old = {key: value for key, value in state.items() if key not in ("contents", "source")} | contents
        with make(rows) as loader:
            loader.load_state_dict(old)
        with (
            make(Dataset(odd, cameras=[], episodes=[0])) as loader,
            pytest.raises(ResumeError, match="of another dataset or of"),
        ):
            loader.load_state_dict(old)


@pytest.mark.slow
def test_a_run_goes_on_on_a_smaller_copy_by_name(small: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """On a smaller copy: the rows are the very next ones, and the frames are those of these rows."""
    out = tmp_path / "out"
    tools.prepare(small, out, size=(64, 72))

    def run(root: Path, **arguments: Any) -> Loader:
        return make(Dataset(root), image_size=(64, 72), image_dtype="uint8", seed=3, device="cpu", **arguments)

    with run(small) as loader:
        expected = list(loader)
    with run(small) as loader:
        next(it := iter(loader))
        del it
        state = loader.state_dict()
    with run(out) as loader:
        with pytest.raises(ResumeError, match="These parts differ: cameras, statistics of cameras") as caught:
            loader.load_state_dict(state)
        assert "load_state_dict(state, allow_other_frames=True)" in str(caught.value)
        loader.load_state_dict(state, allow_other_frames=True)
        assert "These parts differ: cameras" in caplog.text
        rest = list(loader)
    assert samples(rest) == samples(expected[1:])
    for key in CAMERAS:
        found, right = (torch.cat([batch[key] for batch in part]).float() for part in (rest, expected[1:]))
        assert (found - right).abs().mean() < 6
        assert (found.roll(1, 0) - right).abs().mean() > 6, "of another row"


def test_cameras_and_windows_are_not_part_of_the_order(odd: Path, rows: Dataset) -> None:
    with make(rows) as loader:
        next(it := iter(loader))
        state = loader.state_dict()
        del it
    arguments: dict[str, Any] = {"delta_timestamps": {"matrix": [0.0, 0.1]}, "image_dtype": "uint8"}
    with resumed(Dataset(odd), state, **arguments) as loader:
        assert samples(loader) == epoch_order(True, 0)[4:20]


def test_a_state_comes_before_the_first_batch(rows: Dataset) -> None:
    with make(rows) as loader:
        state = loader.state_dict()
        for _ in loader:
            with pytest.raises(ResumeError, match=r"must be called before iteration begins\. Call it on a new"):
                loader.load_state_dict(state)
        with pytest.raises(ResumeError, match="before iteration begins"):
            loader.load_state_dict(state)


@pytest.mark.parametrize(
    "change",
    [
        {"version": 99},
        {"version": None},
        {"dataset": None},
        {"order": None},
        {"order": "pool"},
        {"epoch": -1},
        {"epoch": 1.0},
        {"epoch": True},
        {"epoch": "0"},
        {"epoch": None},
        {"position": -1},
        {"position": 22},
        {"position": 2.0},
        {"position": [4]},
    ],
)
def test_a_damaged_state_is_refused(rows: Dataset, change: dict[str, Any]) -> None:
    with make(rows) as loader:
        state = loader.state_dict()
        with pytest.raises(ResumeError):
            loader.load_state_dict(state | change)
        without = {key: value for key, value in state.items() if key not in change}
        with pytest.raises(ResumeError):
            loader.load_state_dict(without)


@pytest.mark.parametrize("state", [None, 3, "state", [], {}, [("version", 1)], {"epoch": 0, "position": 0}])
def test_what_is_no_state_is_refused(rows: Dataset, state: Any) -> None:
    with make(rows) as loader, pytest.raises(ResumeError, match="state must be that of a Loader"):
        loader.load_state_dict(state)


def test_a_state_is_json_whatever_integers_the_order_was_given(rows: Dataset) -> None:
    with make(rows, consumers=np.int64(12), episode_pool_size=np.int64(2), seed=np.int64(0)) as loader:
        state = json.loads(json.dumps(loader.state_dict()))
    with make(rows) as loader:
        loader.load_state_dict(state)
