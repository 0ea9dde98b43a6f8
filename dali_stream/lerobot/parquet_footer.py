"""Footers of Parquet files. `RowGroups` keeps one in a twentieth of the memory that pyarrow takes.

A data file of DROID's size has 4,600 row groups. pyarrow parses its footer in 49 ms, and takes 30 MB. `RowGroups` takes 27 ms
and 1.5 MB (one core of 2, 2026-11-29): it finds where the entry of each row group begins, and keeps the entries compressed. To
read some row groups, it assembles a footer that has only their entries, which pyarrow parses.

    file         PAR1   pages of all row groups   footer   length of the footer (4 bytes)   PAR1

    footer       version  schema  num_rows  row_groups: count  entry 0  entry 1  ...  key_value_metadata  created_by  ...  0
                 |-- _before --|            |_between|         |---- _blocks ----|    |------------- _after --------------|

    entry        columns: count  chunk 0  chunk 1  ...  total_byte_size  num_rows  file_offset  ...  ordinal  0
                 |------- _beginning -|                 |------------------- _ENDING --------------------------|

    chunk        file_offset  meta_data: type  encodings  path_in_schema  ...  num_values  ...  statistics  ...  0  0
                 |-------------------- _beginning ---------------------|

    assembled    _before   rows of entries 3 and 7   _between   2   entry 3   entry 7   _after

A footer is one structure in Thrift's compact protocol. A field is a byte with its type and the difference to the number of the
previous field, and then its value. The byte 0 ends a structure. Integers take 1 to 10 bytes, so entries differ in size, and are
found by what they begin with. See https://github.com/apache/thrift/blob/master/doc/specs/thrift-compact-protocol.md and
https://github.com/apache/parquet-format/blob/master/src/main/thrift/parquet.thrift (FileMetaData). Columns and their types are
not interpreted here.
"""

from __future__ import annotations

import io
import itertools
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dali_stream.checks.arrays import Int64
from dali_stream.storage.store import RangeFile

_MAGIC = b"PAR1"
TAIL = 64 << 10  # number of bytes at the end of a file that are read first; they usually contain the whole footer
_SMALL = 8  # a file with at most this number of row groups keeps its metadata as a pyarrow object
_BLOCK = 8  # entries compressed together, which makes them 2.6 times smaller and takes 4 microseconds to decompress
_CODEC = "lz4_raw"
_BINARY, _STRUCT = 8, 12  # Thrift's numbers of the types "binary" and "struct"
_NUM_ROWS, _ROW_GROUPS, _LAST_FIELD = 3, 4, 7  # field numbers of FileMetaData; encrypted files have larger ones


