"""Exceptions, and how messages count.

A bad argument is a plain `ValueError`; everything else is below `DaliStreamError`.
"""

from __future__ import annotations


class DaliStreamError(Exception):
    """Any failure of this package that is not a bad argument."""


class DatasetError(DaliStreamError):
    """The dataset is missing, is of another format, or its metadata and its files contradict each other."""


class StorageError(DaliStreamError):
    """The storage backend failed."""


class DecodeError(DaliStreamError):
    """A video cannot be decoded to the frames that were asked for."""


class ResumeError(DaliStreamError):
    """A saved state does not fit this loader, or came too late."""


class MemoryBudgetError(DaliStreamError, ValueError):
    """A batch does not fit in `memory_budget`, or in the memory of the machine."""


def counted(number: int, noun: str) -> str:
    """A number with its noun: "1 episode", "2 episodes"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
