"""Every way in which a network fails: the right bytes, or an error within the stated time."""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import faults
from support.servers import Server
from support.slow import examples
from support.stores import CONTENT, SMALL, Clock, failure, quick

from dali_stream.errors import DatasetError, StorageError
from dali_stream.storage import open_store, retry
from dali_stream.storage.retry import PER_HOST
from dali_stream.system.workers import Workers

PATH = "data.bin"
HANG_GUARD_S = 60.0
NO_TIMEOUT = {"timeout": HANG_GUARD_S}  # where requests are counted: a busy machine answers late

PASSING = {
    "reset": faults.reset,
    "reset inside the body": faults.reset_inside,
    "short body": faults.short,
    "short body, short length": faults.short_length,
    "408": faults.status(408),
    "425": faults.status(425),
    "429": faults.status(429),
    "429 with a pause": faults.status(429, "0"),
    "429 with nonsense": faults.status(429, "soon"),
    "500": faults.status(500),
    "502": faults.status(502),
    "503": faults.status(503),
    "504": faults.status(504),
    "long body": faults.long_length,
    "later start": faults.late,
    "other range": faults.content_range(shift=3),
    "no Content-Range": faults.content_range(missing=True),
    "not HTTP": faults.garbage,
    "204": faults.status(204),
}
LASTING = {
    "401": (faults.status(401), "access denied"),
    "403": (faults.status(403), "access denied"),
    "404": (faults.status(404), "no such file"),
    "410": (faults.status(410), "no such file"),
    "418": (faults.status(418), "HTTP 418"),
    "no ranges": (faults.ignored_range, "does not support byte ranges"),
    "gzip": (faults.gzipped, "Content-Encoding 'gzip'"),
    "another ETag": (faults.changed_tag, "changed during the run"),
    "another size": (faults.changed_size, "changed during the run"),
    "another total": (faults.content_range(total=5), "changed during the run"),
}


@pytest.mark.parametrize("fault", PASSING.values(), ids=PASSING.keys())
def test_a_fault_that_passes_costs_a_retry_and_no_bytes_are_wrong(fault: faults.Fault) -> None:
    with Server({PATH: CONTENT}) as server:
        store = quick(server.url, NO_TIMEOUT)
        server.set_faults([fault, fault])
        assert store.read(PATH, 100, 90_000) == CONTENT[100:90_000]
        assert store.traffic.retries == 2
        assert store.read(PATH, 0, len(CONTENT)) == CONTENT


@pytest.mark.parametrize("fault", [faults.hang, faults.hang_inside])
def test_an_answer_that_does_not_come_is_asked_for_again(fault: faults.Fault) -> None:
    with Server({PATH: CONTENT}) as server:
        store = quick(server.url)
        server.set_faults([fault, fault])
        assert store.read(PATH, 100, 90_000) == CONTENT[100:90_000]
        assert store.traffic.retries >= 2


@pytest.mark.parametrize(("fault", "words"), LASTING.values(), ids=LASTING.keys())
def test_a_fault_that_stays_is_an_error_at_once(fault: faults.Fault, words: str) -> None:
    with Server({PATH: CONTENT}) as server:
        store = quick(server.url, NO_TIMEOUT)
        store.size(PATH)
        server.set_faults([fault] * 50)
        error = failure(store, PATH, 5, 20_000)
        assert words in str(error)
        assert f"{server.url}/{PATH}" in str(error)
        assert isinstance(error, DatasetError if "no such file" in words else StorageError)
        assert len(server.requests) == 2


def test_what_arrived_before_a_cut_is_kept() -> None:
    with Server({PATH: CONTENT}, faults=[faults.reset_inside, faults.short]) as server:
        store = quick(server.url, NO_TIMEOUT)
        assert store.read(PATH, 0, 1000) == CONTENT[:1000]
        starts = [int((request.range or "").removeprefix("bytes=").partition("-")[0]) for request in server.requests]
        assert starts[0] == 0
        assert starts[1] in (0, 500)  # a reset may overtake the bytes before it
        assert starts[2] > starts[1]


def test_the_error_says_what_failed_and_how_often_it_was_tried(clock: Clock) -> None:
    with Server({PATH: CONTENT}, faults=[*[faults.reset] * 2, *[faults.status(503)] * 100]) as server:
        error = failure(quick(server.url, NO_TIMEOUT, give_up_after_s=5), PATH, 7, 99)
        assert f"{server.url}/{PATH}, bytes 7 to 99" in str(error)
        assert f"{len(server.requests)} tries in" in str(error)
        assert "HTTP 503" in str(error)
        assert "(2 times), HTTP 503" in str(error)


