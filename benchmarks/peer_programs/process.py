"""Run of a peer program in a new process, whose memory is measured."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from typing import IO

import psutil

_TICK_S = 0.5  # time between two measurements of memory


class PeerError(Exception):
    """A peer did not start, failed, or did not end in time."""


def run_peer(command: list[str], limit_s: float, variables: dict[str, str]) -> int:
    """Run a program until it ends, and then kill all processes that it has started.

    Args:
        command: Program and its arguments.
        limit_s: Time limit in seconds.
        variables: Environment variables in addition to those of this process.

    Returns:
        Peak memory of all processes of the peer in bytes. Memory that several of them share is counted once.

    Raises:
        PeerError: If the program does not start, fails, or does not end in time.
    """
    peak, until = 0, time.monotonic() + limit_s
    with tempfile.TemporaryFile() as output:
        try:
            # A separate session, so that its processes can be killed as a group.
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=os.environ | variables,
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise PeerError(f"it does not start: {error}") from error
        try:
            while process.poll() is None:
                peak = max(peak, _memory(process.pid))
                if time.monotonic() > until:
                    raise PeerError(f"it did not end within {limit_s:.3g} s. {_end_of(output)}")
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_TICK_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
        if code:
            how = f"it crashed with {signal.Signals(-code).name}" if code < 0 else f"it ended with exit code {code}"
            raise PeerError(f"{how}. {_end_of(output)}")
    return peak


def _end_of(output: IO[bytes]) -> str:
    output.seek(0)
    lines = output.read().decode(errors="replace").strip().splitlines()[-20:]
    return "\n".join(["Its output ends:", *lines]) if lines else "It has written no output."


def _memory(pid: int) -> int:
    total = 0
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        for each in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                total += each.memory_full_info().pss
    return total
