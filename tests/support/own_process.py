"""Programs whose Loader has processes of its own, and the processes that are left of them."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

from support.killing import start

SAFETY_S = 300  # seconds after which a test fails that would hang otherwise

# Part of a program: `same` compares a Loader that has a process of its own with one that has none. The program compiles
# nothing, so it does not import torch's compiler, which takes as long as torch itself.
SAME = """
import json, logging, sys
import psutil, torch
import dali_stream
from dali_stream.system.torchcodec_import import compile_nothing

compile_nothing()

whole = {"last_batch": "partial"}  # each frame of an epoch is delivered

def children():
    return {child.pid for child in psutil.Process().children(recursive=True)}

def same(loader, in_process):
    "Check that the batches of an epoch are the same. Return their samples, and the processes while it iterates."
    samples, processes = [], children()
    for own, expected in zip(loader, in_process, strict=True):
        processes |= children()
        assert list(own) == list(expected)
        for key, values in own.items():
            if isinstance(values, torch.Tensor):
                assert values.dtype == expected[key].dtype and torch.equal(values, expected[key]), key
            else:
                assert values == expected[key], key
        samples += own["index"].tolist()
    return {"samples": samples, "processes": sorted(processes)}
"""


def environment(**variables: str) -> dict[str, str]:
    """Environment of a program: that of a user, not of this test run."""
    return {name: value for name, value in os.environ.items() if name != "DALI_STREAM_IN_PROCESS"} | variables


def run(command: Sequence[object], text: str | None = None, cwd: Path | None = None, **variables: str) -> tuple[Any, str]:
    """Run a program until it ends, and check that it succeeds and that no process of it is left.

    Args:
        command: Command line.
        text: Text of its standard input. Default: none.
        cwd: Working directory.
        variables: Environment variables.

    Returns:
        Values that it printed as the last line of its standard output, in JSON, and its standard error.
    """
    program = subprocess.Popen(
        list(map(str, command)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
        env=environment(**variables),
        start_new_session=True,
    )
    try:
        out, err = program.communicate(text, SAFETY_S)
    finally:
        program.kill()
    assert program.returncode == 0, err
    assert_ended(program.pid)
    return json.loads(out.splitlines()[-1]) if out else None, err


def processes(session: int) -> list[psutil.Process]:
    """Processes of a session. Those that have ended do not count, even if nobody has waited for them."""
    found = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (ProcessLookupError, psutil.NoSuchProcess):  # the process ended after it was listed
            pass
    return found


def assert_ended(session: int, but: Sequence[int] = ()) -> None:
    """Wait until only the processes with the numbers in `but` are left of a session."""
    deadline = time.monotonic() + SAFETY_S
    while left := [process for process in processes(session) if process.pid not in but]:
        assert time.monotonic() < deadline, f"left: {[process.cmdline() for process in left]}"
        psutil.wait_procs(left, timeout=1)  # which waits longer for one that its parent does not wait for


@contextlib.contextmanager
def program(target: Callable[..., None], *arguments: object) -> Iterator[tuple[Any, Connection]]:
    """Run a program. Yields its process, and a pipe from it. At the end, no process of it may be left."""
    process, pipe = start(target, *arguments)
    try:
        yield process, pipe
        process.join(SAFETY_S)
        assert process.exitcode is not None
        assert_ended(process.pid)
    finally:
        process.kill()
        process.join()
        for left in processes(process.pid):
            left.kill()


def received(pipe: Connection) -> Any:
    """Next message of a program."""
    assert pipe.poll(SAFETY_S)
    return pipe.recv()


def begin_session() -> None:
    """Begin a session of this program's own, with the environment of a user."""
    os.setsid()
    os.environ.pop("DALI_STREAM_IN_PROCESS", None)


def children(text: str = "") -> list[psutil.Process]:
    """Descendants of this program with this text in their command lines, without those that have ended."""
    found = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.status() != psutil.STATUS_ZOMBIE and text in " ".join(child.cmdline()):
                found.append(child)
    return found
