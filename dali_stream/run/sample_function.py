"""The user's function of `Transformed`, applied to the samples of a batch, in a worker process or in place."""

from __future__ import annotations

import hashlib
import io
import multiprocessing
import multiprocessing.process
import os
import pickle
import random
import shutil
import threading
import traceback
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset, default_collate, get_worker_info

from dali_stream.checks.text import listed
from dali_stream.errors import DaliStreamError
from dali_stream.system.heap import keep_freed_memory

if TYPE_CHECKING:
    from dali_stream.pipeline.aliases import Batch

_SHARED_MEMORY = "/dev/shm"
_IDENTITY = ("dataset_index", "episode_index", "frame_index", "index")


class FunctionCall(NamedTuple):
    """Work of a worker: values of a batch, and the seed of each sample."""

    batch: Batch
    seeds: list[int]


class Failed(NamedTuple):
    """Error of a worker. A DaliStreamError would escape the lines of the traceback that a DataLoader puts into its message."""

    error: str
    traceback: str


class SampleFunction(Dataset[Any]):
    """The function of the user, as the dataset of a DataLoader whose indices are requests.

    Args:
        transform, keys: See `Transformed`.
    """

    def __init__(self, transform: Callable[[Any], Any], keys: tuple[str, ...] | None) -> None:
        self.transform, self.keys = transform, keys

    def split(self, batch: Batch) -> tuple[Batch, Batch]:
        """Divide a batch into the values that the function needs, and the others. The latter have None in place of the former.

        The values that identify a sample are in both.
        """
        if self.keys is None:
            return batch, {}
        if missing := [key for key in self.keys if key not in batch]:
            raise ValueError(f"keys must be keys of the batches, {listed(batch)}, got {missing[0]!r}")
        needed = {key: batch[key] for key in dict.fromkeys((*self.keys, *_IDENTITY)) if key in batch}
        return needed, {key: None if key in self.keys else value for key, value in batch.items()}

    def __getitem__(self, request: FunctionCall) -> Batch | Failed:
        """Answer a request in a worker."""
        try:
            batch = self._apply(request)
            _check_picklable({key: value for key, value in batch.items() if not isinstance(value, torch.Tensor)})
            return batch
        except Exception as error:
            return Failed(text_of(error), traceback.format_exc())

    def here(self, request: FunctionCall) -> Batch:
        """Answer a request in this thread, and restore the states of its random numbers."""
        generators, states = _generators(request.batch), (random.getstate(), np.random.get_state())
        kept = [generator.get_state() for generator in generators]
        try:
            return self._apply(request)
        finally:
            for generator, state in zip(generators, kept, strict=True):
                generator.set_state(state)
            random.setstate(states[0])
            np.random.set_state(states[1])

    @torch.no_grad()
    def _apply(self, request: FunctionCall) -> Batch:
        generators, samples = _generators(request.batch), []
        for i, seed in enumerate(request.seeds):
            sample = {key: value[i] for key, value in request.batch.items()}
            for generator in generators:
                generator.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed & 0xFFFFFFFF)
            try:
                samples.append({key: _tensor(value) for key, value in self._transformed(sample).items()})
            except Exception as error:
                name = f"{_name(request.batch, i)}: {type(error).__name__}"
                raise DaliStreamError(f"transform failed for the sample {name}: {text_of(error)}") from error
        for i, sample in enumerate(samples):
            if sample.keys() != samples[0].keys():
                raise DaliStreamError(
                    f"transform must return the same keys for all samples, got {listed(samples[0])} for the sample "
                    f"{_name(request.batch, 0)} and {listed(sample)} for the sample {_name(request.batch, i)}"
                )
        joined = {}
        for key in samples[0]:
            try:
                joined[key] = _joined(key, [sample[key] for sample in samples], request.batch)
            except DaliStreamError:
                raise
            except Exception as error:
                first, last = (_name(request.batch, i) for i in (0, len(samples) - 1))
                raise DaliStreamError(
                    f"transform must return values that can be stacked, got an error for {key!r} of the samples {first} to "
                    f"{last}: {type(error).__name__}: {text_of(error)}"
                ) from error
        return joined

    def _transformed(self, sample: dict[str, Any]) -> Batch:
        if self.keys is not None:
            return {key: self.transform(sample[key]) for key in self.keys}
        result = self.transform(dict(sample))
        if not isinstance(result, dict):
            raise TypeError(f"it must return a dict, got {type(result).__name__}. For a function of tensors, give `keys`")
        return result


