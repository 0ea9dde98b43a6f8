"""All uses of DALI's private attributes: two methods of DALIGenericIterator, and the pipeline that a fork inherits.

They were checked with DALI 2.4, and `pyproject.toml` has the upper bound.
"""

from __future__ import annotations

import contextlib
import ctypes
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


class Iterator(DALIGenericIterator):  # type: ignore[misc]  # DALI has no types
    """DALIGenericIterator that does not wait for the batch after the one it returns.

    As it comes, it starts the pipeline's next run before it returns a batch, and so waits for the frames of the next one; an
    error there would take this batch with it. Here that run starts early only where its input is ready, else when it is
    asked for. The layouts of the outputs, which it drops, are kept: they say where a frame's channels are.
    """

    def __init__(self, pipeline: Pipeline, names: list[str], ready: Callable[[], bool]) -> None:
        self.layouts: dict[str, str] = {}
        self._input_ready, self._owes_run = ready, False
        super().__init__([pipeline], names, prepare_first_batch=False)

    def _schedule_runs(self, release_outputs: bool = True) -> None:
        if self._ever_scheduled and not self._input_ready():
            self._owes_run = True
        else:
            with _running():
                super()._schedule_runs(release_outputs)

    def _get_outputs(self) -> Any:
        with _running():
            if self._owes_run:
                self._owes_run = False
                super()._schedule_runs()
            outputs = super()._get_outputs()
        self.layouts = {name: out.layout() for name, out in zip(self.output_map, outputs[0], strict=True)}
        for name, out in zip(self.output_map, outputs[0], strict=True):
            if not out.is_dense_tensor():
                raise DaliStreamError(_ragged(name, out.shape()))
        return outputs


@contextlib.contextmanager
def _running() -> Generator[None, None, None]:
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
