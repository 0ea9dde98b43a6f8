"""A loader leaves no thread, file handle or warning filter, whatever way it ends, and no end hangs."""

from __future__ import annotations

import gc
import itertools
import linecache
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from support.batches import samples
from support.collection import no_collection
from support.datasets import TOP
from support.slow import slow_after
from support.traces import needs_proc, nothing_left, traces

from dali_stream import DaliStreamError, Dataset, DatasetError, DecodeError, Loader
from dali_stream.pipeline import stream as stream_module
from dali_stream.storage import LocalStore

pytestmark = [needs_proc, pytest.mark.usefixtures("warm")]


def broken(root: Path) -> Path:
    """A dataset with a damaged packet in each file of the top camera; the indices are whole."""
    for path in root.glob(f"videos/{TOP}/*/*.mp4"):
        data = bytearray(path.read_bytes())
        start = data.index(b"mdat") + 4
        data[start + 64 : start + len(data) // 2] = bytes(len(data) // 2 - 64)
        path.write_bytes(data[: path.stat().st_size])
    return root


@pytest.mark.parametrize("dali_graph", slow_after(1, [None, lambda nodes: nodes]), ids=["without DALI", "with DALI"])
def test_after_close(small: Path, dali_graph: Any) -> None:
    with nothing_left():
        loader = Loader(small, batch_size=8, dali_graph=dali_graph)
        assert len(list(loader)) == len(loader)
        kinds = ["dali_stream planner", "dali_stream decode", *["[DALI]"] * (dali_graph is not None)]
        for kind in kinds:  # the next epoch is being prepared
            assert any(kind in name for name in traces()[0])
        loader.close()
        loader.close()


def test_a_closed_loader_keeps_neither_its_plans_nor_its_indices(demo: Path) -> None:
    loader = Loader(demo, batch_size=8)
    batches = iter(loader)
    next(batches)
    planner = weakref.ref(loader._batch_source._stream.producer._planner)  # type: ignore[union-attr]
    assert loader._config.indices.cached
    with no_collection():
        loader.close()
        assert planner() is None
    assert not loader._config.indices.cached


def test_after_close_in_the_middle_of_an_epoch(demo: Path) -> None:
    with nothing_left():
        loader = Loader(demo, batch_size=8)
        iterator = iter(loader)
        next(iterator)
        loader.close()
        assert not any("dali_stream" in name for name in traces()[0])
        with pytest.raises(DaliStreamError, match=r"This Loader is closed\. Make a new one"):
            next(iterator)


def test_close_wakes_a_planner_that_waits_for_a_permit(small: Path) -> None:
    loader = Loader(small, batch_size=4, prefetch=2, device="cpu")
    batches = iter(loader)
    next(batches)
    [planner] = (thread for thread in threading.enumerate() if "planner" in thread.name)
    deadline = time.monotonic() + 30
    while True:  # until no permit is left, and the planner waits
        frame = sys._current_frames()[planner.ident or 0]
        if loader.stats()["samples"] == 4 and "_permits.get()" in linecache.getline(frame.f_code.co_filename, frame.f_lineno):
            break
        assert time.monotonic() < deadline
        time.sleep(0.001)
    closing = threading.Thread(target=loader.close, name="closing", daemon=True)
    closing.start()
    closing.join(30)
    assert not closing.is_alive(), "close() does not wake the planner's thread, which waits for a permit, and hangs"


def test_after_a_loop_that_was_left_early(demo: Path) -> None:
    """The loader is neither closed nor dropped; all work stops with the loop."""
    with nothing_left() as before:
        loader = Loader(demo, batch_size=8)
        for _ in loader:
            break
        names, files = traces()
        assert not any("dali_stream" in name for name in names)
        assert files == before[1]
        del loader


def test_who_takes_all_batches_and_asks_for_no_more_keeps_what_is_under_way(small: Path) -> None:
    """As `islice` and Lightning's Trainer do: the threads that are at the next epoch already continue with it."""
    with Loader(small, batch_size=8) as loader:
        threads = []
        for epoch in range(2):
            assert len(list(itertools.islice(loader, len(loader)))) == len(loader)
            assert (loader.state_dict()["epoch"], loader.state_dict()["position"]) == (epoch, 8 * len(loader))
            threads.append({thread for thread in threading.enumerate() if "dali_stream" in thread.name})
        assert threads[0] == threads[1] != set()


def test_after_an_exception_in_the_loop(demo: Path) -> None:
    with nothing_left():
        loader = Loader(demo, batch_size=8)
        with pytest.raises(ZeroDivisionError):
            [1 / 0 for _ in loader]
        del loader


def test_after_dropping_a_loader_between_epochs(demo: Path) -> None:
    with nothing_left():
        loader = Loader(Dataset(demo, cameras=[]), batch_size=8)
        list(loader)
        del loader


def test_after_dropping_a_loader_in_the_middle_of_an_epoch(demo: Path) -> None:
    with nothing_left():
        loader = Loader(demo, batch_size=8)
        iterator = iter(loader)
        next(iterator)
        del loader, iterator


def test_a_loader_that_is_collected_in_its_own_thread_leaves_nothing(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The garbage collector runs in any thread: here in a decode thread that reads, after the loader was dropped."""
    read, dropped, collected, names = LocalStore.read, threading.Event(), threading.Event(), list[str]()
    [size] = (path.stat().st_size for path in small.glob(f"videos/{TOP}/*/*.mp4"))

    def collecting(self: LocalStore, path: str, start: int, stop: int) -> bytes:
        if path.endswith(".mp4") and start > size // 2 and not collected.is_set():  # of a later batch than the first one
            assert dropped.wait(60)
            gc.collect()
            collected.set()
        return read(self, path, start, stop)

    with nothing_left(), no_collection():
        made = Loader(Dataset(small, cameras=[TOP]), batch_size=4, shuffle=False, prefetch=10**9)
        weakref.finalize(made, lambda: names.append(threading.current_thread().name))
        monkeypatch.setattr(LocalStore, "read", collecting)
        batches = iter(made)
        next(batches)
        cycle: list[Any] = [made, batches]
        cycle.append(cycle)
        del made, batches, cycle
        dropped.set()
        assert collected.wait(60)
    [name] = names
    assert name.startswith("dali_stream decode")


def test_a_loader_may_be_collected_in_a_thread_that_holds_a_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loader's threads may wait for that lock, so the collector must not wait for them forever."""
    monkeypatch.setattr(stream_module, "_CLOSE_S", 0.01)
    lock, closed = threading.Lock(), threading.Event()

    class Producer:
        def close(self) -> None:
            with lock:
                closed.set()

    with lock:
        stream_module._close_dropped(cast(Any, Producer()))
        assert not closed.is_set()
    assert closed.wait(60)


def test_after_a_corrupt_video(demo_copy: Path) -> None:
    with nothing_left() as before:
        loader = Loader(broken(demo_copy), batch_size=64)
        with pytest.raises(DecodeError, match=rf"{TOP}: episode \d, frame \d+"):
            list(loader)
        names, files = traces()
        assert not any("dali_stream" in name for name in names)
        assert files == before[1]
        del loader


def test_after_an_error_in_the_pipeline_function(demo: Path) -> None:
    with nothing_left():

        def wrong(nodes: dict[str, Any]) -> dict[str, Any]:
            raise ZeroDivisionError("of the user")

        loader = Loader(demo, batch_size=8, dali_graph=wrong)
        with pytest.raises(ZeroDivisionError, match="of the user"):
            next(iter(loader))
        loader.close()


def test_after_an_error_when_the_pipeline_runs(demo: Path) -> None:
    with nothing_left():

        def wrong(nodes: dict[str, Any]) -> dict[str, Any]:
            from nvidia.dali import fn

            return nodes | {TOP: fn.crop(nodes[TOP], crop=(4000, 4000), out_of_bounds_policy="error")}

        loader = Loader(demo, batch_size=8, dali_graph=wrong)
        with pytest.raises(DaliStreamError, match="An operator of the DALI pipeline failed: Slice can't be placed"):
            next(iter(loader))
        loader.close()


@pytest.mark.slow
def test_an_error_before_the_first_batch_leaves_nothing(demo: Path) -> None:
    """It comes after the planner has begun. See test_streaming.py for one that comes before."""
    fails = True

    def fail(nodes: dict[str, Any]) -> dict[str, Any]:
        if fails:
            raise MemoryError("no memory for the front end")
        return nodes

    with nothing_left() as before, Loader(demo, batch_size=8, dali_graph=fail) as loader:
        for _ in range(2):
            with pytest.raises(MemoryError, match="front end"):
                next(iter(loader))
            assert not any("dali_stream" in name for name in traces()[0])
        assert traces()[1] == before[1]
        fails = False
        assert len(list(loader)) == len(loader)


def test_closing_while_the_pipeline_is_built_leaves_nothing(demo: Path) -> None:
    def closed_meanwhile(nodes: dict[str, Any]) -> dict[str, Any]:
        closer = threading.Thread(target=loader.close)
        closer.start()
        closer.join()
        return nodes

    loader = Loader(demo, batch_size=8, dali_graph=closed_meanwhile)
    with nothing_left(), pytest.raises(DaliStreamError, match="closed"):
        next(iter(loader))


@pytest.mark.parametrize("use", [lambda demo: Dataset(demo), lambda demo: Dataset(demo).fingerprint])
def test_after_dropping_a_dataset(demo: Path, use: Callable[[Path], Any]) -> None:
    with nothing_left():
        use(demo)


def test_after_arguments_that_are_refused(demo: Path) -> None:
    with nothing_left(), pytest.raises(ValueError, match="Use a smaller batch_size"):
        Loader(demo, batch_size=10_000)


def test_an_error_that_is_kept_holds_no_file(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()  # can be opened, and not read
    store = LocalStore(str(tmp_path))
    with nothing_left():
        with pytest.raises(DatasetError) as kept:
            store.read("folder", 0, 10)
        store.close()
    assert kept.value


def test_decode_threads_leave_the_warning_filters_alone(demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The filters belong to the whole process: if two threads change and restore them, those of one can stay for good."""
    changed: list[str] = []
    own = warnings.catch_warnings

    class Noted(own):  # type: ignore[misc,valid-type]
        def __enter__(self) -> Any:
            changed.append(threading.current_thread().name)
            return super().__enter__()

    monkeypatch.setattr(warnings, "catch_warnings", Noted)
    with Loader(demo, batch_size=8, decode="torchcodec") as loader:
        next(iter(loader))
    assert not [name for name in changed if name.startswith("dali_stream")]


def test_use_after_close_is_refused(demo: Path) -> None:
    loader = Loader(demo, batch_size=8)
    state = loader.state_dict()
    loader.close()
    uses: list[Callable[[], Any]] = [
        lambda: iter(loader), loader.state_dict, lambda: loader.load_state_dict(state), lambda: loader.routes
    ]  # fmt: skip
    for use in uses:
        with pytest.raises(DaliStreamError, match=r"This Loader is closed\. Make a new one"):
            use()
    assert loader.stats()["batches"] == 0
    assert len(loader) > 0


def test_one_iteration_at_a_time(demo: Path) -> None:
    with Loader(demo, batch_size=8) as loader:
        first = iter(loader)
        next(first)
        second = iter(loader)
        next(second)
        with pytest.raises(DaliStreamError, match="Another iteration of this Loader has begun"):
            next(first)
        assert loader.state_dict()["epoch"] == 1
        next(second)  # the iteration that began last continues
        assert loader.state_dict()["position"] == 16


def test_two_loaders_do_not_touch_each_other(small: Path) -> None:
    dataset = Dataset(small)
    with Loader(dataset, batch_size=8) as one, Loader(dataset, batch_size=8, seed=1) as two:
        both = [(a, b) for a, b in zip(one, two, strict=True)]
    with Loader(dataset, batch_size=8, seed=1) as alone:
        assert samples(b for _, b in both) == samples(alone)
