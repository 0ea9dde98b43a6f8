"""Work that several threads want done is done by one of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import TypeVar

V = TypeVar("V")


class Once:
    """Calls of the same key that overlap in time share one call, its result or its error."""

    def __init__(self) -> None:
        self._under_way: dict[Hashable, Future[object]] = {}
        self._lock = threading.Lock()

    def __call__(self, key: Hashable, call: Callable[[], V]) -> V:
        """`call()`, or what another thread's call for this key gives, if one is under way. It must not ask for its own key."""
        with self._lock:
            future = self._under_way.get(key)
            if mine := future is None:
                future = self._under_way[key] = Future()
        if not mine:
            return future.result()  # type: ignore[return-value]  # a key stands for one kind of call
        try:
            result = call()
        except BaseException as error:
            future.set_exception(error)
            raise
        else:
            future.set_result(result)
            return result
        finally:
            with self._lock:
                del self._under_way[key]
