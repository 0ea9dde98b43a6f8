"""However a Loader, its process or the program ends, no process is left, and no frame is lost or repeated."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import logging
import os
import random
import signal
import sys
import threading
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.batches import equal, samples
from support.killing import start
from support.own_process import SAFETY_S, assert_ended, begin_session, children, program, received, run
from support.slow import slow

from dali_stream import DaliStreamError, Dataset, Loader

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="a Loader has a process of its own on Linux only")
# Of programs, and of processes of a Loader, at random moments: of three lengths, before and after the first batch.
KILLS = int(os.environ.get("KILLS", 4))
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


# Parts of the programs. Each program is forked from one that has imported everything, and begins a session of its own.


def new_loader(small: Path, **arguments: Any) -> Loader:
    """A Loader that delivers each frame of an epoch, in a process of its own unless the arguments say otherwise."""
    return Loader(small, batch_size=8, last_batch="partial", **arguments)


def kill_children_now() -> None:
    for child in children():
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()


class Warnings(logging.Handler):
    """Messages of warnings of the package."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []
        logging.getLogger("dali_stream").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


# The Loader ends.


def closed(own: Loader) -> int:
    batches = iter(own)
    next(batches)
    count = len(children())
    own.close()
    return count


def closed_before_the_first_batch(own: Loader) -> int:
    count = len(children())
    own.close()
    return count


def left_by_break(own: Loader) -> int:
    for _ in own:
        count = len(children())
        break
    return count


def dropped_before_the_first_batch(own: Loader) -> int:
    return len(children())


def collected(own: Loader) -> int:
    batches = iter(own)
    next(batches)
    cycle: list[Any] = [own, batches]
    cycle.append(cycle)
    return len(children())


def end_loaders(small: Path, pipe: Connection) -> None:
    begin_session()
    dataset, kept = Dataset(small), []
    for way in (closed, closed_before_the_first_batch, left_by_break):
        kept.append(new_loader(dataset))
        pipe.send((way.__name__, way(kept[-1]), len(children())))
    for way in (dropped_before_the_first_batch, collected):
        count = way(new_loader(dataset))
        gc.collect()
        pipe.send((way.__name__, count, len(children())))
    pipe.send(None)


@pytest.mark.slow
def test_no_process_is_left_of_a_loader(small: Path) -> None:
    with program(end_loaders, small) as (_, pipe):
        for way, before, after in iter(lambda: received(pipe), None):
            assert (way, before, after) == (way, 1, 0)


EXIT = """
import os, sys
import psutil
import dali_stream

loader = dali_stream.Loader(sys.argv[1], batch_size=8)
batches = iter(loader)
for _ in range(3):
    next(batches)
[child] = psutil.Process().children()
print(child.pid, flush=True)
"""


@pytest.mark.slow
def test_the_program_ends_in_the_middle_of_an_epoch(small: Path) -> None:
    """`run` checks that no process is left."""
    assert run([sys.executable, "-c", EXIT, small])[1] == ""


def leave(small: Path, err: Path, ends: str, pipe: Connection) -> None:
    """End in the middle of an epoch, without the exit of the interpreter."""
    begin_session()
    os.dup2(os.open(err, os.O_WRONLY | os.O_CREAT), 2)
    batches = iter(new_loader(small))
    next(batches)
    pipe.send(len(children()))
    if ends == "_exit":
        os._exit(0)
    os.execv("/bin/true", ["true"])


@pytest.mark.slow
@pytest.mark.parametrize("ends", ["_exit", "execv"])
def test_the_program_ends_without_the_exit_of_the_interpreter(ends: str, small: Path, tmp_path: Path) -> None:
    with program(leave, small, tmp_path / "err", ends) as (process, pipe):
        assert received(pipe) == 1
    assert process.exitcode == 0
    assert (tmp_path / "err").read_text() == ""


def iterate(small: Path, forks: bool, pipe: Connection) -> None:
    """Iterate until the program is killed. Send the number of a forked process, if any."""
    begin_session()
    batches = itertools.chain.from_iterable(itertools.repeat(new_loader(small)))
    next(batches)
    [child] = children()
    number = None
    if forks:
        number = ctypes.CDLL(None).fork()  # as a library does, without the functions that Python calls at a fork
        if not number:
            while True:
                signal.pause()
    pipe.send((child.pid, number))
    for _ in batches:
        pass


