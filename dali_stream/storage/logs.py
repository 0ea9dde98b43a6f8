"""Keeps what libraries log about our requests free of credentials. What they log for others stays as it is."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_ours: ContextVar[bool] = ContextVar("dali_stream_request", default=False)
# At DEBUG these log signed headers and session tokens. fsspec runs them in a thread, where the context goes along.
_DRIVERS = ("aiobotocore", "aiohttp", "adlfs", "azure", "botocore", "fsspec", "gcsfs", "google", "s3fs")


class _WithoutQueries(logging.Filter):
    """For urllib3, which logs the URL of each request: its query may be a signature."""

    def filter(self, record: logging.LogRecord) -> bool:
        if _ours.get():
            record.msg, record.args = re.sub(r"\?[^\s\"')]+", "?…", record.getMessage()), ()
            record.exc_info = None
        return True


class _NotDebug(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno > logging.DEBUG or not _ours.get()


_without_queries, _not_debug = _WithoutQueries(), _NotDebug()
for _name in ("urllib3.connection", "urllib3.connectionpool", "urllib3.poolmanager"):
    logging.getLogger(_name).addFilter(_without_queries)


@contextmanager
def private(drivers: bool = False) -> Iterator[None]:
    """What libraries log within the block has no credentials.

    Args:
        drivers: those of fsspec are among them.
    """
    if drivers:
        # A logger's filter does not hold for the loggers below it, and modules that come later bring new ones.
        for name, logger in list(logging.root.manager.loggerDict.items()):
            if isinstance(logger, logging.Logger) and name.partition(".")[0] in _DRIVERS:
                logger.addFilter(_not_debug)  # adds it once
    token = _ours.set(True)
    try:
        yield
    finally:
        _ours.reset(token)
