"""Checks of plain arguments, such as numbers. Each check raises a ValueError that names the allowed values."""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
import operator
import re
from collections.abc import Callable, Iterable, Sequence
from typing import ParamSpec, TypeVar

import numpy as np

_P = ParamSpec("_P")
_R = TypeVar("_R")
MOST_EPOCHS = 1 << 31  # the product of an epoch and its number of samples fits in 64 bits


_USE_DEVICE = "Use Loader(device=). Batches are delivered on that device."
_USE_SELECTION = "Use Loader(shuffle=, seed=) for the order, and Dataset(episodes=, frames=) for the selection."
_NO_PROCESSES = "Leave it out, since a Loader starts no worker processes."
_NO_DOWNLOAD = (
    "Leave it out, since only the bytes of the next batches are fetched. Dataset(cache_dir=) keeps them for later runs."
)
# {argument that no class has: what to do instead}, from PyTorch's DataLoader and DistributedSampler, and LeRobot's datasets.
_INSTEAD = {
    "num_workers": "Use Loader(num_threads=), the number of decode threads, or Transformed(num_workers=), the number of "
    "processes that apply a transform.",
    "prefetch_factor": "Use Loader(prefetch=), the number of batches in progress.",
    "drop_first": "Use drop_n_first_frames= of a Dataset or a FrameSampler.",
    "drop_last": "Use drop_n_last_frames= of a Dataset or a FrameSampler for frames, and Loader(last_batch=) or drop_last= of "
    "a DataLoader for batches. A Loader drops an incomplete last batch by default.",
    "generator": "Use seed= of a Loader or a FrameSampler.",
    "sampler": _USE_SELECTION,
    "batch_sampler": _USE_SELECTION,
    "collate_fn": "Change the batches in the training loop. A batch equals that of default_collate.",
    "pin_memory": _USE_DEVICE,
    "pin_memory_device": _USE_DEVICE,
    "persistent_workers": "Leave it out, since the threads of a Loader continue from epoch to epoch.",
    "worker_init_fn": _NO_PROCESSES,
    "multiprocessing_context": _NO_PROCESSES,
    "in_order": "Leave it out, since batches are always in order.",
    "timeout": "Use Dataset(give_up_after_s=).",
    "num_replicas": "Use world_size= of a Loader or a FrameSampler.",
    "repo_id": "Pass the id of the Hub repository as Dataset(uri).",
    "root": "Pass the folder as Dataset(uri).",
    "image_transforms": "Use Transformed(loader, transform, keys=dataset.cameras), or Loader(dali_graph=) with DALI.",
    "return_uint8": 'Use Loader(image_dtype="uint8").',
    "depth_output_unit": "Use Loader(depth_unit=).",
    "video_backend": "Use Loader(decode=).",
    "download_videos": _NO_DOWNLOAD,
    "force_cache_sync": _NO_DOWNLOAD,
    "streaming": _NO_DOWNLOAD,
    "buffer_size": "Use Loader(episode_pool_size=), the number of parts of episodes from which a consumer draws.",
    "max_num_shards": "Use Loader(consumers=).",
    "rng": "Use seed= of a Loader or a FrameSampler.",
}
_OWNERS = ("Dataset", "Mixture", "Loader", "FrameSampler", "Transformed")  # classes with which a user makes batches


def known_arguments(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorate a function or an `__init__` so that the error for an unknown keyword argument contains its `hint`."""
    named = function.__qualname__.removesuffix(".__init__")
    allowed = [name for name in inspect.signature(function).parameters if name != "self"]

    @functools.wraps(function)
    def checked(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        for name in kwargs:
            if name not in allowed:
                raise TypeError(f"{named} has no argument {name!r}.{hint(name, allowed)} Its arguments: {', '.join(allowed)}")
        return function(*args, **kwargs)

    return checked


def hint(name: str, allowed: Iterable[str]) -> str:
    """Return a sentence, after a space, that says what to do in place of an unknown argument. Empty if nothing is similar.

    It names the class that has the argument, or what replaces an argument of PyTorch or LeRobot.

    Args:
        name: Unknown argument.
        allowed: Arguments of the function or class to which it was passed.
    """
    if name in _INSTEAD:
        return f" {_INSTEAD[name]}"
    package = importlib.import_module("dali_stream")  # imported on use, because the classes import this module
    arguments = {owner: list(inspect.signature(getattr(package, owner)).parameters) for owner in _OWNERS}

    def passed(name: str) -> str:
        calls = [f"{owner}({'' if own[0] == name else '..., '}{name}=...)" for owner, own in arguments.items() if name in own]
        return f" Pass it to {' or '.join(calls)}." if calls else ""

    if text := passed(name) or similar(name, allowed):
        return text
    others = {other for own in arguments.values() for other in own}
    return f"{similar(name, others)}{passed(found[0])}" if (found := _matches(name, others)) else ""


def similar(name: str, allowed: Iterable[str]) -> str:
    """Return a question, after a space, that contains the most similar known name. Empty if none is similar."""
    found = _matches(name, allowed)
    return f" Did you mean {found[0]!r}?" if found else ""


def _matches(name: str, allowed: Iterable[str]) -> list[str]:
    return difflib.get_close_matches(name, sorted(allowed), n=1, cutoff=0.8)


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
