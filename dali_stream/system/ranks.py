"""Rank of this process, and the ranks on its machine."""

from __future__ import annotations

import operator
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from dali_stream.errors import DaliStreamError

_LOCAL_RANKS = "LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"  # of torchrun, Open MPI and MPICH


@dataclass(frozen=True)
class Ranks:
    """Rank of this process and number of ranks.

    Attributes:
        rank: Rank of this process, from 0.
        world_size: Number of ranks.
        source: Source of both numbers.
    """

    rank: int
    world_size: int
    source: Literal["arguments", "process group", "environment"]

    def check(self, owner: str) -> None:
        """Check that these ranks match the current process group.

        A constructor must not check this. Frameworks such as Lightning create the process group later, and an error in one
        process before that would leave the others waiting. Explicit arguments may differ from the process group, since
        processes that share a model, as in tensor parallelism, need the same samples.

        Args:
            owner: Class of the object that uses these ranks, for the message.

        Raises:
            DaliStreamError: If the process group has another rank or world size. If no process group exists, the environment is
                checked instead. It is also an error if the environment has only one of `RANK` and `WORLD_SIZE`, unless that is
                RANK=0 or WORLD_SIZE=1.
        """
        if self.source == "arguments":
            return
        group = _process_group()
        if group is None and self.source == "environment":
            _check_environment(owner)
            now = current_ranks(None, None)
            if (now.rank, now.world_size) != (self.rank, self.world_size):
                group = _ProcessGroup("the environment", now.rank, now.world_size)
        if group is not None and (group.rank, group.world_size) != (self.rank, self.world_size):
            raise DaliStreamError(
                f"This {owner} was made as rank {self.rank} of {self.world_size}, but {group.name} has rank {group.rank} of "
                f"{group.world_size}. Make the {owner} after the process group is initialized (with Lightning in "
                "train_dataloader() or setup()), or pass rank= and world_size="
            )


class _ProcessGroup(NamedTuple):
    name: str
    rank: int
    world_size: int


def current_ranks(rank: int | None, world_size: int | None) -> Ranks:
    """Return the rank and the number of ranks.

    They are the arguments if these are not None, otherwise those of torch.distributed or Accelerate if initialized, otherwise
    the environment variables `RANK` and `WORLD_SIZE` if both are set, otherwise 0 and 1. See also `Ranks.check`.

    Raises:
        ValueError: If only one argument is None, or if the arguments or the environment variables are not integers.
    """
    if (rank is None) != (world_size is None):
        raise ValueError(f"rank and world_size must both be passed or both be None, got {rank} and {world_size}")
    if rank is not None and world_size is not None:
        try:
            return Ranks(operator.index(rank), operator.index(world_size), "arguments")
        except TypeError:
            raise ValueError(f"rank and world_size must be integers, got {rank!r} and {world_size!r}") from None
    if group := _process_group():
        return Ranks(group.rank, group.world_size, "process group")
    values = _environment()
    return Ranks(*(values["RANK"], values["WORLD_SIZE"]) if len(values) == 2 else (0, 1), "environment")


def _process_group() -> _ProcessGroup | None:
    # Neither module is imported here: a program that has a process group has imported its module.
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return _ProcessGroup("torch.distributed", distributed.get_rank(), distributed.get_world_size())
    accelerate = sys.modules.get("accelerate.state")
    if accelerate is not None and accelerate.PartialState._shared_state:
        state = accelerate.PartialState()
        return _ProcessGroup("Accelerate", state.process_index, state.num_processes)
    return None


def _environment() -> dict[str, int]:
    """Return {name: value} of the environment variables `RANK` and `WORLD_SIZE` that are set."""
    values = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE") if name in os.environ}
    try:
        return {name: int(value) for name, value in values.items()}
    except ValueError:
        text = " and ".join(f"{name}={value!r}" for name, value in values.items())
        raise ValueError(f"RANK and WORLD_SIZE in the environment must be integers, got {text}") from None


def _check_environment(owner: str) -> None:
    values = _environment()
    if len(values) == 1 and values not in ({"RANK": 0}, {"WORLD_SIZE": 1}):
        [(name, value)] = values.items()
        missing = "WORLD_SIZE" if name == "RANK" else "RANK"
        raise DaliStreamError(
            f"{name} is {value} in the environment, but {missing} is not set. Set both, or make the {owner} after the process "
            "group is initialized (with Lightning in train_dataloader() or setup()), or pass rank= and world_size="
        )


def refuse_workers() -> None:
    """Raise DaliStreamError if this process is a worker of a DataLoader."""
    import torch.utils.data

    worker = torch.utils.data.get_worker_info()
    if worker is not None:
        raise DaliStreamError(
            f"a Loader must be made and iterated in the training process, got worker {worker.id} of the {worker.num_workers} "
            "of a torch DataLoader, each of which would deliver the same batches. Use it without a DataLoader, because it "
            "decodes in its own threads (num_threads=)"
        )


@dataclass(frozen=True)
class LocalRanks:
    """Number of ranks on this machine.

    Attributes:
        count: Number of ranks, at least 1.
        source: Environment variable that contains the number. Empty if the number is unknown, so that `count` is 1.
    """

    count: int
    source: str = ""


def local_ranks(environment: Mapping[str, str] = os.environ) -> LocalRanks:
    """Return the number of ranks on this machine, from the environment variables of torchrun, Open MPI, MPICH or SLURM.

    Args:
        environment: Environment variables. Default: those of this process.
    """
    counts = {name: environment.get(name, "") for name in _LOCAL_RANKS}
    if {"SLURM_STEP_ID", "SLURM_PROCID"} <= environment.keys():  # set by srun; the shell of sbatch is a single process
        tasks, node = environment.get("SLURM_STEP_TASKS_PER_NODE", ""), environment.get("SLURM_NODEID", "")
        counts["SLURM_STEP_TASKS_PER_NODE"] = _tasks_of_node(tasks, node)
        counts["SLURM_NTASKS_PER_NODE"] = environment.get("SLURM_NTASKS_PER_NODE", "")
    return next((LocalRanks(int(text), name) for name, text in counts.items() if text.isdecimal() and int(text)), LocalRanks(1))


def _tasks_of_node(tasks: str, node: str) -> str:
    """Return the number of tasks on a node from SLURM's list for all nodes: "2(x3),1" means 2, 2, 2 and 1. Empty if unknown."""
    counts = re.findall(r"(\d+)(?:\(x(\d+)\))?", tasks)
    nodes = [count for count, repeated in counts for _ in range(int(repeated or 1))]
    return nodes[int(node)] if node.isdecimal() and int(node) < len(nodes) else ""


def local_rank() -> int:
    """Return the number of this process among those of its machine, or 0 if the launcher does not say it."""
    names = ["LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID"]
    if "SLURM_STEP_ID" in os.environ and "SLURM_PROCID" in os.environ:  # a process of srun, and not the script of sbatch
        names.append("SLURM_LOCALID")
    values = (os.environ.get(name, "") for name in names)
    return next((int(value) for value in values if value.isdigit()), 0)
