"""A loader leaves no thread, file handle or warning filter, whatever way it ends, and nothing hangs."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import json
import linecache
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from support.batches import equal, samples
from support.collection import no_collection
from support.datasets import TOP
from support.servers import Server
from support.slow import slow, slow_after

from dali_stream import DaliStreamError, Dataset, DatasetError, DecodeError, Loader
from dali_stream.pipeline import stream as stream_module
from dali_stream.run import bottleneck
from dali_stream.storage import LocalStore

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="threads and handles are read from /proc")


def traces() -> tuple[list[str], list[str]]:
    """Threads and open files. Only DALI's native threads count, since those of Arrow and jemalloc start once and stay."""
    gc.collect()
    threads = [thread.name for thread in threading.enumerate()]
    for path in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it may end meanwhile
            name = (path / "comm").read_text().strip()
            threads += [name] if "DALI" in name else []
    files = []
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the handle of the listing itself
            files.append(os.readlink(path))
    return sorted(threads), sorted(files)


@pytest.fixture(scope="module", autouse=True)
def _warm(demo: Path) -> None:
    """Libraries open what they keep for good when they are first used, and threads of other files' tests end.

    A thread for requests outlives a store that was not closed by half a second, and DALI's threads end a moment after their
    pipeline. The first test here would count them before, and miss them after.
    """
    with Loader(demo, batch_size=8) as loader:
        next(iter(loader))
    deadline = time.monotonic() + 30
    while ours := [name for name in traces()[0] if "dali_stream" in name or "DALI" in name]:
        assert time.monotonic() < deadline, f"threads of earlier tests do not end: {ours}"
        os.sched_yield()


@contextlib.contextmanager
def nothing_left() -> Iterator[Any]:
    """Check that threads and open files are the same before and after the block. Yields those from before."""
    before = traces()
    yield before
    deadline = time.monotonic() + 30  # a thread that has been joined stays in the kernel's list for a moment
    while (after := traces())[0] != before[0] and time.monotonic() < deadline:
        os.sched_yield()
    assert after == before