@pytest.mark.parametrize("fault", [faults.hang, faults.hang_inside, faults.drip, faults.drip_headers, faults.reset])
def test_the_stated_time_holds(fault: faults.Fault) -> None:
    with Server({PATH: CONTENT}, faults=[fault] * 1000) as server:
        store = quick(server.url, {"timeout": 20}, give_up_after_s=0.7)
        begin = time.monotonic()
        error = failure(store, PATH, 0, 100_000)
        assert time.monotonic() - begin < 10  # far less than the timeout, and than 100000 bytes take at this pace
        assert "0.7 s are allowed" in str(error)


@pytest.mark.parametrize("fault", [faults.status(429, "1"), faults.retry_at(2), faults.status(503, "1")])
def test_retry_after_is_kept(fault: faults.Fault) -> None:
    with Server({PATH: SMALL}, faults=[fault]) as server:
        begin = time.monotonic()
        assert quick(server.url, NO_TIMEOUT).read(PATH, 0, 1000) == SMALL
        assert time.monotonic() - begin > 0.9


def test_a_retry_after_beyond_the_stated_time_leaves_a_last_try(clock: Clock) -> None:
    with Server({PATH: SMALL}, faults=[faults.status(429, "3600")]) as server:
        assert quick(server.url, NO_TIMEOUT, give_up_after_s=20).read(PATH, 0, 1000) == SMALL


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://no-such-host.invalid", "could not be resolved"),
        ("http://a..b/data", "broken"),
        ("http://127.0.0.1:1", "refused"),
    ],
)
def test_a_server_that_cannot_be_reached(url: str, words: str) -> None:
    error = failure(quick(url, give_up_after_s=2), PATH)  # long enough for an attempt on a busy machine
    assert isinstance(error, StorageError)
    assert words in str(error)


def no_dns(monkeypatch: pytest.MonkeyPatch, host: str, answer: Callable[[], None]) -> list[str]:
    """Has look-ups of a host fail after `answer`; returns those that were made."""
    asked, look_up = [], socket.getaddrinfo

    def failing(name: str, *arguments: Any, **keywords: Any) -> Any:
        if name != host:
            return look_up(name, *arguments, **keywords)
        asked.append(name)
        answer()
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", failing)
    return asked


