"""A Loader with a process of its own delivers, counts, logs and raises what a Loader does that makes its batches here."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import resource
import signal
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import own_process
from support.batches import check_identities, equal
from support.datasets import SIDE, TOP, copied, damage_middle, read_lengths
from support.faults import hanging, status
from support.servers import Server

import dali_stream
from dali_stream import Dataset, DecodeError, Loader, Mixture, StorageError, Transformed
from dali_stream.cache.shared_buffers import BorrowedBuffers, LentBuffers
from dali_stream.observe.waiting import Board

OWN: dict[str, Any] = {"device": "cpu", "num_threads": 2, "in_process": False}
HERE: dict[str, Any] = OWN | {"in_process": True}


def children() -> list[psutil.Process]:
    """Processes of Loaders that this process has started."""
    return own_process.children("producer_main")


OPTIONS: dict[str, dict[str, Any]] = {
    "float32": {},
    "uint8, contiguous, recorded order, partial": {
        "image_dtype": "uint8",
        "memory_format": "contiguous",
        "shuffle": False,
        "last_batch": "partial",
    },
    "contiguous, resized, windows, global order, pad": {
        "memory_format": "contiguous",
        "image_size": (48, 64),
        "delta_timestamps": {TOP: [-0.1, 0.0], "action": [0.0, 0.05, 0.1]},
        "shuffle": "global",
        "last_batch": "pad",
    },
    "normalized, little memory": {"normalize": "mean_std", "memory_budget": "6MiB"},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_batches_are_the_same(small: Path, options: dict[str, Any]) -> None:
    """Two epochs, of which the second begins with what the first has left in memory.

    A batch that `batch_at` makes in this process does not disturb them.
    """
    with Loader(small, batch_size=7, **OWN, **options) as own, Loader(small, batch_size=7, **HERE, **options) as here:
        for epoch in range(2):
            for number, (batch, expected) in enumerate(zip(own, here, strict=True)):
                assert equal(batch, expected)
                if number % 8 == 2:
                    assert equal(own.batch_at(epoch, number), batch)
            assert len(children()) == 1
        counted = [{key: loader.stats()[key] for key in ("frames", "samples", "batches")} for loader in (own, here)]
        assert counted[0] == counted[1]
    assert not children()


def test_a_run_goes_from_one_way_to_the_other(small: Path) -> None:
    """From this process to another one, which continues in the second epoch, and back."""
    with Loader(small, batch_size=8, **HERE) as here:
        expected = [batch for _ in range(2) for batch in here]
    found, state = [], None
    for way in (HERE, OWN, HERE):
        with Loader(small, batch_size=8, **way) as loader:
            if state is not None:
                loader.load_state_dict(state)
            batches = iter(loader)
            for _ in range(2 * len(loader) // 3):
                if (batch := next(batches, None)) is None:
                    batches = iter(loader)
                    batch = next(batches)
                found.append(batch)
            state = loader.state_dict()
    assert len(found) > len(expected) - 3
    assert all(map(equal, found, expected))


def test_a_graph_of_dali_gets_the_frames_of_the_process(small: Path) -> None:
    def graph(nodes: dict[str, Any]) -> dict[str, Any]:
        return nodes | {TOP: nodes[TOP] * 0.5}

    lengths = read_lengths(small)
    with (
        Loader(small, batch_size=8, **OWN, dali_graph=graph) as own,
        Loader(small, batch_size=8, **HERE, dali_graph=graph) as here,
    ):
        for batch, expected in zip(own, here, strict=True):
            assert equal(batch, expected)
            check_identities(batch, SIDE, None, lengths)


def _flipped(frame: torch.Tensor) -> torch.Tensor:
    return frame.flip(-1)


def test_a_transform_and_a_mixture(small: Path) -> None:
    mixture = Mixture({"first": small, "second": small})
    found = []
    for way in (OWN, HERE):
        with Transformed(Loader(mixture, batch_size=9, image_size=(40, 48), **way), _flipped, keys=[TOP]) as loader:
            found.append([batch for _, batch in zip(range(6), loader, strict=False)])
    assert all(map(equal, *found))


def test_a_remote_dataset_counts_its_traffic(small: Path) -> None:
    with Server(small) as server:
        found = []
        for way in (OWN, HERE):
            with Loader(Dataset(server.url), batch_size=8, **way) as loader:
                batches = list(loader)
                found.append((batches, {key: loader.stats()[key] for key in ("requests", "fetched_bytes", "needed_bytes")}))
    (own, own_stats), (here, here_stats) = found
    assert all(map(equal, own, here))
    # The number of requests depends on what is requested at the same time.
    assert own_stats["needed_bytes"] == here_stats["needed_bytes"] > 0
    assert own_stats["fetched_bytes"] == pytest.approx(here_stats["fetched_bytes"], rel=0.3)
    assert own_stats["requests"] > 5


def test_stored_frames_and_substitutes(small: Path, tmp_path: Path) -> None:
    """The second epoch reads what the first one has stored on disk."""
    damage_middle(root := copied(small, tmp_path))
    options = {
        "batch_size": 8,
        "on_error": "substitute",
        "image_size": (64, 80),
        "last_batch": "partial",
        "memory_budget": "2MiB",
    }
    found = []
    for name, way in (("own", OWN), ("here", HERE)):
        with Loader(root, frame_cache=tmp_path / name, **options, **way) as loader:
            found.append(([*loader, *loader], loader.stats()))
    (own, stats), (here, here_stats) = found
    assert all(map(equal, own, here))
    assert stats["substituted"] == here_stats["substituted"] > 0
    assert stats["disk_hits"] > 0


def test_kept_batches_stay_as_they_are_and_take_no_descriptors(small: Path) -> None:
    """More than 500 batches are kept, and then compared with fresh ones. A process may open 256 files here."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    options = {"batch_size": 1, "image_size": (16, 16), "image_dtype": "uint8"}
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
        with Loader(small, **options, **OWN) as own:
            kept = [batch for _ in range(-(-500 // len(own))) for batch in own]
            [child] = children()
            assert child.num_fds() < 100
            assert psutil.Process().num_fds() < 200
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert len(kept) >= 500
    with Loader(small, **options, **HERE) as here:
        fresh = (batch for _ in range(-(-500 // len(here))) for batch in here)
        assert all(map(equal, kept, fresh))


def test_a_forked_process_keeps_its_batch(small: Path) -> None:
    """It looks at a batch after this process has dropped it and taken many others."""
    with Loader(small, batch_size=4, image_dtype="uint8", **OWN) as loader:
        batches = iter(loader)
        for _ in range(4):  # until buffers are used again
            batch = next(batches)
        expected = {key: values.clone() for key, values in batch.items() if isinstance(values, torch.Tensor)}
        (go_read, go), (result, result_write) = os.pipe(), os.pipe()
        if not (child := os.fork()):
            os.read(go_read, 1)
            same = all(torch.equal(batch[key], values) for key, values in expected.items())
            os.write(result_write, b"same" if same else b"different")
            os._exit(0)
        del batch
        for _ in range(2):
            for _ in batches:
                pass
            batches = iter(loader)
        os.write(go, b"x")
        assert os.read(result, 10) == b"same"
        os.waitpid(child, 0)
        for descriptor in (go_read, go, result, result_write):
            os.close(descriptor)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.sampled_from(["take", "drop", "fork"]), st.integers(0, 5)), max_size=60))
def test_a_block_is_reused_only_when_nobody_uses_it(steps: list[tuple[str, int]]) -> None:
    """Both ends in one process. Each array is filled with its number, which must stay while it is in use."""
    lent, borrowed, in_use, forked = LentBuffers(False), BorrowedBuffers(), dict[int, np.ndarray](), dict[int, np.ndarray]()
    for number, (step, which) in enumerate(steps, 1):
        if step == "take":
            lent.take_back(*borrowed.returned())
            filled = lent.take((3, 1 + which % 2), np.uint8)
            filled[...] = number
            message, blocks = lent.lend({"a": filled, "b": np.full(2, number, np.uint8)})
            descriptors = [os.dup(block.descriptor) for block in blocks if block.descriptor is not None]
            for block in blocks:
                block.close_descriptor()
            del filled, blocks
            arrays = borrowed.arrays(message, descriptors)
            in_use[number] = arrays["a"][1:]
            in_use[-number] = arrays["b"]
            del arrays
        elif step == "drop" and in_use:
            del in_use[sorted(in_use)[which % len(in_use)]]
        elif step == "fork":
            borrowed.note_fork()
            # A forked process has the pages, but its references do not count here.
            for key, values in in_use.items():
                forked[key] = np.asarray(_Window(values))
        for key, values in (in_use | forked).items():
            assert (values == abs(key) % 256).all()


class _Window:
    """The same memory, mapped a second time, as in a forked process."""

    def __init__(self, values: np.ndarray) -> None:
        base = values
        while isinstance(base, np.ndarray):
            base = base.base
        self.block = base.block  # keeps the memory mapped, and is no reference of the array
        self.__array_interface__ = values.__array_interface__


def test_records_are_logged_here(small: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A record of the process has the level, the logger and the rank that it would have here."""
    folder = tmp_path / "frames"
    with caplog.at_level(logging.INFO, "dali_stream"), Loader(
        small, batch_size=8, image_size=(64, 80), frame_cache=folder, frame_cache_bytes=1, rank=1, world_size=2, **OWN
    ) as loader:  # fmt: skip
        for _ in loader:
            pass
    [record] = [each for each in caplog.records if "has reached its limit" in each.getMessage()]
    assert (record.name, record.levelname, record.process == os.getpid()) == ("dali_stream", "INFO", False)
    assert (record.rank, record.host) == (1, os.uname().nodename)


def test_errors_are_raised_here(small: Path, tmp_path: Path) -> None:
    damage_middle(root := copied(small, tmp_path))
    messages = []
    for way in (HERE, OWN):
        with Loader(root, batch_size=8, shuffle=False, **way) as loader, pytest.raises(DecodeError) as caught:
            for _ in loader:
                pass
        messages.append(str(caught.value))
        assert caught.value.__cause__ is None
        assert not children()
    assert messages[0] == messages[1]


def test_an_error_of_a_server_is_raised_here(small: Path) -> None:
    with Server(small) as server:
        dataset = Dataset(server.url, give_up_after_s=2)
        with Loader(dataset, batch_size=8, memory_budget="3MiB", **OWN) as loader:
            batches = iter(loader)
            next(batches)
            server.set_faults(itertools.repeat(status(503)))
            with pytest.raises(StorageError, match="The training loop waited"):
                list(batches)


def test_a_trace_and_the_statistics_have_what_the_process_does(small: Path, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with dali_stream.trace(path), Loader(small, batch_size=8, **OWN) as loader:
        [child] = children()
        for _ in loader:
            pass
        stats, limit = loader.stats(), loader.bottleneck()
    events = json.loads(path.read_text())["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    of_child = {event["tid"] for event in events if event["pid"] == child.pid}
    assert {"dali_stream planner", "dali_stream decode 0"} <= {names[tid] for tid in of_child}
    assert {"decode", "resize", "plan", "gather"} <= {event["name"] for event in events if event["tid"] in of_child}
    numbers = {event["args"].get("batch") for event in events if event["name"] == "graph"}
    assert numbers == set(range(len(loader)))
    assert min(stats[key] for key in ("decode_s", "resize_s", "read_s", "pack_s", "rows_s", "decode_cpu_s", "copy_cpu_s")) > 0
    assert stats["resident_bytes"] >= stats["decoded_bytes"] > 0
    assert stats["graph_s"] + stats["starved_s"] == pytest.approx(stats["wait_s"], rel=0.2)
    assert limit is not None


def test_closing_in_another_thread_wakes_a_thread_that_waits(small: Path) -> None:
    with Server(small) as server:
        loader = Loader(Dataset(server.url, give_up_after_s=1000), batch_size=8, **OWN)
        hang, hangs = hanging()
        server.set_faults(itertools.repeat(hang))
        failed: list[BaseException] = []

        def iterate() -> None:
            try:
                for _ in loader:
                    pass
            except dali_stream.DaliStreamError as error:
                failed.append(error)

        thread = threading.Thread(target=iterate)
        thread.start()
        assert hangs.wait(60)
        loader.close()
        thread.join()
    assert "closed" in str(failed[0])
    assert not children()


def test_control_c_while_a_batch_is_awaited(small: Path) -> None:
    """The batch that was awaited is the next one of a resumed run, and of an iteration with a new Loader."""
    interrupted = threading.Event()

    def interrupt_a_wait(_signal: int, frame: FrameType | None) -> None:
        # Elsewhere, such as between the delivery of a batch and `delivered += 1`, this test could not count.
        if not interrupted.is_set() and any(call.f_code.co_name == "_wait" for call, _ in traceback.walk_stack(frame)):
            interrupted.set()
            raise KeyboardInterrupt

    def interrupt() -> None:
        hangs.wait(60)
        while not interrupted.wait(0.01):
            os.kill(os.getpid(), signal.SIGINT)

    with Loader(small, batch_size=8, shuffle=False, **HERE) as here:
        expected = list(here)
    with Server(small) as server, Loader(Dataset(server.url), batch_size=8, shuffle=False, **OWN) as loader:
        batches = iter(loader)
        assert equal(next(batches), expected[0])
        hang, hangs = hanging()
        server.set_faults(itertools.repeat(hang))
        before = signal.signal(signal.SIGINT, interrupt_a_wait)
        interrupts = threading.Thread(target=interrupt)
        delivered = 1
        try:
            interrupts.start()
            with contextlib.suppress(KeyboardInterrupt):
                for batch in batches:
                    assert equal(batch, expected[delivered])
                    delivered += 1
            assert interrupted.is_set()
        finally:
            interrupted.set()
            interrupts.join()
            signal.signal(signal.SIGINT, before)
        server.set_faults(())
        state = loader.state_dict()
        assert loader.batch_index == delivered
    with Loader(small, batch_size=8, shuffle=False, **HERE) as loader:
        loader.load_state_dict(state)
        assert all(map(equal, loader, expected[delivered:]))


def test_a_file_that_changes_is_noticed_by_the_next_process(small: Path) -> None:
    """Each process pins the versions that it reads, and so does the training process for the next one."""
    files = {path.relative_to(small).as_posix(): path.read_bytes() for path in small.rglob("*") if path.is_file()}
    options = {"batch_size": 16, "image_size": (40, 48), **OWN}
    with Server(files) as server, Loader(Dataset(server.url), **options) as loader:
        for _ in loader:
            pass
        next(iter(loader))  # leaves the epoch, and ends the process
        assert not children()
        [second] = [path for path in files if path.endswith("file-001.mp4")]  # which the training process has not read
        files[second] += b"\0\0\0\x08free"
        with pytest.raises(StorageError, match="changed during the run"):
            for _ in loader:
                pass


def test_memory_is_used_again_with_three_cameras(tmp_path: Path, small: Path) -> None:
    """Cameras of one size share their buffers, of which each camera has several in use."""
    three = Mixture({"a": small, "b": small}, keys={"b": {SIDE: "observation.images.third"}}, missing="pad")
    with Loader(three, batch_size=4, image_dtype="uint8", image_size=(48, 64), **OWN) as loader:
        assert len(loader.dataset.cameras) == 3
        places = [{batch[camera].data_ptr() for batch in loader for camera in loader.dataset.cameras} for _ in range(3)]
    assert len(set.union(*places)) <= 5 * 3


def test_a_signal_handler_may_close_a_loader_that_waits(small: Path) -> None:
    with Server(small) as server:
        loader = Loader(Dataset(server.url, give_up_after_s=1000), batch_size=8, **OWN)
        hang, hangs = hanging()
        server.set_faults(itertools.repeat(hang))
        before = signal.signal(signal.SIGUSR1, lambda *_: loader.close())
        wake = threading.Thread(target=lambda: (hangs.wait(60), os.kill(os.getpid(), signal.SIGUSR1)))
        try:
            wake.start()
            with pytest.raises(dali_stream.DaliStreamError, match="closed"):
                list(loader)
        finally:
            wake.join()
            signal.signal(signal.SIGUSR1, before)


def test_the_process_has_the_affinity_and_threads_of_the_caller(small: Path) -> None:
    cores = os.sched_getaffinity(0)
    with Loader(small, batch_size=8, **OWN) as loader:
        [child] = children()
        try:
            os.sched_setaffinity(0, {min(cores)})  # as Accelerate does after the Loader was made
            next(batches := iter(loader))
        finally:
            os.sched_setaffinity(0, cores)
        pinned = {thread.id for thread in child.threads() if os.sched_getaffinity(thread.id) == {min(cores)}}
        assert child.pid in pinned
        assert len(pinned) >= 5  # with the threads that finish, plan and decode
        del batches


def test_the_board_of_a_crashed_process_is_read() -> None:
    memory = np.zeros(Board.SIZE, np.uint8)
    board = Board(memory)
    board.write(1, "decodes 3 frames of /a.mp4")
    board.write(2, "decodes 5 frames of /ü.mp4")
    board.write(1, "")
    assert Board(memory).read() == ["decodes 5 frames of /ü.mp4"]
    for thread in range(1000):
        board.write(thread, "x" * 10_000)
    assert len(Board(memory).read()) == 256


@pytest.fixture(autouse=True)
def _no_process_is_left() -> Iterator[None]:
    yield
    assert not children()
