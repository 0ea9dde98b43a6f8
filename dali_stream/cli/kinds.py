"""Kinds of options, each with its placeholder in the help and its parser: `Annotated[int, kinds.count(help="Timed batches.")]`.

A parser's error contains the allowed values and the wrong value, except for JSON, which may contain credentials. The program
writes the name of the option before it. Typer also passes defaults to a parser, so the parsers accept their own results.
"""

from __future__ import annotations

import argparse
import functools
import re
from pathlib import Path
from typing import Any

import typer

from dali_stream.checks.file_content import from_json
from dali_stream.checks.frame_size import frame_size as parsed_size

RECORDED = "recorded"  # value of --image-size for frames of the recorded size


def _count(text: str | int) -> int:
    """Parse a whole number of 1 or more."""
    return _whole(text, 1)


def _natural(text: str | int) -> int:
    """Parse a whole number of 0 or more."""
    return _whole(text, 0)


def _whole(text: str | int, least: int) -> int:
    if not re.fullmatch(r"\d{1,18}", str(text)) or int(text) < least:
        raise typer.BadParameter(f"must be a whole number of {least} or more, got {str(text)!r}")
    return int(text)


def _frame_size(text: str) -> tuple[int, int]:
    """Parse a size such as "240x320" as (height, width)."""
    try:
        return parsed_size(text)
    except argparse.ArgumentTypeError as error:
        raise typer.BadParameter(str(error)) from None


def _image_size(text: str) -> tuple[int, int] | str:
    """Parse a size such as "240x320" as (height, width), or "recorded" as itself."""
    return text if text == RECORDED else _frame_size(text)


def _numbers(text: str) -> list[int]:
    """Parse "0,3,5-8" as [0, 3, 5, 6, 7, 8]."""
    numbers: list[int] = []
    for part in text.split(","):
        ends = re.fullmatch(r"\s*(\d{1,9})\s*(?:-\s*(\d{1,9})\s*)?", part)
        if not ends or int(ends[2] or ends[1]) < int(ends[1]):
            raise typer.BadParameter(f"must be numbers and ranges, such as 0,3,5-8, got {part.strip()!r}")
        numbers += range(int(ends[1]), int(ends[2] or ends[1]) + 1)
    return numbers


def _names(text: str) -> list[str]:
    """Parse "a, b" as ["a", "b"]."""
    return [name.strip() for name in text.split(",") if name.strip()]


def _window(text: str) -> tuple[str, list[float]]:
    """Parse "camera=-0.1,0" as ("camera", [-0.1, 0.0])."""
    key, _, values = text.rpartition("=")
    try:
        deltas = [float(value) for value in values.split(",")]
    except ValueError:
        deltas = []
    if not key or not deltas:
        example = "observation.images.top=-0.1,0"
        raise typer.BadParameter(f"must be CAMERA=SECONDS,SECONDS,..., such as {example}, got {text!r}")
    return key, deltas


def _json_object(text: str) -> dict[str, Any]:
    """Parse a JSON object."""
    try:
        value = from_json(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise typer.BadParameter("""must be a JSON object, such as '{"key": "value"}'""")
    return value


def _png(path: str | Path) -> Path:
    """Parse the path of a PNG file in an existing folder."""
    path = Path(path)
    if path.suffix.lower() != ".png":
        raise typer.BadParameter(f"must end in .png, got {str(path)!r}")
    if path.is_dir() or not path.absolute().parent.is_dir():
        reason = "a folder" if path.is_dir() else "in a folder that does not exist"
        raise typer.BadParameter(f"must be a file in an existing folder, got {str(path)!r}, which is {reason}")
    return path


def _new_file(text: str) -> Path:
    """Parse the path of a file that does not exist, in an existing folder."""
    path = Path(text)
    if path.exists() or not path.absolute().parent.is_dir():
        reason = "exists" if path.exists() else "is in a folder that does not exist"
        raise typer.BadParameter(f"must be a new file in an existing folder, got {text!r}, which {reason}")
    return path


count = functools.partial(typer.Option, metavar="N", parser=_count)
natural = functools.partial(typer.Option, metavar="N", parser=_natural)
frame_size = functools.partial(typer.Option, metavar="HxW", parser=_frame_size)
image_size = functools.partial(typer.Option, metavar=f"HxW|{RECORDED}", parser=_image_size)
numbers = functools.partial(typer.Option, metavar="LIST", parser=_numbers)
names = functools.partial(typer.Option, metavar="LIST", parser=_names)
window = functools.partial(typer.Option, metavar="KEY=SECONDS", parser=_window)
json_object = functools.partial(typer.Option, metavar="JSON", parser=_json_object)
png = functools.partial(typer.Option, metavar="PNG", parser=_png)
new_file = functools.partial(typer.Option, metavar="FILE", parser=_new_file)
