"""Image transforms of LeRobot, with random numbers that a resumed run repeats."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from dali_stream.dataset import Dataset
from dali_stream.loader import Loader


def unknown_parts(transform: Any) -> list[Any]:
    """Return the parts of a transform that are defined in neither LeRobot nor torchvision."""
    if not type(transform).__module__.startswith(("lerobot.", "torchvision.")):
        return [transform]
    values = list(vars(transform).values())
    # The parts are the callable attributes, including those in lists and mappings.
    parts: list[Any] = []
    while values:
        value = values.pop()
        if isinstance(value, Mapping):
            values += value.values()
        elif isinstance(value, (list, tuple)):
            values += value
        elif callable(value) and not isinstance(value, type):
            parts.append(value)
    return list(itertools.chain.from_iterable(map(unknown_parts, parts)))


class TransformingLoader(Loader):
    """Loader that applies a transform to the frames of each sample.

    Args:
        dataset: Dataset to load.
        transform: Function of the frames of one camera in one sample. The cameras of a sample draw their random numbers one
            after the other from the same generator.
        seed: Seed of the order and of the random numbers.
        arguments: Other arguments of `Loader`.
    """

    def __init__(
        self, dataset: Dataset, transform: Callable[[torch.Tensor], torch.Tensor], *, seed: int, **arguments: Any
    ) -> None:
        super().__init__(dataset, seed=seed, **arguments)
        self._transform, self._seed = transform, seed

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self._transformed(super().__iter__())

    def _transformed(self, batches: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Yield the batches with transformed frames. The Loader's state before a batch gives the positions of its samples."""
        before = self.state_dict()
        for batch in batches:
            after = self.state_dict()
            # Before the first batch of an epoch, the state may still be that of the previous epoch.
            start = before["position"] if before["epoch"] == after["epoch"] else 0
            position = self._config.batches.first(start, self._ranks.rank)
            cameras = [key for key in self.dataset.cameras if key in batch]
            frames: dict[str, list[torch.Tensor]] = {key: [] for key in cameras}
            for row in range(len(batch["index"])):
                with _random_numbers(f"{self._seed} {after['epoch']} {position}", batch[cameras[0]].device):
                    for key in cameras:
                        frames[key].append(self._transform(batch[key][row]))
                position += self._ranks.world_size
            yield batch | {key: torch.stack(each) for key, each in frames.items()}
            before = after


@contextlib.contextmanager
def _random_numbers(name: str, device: torch.device) -> Iterator[None]:
    """Seed torch's generators of the CPU and of a device with a hash of `name`, and restore their states afterwards."""
    generators = [torch.default_generator]
    if device.type == "cuda":
        generators.append(torch.cuda.default_generators[device.index])
    states = [generator.get_state() for generator in generators]
    try:
        for generator in generators:
            generator.manual_seed(int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest(), "little"))
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
