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
    """Return the parts of a transform that are neither of LeRobot's nor of torchvision's."""
    if not type(transform).__module__.startswith(("lerobot.", "torchvision.")):
        return [transform]
    values = list(vars(transform).values())
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
    """A Loader that applies a transform to the frames of each sample."""

    def __init__(
        self, dataset: Dataset, transform: Callable[[torch.Tensor], torch.Tensor], *, seed: int, **arguments: Any
    ) -> None:
        super().__init__(dataset, seed=seed, **arguments)
        self._transform, self._seed = transform, seed

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self._transformed(super().__iter__())

    def _transformed(self, batches: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Yield batches whose frames are transformed. The positions of a batch lie between two states of the Loader."""
        before = self.state_dict()
        for batch in batches:
            after = self.state_dict()
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
    """Let torch draw the random numbers of a name, on the CPU and on a device, and go back to its previous state."""
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
