"""Filters of this package's loggers: rank and host of each record, messages that only one rank logs, and visible text."""

from __future__ import annotations

import functools
import logging
import os
import socket

from dali_stream.checks.text import make_visible
from dali_stream.system.ranks import Ranks, current_ranks, local_rank

DATASET_LOG = "dali_stream.dataset"
"""Name of the logger for messages about a dataset, which are the same on each rank. Local rank 0 logs them."""

_given: list[Ranks] = []  # ranks that were passed to the last Loader or sampler, which may be the only ones that are known


def note_given(given: Ranks) -> None:
    """Use explicit ranks for records, if neither a process group nor the environment has a rank."""
    if given.source == "arguments":
        _given[:] = [given]


def add_rank(record: logging.LogRecord) -> bool:
    """Add the attributes `rank` and `host` to a record, for formats such as "%(rank)s %(host)s %(message)s"."""
    record.rank, record.host = _rank(), _host()
    return True


def from_one_rank(record: logging.LogRecord) -> bool:
    """Drop a record unless this process is local rank 0."""
    return local_rank() == 0


def install() -> None:
    """Add the filters to the loggers "dali_stream" and `DATASET_LOG`. Loggers do not inherit the filters of their parents."""
    for each in (add_rank, make_visible):
        logging.getLogger("dali_stream").addFilter(each)
    for each in (from_one_rank, add_rank, make_visible):
        logging.getLogger(DATASET_LOG).addFilter(each)


def _rank() -> int | str:
    try:
        found = current_ranks(None, None)
    except ValueError:  # the environment has something else than a number, which is an error elsewhere
        return os.environ.get("RANK", "?")
    return _given[0].rank if _given and found.source == "environment" and "RANK" not in os.environ else found.rank


@functools.cache
def _host() -> str:
    return socket.gethostname()
