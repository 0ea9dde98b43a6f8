"""Ranks that are forked from one process, which imports everything once. A launcher starts each rank as a new program.

    python -m support.forked RANKS MODULE ARGUMENT ...

It calls `main(arguments)` of the module in each rank, with the environment that torchrun gives to a rank. On standard error, it
says the process id of each rank, and the exit code of each one at the end.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import socket
import sys
from pathlib import Path
from typing import Any


def command(ranks: int, module: str, *arguments: object) -> list[str]:
    """The command line."""
    return list(map(str, [sys.executable, "-m", "support.forked", ranks, module, *arguments]))


def environment(*folders: Path) -> dict[str, str]:
    """Variables for the command, with which modules are found in the folders."""
    tests = Path(__file__).parents[1]
    path = os.pathsep.join(map(str, [*folders, tests, tests.parent]))
    return {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path}


def free_port() -> int:
    """A port that is free now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def run_rank(main: Any, rank: int, arguments: list[str]) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    sys.exit(main(arguments))


def say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def main() -> int:
    ranks, module, *arguments = sys.argv[1:]
    program = importlib.import_module(module)
    for name in ("accelerate", "dali_stream.loader", "torchcodec.decoders"):  # which a program may import later
        importlib.import_module(name)
    os.environ |= {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=run_rank, args=(program.main, rank, arguments)) for rank in range(int(ranks))]
    for process in processes:
        process.start()
    for rank, process in enumerate(processes):
        say(f"rank {rank} is process {process.pid}")
    for rank, process in enumerate(processes):
        process.join()
        say(f"rank {rank} ended with {process.exitcode}")
    return int(any(process.exitcode for process in processes))


if __name__ == "__main__":
    sys.exit(main())