def broken(root: Path) -> Path:
    """A dataset with a damaged packet in each file of the top camera; the indices are whole."""
    for path in root.glob(f"videos/{TOP}/*/*.mp4"):
        data = bytearray(path.read_bytes())
        start = data.index(b"mdat") + 4
        data[start + 64 : start + len(data) // 2] = bytes(len(data) // 2 - 64)
        path.write_bytes(data[: path.stat().st_size])
    return root


# ------------------------------------------------------------------------------------------------------------------ ends


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
    planner = weakref.ref(loader._batch_source._stream.planner)  # type: ignore[union-attr]
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


EXIT = """
import json, sys
import dali_stream

json.program = sys.modules["__main__"]  # as a library that has imported it: it outlives the modules of dali_stream
loader = dali_stream.Loader(sys.argv[1], batch_size=8, device="cpu", dali_graph=eval(sys.argv[2]))
batches = iter(loader)
next(batches)
if sys.argv[3] == "close":
    loader.close()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("last", "pipeline"),
    [
        ("close", "None"),
        slow("leave open", "None"),
        slow("close", "lambda nodes: nodes"),
        slow("leave open", "lambda nodes: nodes"),
    ],
)
def test_an_iterator_that_lives_until_the_interpreter_exits(small: Path, last: str, pipeline: str) -> None:
    command = [sys.executable, "-c", EXIT, str(small), pipeline, last]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


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


@pytest.mark.parametrize("use", [lambda demo: Dataset(demo), lambda demo: Dataset(demo).fingerprint])
def test_after_dropping_a_dataset(demo: Path, use: Callable[[Path], Any]) -> None:
    with nothing_left():
        use(demo)


def test_after_arguments_that_are_refused(demo: Path) -> None:
    with nothing_left(), pytest.raises(ValueError, match="Use a smaller batch_size"):
        Loader(demo, batch_size=10_000)


# --------------------------------------------------------------------------------------------------------------- refusals


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


def test_control_c_in_next(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes while the main thread waits for the first frames, and leaves a loader that can continue."""
    with nothing_left():
        read, sent = LocalStore.read, threading.Event()

        def interrupt(self: LocalStore, path: str, start: int, stop: int) -> bytes:
            if path.endswith(".mp4") and threading.current_thread() is not threading.main_thread() and not sent.is_set():
                sent.set()
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            return read(self, path, start, stop)

        loader = Loader(small, batch_size=8)
        with no_collection(), monkeypatch.context() as patched:
            patched.setattr(LocalStore, "read", interrupt)
            with pytest.raises(KeyboardInterrupt):
                next(iter(loader))
        assert sent.is_set()
        assert not any("dali_stream" in name for name in traces()[0])
        assert len(list(loader)) == len(loader)
        loader.close()


def test_control_c_after_next_has_a_batch(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A state that is saved then does not count the batch, which was never delivered."""
    order = [i for batch in Loader(small, batch_size=8) for i in batch["index"].tolist()]
    add, calls = bottleneck.Recent.add, itertools.count(1)

    def interrupt(*arguments: Any) -> None:
        add(*arguments)
        if next(calls) == 3:
            raise KeyboardInterrupt

    seen: list[int] = []
    with monkeypatch.context() as patched, Loader(small, batch_size=8) as loader:
        patched.setattr(bottleneck.Recent, "add", interrupt)
        with pytest.raises(KeyboardInterrupt):
            seen.extend(i for batch in loader for i in batch["index"].tolist())
        state = loader.state_dict()
    with Loader(small, batch_size=8) as loader:
        loader.load_state_dict(state)
        assert seen + [i for batch in loader for i in batch["index"].tolist()] == order


def interrupt_line(number: int) -> Any:
    """Trace function that raises KeyboardInterrupt before a line of the pipeline, its pools, or what they use of `threading`.

    It counts lines from 0, and a line that runs several times once for each line that calls its function.
    """
    lines: set[tuple[str, int, int]] = set()

    def is_ours(frame: types.FrameType | None) -> bool:
        path = frame.f_code.co_filename if frame else ""
        return "/dali_stream/pipeline/" in path or path.endswith("/dali_stream/system/workers.py")

    def trace(frame: types.FrameType, event: str, _: Any) -> Any:
        path, caller = frame.f_code.co_filename, frame.f_back
        if not is_ours(frame) and not (path.endswith("/threading.py") and is_ours(caller)):
            return None
        # Python itself leaves a lock locked if Ctrl-C comes between `__enter__` and the block.
        if event == "line" and not linecache.getline(path, frame.f_lineno).lstrip().startswith("with "):
            lines.add((path, frame.f_lineno, caller.f_lineno if caller else 0))
            if len(lines) > number:
                raise KeyboardInterrupt
        return trace

    return trace


@pytest.mark.parametrize("again", slow_after(1, [True, False]), ids=["closed again", "dropped"])
def test_control_c_anywhere_in_close(small: Path, again: bool) -> None:
    """The next `close` completes it, and so does the garbage collector."""

    def close(number: int) -> bool:
        """Close a loader. Return whether an interrupt came."""
        loader = Loader(dataset, batch_size=8, num_threads=1, device="cpu")
        epoch = iter(loader)
        next(epoch)
        tracing = sys.gettrace()
        try:
            sys.settrace(interrupt_line(number))
            loader.close()
        except KeyboardInterrupt:
            if again:
                sys.settrace(tracing)
                loader.close()
            return True
        finally:
            sys.settrace(tracing)
        return False

    with Server(small) as server, no_collection():
        dataset = Dataset(server.url)
        number = 0
        while close(number):
            gc.collect()
            ours = [t for t in threading.enumerate() if t.name.startswith("dali_stream ") and t.name != "dali_stream request"]
            assert not (again and ours), f"interrupted at line {number}"
            for thread in ours:
                thread.join()  # the interrupted `close`, or the garbage collector, has stopped it
            number += 1
    assert number > 10


INTERRUPTED_IMPORT = """
import signal, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "pandas":
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Finder())
import dali_stream
dali_stream.Dataset(sys.argv[1])
print("Ctrl-C was lost")
"""


def test_control_c_while_pandas_is_imported_for_the_first_conversion(odd: Path) -> None:
    done = subprocess.run([sys.executable, "-c", INTERRUPTED_IMPORT, str(odd)], capture_output=True, text=True, check=False)
    assert not done.stdout
    assert "KeyboardInterrupt" in done.stderr


@pytest.mark.parametrize("started", slow_after(2, ["planner", "decode 1", "copy 0", "fetch 9", "request"]))
def test_control_c_while_a_thread_starts(small: Path, monkeypatch: pytest.MonkeyPatch, started: str) -> None:
    """It comes when the system has the thread, but Python does not yet know that it runs."""
    launch = "_start_joinable_thread" if hasattr(threading, "_start_joinable_thread") else "_start_new_thread"
    original, wait, sent = getattr(threading, launch), threading.Event(), []
    remote = started.split()[0] in ("fetch", "request")

    def interrupted(run: Callable[[], None], *arguments: Any, **keywords: Any) -> Any:
        thread = getattr(run, "__self__", None)
        if sent or getattr(thread, "name", "") != f"dali_stream {started}":
            return original(run, *arguments, **keywords)

        def late() -> None:  # so the thread cannot end before `start` has been interrupted
            wait.wait(10)
            run()

        late.__self__ = thread  # type: ignore[attr-defined]
        handle = original(late, *arguments, **keywords)
        sent.append(thread)
        threading.Timer(0.05, wait.set).start()
        if threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        return handle

    def epoch(uri: Any) -> None:
        with Loader(uri, batch_size=32, num_threads=2, device="cpu") as loader:
            assert len(list(loader)) == len(loader)

    with nothing_left(), Server(small) as server:
        with no_collection(), monkeypatch.context() as patched:
            patched.setattr(threading, launch, interrupted)
            with pytest.raises(KeyboardInterrupt):
                epoch(server.url if remote else small)
        assert sent, "no such thread was started"
        assert not any("dali_stream" in name for name in traces()[0] if name != "dali_stream request")
        epoch(server.url if remote else small)


# ------------------------------------------------------------------------------------------------------------------ copies

COPIES = {"copy": copy.copy, "deepcopy": copy.deepcopy, "pickle": lambda given: pickle.loads(pickle.dumps(given))}


def handles() -> dict[str, str]:
    """The open files of this process by their numbers."""
    gc.collect()
    found = {}
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the handle of the listing itself
            found[path.name] = os.readlink(path)
    return found


def test_a_refused_copy_of_a_loader_costs_it_nothing(demo: Path) -> None:
    dataset = Dataset(demo, episodes=[0], cameras=[TOP])
    with Loader(dataset, batch_size=8) as loader:
        expected = list(loader)
    with Loader(dataset, batch_size=8) as loader:
        batches = iter(loader)
        found = [next(batches)]
        while not (before := {number: path for number, path in handles().items() if path.startswith(str(demo))}):
            found.append(next(batches))
        for copied in COPIES.values():
            beside = [] if copied is copy.copy else [(dataset, loader)]  # of which the first is copied, and dropped
            for given in (loader, *beside):
                with pytest.raises(TypeError, match=r"^A Loader cannot be copied or pickled, because .* make another Loader"):
                    copied(given)
        assert before.items() <= handles().items()  # the planner may open another file meanwhile
        found += batches
    assert all(equal(first, second) for first, second in zip(found, expected, strict=True))


@pytest.mark.parametrize("how", slow_after(1, COPIES))
def test_a_copy_of_a_dataset_has_files_of_its_own(demo: Path, how: str) -> None:
    file = f"videos/{TOP}/chunk-000/file-000.mp4"
    with nothing_left():
        dataset = Dataset(demo, episodes=[1, 4], cameras=[])
        expected, fingerprint = dataset.store.read(file, 0, 100), dataset.fingerprint
        before = handles()
        twin = COPIES[how](dataset)
        assert repr(twin) == repr(dataset)
        assert twin.fingerprint == fingerprint
        assert twin.store is twin.data_store
        assert handles() == before
        assert twin.store.read(file, 0, 100) == expected
        assert len(handles()) == len(before) + 1
        with Loader(twin, batch_size=8) as loader:
            assert len(samples(loader)) == len(twin) // 8 * 8
        assert twin.store.read(file, 0, 100) == expected
        del twin, loader
        assert handles() == before
        assert dataset.store.read(file, 0, 100) == expected
        dataset.close()


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


def test_an_open_file_is_not_copied(demo: Path) -> None:
    """Two objects with one descriptor would close it twice, the second time somebody else's file."""
    store = LocalStore(str(demo))
    store.read("meta/info.json", 0, 1)
    handle, before = store._open_files.get("meta/info.json"), handles()
    for copied in COPIES.values():
        with pytest.raises(TypeError, match="an open file cannot be copied"):
            copied(handle)
    assert handles() == before
    del handle
    store.close()


# -------------------------------------------------------------------------------------------------- forks and the process

PREAMBLE = """
import sys
from dali_stream import Loader
loader = Loader(sys.argv[1], batch_size=8)
iterator = iter(loader)
next(iterator)
"""
# All of them with one loader in the middle of an epoch: starting Python and importing torch takes longer than the forks.
FORKS = """
import json, multiprocessing, os, signal
from dali_stream import DaliStreamError

def in_child(use):
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # ends a child that hangs
        use()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

def refused(use):
    try:
        use()
    except DaliStreamError as error:
        assert "after a fork" in str(error)
    else:
        raise AssertionError("not refused")

def use_all():
    for use in (lambda: iter(loader), loader.state_dict, lambda: loader.load_state_dict({}), lambda: loader.routes):
        refused(use)
    loader.close()

def drop():
    del globals()["iterator"], globals()["loader"]

with loader._counters._lock:  # as another thread may hold it at any time
    found = {
        "uses": in_child(use_all),
        "next": in_child(lambda: refused(lambda: next(iterator))),
        "dropped": in_child(drop),
        "exit": in_child(lambda: sys.exit(0)),
    }
worker = multiprocessing.get_context("fork").Process(target=lambda: refused(lambda: list(loader)))
worker.start()
worker.join(60)
found["worker"] = worker.exitcode
worker.kill()
found["batches"] = [sum(1 for _ in iterator) + 1, len(loader)]
print(json.dumps(found))
iterator = iter(loader)
next(iterator)
"""


def script(demo: Path, code: str) -> subprocess.CompletedProcess[str]:
    # Python warns of a fork in a process with threads, from 3.12 on: this is about just that.
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", PREAMBLE + code, str(demo)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


@pytest.fixture(scope="module")
def forks(demo: Path) -> subprocess.CompletedProcess[str]:
    """A process that has a loader, forks in every way, and ends in the middle of an epoch."""
    return script(demo, FORKS)


@pytest.mark.slow
def test_use_after_a_fork_is_refused_and_the_parent_goes_on(forks: subprocess.CompletedProcess[str]) -> None:
    found = json.loads(forks.stdout.splitlines()[-1])
    assert (found["uses"], found["next"]) == (0, 0), forks.stderr
    count, expected = found["batches"]
    assert count == expected


@pytest.mark.slow
def test_a_loader_is_refused_in_a_forked_worker(forks: subprocess.CompletedProcess[str]) -> None:
    assert json.loads(forks.stdout.splitlines()[-1])["worker"] == 0, forks.stderr


@pytest.mark.parametrize("end", slow_after(1, ["dropped", "exit"]))
def test_a_forked_process_survives_the_loader(forks: subprocess.CompletedProcess[str], end: str) -> None:
    assert json.loads(forks.stdout.splitlines()[-1])[end] == 0, forks.stderr


def test_a_process_ends_with_its_loader_open(forks: subprocess.CompletedProcess[str]) -> None:
    assert (forks.returncode, forks.stderr) == (0, "")


@pytest.mark.slow
@pytest.mark.parametrize("end", ["pass", "list(iterator)", "del loader"])
def test_a_process_ends_wherever_its_loader_is(demo: Path, end: str) -> None:
    done = script(demo, end)
    assert (done.returncode, done.stderr) == (0, "")


def test_importing_starts_nothing(demo: Path) -> None:
    code = """
import os, threading
before = len(os.listdir("/proc/self/task"))
import dali_stream
dali_stream.Dataset(__import__("sys").argv[1])
print(threading.active_count(), len(os.listdir("/proc/self/task")) - before)
"""
    done = subprocess.run([sys.executable, "-c", code, str(demo)], capture_output=True, text=True, check=True)
    assert done.stdout.split()[0] == "1"


def test_closing_while_the_pipeline_is_built_leaves_nothing(demo: Path) -> None:
    def closed_meanwhile(nodes: dict[str, Any]) -> dict[str, Any]:
        closer = threading.Thread(target=loader.close)
        closer.start()
        closer.join()
        return nodes

    loader = Loader(demo, batch_size=8, dali_graph=closed_meanwhile)
    with nothing_left(), pytest.raises(DaliStreamError, match="closed"):
        next(iter(loader))


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


def test_a_loader_that_is_collected_in_its_own_thread_leaves_nothing(demo: Path) -> None:
    with nothing_left():
        loader = Loader(demo, batch_size=8)
        iterator = iter(loader)
        next(iterator)
        stream = loader._batch_source._stream
        done = stream.planner.pool._workers.submit(
            stream.planner.close
        )  # as the garbage collector does it, wherever it happens to run
        done.result()
        for thread in threading.enumerate():
            if thread.name == "dali_stream close":
                thread.join()
        loader.close()


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
