"""Values of command line options. typer's own errors do not say what was given."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from dali_stream import Dataset

# Where a dataset is read from: the same options for each command that reads one.
Revision = Annotated[str | None, typer.Option(metavar="REV", help="Branch, tag or commit of a Hub repository.")]
DataFilesRoot = Annotated[
    str | None, typer.Option(metavar="URI", help="Where data/ and videos/ lie, if not beside meta/: a storage bucket.")
]
CacheDir = Annotated[str | None, typer.Option(metavar="DIR", help="Keep fetched bytes in this folder, for later runs too.")]
StorageOptions = Annotated[
    str | None, typer.Option(metavar="JSON", help="Passed to fsspec, such as '{\"anon\": true}' for public S3.")
]


def dataset(uri: str, *, storage_options: str | None, **arguments: Any) -> Dataset:
    """The dataset that a command line names; the other arguments are those of `Dataset`."""
    from dali_stream import Dataset

    return Dataset(uri, storage_options=json_object("--storage-options", storage_options), **arguments)


def json_object(option: str, text: str | None) -> dict[str, Any] | None:
    """A JSON object. What was given is not in the error, since it may hold credentials."""
    if text is None:
        return None
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ValueError(f"""{option} is no JSON object; it is like '{{"anon": true}}'""")
    return found


def count(text: str | int) -> int:
    """A whole number of 1 or more; for `typer.Option(parser=...)`, as `natural`."""
    return _whole(text, 1)


def natural(text: str | int) -> int:
    """A whole number of 0 or more."""
    return _whole(text, 0)


def _whole(text: str | int, least: int) -> int:
    if not re.fullmatch(r"\d{1,18}", str(text)) or int(text) < least:
        raise typer.BadParameter(f"{str(text)!r} is no whole number of {least} or more")
    return int(text)


def size(option: str, text: str | None) -> tuple[int, int] | None:
    """ "240x320" as (height, width)."""
    if text is None:
        return None
    found = re.fullmatch(r"\s*(\d{1,5})\s*[x×X]\s*(\d{1,5})\s*", text)
    if not found:
        raise ValueError(f"{option} is {text!r}; it is HEIGHTxWIDTH in pixels, such as 240x320")
    return int(found[1]), int(found[2])


def numbers(option: str, text: str | None) -> list[int] | None:
    """ "0,3,5-8" as [0, 3, 5, 6, 7, 8]."""
    if text is None:
        return None
    found: list[int] = []
    for part in text.split(","):
        ends = re.fullmatch(r"\s*(\d{1,9})\s*(?:-\s*(\d{1,9})\s*)?", part)
        if not ends or int(ends[2] or ends[1]) < int(ends[1]):
            raise ValueError(f"{option} has {part.strip()!r}; it is numbers and ranges, such as 0,3,5-8")
        found += range(int(ends[1]), int(ends[2] or ends[1]) + 1)
    return found


def names(text: str | None) -> list[str] | None:
    """ "a, b" as ["a", "b"]."""
    return None if text is None else [name.strip() for name in text.split(",") if name.strip()]


def windows(option: str, texts: list[str]) -> dict[str, list[float]]:
    """["camera=-0.1,0", ...] as {"camera": [-0.1, 0.0]}."""
    found: dict[str, list[float]] = {}
    for text in texts:
        key, separator, values = text.rpartition("=")
        try:
            deltas = [float(value) for value in values.split(",")]
        except ValueError:
            deltas = []
        if not separator or not key or not deltas:
            raise ValueError(f"{option} is {text!r}; it is CAMERA=SECONDS,SECONDS,..., such as observation.images.top=-0.1,0")
        if key in found:
            raise ValueError(f"{option} names {key} twice; give all its seconds at once")
        found[key] = deltas
    return found


def png(option: str, path: Path) -> Path:
    """A path that a PNG can be written to, as far as can be told before the work is done."""
    if path.suffix.lower() != ".png":
        raise ValueError(f"{option} is {str(path)!r}; a contact sheet is a PNG, so its name ends in .png")
    if path.is_dir() or not path.absolute().parent.is_dir():
        found = "is a folder" if path.is_dir() else "lies in a folder that does not exist"
        raise ValueError(f"{option} is {str(path)!r}, which {found}; name a file in a folder that does")
    return path
