"""Reader of mixture files, which contain the arguments of a `Mixture` as YAML or JSON."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dali_stream.checks import file_content
from dali_stream.checks.file_content import DICT, FLAG, INTEGER, LIST, NUMBER, TEXT, Fields, check_fields
from dali_stream.lerobot.address import REPOSITORY

SUFFIXES = (".yaml", ".yml", ".json")
_MIXTURE: Fields = {
    "datasets": (DICT,), "weights": (DICT,), "repeats": (DICT,), "temperature": (NUMBER,), "epoch_samples": (INTEGER,),
    "keys": (DICT,), "missing": (TEXT,), "nearest": (FLAG,),
}  # fmt: skip
# Arguments of a `Dataset` that YAML or JSON can contain.
_DATASET: Fields = {
    "uri": (TEXT,), "revision": (TEXT,), "cameras": (LIST,), "episodes": (LIST,), "data_files_root": (TEXT,),
    "storage_options": (DICT,), "cache_dir": (TEXT,), "cache_bytes": (INTEGER, TEXT), "give_up_after_s": (NUMBER,),
    "stats": (DICT,), "frames": (DICT, TEXT), "drop_n_first_frames": (INTEGER,), "drop_n_last_frames": (INTEGER,),
    "clock": (TEXT,), "tolerance_s": (NUMBER,), "trust_timestamps": (FLAG,),
}  # fmt: skip
_PATHS = ("uri", "data_files_root", "cache_dir", "frames")  # arguments that may be relative to the file


def is_mixture_file(uri: str | os.PathLike[str]) -> bool:
    """Return whether the address of a dataset is a path with the suffix of a mixture file, and not a folder."""
    return "://" not in os.fspath(uri) and Path(uri).suffix.lower() in SUFFIXES and not Path(uri).is_dir()


def read(path: str | os.PathLike[str], options: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the arguments of a `Mixture` in a file. Each value in `datasets` is a dict of arguments of a `Dataset`.

    Relative paths are resolved relative to the folder of the file. A name such as "owner/name" is the id of a Hub dataset,
    unless this folder contains such a path.

    Args:
        path: Path to the file.
        options: Further arguments of each `Dataset`, which replace those of the file. Default: none.

    Raises:
        ValueError: If the file cannot be read, is not YAML or JSON, or has unknown keys or values of a wrong type, or if an
            option cannot apply to several datasets.
    """
    if options and "data_files_root" in options:
        raise ValueError("data_files_root belongs to one dataset. Write it into the mixture file")
    path = Path(path).expanduser()
    try:
        content = _parsed(path)
        check_fields("the file", content, _MIXTURE, ("datasets",), are_arguments=True)
        datasets = {
            name: {"uri": arguments} if isinstance(arguments, str) else arguments
            for name, arguments in content["datasets"].items()
        }
        for name, arguments in datasets.items():
            if not isinstance(name, str):
                raise ValueError(f"the name of a dataset must be text, got {name!r}. Put it in quotes")
            check_fields(f"dataset {name!r}", arguments, _DATASET, ("uri",), are_arguments=True)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ValueError(f"Cannot read mixture file {path}: {why}") from error
    folder = path.absolute().parent
    return content | {"datasets": {name: _placed(own, folder) | dict(options or {}) for name, own in datasets.items()}}


def _parsed(path: Path) -> Any:
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise ValueError(f"its name must end in {' or '.join(SUFFIXES)}, got {suffix or 'no suffix'!r}")
    data = file_content.read(path)
    return file_content.from_json(data) if suffix == ".json" else file_content.from_yaml(data)


def _placed(arguments: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the arguments of a dataset, with paths resolved relative to a folder."""
    placed = dict(arguments)
    for key in _PATHS:
        if isinstance(path := arguments.get(key), str) and "://" not in path:
            placed[key] = str(folder / Path(path).expanduser())
    uri = arguments["uri"]
    # If the working directory contains a path with the name of a Hub id, `Dataset` would open it. An address avoids this.
    if REPOSITORY.fullmatch(uri) and not (folder / uri).exists():
        placed["uri"] = f"hf://datasets/{uri}" if Path(uri).exists() else uri
    return placed
