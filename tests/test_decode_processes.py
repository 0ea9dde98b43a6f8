"""A Loader with decode processes delivers the same batches and errors, also if they are killed. No process is left."""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import os
import random
import signal
import sys
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.batches import equal
from support.datasets import TOP, copied, damage_middle
from support.own_process import SAFETY_S, assert_ended, begin_session, children, program, received, run

from dali_stream import DaliStreamError, Dataset, DecodeError, Loader
from dali_stream.decode import processes as decode_processes
from dali_stream.run.loader_config import number_of_decode_processes

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="decode processes need memfd_create")
KILLS = int(os.environ.get("KILLS", 4))  # at random moments, of three lengths
LITTLE = "6MiB"  # memory_budget with which each epoch decodes
OPTIONS: dict[str, Any] = {"device": "cpu", "num_threads": 3, "batch_size": 7, "last_batch": "partial"}
HERE: dict[str, Any] = OPTIONS | {"in_process": True, "decode_processes": 0}
OTHERS: dict[str, Any] = OPTIONS | {"in_process": True, "decode_processes": 1}


def decoding() -> list[psutil.Process]:
    """Decode processes of this program."""
    return children("decode.process_main")


def same(loader: Loader, here: Loader, epochs: int = 2) -> None:
    """Compare the batches of two Loaders."""
    for _ in range(epochs):
        for batch, expected in zip(loader, here, strict=True):
            assert equal(batch, expected)


WAYS: dict[str, dict[str, Any]] = {
    "uint8, global order": {"image_dtype": "uint8", "shuffle": "global"},
    "windows, resized": {"delta_timestamps": {TOP: [-0.1, 0.0]}, "image_size": (48, 64)},
}


@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
def test_batches_are_the_same(options: dict[str, Any], small: Path, remote: list[int]) -> None:
    options = {"memory_budget": LITTLE, **options}
    with Loader(small, **OTHERS, **options) as loader, Loader(small, **HERE, **options) as here:
        same(loader, here)
        assert len(decoding()) == 1
        assert len(remote) >= 5  # small batches share clips
        counted = sum(remote) - OPTIONS["num_threads"] * max(remote)  # a clip of each thread may be on its way to its slots
        stats = loader.stats()
        assert stats["frames"] == here.stats()["frames"]
        assert stats["stored_frames"] >= counted > 0
        assert min(stats["decode_s"], stats["resize_s"], stats["decode_cpu_s"]) > 0
    assert not decoding()