class RowGroups:
    """Row groups of one file, with the metadata that pyarrow needs to read some of them.

    Args:
        footer: Footer of the file, without length and magic. Empty if only `metadata` is known.
        metadata: Metadata of the file, if pyarrow has parsed it already. It replaces `footer`.

    Attributes:
        sample: Metadata of the file with its schema and at least one of its row groups, if it has any.
        rows: Number of rows of each group, shape (G,).
        sizes: Uncompressed size of each group in bytes, shape (G,).
        nbytes: Memory in bytes, without the parts that do not grow with the number of row groups.

    Raises:
        pyarrow.ArrowInvalid: If the footer is broken.
    """

    def __init__(self, footer: bytes, metadata: pq.FileMetaData | None = None) -> None:
        layout = _split(footer) if metadata is None else None
        if layout is None:
            self.sample = pq.read_metadata(as_file(footer)) if metadata is None else metadata
            groups = [self.sample.row_group(i) for i in range(self.sample.num_row_groups)]
            self.rows = np.array([group.num_rows for group in groups], np.int64)
            self.sizes = np.array([group.total_byte_size for group in groups], np.int64)
            self._is_whole, self._whole = True, footer
            self.nbytes = 8 * self.sample.serialized_size + len(footer)  # approximate memory of the pyarrow object
            return
        starts = layout.starts
        self.rows, self.sizes, self._is_whole = layout.rows, layout.sizes, False
        self._before, self._between = footer[: layout.num_rows[0]], footer[layout.num_rows[1] : layout.groups]
        self._after = footer[int(starts[-1]) :]
        edges = np.append(starts[:-1:_BLOCK], starts[-1]).tolist()
        self._blocks = [pa.compress(footer[a:b], _CODEC, asbytes=True) for a, b in itertools.pairwise(edges)]
        self._starts = (starts - starts[0]).astype(np.int32)
        self.sample = pq.read_metadata(as_file(self._footer([0])))
        self.nbytes = sum(map(len, self._blocks)) + self.rows.nbytes + self.sizes.nbytes + self._starts.nbytes

    def metadata(self, groups: Sequence[int]) -> tuple[pq.FileMetaData, Sequence[int]]:
        """Return metadata that includes some row groups of the file, and the numbers of these row groups in this metadata."""
        if self._is_whole:
            return self.sample, groups
        # Unpickling the footer would be faster, but pyarrow terminates the process if it is broken.
        return pq.read_metadata(as_file(self._footer(groups))), range(len(groups))

    def bounds(self, column: str) -> Int64 | None:
        """Return the lowest and the highest value of an integer column in each group, shape (G, 2), according to statistics.

        The footer may be wrong, so this only tells where to look. Statistics are parsed here, since pyarrow terminates the
        process if they are broken.

        Returns:
            Bounds, which are (0, -1) for an empty group. None if statistics are missing or invalid.
        """
        footer = self._whole if self._is_whole else b"".join(map(self._block, range(len(self._blocks))))
        name = column.encode()
        path = re.escape(_PATH + _varint(len(name)) + name)
        try:
            found = [_statistics(footer, match.end()) for match in re.finditer(path, footer)]
        except IndexError:
            return None
        bounds = [values if count else (0, -1) for values, count in zip(found, self.rows.tolist(), strict=False)]
        if len(found) != len(self.rows) or None in bounds:
            return None
        return np.array(bounds, np.int64).reshape(-1, 2)

    def _footer(self, groups: Sequence[int]) -> bytes:
        """Return a footer with the entries of some row groups only."""
        # The number of rows of the file must be the sum over these row groups. Thrift's zigzag coding doubles it.
        number, entries = _varint(2 * int(self.rows[list(groups)].sum())), b"".join(map(self._entry, groups))
        return self._before + number + self._between + _list_header(len(groups)) + entries + self._after

    def _entry(self, group: int) -> bytes:
        """Return the entry of a row group in the footer."""
        block = group // _BLOCK
        origin, start, stop = self._starts[[block * _BLOCK, group, group + 1]].tolist()
        return self._block(block)[start - origin : stop - origin]

    def _block(self, block: int) -> bytes:
        """Return the entries of the row groups that are compressed together."""
        origin, end = self._starts[[block * _BLOCK, min((block + 1) * _BLOCK, len(self.rows))]].tolist()
        entries: bytes = pa.decompress(self._blocks[block], end - origin, _CODEC, asbytes=True)
        return entries


def read_footer(file: RangeFile | pa.BufferReader, tail: int = TAIL) -> bytes | None:
    """Return the footer of a file, without length and magic, or None if the file has no valid one.

    Args:
        file: File.
        tail: Number of bytes at the end of the file to read first. Default: 64 KiB.
    """
    size = file.seek(0, io.SEEK_END)
    begin = max(size - tail, 0)
    file.seek(begin)
    data = bytes(file.read())
    length, magic = int.from_bytes(data[-8:-4], "little"), data[-4:]
    if len(data) < 8 or magic != _MAGIC or length > size - 12:
        return None
    missing = length + 8 - len(data)
    if missing > 0:
        file.seek(begin - missing)
        data = bytes(file.read(missing)) + data
    return data[-8 - length : -8]


def as_file(footer: bytes) -> pa.BufferReader:
    """Return a Parquet file that consists of a footer only."""
    return pa.BufferReader(_MAGIC + footer + len(footer).to_bytes(4, "little") + _MAGIC)


class _Layout(NamedTuple):
    """Offsets of the parts of a footer, for G row groups.

    Attributes:
        num_rows: Offsets at which the number of rows of the file begins and ends.
        groups: Offset at which the list of row groups begins.
        starts: Offset at which the entry of each row group begins, and at which the last one ends, shape (G + 1,).
        rows: Number of rows of each row group, shape (G,).
        sizes: Uncompressed size of each row group in bytes, shape (G,).
    """

    num_rows: tuple[int, int]
    groups: int
    starts: Int64
    rows: Int64
    sizes: Int64


def _split(footer: bytes) -> _Layout | None:
    """Return the offsets of the parts of a footer. None if it has an unusual form, or few row groups."""
    at = field = 0
    values: dict[int, tuple[int, int]] = {}
    entries: tuple[Int64, Int64, Int64] | None = None
    try:
        while footer[at]:
            kind, field, at = _field(footer, at, field)
            begin = at
            if field == _ROW_GROUPS:
                entries = _entries(footer, at, values[_NUM_ROWS])
                if entries is None:
                    return None
                at = int(entries[0][-1])
            else:
                at = _skip(footer, at, kind)
            values[field] = begin, at
    except (IndexError, KeyError, RecursionError):  # the footer is truncated, or its fields have another order
        return None
    if entries is None or max(values) > _LAST_FIELD or at != len(footer) - 1:
        return None
    return _Layout(values[_NUM_ROWS], values[_ROW_GROUPS][0], *entries)


