"""Compressed, read-only arrays of integers for the index of a video file."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Int64 = npt.NDArray[np.int64]
_VALUES_PER_LINE = 16  # minimum mean length of the lines of `Lines`; a line takes 16 bytes


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

    def _slice(self, start: int, stop: int) -> Any:
        """Return the values [start, stop)."""
        return self._at(np.arange(start, stop))

    def step(self, start: int, stop: int) -> int | None:
        """Return the difference between consecutive values of [start, stop), or None if it is not known to be constant."""
        return None

    @property
    def nbytes(self) -> int:
        """Memory that the column takes, in bytes."""
        return 0

    def searchsorted(self, values: Any, side: Any = "left", sorter: None = None) -> Any:
        """Return insertion points, as for a sorted NumPy array. `np.searchsorted` calls this method."""
        return np.searchsorted(self[:], values, side)

    def sum(self, axis: None = None, dtype: None = None, out: None = None) -> int:
        """Return the sum of all values. `np.sum` calls this method."""
        return int(self[:].sum())

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        if type(index) is int and 0 <= index < self._length:  # the most frequent case
            return self._at(index)
        if isinstance(index, slice):
            start, stop, step = index.indices(self._length)
            return self._slice(start, max(start, stop)) if step == 1 else self._at(np.arange(start, stop, step))
        places = np.asarray(index)
        if places.dtype == np.bool_:
            return self._at(np.flatnonzero(places))
        if not places.ndim:
            place = int(places) + (self._length if places < 0 else 0)
            if not 0 <= place < self._length:
                raise IndexError(f"index {index} is out of bounds for {self._length} values")
            return self._at(place)
        if places.size and not (places.min() >= 0 and places.max() < self._length):
            places = np.arange(self._length)[places]  # resolves negative indices, or raises IndexError
        return self._at(places.astype(np.int64, copy=False))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        values: npt.NDArray[Any] = self[:]
        return values if dtype is None else values.astype(dtype, copy=False)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **arguments: Any) -> Any:
        return getattr(ufunc, method)(*(each[:] if isinstance(each, Column) else each for each in inputs), **arguments)


class Line(Column):
    """Column of the values `first + step * i`.

    Args:
        first: First value.
        step: Difference between consecutive values.
        length: Number of values.
    """

    def __init__(self, first: int, step: int, length: int) -> None:
        super().__init__(length)
        self._first, self._step = first, step

    def _at(self, index: Any) -> Any:
        return self._first + self._step * index

    def _slice(self, start: int, stop: int) -> Any:
        return _line(self._at(start), self._step, stop - start)

    def step(self, start: int, stop: int) -> int | None:
        return self._step if stop <= self._length else None

    def searchsorted(self, values: Any, side: Any = "left", sorter: None = None) -> Any:
        if self._step <= 0:
            return super().searchsorted(values, side)
        is_single = isinstance(values, int)  # the case of `Floor`, for a single packet
        steps = (values if is_single else np.asarray(values, np.int64)) - self._first
        place = -(-steps // self._step) if side == "left" else steps // self._step + 1
        return min(max(place, 0), self._length) if is_single else np.minimum(np.maximum(place, 0), self._length)


class Lines(Column):
    """Column of several lines with the same step, such as the times in a concatenation of several files.

    Args:
        values: Values of the column, shape (n,).
        breaks: Indices of the values whose difference from the previous value is not `step`.
        step: Difference between consecutive values of a line.
    """

    def __init__(self, values: Int64, breaks: Int64, step: int) -> None:
        super().__init__(len(values))
        self._start = np.concatenate(([0], breaks, [len(values)]))  # of each line, and the end of the last one
        self._first, self._step = values[self._start[:-1]], step

    def _at(self, index: Any) -> Any:
        line = self._start.searchsorted(index, "right") - 1
        values = self._first[line] + self._step * (index - self._start[line])
        return int(values) if isinstance(index, int) else values

    def _slice(self, start: int, stop: int) -> Any:
        if start < stop and self.step(start, stop) is not None:  # the usual case
            return _line(self._at(start), self._step, stop - start)
        return super()._slice(start, stop)

    def step(self, start: int, stop: int) -> int | None:
        line = self._start.searchsorted(start, "right")
        return self._step if line < len(self._start) and stop <= self._start[line] else None

    @property
    def nbytes(self) -> int:
        return self._start.nbytes + self._first.nbytes

    def searchsorted(self, values: Any, side: Any = "left", sorter: None = None) -> Any:
        if self._step <= 0:
            return super().searchsorted(values, side)
        values = np.asarray(values, np.int64)
        line = np.maximum(self._first.searchsorted(values, side) - 1, 0)
        steps = values - self._first[line]
        place = -(-steps // self._step) if side == "left" else steps // self._step + 1
        start = self._start[line]
        # A value in the gap after a line is not on it. The limits assign it to the end of the line.
        return np.minimum(np.maximum(start + place, start), self._start[line + 1])


class Packed(Column):
    """Column that stores each value as its difference from `base + step * i`, in the smallest sufficient unsigned type.

    Args:
        values: Values of the column, shape (n,).
        step: Approximate difference between consecutive values. Default: 0.
    """

    def __init__(self, values: Int64, step: int = 0) -> None:
        super().__init__(len(values))
        rest = values - step * np.arange(len(values))
        self._base, self._step = int(rest.min()), step
        rest -= self._base
        self._rest = rest.astype(np.min_scalar_type(int(rest.max())))

    def _at(self, index: Any) -> Any:
        if isinstance(index, int):
            return self._base + self._step * index + self._rest.item(index)
        values = self._rest[index].astype(np.int64)
        values += self._base
        if self._step:
            values += self._step * index
        return values

    def _slice(self, start: int, stop: int) -> Any:
        values = self._rest[start:stop].astype(np.int64)
        if not self._step:
            values += self._base
            return values
        first = self._base + self._step * start
        return values + np.arange(first, first + self._step * len(values), self._step)

    @property
    def nbytes(self) -> int:
        return self._rest.nbytes

    def searchsorted(self, values: Any, side: Any = "left", sorter: None = None) -> Any:
        if self._step:
            return super().searchsorted(values, side)
        # The values are converted to the stored type. Otherwise, NumPy would convert the whole column.
        rest = np.asarray(values, np.int64) - self._base
        most = np.iinfo(self._rest.dtype).max
        place = np.searchsorted(self._rest, np.clip(rest, 0, most).astype(self._rest.dtype), side)
        return np.where(rest < 0, 0, np.where(rest > most, self._length, place))


class Gaps(Column):
    """Column of the differences between consecutive values of another column. It has one value fewer than that column."""

    def __init__(self, ends: Column) -> None:
        super().__init__(len(ends) - 1)
        self._ends = ends

    def _at(self, index: Any) -> Any:
        return self._ends[index + 1] - self._ends[index]

    def _slice(self, start: int, stop: int) -> Any:
        ends = self._ends[start : stop + 1]
        return ends[1:] - ends[:-1]


class Without(Column):
    """Column of all values of another column except the last."""

    def __init__(self, whole: Column) -> None:
        super().__init__(len(whole) - 1)
        self._whole = whole

    def _at(self, index: Any) -> Any:
        return self._whole[index]

    @property
    def nbytes(self) -> int:
        return self._whole.nbytes


class Floor(Column):
    """Column of the largest value of a sorted column that is at most i, for each i from 0 to n - 1.

    Args:
        values: Sorted column that starts with 0.
        length: Number of values, n.
    """

    def __init__(self, values: Column, length: int) -> None:
        super().__init__(length)
        self._values = values

    def _at(self, index: Any) -> Any:
        return self._values[self._values.searchsorted(index, side="right") - 1]


class Chosen(Column):
    """Column of the values of one column at the indices in another: `values[places]`."""

    def __init__(self, values: Column, places: Column) -> None:
        super().__init__(len(places))
        self._values, self._places = values, places

    def _at(self, index: Any) -> Any:
        return self._values[self._places[index]]


def _line(first: int, step: int, length: int) -> Int64:
    """Return the values `first + step * i`."""
    return np.arange(first, first + step * length, step) if step else np.full(length, first)


def packed(values: npt.NDArray[Any], step: int = 0) -> Column:
    """Return a compressed column of values: `Line` or `Lines` if the values are regular enough, and `Packed` otherwise.

    Args:
        values: Integers, shape (n,).
        step: Approximate difference between consecutive values. A good estimate reduces the memory of `Packed`, but
            `Packed.searchsorted` is fast only if the step is 0. Default: 0.
    """
    values = np.asarray(values, np.int64)
    if len(values) < 2:
        return Line(int(values.sum()), 0, len(values))
    steps = np.diff(values)
    # The usual step is the median of at most 64 steps, which a few irregular steps do not change.
    usual = int(np.partition(sample := steps[:: len(steps) // 64 + 1], len(sample) // 2)[len(sample) // 2])
    breaks = np.flatnonzero(steps != usual) + 1
    if not len(breaks):
        return Line(int(values[0]), usual, len(values))
    if len(breaks) <= len(values) // _VALUES_PER_LINE:
        return Lines(values, breaks, usual)
    return Packed(values, step)
