"""What the node of a training run needs, computed from the measured work of a Loader."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

PROCESS_BYTES = 1_000_000_000  # memory of a training process besides memory_budget; 0.7 to 1.0 GB were measured
TRAINING_CORES = 1  # cores that the training program of a rank uses besides its Loader, which is an assumption


@dataclass(frozen=True)
class Node:
    """Machine, and the training on it.

    Attributes:
        ranks: Number of training processes, one for each GPU. Each has a Loader.
        cores: Number of CPU cores that the ranks share.
        step_s: Seconds of a training step without loading.
    """

    ranks: int
    cores: int
    step_s: float


def needs(
    node: Node, work: Mapping[str, float], *, batch_size: int, memory_budget: int, frame_cache_bytes: int, remote: bool
) -> dict[str, Any]:
    """Return what a node needs to deliver a batch per step to each rank. docs/sizing.md has the formula.

    Args:
        node: Machine, and the training on it.
        work: Work of some samples, by the names of `Loader.stats`: `samples`, `frames`, `decoded_frames`, `decode_cpu_s`,
            `copy_cpu_s`, `plan_cpu_s` and `needed_bytes`.
        batch_size: Samples per batch of one rank.
        memory_budget: Memory budget of each Loader, in bytes.
        frame_cache_bytes: Size of a frame cache on disk that has all frames of the dataset, in bytes.
        remote: Whether the dataset is read over a network.

    Returns:
        The attributes of `node`, and:

        - `decoded_per_delivered_frame`: The same as in the formula. None if no frame was delivered.
        - `cores_needed`: Number of CPU cores.
        - `cores_without_decoding`: The same if no frame has to be decoded or read from a frame cache on disk.
        - `planner_s`: Seconds per step of the planner thread of a rank. More cores do not help if a step is shorter.
        - `memory_bytes`: Memory of all ranks, in bytes.
        - `frame_cache_bytes`: Local disk for a frame cache on disk that has all frames, which the ranks share, in bytes.
        - `network_bytes_per_s`: Bytes of a remote dataset that all ranks read per second while no cache has them. 0 if it is
          local.
    """
    batch = {key: work[key] / work["samples"] * batch_size for key in work}  # of one rank
    cached = batch["copy_cpu_s"] + batch["plan_cpu_s"]
    return asdict(node) | {
        "decoded_per_delivered_frame": work["decoded_frames"] / work["frames"] if work["frames"] else None,
        "cores_needed": node.ranks * ((batch["decode_cpu_s"] + cached) / node.step_s + TRAINING_CORES),
        "cores_without_decoding": node.ranks * (cached / node.step_s + TRAINING_CORES),
        "planner_s": batch["plan_cpu_s"],
        "memory_bytes": node.ranks * (memory_budget + PROCESS_BYTES),
        "frame_cache_bytes": frame_cache_bytes,
        "network_bytes_per_s": node.ranks * batch["needed_bytes"] / node.step_s if remote else 0.0,
    }
