"""Options that several commands share, and parsers of their values.

Unlike typer's parsers, these report the invalid value, except for JSON, which may contain credentials.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from dali_stream import Dataset, Mixture
from dali_stream.checks.file_content import from_json
from dali_stream.checks.frame_size import frame_size
from dali_stream.checks.text import listed
from dali_stream.run.mixture_file import is_mixture_file

Uri = Annotated[str, typer.Argument(metavar="URI", help="The dataset.")]
Uris = Annotated[
    list[str], typer.Argument(metavar="URI...", help="The dataset; or several, or a mixture file (.yaml, .yml or .json).")
]
Episodes = Annotated[str | None, typer.Option(metavar="LIST", help="Only these episodes, such as 0,3,5-8.")]
Cameras = Annotated[str | None, typer.Option(metavar="LIST", help="Only these cameras, separated by commas.")]
Action = Annotated[
    str | None, typer.Option(metavar="KEY", help="Feature with the actions. Default: 'action', or the only one like it.")
]
# Options of `DatasetOptions`.
Revision = Annotated[str | None, typer.Option(metavar="REV", help="Branch, tag or commit of a Hub repository.")]
DataFilesRoot = Annotated[
    str | None, typer.Option(metavar="URI", help="Location of data/ and videos/ if not next to meta/, such as a bucket.")
]
CacheDir = Annotated[str | None, typer.Option(metavar="DIR", help="Cache fetched bytes in this folder, for later runs too.")]
StorageOptions = Annotated[
    str | None,
    typer.Option(metavar="JSON", help="Storage options such as credentials, for example '{\"anon\": true}' for public S3."),
]
Clock = Annotated[
    str | None,
    typer.Option(
        metavar="timestamp|frame_index",
        help="Locate frames by timestamp (default), or by frame_index / fps for wall-clock timestamps.",
    ),
]
ToleranceS = Annotated[
    float | None,
    typer.Option(metavar="SECONDS", help="Largest distance of a frame from its row's time. Default: a quarter of a frame."),
]
# Options of the commands that make a Loader.
FrameCache = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Keep decoded frames in this folder, for all ranks and for later runs.")
]
FrameCacheBytes = Annotated[
    str | None, typer.Option(metavar="SIZE", help="Size limit of --frame-cache, such as 200GiB. Default: none on a disk.")
]


@dataclass(frozen=True)
class DatasetOptions:
    """Options of all commands that read a dataset, which `with_dataset_options` adds to a command. See `Dataset`."""

    revision: Revision = None
    data_files_root: DataFilesRoot = None
    cache_dir: CacheDir = None
    storage_options: StorageOptions = None
    clock: Clock = None
    tolerance_s: ToleranceS = None

    def arguments(self, **more: Any) -> dict[str, Any]:
        """Return the arguments of `Dataset`, without those that are None.

        Args:
            more: Further arguments of `Dataset`.

        Raises:
            ValueError: If --storage-options is not a JSON object.
        """
        stored = json_object("--storage-options", self.storage_options)
        given = vars(self) | {"storage_options": stored} | more
        return {name: value for name, value in given.items() if value is not None}


def with_dataset_options(command: Callable[..., None], without: Sequence[str] = ()) -> Callable[..., None]:
    """Decorator that gives a command the options of `DatasetOptions`, and passes them as its first argument.

    Args:
        command: Function of a typer command.
        without: Options that the command does not have. Default: none.
    """
    kinds = get_type_hints(DatasetOptions, include_extras=True)
    own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
    added = [
        inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None, annotation=kind)
        for name, kind in kinds.items()
        if name not in without
    ]

    @functools.wraps(command)
    def run(**given: Any) -> None:
        command(DatasetOptions(**{each.name: given.pop(each.name) for each in added}), **given)

    # typer reads both.
    run.__signature__ = inspect.Signature([*own, *added])  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in (*own, *added)}
    return run


def opened_mixture(uris: Sequence[str], **arguments: Any) -> AbstractContextManager[Dataset | Mixture]:
    """Return a context manager that opens and closes the dataset or the mixture of a command line.

    Args:
        uris: Addresses of the datasets, or a mixture file.
        arguments: Arguments of each `Dataset`.
    """
    mixture = mixture_arguments(uris, **arguments)
    return closing(Mixture(**mixture) if mixture else Dataset(uris[0], **arguments))


def check_action(action: str | None, dataset: Dataset | Mixture) -> None:
    """Raise ValueError unless --action is the key of a feature that contains numbers, or None."""
    numbers = [key for key, feature in dataset.features.items() if not feature.is_camera and not feature.is_text]
    if action is not None and action not in numbers:
        raise ValueError(f"--action must be a feature with numbers, got {action!r}. Available: {listed(numbers)}")


def mixture_arguments(uris: Sequence[str], **arguments: Any) -> dict[str, Any] | None:
    """Return the arguments of the `Mixture` of a command line, or None for a single dataset.

    Options apply to each dataset. Without a mixture file, features that a dataset lacks are padded.

    Raises:
        ValueError: If an option or the combination of URIs is not allowed.
    """
    files = [uri for uri in uris if is_mixture_file(uri)]
    if len(uris) == 1 and not files:
        return None
    if len(uris) > 1 and files:
        raise ValueError(f"A mixture file must be the only URI, got {files[0]} and {len(uris) - 1} more")
    options = {name: value for name, value in arguments.items() if value is not None}
    if "data_files_root" in options:
        raise ValueError("--data-files-root belongs to one dataset. Write it into a mixture file, as data_files_root")
    if files:
        mixture = Mixture.file_arguments(files[0])
    else:
        mixture = {"datasets": {name: {"uri": uri} for name, uri in named(uris)}, "missing": "pad"}
    return mixture | {"datasets": {name: each | options for name, each in mixture["datasets"].items()}}


def named(uris: Sequence[str]) -> list[tuple[str, str]]:
    """Return (name, URI) of each dataset.

    The name is the last part of the path, or as many of the last parts as make it unique.

    Raises:
        ValueError: If a URI appears twice.
    """
    paths = [[part for part in uri.split("/") if part] for uri in uris]
    names = []
    for uri, path in zip(uris, paths, strict=True):
        if paths.count(path) > 1:
            raise ValueError(f"Datasets must differ, got {uri} twice")
        tails = (path[-count:] for count in range(1, len(path) + 1))
        alone = [tail for tail in tails if sum(other[-len(tail) :] == tail for other in paths) == 1]
        names.append(("/".join(alone[0] if alone else path), uri))
    return names


def json_object(option: str, text: str | None) -> dict[str, Any] | None:
    """Return a JSON object, or None. The ValueError for other texts does not quote them, since they may contain credentials."""
    if text is None:
        return None
    try:
        value = from_json(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ValueError(f"""{option} must be a JSON object, such as '{{"anon": true}}'""")
    return value


def count(text: str | int) -> int:
    """Parse a whole number of 1 or more, for `typer.Option(parser=...)`."""
    return _whole(text, 1)


def natural(text: str | int) -> int:
    """Parse a whole number of 0 or more, for `typer.Option(parser=...)`."""
    return _whole(text, 0)


def _whole(text: str | int, least: int) -> int:
    if not re.fullmatch(r"\d{1,18}", str(text)) or int(text) < least:
        raise typer.BadParameter(f"must be a whole number of {least} or more, got {str(text)!r}")
    return int(text)


def size(option: str, text: str | None) -> tuple[int, int] | None:
    """Return (height, width) of a text such as "240x320", or None. Raises ValueError if it is invalid."""
    try:
        return None if text is None else frame_size(text)
    except argparse.ArgumentTypeError as error:
        raise ValueError(f"{option} {error}") from None


def numbers(option: str, text: str | None) -> list[int] | None:
    """Return [0, 3, 5, 6, 7, 8] for "0,3,5-8", or None for None. Raises ValueError for other texts."""
    if text is None:
        return None
    numbers: list[int] = []
    for part in text.split(","):
        ends = re.fullmatch(r"\s*(\d{1,9})\s*(?:-\s*(\d{1,9})\s*)?", part)
        if not ends or int(ends[2] or ends[1]) < int(ends[1]):
            raise ValueError(f"{option} must be numbers and ranges, such as 0,3,5-8, got {part.strip()!r}")
        numbers += range(int(ends[1]), int(ends[2] or ends[1]) + 1)
    return numbers


def names(text: str | None) -> list[str] | None:
    """Return ["a", "b"] for "a, b", or None for None."""
    return None if text is None else [name.strip() for name in text.split(",") if name.strip()]


def windows(option: str, texts: list[str]) -> dict[str, list[float]]:
    """Return {"camera": [-0.1, 0.0]} for ["camera=-0.1,0"]. Raises ValueError for an invalid or repeated window."""
    windows: dict[str, list[float]] = {}
    for text in texts:
        key, separator, values = text.rpartition("=")
        try:
            deltas = [float(value) for value in values.split(",")]
        except ValueError:
            deltas = []
        if not separator or not key or not deltas:
            example = "observation.images.top=-0.1,0"
            raise ValueError(f"{option} must be CAMERA=SECONDS,SECONDS,..., such as {example}, got {text!r}")
        if key in windows:
            raise ValueError(f"{option} must have each camera once, got {key} twice. Write all of its seconds in one option")
        windows[key] = deltas
    return windows


def png(option: str, path: Path) -> Path:
    """Check the path of a PNG file before the work is done, and return it.

    Raises:
        ValueError: If the path does not end in .png, is a folder, or is in a folder that does not exist.
    """
    if path.suffix.lower() != ".png":
        raise ValueError(f"{option} must end in .png, got {str(path)!r}")
    if path.is_dir() or not path.absolute().parent.is_dir():
        reason = "a folder" if path.is_dir() else "in a folder that does not exist"
        raise ValueError(f"{option} must be a file in an existing folder, got {str(path)!r}, which is {reason}")
    return path