@pytest.mark.parametrize("what", ["refused", "no DNS"])
@pytest.mark.parametrize(("given", "least", "most"), [(None, 1, 5), (60, 50, 60), (2, 0.5, 2)])
def test_a_host_that_never_was_reached_is_given_up_soon(
    what: str, given: float | None, least: float, most: float, clock: Clock, refusing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = no_dns(monkeypatch, "dataset.invalid", lambda: None)
    store = open_store(refusing if what == "refused" else "http://dataset.invalid", give_up_after_s=given)
    message = str(failure(store, PATH))
    assert ("refused" if what == "refused" else "could not be resolved (DNS)") in message
    assert f"where {most} s are allowed (give_up_after_s)" in message
    assert least < clock.now <= most
    assert store.traffic.retries >= 2
    assert len(asked) in (0, store.traffic.retries + 1)


@pytest.mark.parametrize("fault", [faults.status(503), faults.reset])
def test_a_host_that_answers_is_given_all_the_time(fault: faults.Fault, clock: Clock) -> None:
    with Server({PATH: CONTENT}, faults=[fault] * 1000) as server:
        assert "where 60 s are allowed" in str(failure(open_store(server.url), PATH))
    assert 50 < clock.now <= 60


def test_a_host_that_was_reached_once_is_given_all_the_time(clock: Clock) -> None:
    with Server({PATH: CONTENT}) as server:
        store = open_store(server.url)
        assert store.read(PATH, 0, 10) == CONTENT[:10]
    message = str(failure(store, PATH, 20, 30))
    assert "refused" in message
    assert "where 60 s are allowed" in message
    assert 50 < clock.now <= 60


ALWAYS = [faults.status(503)] * 100_000


def test_the_reads_of_a_host_share_the_stated_time(clock: Clock) -> None:
    with Server({PATH: CONTENT, "other": CONTENT}, faults=ALWAYS) as server:
        store, other = (quick(server.url, NO_TIMEOUT) for _ in range(2))
        failure(store, PATH)
        for _ in range(20):
            message = str(failure(other, "other"))
        assert 50 < clock.now <= 60
        host = server.url.removeprefix("http://")
        assert re.search(
            rf"not read after \d tr(y|ies) in 0\.0 s, and {host} has given no good answer for \d\d\.\d s, where 60", message
        )
        assert "Reasons: HTTP 503" in message
        server.set_faults([])
        clock.now += 2  # the next read tries again
        assert other.read("other", 0, 10) == CONTENT[:10]
        server.set_faults(ALWAYS[:2])
        assert store.read(PATH, 0, 10) == CONTENT[:10]


def test_the_end_of_an_outage_is_said_once(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    with Server({PATH: CONTENT}, faults=[*ALWAYS[:10], *[None] * 3, faults.reset]) as server:
        store = quick(server.url, NO_TIMEOUT)
        for at in range(8):
            assert store.read(PATH, at, at + 10) == CONTENT[at : at + 10]
    [said] = [record.getMessage() for record in caplog.records if "again" in record.getMessage()]
    host = server.url.removeprefix("http://")
    assert re.fullmatch(rf"{host} gives good answers again, after \d+\.\d s in which 10 requests to it failed", said)


def test_idle_time_is_no_failure(clock: Clock) -> None:
    with Server({PATH: CONTENT}) as server:
        store = quick(server.url, NO_TIMEOUT, give_up_after_s=20)
        for script in ([None], [faults.reset] * 3, ALWAYS[:3], ALWAYS, [faults.reset] * 3):  # also after a read has failed
            server.set_faults(script)
            if script is ALWAYS:
                failure(store, PATH)
            else:
                assert store.read(PATH, 0, 10) == CONTENT[:10]
            clock.now += 3600


def test_a_file_that_always_fails_is_given_up_though_others_are_read(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    with Server({PATH: CONTENT, "other": CONTENT}, faults={PATH: ALWAYS}) as server:
        store, began = quick(server.url, NO_TIMEOUT, give_up_after_s=20), clock.now

        def read_another(_: object, seconds: float) -> None:
            assert store.read("other", 0, 10) == CONTENT[:10]
            clock.pass_by(seconds)

        monkeypatch.setattr(retry.Deadline, "sleep", read_another)
        assert "20 s are allowed" in str(failure(store, PATH))
        for _ in range(20):
            message = str(failure(store, PATH, 10, 20))
        assert f"{server.url}/{PATH} has given no good answer for" in message
        assert clock.now - began <= 20


def test_reads_that_pause_leave_the_connection_slots_to_others() -> None:
    """Many reads of a file that fails wait for the time that the server asks for, and a read of another file does not."""
    busy = faults.status(503, "3600")
    with (
        Server({PATH: CONTENT, "other": CONTENT}, faults={PATH: [busy] * PER_HOST}) as server,
        ThreadPoolExecutor(PER_HOST) as pool,
    ):
        store, other = (quick(server.url, NO_TIMEOUT, give_up_after_s=86_400) for _ in range(2))
        errors = [pool.submit(failure, store, PATH, at, at + 1) for at in range(PER_HOST)]
        while store.traffic.retries < PER_HOST:
            os.sched_yield()
        guard = threading.Timer(HANG_GUARD_S, other.close)
        guard.start()
        try:
            assert other.read("other", 0, 10) == CONTENT[:10]
        finally:
            guard.cancel()
            store.close()
        assert all("closed" in str(error.result()) for error in errors)


def test_jobs_that_somebody_waits_for_run_while_all_threads_are_busy() -> None:
    end, ran, begun = threading.Event(), threading.Event(), threading.Semaphore(0)
    workers = Workers("test", 2, reserved=1)
    try:
        busy = [workers.submit(lambda: begun.release() or end.wait(), priority=(9, 1)) for _ in range(3)]
        assert all(begun.acquire(timeout=HANG_GUARD_S) for _ in range(2))
        later = workers.submit(int, priority=(5, 0))
        workers.submit(ran.set, priority=(4, 1))
        workers.set_due((4, 1))
        assert ran.wait(HANG_GUARD_S)
        assert not later.done()
        assert not busy[2].running()
    finally:
        end.set()
        workers.stop()
        workers.join()


def test_a_look_up_that_does_not_end_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    end = threading.Event()
    asked = no_dns(monkeypatch, "dataset.invalid", lambda: end.wait(HANG_GUARD_S) and None)
    try:
        message = str(failure(open_store("http://dataset.invalid", give_up_after_s=0.2), PATH))
        assert not end.is_set()
        assert "could not be resolved (DNS)" in message
        assert asked
    finally:
        end.set()


def test_closing_ends_a_read_that_waits() -> None:
    started, errors = threading.Event(), []

    def fault(*arguments: object) -> None:
        started.set()
        faults.hang(*arguments)  # type: ignore[arg-type]

    with Server({PATH: CONTENT}, faults=[fault]) as server:
        store = quick(server.url, {"timeout": 500}, give_up_after_s=1000)
        reader = threading.Thread(target=lambda: errors.append(failure(store, PATH)))
        reader.start()
        assert started.wait(HANG_GUARD_S)
        store.close()
        reader.join(HANG_GUARD_S)
        assert "closed" in str(errors[0])
        assert store.read(PATH, 0, 10) == CONTENT[:10]


@pytest.mark.slow
def test_a_request_that_is_left_behind_gives_its_slot_back() -> None:
    started = threading.Semaphore(0)

    def fault(*arguments: object) -> None:
        started.release()
        faults.hang(*arguments)  # type: ignore[arg-type]

    with Server({PATH: CONTENT}, faults=[fault] * PER_HOST) as server, ThreadPoolExecutor(PER_HOST) as pool:
        store, other = (quick(server.url, {"timeout": 500}, give_up_after_s=1000) for _ in range(2))
        errors = [pool.submit(failure, store, PATH) for _ in range(PER_HOST)]
        assert all(started.acquire(timeout=HANG_GUARD_S) for _ in range(PER_HOST))
        store.close()
        assert other.read(PATH, 0, 10) == CONTENT[:10]
        assert all("closed" in str(error.result()) for error in errors)


@pytest.mark.slow
def test_closing_ends_a_read_that_waits_for_a_slot() -> None:
    started = threading.Semaphore(0)

    def fault(*arguments: object) -> None:
        started.release()
        faults.hang(*arguments)  # type: ignore[arg-type]

    with Server({PATH: CONTENT}, faults=[fault] * PER_HOST) as server, ThreadPoolExecutor(PER_HOST + 1) as pool:
        store, other = (quick(server.url, {"timeout": 500}, give_up_after_s=1000) for _ in range(2))
        errors = [pool.submit(failure, other, PATH) for _ in range(PER_HOST)]
        assert all(started.acquire(timeout=HANG_GUARD_S) for _ in range(PER_HOST))
        waiting = pool.submit(failure, store, PATH)
        while not waiting.running():
            os.sched_yield()
        store.close()
        while not waiting.done():  # it may not have come to the slot when the store was closed
            store.close()
            os.sched_yield()
        assert "closed" in str(waiting.result())
        other.close()
        assert all("closed" in str(error.result()) for error in errors)


def test_the_threads_that_send_requests_end_by_themselves() -> None:
    with Server({PATH: CONTENT}) as server:
        assert quick(server.url).read(PATH, 0, 10) == CONTENT[:10]
    until = time.monotonic() + HANG_GUARD_S
    while any(thread.name == "dali_stream request" for thread in threading.enumerate()):
        assert time.monotonic() < until
        os.sched_yield()


HANGING = (faults.hang, faults.hang_inside, faults.drip, faults.drip_headers)
ANY = st.sampled_from([*PASSING.values(), *(fault for fault, _ in LASTING.values()), *HANGING])
RANGES = st.tuples(st.integers(0, 1 << 20), st.integers(0, 1 << 20)).map(sorted)


@examples(40)
@given(script=st.lists(st.one_of(ANY, st.none()), max_size=6), ranges=st.lists(RANGES, min_size=1, max_size=3))
def test_under_any_faults_the_right_bytes_or_an_error_in_time(
    script: list[Callable[..., None] | None], ranges: list[list[int]]
) -> None:
    with Server({PATH: CONTENT}) as server:
        store = quick(server.url, {"timeout": 0.1}, give_up_after_s=0.5)
        with suppress(StorageError):  # a busy machine may take longer than that
            store.size(PATH)
        server.set_faults(script)
        for start, stop in ranges:
            begin = time.monotonic()
            with suppress(StorageError, DatasetError):
                assert store.read(PATH, start, stop) == CONTENT[start:stop]
            assert time.monotonic() - begin < 10
