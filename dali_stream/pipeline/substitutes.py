"""Log messages about samples that could not be read or decoded, with `on_error="substitute"`."""

from __future__ import annotations

import logging
import threading

from dali_stream.errors import DaliStreamError, counted

_log = logging.getLogger("dali_stream")


class Substitutes:
    """Log of the substituted samples. The first sample is logged at once. When an epoch ends, all are summed up per file.

    Several threads may use an object of this class.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._logged = False
        self._samples: dict[tuple[int, str], tuple[int, str]] = {}  # {(epoch, file): (number, text of the first error)}

    def __reduce__(self) -> tuple[type[Substitutes], tuple[()]]:
        return Substitutes, ()  # a copy has counted nothing

    def add(self, epoch: int, file: str, error: DaliStreamError) -> None:
        """Count a sample that cannot be read or decoded, for its epoch and its file."""
        with self._lock:
            number, first = self._samples.get((epoch, file), (0, str(error)))
            self._samples[epoch, file] = number + 1, first
            logged, self._logged = self._logged, True
        if not logged:
            _log.warning(
                "a sample was substituted by another of its batch: %s. Further ones are summed up per file when the epoch ends",
                error,
            )

    def report(self, epoch: int) -> None:
        """Log one line per epoch and file for the samples that were counted in this epoch and in earlier ones."""
        with self._lock:
            ended = [place for place in self._samples if place[0] <= epoch]
            lines = [(*place, *self._samples.pop(place)) for place in ended]
        for number, file, samples, first in lines:
            _log.warning(
                "epoch %d, %s: %s could not be read or decoded, substituted by others of their batches. The first error: %s",
                *(number, file, counted(samples, "sample"), first),
            )
