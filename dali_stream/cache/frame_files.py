"""Decoded frames on disk, which all processes of a machine and later runs share.

    <folder>/1f0c…/key.json    what determines the pixels of the frames in this folder, in words
    <folder>/1f0c…/claims00    empty, as claims01 to claims30, see `Claims`
    <folder>/1f0c…/9b/9b41…    frames of one video file, or of the images of one episode

A file of records is named by what its frames are decoded from. For a video file, the name is a hash of its index and of
`Store.identity`, and each packet has a record. For images in rows, it is a hash of all images of an episode, and each image
has a record. Record k of n, of `record` bytes, is at `k * record`. A record that was never written takes no space. Its
checksum is at `n * record + 8 * k`: the XXH3 hash of the record with 64 bits, seeded with the name of the file and k, or 0 if
it has no frame.

Reading and writing need no locks. Processes that write the same frame write the same bytes, and the checksum is written after
the record. If a process dies or a disk loses data, the checksum does not match the record, and the frame is decoded again. A
checksum detects damage, but not forgery: users who can write to the folder are trusted.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
import os
import platform
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from dali_stream.cache.claims import Claims
from dali_stream.checks.arguments import budget_text
from dali_stream.checks.arrays import NONE, Mask
from dali_stream.mp4.index import VideoIndex
from dali_stream.storage import Store
from dali_stream.storage.local_files import NO_FOLLOW, OpenFiles, replace_text, write_at

Frame = npt.NDArray[Any]
_CHECKSUM = 8  # bytes of a checksum
_SAMPLE = 64 << 10  # maximum number of bytes of a video's first packet in its name
_SHARE = 16  # smallest part of the free space that a process may take, as 1/16
_LEAST_FREE = 64  # frames that must fit at least, since the size of the folder is counted again whenever it may be reached
_log = logging.getLogger("dali_stream")


class RecordName(NamedTuple):
    """Name of a file of records.

    Attributes:
        content: Hash that identifies the encoded video or images, in hexadecimal digits.
        records: Number of records: the packets of a video file, or the images of an episode.
    """

    content: str
    records: int


def video_name(store: Store, index: VideoIndex) -> RecordName | None:
    """Return the name under which the frames of a video file are stored. None if the store cannot tell versions apart.

    Args:
        store: Store that has read the index.
        index: Index of the file.
    """
    # The sizes of all packets are in the hash of the index, so files with equal names have equal frames, unless they were
    # replaced on purpose. Videos of a constant picture may have equal sizes, but not an equal first packet.
    start, stop = int(index.offset[0]), int(index.end[0])
    identity = store.identity(index.path, start, min(stop, start + _SAMPLE))
    content = xxhash.xxh3_128_hexdigest(f"{index.moov_hash} {identity}".encode())
    return RecordName(content, len(index)) if identity else None


def image_name(images: npt.NDArray[np.object_]) -> RecordName:
    """Return the name under which the frames of an episode are stored whose encoded images, as bytes, are in its rows."""
    digest = xxhash.xxh3_128()
    for data in images.tolist():
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return RecordName(digest.hexdigest(), len(images))


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
        "layout": "1",
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
        self.is_open = os.access(self.path, os.W_OK)
        if not self.is_open:
            _log.warning("frame_cache %s cannot be written. Frames that it has are read, and no others are added", self.path)
        self._lock = threading.Lock()
        self._allowed = 0  # bytes that may be added before the size of the folder is counted again
        self._counts = False  # whether a thread counts it

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

    def failed(self, error: OSError) -> None:
        """Add no more frames after an error, and log it."""
        with self._lock:
            first, self.is_open = self.is_open, False
        if first:
            _log.warning("cannot write to frame_cache %s: %s. No more frames are added", self.path, error.strerror or error)


def has_frames(folder: FrameFolder, key: Mapping[str, str]) -> bool:
    """Return whether a folder has frames with these pixels. See `pixel_key`."""
    with suppress(OSError):
        return any(path.is_dir() for path in (folder.path / _name(_words(key))).iterdir())
    return False


def _words(key: Mapping[str, str]) -> str:
    return json.dumps(key, indent=1, sort_keys=True, ensure_ascii=False)


def _name(words: str) -> str:
    return hashlib.blake2b(words.encode(), digest_size=8).hexdigest()


class FrameFiles:
    """Stored frames of one shape. Safe to use from several threads and processes.

    Args:
        folder: Folder of the cache.
        key: Description of everything that determines the pixels. See `pixel_key`.
        record: Bytes of a frame.

    Attributes:
        added: (episode, frame) of each frame that was stored after its batch was planned. The decoder appends to it.
    """

    def __init__(self, folder: FrameFolder, key: Mapping[str, str], record: int) -> None:
        words = _words(key)
        self._folder, self._record = folder, record
        self._root = folder.path / _name(words)
        self._readers = OpenFiles(self._root, os.O_RDONLY | NO_FOLLOW)
        self.added: deque[tuple[int, int]] = deque()
        self._writers = OpenFiles(self._root, os.O_WRONLY | os.O_CREAT | NO_FOLLOW)
        self._claims = Claims(self._root)
        if folder.is_open:
            try:
                self._root.mkdir(exist_ok=True)
                replace_text(self._root / "key.json", words + "\n")  # by each run, so its time is that of the last use
            except OSError as error:
                folder.failed(error)

    @property
    def is_open(self) -> bool:
        """Whether frames can be added."""
        return self._folder.is_open

    def take_added(self) -> list[tuple[int, int]]:
        """Return the frames that were added since the last call. See `added`."""
        return [self.added.popleft() for _ in range(len(self.added))]

    def stored(self, name: RecordName, numbers: npt.NDArray[np.integer]) -> Mask:
        """Return which records have a frame, with the shape of `numbers`. Their frames are not checked.

        Args:
            name: Name of the file.
            numbers: Numbers of records. There is none for the number `NONE`.
        """
        stored, exists = np.zeros(numbers.shape, np.bool_), numbers != NONE
        if exists.any():
            own = numbers[exists]
            first, count = int(own.min()), int(np.ptp(own)) + 1
            checksums = np.zeros(count, "<u8")
            with suppress(OSError):  # no file exists yet, or it cannot be read
                file = self._readers.get(_path(name))
                data = os.pread(file.number, _CHECKSUM * count, self._record * name.records + _CHECKSUM * first)
                whole = len(data) // _CHECKSUM  # somebody may have shortened the file
                checksums[:whole] = np.frombuffer(data[: whole * _CHECKSUM], "<u8")
            stored[exists] = checksums[own - first] != 0
        return stored

    def read(self, name: RecordName, numbers: list[int], frames: list[Frame]) -> list[bool]:
        """Read frames into arrays. Return which of them have an undamaged record. The others are undefined.

        Args:
            name: Name of the file.
            numbers: Number of each record.
            frames: Array of each record, of `record` bytes, C-contiguous.
        """
        first, last = min(numbers), max(numbers)
        try:
            handle = self._readers.get(_path(name))
            # One read returns all checksums, since each call may wait for the interpreter.
            where = self._record * name.records + _CHECKSUM * first
            checksums = os.pread(handle.number, _CHECKSUM * (last + 1 - first), where)
        except OSError:
            return [False] * len(numbers)
        good = []
        for number, frame in zip(numbers, frames, strict=True):
            at = _CHECKSUM * (number - first)
            try:
                whole = os.preadv(handle.number, [frame.data], self._record * number) == self._record
            except OSError:
                whole = False
            good.append(whole and checksums[at : at + _CHECKSUM] == _checksum(name, number, frame))
        return good

    def write(self, name: RecordName, number: int, frame: Frame) -> bool:
        """Store a frame. Return whether it was stored. Errors of the disk are logged and not raised.

        Args:
            name: Name of the file.
            number: Number of the record.
            frame: Frame of `record` bytes, C-contiguous.
        """
        if not self._folder.reserve(self._record):
            return False
        path = _path(name)
        try:
            try:
                file = self._writers.get(path)
            except FileNotFoundError:  # the subfolder. The folder itself is not created again if somebody has removed it.
                with suppress(FileExistsError):
                    (self._root / path).parent.mkdir()
                file = self._writers.get(path)
            write_at(file.number, frame.data, self._record * number)
            write_at(file.number, _checksum(name, number, frame), self._record * name.records + _CHECKSUM * number)
        except OSError as error:
            self._folder.failed(error)
            return False
        return True

    def divided(self, frames: Sequence[tuple[RecordName | None, int]]) -> Iterator[list[int]]:
        """Divide the decoding of frames between the processes that need them at the same time. See `Claims.divided`.

        Args:
            frames: Name of the file and number of the record of each frame.

        Yields:
            Numbers of the frames in `frames` to read or decode next.
        """
        if self.is_open and all(name is not None for name, _ in frames):
            yield from self._claims.divided([(name.content, number) for name, number in frames if name is not None])
        else:  # other processes would not find the frames
            yield list(range(len(frames)))

    def close(self) -> None:
        """Close all files. The next read or write opens them again."""
        self._claims.close()
        self._readers.close()
        self._writers.close()


def _path(name: RecordName) -> str:
    return f"{name.content[:2]}/{name.content}"


def _checksum(name: RecordName, number: int, frame: Frame) -> bytes:
    # The seed makes the checksum of a record at another place, or in another file, a wrong one.
    seed = (int(name.content[:16], 16) + number) % (1 << 64)
    return (xxhash.xxh3_64_intdigest(frame.data, seed=seed) or 1).to_bytes(_CHECKSUM, "little")
