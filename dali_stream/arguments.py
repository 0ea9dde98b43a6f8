"""Checks of the loader's plain arguments. Each raises a ValueError that says what is allowed."""

from __future__ import annotations

import difflib
import functools
import inspect
import operator
import re
from collections.abc import Callable, Sequence
from typing import ParamSpec

import numpy as np

_P = ParamSpec("_P")


def known_arguments(init: Callable[_P, None]) -> Callable[_P, None]:
    """An `__init__` that says which keyword arguments there are when it is given another one."""
    allowed = [name for name in inspect.signature(init).parameters if name != "self"]

    @functools.wraps(init)
    def checked(*args: _P.args, **kwargs: _P.kwargs) -> None:
        for name in kwargs:
            if name not in allowed:
                near = difflib.get_close_matches(name, allowed, n=1, cutoff=0.8)
                hint = f" Did you mean {near[0]!r}?" if near else ""
                raise TypeError(f"{type(args[0]).__name__} has no argument {name!r}.{hint} Its arguments: {', '.join(allowed)}")
        init(*args, **kwargs)

    return checked


def one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}; allowed are {', '.join(map(repr, allowed))}")


def positive(name: str, value: int) -> int:
    """The value itself, an integer of 1 or more (NumPy's are welcome)."""
    try:
        number = 0 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = 0
    if number < 1:
        raise ValueError(f"{name} is {value!r}; it is an integer of 1 or more")
    return number


def from_zero(name: str, value: int) -> int:
    """The value itself, an integer of 0 or more."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 0:
        raise ValueError(f"{name} is {value!r}; it is an integer of 0 or more")
    return int(value)


def share(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1:
        raise ValueError(f"{name} is {value!r}; it is a share, above 0 and up to 1")
    return float(value)


def picture_size(image_size: tuple[int, int] | None) -> tuple[int, int] | None:
    if image_size is None:
        return None
    if not isinstance(image_size, Sequence) or len(image_size) != 2:
        raise ValueError(f"image_size is {image_size!r}; it is (height, width) or None")
    return positive("the height of image_size", image_size[0]), positive("the width of image_size", image_size[1])


def byte_count(budget: int | str, name: str = "memory_budget") -> int:
    """4294967296, "4GiB", "500 MB": bytes."""
    units = {
        "": 1,
        "k": 1000,
        "m": 1000**2,
        "g": 1000**3,
        "t": 1000**4,
        "ki": 1 << 10,
        "mi": 1 << 20,
        "gi": 1 << 30,
        "ti": 1 << 40,
    }
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?\s*", str(budget).lower())
    if isinstance(budget, bool) or not found or found[2] not in units or float(found[1]) <= 0:
        raise ValueError(f'{name} is {budget!r}; it is a number of bytes above 0, or such as "512MiB" or "4GiB"')
    return int(float(found[1]) * units[found[2]])