def _entries(footer: bytes, at: int, num_rows: tuple[int, int]) -> tuple[Int64, Int64, Int64] | None:
    """Return `starts`, `rows` and `sizes` of `_Layout`. None if the list has an unusual form, or few row groups.

    Parsing all entries would be slow: Python takes 0.1 ms per entry, and pyarrow would double the time to open a file. Instead,
    this function searches for the beginning of each entry, and reads only the numbers at its end.

    Args:
        footer: Footer of the file.
        at: Offset at which the list of row groups begins.
        num_rows: Offsets at which the number of rows of the file begins and ends.
    """
    count, kind, first = _list(footer, at)
    if count <= _SMALL or kind != _STRUCT:
        return None
    second = _skip(footer, first, _STRUCT)
    # All entries begin with the same bytes, apart from a few numbers. These bytes contain the name of the first column, which
    # pyarrow parses from a footer with the first entry only. The number of rows in this footer is not used.
    alone = footer[: num_rows[0]] + _varint(0) + footer[num_rows[1] : at] + _list_header(1) + footer[first:second] + b"\0"
    # The pattern may match by chance, or not match an unusual entry. The number of matches, the first two entries and the total
    # number of rows show whether it has found the entries.
    starts = [match.start() for match in _beginning(pq.read_metadata(as_file(alone))).finditer(footer, first)]
    if len(starts) != count or starts[:2] != [first, second]:
        return None
    starts.append(_skip(footer, starts[-1], _STRUCT))
    rows, sizes = np.empty(count, np.int64), np.empty(count, np.int64)
    total, _ = _read_varint(footer, num_rows[0])
    for group, (start, stop) in enumerate(itertools.pairwise(starts)):
        ending = _ENDING.search(footer, max(start, stop - _LONGEST_ENDING), stop)
        if ending is None:
            return None
        values = [_read_varint(ending[i], 0)[0] for i in (1, 2)]
        if any(value & 1 or value >> 64 for value in values):  # negative, or not an i64
            return None
        sizes[group], rows[group] = (value >> 1 for value in values)
        total -= values[1]
    if total:  # an entry was found at a wrong offset
        return None
    return np.array(starts, np.int64), rows, sizes


# A variable-length integer: all of its bytes except the last have the highest bit set.
_VALUE = rb"[\x80-\xff]{0,9}[\x00-\x7f]"
# total_byte_size (field 2, i64), num_rows (3, i64), file_offset (5, i64), total_compressed_size (6, i64), ordinal (7, i16)
_ENDING = re.compile(rb"\x16(%b)\x16(%b)(?:\x26%b(?:\x16%b(?:\x14%b)?)?)?\x00\Z" % ((_VALUE,) * 5))
_LONGEST_ENDING = 5 * 11 + 1


def _beginning(metadata: pq.FileMetaData) -> re.Pattern[bytes]:
    """Return a pattern of the beginning of an entry.

    An entry begins with its columns (field 1, a list). The first column begins with file_offset (field 2, i64) and meta_data
    (field 3, a structure). This structure begins with the type (field 1, i32), the encodings (field 2, a list) and
    path_in_schema (field 3, a list of names, which pyarrow joins with dots).
    """
    names = metadata.row_group(0).column(0).path_in_schema.encode().split(b".")  # `schema` would make a reference cycle
    number, encodings, any_byte = _VALUE, rb"[\s\S]{1,9}?", rb"[\s\S]"
    columns = rb"\x19" + re.escape(_list_header(metadata.num_columns))
    path = rb"\x19[\x18-\xe8][\x00-\x7f]" + any_byte.join(map(re.escape, names))
    return re.compile(columns + rb"\x26" + number + rb"\x1c\x15[\x00-\x0e]\x19" + encodings + path)


# Header of path_in_schema (field 3, a list) for a list of one name, which follows with its length.
_PATH = b"\x19\x18"
_STATISTICS = 12  # field number of ColumnMetaData
_LIMITS = ((6, 5), (2, 1))  # field numbers of the lowest and the highest value in Statistics; the second pair is deprecated


def chunk_sizes(footer: bytes) -> list[list[tuple[int, int]]]:
    """Return (number of values, uncompressed size in bytes) of each column of each row group.

    pyarrow has these numbers too, but terminates the process if other parts of the column's metadata are broken.

    Raises:
        ValueError: If the footer is broken.
    """

    def sizes(chunk: int) -> tuple[int, int]:
        inner = {number: at for number, _, at in _fields(footer, chunk)}[_META_DATA]
        numbers = {number: _read_varint(footer, at)[0] for number, kind, at in _fields(footer, inner) if kind == _I64}
        values, size = (numbers[field] >> 1 ^ -(numbers[field] & 1) for field in (_NUM_VALUES, _UNCOMPRESSED))
        return values, size

    try:
        groups = _elements(footer, 0, _ROW_GROUPS)
        return [[sizes(chunk) for chunk in _elements(footer, group, _COLUMNS)] for group in groups]
    except (IndexError, KeyError) as error:
        raise ValueError("its footer is broken") from error


