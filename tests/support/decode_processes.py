"""Decode processes for tests."""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from dali_stream.decode import process_main, processes
from dali_stream.system.child_process import Connection
from support.own_process import SAFETY_S


def use(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let decode threads wait until decode processes have started. Return a list of the numbers of frames that these send."""
    parts: list[int] = []
    without_process: list[processes.DecodeProcesses] = []  # those that start no other process
    decode, decode_remotely = processes.DecodeProcesses.decode, processes._RemoteThread.decode
    attend = processes.DecodeProcesses._attend

    def waiting(self: processes.DecodeProcesses, *arguments: Any) -> Iterator[Any]:
        if not self._attending:
            self._start()
        until = time.monotonic() + SAFETY_S
        while self not in without_process:
            with contextlib.suppress(queue.Empty):
                self._unused.put(self._unused.get(timeout=0.1))
                break
            assert time.monotonic() < until
        yield from decode(self, *arguments)

    def attending(self: processes.DecodeProcesses, count: int) -> None:
        attend(self, count)
        without_process.append(self)

    def counted(*arguments: Any) -> Iterator[Any]:
        for part in decode_remotely(*arguments):
            parts.append(len(part[0]))
            yield part

    monkeypatch.setattr(processes.DecodeProcesses, "decode", waiting)
    monkeypatch.setattr(processes.DecodeProcesses, "_attend", attending)
    monkeypatch.setattr(processes._RemoteThread, "decode", counted)
    return parts


def ending(connection: Connection) -> None:
    """Main program of a decode process that ends when it gets a clip."""
    while True:
        _, [end, descriptor] = connection.receive()
        os.close(descriptor)
        threading.Thread(target=_end, args=(Connection(socket.socket(fileno=end), lambda: True),), daemon=True).start()
        connection.send(None)


def _end(connection: Connection) -> None:
    connection.receive()
    os._exit(3)


def forgetful(connection: Connection) -> None:
    """Main program of a decode process whose threads fail after each clip."""

    def fail() -> None:
        raise MemoryError

    process_main.TRIM_AFTER, process_main.trim_memory = 0, fail
    process_main.main(connection)
