"""Which share of the batches this process gets, and on how many cores."""

from __future__ import annotations

import os
import sys


def rank_and_world(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """The arguments where given; else Accelerate's, torch.distributed's, RANK and WORLD_SIZE, or 0 of 1.

    Raises:
        ValueError: only one of the two is given, or the environment holds no integers.
    """
    if (rank is None) != (world_size is None):
        raise ValueError(f"rank is {rank} and world_size is {world_size}; give both or neither")
    if rank is not None and world_size is not None:
        return rank, world_size
    accelerate = sys.modules.get("accelerate.state")  # not imported: who uses it has done so
    if accelerate is not None and accelerate.PartialState._shared_state:
        state = accelerate.PartialState()
        return state.process_index, state.num_processes
    import torch.distributed

    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    found = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    try:
        return int(found[0]), int(found[1])
    except ValueError:
        raise ValueError(f"RANK is {found[0]!r} and WORLD_SIZE is {found[1]!r} in the environment; both are integers") from None


def cores() -> int:
    """Cores for this process: those it may run on, shared with the other ranks of this machine."""
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    local = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return max(available // max(int(local) if local.isdigit() else 1, 1), 1)
