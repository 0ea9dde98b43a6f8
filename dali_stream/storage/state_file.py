"""JSON files that are replaced atomically, such as those with the state of a Loader in LeRobot's checkpoints."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dali_stream.checks import file_content
from dali_stream.errors import ResumeError
from dali_stream.storage.local_files import replace_text

PathName = str | os.PathLike[str]
_LEFTOVER_S = 600.0  # age in seconds from which a temporary file belongs to no process that is still writing


def write_state(path: PathName, state: Mapping[str, Any]) -> None:
    """Write a state to a file as JSON. An existing file is replaced atomically.

    See `replace_text`. A later call removes the temporary file of a process that was killed.

    Raises:
        OSError: If the file cannot be written. An existing file is unchanged.
    """
    target = Path(os.path.realpath(path))  # a symbolic link is kept, and its target is replaced
    replace_text(target, json.dumps(state), sync=True)
    _remove_leftovers(target)


def load_state(path: PathName, load_state_dict: Callable[[Mapping[str, Any]], None]) -> bool:
    """Pass the state in a file to `load_state_dict`. Return False if the file does not exist.

    Raises:
        ResumeError: If the file is damaged, or `load_state_dict` refuses its state. The message names the file.
    """
    try:
        data = file_content.read(path)
    except FileNotFoundError:
        return False
    except ValueError as error:
        raise ResumeError(f"{os.fspath(path)}: {error}") from error
    try:
        state = file_content.from_json(data)
    except ValueError as error:
        content = "is empty" if not data else f"is not JSON that can be read ({error})"
        raise ResumeError(f"{os.fspath(path)} {content}. Remove it to start from the beginning, or restore a copy") from error
    try:
        load_state_dict(state)
    except ResumeError as error:
        raise ResumeError(f"{os.fspath(path)}: {error}") from error
    return True


def _remove_leftovers(target: Path) -> None:
    """Remove temporary files of processes that were killed while they wrote `target`, which was written just now."""
    name = re.compile(re.escape(f".{target.name}.") + "[0-9a-f]{32}")
    with contextlib.suppress(OSError), os.scandir(target.parent) as entries:
        before = target.stat().st_mtime - _LEFTOVER_S  # by the clock of the file system, which may be that of a server
        for entry in entries:
            with contextlib.suppress(OSError):  # another process has removed it
                if name.fullmatch(entry.name) and entry.stat(follow_symlinks=False).st_mtime < before:
                    os.unlink(entry.path)
