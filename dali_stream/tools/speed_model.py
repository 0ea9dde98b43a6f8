"""Model of a loader's speed: the seconds per batch, from the work of a batch and the resources that do it.

The decode threads, the planner thread and the iterating thread work on different batches at the same time, and share the CPU
cores. Each of these is a resource with its own seconds per batch, and so is the network. The busiest resource determines the
speed. The others also delay it a little, so a measured time is longer than that of the model. Predictions multiply the work by
this factor, as if each resource had the same share of the delay.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dali_stream.schedule.budget import copy_threads

if TYPE_CHECKING:
    from dali_stream.tools.decodes import Decodes

# If threads wait for bytes for at least this share of the time, the network is assumed to be busy all the time.
_WAITING = 0.3
# Memory bandwidth limits copying: n threads copy n^0.6 times as fast as one. On 2 cores, they were 1.3 to 1.6 times as fast.
_COPYING = 0.6


@dataclass(frozen=True)
class Work:
    """Work of one batch.

    Attributes:
        decode: CPU seconds of all decode threads, without those of `store`.
        plan: CPU seconds of the planner thread.
        copy: CPU seconds of copying frames into the batch.
        deliver: Seconds that the iterating thread spends on copying frames, or on the DALI graph.
        store: CPU seconds of all decode threads for resizing frames and storing them.
        wait: Seconds that the decode threads wait for a disk, added up over the threads.
        network: Seconds that the network takes for the bytes of a batch.
        step: Seconds that the training loop takes between two batches.
        training: CPU seconds of the training program, besides those of the loader.
        threads: Number of decode threads.
        cores: Number of CPU cores. A rank that shares the cores of a node may have a fraction of one.
    """

    decode: float
    plan: float
    copy: float
    deliver: float
    store: float = 0.0
    wait: float = 0.0
    network: float = 0.0
    step: float = 0.0
    training: float = 0.0
    threads: int = 1
    cores: float = 1

    @property
    def cpu(self) -> float:
        """CPU seconds of the loader."""
        return self.decode + self.store + self.plan + self.copy

    @property
    def decoding_s(self) -> float:
        """Seconds that the decode threads work or wait for a disk, added up over the threads."""
        return self.decode + self.store + self.wait

    @property
    def resources(self) -> dict[str, float]:
        """Seconds per batch that each resource works, {resource: seconds}."""
        return {
            "decode threads": self.decoding_s / self.threads,
            "planner": self.plan,
            "copying": self.deliver + self.step,
            "CPU cores": (self.cpu + self.training) / self.cores,
            "network": self.network,
        }

    @property
    def limit(self) -> str:
        """Resource with the most seconds per batch."""
        resources = self.resources
        return max(resources, key=resources.__getitem__)

    @property
    def seconds(self) -> float:
        """Seconds per batch of the busiest resource."""
        return max(self.resources.values())

    def with_threads(self, threads: int) -> Work:
        """Return the work with another number of decode threads, some of which also help copying."""
        deliver = self.deliver * (copy_threads(self.threads) / copy_threads(threads)) ** _COPYING
        return replace(self, threads=threads, deliver=deliver)

    def times(self, factor: float) -> Work:
        """Return the work with all amounts multiplied by a factor."""
        amounts = ("decode", "plan", "copy", "deliver", "store", "wait", "network", "step", "training")
        return replace(self, **{name: getattr(self, name) * factor for name in amounts})

    def decoding(self, now: Decodes, then: Decodes) -> Work:
        """Return the work after a change of the numbers of decoded and stored frames.

        Args:
            now: Numbers that belong to this work.
            then: Numbers after the change.
        """
        decode = then.decoded / now.decoded if now.decoded else 1.0
        store = then.stored / now.stored if now.stored else 1.0
        return self.scaled(decode=decode, store=store)

    def scaled(self, decode: float = 1.0, store: float = 1.0, network: float = 1.0) -> Work:
        """Return the work with other amounts of decoding, of storing, and of fetched bytes.

        Args:
            decode, store, network: Factors.
        """
        decode_s, store_s, wait_s = self.decode * decode, self.store * store, self.wait * decode
        return replace(self, decode=decode_s, store=store_s, wait=wait_s, network=self.network * network)


def work_of(times: Mapping[str, float], threads: int, cores: int, remote: bool, graph: bool, others: float = 0.0) -> Work:
    """Return the work of a batch, averaged over the batches of a measurement.

    Args:
        times: Growth of the attributes of `Counters` during the measurement, which contains at least one batch.
        threads: Number of decode threads.
        cores: Number of CPU cores that this process may use.
        remote: Whether the dataset is read over a network.
        graph: Whether the batches pass through a DALI graph.
        others: Share of the cores that other processes used meanwhile, 0 to 1. Default: 0.
    """
    batches, wall = times["batches"], times["wait_s"] + times["training_s"]
    busy = sum(times[stage] for stage in ("read_s", "pack_s", "decode_s", "resize_s"))
    cpu = times["decode_cpu_s"] + times["plan_cpu_s"] + times["copy_cpu_s"]
    # Decode threads that use no CPU wait for a core, for Python's interpreter, or for bytes. The busier the cores are, the less
    # of this time is attributed to bytes. The square is the probability that both of two cores are busy.
    idle = max(busy - times["decode_cpu_s"], 0.0) * max(1 - (cpu / (cores * wall) + others) ** 2, 0.0)
    waiting = max(times["read_s"] / threads, times["rows_s"]) / wall
    # While other threads use the cores, copying takes longer than its own work. The resource "CPU cores" includes this delay.
    deliver = times["graph_s"] if graph else min(times["graph_s"], times["copy_cpu_s"] / copy_threads(threads))
    store = times["decode_cpu_s"] * times["resize_s"] / busy if busy else 0.0
    return Work(
        decode=(times["decode_cpu_s"] - store) / batches,
        store=store / batches,
        plan=times["plan_cpu_s"] / batches,
        copy=times["copy_cpu_s"] / batches,
        deliver=deliver / batches,
        wait=0.0 if remote else idle / batches,
        network=min(waiting / _WAITING, 1.0) * wall / batches if remote else 0.0,
        step=times["training_s"] / batches,
        threads=threads,
        cores=cores,
    )
