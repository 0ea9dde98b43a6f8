"""Keeps credentials out of what libraries log about our requests. What they log for others stays as it is."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

ours: ContextVar[bool] = ContextVar("dali_stream_request", default=False)
# At DEBUG these log URLs with their queries, signed headers and session tokens.
_DRIVERS = ("aiohttp", "boto3", "botocore", "fsspec", "requests", "urllib3")


def _keep(record: logging.LogRecord) -> bool:
    # A warning of urllib3 may have the URL.
    return not ours.get() or (record.levelno > logging.DEBUG and not record.name.startswith("urllib3"))


def filter_drivers() -> None:
    """Filters what the drivers that are imported by now log in a context in which `ours` is set."""
    # A logger's filter does not apply to the loggers below it, and modules imported later add new ones.
    for name, logger in list(logging.root.manager.loggerDict.items()):
        if name.startswith(_DRIVERS) and isinstance(logger, logging.Logger):
            logger.addFilter(_keep)  # adds it once


@contextmanager
def private() -> Iterator[None]:
    """Within the block, the drivers log nothing at DEBUG, and urllib3 nothing."""
    filter_drivers()
    token = ours.set(True)
    try:
        yield
    finally:
        ours.reset(token)
