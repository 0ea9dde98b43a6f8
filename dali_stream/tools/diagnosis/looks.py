"""Finding for a broken file: the error, and what the file contains according to its first bytes and the target of a link."""

from __future__ import annotations

import os
import re
from pathlib import Path

from dali_stream.errors import DaliStreamError
from dali_stream.mp4.boxes import BEGINNING, other_container
from dali_stream.storage import LocalStore, Store, lfs
from dali_stream.tools.diagnosis.report import PROBLEM, Finding

SHOWN = 16  # bytes shown: enough to recognize a format, but too few for the credentials that an error page may repeat
_FETCH = "fetch or copy it again"
_PAGE = f"{_FETCH}: a server's answer was saved in its place. Check the address, the login and the dataset's permissions"
_PACKED = "unpack it"
_BEGINNINGS = (  # (first bytes in lower case, format, remedy)
    (b"<!doctype", "an HTML page", _PAGE),
    (b"<html", "an HTML page", _PAGE),
    (b"<?xml", "XML, such as an error message of a storage service", _PAGE),
    (b"{", "JSON, such as an error message of a server", _PAGE),
    (b"\x1f\x8b", "gzip", _PACKED),
    (b"pk\x03\x04", "a ZIP archive", _PACKED),
    (b"\x28\xb5\x2f\xfd", "zstd", _PACKED),
    (b"\xfd7zxz", "xz", _PACKED),
    (b"par1", "Parquet", "the metadata names the wrong file, or files were mixed up. Copy the dataset again"),
    (b"version https://git-lfs", "a Git LFS pointer", lfs.REMEDY),
    (bytes(SHOWN), "zeros: its space was allocated and never written", _FETCH),
)


def broken(name: str, store: Store, path: str, error: DaliStreamError) -> Finding:
    """Return the finding for a file that cannot be read or decoded.

    Args:
        name: Name of the finding.
        store: Storage of the file.
        path: Path of the file in the storage.
        error: Error of the attempt to read or decode it.
    """
    looks, remedy = _look(store, path)
    if command := re.search("`ffmpeg .*?`", str(error)):  # the message of the error is more precise than the look of the file
        remedy = f"run {command[0]}, and replace the file by its output"
    text = ". ".join(filter(None, (located(store, path, error), looks)))
    return Finding("dataset", name, PROBLEM, text, remedy or "copy or fetch the dataset again")


def located(store: Store, path: str, error: DaliStreamError) -> str:
    """Return the message of an error, with the address of the file unless the message has it already."""
    where, text = store.where(path), str(error)
    return text if where in text else f"{where}: {text}"


def _look(store: Store, path: str) -> tuple[str, str]:
    """Return the description of a file and the remedy. Both are empty if the file cannot be read and is not a link."""
    place = _target(store, path)
    try:
        size, first = store.size(path), store.read(path, 0, BEGINNING)
    except DaliStreamError:
        return (f"It cannot be read{place}", "") if place else ("", "")
    if not size:
        return f"The file is empty{place}", _FETCH
    kind, remedy = _kind(first)
    shown = first[:SHOWN]
    printable = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in shown)
    return f"It looks like {kind}, of {size} bytes. The first are {shown.hex(' ')} ({printable}){place}", remedy


def _target(store: Store, path: str) -> str:
    """Return a sentence that names the target of a link. Empty for other files.

    The Hub's cache consists of links to files that are named by their hash.
    """
    if not isinstance(store, LocalStore):
        return ""
    name = Path(store.address, path)
    target = os.path.realpath(name)
    if target == str(name):
        return ""
    return f". Its name leads to {target}" + ("" if os.path.exists(target) else ", which does not exist")


def _kind(first: bytes) -> tuple[str, str]:
    if first[4:8] in (b"ftyp", b"moov", b"mdat", b"free", b"wide", b"skip"):
        return "an MP4", f"{_FETCH}, record it again, or exclude its episodes"
    container, remedy = other_container(first)
    if container:
        return container, f"{remedy[0].lower()}{remedy[1:]}"
    begin = first.lstrip().lower()
    kinds = ((kind, remedy) for start, kind, remedy in _BEGINNINGS if begin.startswith(start))
    return next(kinds, ("an unknown format", _FETCH))
