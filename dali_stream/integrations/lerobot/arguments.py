"""Arguments of the Loader on the command line of LeRobot's training script."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from dali_stream.checks.file_content import FLAG, NULL, NUMBER, TEXT, Fields, array_of, one_of_texts, whole
from dali_stream.checks.frame_size import frame_size
from dali_stream.decode.route import DECODE
from dali_stream.order.batches import LAST_BATCH
from dali_stream.order.order import SHUFFLES
from dali_stream.order.state import MOST_CONSUMERS, MOST_SEGMENTS

PREFIX = "--loader."


def _shuffle(text: str) -> bool | str:
    return {"true": True, "false": False}.get(text.lower(), text)


def _switch(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"must be true or false, got {text!r}")
    return text.lower() == "true"


ARGUMENTS: dict[str, Callable[[str], Any]] = {
    "image_size": frame_size,
    "memory_format": str,
    "shuffle": _shuffle,
    "consumers": int,
    "episode_pool_size": int,
    "device": str,
    "decode": str,
    "num_threads": int,
    "prefetch": int,
    "memory_budget": str,
    "frame_cache": str,
    "frame_cache_bytes": str,
    "gpu_cache": str,
    "audit": int,
    "last_batch": str,
    "on_error": str,
    "max_substitutes": float,
    "in_process": _switch,
    "decode_processes": int,
}
"""Arguments of a Loader that LeRobot does not set, each with a function that parses its value."""

_COUNT, _BYTES = (whole(1, 1 << 20), NULL), (whole(1, 1 << 62), TEXT, NULL)
SAVED: Fields = {
    "image_size": (array_of(whole(1, 1 << 15), "[height, width]", 2), NULL), "memory_format": (TEXT, NULL),
    "shuffle": (FLAG, one_of_texts(*SHUFFLES), NULL), "consumers": (whole(1, MOST_CONSUMERS), NULL),
    "episode_pool_size": (whole(1, MOST_SEGMENTS), NULL), "device": (TEXT, NULL), "decode": (one_of_texts(*DECODE), NULL),
    "num_threads": _COUNT, "prefetch": _COUNT, "memory_budget": _BYTES, "frame_cache": (TEXT, NULL),
    "frame_cache_bytes": _BYTES, "gpu_cache": _BYTES, "audit": (whole(0, 1 << 40),),
    "last_batch": (one_of_texts(*LAST_BATCH), NULL), "on_error": (TEXT, NULL), "max_substitutes": (NUMBER, NULL),
    "in_process": (FLAG, NULL), "decode_processes": (whole(0, 1 << 10), NULL),
}  # fmt: skip
"""Allowed kinds of these arguments in a checkpoint."""


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
        parse = ARGUMENTS[name]
        try:
            arguments[name] = parse(value)
        except argparse.ArgumentTypeError as error:
            raise ValueError(f"{PREFIX}{name} {error}") from None
        except ValueError:
            kind = "an integer" if parse is int else "a number"
            raise ValueError(f"{PREFIX}{name} must be {kind}, got {value!r}") from None
    return arguments, rest


def check_names(names: Iterable[str]) -> None:
    """Raise ValueError if a name is not that of an argument of a Loader, or if LeRobot sets this argument."""
    for name in names:
        if name not in ARGUMENTS:
            raise ValueError(
                f"arguments of the Loader must be among {', '.join(ARGUMENTS)}, got {name!r}. LeRobot's own arguments set all "
                "others, such as --batch_size and --seed"
            )