@pytest.mark.parametrize(
    ("number", "to_all", "forks"),
    [
        (signal.SIGKILL, False, True),
        slow(signal.SIGKILL, False, False),
        slow(signal.SIGTERM, True, False),
        slow(signal.SIGINT, True, False),
    ],
)
def test_a_signal_ends_the_program(number: signal.Signals, to_all: bool, forks: bool, small: Path) -> None:
    """Another descendant of the program may hold the socket of the Loader open, and live on."""
    with program(iterate, small, forks) as (process, pipe):
        child, fork = received(pipe)
        for each in (process.pid, child):
            paths = [mapped.path for mapped in psutil.Process(each).memory_maps()]
            assert any(path.startswith("/memfd:dali_stream") for path in paths)
            assert not any(path.startswith("/dev/shm") for path in paths)  # so nothing can be left there
        (os.killpg if to_all else os.kill)(process.pid, number)
        process.join(SAFETY_S)
        if forks:
            assert_ended(process.pid, but=[fork])
            os.kill(fork, signal.SIGKILL)


def deliver(small: Path, pipe: Connection) -> None:
    """Deliver batches until the program is killed, and tell when it begins and when there is a batch."""
    begin_session()
    pipe.send("begins")
    own = new_loader(small)
    for _ in own:
        pipe.send("delivers")
        break
    while True:
        for _ in own:
            pass


@pytest.mark.slow
def test_programs_that_are_killed_at_any_moment(small: Path) -> None:
    """Every other one is killed before its first batch, or before its Loader is made."""
    moments, sessions = random.Random(3), []
    for number in range(KILLS):
        process, pipe = start(deliver, small)
        assert received(pipe) == "begins"
        if number % 2:
            assert received(pipe) == "delivers"
        process.join(moments.choice((0.02, 0.2, 2.0)) * moments.random())
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        sessions.append(process.pid)
    for session in sessions:
        assert_ended(session)


# The process ends, or gets a signal.


def send_signals(small: Path, pipe: Connection) -> None:
    begin_session()
    handled: list[int] = []
    for number in SIGNALS:
        ignores = number in (signal.SIGHUP, signal.SIGUSR2)
        signal.signal(number, signal.SIG_IGN if ignores else lambda number, _: handled.append(number))
    own, warnings, found = new_loader(small), Warnings(), list[int]()
    pids = {child.pid for child in children()}
    for number in SIGNALS:  # before the process can have begun to ignore them
        os.killpg(0, number)
    for _ in range(2):
        for number, batch in zip(itertools.cycle(SIGNALS), own, strict=False):
            found += batch["index"].tolist()
            pids |= {child.pid for child in children()}
            os.killpg(0, number)
    own.close()
    pipe.send((found, pids, sorted(set(handled)), warnings.texts))


@pytest.mark.slow
def test_signals_to_all_processes_of_the_program(small: Path) -> None:
    """Schedulers send them before they end a job or for a checkpoint, and the program decides what they mean."""
    with program(send_signals, small) as (_, pipe):
        found, pids, handled, warnings = received(pipe)
    assert sorted(found) == sorted(2 * list(range(Dataset(small).num_frames)))
    assert (len(pids), warnings) == (1, [])
    assert handled == sorted([signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])


class Killer:
    """Thread that kills the process of a Loader at random moments, at most twice until a batch is delivered.

    Attributes:
        killed: Numbers of processes that were killed.
    """

    def __init__(self, moments: random.Random) -> None:
        self._moments, self.killed = moments, list[int]()
        self._batches, self._delivered = 0, threading.Condition()
        self._thread = threading.Thread(target=self._kill)
        self._thread.start()

    def note_batch(self) -> None:
        with self._delivered:
            self._batches += 1
            self._delivered.notify()

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def _kill(self) -> None:
        last = -1
        while len(self.killed) < KILLS:
            with self._delivered:
                self._delivered.wait_for(lambda last=last: self._batches > last)  # type: ignore[misc]
            while not (living := children()) or living[0].pid in self.killed:  # the Loader starts another process
                os.sched_yield()
            with contextlib.suppress(psutil.TimeoutExpired):
                living[0].wait(self._moments.choice((0.02, 0.2, 1.0)) * self._moments.random())
            with self._delivered:
                last = self._batches
            living[0].kill()
            self.killed.append(living[0].pid)