def start_worker(_number: int) -> None:
    """Prepare a worker process, whose number is not used."""
    keep_freed_memory()
    training = multiprocessing.parent_process()
    if training is not None:
        threading.Thread(target=_end_with, args=(training,), daemon=True).start()


def _end_with(training: multiprocessing.process.BaseProcess) -> None:
    """End this process when the training process has ended, also if that was killed.

    The DataLoader only checks the process that forked the worker. This process is the fork server, which lives as long as its
    workers.
    """
    training.join()
    os._exit(1)


def _tensor(value: Any) -> Any:
    """Return an array of numbers as a tensor, and any other value as it is."""
    is_numeric = isinstance(value, np.ndarray) and value.dtype.kind in "biuf"
    return torch.as_tensor(np.ascontiguousarray(value)).reshape(value.shape) if is_numeric else value


def _joined(key: str, values: list[Any], batch: Batch) -> Any:
    """Return the values of a key as a tensor, if all are tensors, or as a list.

    Args:
        key: Key of the results.
        values: Value of each sample.
        batch: Batch with the identity of each sample.

    Raises:
        DaliStreamError: If the tensors cannot be stacked. The message names samples.
    """
    if not all(isinstance(value, torch.Tensor) for value in values):
        return values
    kinds = [f"{tuple(value.shape)} {value.dtype}" for value in values]
    if other := next((i for i, kind in enumerate(kinds) if kind != kinds[0]), 0):
        raise DaliStreamError(
            f"transform must return {key!r} in one shape and dtype for all samples, got {kinds[0]} for the sample "
            f"{_name(batch, 0)} and {kinds[other]} for the sample {_name(batch, other)}"
        )
    in_worker = get_worker_info() is not None  # the result is written to shared memory at once, which saves a copy
    try:
        if in_worker:
            check_shared_memory(size_of(values), "a batch of results")
        return default_collate(values)
    except RuntimeError:
        if in_worker:
            check_shared_memory(size_of(values), "a batch of results")  # another process may have been faster
        raise


def _name(batch: Batch, i: int) -> str:
    """Return the identity of a sample of a batch for messages."""
    return ", ".join(f"{key} {int(batch[key][i])}" for key in _IDENTITY if key in batch)


def text_of(error: BaseException) -> str:
    """Return the text of an error. Making the text of an error from the user's function may raise another error."""
    try:
        return str(error)
    except Exception as other:
        return f"its text cannot be made ({type(other).__name__})"


def seed_of(seed: int, epoch: int, position: int) -> int:
    """Return the seed of a sample: 56 bits of a hash of the seed of the order, the epoch, and the sample's position in it."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {epoch} {position}".encode(), digest_size=7).digest(), "little")


def _generators(batch: Batch) -> list[torch.Generator]:
    """Return torch's default generators of the CPU and of the GPUs that hold the batch."""
    gpus = {value.device.index for value in batch.values() if isinstance(value, torch.Tensor) and value.is_cuda}
    return [torch.default_generator, *(torch.cuda.default_generators[gpu] for gpu in gpus)]


def size_of(values: Iterable[Any]) -> int:
    """Return the size of those values that are dense tensors, in bytes."""
    return sum(value.nbytes for value in values if isinstance(value, torch.Tensor) and value.layout == torch.strided)


class _Checker(pickle.Pickler):
    """Pickler that leaves tensors inside other values out, since the queue of results passes them on in shared memory."""

    def persistent_id(self, value: Any) -> str | None:
        """Return a text in place of a tensor."""
        if not isinstance(value, torch.Tensor):
            return None
        if value.requires_grad and not value.is_leaf:
            raise ValueError("a tensor with a gradient function. Detach it")
        return "tensor"


def _check_picklable(values: Batch) -> None:
    """Raise an error for values that the queue of results would drop. The training process would wait for them forever."""
    try:
        _Checker(io.BytesIO(), pickle.HIGHEST_PROTOCOL).dump(values)
    except Exception as error:
        raise DaliStreamError(f"transform must return picklable values, got: {text_of(error)}") from error


def check_shared_memory(size: int, what: str) -> None:
    """Raise an error if shared memory has fewer free bytes. A process that uses more is ended by SIGBUS."""
    if os.path.isdir(_SHARED_MEMORY) and (free := shutil.disk_usage(_SHARED_MEMORY).free) < size:
        raise DaliStreamError(
            f"{_SHARED_MEMORY} must have {size / 2**20:.0f} MiB free for {what}, got {free / 2**20:.0f} MiB. Enlarge it "
            "(docker run --shm-size=8g), move a frame_cache from it to a disk or limit it with frame_cache_bytes, or "
            "reduce num_workers, prefetch or batch_size"
        )
