"""Stores around another store: one records reads, one reads ahead in large ranges."""

from __future__ import annotations

from dali_stream.storage import Store
from dali_stream.tools.output.copy import RANGE


class Through(Store):
    """Forwards everything to another store."""

    def __init__(self, store: Store) -> None:
        self.store, self.address, self.remote, self.revision = store, store.address, store.remote, store.revision

    def size(self, path: str) -> int:
        return self.store.size(path)

    def read(self, path: str, start: int, stop: int) -> bytes:
        return self.store.read(path, start, stop)

    def exists(self, path: str) -> bool:
        return self.store.exists(path)

    def files(self, folder: str) -> list[str]:
        return self.store.files(folder)

    def where(self, path: str) -> str:
        return self.store.where(path)

    def close(self) -> None:
        self.store.close()


class Recorder(Through):
    """Records the ranges that are read, each once.

    Attributes:
        reads: {(path, start, stop)}.
    """

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.reads: set[tuple[str, int, int]] = set()

    def read(self, path: str, start: int, stop: int) -> bytes:
        data = super().read(path, start, stop)
        self.reads.add((path, start, start + len(data)))
        return data


class Window(Through):
    """Serves reads from the range loaded last. One thread loads; those of pyarrow read."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self._held = ("", 0, b"")

    def load(self, path: str, start: int, stop: int) -> None:
        """Fetches [start, stop) of a file, unless it is loaded."""
        held, begin, data = self._held
        if held != path or not begin <= start <= stop <= begin + len(data):
            self._held = ("", 0, b"")
            parts = [self.store.read(path, at, min(at + RANGE, stop)) for at in range(start, stop, RANGE)]
            self._held = (path, start, b"".join(parts))

    def read(self, path: str, start: int, stop: int) -> bytes:
        held, begin, data = self._held
        if held == path and begin <= start <= stop <= begin + len(data):
            return data[start - begin : stop - begin]
        return super().read(path, start, stop)
