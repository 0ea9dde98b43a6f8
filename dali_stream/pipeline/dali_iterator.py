"""Iterator over the DALI pipeline, which uses private attributes of DALI.

All uses of private attributes are in this module: two methods and a flag of DALIGenericIterator, and the pipelines that a
forked process inherits. They were checked with DALI 2.4, and `pyproject.toml` has the upper bound.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Generator
from concurrent.futures import CancelledError, Future
from typing import TYPE_CHECKING, Any

from dali_stream.decode import dali  # before DALI itself, since its error message says how to install DALI
from dali_stream.decode.turns import Turns
from dali_stream.errors import DaliStreamError
from dali_stream.pipeline.batch import closed
from dali_stream.system.workers import Workers

# isort: split
from nvidia.dali.plugin.pytorch import DALIGenericIterator

if TYPE_CHECKING:
    from nvidia.dali.pipeline import Pipeline


class PipelineError(Exception):
    """Failure of an operator in a run of the DALI pipeline.

    Attributes:
        explanation: Message of the operator.
    """

    def __init__(self, explanation: str) -> None:
        super().__init__(explanation)
        self.explanation = explanation


class Iterator(DALIGenericIterator):  # type: ignore[misc]  # DALI has no types
    """DALIGenericIterator that starts the next run of the pipeline in another thread.

    The original starts the next run before it returns a batch. It therefore waits for the frames of the next batch and copies
    them while the GPU has no work, and an error in them loses the batch that it was about to return. Here, the other thread
    does this work during the training step, and an error is raised when the next batch is requested. This class also keeps
    the layouts of the outputs, which the original drops, since a layout tells which axis of a frame has the channels.

    After the start of a run, the thread prepares the input of the run that follows, so it copies the frames of one batch while
    those of the batch before it are uploaded.

    Args:
        pipeline: Built pipeline.
        names: Names of its outputs.
        thread: Thread that starts the runs.
        prepare: Function that waits for the input of the next run. The thread calls it once for each run, without the lock of
            `turns`, so that other pipelines can run while this one waits for its input. Its errors are raised unchanged, when
            the batch of that run is requested.
        turns: Lock that lets only one pipeline of the device run at a time.

    Attributes:
        layouts: {name of an output: its layout}, of the batch that was returned last.
    """

    def __init__(
        self, pipeline: Pipeline, names: list[str], thread: Workers, prepare: Callable[[], None], turns: Turns
    ) -> None:
        self.layouts: dict[str, str] = {}
        self._thread, self._prepare = thread, prepare
        self._started: Future[None] | None = None  # start of the next run
        self._prepared: Future[None] | None = None  # input of the next run that has not started
        self._turns, self._running = turns, False
        self._outputs: Any = None  # outputs or error of a run that was waited for, possibly by another iterator
        super().__init__([pipeline], names, prepare_first_batch=False)

    def _schedule_runs(self, release_outputs: bool = True) -> None:
        self._started = self._thread.submit(self._run, release_outputs)

    def _run(self, release_outputs: bool = True) -> None:
        """Start a run of the pipeline, in the other thread."""
        prepared, self._prepared = self._prepared, None
        if prepared is None:  # before the first run, and after an error
            self._prepare()
        else:
            prepared.result()  # does not wait, since this thread has run it
        with self._turns.lock, _named_errors():
            self._turns.begin(self)
            super()._schedule_runs(release_outputs)
            self._running = True
        self._prepared = self._thread.submit(self._prepare)

    def finish_run(self) -> None:
        """Wait for the run in progress and keep its outputs. See `Runs` in `decode/turns.py`."""
        if self._running:
            self._running = False
            try:
                self._outputs = super()._get_outputs()
            except Exception as error:
                self._outputs = error

    def _take_outputs(self) -> Any:
        """Return the outputs of the run in progress, or of a run that another iterator has waited for."""
        started = self._started
        if started is None:  # the first run, or one after an error
            started = self._started = self._thread.submit(self._run, self._ever_scheduled)
        try:
            started.result()
        except CancelledError as error:
            raise closed() from error
        finally:
            if started.done():  # otherwise Ctrl-C has interrupted the wait
                self._started = None
        with self._turns.lock, _named_errors():
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
    """Leak the pipelines of an iterator: DALI crashes if a forked process frees a pipeline of its parent, even at exit."""
    for pipeline in iterator._pipes:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(pipeline._pipe))
        pipeline._pipe = None


def _ragged(name: str, shapes: list[tuple[int, ...]]) -> str:
    """Return the error message for an output whose samples have different shapes."""
    other = next(shape for shape in shapes if shape != shapes[0])
    return (
        f"The graph must return samples of one shape for {name!r}, got {shapes[0]} and {other}. Use fn.resize, fn.crop or "
        "fn.pad in dali_graph, or leave the key out"
    )
