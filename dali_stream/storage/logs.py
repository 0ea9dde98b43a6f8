"""Log filters that drop records about this package's requests if they may contain credentials, and no other records."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

ours: ContextVar[bool] = ContextVar("dali_stream_request", default=False)
# At level DEBUG, these libraries log URLs with their queries, signed headers and session tokens.
_names = 0  # number of names of loggers in this process when `filter_drivers` looked at them last
_DRIVERS = ("aiohttp", "boto3", "botocore", "fsspec", "requests", "urllib3")


def _keep(record: logging.LogRecord) -> bool:
    # Warnings of urllib3 may contain the URL.
    return not ours.get() or (record.levelno > logging.DEBUG and not record.name.startswith("urllib3"))


def filter_drivers() -> None:
    """Add a filter to each existing logger of the drivers. The filter has an effect only in contexts where `ours` is True."""
    # Every logger needs the filter, since child loggers do not inherit it. Modules that are imported later add further loggers,
    # so this function is called for each request. It does nothing if no name was added. A name may belong to a placeholder,
    # which a logger replaces later. `getLogger` makes the logger now, since the number of names would not change then.
    global _names
    loggers = logging.root.manager.loggerDict
    if (number := len(loggers)) == _names:
        return
    for name in list(loggers):
        if name.startswith(_DRIVERS):
            logging.getLogger(name).addFilter(_keep)  # has no effect if the logger already has the filter
    _names = number


@contextmanager
def private() -> Iterator[None]:
    """Suppress the drivers' records of level DEBUG, and all records of urllib3, within the `with` block."""
    filter_drivers()
    token = ours.set(True)
    try:
        yield
    finally:
        ours.reset(token)
