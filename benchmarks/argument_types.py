"""Types of arguments that several programs in this folder use."""

from __future__ import annotations

import argparse
from pathlib import Path


def count(text: str, least: int = 1) -> int:
    """Parse a whole number of at least `least`."""
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"must be a whole number of {least} or more, got {text!r}")
    return int(text)


def count_or_none(text: str) -> int:
    """Parse a whole number of 0 or more."""
    return count(text, 0)


def not_negative(text: str) -> float:
    """Parse a finite number of 0 or more."""
    if not 0 <= (number := float(text)) < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number of 0 or more, got {text!r}")
    return number


def positive(text: str) -> float:
    """Parse a finite number above 0."""
    if not (number := not_negative(text)):
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text!r}")
    return number


def new_file(text: str) -> Path:
    """Parse the path of an output file, and create its folder, so that a long measurement does not fail at its end."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"must be the path of a file, got the folder {text!r}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"must be a path that can be written, got {text!r}: {error}") from error
    return path
