"""Reader of Parquet files in `meta/`, whose content is not trusted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pyarrow as pa
import pyarrow.parquet as pq

from dali_stream.errors import DatasetError, StorageError
from dali_stream.lerobot.parquet_footer import chunk_sizes, read_footer
from dali_stream.storage import Store, lfs
from dali_stream.storage.store import SMALL, RangeFile

_BYTES = 64 << 20  # memory that any table may take
_ROW_BYTES = 64 << 10  # memory that an episode may take in the episode table, with its statistics
_VALUE_BYTES = 64  # approximate memory of a value as a Python object
_MOST_ROWS = 1024  # maximum number of rows that are read at a time


def read_parquet(
    store: Store, path: str, keep: Callable[[str], bool] = lambda name: True, row_bytes: int = _ROW_BYTES
) -> pa.Table:
    """Read a Parquet file of `meta/` in pieces.

    A few bytes of a file may encode billions of values, so their memory is limited: 64 MiB, and `row_bytes` for each row.

    Args:
        store: Store of the dataset.
        path: Path of the file.
        keep: Function that returns whether to read a column, given its name. Default: all columns are read.
        row_bytes: Memory that each row may take in addition, in bytes. Default: 64 KiB.

    Raises:
        DatasetError: If the file is broken, or exceeds the limit.
    """
    with parquet_errors(store, path), opened(store, path) as file:
        parquet = pq.ParquetFile(file, pre_buffer=True)
        fields = [field for field in parquet.schema_arrow if keep(field.name)]
        columns = list(zip(*chunk_sizes(read_footer(file) or b""), strict=True))
        values = [sum(count for count, _ in groups) for groups in columns]
        limit = _BYTES + row_bytes * count_rows(parquet.metadata)
        # A piece has so few rows that it is small even if each of them has the largest value that the file can contain.
        largest = max((size for groups in columns for _, size in groups), default=0)
        rows = max(min(limit // 16 // max(largest, 1), _MOST_ROWS), 1)
        size, parts = 0, list[pa.RecordBatch]()
        if max(values, default=0) * _VALUE_BYTES <= limit:
            for batch in parquet.iter_batches(rows, columns=[field.name for field in fields], use_threads=False):
                size += batch.nbytes
                if size > limit:
                    break
                parts.append(batch)
            else:
                return pa.Table.from_batches(parts, pa.schema(fields, parquet.schema_arrow.metadata))
        raise ValueError(f"its {parquet.metadata.num_rows} rows must take at most {limit} bytes in memory")


def count_rows(metadata: pq.FileMetaData) -> int:
    """Return the number of rows of all row groups. Raises ValueError if a row group has a negative number of rows."""
    counts = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
    if min(counts, default=0) < 0:
        raise ValueError(f"num_rows must not be negative, got {min(counts)}")
    return sum(counts)


def opened(store: Store, path: str) -> RangeFile | pa.BufferReader:
    """Open a file. A small one is read whole, which needs fewer requests."""
    return pa.BufferReader(store.read_all(path)) if store.size(path) <= SMALL else store.open(path)


@contextmanager
def parquet_errors(store: Store, path: str) -> Iterator[None]:
    """Context manager that converts pyarrow's errors for a broken file to a DatasetError with the name of the file."""
    try:
        yield
    except (DatasetError, StorageError):  # which may be of a type below
        raise
    except (pa.ArrowException, OSError, ValueError, KeyError, MemoryError, OverflowError, TypeError) as error:
        if pointer := lfs.pointer(store.read(path, 0, lfs.ENOUGH)):
            raise DatasetError(f"{store.where(path)}: {pointer}") from None
        said = (str(error) or type(error).__name__).splitlines()[0][:200]
        raise DatasetError(f"Invalid Parquet file {store.where(path)}: {said}. Fetch or record it again") from None
