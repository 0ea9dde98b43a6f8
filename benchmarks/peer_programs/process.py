"""A peer's process: asked in turns, stopped between them, and its memory measured."""

from __future__ import annotations

import contextlib
import os
import signal
from typing import Any

import psutil

from dali_stream.tools.isolated import Child, ChildError


class PeerError(Exception):
    """A peer did not start, died, or does not answer."""


class Peer:
    """One process, and those that it has started.

    Args:
        command: program and arguments.
        answer_s: seconds that it has for an answer.
        environment: variables in addition to those of this process.

    Raises:
        PeerError: it does not start.
    """

    def __init__(self, command: list[str], answer_s: float, environment: dict[str, str]) -> None:
        self.peak_bytes = 0
        self._answer_s = answer_s
        self._group: int | None = None
        try:
            # The program makes its own process group (see `serve`), which the kernel ends if this process is killed.
            self._child = Child(command, environment, own_session=False)
        except ChildError as error:
            raise PeerError(str(error)) from error
        try:
            ready = self._receive("ready")
        except BaseException:
            self.close()
            raise
        self.versions: dict[str, str] = ready["ready"]
        self._group = ready["group"]
        self._signal(signal.SIGSTOP)

    def ask(self, answer: str, **request: Any) -> Any:
        """Lets it continue until it has answered. It is stopped between its turns, so it neither gains nor takes time."""
        self._signal(signal.SIGCONT)
        self._child.send(request)
        found = self._receive(answer)
        self._signal(signal.SIGSTOP)
        self._measure_memory()
        return found[answer]

    def close(self) -> None:
        """Kills it with all processes that it has started. May be called again."""
        self._signal(signal.SIGKILL)
        self._group = None
        self._child.close()

    def _receive(self, key: str) -> dict[str, Any]:
        try:
            return self._child.receive(key, self._answer_s, self._measure_memory)
        except ChildError as error:
            lines = self._child.stderr().splitlines()[-20:]
            said = "\n".join(["Its stderr ends:", *lines]) if lines else "Its stderr is empty."
            raise PeerError(f"{error}. {said}") from error

    def _measure_memory(self) -> None:
        """Memory of all its processes; what several of them share counts once."""
        found = 0
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(self._child.process.pid)
            for one in (process, *process.children(recursive=True)):
                with contextlib.suppress(psutil.Error):
                    found += one.memory_full_info().pss
        self.peak_bytes = max(self.peak_bytes, found)

    def _signal(self, number: int) -> None:
        if self._group is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._group, number)
