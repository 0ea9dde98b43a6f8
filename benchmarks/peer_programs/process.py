"""Process of a peer, which answers requests and is stopped between them. Its memory is measured."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import tempfile
import time
from typing import IO, Any, cast

import psutil

_TICK_S = 0.5  # time between two measurements of memory while the process works


class PeerError(Exception):
    """A peer did not start, ended early, or did not answer in time."""


class Peer:
    """The process of a peer, and the processes that it has started.

    Args:
        command: Program and its arguments.
        answer_s: Time limit for an answer in seconds.
        environment: Environment variables in addition to those of this process.

    Raises:
        PeerError: If the process does not start.
    """

    def __init__(self, command: list[str], answer_s: float, environment: dict[str, str]) -> None:
        self.peak_bytes = 0
        self._answer_s, self._unread = answer_s, b""
        self._group: int | None = None
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed in `close`
        pipe, everything = subprocess.PIPE, {**os.environ, **environment}
        try:
            # The program creates a process group (see `serve`). The kernel ends a stopped group if this process is killed.
            self._process = subprocess.Popen(command, bufsize=0, stdin=pipe, stdout=pipe, stderr=self._stderr, env=everything)
        except OSError as error:
            self._stderr.close()
            raise PeerError(f"it does not start: {error}") from error
        # The pipes are unbuffered, since `select` does not see data in a buffer.
        self._stdin, self._stdout = cast(IO[bytes], self._process.stdin), cast(IO[bytes], self._process.stdout)
        try:
            ready = self._receive("ready")
        except BaseException:
            self.close()
            raise
        self.versions: dict[str, str] = ready["ready"]
        self._group = ready["group"]
        self._signal(signal.SIGSTOP)

    def ask(self, answer: str, **request: Any) -> Any:
        """Send a request, let the process continue until it has answered, and return the answer.

        The process is stopped between requests. It can therefore neither prepare batches that are not timed, nor slow down
        others.

        Args:
            answer: Name of the expected entry of the answer.
            request: Entries of the request.

        Raises:
            PeerError: If the process ends, or does not answer in time.
        """
        self._signal(signal.SIGCONT)
        with contextlib.suppress(BrokenPipeError):  # `_receive` reports how the process ended
            self._stdin.write(json.dumps(request).encode() + b"\n")
        reply = self._receive(answer)
        self._signal(signal.SIGSTOP)
        self._measure_memory()
        return reply[answer]

    def close(self) -> None:
        """Kill the process and all processes that it has started. This method may be called more than once."""
        self._signal(signal.SIGKILL)
        self._group = None
        self._process.kill()
        self._process.wait()
        for file in (self._stdin, self._stdout, self._stderr):
            file.close()

    def _receive(self, key: str) -> dict[str, Any]:
        """Return the next JSON object on stdout that has a key. Other lines are skipped."""
        until = time.monotonic() + self._answer_s
        while True:
            while b"\n" in self._unread:
                line, _, self._unread = self._unread.partition(b"\n")
                with contextlib.suppress(ValueError):
                    reply = json.loads(line)
                    if isinstance(reply, dict) and key in reply:
                        return reply
            left = until - time.monotonic()
            if left <= 0:
                raise self._failed(f"no answer within {self._answer_s:.3g} s")
            if select.select([self._stdout], [], [], min(left, _TICK_S))[0]:
                data = os.read(self._stdout.fileno(), 1 << 16)
                self._unread += data
                ended = not data
            else:
                self._measure_memory()
                ended = self._process.poll() is not None
            if ended:
                raise self._failed(self._end())

    def _end(self) -> str:
        """Return a text that says how the process ended."""
        try:
            code = self._process.wait(10)
        except subprocess.TimeoutExpired:
            return "it did not end within 10 s"
        if code < 0:
            return f"it crashed with {signal.Signals(-code).name}"
        return f"it ended with exit code {code}" if code else "it ended without an answer"

    def _failed(self, why: str) -> PeerError:
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").strip().splitlines()[-20:]
        detail = "\n".join(["Its stderr ends:", *lines]) if lines else "Its stderr is empty."
        return PeerError(f"{why}. {detail}")

    def _measure_memory(self) -> None:
        """Measure the memory of all processes of the peer. Memory that several of them share is counted once."""
        total = 0
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(self._process.pid)
            for one in (process, *process.children(recursive=True)):
                with contextlib.suppress(psutil.Error):
                    total += one.memory_full_info().pss
        self.peak_bytes = max(self.peak_bytes, total)

    def _signal(self, number: int) -> None:
        if self._group is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._group, number)
