"""Several stores as one."""

from __future__ import annotations

from collections.abc import Sequence

from dali_stream.storage.store import Store


class NumberedStores(Store):
    """Store that combines others. Each path begins with the number of the store that has the file.

    Args:
        stores: The stores.
    """

    def __init__(self, stores: Sequence[Store]) -> None:
        self.stores = list(stores)
        self.address = "a mixture"
        self.remote = any(store.remote for store in stores)

    def _of(self, path: str) -> tuple[Store, str]:
        number, _, rest = path.partition("/")
        return self.stores[int(number)], rest

    def size(self, path: str) -> int:
        store, path = self._of(path)
        return store.size(path)

    def identity(self, path: str) -> str:
        store, path = self._of(path)
        return store.identity(path)

    def read(self, path: str, start: int, stop: int) -> bytes:
        store, path = self._of(path)
        return store.read(path, start, stop)

    def exists(self, path: str) -> bool:
        store, path = self._of(path)
        return store.exists(path)

    def files(self, folder: str) -> list[str]:
        store, path = self._of(folder)
        number = folder.partition("/")[0]
        return [f"{number}/{name}" for name in store.files(path)]

    def session(self) -> NumberedStores:
        return NumberedStores([store.session() for store in self.stores])

    def where(self, path: str) -> str:
        store, path = self._of(path)
        return store.where(path)

    def close(self) -> None:
        for store in self.stores:
            store.close()

    def release(self) -> None:
        for store in self.stores:
            store.release()