def kill_children(small: Path, pipe: Connection) -> None:
    begin_session()
    dataset, warnings = Dataset(small), Warnings()
    own, in_process = new_loader(dataset), new_loader(dataset, in_process=True)
    killer, epochs, differ, is_last = Killer(random.Random(5)), list[list[int]](), 0, False
    noted = 0
    while not is_last:
        is_last, found = killer.is_done, list[int]()
        for batch, expected in zip(own, in_process, strict=True):
            differ += not equal(batch, expected)
            found += batch["index"].tolist()
            killer.note_batch()
            if noted < len(killer.killed):  # the test waits for a limited time for each kill
                noted = len(killer.killed)
                pipe.send(None)
        epochs.append(sorted(found))
    own.close()
    in_process.close()
    pipe.send((epochs, differ, killer.killed, warnings.texts))


@pytest.mark.slow
def test_the_process_is_killed_at_any_moment(small: Path) -> None:
    with program(kill_children, small) as (_, pipe):
        while (result := received(pipe)) is None:
            pass
    epochs, differ, killed, warnings = result
    assert all(epoch == list(range(Dataset(small).num_frames)) for epoch in epochs)
    assert (differ, len(set(killed))) == (0, KILLS)
    deaths = [text for text in warnings if text.startswith("The process of the Loader ")]  # others are about the rate
    assert len(deaths) == KILLS
    assert all("was killed by SIGKILL" in text for text in deaths)


def kill_all_children(small: Path, pipe: Connection) -> None:
    begin_session()
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # a program may have reset it to its default, which ends the program
    warnings, own, ends = Warnings(), new_loader(small), threading.Event()
    [child] = children()
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # so the Loader sends its first message to a dead process

    def kill() -> None:
        while not ends.is_set():
            kill_children_now()

    thread = threading.Thread(target=kill)
    thread.start()
    for _ in range(2):  # the second time, the same Loader tries again
        try:
            next(iter(own))
        except DaliStreamError as error:
            pipe.send((str(error), [text for text in warnings.texts if "was killed by SIGKILL" in text]))
        warnings.texts.clear()
    ends.set()
    thread.join()
    pipe.send(samples(own))
    own.close()


def test_the_process_is_killed_before_it_has_made_a_batch(small: Path) -> None:
    """This ends with an error, at the third time. The Loader can still be used afterwards."""
    with program(kill_all_children, small) as (_, pipe):
        for _ in range(2):
            error, warnings = received(pipe)
            assert "was killed by SIGKILL" in error
            assert "3 times in a row" in error
            assert len(warnings) == 2
        assert sorted(received(pipe)) == list(range(Dataset(small).num_frames))


def stop_children(small: Path, pipe: Connection) -> None:
    begin_session()
    dataset = Dataset(small)
    for has_begun, closes in itertools.product((True, False), (True, False)):
        own = new_loader(dataset)
        batches = iter(own)
        if has_begun:
            next(batches)
        [child] = children()
        child.suspend()
        if closes:
            own.close()
        del own, batches
        pipe.send(len(children()))


@pytest.mark.slow
def test_a_process_that_does_not_run_is_ended(small: Path) -> None:
    """It was stopped, as a debugger and some schedulers do. Closing and dropping the Loader must not wait for it."""
    with program(stop_children, small) as (_, pipe):
        assert [received(pipe) for _ in range(4)] == [0, 0, 0, 0]


def save_states(small: Path, pipe: Connection) -> None:
    begin_session()
    dataset = Dataset(small)
    own = new_loader(dataset)
    batches, resumed = iter(own), new_loader(dataset)
    found = samples(itertools.islice(batches, 6))
    kill_children_now()  # that of `resumed` has not got its work yet
    state = own.state_dict()
    resumed.load_state_dict(state)
    again = iter(resumed)
    after = samples(itertools.islice(again, 2))
    kill_children_now()
    state_after = resumed.state_dict()
    after += samples(again)
    with new_loader(dataset, in_process=True) as in_process:
        in_process.load_state_dict(state_after)
        from_the_end = samples(in_process)
    pipe.send((found, samples(batches), after, after[-len(from_the_end) :] == from_the_end))
    own.close()
    resumed.close()


@pytest.mark.slow
def test_a_state_that_is_saved_while_the_process_is_killed(small: Path) -> None:
    with new_loader(small, in_process=True) as in_process:
        expected = samples(in_process)
    with program(save_states, small) as (_, pipe):
        before, after, resumed, is_same_end = received(pipe)
    assert before + after == expected
    assert before + resumed == expected
    assert is_same_end
