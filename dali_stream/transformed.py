"""A Loader whose samples pass through a function of the user, in worker processes or in place.

torch's DataLoader runs the workers. Its "indices" are batches of the Loader, which reach a worker through shared memory, and
its dataset is the `SampleFunction`. The DataLoader keeps the order, fetches ahead, passes errors on, and notices workers that
die.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Any, SupportsIndex

import torch
from torch.utils.data import DataLoader

from dali_stream.checks.arguments import from_zero, known_arguments, positive
from dali_stream.errors import DaliStreamError
from dali_stream.run.sample_function import (
    Failed,
    FunctionCall,
    SampleFunction,
    check_shared_memory,
    seed_of,
    size_of,
    start_worker,
    text_of,
)
from dali_stream.system.gpu import gpu_index

if TYPE_CHECKING:
    from dali_stream.loader import Loader
    from dali_stream.pipeline.aliases import Batch


class Transformed:
    """Apply a function to each sample of a Loader.

        loader = dali_stream.Loader(dataset, device="cpu", num_threads=4)
        with dali_stream.Transformed(loader, transform, num_workers=4) as batches:
            for batch in batches:
                ...

    The function may use the global random numbers of torch, NumPy and `random`. They are seeded with the Loader's seed, the
    epoch and the sample's position in the order of the epoch. A resumed run therefore repeats them, on any number of ranks and
    workers. It does not repeat those of a generator that the function owns.

    All other attributes, such as `dataset`, `stats` and `routes`, are those of the Loader. Its times describe the Loader
    alone: time in which training waits for workers counts as training.

    Args:
        loader: Loader whose batches are transformed. With workers, its device must be "cpu". Its decode threads and the workers
            share the CPU cores, so give it `num_threads`.
        transform: Function of a sample, a dict with the values of a batch at one index, that returns a dict. Tensors of the
            results are stacked, so they must have equal shapes in a batch. Other values are delivered as a list. With `keys`,
            it is a function of one tensor, such as a transform of torchvision.
        keys: Keys of the batch to which the function is applied one after the other, such as `dataset.cameras`. Other values
            stay as they are. Default: none, so that the function gets whole samples.
        num_workers: Number of worker processes, or 0 to apply the function in the iterating thread. Workers are started
            with "forkserver", so the function must be picklable, and the program needs `if __name__ == "__main__":`. Default:
            0.
        prefetch: Number of batches that each worker has in progress, at most those of an epoch. Default: 2.
        device: Device of the batches, as in `Loader`. Batches from workers are moved to it through pinned memory. Default:
            "auto", which is the Loader's device without workers.

    Raises:
        ValueError: If an argument is invalid.
        DaliStreamError: While iterating, if the function fails or its results cannot be stacked, with the sample's identity, or
            if shared memory is not enough.
        RuntimeError: While iterating, if a worker ends, for example because it was killed.
    """

    @known_arguments
    def __init__(
        self,
        loader: Loader,
        transform: Callable[[Any], Any],
        *,
        keys: Sequence[str] | None = None,
        num_workers: int = 0,
        prefetch: int = 2,
        device: str = "auto",
    ) -> None:
        if isinstance(keys, str):
            raise ValueError(f"keys must be a list of keys of a batch, got the text {keys!r}")
        self.loader = loader
        self._function = SampleFunction(transform, None if keys is None else tuple(keys))
        self._num_workers, self._prefetch = from_zero("num_workers", num_workers), positive("prefetch", prefetch)
        own = self.loader._config.gpu if device == "auto" and not num_workers else None
        gpu = gpu_index(device) if own is None else own
        self._device = torch.device("cpu" if gpu is None else f"cuda:{gpu}")
        if num_workers:
            self._check_workers()
        self._pid = os.getpid()
        self._sampler = _Sampler()
        self._workers: DataLoader[Any] | None = None
        self._failure: Exception | None = None  # error of the Loader, raised after the batches in progress
        # The Loader's state after each batch in progress, and the values of the batch that are not transformed.
        self._in_progress = deque[tuple[dict[str, Any], dict[str, Any]]]()
        # State after the last batch delivered. None before the first iteration and after a complete epoch.
        self._state: dict[str, Any] | None = None

    def _check_workers(self) -> None:
        if self.loader._config.gpu is not None:
            raise ValueError(
                'the Loader must have device="cpu" if num_workers is not 0, because workers get frames in the CPU\'s memory, '
                f"got cuda:{self.loader._config.gpu}. Transformed moves the batches to its own device"
            )
        try:
            pickled = pickle.dumps(self._function)
        except Exception as error:
            raise ValueError(
                f"transform must be picklable to reach a worker process, got {self._function.transform!r}: {text_of(error)}. "
                "Define it at the top level of a module, and use functools.partial or a class in place of a lambda or an inner "
                "function. Or set num_workers=0"
            ) from error
        main = sys.modules["__main__"]
        is_importable = getattr(main, "__spec__", None) or os.path.isfile(getattr(main, "__file__", None) or "")
        if b"__main__" in pickled and not is_importable:
            raise ValueError(
                f"transform must be in a file that a worker process can import, got {self._function.transform!r} of a notebook "
                "or of a program without a file. Move it to a module. Or set num_workers=0"
            )
        if getattr(multiprocessing.current_process(), "_inheriting", False):
            raise DaliStreamError(
                'This program must start under `if __name__ == "__main__":`, because each worker process imports it'
            )

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # before __init__
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        return self.loader.__reduce_ex__(protocol)  # raises an error

    def __getitem__(self, index: object) -> Any:
        return self.loader[index]  # raises an error

    def __repr__(self) -> str:
        where = f"in {self._num_workers} workers" if self._num_workers else "in place"
        return f"{type(self).__name__}({self.loader!r}, {self._function.transform!r}, {where})"

    def __len__(self) -> int:
        """Number of batches of an epoch, the same on each rank."""
        return len(self.loader)

    def __iter__(self) -> Iterator[Batch]:
        """Iterate over one epoch, as a Loader does."""
        return self._iterate(iter(self.loader))

    @property
    def _most_ahead(self) -> int:
        """Number of batches that each worker has in progress. An epoch has no more, and the DataLoader counts up to it."""
        return min(self._prefetch, len(self))

    @property
    def epoch(self) -> int:
        """Number of the current epoch, from 0. See `Loader.epoch`."""
        return self.loader.epoch if self._state is None else int(self._state["epoch"])

    @property
    def batch_index(self) -> int:
        """Index of the epoch's next batch, from 0. See `Loader.batch_index`."""
        if self._state is None:
            return self.loader.batch_index
        return len(self) - self.loader._config.batches.count(self._state["position"])

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the run after the last batch delivered. The Loader is ahead of it. See `Loader.state_dict`."""
        return self.loader.state_dict() if self._state is None else dict(self._state)

    def batch_at(self, epoch: int, batch: int) -> Batch:
        """Return any batch after the transform, exactly as the iteration delivers it. See `Loader.batch_at`.

        The function is applied in the calling thread, even if the iteration has workers, and gets the same random numbers as in
        the iteration. The global generators keep their states.
        """
        values, place = self.loader.batch_at(epoch, batch), self.loader._place_of(epoch, batch)
        transformed, rest = self._function.split(values)
        request = FunctionCall(transformed, self._seeds(*place, len(next(iter(values.values())))))
        threads = torch.get_num_threads()
        try:
            if self._num_workers:
                torch.set_num_threads(1)  # as in a worker, since the rounding of a sum may depend on the number of threads
            result = self._function.here(request)
        finally:
            torch.set_num_threads(threads)
        return {key: self._moved(value) for key, value in (rest | result).items()}

    def close(self) -> None:
        """End the workers, and close the Loader."""
        self._end_workers()
        self.loader.close()

    def __enter__(self) -> Transformed:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _end_workers(self) -> None:
        workers, self._workers = self._workers, None
        iterator: Any = getattr(workers, "_iterator", None)
        if iterator is None:
            return
        if os.getpid() == self._pid:
            iterator._shutdown_workers()
        else:  # after a fork, the workers are those of the other process
            iterator._shutdown = True

    def _iterate(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        self.loader._check_usable()
        if self._state is not None and (left := self.loader._config.batches.count(self._state["position"])):
            self.loader._tell_left_out(left)
        self._in_progress.clear()
        self._state = self._failure = iteration = None
        requests = self._requests(batches)
        try:
            for result in self._in_workers(requests) if self._num_workers else map(self._function.here, requests):
                if isinstance(result, Failed):
                    raise DaliStreamError(result.error) from RuntimeError(f"in a worker process:\n{result.traceback}")
                state, rest = self._in_progress.popleft()
                iteration = iteration or self.loader._iteration
                batch = {key: self._moved(value) for key, value in (rest | result).items()}
                self._state = state  # last, so that Ctrl-C before it does not lose the batch
                yield batch
                self.loader._check_current(iteration)
            if self._failure is not None:
                raise self._failure
            self._state = None  # the Loader is at the next epoch
        except GeneratorExit:
            raise  # the workers stay for the next epoch
        except BaseException:
            if iteration in (None, self.loader._iteration):  # otherwise the workers serve a later iteration
                self._end_workers()
            raise
        finally:
            requests.close()

    def _requests(self, batches: Iterator[Batch]) -> Generator[FunctionCall, None, None]:
        """Yield the Loader's batches with the seeds of their samples. Its state before a batch gives their positions.

        An error of the Loader ends the requests, so that the batches before it are delivered first.
        """
        before = self.loader.state_dict()
        try:
            for batch in batches:
                after = self.loader.state_dict()
                # Before the first batch of an epoch, the state may still be that of the previous epoch.
                start = before["position"] if before["epoch"] == after["epoch"] else 0
                transformed, rest = self._function.split(batch)
                batches_checked, what = 1, "a batch of frames"
                if self._state is None:  # the first batch
                    self._state = after | {"position": start}  # the Loader will be ahead when it is delivered
                    batches_checked = self._num_workers * self._most_ahead + 1
                    what = f"{batches_checked} batches of frames in progress"
                if self._num_workers:  # the DataLoader would wait forever for a batch without memory
                    check_shared_memory(batches_checked * size_of(transformed.values()), what)
                self._in_progress.append((after, rest))
                yield FunctionCall(transformed, self._seeds(after["epoch"], start, len(next(iter(batch.values())))))
                before = after
        except Exception as error:
            self._failure = error
        finally:
            batches.close()  # type: ignore[attr-defined]  # it is a generator

    def _seeds(self, epoch: int, start: int, count: int) -> list[int]:
        """Return the seed of each of `count` samples of this rank, in the global batch that begins at position `start`."""
        config, world_size = self.loader._config, self.loader._config.batches.world_size
        first = config.batches.first(start, config.rank)
        positions = range(first, first + count * world_size, world_size)
        return [seed_of(config.arguments.seed, epoch, position) for position in positions]

    def _in_workers(self, requests: Iterator[FunctionCall]) -> Iterator[Any]:
        """Start the workers if necessary, and yield the results of requests in their order."""
        if self._workers is None:
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload(["__main__", __name__])  # so that torch is imported once, and not by each worker
            self._workers = DataLoader(
                self._function,
                batch_size=None,
                sampler=self._sampler,
                num_workers=self._num_workers,
                prefetch_factor=self._most_ahead,
                collate_fn=_same,
                worker_init_fn=start_worker,
                pin_memory=self._device.type == "cuda",
                multiprocessing_context=context,
                generator=torch.Generator(),  # its own, so that training's random numbers do not depend on the workers
                persistent_workers=True,
            )
        self._sampler.requests = requests
        try:
            yield from self._workers
        except (EOFError, ConnectionError, FileNotFoundError) as error:
            # The worker that holds the memory of this result has just ended, which the DataLoader has not noticed yet.
            raise RuntimeError(
                f"a worker process exited unexpectedly, so that its result cannot be read: {error!r}. It was probably killed, "
                "for example because memory was short"
            ) from error

    def _moved(self, value: Any) -> Any:
        return value.to(self._device, non_blocking=True) if isinstance(value, torch.Tensor) else value


class _Sampler:
    """Sampler of the DataLoader: the requests of the current epoch."""

    requests: Iterator[FunctionCall] = iter(())

    def __iter__(self) -> Iterator[FunctionCall]:
        return self.requests


def _same(batch: Any) -> Any:
    """Collate function of the DataLoader, which would convert arrays otherwise."""
    return batch
