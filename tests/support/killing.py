"""Processes that a test may kill. They are forked from a process that has imported torch already."""

from __future__ import annotations

import multiprocessing
import random
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

_CONTEXT = multiprocessing.get_context("forkserver")
# All tests of a pytest process share one fork server, which imports these before it forks. They take seconds.
_PRELOADED = ("pytest", "psutil", "dali_stream.loader", "dali_stream.pipeline.producer")


def start(target: Callable[..., None], *arguments: object) -> tuple[Any, Connection]:
    """Start `target(*arguments, pipe)` in a process of its own. Return the process and the other end of the pipe."""
    _CONTEXT.set_forkserver_preload([*_PRELOADED, target.__module__])
    ours, theirs = _CONTEXT.Pipe(duplex=False)
    process = _CONTEXT.Process(target=target, args=(*arguments, theirs), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def places_until_killed(
    target: Callable[..., None], root: Path, file: Path, place: Callable[[Path], Any], moments: random.Random
) -> list[Any]:
    """Kill a process at a random moment while it replaces a file, over and over.

    Args:
        target: Function of (root, file, pipe) that writes the file and sends the place of its first state.
        root: Dataset.
        file: File that it replaces.
        place: Function that reads a place from the file.
        moments: Generator of the moment.

    Returns:
        Places that the file had: the first one, those until the kill, and that after it.
    """
    process, pipe = start(target, root, file)
    places = [pipe.recv()]
    for _ in range(moments.randrange(1, 200)):
        places.append(place(file))  # while it is being replaced
    process.kill()
    process.join()
    places.append(place(file))
    return places
