"""An epoch over a network that fails: every frame once and right, or an error in time; never a hang."""

from __future__ import annotations

import logging
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from support import faults
from support.batches import check_identities, samples
from support.datasets import SIDE, TOP, read_lengths
from support.servers import Handler, Server
from support.slow import examples
from support.stores import Clock

from dali_stream import DaliStreamError, Dataset, Loader, StorageError
from dali_stream.observe import waiting

GIVE_UP_S = 1.5
PATIENCE_S = 60  # a hang guard: all that is left to fetch fails within GIVE_UP_S, and the machine may be busy
HELPED = {
    "reset": faults.reset,
    "reset inside": faults.reset_inside,
    "short": faults.short,
    "short length": faults.short_length,
    "429": faults.status(429, "0"),
    "500": faults.status(500),
    "502": faults.status(502),
    "503": faults.status(503),
    "start is off": faults.content_range(shift=1),
    "no Content-Range": faults.content_range(missing=True),
    "garbage": faults.garbage,
}
FINAL = {
    "403": faults.status(403),
    "404": faults.status(404),
    "total is off": faults.content_range(total=5),
    "another file": faults.changed_tag,
    "a longer file": faults.changed_size,
    "no ranges": faults.ignored_range,
    "compressed": faults.gzipped,
    "hang": faults.hang,
    "hang inside": faults.hang_inside,
    "drip": faults.drip,
    "drip headers": faults.drip_headers,
}


def epoch(url: str, root: Path, *, timeout_s: float = 0.5, give_up_s: float = GIVE_UP_S, **arguments: Any) -> list[int]:
    """The samples of one epoch, whose frames are the right ones."""
    lengths = read_lengths(root)
    options = {"timeout": timeout_s} if url.startswith("http") else None
    dataset = Dataset(url, give_up_after_s=give_up_s, storage_options=options)
    with Loader(dataset, batch_size=16, last_batch="partial", consumers=4, **arguments) as loader:
        found = []
        for batch in loader:
            found += samples([batch])
            for camera in (TOP, SIDE):
                check_identities(batch, camera, None, lengths)
    return found


@pytest.mark.slow
@examples(12, suppress_health_check=list(HealthCheck))
@given(script=st.lists(st.one_of(st.none(), st.none(), st.sampled_from(sorted(HELPED))), max_size=40))
def test_an_epoch_survives_what_a_second_try_mends(small: Path, script: list[str | None]) -> None:
    spaced = [HELPED[name] if name else None for name in script]
    with Server(small, faults=spaced) as server:
        found = epoch(server.url, small, timeout_s=PATIENCE_S, give_up_s=PATIENCE_S)  # a busy machine answers late
        assert found == epoch(str(small), small)  # in the very order


@pytest.mark.slow
@examples(25, suppress_health_check=list(HealthCheck))
@given(
    script=st.lists(st.one_of(st.none(), st.none(), st.none(), st.sampled_from(sorted(HELPED | FINAL))), max_size=30),
    budget=st.sampled_from(["1GiB", 150_000]),
)
def test_any_faults_give_right_frames_or_an_error_in_time(small: Path, script: list[str | None], budget: int | str) -> None:
    everything = HELPED | FINAL
    with Server(small, faults=[everything[name] if name else None for name in script]) as server:
        started = time.monotonic()
        try:
            found = epoch(server.url, small, memory_budget=budget)
        except DaliStreamError:
            pass
        else:
            assert sorted(found) == list(range(sum(read_lengths(small).values())))
        assert time.monotonic() - started < PATIENCE_S


@pytest.mark.slow
def test_a_server_that_goes_away_is_an_error_and_the_run_goes_on_later(small: Path) -> None:
    whole = samples(_loader(small))
    with Server(small) as server:
        loader = _loader(server.url, memory_budget=150_000)
        running = iter(loader)
        found, states = samples(next(running) for _ in range(3)), [loader.state_dict()]

    def rest() -> None:
        for batch in running:
            found.extend(samples([batch]))
            states.append(loader.state_dict())

    started = time.monotonic()
    with loader, pytest.raises(StorageError, match=r"not read after \d+ tr(y|ies) in .* 1.5 s are allowed") as failed:
        rest()
    assert time.monotonic() - started < PATIENCE_S
    assert server.url in str(failed.value)
    with Server(small) as other, _loader(other.url) as again:
        again.load_state_dict(states[-1])
        assert found + samples(again) == whole


