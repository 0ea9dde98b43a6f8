"""Main program of a decode process. See `processes`."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time

import torch

from dali_stream.decode.processes import Decoded, DecodeWork
from dali_stream.decode.resized import decode_resized
from dali_stream.observe.counters import Counters
from dali_stream.system.child_process import Connection, send_error
from dali_stream.system.heap import TRIM_AFTER, trim_memory
from dali_stream.system.shared_memory import SharedBlock


def main(connection: Connection) -> None:
    """Start a decode thread for each message: the size of its memory, with the descriptors of its socket and its memory."""
    torch.set_num_threads(1)  # of torch's operators. Each thread resizes its own frames
    while True:
        size, [end, descriptor] = connection.receive()
        memory = SharedBlock(descriptor, size)
        os.close(descriptor)
        other = Connection(socket.socket(fileno=end), lambda: True)  # the main thread notices the end of the other process
        threading.Thread(target=_run, args=(other, memory), name="dali_stream decode", daemon=True).start()
        connection.send(None)


def _run(connection: Connection, memory: SharedBlock) -> None:
    """Decode one clip after the other, until the other process ends."""
    decoded_bytes = 0
    with contextlib.suppress(EOFError), contextlib.closing(connection):  # even after an error: the parent would wait
        while True:
            work, _ = connection.receive()
            try:
                _decode(connection, memory, work)
            except EOFError:
                raise
            except Exception as error:
                send_error(connection, error)
            decoded_bytes += work.expected.height * work.expected.width * 3 * work.clip.coded_frames
            if decoded_bytes >= TRIM_AFTER * threading.active_count():
                decoded_bytes = 0
                trim_memory()


def _decode(connection: Connection, memory: SharedBlock, work: DecodeWork) -> None:
    """Decode a clip. Send its frames each time they fill the memory, and at its end."""
    counters, began, output = Counters(), time.thread_time(), work.output
    most = memory.size // output.nbytes
    filled = memory.array((most, *output.shape), output.dtype)
    requests, decoded = list[int](), 0

    def send(is_last: bool) -> None:
        nonlocal requests, decoded, began
        now = time.thread_time()
        connection.send(Decoded(requests, decoded, counters.take_growth().get("resize_s", 0.0), now - began, is_last))
        requests, decoded, began = [], 0, now

    for part, frames, count in decode_resized(work.clip, work.expected, output, counters.timed, most):
        if len(requests) + len(part) > most:
            send(is_last=False)
            is_needed, _ = connection.receive()
            if not is_needed:
                return
        filled[len(requests) : len(requests) + len(part)] = frames
        requests = requests + part
        decoded += count
    send(is_last=True)
