"""Reader of mixture files, which contain the arguments of a `Mixture` as YAML or JSON."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dali_stream.lerobot.address import REPOSITORY

SUFFIXES = (".yaml", ".yml", ".json")
_NUMBER, _TEXT, _LIST, _DICT = (int, float), (str,), (list,), (dict,)
_NAMES = {int: "an integer", float: "a number", str: "a text", list: "a list", dict: "a dict", bool: "true or false"}
_MIXTURE: dict[str, tuple[type, ...]] = {
    "datasets": _DICT, "weights": _DICT, "repeats": _DICT, "temperature": _NUMBER, "epoch_samples": (int,), "keys": _DICT,
    "missing": _TEXT, "nearest": (bool,),
}  # fmt: skip
# Arguments of a `Dataset` that YAML or JSON can contain.
_DATASET: dict[str, tuple[type, ...]] = {
    "uri": _TEXT, "revision": _TEXT, "cameras": _LIST, "episodes": _LIST, "data_files_root": _TEXT, "storage_options": _DICT,
    "cache_dir": _TEXT, "cache_bytes": (int, str), "give_up_after_s": _NUMBER, "stats": _DICT, "frames": (dict, str),
    "drop_first": (int,), "drop_last": (int,), "clock": _TEXT, "tolerance_s": _NUMBER,
}  # fmt: skip
_PATHS = ("uri", "data_files_root", "cache_dir", "frames")  # arguments that may be relative to the file


def is_mixture_file(uri: str | os.PathLike[str]) -> bool:
    """Return whether the address of a dataset is a path with the suffix of a mixture file, and not a folder."""
    return "://" not in os.fspath(uri) and Path(uri).suffix.lower() in SUFFIXES and not Path(uri).is_dir()


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the arguments of a `Mixture` in a file. Each value in `datasets` is a dict of arguments of a `Dataset`.

    Relative paths are resolved relative to the folder of the file. A name such as "owner/name" is the id of a Hub dataset,
    unless this folder contains such a path.

    Raises:
        ValueError: If the file cannot be read, is not YAML or JSON, or has unknown keys or values of a wrong type.
    """
    path = Path(path).expanduser()
    try:
        content = _parsed(path)
        _check("the file", content, _MIXTURE, ("datasets",))
        datasets = {
            name: {"uri": arguments} if isinstance(arguments, str) else arguments
            for name, arguments in content["datasets"].items()
        }
        for name, arguments in datasets.items():
            if not isinstance(name, str):
                raise ValueError(f"the name of a dataset must be text, got {name!r}. Put it in quotes")
            _check(f"dataset {name!r}", arguments, _DATASET, ("uri",))
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ValueError(f"Cannot read mixture file {path}: {why}") from error
    return content | {"datasets": {name: _placed(arguments, path.absolute().parent) for name, arguments in datasets.items()}}


def _parsed(path: Path) -> Any:
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise ValueError(f"its name must end in {' or '.join(SUFFIXES)}, got {suffix or 'no suffix'!r}")
    text = path.read_text(encoding="utf-8")
    try:
        return json.loads(text, object_pairs_hook=_unique) if suffix == ".json" else _from_yaml(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"invalid JSON: {error}") from error


def _from_yaml(text: str) -> Any:
    import yaml

    class Loader(yaml.SafeLoader):
        """YAML loader that rejects duplicate keys and parses 1e6 as a number, as JSON does."""

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            _unique([(key.value, None) for key, _ in node.value if isinstance(key, yaml.ScalarNode)])
            return super().construct_mapping(node, deep)

    Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789"))
    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError as error:
        raise ValueError(f"invalid YAML: {' '.join(str(error).split())}") from error


def _unique(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    keys = [key for key, _ in pairs]
    if twice := [key for key in keys if keys.count(key) > 1]:
        raise ValueError(f"the key {twice[0]!r} is duplicated in one dict")
    return dict(pairs)


def _check(name: str, content: Any, allowed: Mapping[str, tuple[type, ...]], needed: tuple[str, ...]) -> None:
    """Raise ValueError unless a value is a dict with allowed keys and values of their types.

    Args:
        name: Subject of the message.
        content: Value to check.
        allowed: Allowed types of each key.
        needed: Keys that must be present.
    """
    if not isinstance(content, dict):
        raise ValueError(f"{name} must be a dict with the key {', '.join(needed)}, got {str(content)[:80]!r}")
    for key in needed:
        if key not in content:
            raise ValueError(f"{name} must have the key {key!r}, got {', '.join(map(str, content)) or 'no keys'}")
    for key, value in content.items():
        if key not in allowed:
            raise ValueError(f"Unknown key {key!r} in {name}. Allowed: {', '.join(allowed)}")
        types = allowed[key]
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            form = " or ".join(dict.fromkeys(_NAMES[each] for each in types))
            raise ValueError(f"{key} of {name} must be {form}, got {str(value)[:80]!r}")


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
