"""A network whose transfers take simulated time, and a store behind it."""

from __future__ import annotations

import heapq
import itertools

from simulated_time import Clock, Task

from dali_stream.storage.store import Store, Traffic


class Link:
    """A network: a latency for each request, and a bandwidth that all transfers share equally.

    Args:
        clock: whose time it takes.
        bytes_per_s: of all together.
        latency_s: from a request to the first byte of its answer.
    """

    def __init__(self, clock: Clock, bytes_per_s: float, latency_s: float) -> None:
        self.clock, self.bytes_per_s, self.latency_s = clock, bytes_per_s, latency_s
        self._each = 0.0  # bytes that a transfer has got which is there from the beginning
        self._at = 0.0
        self._under_way: list[tuple[float, int, Task]] = []  # a heap: what `_each` is when a transfer ends
        self._number = itertools.count()

    def transfer(self, size: int) -> None:
        """The current thread waits until a request of so many bytes is answered."""
        self.clock.sleep(self.latency_s)
        if size:
            self._go_on()
            heapq.heappush(self._under_way, (self._each + size, next(self._number), self.clock.current))
            self._plan()
            self.clock.wait()

    def _go_on(self) -> None:
        if self._under_way:
            self._each += (self.clock.now - self._at) * self.bytes_per_s / len(self._under_way)
        self._at = self.clock.now

    def _plan(self) -> None:
        """Has the transfer end that is the next to, unless another begins or ends before it."""
        if self._under_way:
            plan = self._planned = next(self._number)
            left = max(self._under_way[0][0] - self._each, 0.0)
            self.clock.after(left * len(self._under_way) / self.bytes_per_s, lambda: self._end(plan))

    def _end(self, plan: int) -> None:
        if plan == self._planned:
            self._go_on()
            self._each = max(self._each, self._under_way[0][0])  # rounding
            while self._under_way and self._under_way[0][0] <= self._each:
                self.clock.wake(heapq.heappop(self._under_way)[2])
            self._plan()


class SlowStore(Store):
    """A store as behind a network: reading costs simulated time. As over HTTP, a size comes with the first answer."""

    remote = True

    def __init__(self, store: Store, link: Link) -> None:
        self.address, self._store, self._link = store.address, store, link
        self._traffic, self._known = Traffic(), set[str]()

    @property
    def traffic(self) -> Traffic:
        return self._traffic

    def size(self, path: str) -> int:
        if path not in self._known:
            self._wait_for(path, 1)  # what `HttpTransport.stat` asks for
        return self._store.size(path)

    def read(self, path: str, start: int, stop: int) -> bytes:
        data = self._store.read(path, start, stop)
        self._wait_for(path, len(data))
        return data

    def _wait_for(self, path: str, size: int) -> None:
        began = self._link.clock.now
        self._link.transfer(size)
        self._known.add(path)
        self._traffic.add(requests=1, fetched_bytes=size, fetch_s=self._link.clock.now - began)

    def exists(self, path: str) -> bool:
        return self._store.exists(path)

    def files(self, folder: str) -> list[str]:
        return self._store.files(folder)

    def close(self) -> None:
        self._store.close()