def _after_five(uri: str, then: Callable[[], object], **arguments: Any) -> StorageError:
    """The error of a Loader, on whose server `then` is done after the fifth batch."""
    with Loader(Dataset(uri), batch_size=8, consumers=4, memory_budget=400_000, **arguments) as loader:
        running = iter(loader)
        for _ in range(5):
            next(running)
        then()
        with pytest.raises(StorageError) as failed:
            list(running)
    return failed.value


@pytest.mark.parametrize("shuffle", [True, "global"])
def test_an_outage_lasts_no_longer_than_the_stated_time(demo: Path, clock: Clock, shuffle: bool | str) -> None:
    """Time passes only while a read pauses, in any thread, so reads ahead that take all the time one after another add up."""
    with Server(demo) as server:
        error = _after_five(server.url, lambda: server.set_faults([faults.status(503)] * 100_000), shuffle=shuffle)
    assert re.search(r"not read after \d+ tr.*, where 60 s are allowed", str(error))
    assert re.search(r"\. The training loop waited \d+\.\d s for this batch$", str(error))
    assert 0.5 < clock.now / 60 < 2


def test_an_outage_lasts_no_longer_for_several_ranks(demo: Path, clock: Clock) -> None:
    fail = threading.Barrier(2)
    with Server(demo) as server, ThreadPoolExecutor(2) as pool:

        def then() -> None:
            if fail.wait(PATIENCE_S) == 0:
                server.set_faults([faults.status(503)] * 100_000)
                clock.now = 0.0
            fail.wait(PATIENCE_S)

        ranks = [pool.submit(_after_five, server.url, then, rank=rank, world_size=2) for rank in range(2)]
        assert all("where 60 s are allowed" in str(rank.result()) for rank in ranks)
    assert 0.5 < clock.now / 60 < 2


RANK = """
import sys, time
from dali_stream.system.torchcodec_import import compile_nothing

compile_nothing()  # so torch's compiler is not imported
from dali_stream import Dataset, Loader, StorageError
uri, rank = sys.argv[1:]
dataset = Dataset(uri, give_up_after_s=3)
with Loader(dataset, batch_size=8, consumers=4, memory_budget=400_000, rank=int(rank), world_size=2, num_threads=1) as loader:
    running = iter(loader)
    for _ in range(3):
        next(running)
    print("ready", flush=True)
    sys.stdin.readline()
    try:
        for batch in running:
            began = time.monotonic()
    except StorageError as error:
        print(error)
        print(time.monotonic() - began, flush=True)
    sys.stdin.readline()
"""


@pytest.mark.slow
def test_a_server_that_dies_ends_all_ranks_in_the_stated_time(demo: Path) -> None:
    """As under torchrun, each rank is a process."""
    with Server(demo) as server:
        command = [sys.executable, "-c", RANK, server.url]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        ranks = [subprocess.Popen([*command, str(rank)], **pipes) for rank in range(2)]
        assert [rank.stdout.readline() for rank in ranks if rank.stdout] == ["ready\n"] * 2
    for rank in ranks:
        error, waited = rank.communicate("\n\n", timeout=PATIENCE_S)[0].splitlines()
        assert "where 3 s are allowed" in error
        said = re.search(r"The training loop waited (.*) s for this batch", error)
        assert said is not None
        assert float(said[1]) == pytest.approx(float(waited), abs=0.5)
        assert float(waited) / 3 < 4


def test_an_outage_that_ends_in_time_costs_no_frame_and_says_so(small: Path, clock: Clock, caplog: Any) -> None:
    with Server(small) as server:
        # It prefetches so little that it has to read during the outage, however slow this thread is.
        with Loader(Dataset(server.url), batch_size=8, consumers=4, memory_budget=400_000, prefetch=1) as loader:
            running = iter(loader)
            found = samples(next(running) for _ in range(5))
            clock.now += 3600  # served from memory
            server.set_faults([faults.status(503)] * 40)
            for batch in running:
                found += samples([batch])
                check_identities(batch, TOP, None, read_lengths(small))
        assert found == samples(Loader(Dataset(small), batch_size=8, consumers=4))
        assert "gives good answers again, after" in caplog.text


