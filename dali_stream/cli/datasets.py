"""Datasets of a command line: one address, several, or a mixture file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, closing
from typing import Any

from dali_stream import Dataset, Mixture
from dali_stream.checks.text import listed
from dali_stream.lerobot import mixture_file


def opened(uris: Sequence[str], options: Mapping[str, Any]) -> AbstractContextManager[Dataset | Mixture]:
    """Return a context manager that opens and closes the dataset or the mixture of a command line.

    Args:
        uris: Addresses of the datasets, or a mixture file.
        options: Arguments of each `Dataset`.
    """
    mixture = mixture_arguments(uris, options)
    return closing(Mixture(**mixture) if mixture else Dataset(uris[0], **options))


def mixture_arguments(uris: Sequence[str], options: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the arguments of the `Mixture` of a command line, or None for a single dataset.

    Options apply to each dataset. Without a mixture file, features that a dataset lacks are padded.

    Raises:
        ValueError: If an option or the combination of URIs is not allowed.
    """
    files = [uri for uri in uris if mixture_file.is_mixture_file(uri)]
    if len(uris) == 1 and not files:
        return None
    if len(uris) > 1 and files:
        raise ValueError(f"A mixture file must be the only URI, got {files[0]} and {len(uris) - 1} more")
    if files:
        return mixture_file.read(files[0], options)
    if "data_files_root" in options:
        raise ValueError("--data-files-root belongs to one dataset. Write it into a mixture file, as data_files_root")
    return {"datasets": {name: {"uri": uri, **options} for name, uri in _named(uris)}, "missing": "pad"}


def _named(uris: Sequence[str]) -> list[tuple[str, str]]:
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


def check_action(action: str | None, dataset: Dataset | Mixture) -> None:
    """Raise ValueError unless --action is the key of a feature that contains numbers, or None."""
    numbers = [key for key, feature in dataset.features.items() if not feature.is_camera and not feature.is_text]
    if action is not None and action not in numbers:
        raise ValueError(f"--action must be a feature with numbers, got {action!r}. Available: {listed(numbers)}")
