"""Read-only arrays of integers in little memory, for the index of a video file."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Int64 = npt.NDArray[np.int64]
_VALUES_PER_LINE = 16  # at least; a line takes 16 bytes


class Column(np.lib.mixins.NDArrayOperatorsMixin):
    """n integers that are computed on access. They are indexed as an array is, and NumPy functions take them as one.

    An index or a slice costs what it selects. Whatever needs all values, such as `column + 1`, computes all of them.
    """

    def __init__(self, length: int) -> None:
        self._length = length

    def _at(self, index: Any) -> Any:
        """Return the values at places from 0 to n - 1, as int64 in the shape of `index`, or one."""
        raise NotImplementedError

    def _slice(self, start: int, stop: int) -> Any:
        """Return the values [start, stop)."""
        return self._at(np.arange(start, stop))

    @property
    def nbytes(self) -> int:
        """Memory of what the values are computed from."""
        return 0

    def searchsorted(self, values: Any, side: Any = "left", sorter: None = None) -> Any:
        """As of a rising NumPy array, which `np.searchsorted` calls."""
        return np.searchsorted(self[:], values, side)

    def sum(self, axis: None = None, dtype: None = None, out: None = None) -> int:
        """Return the sum of all values; `np.sum` calls this."""
        return int(self[:].sum())

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        if type(index) is int and 0 <= index < self._length:  # the most frequent one
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
            places = np.arange(self._length)[places]  # negative ones, or an IndexError
        return self._at(places.astype(np.int64, copy=False))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        values: npt.NDArray[Any] = self[:]
        return values if dtype is None else values.astype(dtype, copy=False)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **arguments: Any) -> Any:
        return getattr(ufunc, method)(*(each[:] if isinstance(each, Column) else each for each in inputs), **arguments)


class Line(Column):
    """The values `first + step * i`."""

    def __init__(self, first: int, step: int, length: int) -> None:
        super().__init__(length)
        self._first, self._step = first, step

    def _at(self, index: Any) -> Any:
        return self._first + self._step * index

    def searchsorted(self, values: Any, side: Any = "left", sorter: None = None) -> Any:
        if self._step <= 0:
            return super().searchsorted(values, side)
        if isinstance(values, int) and side == "right":
            return min(max((values - self._first) // self._step + 1, 0), self._length)
        steps = np.asarray(values, np.int64) - self._first
        place = -(-steps // self._step) if side == "left" else steps // self._step + 1
        return np.clip(place, 0, self._length)


class Lines(Column):
    """Values that rise by the same step but for some places, such as times of a file that was put together from others.

    Args:
        values: The values.
        breaks: Where a value is not `step` above the one before it.
        step: A step.
    """

    def __init__(self, values: Int64, breaks: Int64, step: int) -> None:
        super().__init__(len(values))
        self._start = np.append(0, breaks)
        self._first, self._step = values[self._start], step

    def _at(self, index: Any) -> Any:
        line = self._start.searchsorted(index, "right") - 1
        values = self._first[line] + self._step * (index - self._start[line])
        return int(values) if isinstance(index, int) else values

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
        return np.clip(start + place, start, np.append(self._start[1:], self._length)[line])


class Packed(Column):
    """The values of an array as `base + step * i` plus what is left, in the smallest type that holds that."""

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
        # In the type of what is searched, since NumPy would convert all of that otherwise.
        rest = np.asarray(values, np.int64) - self._base
        most = np.iinfo(self._rest.dtype).max
        place = np.searchsorted(self._rest, np.clip(rest, 0, most).astype(self._rest.dtype), side)
        return np.where(rest < 0, 0, np.where(rest > most, self._length, place))


class Gaps(Column):
    """The differences between neighbours of another column, one fewer than that has values."""

    def __init__(self, ends: Column) -> None:
        super().__init__(len(ends) - 1)
        self._ends = ends

    def _at(self, index: Any) -> Any:
        return self._ends[index + 1] - self._ends[index]

    def _slice(self, start: int, stop: int) -> Any:
        ends = self._ends[start : stop + 1]
        return ends[1:] - ends[:-1]


class Without(Column):
    """Another column without its last value."""

    def __init__(self, whole: Column) -> None:
        super().__init__(len(whole) - 1)
        self._whole = whole

    def _at(self, index: Any) -> Any:
        return self._whole[index]

    @property
    def nbytes(self) -> int:
        return self._whole.nbytes


class Floor(Column):
    """For each place of n, the highest value of a rising column, which begins with 0, that is not above it."""

    def __init__(self, values: Column, length: int) -> None:
        super().__init__(length)
        self._values = values

    def _at(self, index: Any) -> Any:
        return self._values[self._values.searchsorted(index, side="right") - 1]


class Chosen(Column):
    """The values of one column at the places that another one holds."""

    def __init__(self, values: Column, places: Column) -> None:
        super().__init__(len(places))
        self._values, self._places = values, places

    def _at(self, index: Any) -> Any:
        return self._values[self._places[index]]


def packed(values: npt.NDArray[Any], step: int = 0) -> Column:
    """Return a column of these values: a `Line` or some, if they are that.

    Args:
        values: Any integers.
        step: About the difference between neighbours, which makes what is stored smaller; 0 for values that are searched.
    """
    values = np.asarray(values, np.int64)
    if len(values) < 2:
        return Line(int(values.sum()), 0, len(values))
    steps = np.diff(values)
    usual = int(np.partition(sample := steps[:: len(steps) // 64 + 1], len(sample) // 2)[len(sample) // 2])
    breaks = np.flatnonzero(steps != usual) + 1
    if not len(breaks):
        return Line(int(values[0]), usual, len(values))
    if len(breaks) <= len(values) // _VALUES_PER_LINE:
        return Lines(values, breaks, usual)
    return Packed(values, step)