def test_a_file_that_changes_during_the_run_is_an_error(small: Path, tmp_path: Path) -> None:
    root = shutil.copytree(small, tmp_path / "copy")
    with Server(root) as server, _loader(server.url, memory_budget=150_000) as loader:
        running = iter(loader)
        next(running)
        for path in root.rglob("*.mp4"):
            path.write_bytes(path.read_bytes()[:-1] + b"\0")
        with pytest.raises(StorageError, match="changed during the run"):
            list(running)


def assert_close_ends(loader: Loader, take: Callable[[], object], hanging: threading.Event) -> None:
    """Closes a Loader while a thread takes batches from it and a request hangs. The thread gets an error."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            take()
        except Exception as error:
            errors.append(error)

    taking = threading.Thread(target=run)
    taking.start()
    assert hanging.wait(PATIENCE_S)
    started = time.monotonic()
    loader.close()
    taking.join(PATIENCE_S)
    assert time.monotonic() - started < PATIENCE_S
    assert isinstance(errors[0], DaliStreamError)


def test_close_does_not_wait_for_a_server_that_hangs(small: Path) -> None:
    """Neither does the thread that waits for a batch, and other loaders of the same dataset continue."""
    hang, hanging = faults.hanging()
    with Server(small) as server:
        dataset = Dataset(server.url, give_up_after_s=3 * PATIENCE_S, storage_options={"timeout": 3 * PATIENCE_S})
        other = iter(Loader(dataset, batch_size=8))
        next(other)
        loader = Loader(dataset, batch_size=8)
        server.set_faults([hang] * 1000)
        assert_close_ends(loader, lambda: next(iter(loader)), hanging)
        server.set_faults([])
        assert len(samples(other)) > 8


def test_close_does_not_wait_for_a_server_that_hangs_when_stored_frames_are_damaged(small: Path, tmp_path: Path) -> None:
    """All frames are in the frame cache, so no block of video is fetched. Damaged ones are decoded from the server."""
    hang, hanging = faults.hanging()
    with Server(small) as server:
        dataset = Dataset(server.url, give_up_after_s=3 * PATIENCE_S, storage_options={"timeout": 3 * PATIENCE_S})
        options: dict[str, Any] = {"batch_size": 8, "frame_cache": tmp_path, "image_size": (32, 40), "last_batch": "partial"}
        with Loader(dataset, **options) as loader:
            list(loader)
        loader = Loader(dataset, **options)
        for path in tmp_path.rglob("*"):
            if path.is_file() and path.stat().st_size > 100_000:
                with path.open("r+b") as file:
                    file.write(bytes([7]) * (path.stat().st_size // 2))
        script = [*[None] * 4, *[hang] * 1000]  # the index is read
        videos = {path.relative_to(small).as_posix(): script for path in small.rglob("*.mp4")}
        server.set_faults(videos)
        assert_close_ends(loader, lambda: list(loader), hanging)


def test_a_long_wait_is_logged_with_what_it_waits_for(
    small: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a server that does not answer until this is logged. The batch comes afterwards."""
    monkeypatch.setattr(waiting, "LONG_WAIT_S", 0.5)
    caplog.set_level(logging.DEBUG, "dali_stream")
    logged = threading.Event()

    class Told(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if f"requests {server.url}" in record.getMessage():
                logged.set()

    def silent(handler: Handler, data: bytes, fields: dict[str, str]) -> None:
        logged.wait(PATIENCE_S)
        faults.reset(handler, data, fields)

    logger, told = logging.getLogger("dali_stream"), Told(logging.WARNING)
    logger.addHandler(told)
    try:
        with Server(small) as server:
            dataset = Dataset(server.url, give_up_after_s=3 * PATIENCE_S, storage_options={"timeout": 3 * PATIENCE_S})
            with Loader(dataset, batch_size=8) as loader:
                server.set_faults([silent] * 4)
                check_identities(next(iter(loader)), TOP, None, read_lengths(small))
    finally:
        logger.removeHandler(told)
    request = rf"The Loader has waited .*dali_stream fetch \d+ requests {server.url}/\S+, bytes \d+ to \d+ for \d+ s"
    assert any(re.match(request, message) for message in caplog.messages)
    assert any(message.startswith("dali_stream planner: threading.py:") for message in caplog.messages), "level DEBUG"


def _loader(uri: Path | str, **arguments: Any) -> Loader:
    dataset = Dataset(uri, give_up_after_s=GIVE_UP_S)
    return Loader(dataset, **({"batch_size": 8, "consumers": 4} | arguments))
