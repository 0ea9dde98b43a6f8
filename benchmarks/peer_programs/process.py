"""A peer's process as the benchmark sees it: asked in turns, stopped between them, weighed, and told what it died of."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil

TICK_S = 0.5  # between two looks at the memory of a peer at work; a look takes milliseconds


class PeerError(Exception):
    """A peer could not be started, died, or does not answer."""


class Peer:
    """One process, and what it has started.

    Args:
        command: program and arguments.
        errors: a file that its stderr goes to.
        answer_s: seconds that it has for an answer.
        environment: variables beside those of this process.

    Raises:
        PeerError: it does not come up.
    """

    def __init__(self, command: list[str], errors: Path, answer_s: float, environment: dict[str, str]) -> None:
        self.peak_bytes = 0
        self._errors, self._answer_s = errors, answer_s
        self._unread = b""  # of its stdout
        self._group: int | None = None
        try:
            with errors.open("w") as stderr:
                pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": stderr}
                # Without a buffer: what it held, select would not see.
                self._process = subprocess.Popen(command, bufsize=0, env={**os.environ, **environment}, **pipes)
        except OSError as error:
            raise PeerError(f"it does not start: {error}") from error
        try:
            ready = self._answer("ready")
        except BaseException:
            self.close()
            raise
        self.versions: dict[str, str] = ready["ready"]
        self._group = ready["group"]
        self._signal(signal.SIGSTOP)

    def ask(self, answer: str, **request: Any) -> Any:
        """Lets it continue until it has answered. Between its turns nothing of it runs, so it neither gains nor takes time."""
        self._signal(signal.SIGCONT)
        assert self._process.stdin
        with contextlib.suppress(BrokenPipeError):  # how it ended is told by the missing answer
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        found = self._answer(answer)
        self._signal(signal.SIGSTOP)
        self._weigh()
        return found[answer]

    def close(self) -> None:
        """Ends it, with all that it has started. May be called again."""
        self._signal(signal.SIGKILL)
        self._group = None
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe
            with contextlib.suppress(BrokenPipeError):
                pipe.close()

    def _answer(self, key: str) -> dict[str, Any]:
        assert self._process.stdout
        until = time.monotonic() + self._answer_s
        while time.monotonic() < until:
            while b"\n" in self._unread:
                line, _, self._unread = self._unread.partition(b"\n")
                with contextlib.suppress(ValueError):  # what a library prints while it is imported
                    answer = json.loads(line)
                    if isinstance(answer, dict) and key in answer:
                        return answer
            if select.select([self._process.stdout], [], [], TICK_S)[0]:
                came = os.read(self._process.stdout.fileno(), 1 << 16)
                if not came:
                    raise PeerError(self._death())
                self._unread += came
            else:
                self._weigh()
                if self._process.poll() is not None:
                    raise PeerError(self._death())
        raise PeerError(f"no answer in {self._answer_s:g} s. {self._said()}")

    def _weigh(self) -> None:
        """Memory of all its processes; what several of them share counts once."""
        found = 0
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(self._process.pid)
            for one in (process, *process.children(recursive=True)):
                with contextlib.suppress(psutil.Error):
                    found += one.memory_full_info().pss
        self.peak_bytes = max(self.peak_bytes, found)

    def _signal(self, number: int) -> None:
        if self._group is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._group, number)

    def _death(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=10)
        code = self._process.poll()
        how = f"ended by {signal.Signals(-code).name}" if code is not None and code < 0 else f"ended with exit code {code}"
        return f"{how}. {self._said()}"

    def _said(self) -> str:
        lines = self._errors.read_text(errors="replace").strip().splitlines()[-20:]
        return "It said:\n" + "\n".join(lines) if lines else "It said nothing."
