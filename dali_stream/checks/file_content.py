"""Content of JSON and YAML files that others may have written: states of runs, mixtures, ranges of frames.

Everything in such a file is checked here for its type and range before it is used, so that a small file cannot take much memory
or time. Programs call `read` and `from_json` or `from_yaml`, and `check_fields` for each dict with known keys.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from dali_stream.checks.arguments import hint, similar

LARGEST = 64 << 20  # maximum size of a file in bytes
_DEEPEST = 50  # maximum number of lists and dicts inside each other
_MOST_NODES = 1_000_000  # maximum number of values of a YAML file, with those of an alias counted at each use


class Kind(NamedTuple):
    """Allowed values: their description for messages, and a function that returns whether a value is one of them."""

    text: str
    fits: Callable[[Any], bool]


def whole(least: int, most: int) -> Kind:
    """Return the kind of integers in [least, most]."""
    return Kind(f"an integer from {least} to {most}", lambda value: type(value) is int and least <= value <= most)


def array_of(kind: Kind, text: str, length: int) -> Kind:
    """Return the kind of lists of `length` values of one kind."""
    return Kind(text, lambda value: isinstance(value, list) and len(value) == length and all(map(kind.fits, value)))


def one_of_texts(*texts: str) -> Kind:
    """Return the kind of some texts."""
    return Kind(" or ".join(map(repr, texts)), lambda value: isinstance(value, str) and value in texts)


INTEGER = Kind("an integer", lambda value: type(value) is int and -(1 << 63) <= value < 1 << 63)
NUMBER = Kind("a number", lambda value: type(value) in (int, float) and abs(value) <= 1e300)  # this is False for NaN
TEXT = Kind("a text", lambda value: isinstance(value, str))
FLAG = Kind("true or false", lambda value: isinstance(value, bool))
LIST = Kind("a list", lambda value: isinstance(value, list))
DICT = Kind("a dict", lambda value: isinstance(value, dict))
NULL = Kind("null", lambda value: value is None)
Fields = Mapping[str, tuple[Kind, ...]]
"""Allowed kinds of the value of each key."""


def check_fields(
    name: str, content: Any, allowed: Fields, needed: tuple[str, ...], *, are_arguments: bool = False
) -> dict[str, Any]:
    """Return a value that is a dict with allowed keys, whose values are of allowed kinds.

    Args:
        name: Subject of the message.
        content: Value to check.
        allowed: Allowed kinds of each key.
        needed: Keys that must be present.
        are_arguments: Whether the keys are arguments of a class, so that the message for an unknown key names the class
            that has it. Default: False.

    Raises:
        ValueError: If the value is anything else.
    """
    if not isinstance(content, dict):
        form = f"a dict with the key {', '.join(needed)}" if needed else "a dict"
        raise ValueError(f"{name} must be {form}, got {str(content)[:80]!r}")
    for key in needed:
        if key not in content:
            raise ValueError(f"{name} must have the key {key!r}, got {', '.join(map(str, content))[:200] or 'no keys'}")
    for key, value in content.items():
        if key not in allowed:
            advice = (hint if are_arguments else similar)(str(key)[:80], allowed)
            raise ValueError(f"Unknown key {str(key)[:80]!r} in {name}.{advice} Allowed: {', '.join(allowed)}")
        if not any(kind.fits(value) for kind in allowed[key]):
            form = " or ".join(dict.fromkeys(kind.text for kind in allowed[key]))
            raise ValueError(f"{key} of {name} must be {form}, got {str(value)[:80]!r}")
    return content


def read(path: str | os.PathLike[str]) -> bytes:
    """Return the bytes of a file.

    Raises:
        ValueError: If the file is too large.
        OSError: If it cannot be read.
    """
    with open(path, "rb") as file:
        data = file.read(LARGEST + 1)  # the size of a device or a pipe is unknown
    if len(data) > LARGEST:
        raise ValueError(f"the file must have at most {LARGEST >> 20} MiB")
    return data


def from_json(data: str | bytes) -> Any:
    """Return the content of a JSON text. Raises ValueError if it is not JSON, has a duplicate key, or is too deep."""
    try:
        content = json.loads(data, object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        raise ValueError(f"invalid JSON: {error}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"invalid JSON: not UTF-8 ({error.reason} at byte {error.start})") from error
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    level, depth = [content], 0
    while level:
        depth += 1
        if depth > _DEEPEST:
            raise ValueError(_TOO_DEEP)
        level = [inner for outer in level for inner in _inner(outer)]
    return content


_TOO_DEEP = f"at most {_DEEPEST} lists and dicts may be inside each other"


def _inner(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []


def from_yaml(data: bytes) -> Any:
    """Return the content of a YAML text.

    Raises:
        ValueError: If it is not YAML, has a duplicate key, is too deep, or has aliases that make it too large.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        """YAML loader that rejects duplicate keys and parses 1e6 as a number, as JSON does."""

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            _unique([(key.value, None) for key, _ in node.value if isinstance(key, yaml.ScalarNode)])
            return super().construct_mapping(node, deep)

        def get_single_node(self) -> Any:
            node = super().get_single_node()
            if node is not None and _nodes(node, {}, 1) > _MOST_NODES:
                raise ValueError(f"its aliases must not expand to more than {_MOST_NODES} values")
            return node

    Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789"))
    try:
        return yaml.load(data, Loader)
    except yaml.YAMLError as error:
        raise ValueError(f"invalid YAML: {' '.join(str(error).split())}") from error
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None


def _nodes(node: Any, known: dict[int, float], depth: int) -> float:
    """Return the number of values of a YAML node, with those of an alias counted at each use."""
    if depth > _DEEPEST:  # also a node that contains itself
        raise ValueError(_TOO_DEEP)
    if id(node) not in known:
        children = node.value if isinstance(node.value, list) else []
        flat = [child for pair in children for child in (pair if isinstance(pair, tuple) else (pair,))]
        known[id(node)] = 1 + math.fsum(_nodes(child, known, depth + 1) for child in flat)
    return known[id(node)]


def _unique(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[Any] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"the key {str(key)[:80]!r} is duplicated in one dict")
            seen.add(key)
    return found
