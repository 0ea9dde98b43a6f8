"""Rows of the episodes of a video file, counted against its frames.

Time alone does not show that a frame is missing. If an encoder drops a frame and writes the others at a constant rate, each
later row still has a frame at its time, but it is the frame of the next row. Two more things are known when a file is opened:
the number of its frames, and its keyframes. LeRobot encodes each episode on its own, so that each begins with a keyframe.

- If a file has as many frames as its episodes have rows, counting tells the frame of each row, unless keyframes show that one
  episode has too few frames and another one too many.
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
_NEAR = 2  # maximum number of frames between a counted start and a keyframe that shows that the count is wrong
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
        declared_stop: The same if `to_timestamp` is right, whatever frames and keyframes show.
        first: Place of the frame of its first row among the displayed frames. `NONE` if counting does not tell it.
        is_whole: False if the file lacks frames, and rows of the episode may therefore find frames of other rows.
        rows, frames: Number of rows of all episodes of the file, and of its displayed frames.
        affected: Indices of all episodes of the file with `is_whole` False, in increasing order.
    """

    stop: float
    declared_stop: float
    first: int
    is_whole: bool
    rows: int
    frames: int
    affected: Int64


class FileCount(NamedTuple):
    """Result of `count_rows` for the k episodes of a file. See `Count`."""

    stop: Float64
    declared_stop: Float64
    first: Int64
    is_whole: Mask
    rows: int
    frames: int
    affected: Int64

    def of(self, episode: int) -> Count:
        """Return the result for one episode, by its position in the arguments of `count_rows`."""
        stops = float(self.stop[episode]), float(self.declared_stop[episode])
        return Count(*stops, int(self.first[episode]), bool(self.is_whole[episode]), self.rows, self.frames, self.affected)


def count_rows(episodes: FileEpisodes, index: VideoIndex, fps: float) -> FileCount:
    """Count the rows of a file's episodes against its frames. See the top of the module.

    Episodes that begin at the same time share their frames. An episode whose `to_timestamp` is after the start of the next one
    shares frames with it, as windows around events do. In two cases, the episodes share nothing all the same. If they would
    share only a few frames, and the next episode was encoded on its own, these frames are missing, unless other episodes share
    frames from a start that is not a keyframe, as windows do. If the file has a frame for each row, and sharing would leave
    almost no frames over, `from_timestamp` is wrong.

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
    declared_stop = np.where(shares, np.maximum(following, own_end), following)
    places = None
    if shares.any() or frames < length.sum() or (frames == length.sum() and len(starts) > 1):
        places = _Places.of(index, starts, fps)
        is_few = (own_end - following) * fps < _FEW * length
        if not (shares[:-1] & ~places.is_keyframe[1:]).any():
            shares = shares & ~(is_few & np.append(places.cuts_gop[1:], False))
    groups = _groups(starts, length, own_end, shares, places, fps)
    if shares.any() and frames == length.sum() and 0 <= frames - groups.rows < _FEW * frames:
        shares = np.zeros(len(starts), np.bool_)
        groups = _groups(starts, length, own_end, shares, places, fps)
    stop = np.where(shares, np.maximum(following, own_end), following)
    first, is_whole = np.full(len(starts), NONE, np.int64), np.ones(len(starts), np.bool_)
    if frames == groups.rows:
        first = groups.first
        if places is not None and (off := _off(places, groups)):
            is_whole, is_counted = (each[groups.group] for each in _whole(places, groups, frames, off))
            first = np.where(is_counted, places.place, NONE)
        elif places is not None:
            is_whole = ~_contradicted(places, groups)[groups.group]
    elif places is not None and frames < groups.rows and (missing := groups.rows - frames - _gaps(index, fps)) > 0:
        is_whole, is_counted = (each[groups.group] for each in _whole(places, groups, frames, missing))
        first[is_counted] = places.place[is_counted]
    affected = np.sort(episodes.number[~is_whole[of]])
    return FileCount(stop[of], declared_stop[of], first[of], is_whole[of], groups.rows, frames, affected)


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
        keyframes: Places of all keyframes of the file, in increasing order.
        cuts: Those of them that cut a GOP short.
    """

    place: Int64
    is_frame: Mask
    is_keyframe: Mask
    cuts_gop: Mask
    gop: float
    keyframes: Int64
    cuts: Int64

    @classmethod
    def of(cls, index: VideoIndex, starts: Float64, fps: float) -> _Places:
        packets, away, _ = index.nearest(starts)
        keyframes, place = np.sort(index.place(index.keyframes.astype(np.int64))), index.place(packets)
        is_frame = away <= TOLERANCE / fps
        is_keyframe = is_frame & np.isin(place, keyframes)
        gop = float(np.median(np.diff(np.append(keyframes, len(index)))))
        cuts = keyframes[1:][np.diff(keyframes) < gop]
        cuts_gop = is_keyframe & np.isin(place, cuts)
        shown = index.displayed.start
        return cls(place - shown, is_frame, is_keyframe, cuts_gop, gop, keyframes - shown, cuts - shown)


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


def _off(places: _Places, groups: _Groups) -> int:
    """Return how far counting is off in a file with as many frames as rows, in frames. 0 if it is not known to be wrong.

    It is wrong if an encoder began a recording at the start of a group by its time, and none at its start by counting. Then a
    group has too many frames, and another one too few.
    """
    by_time, counted = places.place[groups.head], groups.first[groups.head]
    off = np.abs(by_time - counted)
    is_wrong = (off > 0) & places.cuts_gop[groups.head] & ~np.isin(counted, places.cuts)
    return int(off[is_wrong].max(initial=0))


def _contradicted(places: _Places, groups: _Groups) -> Mask:
    """Return which groups of a file with as many frames as rows may have other frames than counting tells.

    A group whose start is not a keyframe is off if all such starts are near keyframes at which recordings began. Then a group
    lacks frames, and another one has more than rows. The group before may be the one.
    """
    is_off = ~np.isin(groups.first[groups.head], places.keyframes)
    is_off[0] = False
    away = np.array([n for n in range(-_NEAR, _NEAR + 1) if n])
    near = groups.first[groups.head][is_off][:, None] + away
    cuts = np.isin(near, places.cuts)
    # A recording may begin after a whole number of GOPs, so that not every keyframe at a start cuts one. All of them are
    # equally far from the counted starts then, and other keyframes do not cut GOPs, as those at changes of the scene do.
    is_start = np.isin(near, places.keyframes).all(axis=0) & cuts.any(axis=0)
    others = np.setdiff1d(places.cuts, np.append(groups.first[groups.head], near[:, is_start]))
    if not is_off.any() or not (cuts.any(axis=1).all() or (is_start.any() and not len(others))):
        return np.zeros(len(is_off), np.bool_)
    return is_off | np.append(is_off[1:], False)


def _gaps(index: VideoIndex, fps: float) -> int:
    """Return the number of frames that are visibly missing between the displayed frames of a file, by their times."""
    seconds = index.shown_at(slice(index.displayed.start, index.displayed.stop)) / index.timescale
    return max(int((np.rint(np.diff(seconds) * fps) - 1).sum()), 0)
