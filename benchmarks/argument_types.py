"""Types of arguments that several programs in this folder use."""

from __future__ import annotations

import argparse
import math
from pathlib import Path


def count(text: str) -> int:
    """Parse a whole number of 1 or more."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of 1 or more")
    return int(text)


def count_or_none(text: str) -> int:
    """Parse a whole number of 0 or more."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of 0 or more")
    return int(text)


def positive(text: str) -> float:
    """Parse a finite number above 0."""
    if not 0 < (number := _number(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return number


def not_negative(text: str) -> float:
    """Parse a finite number of 0 or more."""
    if not 0 <= (number := _number(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of 0 or more")
    return number


def new_file(text: str) -> Path:
    """Parse the path of an output file, and create its folder, so that a long measurement does not fail at its end."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is a folder; give the name of a file")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written: {error}") from error
    return path


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
