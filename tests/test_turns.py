"""Loaders of one GPU take turns: one DALI pipeline runs at a time. On a CPU, told that both are on one device."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.batches import equal

from dali_stream import DecodeError, Loader
from dali_stream.decode import dali, turns
from dali_stream.decode.decoder import RouteChange
from dali_stream.decode.torchcodec_decoder import TorchcodecDecoder
from dali_stream.errors import DaliStreamError
from dali_stream.pipeline import dali_batches, dali_iterator
from dali_stream.pipeline.producer import Producer


@pytest.fixture
def one_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """All pipelines are on one device. Fails if a run begins while the run of another pipeline is in progress."""
    shared, at_once, iterators = turns.Turns(), [], set[Any]()
    begin = shared.begin

    def checked(own: dali_iterator.Iterator) -> None:
        begin(own)
        iterators.add(own)
        at_once.extend(other for other in iterators if other is not own and other._running)

    monkeypatch.setattr(shared, "begin", checked)
    monkeypatch.setattr(dali_batches, "turns", lambda _: shared)
    yield
    assert len(iterators) > 1
    assert not at_once


def make(root: Path, seed: int, **options: Any) -> Loader:
    return Loader(root, batch_size=8, seed=seed, image_dtype="uint8", dali_graph=lambda nodes: dict(nodes), **options)


@pytest.mark.usefixtures("one_device")
@pytest.mark.slow
def test_loaders_that_alternate_deliver_what_each_delivers_alone(demo: Path) -> None:
    expected = []
    for seed in range(2):
        with make(demo, seed) as loader:
            expected.append(list(loader))
    with make(demo, 0) as first, make(demo, 1) as second:
        for pair, batches in zip(zip(first, second, strict=True), zip(*expected, strict=True), strict=True):
            assert all(map(equal, pair, batches))


@pytest.mark.slow
@pytest.mark.usefixtures("one_device")
def test_loaders_in_threads_deliver_what_each_delivers_alone(demo: Path) -> None:
    def run(seed: int) -> list[dict[str, Any]]:
        with make(demo, seed) as loader:
            return list(loader)

    expected = [run(seed) for seed in range(2)]
    with ThreadPoolExecutor(2) as pool:
        for batches, own in zip(pool.map(run, range(2)), expected, strict=True):
            assert all(equal(a, b) for a, b in zip(batches, own, strict=True))


@pytest.mark.usefixtures("one_device")
def test_an_error_of_a_run_that_another_loader_waited_for_is_raised_where_it_belongs(
    demo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make(demo, 0) as first, make(demo, 1) as second:
        one, other = iter(first), iter(second)
        next(one)
        own = first._batch_source._stream._batches._iterator  # type: ignore[union-attr]
        share = type(own._pipes[0]).share_outputs

        def fail(pipe: Any, *arguments: Any) -> Any:
            if pipe is own._pipes[0]:
                raise RuntimeError("Critical error in pipeline: Error encountered: broken")
            return share(pipe, *arguments)

        own._started.result()  # the run of the next batch has begun
        monkeypatch.setattr(type(own._pipes[0]), "share_outputs", fail)
        next(other)
        with pytest.raises(DaliStreamError, match="broken"):
            next(one)
        next(other)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_does_not_wait_for_the_turn_of_a_thread_of_its_parent() -> None:
    shared, held, done = turns.turns(0), threading.Event(), threading.Event()

    def hold() -> None:
        with shared.lock:
            held.set()
            done.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait()
    if not (child := os.fork()):
        os._exit(0 if turns.turns(0).lock.acquire(blocking=False) else 1)
    _, status = os.waitpid(child, 0)
    done.set()
    holder.join()
    assert os.waitstatus_to_exitcode(status) == 0
    assert turns.turns(0) is shared
    assert turns.turns(None) is not turns.turns(None)


def check_a_route_change(root: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """No batch is lost if the `number`-th clip is refused after it was decoded."""
    decode_clip, calls = TorchcodecDecoder._decode_clip, itertools.count(1)

    def refuse(decoder: TorchcodecDecoder, *arguments: Any) -> Any:
        for part in decode_clip(decoder, *arguments):
            if next(calls) == number:
                raise RouteChange(decoder.key, "refused by the test")
            yield part

    monkeypatch.setattr(TorchcodecDecoder, "_decode_clip", refuse)
    with make(root, 0, in_process=True, prefetch=2) as loader:
        batches = list(loader)
        assert len(batches) == len(loader)
        assert loader.stats()["route_changes"] == 1


@pytest.mark.usefixtures("one_device")
def test_a_route_change_after_some_batches_costs_none(vp9_demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_a_route_change(vp9_demo, monkeypatch, 10)


def test_a_route_change_before_the_first_run_costs_no_batch(vp9_demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = turns.Turns()
    monkeypatch.setattr(dali_batches, "turns", lambda _: shared)
    check_a_route_change(vp9_demo, monkeypatch, 1)


@pytest.mark.slow
@pytest.mark.usefixtures("one_device")
def test_a_loader_that_waits_for_frames_keeps_no_other_waiting(demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    take, waits, go_on = Producer.next, threading.Event(), threading.Event()
    starved = make(demo, 0)

    def wait(producer: Producer) -> Any:
        if producer is starved._batch_source._stream.producer:  # type: ignore[union-attr]
            waits.set()
            go_on.wait()
        return take(producer)

    with starved, make(demo, 1) as other, ThreadPoolExecutor(1) as pool:
        batches = iter(starved)
        next(batches)
        monkeypatch.setattr(Producer, "next", wait)
        later = pool.submit(list, batches)
        waits.wait()
        assert len(list(other)) == len(other)
        go_on.set()
        assert len(later.result()) == len(starved) - 1


@pytest.mark.usefixtures("one_device")
def test_clips_are_not_decoded_beside_the_run_of_a_loader(vp9_demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dali, "turns", dali_batches.turns)
    with make(vp9_demo, 0) as loader, make(vp9_demo, 1) as other:
        batches = iter(loader)
        next(batches)
        next(iter(other))
        own = loader._batch_source._stream._batches._iterator  # type: ignore[union-attr]
        own._started.result()  # the run of the next batch has begun
        with pytest.raises(DecodeError):
            dali.decode([(np.zeros(100, np.uint8), np.zeros(1, np.int32))], None, 1)
        assert not own._running
        next(batches)
