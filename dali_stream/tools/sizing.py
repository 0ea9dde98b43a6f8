"""Arithmetic of sizing: cores, memory, disk and network that training needs on a node, from the work of a batch.

Everything here is computed exactly from given numbers. `why` measures the work of a batch, see `speed_model`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from dali_stream.tools.speed_model import Work

PROCESS_BYTES = 1_000_000_000  # memory of a training process besides memory_budget; 0.7 to 1.0 GB were measured
# Relative error of the model for another number of cores or ranks. See docs/sizing.md.
MODEL_ERROR = 0.15
# 90 % quantiles of Student's t distribution with 1, 2, ... degrees of freedom, and of the normal distribution.
_STUDENT = (3.078, 1.886, 1.638, 1.533, 1.476, 1.440, 1.415, 1.397, 1.383)
_NORMAL = 1.282


@dataclass(frozen=True)
class Node:
    """Machine to size, and the training on it.

    Attributes:
        ranks: Number of training processes, one for each GPU.
        cores: Number of CPU cores that the ranks share.
        step_s: Seconds of a training step without loading.
        training_cores: Number of cores that the training program of a rank uses, besides its loader.
        num_threads: Number of decode threads of a rank. Default: None, for its share of the cores, as in a Loader.
    """

    ranks: int
    cores: int
    step_s: float
    training_cores: float = 1.0
    num_threads: int | None = None

    @property
    def threads(self) -> int:
        """Number of decode threads of a rank."""
        return self.num_threads or max(self.cores // self.ranks, 1)

    def share(self, work: Work) -> Work:
        """Return the work of a batch of one rank on this node.

        The rank has its share of the cores and of the network. Each step takes CPU seconds of the training program.

        Args:
            work: Work of a batch of a rank that has the machine to itself.
        """
        return replace(
            work.with_threads(self.threads),
            training=self.training_cores * self.step_s,
            network=work.network * self.ranks,
            cores=self.cores / self.ranks,
        )

    def need(self, work: Work) -> Need:
        """Return what the node needs to deliver a batch per step to each rank.

        Args:
            work: Work of a batch of a rank that has the machine to itself.
        """
        use = {name: seconds / self.step_s for name, seconds in self.share(work).resources.items()}
        cores = self.ranks * (work.cpu / self.step_s + self.training_cores)
        if self.num_threads is None:  # a rank has a decode thread for each whole core of its share
            cores = max(cores, self.ranks * math.ceil(work.decoding_s / self.step_s))
        return Need(cores, use)


@dataclass(frozen=True)
class Need:
    """Needs of a node that delivers a batch per step to each rank.

    Attributes:
        cores: Number of CPU cores with which neither the cores nor the decode threads limit the loaders.
        use: {resource: share of a step that it works}. A resource with more than 1 is too slow.
        cores_range: Range that contains the number of cores with a probability of 80 %.
    """

    cores: float
    use: dict[str, float]
    cores_range: tuple[float, float] = field(default=(0.0, 0.0))

    @property
    def first(self) -> str:
        """Resource that runs out first."""
        return max(self.use, key=self.use.__getitem__)

    @property
    def enough(self) -> bool:
        """Whether all resources are fast enough."""
        return max(self.use.values()) <= 1


@dataclass(frozen=True)
class Sizing:
    """Needs of training on a node.

    Attributes:
        node: Machine and training.
        first, later: Needs in the first epoch, and in later ones: with several ranks, in the second.
        memory: Bytes of memory of all ranks: their `memory_budget`, and the rest of their processes.
        memory_for_all_frames: The same if each rank holds all frames that it has decoded. One rank then decodes nothing in
            later epochs, and each of several ranks decodes every frame about once over the run.
        frame_cache: Bytes of a frame cache on disk with all decoded frames, which all ranks share.
        videos: Bytes of encoded video, which a `cache_dir` takes for a remote dataset. 0 if the cameras are images.
        network: Bytes of encoded video per second that a remote dataset takes while nothing is cached.
    """

    node: Node
    first: Need
    later: Need
    memory: int
    memory_for_all_frames: int
    frame_cache: int
    videos: int
    network: float


def size_node(
    node: Node,
    needs: Sequence[Sequence[Need]],
    *,
    frames: int,
    batch_size: int,
    frame_bytes: int,
    video_bytes: float,
    memory_budget: int,
    frames_budget: int,
) -> Sizing:
    """Return what training needs on a node.

    Args:
        node: Machine and training.
        needs: Needs in the first epoch and in later ones, from each of several measurements.
        frames: Number of frames of the dataset per camera, which is its number of rows.
        batch_size: Samples per batch of one rank.
        frame_bytes: Bytes of the decoded frames of one row, of all cameras.
        video_bytes: Bytes of the encoded frames of one row, of all cameras.
        memory_budget: Memory budget of each Loader in bytes.
        frames_budget: Memory budget that holds all decoded frames, in bytes.
    """
    first, later = (_middle(each) for each in zip(*needs, strict=True))
    return Sizing(
        node=node,
        first=first,
        later=later,
        memory=node.ranks * (memory_budget + PROCESS_BYTES),
        memory_for_all_frames=node.ranks * (max(memory_budget, frames_budget) + PROCESS_BYTES),
        frame_cache=frames * frame_bytes,
        videos=round(frames * video_bytes),
        network=node.ranks * batch_size * video_bytes / node.step_s,
    )


def _middle(needs: Sequence[Need]) -> Need:
    """Return the median of the needs, with the range of the number of cores."""
    middle = sorted(needs, key=lambda need: need.cores)[len(needs) // 2]
    return replace(middle, cores_range=prediction_range([need.cores for need in needs], MODEL_ERROR))


def prediction_range(values: Sequence[float], error: float = 0.0) -> tuple[float, float]:
    """Return a range that contains another measurement of the same quantity with a probability of 80 %.

    The logarithms of the values are assumed to be distributed normally. With few values, their spread is uncertain as well,
    so the range is wider than that of the values.

    Args:
        values: Measured positive values, at least two.
        error: Relative error of the prediction that does not show in the spread of the values. Default: 0.
    """
    logs, count = [math.log(value) for value in values], len(values)
    quantile = _STUDENT[count - 2] if count - 2 < len(_STUDENT) else _NORMAL
    half = math.hypot(quantile * statistics.stdev(logs) * math.sqrt(1 + 1 / count), math.log1p(error))
    middle = statistics.fmean(logs)
    return math.exp(middle - half), math.exp(middle + half)
