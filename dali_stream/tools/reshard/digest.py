"""Digests of rows, independent of chunks, slices, encodings and padding."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc


class Rows:
    """A digest of all columns of tables, as if they were one table. It compares bits, so NaN equals NaN."""

    def __init__(self) -> None:
        self._parts: dict[str, Any] = {}

    def add(self, table: pa.Table) -> Rows:
        """Appends the rows of a table. Returns itself."""
        for field, column in zip(table.schema, table.columns, strict=True):
            for chunk in column.chunks:
                self._feed(f"{field.name}:{field.type}", chunk)
        return self

    def hexdigest(self) -> str:
        """32 hexadecimal digits."""
        whole = hashlib.blake2b(digest_size=16)
        for name, part in sorted(self._parts.items()):
            whole.update(name.encode(errors="surrogatepass") + b"\0" + part.digest())
        return whole.hexdigest()

    def _put(self, name: str, data: Any) -> None:
        if name not in self._parts:
            self._parts[name] = hashlib.blake2b(digest_size=16)
        self._parts[name].update(data)

    def _feed(self, name: str, array: pa.Array) -> None:
        if isinstance(array, pa.ExtensionArray):
            array = array.storage
        if pa.types.is_dictionary(array.type):
            array = array.dictionary_decode()
        kind = array.type
        self._put(f"{name} valid", array.is_valid().to_numpy(zero_copy_only=False).astype(np.uint8))
        if pa.types.is_struct(kind):
            for i, part in enumerate(array.flatten()):
                self._feed(f"{name}.{i}", part)
        elif pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
            self._put(f"{name} length", _whole(pc.list_value_length(array)))
            self._feed(f"{name}[]", array.flatten())
        elif (pa.types.is_integer(kind) or pa.types.is_floating(kind)) and not array.null_count:
            self._put(name, np.ascontiguousarray(array.to_numpy(zero_copy_only=False)))
        elif kind in (pa.binary(), pa.string(), pa.large_binary(), pa.large_string()):
            self._put(f"{name} length", _whole(pc.binary_length(array)))
            for value in array.cast(pa.large_binary()).to_pylist():
                self._put(name, value or b"")
        else:
            for value in array.to_pylist():
                self._put(name, f"{value!r}\0".encode(errors="surrogatepass"))


def _whole(lengths: pa.Array) -> Any:
    return pc.fill_null(lengths, 0).cast(pa.int64()).to_numpy(zero_copy_only=False)