# Field numbers of RowGroup, ColumnChunk and ColumnMetaData.
_COLUMNS, _META_DATA, _NUM_VALUES, _UNCOMPRESSED = 1, 3, 5, 6
_I64 = 6  # Thrift's number of the type


def _fields(data: bytes, at: int, number: int = 0) -> Iterator[tuple[int, int, int]]:
    """Yield (number, type, offset of the value) of the fields of a struct, from `at` on, after the field `number`."""
    while data[at]:
        kind, number, at = _field(data, at, number)
        yield number, kind, at
        at = _skip(data, at, kind)


def _elements(data: bytes, at: int, field: int) -> Iterator[int]:
    """Yield the offset of each struct in a list, which is a field of the struct at `at`."""
    for number, _, value in _fields(data, at):
        if number == field:
            count, _, value = _list(data, value)
            for _ in range(count):
                yield value
                value = _skip(data, value, _STRUCT)


def _statistics(data: bytes, at: int) -> tuple[int, int] | None:
    """Return the lowest and the highest value of an integer column, or None if its statistics lack them.

    Args:
        data: Entries of row groups.
        at: Offset in the column's ColumnMetaData at which path_in_schema (field 3) ends.

    Raises:
        IndexError: If the data is broken.
    """
    values = dict[int, int]()
    statistics = next((start for number, kind, start in _fields(data, at, 3) if (number, kind) == (_STATISTICS, _STRUCT)), None)
    if statistics is None:
        return None
    for number, kind, start in _fields(data, statistics):
        if kind == _BINARY:
            length, start = _read_varint(data, start)
            values[number] = int.from_bytes(data[start : start + length], "little", signed=True) if length in (4, 8) else 0
    return next(((values[low], values[high]) for low, high in _LIMITS if low in values and high in values), None)


def _field(data: bytes, at: int, before: int) -> tuple[int, int, int]:
    """Return (type, number, offset of the value) of the field at `at`, which follows the field of number `before`."""
    header = data[at]  # the upper four bits have the difference to `before`, or 0 if the number follows
    if header >> 4:
        return header & 15, before + (header >> 4), at + 1
    number, at = _read_varint(data, at + 1)
    return header & 15, (number >> 1) ^ -(number & 1), at


def _list(data: bytes, at: int) -> tuple[int, int, int]:
    """Return (length, type of the elements, offset of the first one) of the list at `at`."""
    header = data[at]  # the upper four bits have the length, or 15 if the length follows
    if header >> 4 < 15:
        return header >> 4, header & 15, at + 1
    count, at = _read_varint(data, at + 1)
    return count, header & 15, at


def _skip(data: bytes, at: int, kind: int) -> int:
    """Return the offset at which the value at `at` ends, which may exceed the size of truncated data.

    Raises:
        IndexError: If the data ends within the value, or if its type is unknown.
    """
    if kind in (1, 2):  # a boolean, whose value is part of its type
        return at
    if kind in (4, 5, 6):
        return _read_varint(data, at)[1]
    if kind == _BINARY:
        length, at = _read_varint(data, at)
        return at + length
    if kind in (9, 10):
        count, element_kind, at = _list(data, at)
        if count > len(data) - at:  # each element has at least one byte
            raise IndexError
        for _ in range(count):
            at = at + 1 if element_kind in (1, 2) else _skip(data, at, element_kind)
        return at
    if kind == _STRUCT:
        number = 0
        while data[at]:
            kind, number, at = _field(data, at, number)
            at = _skip(data, at, kind)
        return at + 1
    if kind not in (3, 7):
        raise IndexError
    return at + (1 if kind == 3 else 8)


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    """Return the value of the variable-length integer at `at`, and the offset at which it ends."""
    value = shift = 0
    while (byte := data[at]) > 127:
        if shift > 63:
            raise IndexError
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
    return value | byte << shift, at + 1


def _varint(value: int) -> bytes:
    parts = bytearray()
    while value > 127:
        parts.append(value & 127 | 128)
        value >>= 7
    parts.append(value)
    return bytes(parts)


def _list_header(count: int) -> bytes:
    return bytes([count << 4 | _STRUCT]) if count < 15 else bytes([15 << 4 | _STRUCT]) + _varint(count)
