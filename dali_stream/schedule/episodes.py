"""Table of the open episodes, with their rows and the locations of their frames.

Four kinds of numbers are stored in int64 arrays, and the schedule converts between them:

frame       number of a frame, counted over all episodes. It identifies a frame, whether its episode is open or not.
in episode  number of a frame within its episode, counted from 0
row         place of a frame in `EpisodeTable`. A frame has a row only while its episode is open, and the row may change.
slot        place of a decoded frame in memory, see `schedule.frames`
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from dali_stream.checks.arrays import NONE, Int64

if TYPE_CHECKING:
    from dali_stream.mp4.blocks import Blocks

Int32 = npt.NDArray[np.int32]
Scalar = TypeVar("Scalar", bound=np.generic)
ROW_SPARE = 5, 4  # the table of open episodes has at most 5/4 as many rows as are in use, since closed episodes leave gaps


@dataclass(frozen=True)
class Located:
    """Locations of the L frames of an episode in a camera's video file.

    Attributes:
        packet: Number of each frame's packet in the decode order of the file, shape (L,). `NONE` if the frame has no packet.
        keyframe: Number of the packet at which decoding each frame begins, shape (L,). Frames of one GOP are adjacent.
        blocks: Blocks of the encoded video. None if it is read in place.
        stored: Whether each frame is known to be in the frame cache on disk, bool of shape (L,). None if none is.
    """

    packet: npt.NDArray[np.integer]
    keyframe: npt.NDArray[np.integer]
    blocks: Blocks | None = None
    stored: npt.NDArray[np.bool_] | None = None


@dataclass(frozen=True)
class OpenEpisode:
    """An episode whose rows are in memory, and whose frames are located.

    Attributes:
        number: Number of the episode.
        cameras: {camera: locations of its frames}.
        columns: {key: values of the episode's L rows, shape (L, ...)}.
    """

    number: int
    cameras: Mapping[str, Located]
    columns: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)


@dataclass
class CameraTable:
    """One camera's frames, with an entry for each row of the table.

    Attributes:
        packet: Packet of each frame. `NONE` if the frame has no packet. For frames that are images in rows, it is the number of
            the frame within its episode.
        gop: Row of the first frame of each frame's GOP. The entry of that first frame itself is minus the number of frames of
            the GOP, so that one array holds both.
        stored: Whether each frame is in the frame cache on disk, so that it is read and not decoded.
        first_block, block_count: First entry of the `BlockTable` that decoding each frame needs, and number of entries. The
            number is 0 if the frame has no packet. The arrays are empty if encoded video is read in place.
    """

    packet: Int32 = field(default_factory=lambda: np.empty(0, np.int32))
    gop: Int32 = field(default_factory=lambda: np.empty(0, np.int32))
    stored: npt.NDArray[np.bool_] = field(default_factory=lambda: np.empty(0, np.bool_))
    first_block: Int32 = field(default_factory=lambda: np.empty(0, np.int32))
    block_count: Int32 = field(default_factory=lambda: np.empty(0, np.int32))

    def gops(self, rows: Int64) -> Int64:
        """Return the row of the first frame of each frame's GOP."""
        gop = self.gop[rows]
        return np.where(gop < 0, rows, gop)

    def members(self, gops: Int64) -> Int64:
        """Return the rows of all frames of the GOPs whose first frames have the rows `gops`."""
        # The ranges [gop, gop + frames) are concatenated without a Python loop, since a batch can need thousands of GOPs.
        frames = -self.gop[gops].astype(np.int64)
        before = np.cumsum(frames) - frames
        return np.repeat(gops - before, frames) + np.arange(int(frames.sum()))

    def blocks_of(self, rows: Int64) -> tuple[Int64, Int64]:
        """Return the blocks that decoding the frames of these rows needs.

        Returns:
            Each block of each frame, and the index in `rows` of that frame, both of shape (n,).
        """
        count = self.block_count[rows]
        index = np.repeat(np.arange(len(rows)), count)
        before = np.cumsum(count) - count
        return (self.first_block[rows] - before)[index] + np.arange(len(index)), index


class _Rows:
    """Allocator of the rows of a table.

    An episode gets the smallest free stretch that is long enough, which leaves few rows unused.

    Args:
        used: Number of rows that are allocated already, without a gap.

    Attributes:
        used: Number of rows up to the last one that is or was allocated.
        live: Number of rows that are allocated.
    """

    def __init__(self, used: int = 0) -> None:
        self.used = self.live = used
        self._free: dict[int, int] = {}  # {start of a free stretch: its stop}

    def take(self, count: int) -> int:
        """Allocate `count` adjacent rows, and return the first one."""
        self.live += count
        fits = [(stop - start, start) for start, stop in self._free.items() if stop - start >= count]
        if not fits:
            self.used += count
            return self.used - count
        first = min(fits)[1]
        stop = self._free.pop(first)
        if first + count < stop:
            self._free[first + count] = stop
        return first

    def give_back(self, first: int, count: int) -> None:
        """Free the rows that `take(count)` allocated."""
        if count:
            self.live -= count
            # Merge the stretch with free neighbours on both sides. A linear search suffices, since free stretches are few.
            stop = self._free.pop(first + count, first + count)
            self._free[next((start for start, end in self._free.items() if end == first), first)] = stop


class BlockTable:
    """Blocks of encoded video of the open episodes. All cameras share the table, since they share the memory for video.

    The blocks of an episode and a camera are consecutive entries.

    Args:
        cameras: Cameras whose encoded video is fetched in blocks.

    Attributes:
        cameras: See above.
        camera: Camera of each block, as an index of `cameras`.
        episode: Episode of each block.
        number: Number of each block within its episode and camera.
        start, stop: Byte range of each block in its file.
        data: Each block that is in memory or being fetched, and None for the others. `BlockCache` sets it.
        touched: Last batch that needed each block, or whose plan fetched it. `NONE` at first.
        epoch: Last epoch that needed each block. `NONE` at first.
    """

    def __init__(self, cameras: Collection[str]) -> None:
        self.cameras = list(cameras)
        self.camera = self.episode = self.number = self.touched = self.epoch = np.empty(0, np.int32)
        self.start = self.stop = np.empty(0, np.int64)
        self.data = np.empty(0, object)
        self._rows = _Rows()
        self._places: dict[tuple[str, int], tuple[int, int]] = {}  # {(camera, episode): (first entry, number of entries)}

    def __len__(self) -> int:
        """Number of entries up to the last one in use."""
        return self._rows.used

    def entries(self, camera: str, episode: int) -> Int64:
        """Return the blocks of an open episode. Empty if it has none."""
        first, count = self._places.get((camera, episode), (0, 0))
        return np.arange(first, first + count)

    def sizes(self, blocks: Int64) -> Int64:
        """Return the size of each block in bytes."""
        return self.stop[blocks] - self.start[blocks]

    def held(self, blocks: Int64) -> npt.NDArray[np.bool_]:
        """Return whether each block is in memory or being fetched."""
        held: npt.NDArray[np.bool_] = self.data[blocks] != None  # noqa: E711, compares each item
        return held

    def owner(self, block: int) -> tuple[str, int]:
        """Return the camera and the episode of a block."""
        return self.cameras[self.camera[block]], int(self.episode[block])

    def groups(self, blocks: Int64) -> list[Int64]:
        """Split blocks in increasing order into groups that are adjacent in a file."""
        # If adjacent entries belong to two episodes or cameras, the second entry has number 0.
        apart = (np.diff(blocks) > 1) | (self.number[blocks[1:]] == 0) | (self.start[blocks[1:]] != self.stop[blocks[:-1]])
        return np.split(blocks, np.flatnonzero(apart) + 1) if len(blocks) else []

    def open(self, camera: str, episode: int, start: Int64, stop: Int64) -> int:
        """Add the blocks of an episode, none of which is held yet. Return the entry of the first one."""
        first = self._rows.take(len(start))
        self._places[camera, episode] = first, len(start)
        new = {"start": start, "stop": stop, "number": np.arange(len(start)), "data": None, "touched": NONE, "epoch": NONE}
        for column, values in (new | {"camera": self.cameras.index(camera), "episode": episode}).items():
            setattr(self, column, _grown(getattr(self, column), self._rows.used))
            getattr(self, column)[first : first + len(start)] = values
        return first

    def close(self, camera: str, episode: int) -> None:
        """Remove the blocks of an episode. None of them may be held."""
        self._rows.give_back(*self._places.pop((camera, episode), (0, 0)))


class EpisodeTable:
    """Table of the open episodes, each with adjacent rows, one per frame.

    A frame has a row while its episode is open, so the memory of the table depends on the open episodes, not on the dataset.
    Frames are numbered consecutively over all episodes. The row of a frame is `first_row[episode] + frame`, where `frame` is
    its index within the episode.

    Args:
        lengths: Number of frames of each episode, shape (E,).
        cameras: Cameras to locate frames of.
        fetched: Cameras whose encoded video is fetched in blocks.

    Attributes:
        lengths: See above.
        first_frame: Number of the first frame of each episode, shape (E,).
        first_row: First row of each open episode, shape (E,). `NONE` for other episodes.
        episode: Episode of each row.
        cameras: {camera: table of its frames}.
        blocks: Table of the blocks of encoded video.
        columns: {key: values of each row, shape (capacity, ...)}. One array holds all episodes, so that one NumPy call per key
            reads the values of a batch.
    """

    def __init__(self, lengths: Int64, cameras: Collection[str], fetched: Collection[str] = ()) -> None:
        self.lengths, self.first_frame = lengths, np.cumsum(lengths) - lengths
        self.first_row = np.full(len(lengths), NONE, np.int64)
        self.episode = np.empty(0, np.int32)
        self.cameras = {camera: CameraTable() for camera in cameras}
        self.blocks = BlockTable(fetched)
        self.columns: dict[str, npt.NDArray[Any]] = {}
        self._rows = _Rows()

    @staticmethod
    def row_bytes(cameras: int, fetched: int) -> int:
        """Return the memory of a row without `columns`, in bytes.

        Args:
            cameras: Number of cameras.
            fetched: Number of cameras whose encoded video is fetched in blocks.
        """
        return 4 + 9 * cameras + 8 * fetched

    def is_open(self, episodes: Int64) -> npt.NDArray[np.bool_]:
        """Return a mask of the episodes that are open, with the shape of `episodes`."""
        is_open: npt.NDArray[np.bool_] = self.first_row[episodes] != NONE
        return is_open

    def closed(self, episodes: Int64) -> list[int]:
        """Return those of the episodes that are not open, without duplicates."""
        unique = np.unique(episodes)
        closed: list[int] = unique[~self.is_open(unique)].tolist()
        return closed

    def rows(self, frames: Int64) -> Int64:
        """Return the row of each frame. The frames are numbered over all episodes, and their episodes must be open."""
        episode = np.searchsorted(self.first_frame, frames, side="right") - 1
        return frames - self.first_frame[episode] + self.first_row[episode]

    def frames(self, rows: Int64) -> Int64:
        """Return the frame of each row, numbered over all episodes."""
        episode = self.episode[rows]
        return rows - self.first_row[episode] + self.first_frame[episode]

    def rows_of(self, episode: int) -> Int64:
        """Return the rows of an open episode."""
        return self.first_row[episode] + np.arange(self.lengths[episode])

    def rows_with_blocks(self, camera: str) -> Int64:
        """Return the rows of all frames whose encoded video is in blocks."""
        return np.flatnonzero(self.cameras[camera].block_count[: self._rows.used])

    def set_stored(self, camera: str, frames: Collection[tuple[int, int]]) -> None:
        """Note that frames, given as (episode, frame), were added to the frame cache on disk. Closed episodes are ignored."""
        if frames:
            episode, frame = np.array(list(frames), np.int64).T
            is_open = self.is_open(episode)
            self.cameras[camera].stored[self.first_row[episode[is_open]] + frame[is_open]] = True

    def values(self, key: str, episode: Int64, frame: Int64) -> npt.NDArray[Any]:
        """Return values of a column.

        Args:
            key: Key of the column.
            episode: Open episodes, shape (B,).
            frame: Frame indices within the episodes, shape (B,) or (B, T).

        Returns:
            Values, whose shape begins with that of `frame`.
        """
        first = self.first_row[episode]
        return self.columns[key][(first if frame.ndim == 1 else first[:, None]) + frame]

    def open(self, opened: OpenEpisode) -> None:
        """Allocate the rows of an episode, and fill them. Rows of other episodes may move."""
        length = int(self.lengths[opened.number])
        first = self._rows.take(length)
        rows = slice(first, first + length)
        if (capacity := len(self.episode)) < self._rows.used:
            self._copy(np.arange(capacity), 2 * self._rows.used)
        self.episode[rows], self.first_row[opened.number] = opened.number, first
        for key, values in opened.columns.items():
            if key not in self.columns:
                self.columns[key] = np.empty((len(self.episode), *values.shape[1:]), values.dtype)
            self.columns[key][rows] = values
        for camera, table in self.cameras.items():
            located = opened.cameras[camera]
            is_edge = np.ones(length + 1, np.bool_)  # whether a GOP begins at each frame, or the episode ends
            np.not_equal(located.keyframe[1:], located.keyframe[:-1], out=is_edge[1:length])
            edges = np.flatnonzero(is_edge)
            starts, frames = edges[:-1], edges[1:] - edges[:-1]
            table.packet[rows] = located.packet
            table.gop[rows] = np.repeat(first + starts, frames)
            table.gop[first + starts] = -frames
            table.stored[rows] = False if located.stored is None else located.stored
            if camera in self.blocks.cameras:
                table.block_count[rows] = 0
                if (cut := located.blocks) is not None:
                    table.first_block[rows] = self.blocks.open(camera, opened.number, cut.start, cut.stop) + cut.first
                    table.block_count[rows] = np.where(cut.first >= 0, cut.last - cut.first + 1, 0)
        # The division of `memory_budget` assumes that at most this share of the rows is unused.
        if self._rows.used * ROW_SPARE[1] > self._rows.live * ROW_SPARE[0]:
            self._compact()

    def close(self, episode: int) -> None:
        """Free the rows of an episode."""
        first, length = int(self.first_row[episode]), int(self.lengths[episode])
        self._rows.give_back(first, length)
        self.first_row[episode] = NONE
        for values in self.columns.values():
            if values.dtype == object:  # free strings and images, which are outside the array
                values[first : first + length] = None
        for camera in self.blocks.cameras:
            self.cameras[camera].block_count[first : first + length] = 0  # see `rows_with_blocks`
            self.blocks.close(camera, episode)

    def _compact(self) -> None:
        """Copy the rows of open episodes to new arrays without gaps, so that free rows take no memory."""
        episodes = np.flatnonzero(self.first_row != NONE)
        episodes = episodes[np.argsort(self.first_row[episodes], kind="stable")]
        lengths = self.lengths[episodes]
        first = np.cumsum(lengths) - lengths
        shift = np.repeat(self.first_row[episodes] - first, lengths)
        rows = np.arange(len(shift)) + shift
        self.first_row[episodes], self._rows = first, _Rows(len(rows))
        self._copy(rows, 2 * len(rows))
        for table in self.cameras.values():
            gop = table.gop[: len(rows)]
            gop[gop >= 0] -= shift[gop >= 0].astype(np.int32)

    def _copy(self, rows: Int64, capacity: int) -> None:
        """Copy some rows to the beginning of new arrays. Unwritten entries of the arrays take no memory."""
        self.episode = _copied(self.episode, rows, capacity)
        for key in self.columns:  # one at a time, since each array exists twice while it is copied
            self.columns[key] = _copied(self.columns[key], rows, capacity)
        for camera, table in self.cameras.items():
            table.packet, table.gop = _copied(table.packet, rows, capacity), _copied(table.gop, rows, capacity)
            table.stored = _copied(table.stored, rows, capacity)
            if camera in self.blocks.cameras:
                table.first_block = _copied(table.first_block, rows, capacity)
                table.block_count = _copied(table.block_count, rows, capacity)


def _grown(values: npt.NDArray[Scalar], used: int) -> npt.NDArray[Scalar]:
    """Return an array with room for `used` entries. The capacity doubles, but unwritten entries take no memory."""
    return values if len(values) >= used else _copied(values, np.arange(len(values)), 2 * used)


def _copied(values: npt.NDArray[Scalar], rows: Int64, capacity: int) -> npt.NDArray[Scalar]:
    """Return a new array that begins with these rows. Its other entries are uninitialized."""
    copied = np.empty((capacity, *values.shape[1:]), values.dtype)
    np.take(values, rows, axis=0, out=copied[: len(rows)], mode="clip")  # mode "raise" would buffer the output
    return copied
