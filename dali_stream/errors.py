"""Exceptions of the package, and a function for their messages.

An invalid value of an argument raises a plain `ValueError`. All exceptions in this module are subclasses of `DaliStreamError`.
"""

from __future__ import annotations

from dali_stream.checks.text import visible


class DaliStreamError(Exception):
    """Base class of all errors of this package except those for invalid arguments."""

    def __str__(self) -> str:
        """Message, in which control characters are escaped. It may contain names from a dataset."""
        return visible(super().__str__())


class DatasetError(DaliStreamError):
    """The dataset is missing, has an unsupported format, or has files that contradict its metadata."""


class StorageError(DaliStreamError):
    """The storage backend failed."""


class DecodeError(DaliStreamError):
    """A video or an image cannot be decoded, or a video lacks a requested frame."""


class FrameSizeError(DecodeError):
    """A frame has another size than `meta/info.json` says."""


class ResumeError(DaliStreamError):
    """A saved state does not fit this loader or sampler, or was loaded after the first iteration began."""


class MemoryBudgetError(DaliStreamError, ValueError):
    """A batch does not fit in `memory_budget`, or in the memory of the machine."""


_KINDS = (MemoryBudgetError, ResumeError, DecodeError, StorageError, DatasetError, DaliStreamError, ValueError, TypeError)


def prefixed(prefix: str, error: Exception) -> Exception:
    """Return an error of the same kind whose message is "<prefix>: <message>".

    The class is the nearest one that takes a message alone. Subclasses such as UnicodeDecodeError take other arguments.

    Args:
        prefix: Name of what the error is about.
        error: Error of this package, ValueError or TypeError.
    """
    kind = next((each for each in type(error).__mro__ if each in _KINDS), DaliStreamError)
    return kind(f"{prefix}: {error}")  # type: ignore[no-any-return]


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: "1 episode", "2 episodes"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
