"""Arguments of the Loader on the command line of LeRobot's training script."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from dali_stream.checks.frame_size import frame_size

PREFIX = "--loader."


def _size(text: str) -> tuple[int, int]:
    try:
        return frame_size(text)
    except argparse.ArgumentTypeError as error:
        raise ValueError(str(error)) from None


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"must be an integer, got {text!r}") from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"must be a number, got {text!r}") from None


def _shuffle(text: str) -> bool | str:
    return {"true": True, "false": False}.get(text.lower(), text)


ARGUMENTS: dict[str, Callable[[str], Any]] = {
    "image_size": _size,
    "memory_format": str,
    "shuffle": _shuffle,
    "consumers": _integer,
    "episode_pool_size": _integer,
    "device": str,
    "decode": str,
    "num_threads": _integer,
    "prefetch": _integer,
    "memory_budget": str,
    "frame_cache": str,
    "frame_cache_bytes": str,
    "audit": _integer,
    "last_batch": str,
    "on_error": str,
    "max_substitutes": _number,
}
"""Arguments of a Loader that LeRobot does not set, each with a function that parses its value."""


def split_arguments(words: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Split a command line into the arguments of the Loader and those of LeRobot.

    Args:
        words: Command line without the program's name. `--loader.NAME=VALUE` and `--loader.NAME VALUE` are arguments of the
            Loader, such as `--loader.image_size=224x224`.

    Returns:
        The arguments of `patch`, and the other words.

    Raises:
        ValueError: If an argument of the Loader is unknown or has an invalid value.
    """
    arguments: dict[str, Any] = {}
    rest: list[str] = []
    remaining = iter(words)
    for word in remaining:
        if not word.startswith(PREFIX):
            rest.append(word)
            continue
        name, equals, value = word.removeprefix(PREFIX).partition("=")
        check_names([name])
        if not equals:
            value = next(remaining, "")
        if not value or value.startswith("--"):
            raise ValueError(f"{PREFIX}{name} must have a value, such as {PREFIX}{name}=VALUE, got {value!r}")
        try:
            arguments[name] = ARGUMENTS[name](value)
        except ValueError as error:
            raise ValueError(f"{PREFIX}{name} {error}") from None
    return arguments, rest


def check_names(names: Iterable[str]) -> None:
    """Raise ValueError if a name is not that of an argument of a Loader, or if LeRobot sets this argument."""
    for name in names:
        if name not in ARGUMENTS:
            raise ValueError(
                f"arguments of the Loader must be among {', '.join(ARGUMENTS)}, got {name!r}. LeRobot's own arguments set all "
                "others, such as --batch_size and --seed"
            )
