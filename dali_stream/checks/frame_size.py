"""Sizes of frames on command lines: `--image-size 240 320` and `--image-size 240x320`."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence


def frame_size(text: str) -> tuple[int, int]:
    """Return a size such as "240x320" as (height, width) in pixels. This function is a `type` for argparse.

    Raises:
        argparse.ArgumentTypeError: If the text is not a size.
    """
    size = re.fullmatch(r"\s*0*([1-9]\d{0,4})(?:\s*[x×X]\s*|\s+)0*([1-9]\d{0,4})\s*", text)
    if not size:
        raise argparse.ArgumentTypeError(
            f"must be HEIGHTxWIDTH or HEIGHT WIDTH, a height and a width in pixels such as 240x320 or 240 320, got {text!r}"
        )
    return int(size[1]), int(size[2])


def join_sizes(words: Sequence[str] | None = None, options: Sequence[str] = ("--image-size",)) -> list[str]:
    """Return a command line in which `--image-size 240 320` is replaced with `--image-size 240x320`.

    In argparse and typer, an option with a variable number of values would also consume the argument that follows, such as the
    address of a dataset.

    Args:
        words: Command line without the program's name. Default: the command line of this process.
        options: Names of the options whose value is a size. Default: `--image-size`.
    """
    rest = list(sys.argv[1:] if words is None else words)
    joined: list[str] = []
    while rest:
        option, equals, value = rest[0].partition("=")
        if option in options and equals:
            rest[:1] = [option, value]
        word, *sizes = rest[:3]
        if word in options and len(sizes) == 2 and all(size.isdecimal() for size in sizes):
            joined += [word, "x".join(sizes)]
            del rest[:3]
        else:
            joined.append(rest.pop(0))
    return joined
