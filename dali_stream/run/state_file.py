"""JSON files that are replaced atomically, such as those with the state of a Loader in LeRobot's checkpoints."""

from __future__ import annotations

import contextlib
import json
import os
import re
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dali_stream.checks import file_content
from dali_stream.errors import ResumeError

PathName = str | os.PathLike[str]
_LEFTOVER_S = 600.0  # age in seconds from which a temporary file belongs to no process that is still writing


def write_state(path: PathName, state: Mapping[str, Any]) -> None:
    """Write a state to a file as JSON. An existing file is replaced atomically.

    A process that is killed at any moment leaves either the previous file or the new one. The temporary file has a unique name,
    so several processes may write to the same path. It may stay if the process is killed. A later call removes it.

    Raises:
        OSError: If the file cannot be written. An existing file is unchanged.
    """
    target = Path(os.path.realpath(path))  # a symbolic link is kept, and its target is replaced
    partial = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    try:
        with partial.open("x") as file:
            json.dump(state, file)
            file.flush()
            os.fsync(file.fileno())
            now = os.fstat(file.fileno()).st_mtime  # by the clock of the file system, which may be that of a server
        os.replace(partial, target)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    _sync_folder(target.parent)
    _remove_leftovers(target, now - _LEFTOVER_S)


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


def _remove_leftovers(target: Path, before: float) -> None:
    """Remove temporary files of killed processes. Younger ones may belong to a process that is writing.

    Args:
        target: File that the processes wrote.
        before: Time in seconds since 1970. Files that were changed later are kept.
    """
    name = re.compile(re.escape(f".{target.name}.") + "[0-9a-f]{32}")
    with contextlib.suppress(OSError), os.scandir(target.parent) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):  # another process has removed it
                if name.fullmatch(entry.name) and entry.stat(follow_symlinks=False).st_mtime < before:
                    os.unlink(entry.path)


def _sync_folder(folder: Path) -> None:
    """Write the entries of a folder to disk, so that a new file survives a power failure. Some systems cannot do this."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
