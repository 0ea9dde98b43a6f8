"""Compact, read-only arrays of integers for the index of a video file: `Line` and `Packed`."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from dali_stream.checks.arrays import Int64


class Column(np.lib.mixins.NDArrayOperatorsMixin):
    """Array of n integers that are computed on access. It supports NumPy's indexing and functions.

    Indexing and slicing compute only the selected values. An operation on the whole column, such as `column + 1`, computes all
    values.

    Args:
        length: Number of values.
    """

    def __init__(self, length: int) -> None:
        self._length = length

    def _at(self, index: Any) -> Any:
        """Return the values at indices from 0 to n - 1.

        Args:
            index: Array of indices, or an int.

        Returns:
            int64 array of the same shape, or an int for an int.
        """
        raise NotImplementedError

    def _slice(self, start: int, stop: int) -> Int64:
        """Return the values [start, stop)."""
        raise NotImplementedError

    def part(self, start: int, stop: int) -> Column:
        """Return the column of the values [start, stop). Both columns share their memory."""
        raise NotImplementedError

    @property
    def nbytes(self) -> int:
        """Memory that the column takes, in bytes."""
        raise NotImplementedError

    def searchsorted(self, values: Any, side: Any = "left", sorter: None = None) -> Any:
        """Return insertion points, as for a sorted NumPy array. `np.searchsorted` calls this method."""
        raise NotImplementedError

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        if type(index) is int and 0 <= index < self._length:  # the most frequent case
            return self._at(index)
        if isinstance(index, np.integer):
            return self[int(index)]
        if isinstance(index, slice):
            start, stop, step = index.indices(self._length)
            return self._slice(start, max(start, stop)) if step == 1 else self._at(np.arange(start, stop, step))
        places = np.asarray(index)
        if places.dtype == np.bool_ or (places.size and not (places.min() >= 0 and places.max() < self._length)):
            places = np.asarray(np.arange(self._length)[places])  # resolves masks and negative indices, or raises IndexError
        return self._at(places.astype(np.int64, copy=False))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        values: npt.NDArray[Any] = self[:]
        return values if dtype is None else values.astype(dtype, copy=False)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **arguments: Any) -> Any:
        return getattr(ufunc, method)(*(each[:] if isinstance(each, Column) else each for each in inputs), **arguments)


class Line(Column):
    """Column with a constant step: the values `first + step * i`. It takes no memory per value.

    Args:
        first: First value.
        step: Difference between consecutive values.
        length: Number of values.
    """

    def __init__(self, first: int, step: int, length: int) -> None:
        super().__init__(length)
        self._first, self.step = first, step

    def _at(self, index: Any) -> Any:
        return self._first + self.step * index

    def _slice(self, start: int, stop: int) -> Int64:
        first, step = self._at(start), self.step
        return np.arange(first, first + step * (stop - start), step) if step else np.full(stop - start, first)

    def part(self, start: int, stop: int) -> Line:
        return Line(self._at(start), self.step, stop - start)

    @property
    def nbytes(self) -> int:
        return 0

    def searchsorted(self, values: Any, side: Any = "left", sorter: None = None) -> Any:
        if self.step <= 0:
            return np.searchsorted(self[:], values, side)
        is_single = isinstance(values, int)  # Python ints are faster than NumPy, and a clip asks for one packet at a time
        steps = (values if is_single else np.asarray(values, np.int64)) - self._first
        place = -(-steps // self.step) if side == "left" else steps // self.step + 1
        return min(max(place, 0), self._length) if is_single else np.minimum(np.maximum(place, 0), self._length)


class Packed(Column):
    """Column of any values, stored as their small differences from a line: `base + step * i + rest[i]`.

    Args:
        base: First value of the line.
        step: Step of the line. Offsets, times and keyframes grow by similar steps, so `packed` uses their mean.
        rest: Difference of each value from the line, an array of the smallest sufficient unsigned type, shape (n,).
    """

    def __init__(self, base: int, step: int, rest: npt.NDArray[np.unsignedinteger[Any]]) -> None:
        super().__init__(len(rest))
        self._base, self._step, self._rest = base, step, rest
        self._most = int(rest.max())

    def _at(self, index: Any) -> Any:
        if isinstance(index, int):
            return self._base + self._step * index + self._rest.item(index)
        values = self._rest[index].astype(np.int64)
        values += self._base
        values += self._step * index
        return values

    def _slice(self, start: int, stop: int) -> Int64:
        values = self._rest[start:stop].astype(np.int64)
        first = self._base + self._step * start
        values += np.arange(first, first + self._step * len(values), self._step) if self._step else first
        return values

    def part(self, start: int, stop: int) -> Packed:
        return Packed(self._base + self._step * start, self._step, self._rest[start:stop])

    @property
    def nbytes(self) -> int:
        return self._rest.nbytes

    def searchsorted(self, values: Any, side: Any = "left", sorter: None = None) -> Any:
        values = np.asarray(values, np.int64)
        begin, end = 0, len(self)
        if self._step > 0 and values.size:
            # Value i is between `base + step * i` and `most` above that. This bounds the insertion points of the lowest and of
            # the highest of `values`, and only the values between these bounds are computed.
            begin = min(max((int(values.min()) - self._base - self._most) // self._step, 0), end)
            end = min(max((int(values.max()) - self._base) // self._step + 1, begin), end)
        return begin + np.searchsorted(self[begin:end], values, side)


def packed(values: npt.NDArray[Any]) -> Column:
    """Return a column of integers, shape (n,): `Line` if their step is constant, and `Packed` otherwise."""
    values = np.asarray(values, np.int64)
    n = len(values)
    if n < 2:
        return Line(int(values.sum()), 0, n)
    steps = np.diff(values)
    if (steps == steps[0]).all():
        return Line(int(values[0]), int(steps[0]), n)
    step = round((int(values[-1]) - int(values[0])) / (n - 1))
    rest = values - step * np.arange(n)
    base = int(rest.min())
    rest -= base
    return Packed(base, step, rest.astype(np.min_scalar_type(int(rest.max()))))
