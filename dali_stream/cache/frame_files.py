"""Decoded frames on disk, which all processes of a machine and later runs share.

    <folder>/1f0c…/key.json    what determines the pixels of the frames in this folder, in words
    <folder>/1f0c…/claims00    empty, as claims01 to claims30, see `Claims`
    <folder>/1f0c…/9b/9b41…    frames of one video file, or of the images of one episode

The file of a video with n packets is named by a hash of its index and its size. It has three parts:

    n records     the frame of each packet, `record_bytes` each. One that was never written takes no space
    n entries     for each record, a hash of the encoded packets from which its frame was decoded, and a checksum
    256 tables    for each packet, a source, and a hash of the packets from its keyframe to it as they were read there

Two videos may have the same index and size, such as a file before and after it was damaged, and a server may send other bytes
for the same name. A record is therefore used only if its entry has the hash of this file's own packets, which is in
`Records.hashes`. These hashes are computed when packets are decoded, and a table stores them for each source. A source is a
version of a file at one place, see `Store.identity`. For a known source, no packets need to be read. If the source is new, its
packets are read once and compared with the entries, and nothing is decoded. A source uses the table whose number is its hash
modulo 256, and each value in it names the source. Images in rows need no packets: their file is named by a hash of all images
of an episode, and their hashes of packets are 0.

Reading and writing need no locks. Processes that decode the same packets write the same bytes, and the entry is written after
the record. If a process dies or a disk loses data, the checksum does not match the record, and the frame is decoded again. It
is the XXH3 hash of the record with 64 bits, seeded with the name of the file, the number of the record, and the hash of its
packets. A checksum detects damage, but not forgery: users who can write to the folder are trusted.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from dali_stream.cache.claims import Claims
from dali_stream.cache.frame_folder import FrameFolder
from dali_stream.checks.arrays import NONE, Mask
from dali_stream.mp4.index import VideoIndex
from dali_stream.storage import Store
from dali_stream.storage.local_files import NO_FOLLOW, OpenFile, OpenFiles, write_at

Frame = npt.NDArray[Any]
Hashes = npt.NDArray[np.uint64]
_HASH, _ENTRY, _VALUE = 8, 16, 16  # bytes of a hash, of an entry, and of a value in a table
_TABLES = 256  # number of tables. Two sources rarely use the same table, and a table that is not written takes no space


@dataclass(frozen=True, eq=False)
class Records:
    """Records of the frames of one episode and camera, in the file of its video or images.

    Attributes:
        name: Hash that names the file, in hexadecimal digits.
        count: Number of records in the file: the packets of a video file, or the images of an episode.
        source: Hash of the source of a video file, see `Store.identity`. 0 for images.
        first: First record of the episode.
        hashes: For each record of the episode, the hash of the packets of the source from which its frame is decoded, uint64.
            0 if it is not known, and for images. Any thread may set a value that is 0.
    """

    name: str
    count: int
    source: int
    first: int
    hashes: Hashes

    @property
    def path(self) -> str:
        """Path of the file, relative to the folder of its frames."""
        return f"{self.name[:2]}/{self.name}"


def video_records(store: Store, index: VideoIndex, packets: npt.NDArray[np.integer]) -> Records | None:
    """Return the records of an episode in the file of its video. None if the store cannot tell versions of the video apart.

    Args:
        store: Store that has read the index.
        index: Index of the video file.
        packets: Packets of the episode. `NONE` for frames that have no packet.
    """
    identity = store.identity(index.path)
    if not identity:
        return None
    # A server may choose its version, so it must not be able to find another source with the same hash.
    source = int.from_bytes(hashlib.blake2b(identity.encode(), digest_size=8).digest(), "little")
    name = xxhash.xxh3_128_hexdigest(f"{index.moov_hash} {store.size(index.path)}".encode())
    own = packets[packets != NONE]
    first, length = (int(own.min()), int(np.ptp(own)) + 1) if len(own) else (0, 0)
    return Records(name, len(index), source, first, np.zeros(length, np.uint64))


def image_records(images: npt.NDArray[np.object_]) -> Records:
    """Return the records of an episode whose encoded images, as bytes, are in its rows."""
    digest = xxhash.xxh3_128()
    for data in images.tolist():
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return Records(digest.hexdigest(), len(images), 0, 0, np.zeros(len(images), np.uint64))


class FrameFiles:
    """Stored frames of one shape. Safe to use from several threads and processes.

    Args:
        folder: Folder of the cache.
        key: Description of everything that determines the pixels. See `pixel_key`.
        record_bytes: Bytes of a frame.
    """

    def __init__(self, folder: FrameFolder, key: Mapping[str, str], record_bytes: int) -> None:
        self._folder, self._record_bytes, self._root = folder, record_bytes, folder.subfolder(key)
        self._read_files = OpenFiles(self._root, os.O_RDONLY | NO_FOLLOW)
        self._write_files = OpenFiles(self._root, os.O_WRONLY | os.O_CREAT | NO_FOLLOW)
        self._claims = Claims(self._root)

    @property
    def is_open(self) -> bool:
        """Whether frames can be added."""
        return self._folder.is_open

    def tell_of_unknown_version(self, where: str) -> None:
        """See `FrameFolder.tell_of_unknown_version`."""
        self._folder.tell_of_unknown_version(where)

    def look(self) -> None:
        """Notice whether files that are open were removed. See `FrameFolder.removed`."""
        if self._read_files.any_removed():
            self._leave()

    def stored(
        self,
        records: Records,
        numbers: npt.NDArray[np.integer],
        hash_packets: Callable[[list[int]], Mapping[int, int]] | None = None,
    ) -> Mask:
        """Return which records have a frame of this source, with the shape of `numbers`. Their frames are not checked.

        Args:
            records: Records of the episode.
            numbers: Numbers of records. `NONE` is allowed, and has no record.
            hash_packets: Function that reads packets from the source, and returns {packet: hash} of these and of others. It is
                called for frames whose packets in this source are not known, which may be those from which the frames were
                decoded. Default: None, for which such frames count as missing.
        """
        stored, exists = np.zeros(numbers.shape, np.bool_), numbers != NONE
        if not exists.any():
            return stored
        own = numbers[exists]
        first, count = int(own.min()), int(np.ptp(own)) + 1
        entries = np.zeros((count, 2), np.uint64)
        with suppress(OSError):  # no file exists yet, or it cannot be read
            file = self._read_files.get(records.path)
            self._fill(entries, file, self._entry(records, first))
            if records.source:
                self._recall(records, file)
        entries, place = entries[own - first], own - records.first
        is_there = entries[:, 1] != 0
        same = is_there & (entries[:, 0] == records.hashes[place])
        if hash_packets is not None and (unknown := is_there & (records.hashes[place] == 0) & ~same).any():
            self.remember(records, hash_packets(own[unknown].tolist()))
            same = is_there & (entries[:, 0] == records.hashes[place])
        stored[exists] = same
        return stored

    def read(self, records: Records, numbers: list[int], frames: list[Frame]) -> list[bool]:
        """Read frames into arrays. Return which of them have an undamaged record of this source. The others are undefined.

        Args:
            records: Records of the episode.
            numbers: Number of each record.
            frames: Array of `record_bytes` for each record, C-contiguous.
        """
        first, last = min(numbers), max(numbers)
        try:
            handle = self._read_files.get(records.path)
            # One read returns all entries, since each call may wait for the interpreter.
            entries = os.pread(handle.number, _ENTRY * (last + 1 - first), self._entry(records, first))
        except OSError:
            return [False] * len(numbers)
        good = []
        for number, frame in zip(numbers, frames, strict=True):
            at = _ENTRY * (number - first)
            packets_hash = int(records.hashes[number - records.first])
            try:
                whole = os.preadv(handle.number, [frame.data], self._record_bytes * number) == self._record_bytes
            except OSError:
                whole = False
            good.append(whole and entries[at : at + _ENTRY] == _entry(records, number, packets_hash, frame))
        return good

    def write(self, records: Records, number: int, packets_hash: int, frame: Frame) -> bool:
        """Store a frame. Return whether it was stored. Errors of the disk are logged and not raised.

        Args:
            records: Records of the episode.
            number: Number of the record.
            packets_hash: Hash of the packets from which the frame was decoded. 0 for an image.
            frame: Frame, an array of `record_bytes`, C-contiguous.
        """
        if not self._folder.reserve(self._record_bytes):
            return False
        try:
            try:
                file = self._write_files.get(records.path)
            except FileNotFoundError:  # the subfolder. The folder itself is not created again if somebody has removed it.
                with suppress(FileExistsError):
                    (self._root / records.path).parent.mkdir()
                file = self._write_files.get(records.path)
            if file.is_removed:
                self._leave()
                return False
            write_at(file.number, frame.data, self._record_bytes * number)
            write_at(file.number, _entry(records, number, packets_hash, frame), self._entry(records, number))
        except OSError as error:
            self._folder.failed(error)
            return False
        return True

    def remember(self, records: Records, hashes: Mapping[int, int]) -> None:
        """Remember hashes of packets that were read from the source, also for later runs.

        Args:
            records: Records of the episode.
            hashes: {packet: hash}. Those of other episodes are ignored.
        """
        own = sorted(number for number in hashes if 0 <= number - records.first < len(records.hashes))
        own = [number for number in own if int(records.hashes[number - records.first]) != hashes[number]]
        if not own:
            return
        new = np.array([hashes[number] for number in own], np.uint64)
        records.hashes[np.array(own) - records.first] = new
        if not self._folder.is_writable:
            return
        # The hash is stored xor that of the source, so that half of a value beside half of another source's is a wrong one.
        values = np.stack([np.full_like(new, records.source), new ^ np.uint64(records.source)], 1).astype("<u8")
        try:
            file = self._write_files.get(records.path)
            for each in np.split(np.arange(len(own)), np.flatnonzero(np.diff(own) > 1) + 1):
                write_at(file.number, values[each].tobytes(), self._table(records, own[each[0]]))
        except FileNotFoundError:  # nothing was stored
            pass
        except OSError as error:
            self._folder.failed(error)

    def _recall(self, records: Records, file: OpenFile) -> None:
        """Set the hashes of the episode's packets that are not known to those that were remembered for the source."""
        values = np.zeros((len(records.hashes), 2), np.uint64)
        self._fill(values, file, self._table(records, records.first))
        found = (values[:, 0] == records.source) & (records.hashes == 0)
        records.hashes[found] = values[found, 1] ^ np.uint64(records.source)

    def _fill(self, values: Hashes, file: OpenFile, at: int) -> None:
        """Read values from a position of a file. Those that the file does not have, such as a shortened one, stay 0."""
        data = os.pread(file.number, values.nbytes, at)
        whole = len(data) // _HASH
        values.reshape(-1)[:whole] = np.frombuffer(data[: whole * _HASH], "<u8")

    def _entry(self, records: Records, number: int) -> int:
        """Return the position of the entry of a record."""
        return self._record_bytes * records.count + _ENTRY * number

    def _table(self, records: Records, number: int) -> int:
        """Return the position of the hash of a packet in the table of the source."""
        table = records.source % _TABLES
        return self._entry(records, records.count) + _VALUE * (table * records.count + number)

    def _leave(self) -> None:
        """Stop using files that somebody has removed, since the disk is not freed as long as they are open."""
        self._folder.removed()
        self.close()

    def divided(self, frames: Sequence[tuple[Records | None, int]]) -> Iterator[list[int]]:
        """Divide the decoding of frames between the processes that need them at the same time. See `Claims.divided`.

        Args:
            frames: Records of the episode, and number of the record, of each frame.

        Yields:
            Numbers of the frames in `frames` to read or decode next.
        """
        if self.is_open and all(records is not None for records, _ in frames):
            yield from self._claims.divided([(records.name, number) for records, number in frames if records is not None])
        else:  # other processes would not find the frames
            yield list(range(len(frames)))

    def close(self) -> None:
        """Close all files. The next read or write opens them again."""
        self._claims.close()
        self._read_files.close()
        self._write_files.close()


def _entry(records: Records, number: int, packets_hash: int, frame: Frame) -> bytes:
    """Return the entry of a record."""
    # The seed makes the checksum of a record at another place, or in another file, a wrong one.
    seed = (int(records.name[:16], 16) + number + packets_hash) % (1 << 64)
    checksum = xxhash.xxh3_64_intdigest(frame.data, seed=seed) or 1
    return packets_hash.to_bytes(_HASH, "little") + checksum.to_bytes(_HASH, "little")
