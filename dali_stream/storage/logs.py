"""Keeps credentials out of what libraries log about our requests. What they log for others stays as it is."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_ours: ContextVar[bool] = ContextVar("dali_stream_request", default=False)
# At DEBUG these log signed headers and session tokens.
_DRIVERS = ("aiohttp", "boto3", "botocore", "fsspec", "requests", "urllib3")


class _NotDebug(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno > logging.DEBUG or not _ours.get()


_not_debug = _NotDebug()


@contextmanager
def private() -> Iterator[None]:
    """Within the block, the drivers of fsspec log nothing at DEBUG."""
    # A logger's filter does not apply to the loggers below it, and modules imported later add new ones.
    for name, logger in list(logging.root.manager.loggerDict.items()):
        if isinstance(logger, logging.Logger) and name.partition(".")[0] in _DRIVERS:
            logger.addFilter(_not_debug)  # adds it once
    token = _ours.set(True)
    try:
        yield
    finally:
        _ours.reset(token)
