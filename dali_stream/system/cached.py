"""Properties that are computed once per object, without a lock that all objects share."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class cached_property(functools.cached_property[T]):
    """`functools.cached_property` without the lock that it has before Python 3.12.

    All objects of a class share that lock, which a thread holds while it computes the property. A dataset whose server does not
    respond would block all other datasets. This class can be removed when Python 3.12 is the oldest supported version.

    Without the lock, several threads may compute the property of an object at the same time. Each of them returns its own
    result, and the last result is kept, so `func` must return equal results.

    Args:
        func: Method that computes the value.
    """

    def __init__(self, func: Callable[[Any], T]) -> None:
        super().__init__(func)
        self.lock = contextlib.nullcontext()
