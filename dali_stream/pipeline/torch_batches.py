"""Front end for CPUs: batches as tensors, without DALI."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

from dali_stream.observe.counters import Counters
from dali_stream.pipeline.batch import count_delivered, with_time_axis
from dali_stream.pipeline.config import Config
from dali_stream.pipeline.producer_process import ProducerProcess

if TYPE_CHECKING:
    from dali_stream.pipeline.producer import Producer


class TorchBatches:
    """Batches of CPU tensors, without a copy of the frames of a finished batch.

    Args:
        config: Configuration of the loader.
        producer: Producer of the batches.
        counters: Counters to add to.
    """

    def __init__(self, config: Config, producer: Producer | ProducerProcess, counters: Counters) -> None:
        self._config, self._producer, self._counters = config, producer, counters
        self._columns = config.columns()

    def next(self) -> dict[str, Any]:
        """Return the next batch, with frames channels first.

        Raises:
            DaliStreamError: If the batch could not be made, or the loader was closed.
        """
        with self._counters.timed("graph_s"):
            began = time.perf_counter()
            batch = self._producer.next()
            columns = {key: torch.from_numpy(batch.columns[key]) for key in self._columns}
            frames = {
                key: torch.from_numpy(with_time_axis(self._config, key, values)).movedim(-1, -3)
                for key, values in batch.frames.items()
            }
        count_delivered(batch, began, self._config, self._counters)
        return batch.texts | columns | frames

    def abandon(self) -> None:
        """Do nothing, since without DALI no pipeline is left to the parent of a forked process."""
