"""Checks of plain arguments, such as numbers. Each check raises a ValueError that names the allowed values."""

from __future__ import annotations

import difflib
import functools
import inspect
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import ParamSpec

import numpy as np

_P = ParamSpec("_P")
MOST_EPOCHS = 1 << 31  # the product of an epoch and its number of samples fits in 64 bits


# {argument of PyTorch's DataLoader that a Loader lacks: what to do instead}.
INSTEAD_OF_DATALOADER = {
    "num_workers": "Use num_threads=, the number of decode threads.",
    "prefetch_factor": "Use prefetch=, the number of batches in progress.",
    "drop_last": 'Use last_batch="drop", which is the default, or last_batch="partial".',
    "generator": "Use seed=.",
    "sampler": "Use shuffle= and seed= for the order, and Dataset(episodes=..., frames=...) for the selection.",
    "collate_fn": "Change the batches in the training loop. A batch equals that of default_collate.",
    "pin_memory": "Use device=. Batches are delivered on that device.",
    "persistent_workers": "Leave it out, since the threads continue from epoch to epoch.",
    "worker_init_fn": "Leave it out, since a Loader starts no worker processes.",
    "in_order": "Leave it out, since batches are always in order.",
    "timeout": "Use Dataset(give_up_after_s=...).",
}
INSTEAD_OF_DATALOADER["batch_sampler"] = INSTEAD_OF_DATALOADER["sampler"]
INSTEAD_OF_DATALOADER["pin_memory_device"] = INSTEAD_OF_DATALOADER["pin_memory"]
INSTEAD_OF_DATALOADER["multiprocessing_context"] = INSTEAD_OF_DATALOADER["worker_init_fn"]
# {argument that a Dataset and a FrameSampler lack: what to do instead}.
INSTEAD_OF_DROP = {
    "drop_first": "Use drop_n_first_frames=.",
    "drop_last": "Use drop_n_last_frames= for frames, and drop_last= of a DataLoader or last_batch= of a Loader for batches.",
}


def known_arguments(init: Callable[_P, None]) -> Callable[_P, None]:
    """Decorate an `__init__` so that the error for an unknown keyword argument lists the known ones."""
    return known_arguments_or({})(init)


def known_arguments_or(hints: Mapping[str, str]) -> Callable[[Callable[_P, None]], Callable[_P, None]]:
    """Return a decorator like `known_arguments`. Its error also contains a hint for some unknown arguments.

    Args:
        hints: {unknown argument: sentence that says what to do instead}.
    """

    def decorate(init: Callable[_P, None]) -> Callable[_P, None]:
        allowed = [name for name in inspect.signature(init).parameters if name != "self"]

        @functools.wraps(init)
        def checked(*args: _P.args, **kwargs: _P.kwargs) -> None:
            for name in kwargs:
                if name not in allowed:
                    owner, known = type(args[0]).__name__, ", ".join(allowed)
                    raise TypeError(f"{owner} has no argument {name!r}.{hint(name, allowed, hints)} Its arguments: {known}")
            init(*args, **kwargs)

        return checked

    return decorate


def hint(name: str, allowed: Iterable[str], hints: Mapping[str, str]) -> str:
    """Return a sentence, after a space, that says what to use in place of an unknown name. Empty if nothing is similar.

    Args:
        name: Unknown name.
        allowed: Known names.
        hints: {unknown name: sentence that says what to do instead}.
    """
    if name in hints:
        return f" {hints[name]}"
    similar = difflib.get_close_matches(name, list(allowed), n=1, cutoff=0.8)
    return f" Did you mean {similar[0]!r}?" if similar else ""


def one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    """Raise ValueError if a value is not allowed."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")


def positive(name: str, value: int) -> int:
    """Return an argument as int. Raises ValueError unless it is a positive integer, which may be a NumPy integer."""
    try:
        number = 0 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = 0
    if number < 1:
        raise ValueError(f"{name} must be a positive integer, got {value!r}")
    return number


def from_zero(name: str, value: int) -> int:
    """Return an argument as int. Raises ValueError unless it is a nonnegative integer."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 0:
        raise ValueError(f"{name} must be a nonnegative integer, got {value!r}")
    return int(value)


def epoch_number(epoch: int) -> int:
    """Return the number of an epoch as int. Raises ValueError unless it is a nonnegative integer below 2**31."""
    number = from_zero("epoch", epoch)
    if number >= MOST_EPOCHS:
        raise ValueError(f"epoch must be below {MOST_EPOCHS}, got {number}")
    return number


def share(name: str, value: float) -> float:
    """Return an argument as float. Raises ValueError unless it is above 0 and at most 1."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1:
        raise ValueError(f"{name} must be greater than 0 and at most 1, got {value!r}")
    return float(value)


def picture_size(image_size: tuple[int, int] | None) -> tuple[int, int] | None:
    """Return the size (height, width) in pixels as a tuple of int, or None. Raises ValueError for other values."""
    if image_size is None:
        return None
    if not isinstance(image_size, Sequence) or len(image_size) != 2:
        raise ValueError(f"image_size must be (height, width) or None, got {image_size!r}")
    return positive("the height of image_size", image_size[0]), positive("the width of image_size", image_size[1])


def budget_text(count: int) -> str:
    """Return a number of bytes as a text that `byte_count` accepts, rounded up: "8.4GiB", or "20MiB" below 1 GiB."""
    return f"{-(-count * 10 // (1 << 30)) / 10:.1f}GiB" if count >= 1 << 30 else f"{-(-count // (1 << 20))}MiB"


def byte_count(budget: int | str, name: str = "memory_budget") -> int:
    """Return a number of bytes from a value such as 4294967296, "4GiB" or "500 MB".

    Args:
        budget: Value of the argument.
        name: Name of the argument, for the message.

    Raises:
        ValueError: If the value has another form, or is not positive.
    """
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
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?\s*", str(budget).lower())
    if isinstance(budget, bool) or not match or match[2] not in units or float(match[1]) <= 0:
        raise ValueError(f'{name} must be a positive number of bytes, such as "512MiB" or "4GiB", got {budget!r}')
    return int(float(match[1]) * units[match[2]])
