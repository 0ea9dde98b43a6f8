"""Forks of a process with a loader, and the end of such a process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.slow import slow_after
from support.traces import needs_proc

pytestmark = needs_proc


PREAMBLE = """
import sys
from dali_stream.system.torchcodec_import import compile_nothing

compile_nothing()  # so torch's compiler is not imported
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


def script(root: Path, code: str) -> subprocess.CompletedProcess[str]:
    # Python warns of a fork in a process with threads, from 3.12 on: this is about just that.
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", PREAMBLE + code, str(root)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


@pytest.fixture(scope="module")
def forks(small: Path) -> subprocess.CompletedProcess[str]:
    """A process that has a loader, forks in every way, and ends in the middle of an epoch."""
    return script(small, FORKS)


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


# Each in a fork of one process that has imported the libraries. It ends as a program does, through the exit of the interpreter.
ENDS = """
import json, os, sys, tempfile
import dali_stream
from dali_stream.system.torchcodec_import import compile_nothing

compile_nothing()  # so torch's compiler is not imported
import nvidia.dali.plugin.pytorch, dali_stream.loader

def begin(graph=None):
    global loader, batches
    json.program = sys.modules["__main__"]  # as a library that has imported it: it outlives the modules of dali_stream
    loader = dali_stream.Loader(sys.argv[1], batch_size=8, device="cpu", dali_graph=graph)
    batches = iter(loader)
    next(batches)

found = {}
for end, code in json.loads(sys.argv[2]).items():
    with tempfile.TemporaryFile() as output:
        if (child := os.fork()) == 0:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            del output
            exec(code)
            break
        found[end] = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), (output.seek(0), output.read().decode())[1]]
else:
    print(json.dumps(found))
"""
ENDINGS = {
    "open": "begin()",
    "closed": "begin(); loader.close()",
    "open, with DALI": "begin(lambda nodes: nodes)",
    "closed, with DALI": "begin(lambda nodes: nodes); loader.close()",
    "iterated": "begin(); list(batches)",
    "dropped": "begin(); del loader",
    "open, of the program alone": "begin(); del json.program",
}


@pytest.fixture(scope="module")
def ends(small: Path) -> dict[str, Any]:
    """How processes ended, and what they printed."""
    command = [sys.executable, "-c", ENDS, str(small), json.dumps(ENDINGS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("end", ENDINGS)
def test_a_process_ends_wherever_its_loader_is(ends: dict[str, Any], end: str) -> None:
    assert ends[end] == [0, ""]


def test_importing_starts_nothing(small: Path) -> None:
    code = """
import os, threading
before = len(os.listdir("/proc/self/task"))
import dali_stream
dali_stream.Dataset(__import__("sys").argv[1])
print(threading.active_count(), len(os.listdir("/proc/self/task")) - before)
"""
    done = subprocess.run([sys.executable, "-c", code, str(small)], capture_output=True, text=True, check=True)
    assert done.stdout.split()[0] == "1"
