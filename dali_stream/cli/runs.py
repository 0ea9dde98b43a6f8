"""Options that name parts of a run: its state, and the function of its `dali_graph`."""

from __future__ import annotations

import functools
import importlib.util
import sys
import traceback
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from dali_stream.checks import file_content

StateFile = Annotated[
    Path | None,
    Option(
        metavar="FILE",
        help="State of a run: a checkpoint of torch.save that has Loader.state_dict() as 'loader', or the state as JSON.",
    ),
]
GraphFunction = Annotated[
    str | None,
    Option(metavar="FILE.py:NAME", help="Function for dali_graph, or a functools.partial of one."),
]


def _read(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises ValueError if the file cannot be read or contains something else."""
    try:
        content = file_content.from_json(file_content.read(path))
    except OSError as error:
        raise ValueError(f"--state must be a file that can be read, got {str(path)!r}: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"--state must be a JSON file, got {str(path)!r}: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"--state must be a JSON object, got a {type(content).__name__} in {str(path)!r}")
    return content


def state(path: Path) -> dict[str, Any]:
    """Return the state of a Loader in a file. The content is the state, or has it as "loader".

    Raises:
        ValueError: If the file cannot be read or contains something else.
    """
    content = _checkpoint(path) if zipfile.is_zipfile(path) else _read(path)
    saved = content.get("loader", content)
    if not isinstance(saved, dict) or not {"epoch", "position"} <= saved.keys():
        raise ValueError(
            f"--state must be Loader.state_dict() or a checkpoint that has it as 'loader', got {str(path)!r} without epoch and "
            "position"
        )
    return saved


def _checkpoint(path: Path) -> dict[Any, Any]:
    """Return the content of a file of `torch.save`. Tensors are mapped and not read."""
    import torch

    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        why = str(error).partition("\n")[0][:200]
        raise ValueError(f"--state must be a checkpoint that torch.load(weights_only=True) reads, got {path}: {why}") from None
    if not isinstance(content, dict):
        raise ValueError(f"--state must be a checkpoint with a dict, got a {type(content).__name__} in {str(path)!r}")
    return content


def graph(named: str | None) -> Callable[..., Any] | None:
    """Return the function that FILE.py:NAME names, or None.

    Args:
        named: Value of --dali-graph, or None.

    Raises:
        ValueError: If `named` has another form, or if the file or the function does not exist.
    """
    if named is None:
        return None
    file, separator, name = named.rpartition(":")
    path = Path(file)
    if not separator or path.suffix != ".py" or not path.is_file():
        raise ValueError(f"--dali-graph must be FILE.py:NAME with an existing file, got {named!r}")
    sys.path.insert(0, str(path.absolute().parent))  # as with `python FILE.py`, so that the file can import its neighbours
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ValueError(f"--dali-graph: {path} cannot be imported: {place_of(error, path)}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"--dali-graph must name a function in {file}, got {name!r}")
    return _placed(function, path)


def _placed(function: Callable[..., Any], path: Path) -> Callable[..., Any]:
    """Return a function whose errors say where in its file they were raised."""

    @functools.wraps(function)
    def placed(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except KeyError:  # which lists the keys of the argument
            raise
        except Exception as error:
            raise ValueError(f"--dali-graph: {place_of(error, path)}") from error

    return placed


def place_of(error: Exception, path: Path) -> str:
    """Return the place and the text of an error, such as "own.py, line 3, in graph: KeyError: 'top'"."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}, line {error.lineno}: SyntaxError: {error.msg}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if Path(frame.filename).resolve() == path.resolve()] or frames
    return f"{own[-1].filename}, line {own[-1].lineno}, in {own[-1].name}: {type(error).__name__}: {error}"
