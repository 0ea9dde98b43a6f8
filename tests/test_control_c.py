"""Ctrl-C, wherever it comes, ends what the loader is doing, and leaves a loader that can continue or be closed."""

from __future__ import annotations

import gc
import itertools
import linecache
import signal
import subprocess
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.collection import no_collection
from support.datasets import TOP
from support.servers import Server
from support.slow import slow_after
from support.traces import needs_proc, nothing_left, traces

from dali_stream import Dataset, Loader
from dali_stream.run import bottleneck
from dali_stream.storage import LocalStore

pytestmark = [needs_proc, pytest.mark.usefixtures("warm")]


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
        loader = Loader(dataset, batch_size=2, shuffle=False, prefetch=1, image_size=(16, 24), num_threads=1, device="cpu")
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
        dataset = Dataset(server.url, cameras=[TOP])
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