def test_frames_that_do_not_fit_together_into_the_shared_memory(
    small: Path, remote: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory has room for two frames, so a clip arrives in several parts."""
    monkeypatch.setattr(decode_processes, "MEMORY_BYTES", 2 * 120 * 128 * 3)
    options: dict[str, Any] = {"memory_budget": LITTLE, "shuffle": False}
    with Loader(small, **OTHERS, **options) as loader, Loader(small, **HERE, **options) as here:
        same(loader, here)
    assert len(remote) >= 20
    assert max(remote) == 2


def test_damaged_frames_have_the_same_errors(
    small: Path, tmp_path: Path, remote: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    damage_middle(root := copied(small, tmp_path))
    options: dict[str, Any] = {"memory_budget": LITTLE, "image_size": (64, 80)}
    errors, warnings = [], []
    for way in (OTHERS, HERE):
        with Loader(root, shuffle=False, **way, **options) as loader, pytest.raises(DecodeError) as caught:
            for _ in loader:
                pass
        errors.append(str(caught.value))
        caplog.clear()
        with Loader(root, on_error="substitute", **way, **options) as loader:
            count = sum(int(batch["is_substitute"].sum()) for batch in loader)
        warnings.append((count, {text for text in map(logging.LogRecord.getMessage, caplog.records) if "ubstitut" in text}))
    assert errors[0] == errors[1]
    assert warnings[0] == warnings[1]
    assert warnings[0][0] > 0
    assert remote


def test_frames_that_they_decode_are_stored_on_disk(small: Path, tmp_path: Path, remote: list[int]) -> None:
    options: dict[str, Any] = {"image_size": (64, 80), "frame_cache": tmp_path}
    with Loader(small, **OTHERS, **options) as loader:
        for _ in loader:
            pass
    with Loader(small, **HERE, **options) as reader, Loader(small, **HERE, image_size=(64, 80)) as here:
        same(reader, here)
        stats = reader.stats()
    assert stats["stored_frames"] < here.stats()["stored_frames"] / 2, "few frames were decoded again"
    assert remote


@pytest.mark.slow
def test_a_process_that_cannot_decode_is_not_needed(
    small: Path, remote: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It ends with each clip. The clips are decoded nevertheless, and no other process is started after the third time."""
    monkeypatch.setattr(decode_processes, "MAIN", "support.decode_processes:ending")
    with Loader(small, memory_budget=LITTLE, **OTHERS) as loader, Loader(small, memory_budget=LITTLE, **HERE) as here:
        same(loader, here)
    deaths = [text for text in map(logging.LogRecord.getMessage, caplog.records) if text.startswith("A decode process")]
    assert all("ended with exit code 3" in text for text in deaths)
    assert len(deaths) == 3
    assert not remote


@pytest.mark.slow
def test_a_thread_that_fails_is_not_waited_for(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process lives on. The decode thread notices that nothing decodes its clip, and decodes it."""
    monkeypatch.setattr(decode_processes, "MAIN", "support.decode_processes:forgetful")
    decode, failed = decode_processes._RemoteThread.decode, list[object]()
    decode_first = decode_processes.DecodeProcesses.decode

    def waiting(self: decode_processes.DecodeProcesses, *arguments: Any) -> Iterator[Any]:
        if not self._attending:
            self._start()
            self._unused.put(self._unused.get(timeout=SAFETY_S))
        yield from decode_first(self, *arguments)

    def noted(*arguments: Any) -> Iterator[Any]:
        try:
            yield from decode(*arguments)
        except EOFError as error:
            failed.append(error)
            raise

    monkeypatch.setattr(decode_processes.DecodeProcesses, "decode", waiting)
    monkeypatch.setattr(decode_processes._RemoteThread, "decode", noted)
    options: dict[str, Any] = {"memory_budget": LITTLE, "num_threads": 1}
    with Loader(small, **(OTHERS | options)) as loader, Loader(small, **(HERE | options)) as here:
        same(loader, here)
    assert failed


def test_a_suspended_process_does_not_prevent_close(small: Path, remote: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    decode, suspended, errors = decode_processes._RemoteThread.decode, threading.Event(), list[str]()

    def suspend(*arguments: Any) -> Iterator[Any]:
        for process in decoding():
            process.suspend()
        suspended.set()
        yield from decode(*arguments)

    def iterate() -> None:
        try:
            list(loader)
        except DaliStreamError as error:
            errors.append(str(error))

    monkeypatch.setattr(decode_processes._RemoteThread, "decode", suspend)
    loader = Loader(small, memory_budget=LITTLE, **(OTHERS | {"num_threads": 1}))
    consumer = threading.Thread(target=iterate)
    consumer.start()
    assert suspended.wait(SAFETY_S)
    loader.close()
    consumer.join()
    assert errors == ["The Loader was closed while another thread waited for a batch"]
    assert not decoding()


def test_where_no_process_can_be_started(
    small: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    with Loader(small, memory_budget=LITTLE, **OTHERS) as loader, Loader(small, memory_budget=LITTLE, **HERE) as here:
        same(loader, here)
    texts = {text for text in map(logging.LogRecord.getMessage, caplog.records) if "decode process" in text}
    assert texts == {
        f"Clips are decoded without a decode process, since {sys.executable} is a frozen program, and not a Python interpreter"
    }


@pytest.mark.parametrize("number", [-1, 1.5, "two", True])
def test_another_number_of_processes_is_refused(number: Any, small: Path) -> None:
    with pytest.raises(ValueError, match="decode_processes must be"):
        Loader(small, decode_processes=number)


GIB = 1 << 30


@pytest.mark.parametrize(
    ("given", "threads", "stays", "memory", "expected"),
    [
        (None, 11, False, 64 * GIB, 0),
        (None, 12, False, 64 * GIB, 1),
        (None, 96, False, 64 * GIB, 12),
        (None, 96, True, 64 * GIB, 0),  # the training process makes the batches
        (None, 96, False, 8 * GIB, 2),
        (None, 16, False, GIB, 0),
        (3, 16, True, GIB, 3),
        (20, 16, False, 64 * GIB, 16),
        (0, 96, False, 64 * GIB, 0),
    ],
)
def test_the_number_of_processes(given: int | None, threads: int, stays: bool, memory: int, expected: int) -> None:
    assert number_of_decode_processes(given, threads, stays, memory) == expected


# However a Loader, the program or a decode process ends. Each program begins a session of its own.


def new_loader(small: Path | Dataset, in_process: bool, **arguments: Any) -> Loader:
    return Loader(small, memory_budget=LITTLE, **(OTHERS | {"in_process": in_process, "decode_processes": 2} | arguments))


def until_they_decode(loader: Loader) -> Iterator[Any]:
    """Iterate until there are two decode processes, and return the batches in progress."""
    while True:
        batches = iter(loader)
        for _ in batches:
            if len(decoding()) == 2:
                return batches


def end_loaders(small: Path, in_process: bool, pipe: Connection) -> None:
    begin_session()
    dataset = Dataset(small)
    # If the Loader has a process of its own, the decode processes end with that process, however the Loader ends.
    for way in ("close", "break", "drop") if in_process else ("close",):
        loader = new_loader(dataset, in_process)
        batches = until_they_decode(loader)
        if way == "close":
            loader.close()
        elif way == "break":
            batches.close()  # type: ignore[attr-defined]
        del batches, loader
        gc.collect()
        pipe.send((way, len(psutil.Process().children(recursive=True))))
    loader = new_loader(dataset, in_process)
    kept = until_they_decode(loader)
    pipe.send(None)
    del kept  # the program ends with an open Loader


@pytest.mark.slow
@pytest.mark.parametrize("in_process", [True, False])
def test_no_process_is_left_of_a_loader(in_process: bool, small: Path) -> None:
    with program(end_loaders, small, in_process) as (_, pipe):
        for way, left in iter(lambda: received(pipe), None):
            assert (way, left) == (way, 0)


EXIT = """
import itertools, sys
import psutil
from dali_stream.system.torchcodec_import import compile_nothing

compile_nothing()  # so torch's compiler is not imported
from dali_stream import Loader
loader = Loader(sys.argv[1], batch_size=7, memory_budget="6MiB", num_threads=2, in_process=True, decode_processes=2)
for _ in itertools.chain.from_iterable(itertools.repeat(loader)):
    if len(psutil.Process().children()) == 2:
        break
"""


@pytest.mark.slow
def test_a_program_that_ends_with_an_open_loader_logs_nothing(small: Path) -> None:
    _, err = run([sys.executable, "-c", EXIT, small])
    assert "decode process" not in err


def sockets(pid: int) -> int:
    """Number of sockets of a decode process: one to its parent, and one for each decode thread."""
    found = 0
    for number in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # it was closed meanwhile
            found += os.readlink(f"/proc/{pid}/fd/{number}").startswith("socket")
    return found


def iterate(small: Path, in_process: bool, pipe: Connection) -> None:
    begin_session()
    loader = new_loader(small, in_process)
    until_they_decode(loader)
    fork = os.fork()
    if not fork:
        while True:
            signal.pause()
    pipe.send((fork, [process.pid for process in decoding()]))
    for _ in itertools.repeat(None):
        for _ in loader:
            pass


@pytest.mark.slow
@pytest.mark.parametrize(("number", "in_process"), [(signal.SIGKILL, False), (signal.SIGTERM, True)])
def test_they_end_with_the_program(number: signal.Signals, in_process: bool, small: Path) -> None:
    """A forked process lives on. It holds what the program had open."""
    with program(iterate, small, in_process) as (process, pipe):
        fork, own = received(pipe)
        for pid in own:
            assert sockets(pid) == 1 + psutil.Process(pid).num_threads() - 2
            os.kill(pid, signal.SIGINT)  # signals of launchers are ignored
        os.kill(process.pid, number)
        process.join(SAFETY_S)
        assert_ended(process.pid, but=[fork])
        os.kill(fork, signal.SIGKILL)


def decodes(process: psutil.Process) -> bool:
    """Whether a decode process has started a decode thread."""
    with contextlib.suppress(FileNotFoundError, PermissionError):  # the process has ended
        return sockets(process.pid) > 1
    return False


def wait_until_they_decode() -> None:
    """Wait until all decode processes that exist have started their threads, or have ended."""
    for process in decoding():
        while process.is_running() and not decodes(process):
            with contextlib.suppress(psutil.TimeoutExpired):
                process.wait(0.05)


class Killer:
    """Thread that kills decode processes at random moments, in turn before they have begun to decode and within a clip.

    It suspends a process before it kills it within a clip, so that the process completes none.

    Attributes:
        killed: Numbers of the processes that it has killed.
        delivered: Event that the program sets when it has a batch.
    """

    def __init__(self, moments: random.Random) -> None:
        self._moments, self.killed, self.delivered = moments, list[int](), threading.Event()
        self._thread = threading.Thread(target=self._kill, daemon=True)  # so a program that fails can end
        self._thread.start()

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def _kill(self) -> None:
        while len(self.killed) < KILLS:
            living = [process for process in decoding() if process.pid not in self.killed]
            within_a_clip = len(self.killed) % 2 == 1
            if within_a_clip:
                living = list(filter(decodes, living))
            if not living:
                self.delivered.clear()
                self.delivered.wait()
                continue
            chosen = self._moments.choice(living)
            if within_a_clip:
                chosen.suspend()
            with contextlib.suppress(psutil.TimeoutExpired):
                chosen.wait(self._moments.choice((0.02, 0.2)) * self._moments.random())
            if chosen.is_running():  # the Loader may have ended it
                chosen.kill()
                self.killed.append(chosen.pid)


def kill_decoders(small: Path, pipe: Connection) -> None:
    begin_session()
    dataset, killer, differ, epochs, noted = Dataset(small), Killer(random.Random(7)), 0, list[list[int]](), 0
    while not killer.is_done:
        # A Loader whose processes are killed before they have decoded a clip starts no more of them, so there are others.
        with new_loader(dataset, in_process=False) as loader, Loader(dataset, **HERE) as here:
            for _ in range(6):
                found = list[int]()
                for batch, expected in zip(loader, here, strict=True):
                    differ += not equal(batch, expected)
                    found += batch["index"].tolist()
                    killer.delivered.set()
                epochs.append(sorted(found))
                if noted < len(killer.killed):  # the test waits for a limited time for each kill
                    noted = len(killer.killed)
                    pipe.send(None)
                wait_until_they_decode()
    pipe.send((epochs, differ, killer.killed))


@pytest.mark.slow
def test_they_are_killed_at_any_moment(small: Path) -> None:
    with program(kill_decoders, small) as (_, pipe):
        while (result := received(pipe)) is None:
            pass
    epochs, differ, killed = result
    assert all(epoch == list(range(Dataset(small).num_frames)) for epoch in epochs)
    assert (differ, len(set(killed))) == (0, KILLS)
