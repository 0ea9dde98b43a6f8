"""Folders of decoded frames on disk: keys that determine pixels, their limit, and warnings about them."""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
import os
import platform
import shlex
import stat
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from dali_stream.checks.arguments import budget_text
from dali_stream.storage.local_files import replace_text

# Version of the files. Records of the former version had no hash of packets.
LAYOUT, _FORMER = "2", "1"
_SHARE = 16  # smallest part of the free space that a process may take, as 1/16
_LEAST_FREE = 64  # frames that must fit at least, since the size of the folder is counted again whenever it may be reached
_log = logging.getLogger("dali_stream")
NVDEC = "decoded and resized on"  # entry of the key of frames that NVDEC decoded


def pixel_key(
    shape: tuple[int, int, int],
    video: bool,
    images: bool,
    any_size: bool,
    nvdec: bool = False,
    depth: type[np.generic] | None = None,
) -> dict[str, str]:
    """Return a description of everything that determines the pixels of stored frames, besides the encoded video or images.

    Args:
        shape: Shape (height, width, channels) of the frames.
        video: Whether frames are decoded from video.
        images: Whether frames are decoded from images in rows.
        any_size: Whether images of another size than the metadata says are resized. Otherwise, they are an error.
        nvdec: Whether video is decoded and resized on a GPU, which rounds differently. Default: False.
        depth: Type of the stored values of a depth camera. Default: None, for other cameras.
    """
    import PIL
    import torch
    import torchcodec

    key = {
        "frames": "×".join(map(str, shape)) + " uint8",
        "resized with": "torch.nn.functional.interpolate, bilinear, antialias",
        "torch": torch.__version__,
        "processor": platform.machine(),
        "layout": LAYOUT,
    }
    if depth is not None:
        key |= {"frames": f"{'×'.join(map(str, shape))} depth {depth.__name__}"}
        key |= {"resized with": "torch.nn.functional.interpolate, nearest-exact"}
    if video and depth is not None:
        key |= {"PyAV": importlib.import_module("av").__version__}
    elif video:
        key |= {"torchcodec": torchcodec.__version__, "FFmpeg": _ffmpeg_version(torchcodec)}
    if video and nvdec:
        key |= {NVDEC: "NVDEC"}
    if images:
        key |= {"Pillow": PIL.__version__, "images of another size": "resized" if any_size else "refused"}
    return key


def _ffmpeg_version(torchcodec: ModuleType) -> str:
    """Return the version of the libavcodec that torchcodec has loaded, or FFmpeg's major version if it does not report one."""
    # The function is not documented. Without it, two minor versions of FFmpeg share their frames.
    versions: dict[str, Any] = getattr(importlib.import_module("torchcodec._core"), "get_ffmpeg_library_versions", dict)()
    if "libavcodec" not in versions:
        return str(torchcodec.ffmpeg_major_version)
    return f"libavcodec {'.'.join(map(str, versions['libavcodec']))}"


