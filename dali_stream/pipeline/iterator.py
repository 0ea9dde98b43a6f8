"""All uses of DALI's private attributes: two methods of DALIGenericIterator, and the pipeline that a fork inherits.

They were checked with DALI 2.4, and `pyproject.toml` has the upper bound.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import weakref
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

from dali_stream.decode import dali  # before DALI itself: it says what to do where that is missing
from dali_stream.errors import DaliStreamError

# isort: split
from nvidia.dali.plugin.pytorch import DALIGenericIterator

if TYPE_CHECKING:
    from nvidia.dali.pipeline import Pipeline


class PipelineError(Exception):
    """A run of the DALI pipeline that failed, in an operator or in the external source.

    Attributes:
        explanation: Message of the operator.
    """

    def __init__(self, explanation: str) -> None:
        super().__init__(explanation)
        self.explanation = explanation


class Turns:
    """Lets one pipeline of a device run at a time.

    Pipelines of a process share DALI's memory pool of the device, and its decoder frees buffers without synchronisation
    (`DeviceBuffer`, read in DALI 2.4's sources). With B-frames, a copy that is pending in one pipeline could read memory that
    another one has got. Not seen on a GPU.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._last: weakref.ReferenceType[Iterator] | None = None

    def begin(self, iterator: Iterator) -> None:
        """Wait for the run of another iterator, before `iterator` begins one. The caller holds the lock."""
        last = self._last() if self._last is not None else None
        if last is not None and last is not iterator:
            last.finish_run()
        self._last = weakref.ref(iterator)


_turns: dict[int | None, Turns] = {}
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_turns.clear)  # a thread of the parent may have held a lock


def turns(device: int | None) -> Turns:
    """Return the turns of a CUDA device. Pipelines without a device do not share any."""
    return Turns() if device is None else _turns.setdefault(device, Turns())


class Iterator(DALIGenericIterator):  # type: ignore[misc]  # DALI has no types
    """DALIGenericIterator that does not wait for the batch after the one it returns.

    As it comes, it starts the pipeline's next run before it returns a batch, and so waits for the frames of the next one; an
    error there would take this batch with it. Here that run starts early only where its input is ready, else when it is
    asked for. The layouts of the outputs, which it drops, are kept: they say where a frame's channels are.

    Args:
        pipeline: Pipeline, built.
        names: Names of its outputs.
        ready: Function that tells whether the input of the next run is ready.
        turns: Turns of the pipeline's device.
    """

    def __init__(self, pipeline: Pipeline, names: list[str], ready: Callable[[], bool], turns: Turns) -> None:
        self.layouts: dict[str, str] = {}
        self._input_ready, self._owes_run = ready, False
        self._turns, self._running = turns, False
        self._outputs: Any = None  # of a run that another iterator has waited for
        super().__init__([pipeline], names, prepare_first_batch=False)

    def _schedule_runs(self, release_outputs: bool = True) -> None:
        if self._ever_scheduled and not self._input_ready():
            self._owes_run = True
        else:
            self._run(release_outputs)

    def _run(self, release_outputs: bool = True) -> None:
        """Start a run of the pipeline."""
        with self._turns.lock, _named_errors():
            self._turns.begin(self)
            super()._schedule_runs(release_outputs)
            self._running = True  # not if the external source failed: then there is no run to wait for

    def finish_run(self) -> None:
        """Wait for the run in progress and keep its outputs. Any thread that holds the lock of the turns may call it."""
        if self._running:
            self._running = False
            try:
                self._outputs = super()._get_outputs()
            except Exception as error:
                self._outputs = error

    def _take_outputs(self) -> Any:
        """Return the outputs of the run in progress, or of one that is finished. Start one if there is none."""
        with self._turns.lock, _named_errors():
            if self._owes_run or not self._ever_scheduled:
                self._run(release_outputs=self._ever_scheduled)
                self._owes_run = False
            self.finish_run()
            outputs, self._outputs = self._outputs, None
            if isinstance(outputs, Exception):
                raise outputs
            return outputs

    def _get_outputs(self) -> Any:
        outputs = self._take_outputs()
        self.layouts = {name: out.layout() for name, out in zip(self.output_map, outputs[0], strict=True)}
        for name, out in zip(self.output_map, outputs[0], strict=True):
            if not out.is_dense_tensor():
                raise DaliStreamError(_ragged(name, out.shape()))
        return outputs


@contextlib.contextmanager
def _named_errors() -> Generator[None, None, None]:
    """Raise PipelineError if a run of the pipeline fails."""
    try:
        yield
    except RuntimeError as error:
        raise PipelineError(dali.explanation(error)) from error


def abandon(iterator: Iterator) -> None:
    """Keep the pipelines of an iterator for ever: DALI crashes if a forked process frees one of its parent, even at exit."""
    for pipeline in iterator._pipes:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(pipeline._pipe))
        pipeline._pipe = None


def _ragged(name: str, shapes: list[tuple[int, ...]]) -> str:
    other = next(shape for shape in shapes if shape != shapes[0])
    return (
        f"The graph must return samples of one shape for {name!r}, got {shapes[0]} and {other}. Use fn.resize, fn.crop or "
        "fn.pad in dali_graph, or leave the key out"
    )
