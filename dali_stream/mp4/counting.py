"""Rows of the episodes of a video file, counted against its frames.

Time alone does not show that a frame is missing. If an encoder drops a frame and writes the others at a constant rate, each
later row still has a frame at its time, but it is the frame of the next row. Two more things are known when a file is opened:
the number of its frames, and its keyframes. LeRobot encodes each episode on its own, so that each begins with a keyframe.

- If a file has as many frames as its episodes have rows, counting tells the frame of each row.
- If it has fewer, an episode is whole if it and the next one begin at keyframes. After a missing frame, they would not.
- If it has more, rows may have been removed, and time alone locates frames.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dali_stream.checks.arrays import NONE, Float64, Int64, Mask
from dali_stream.mp4.index import VideoIndex

TOLERANCE = 0.25  # in frames: small enough for a unique frame, and large enough for times that are rounded to milliseconds
_FEW = 0.25  # if an episode would share less than this fraction of its frames with the next one, they may be missing
_SHARED = 0.9  # minimum number of frames from the next start to `to_timestamp` for which both episodes have these frames


class FileEpisodes(NamedTuple):
    """The k episodes of a video file according to the metadata, whether they are selected or not.

    Attributes:
        number: Index of each episode in its dataset, shape (k,).
        start: Seconds at which each begins in the file (`from_timestamp`), shape (k,).
        length: Number of its rows, shape (k,).
        end: Seconds at which it ends (`to_timestamp`), shape (k,). Infinite if the metadata lacks it.
    """

    number: Int64
    start: Float64
    length: Int64
    end: Float64


class Count(NamedTuple):
    """Result of `count_rows` for one episode.

    Attributes:
        stop: Seconds in the file at which frames of other episodes begin.
        first: Place of the frame of its first row among the displayed frames. `NONE` if counting does not tell it.
        is_whole: False if the file lacks frames, and rows of the episode may therefore find frames of other rows.
        rows, frames: Number of rows of all episodes of the file, and of its displayed frames.
        affected: Indices of all episodes of the file with `is_whole` False, in increasing order.
    """

    stop: float
    first: int
    is_whole: bool
    rows: int
    frames: int
    affected: Int64


class FileCount(NamedTuple):
    """Result of `count_rows` for the k episodes of a file. See `Count`."""

    stop: Float64
    first: Int64
    is_whole: Mask
    rows: int
    frames: int
    affected: Int64

    def of(self, episode: int) -> Count:
        """Return the result for one episode, by its position in the arguments of `count_rows`."""
        own = float(self.stop[episode]), int(self.first[episode]), bool(self.is_whole[episode])
        return Count(*own, self.rows, self.frames, self.affected)


def count_rows(episodes: FileEpisodes, index: VideoIndex, fps: float) -> FileCount:
    """Count the rows of a file's episodes against its frames. See the top of the module.

    Episodes that begin at the same time share their frames. An episode whose `to_timestamp` is after the start of the next one
    shares frames with it, as windows around events do. In two cases, the episodes share nothing all the same. If they would
    share only a few frames, and the next episode was encoded on its own, these frames are missing. If the file has a frame for
    each row, and sharing would leave almost no frames over, `from_timestamp` is wrong.

    Args:
        episodes: All episodes of the file.
        index: Index of the file.
        fps: Frames per second of the dataset.
    """
    starts, of = np.unique(episodes.start, return_inverse=True)
    length, end = np.zeros(len(starts), np.int64), np.full(len(starts), -np.inf)
    np.maximum.at(length, of, episodes.length)
    np.maximum.at(end, of, np.where(np.isfinite(episodes.end), episodes.end, -np.inf))
    following, own_end, frames = np.append(starts[1:], np.inf), starts + length / fps, len(index.displayed)
    shares = np.minimum(own_end, end) >= following + _SHARED / fps
    places = None
    if shares.any() or frames < length.sum():
        places = _Places.of(index, starts, fps)
        is_few = (own_end - following) * fps < _FEW * length
        shares &= ~(is_few & np.append(places.cuts_gop[1:], False))
    groups = _groups(starts, length, own_end, shares, places, fps)
    if shares.any() and frames == length.sum() and 0 <= frames - groups.rows < _FEW * frames:
        shares = np.zeros(len(starts), np.bool_)
        groups = _groups(starts, length, own_end, shares, places, fps)
    stop = np.where(shares, np.maximum(following, own_end), following)
    first, is_whole = np.full(len(starts), NONE, np.int64), np.ones(len(starts), np.bool_)
    if frames == groups.rows:
        first = groups.first
    elif places is not None and frames < groups.rows and (missing := groups.rows - frames - _gaps(index, fps)) > 0:
        is_whole, is_counted = (each[groups.group] for each in _whole(places, groups, frames, missing))
        first[is_counted] = places.place[is_counted]
    affected = np.sort(episodes.number[~is_whole[of]])
    return FileCount(stop[of], first[of], is_whole[of], groups.rows, frames, affected)


class _Groups(NamedTuple):
    """Groups of episodes that share frames. Most groups have one episode.

    Attributes:
        head: First episode of each of g groups, shape (g,).
        size: Number of rows of each group, without those that have the same frame as others, shape (g,).
        group: Group of each episode, shape (k,).
        first: Number of rows of the file before the first row of each episode, shape (k,).
    """

    head: Int64
    size: Int64
    group: Int64
    first: Int64

    @property
    def rows(self) -> int:
        """Number of rows of all groups."""
        return int(self.size.sum())


def _groups(starts: Float64, length: Int64, own_end: Float64, shares: Mask, places: _Places | None, fps: float) -> _Groups:
    """Return the groups of k episodes, in the order of their starts. See `count_rows` for the arguments."""
    reach = np.maximum.accumulate(np.where(shares, own_end, -np.inf))
    head = np.flatnonzero(np.append(True, reach[:-1] <= starts[1:] + 0.5 / fps))
    group = np.searchsorted(head, np.arange(len(starts)), side="right") - 1
    offset = np.zeros(len(starts), np.int64)
    if places is not None and len(head) < len(starts):
        begin = head[group]
        by_time = np.rint((starts - starts[begin]) * fps).astype(np.int64)
        offset = np.where(places.is_frame, places.place - places.place[begin], by_time)
    size = np.maximum.reduceat(offset + length, head)
    return _Groups(head, size, group, (np.cumsum(size) - size)[group] + offset)


class _Places(NamedTuple):
    """Frames at which the k episodes of a file begin according to the metadata.

    Attributes:
        place: Place of the frame nearest to each start, among the displayed frames, shape (k,).
        is_frame: Whether a start is near enough to that frame, shape (k,).
        is_keyframe: Whether that frame is a keyframe as well, shape (k,).
        cuts_gop: Whether it is a keyframe, and the GOP before it is shorter than `gop`, shape (k,). An encoder only
            cuts a GOP short when a recording begins or the scene changes.
        gop: Median length of the GOPs of the file, in frames.
    """

    place: Int64
    is_frame: Mask
    is_keyframe: Mask
    cuts_gop: Mask
    gop: float

    @classmethod
    def of(cls, index: VideoIndex, starts: Float64, fps: float) -> _Places:
        packets, away, _ = index.nearest(starts)
        keyframes = np.sort(index.display_place[index.keyframes[:]])
        place = index.display_place[packets]
        is_frame = away <= TOLERANCE / fps
        before = place - keyframes[np.maximum(np.searchsorted(keyframes, place) - 1, 0)]  # frames since the keyframe before it
        is_keyframe = is_frame & np.isin(place, keyframes)
        gop = float(np.median(np.diff(np.append(keyframes, len(index)))))
        cuts_gop = is_keyframe & (before > 0) & (before < gop)
        return cls(place - index.displayed.start, is_frame, is_keyframe, cuts_gop, gop)


def _whole(places: _Places, groups: _Groups, frames: int, missing: int) -> tuple[Mask, Mask]:
    """Return which groups of episodes of a file that lacks frames are whole, and which of them have a frame for each row.

    If a group is whole but has too few frames, the missing frames are its own: it begins and ends where the metadata says.

    Args:
        places: Frames at which the episodes begin.
        groups: Groups of the episodes.
        frames: Number of frames of the file.
        missing: Number of frames that the file lacks.
    """
    head, size = groups.head, groups.size
    begin = places.place[head]
    is_right = places.is_keyframe[head]
    # A writer that measures its videos leaves missing frames out, so that its last episode ends with the file. If a writer has
    # added up rows, the start of each episode after a missing frame is up to `missing` frames late. Then it is not a keyframe,
    # provided that GOPs are longer than that and that the encoder began a GOP with each episode. In a file that was encoded in
    # one run, every `gop`-th frame is a keyframe, wherever episodes begin. Episodes must be longer, too, since the start of one
    # might be at the keyframe of the next one.
    if not places.is_frame[head[-1]] or begin[-1] + size[-1] != frames:
        is_right = is_right & (places.gop > missing) & (size.min() > 2 * missing) & places.cuts_gop.any()
    is_right[0] |= places.is_keyframe[0] and begin[0] == 0  # nothing can be missing before it
    has = np.diff(np.append(begin, frames))
    is_whole = is_right & np.append(is_right[1:], True)
    is_single = np.diff(np.append(head, len(places.place))) == 1
    return is_whole & (is_single | (has >= size)), is_whole & (has == size)


def _gaps(index: VideoIndex, fps: float) -> int:
    """Return the number of frames that are visibly missing between the displayed frames of a file, by their times."""
    seconds = index.shown_at[index.displayed.start : index.displayed.stop] / index.timescale
    return max(int((np.rint(np.diff(seconds) * fps) - 1).sum()), 0)