class FrameFolder:
    """Folder of a frame cache on disk, and the limit of its size.

    If the folder can no longer be written (full, read-only or removed), a warning is logged, and no more frames are added.
    Stored frames are still read.

    Args:
        folder: Path to the folder, which is created if it does not exist.
        limit: Maximum size of all files in it, in bytes on disk. None for no limit.
        sharers: Number of processes of this machine that are expected to write to it.

    Attributes:
        is_open: Whether frames can be added.
        is_writable: Whether the hashes of packets can be added, which take little space. It stays True at the size limit.

    Raises:
        ValueError: If the folder is a file or cannot be created, or if the limit is less than 1.
    """

    def __init__(self, folder: str | os.PathLike[str], limit: int | None, sharers: int = 1) -> None:
        if limit is not None and limit < 1:
            raise ValueError(f"frame_cache_bytes must be a positive number of bytes, or None for no limit, got {limit}")
        self.path, self._limit, self._sharers = Path(folder).expanduser().absolute(), limit, sharers
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(
                f"frame_cache must be a folder that can be created, got {str(folder)!r}: {error.strerror}"
            ) from error
        self._told: set[Path] = set()  # places that a warning has named
        self._warn_of_owner(self.path)
        self.is_open = self.is_writable = os.access(self.path, os.W_OK)
        if not self.is_open:
            _log.warning("frame_cache %s cannot be written. Frames that it has are read, and no others are added", self.path)
        self._is_version_told = False
        self._lock = threading.Lock()
        self._allowed = 0  # bytes that may be added before the size of the folder is counted again
        self._counts = False  # whether a thread counts it

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._lock = threading.Lock()
        self._allowed, self._counts = 0, False

    def subfolder(self, key: Mapping[str, str]) -> Path:
        """Return the path of the folder of the frames with a key, which is created if frames can be added.

        Warn if others own it, or if the folder has such frames in the former layout, which are not used.
        """
        old, own = (self.path / _name(_words({**key, "layout": layout})) for layout in (_FORMER, LAYOUT))
        if old.is_dir() and old not in self._told:
            self._told.add(old)
            command = f"`dali-stream frames remove {shlex.quote(str(self.path))} {old.name}`"
            _log.warning(
                "frame_cache %s has frames that an earlier version of dali_stream has stored. They are not used, because they "
                "may belong to another video. Remove them with %s",
                *(self.path, command),
            )
        self._warn_of_owner(own)
        if self.is_open:
            try:
                own.mkdir(exist_ok=True)
                replace_text(own / "key.json", _words(key) + "\n")  # by each run, so its time is that of the last use
            except OSError as error:
                self.failed(error)
        return own

    def _warn_of_owner(self, path: Path) -> None:
        """Warn once if another user than this one or root owns a folder, unless a common group may write to `path`."""
        with suppress(OSError):  # it does not exist yet
            owner, folder = path.stat().st_uid, self.path.stat()
            is_shared = folder.st_mode & stat.S_IWGRP and folder.st_gid in (os.getegid(), *os.getgroups())
            if owner not in (os.geteuid(), 0) and not is_shared and path not in self._told:
                self._told.add(path)
                _log.warning(
                    "frame_cache: %s belongs to another user (uid %d), who can change the frames of this run. Use a folder of "
                    "your own, or one to which a group that you share may write",
                    *(path, owner),
                )

    def size(self) -> int:
        """Return the size of all files in the folder, in bytes on disk."""
        total = 0
        for group, _, names in os.walk(self.path):
            for name in names:
                with suppress(OSError):  # removed meanwhile
                    total += os.lstat(os.path.join(group, name)).st_blocks * 512
        return total

    def reserve(self, size: int) -> bool:
        """Return whether `size` bytes may be added."""
        if self._limit is None or not self.is_open:
            return self.is_open
        with self._lock:
            if self._allowed >= size:
                self._allowed -= size
                return True
            if self._counts:
                return False  # rather than wait for the other thread
            self._counts = True
        free = self._limit - self.size()
        with self._lock:
            self._counts = False
            if free < _LEAST_FREE * size:
                self.is_open = False
                _log.info(
                    "frame_cache %s has reached its limit of %s: no more frames are added", self.path, budget_text(self._limit)
                )
                return False
            # Other processes add frames as well. Those of this run together may take half of what is free until they count
            # again, and each process at most a sixteenth.
            self._allowed = max(free // max(2 * self._sharers, _SHARE), size) - size
            return True

    def tell_of_unknown_version(self, where: str) -> None:
        """Warn once that the frames of some files are not stored, since their server sends no version. `where` is the first."""
        if not self._is_version_told:
            self._is_version_told = True
            _log.warning(
                "frame_cache: %s has no version that the server sends (ETag or Last-Modified), so the frames of such files are "
                "not stored",
                where,
            )

    def failed(self, error: OSError) -> None:
        """Add no more frames after an error, and log it."""
        if self._end():
            _log.warning("cannot write to frame_cache %s: %s. No more frames are added", self.path, error.strerror or error)

    def removed(self) -> None:
        """Add no more frames after files were removed that are in use, and log it."""
        if self._end():
            _log.warning("files of frame_cache %s were removed while they were in use. No more frames are added", self.path)

    def _end(self) -> bool:
        """Add nothing more. Return whether this is the first call."""
        with self._lock:
            first, self.is_open, self.is_writable = self.is_writable, False, False
        return first


def has_frames(folder: FrameFolder, key: Mapping[str, str]) -> bool:
    """Return whether a folder has frames with these pixels. See `pixel_key`."""
    with suppress(OSError):
        return any(path.is_dir() for path in (folder.path / _name(_words(key))).iterdir())
    return False


def _words(key: Mapping[str, str]) -> str:
    return json.dumps(key, indent=1, sort_keys=True, ensure_ascii=False)


def _name(words: str) -> str:
    return hashlib.blake2b(words.encode(), digest_size=8).hexdigest()
