"""Recording of what each thread does, as a trace that Perfetto and chrome://tracing show.

The trace is in Chrome's trace event format:
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

FETCHES = ("fetch rows", "fetch index", "fetch video")  # spans from which an arrow leads to the batch
_BATCH = "graph"  # span that an arrow leads to: the caller's work for the batch
_local = threading.local()  # `batch`: number of the batch that the thread works for
_spans: list[Span] | None = None


class Span(NamedTuple):
    """Work of a thread.

    Attributes:
        process: Number of the process.
        name: Name of the stage: a time of `Loader.stats` without its "_s", "training", "copy", or one of `FETCHES`.
        thread, thread_name: Thread id of the operating system, and name of the thread.
        start, stop: Times of `time.perf_counter`, in seconds.
        batch: Number of the batch, counted from the beginning of the Loader's iteration. None if it is unknown.
    """

    process: int
    name: str
    thread: int
    thread_name: str
    start: float
    stop: float
    batch: int | None


@contextlib.contextmanager
def trace(path: str | os.PathLike[str]) -> Iterator[None]:
    """Record what the Loaders of this process do inside the block, and write it to a file at the end.

    Open the file at https://ui.perfetto.dev. Each thread is a row: the thread that iterates, the planner, the decode threads,
    the threads that copy, with DALI the thread that starts its runs and, for remote data, the threads that fetch. Most of them
    are in the process of the Loader. Spans contain the number of the batch. Arrows lead from each fetch to the batch for which
    it was made.

    Args:
        path: Path to the JSON file. An existing file is replaced.

    Raises:
        ValueError: If a trace is being recorded already.
        OSError: If the file cannot be written.
    """
    global _spans
    if _spans is not None:
        raise ValueError("trace must not be called inside of another trace. End that one first")
    began, _spans = time.perf_counter(), []
    try:
        yield
    finally:
        recorded, _spans = _spans, None
        Path(path).write_text(json.dumps({"traceEvents": events(recorded, began)}))


def events(spans: list[Span], began: float) -> list[dict[str, Any]]:
    """Return the events of a trace, as dicts for JSON.

    Args:
        spans: Spans of all threads.
        began: Beginning of the trace, a time of `time.perf_counter`. It becomes time 0.
    """

    def at(span: Span, seconds: float) -> dict[str, Any]:
        return {"pid": span.process, "tid": span.thread, "ts": (seconds - began) * 1e6}

    # Some began before the trace. Others, of the process of a Loader, ended before it, and belong to an earlier trace.
    spans = [span._replace(start=max(span.start, began)) for span in spans if span.stop >= began]
    names = {(span.process, span.thread): span.thread_name for span in spans}
    made: list[dict[str, Any]] = [
        {"ph": "M", "name": "thread_name", "pid": process, "tid": thread, "ts": 0, "args": {"name": name}}
        for (process, thread), name in names.items()
    ]
    batches = {span.batch: span for span in spans if span.name == _BATCH}
    for number, span in enumerate(spans):
        arguments = {} if span.batch is None else {"batch": span.batch}
        made.append(
            {"ph": "X", "name": span.name, "dur": (span.stop - span.start) * 1e6, "args": arguments, **at(span, span.start)}
        )
        batch = batches.get(span.batch) if span.name in FETCHES else None
        if batch is not None and span.stop <= batch.stop:
            arrow = {"name": "for batch", "cat": "fetch", "id": number}
            made.append({"ph": "s", **arrow, **at(span, span.start)})
            made.append({"ph": "f", "bp": "e", **arrow, **at(batch, max(batch.start, span.stop))})
    return made


def record(name: str, start: float, stop: float, batch: int | None = None) -> None:
    """Record a span of this thread, if a trace is being recorded. See `Span`. `batch` defaults to the thread's batch."""
    if (spans := _spans) is not None:
        batch = getattr(_local, "batch", None) if batch is None else batch
        spans.append(Span(os.getpid(), name, threading.get_native_id(), threading.current_thread().name, start, stop, batch))


def is_recorded() -> bool:
    """Return whether a trace is being recorded."""
    return _spans is not None


def take_spans(go_on: bool) -> list[Span]:
    """Return the spans recorded since the last call, in a process whose spans belong to the trace of another one.

    Args:
        go_on: Whether to record further spans.
    """
    global _spans
    spans, _spans = _spans, [] if go_on else None
    return spans or []


def add_spans(spans: list[Span]) -> None:
    """Add the spans of another process, if a trace is being recorded. Both processes have the same clock."""
    if _spans is not None:
        _spans.extend(spans)


@contextlib.contextmanager
def span(name: str, batch: int | None = None) -> Iterator[None]:
    """Record the block as a span. `batch` defaults to the thread's batch."""
    start = time.perf_counter()
    try:
        yield
    finally:
        record(name, start, time.perf_counter(), batch)


def profiled(name: str) -> AbstractContextManager[Any]:
    """Return a context that labels the block in a profile of `torch.profiler`. It does nothing if none is being recorded."""
    profiler = sys.modules.get("torch.autograd.profiler")
    if profiler is None or not getattr(profiler, "_is_profiler_enabled", False):
        return contextlib.nullcontext()
    label: AbstractContextManager[Any] = profiler.record_function(name)
    return label


def begin_batch(number: int | None) -> None:
    """Set the number of the batch that this thread works for from now on."""
    _local.batch = number


def batch_number() -> int | None:
    """Return the number of the batch that this thread works for. None if it is unknown."""
    number: int | None = getattr(_local, "batch", None)
    return number


def bound(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function for another thread. It sets that thread's batch to the batch of this thread, and then calls `call`."""
    # The batch is passed on even if no trace is being recorded, since one may begin before the other thread calls the function.
    return functools.partial(_call, getattr(_local, "batch", None), call)


def _call(batch: int | None, call: Callable[..., Any], *args: Any) -> Any:
    begin_batch(batch)
    return call(*args)
