"""Search for the packet of each row of a dataset: the nearest one in time, if it is near enough and in the episode.

Counting the frames of the file can contradict the time. See `counting`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from dali_stream.checks.arrays import NONE, Float64, Int64, Mask
from dali_stream.errors import counted
from dali_stream.mp4.counting import TOLERANCE, Count
from dali_stream.mp4.index import VideoIndex
from dali_stream.system.cached import cached_property

BY_FRAME_INDEX = (
    'Dataset(clock="frame_index"), or --clock frame_index on the command line, locates frames by frame_index / fps. '
    "`dali-stream prepare URI OUT --clock frame_index` writes a copy with regular timestamps"
)
Interval = tuple[float, float]  # seconds of the file at which an episode begins, and at which frames of other episodes begin


def find_packets(index: VideoIndex, interval: Interval, timestamp: npt.NDArray[Any], tolerance: float) -> Int64:
    """Return the packets with the frames of an episode's rows.

    Args:
        index: Index of the file that contains the episode.
        interval: Time range [start, stop) of the episode in the file, in seconds.
        timestamp: Time of each row since the start of the episode, in seconds, shape (n,).
        tolerance: Maximum distance between the times of a row and its frame, in seconds.

    Returns:
        Packet of each row, int64, shape (n,). It is `NONE` if the nearest frame is farther away than `tolerance`, or if
        its time plus `tolerance` is outside the interval. `explain` returns which of these is the reason.
    """
    seconds = _seconds(interval, timestamp)
    packets, away, shown = index.nearest(seconds)
    # Times are rounded, so the first frame may be displayed slightly before its episode starts. With the tolerance added, it
    # belongs to this episode and not to the previous one.
    at = shown + tolerance
    exists = (away <= tolerance) & (interval[0] <= at) & (at < interval[1])
    return packets if exists.all() else np.where(exists, packets, NONE)


@dataclass(frozen=True, eq=False)
class EpisodeTimes:
    """Times of an episode's rows, and its video file. See `find_packets` for `interval` and `tolerance`.

    Attributes:
        index: Index of the file.
        seconds: Time of each row of the episode since its start, in seconds, shape (L,).
        frame_index: `frame_index` of each row, shape (L,).
        fps: Frames per second of the dataset.
        count: Result of counting the frames of the file. None if time alone locates frames. Default: None.
        used: Number of rows up to the last one that is sampled. Rows after it may lack a frame. Default: all rows.
    """

    index: VideoIndex
    interval: Interval
    seconds: npt.NDArray[Any]
    frame_index: npt.NDArray[Any]
    fps: float
    tolerance: float
    count: Count | None = None
    used: int | None = None

    def packets(self, rows: Any = slice(None)) -> Int64:
        """Return the packets of some rows, by default of all.

        Args:
            rows: Rows, as an index of an array. Default: all rows.

        Returns:
            Packet of each row, int64. It is `NONE` if the row has no frame by its time (see `find_packets`), if counting names
            another frame, or if the frame may be that of another row because frames are missing. `explain` returns the reason.
        """
        packets, count = self.by_time, self.count
        if count is not None:
            if not count.is_whole or (self.may_be_moved and not self.is_cut):
                packets = np.full(len(packets), NONE, np.int64)
            elif (moved := self.moved).any():
                packets = np.where(moved, NONE, packets)
        part: Int64 = packets[rows]
        return part

    def to_explain(self, rows: Int64) -> int:
        """Return one of some rows without a packet, for a message: if possible, the first without a frame by its time."""
        by_time = rows[self.by_time[rows] == NONE]
        return int((by_time if len(by_time) else rows)[0])

    def nearest(self, rows: Any) -> tuple[Int64, Float64, Float64]:
        """Find the frames that are nearest to some rows. See `VideoIndex.nearest`."""
        return self.index.nearest(_seconds(self.interval, self.seconds[rows]))

    def count_frames(self) -> int:
        """Return the number of displayed frames of the file that belong to the episode. See `find_packets`."""
        return len(self._own_frames)

    @cached_property
    def by_time(self) -> Int64:
        """Packets of all rows by their time alone, shape (L,). See `find_packets`."""
        return find_packets(self.index, self.interval, self.seconds, self.tolerance)

    @cached_property
    def moved(self) -> Mask:
        """Whether time and counting name different frames of each row, shape (L,).

        Counting does not apply to rows that share frames by their times, since these do not have one frame each. But if no row
        has the frame that counting names, the episode is moved all the same.
        """
        packets = self.by_time
        other = np.zeros(len(packets), np.bool_)
        if self.count is not None and self.count.first != NONE:
            other = (packets != NONE) & (self._place(packets) != self.count.first + np.arange(len(packets)))
            if other.any():
                found = packets[packets != NONE]
                shares = len(np.unique(found)) < len(found)
                other &= not shares or bool(other.sum() == len(found))
        return other

    @cached_property
    def rows_after_end(self) -> int:
        """Number of rows after the last one that has a frame by its time, if the episode has fewer frames than rows. Else 0."""
        found = np.flatnonzero(self.by_time != NONE)
        after = len(self.by_time) - 1 - int(found[-1]) if len(found) else 0
        return after if after and self.count_frames() < len(self.by_time) else 0

    @cached_property
    def may_be_moved(self) -> bool:
        """Whether frames of the episode are missing, and rows may therefore have the frames of later rows.

        If a frame inside the episode is missing, each later row has the frame of the next one, and the last row has none. If
        the end is missing, only the last rows have none. Both look the same unless counting tells them apart. A gap in time
        before the next episode does not, since a writer may place each episode by rows, and its frames one after the other.
        """
        is_counted = self.count is None or self.count.first != NONE
        return not is_counted and bool(self.rows_after_end)

    @property
    def is_cut(self) -> bool:
        """Whether all rows that are used have a frame only because the last rows are left out. See `may_be_moved`."""
        return self.may_be_moved and self.used is not None and self.used <= len(self.seconds) - self.rows_after_end

    @cached_property
    def _own_frames(self) -> Int64:
        """Places in the display order of the displayed frames that belong to the episode."""
        displayed = self.index.displayed
        at = self.index.shown_at(slice(displayed.start, displayed.stop)) / self.index.timescale + self.tolerance
        return displayed.start + np.flatnonzero((self.interval[0] <= at) & (at < self.interval[1]))

    def _place(self, packets: Int64) -> Int64:
        """Return the places of packets among the displayed frames, in display order. The place of `NONE` is arbitrary."""
        return self.index.place(packets) - self.index.displayed.start


def explain(episode: EpisodeTimes, frame: int, *, prepares: bool = False) -> str:
    """Return why a row has no packet, and what to do.

    Args:
        episode: Episode with a row that has no packet.
        frame: The row.
        prepares: Whether the message is for a user of `prepare`, which has neither `drop_n_last_frames` nor
            `trust_timestamps`. Default: False.
    """
    advice, count, length = what_helps(episode, prepares=prepares), episode.count, len(episode.seconds)
    if count is not None and not count.is_whole:
        hidden = f" ({episode.index.hidden} more are hidden by its edit list)" if episode.index.hidden else ""
        if count.frames == count.rows:
            return (
                f"the file has {counted(count.frames, 'frame')}{hidden}, as many as its episodes have rows, but its keyframes "
                "do not fit episodes of these lengths. Rows would get the frames of other rows if one episode lacks frames and "
                f"another one has more. {advice}"
            )
        return (
            f"the file has {counted(count.frames, 'frame')}{hidden}, and its episodes have {counted(count.rows, 'row')}. Rows "
            "after a missing frame would get the frames of other rows, and the keyframes do not show that no frame is "
            f"missing in or before this episode. {advice}"
        )
    interval, tolerance, fps = episode.interval, episode.tolerance, episode.fps
    timestamp = float(episode.seconds[frame])
    [packet], [away], [shown] = episode.nearest([frame])
    number = int(np.flatnonzero(episode.index.displayed_packets == packet)[0])
    nearest = (
        f"timestamp {timestamp:.4f} s after from_timestamp {interval[0]:.4f} s asks for {interval[0] + timestamp:.4f} s of the "
        f"file. The nearest frame, number {number} of {len(episode.index.displayed)}, is at {shown:.4f} s"
    )
    has = f"the episode has {counted(length, 'row')}, and its video {counted(episode.count_frames(), 'frame')}"
    if count is not None and episode.moved[frame]:
        off = np.abs(episode.seconds - np.round(episode.seconds * fps) / fps)
        cause = f"timestamps are not multiples of 1/fps = {1 / fps:.4g} s, so each is probably a wall-clock time"
        cause = f"Some {cause}" if (off > tolerance).any() else "from_timestamp or the timestamps are wrong"
        owner = "file" if count.rows == count.frames else "part of the file between the keyframes of its episode"
        return (
            f"{nearest}, {away:.4f} s away, but the {owner} has exactly as many frames as rows, and by counting it is frame "
            f"number {count.first + frame}. {cause}. {advice}"
        )
    if episode.by_time[frame] != NONE:
        return f"{_SHORT}: {has}. Rows after a missing frame would get the frame of the next row. {advice}"
    if away <= tolerance:
        following = f", and the next episode of the file begins at {interval[1]:.4f} s" if math.isfinite(interval[1]) else ""
        place = f"{nearest}, {away:.4f} s away, outside its episode, which begins at {interval[0]:.4f} s{following}"
        return f"{place}. {f'{_SHORT}: {has}' if episode.rows_after_end else _OFFSET}. {advice}"
    nearest += f", {_distances(away, tolerance)} ({_in_frames(tolerance * fps)}) is allowed"
    if abs(timestamp - round(timestamp * fps) / fps) > tolerance:
        cause = f"The timestamp is not a multiple of 1/fps = {1 / fps:.4g} s, so it is probably a wall-clock time"
    else:
        cause = f"{_SHORT}, or its timestamps drift"
        if advice.startswith(BY_FRAME_INDEX):
            advice = f"If each row has its frame all the same: {advice}"
    return f"{nearest}. {cause}: {has}. {advice}"


def what_helps(episode: EpisodeTimes, *, prepares: bool = False) -> str:
    """Return what to do about an episode with rows that have no frame. See `explain` for the arguments.

    Each remedy is tried on the episode, and named only if each row then has a frame of its own.
    """
    count, tolerance, fps, rows = episode.count, episode.tolerance, episode.fps, np.arange(len(episode.seconds))
    drop_broken = ", or let --drop-broken find all such episodes" if prepares else ""
    if count is not None and not count.is_whole:
        affected = count.affected.tolist()
        shown = ", ".join(map(str, affected[:_SHOWN])) + (", ..." if len(affected) > _SHOWN else "")
        leave = f"leave its {counted(len(affected), 'episode')} {shown} out with episodes=, or the camera with cameras="
        return f"Record or convert the dataset again, or {leave}{drop_broken if prepares else _trust(episode)}"
    half = math.floor(0.5e4 / fps) / 1e4  # half the duration of a frame in seconds, rounded down to four digits

    def helps(seconds: npt.NDArray[Any], tolerance: float) -> bool:
        packets = replace(episode, seconds=seconds, tolerance=tolerance).packets()
        return bool((packets != NONE).all() and len(np.unique(packets)) == len(packets))

    short, frames = episode.rows_after_end, episode.count_frames()
    missing = episode.by_time == NONE
    if not short and missing.any() and (episode.nearest(missing)[1] <= tolerance).all():
        return _AGAIN + drop_broken  # these rows have frames, but of another episode
    remedies = []
    # Numbers that count otherwise, or other frames between those of the rows, would give rows the frames of their neighbours.
    if np.array_equal(episode.frame_index, rows) and frames == len(rows) and helps(rows / fps, tolerance):
        remedies.append(BY_FRAME_INDEX)
    if tolerance < half and helps(episode.seconds, half):
        remedies.append(f"Dataset(tolerance_s={half}) accepts frames up to half a frame away")
    if not remedies and short and short == len(rows) - frames and not prepares and helps(episode.seconds[:-short], tolerance):
        remedies.append(
            f"Dataset(drop_n_last_frames={short}) leaves the last {counted(short, 'row')} of each episode out"
            f"{_only_if(short)}. With windows that reach ahead, leave as many more out"
        )
    if not remedies and episode.moved.any() and not prepares:
        return _AGAIN + _trust(episode)
    advice = ". ".join(remedies) or _AGAIN + drop_broken
    if short and not prepares and count is not None and count.declared_stop > count.stop:
        advice += _trust(episode)  # to_timestamp says that the episode has these frames, and counting that it does not
    return advice


_AGAIN = "Record or convert the dataset again, or leave the episode out with episodes=, or the camera with cameras="
_SHORT = "The video is shorter than its episode"
_OFFSET = "The rows are offset against the video, or meta/episodes is wrong"
_TRUST = (
    ". Dataset(trust_timestamps=True), or --trust-timestamps on the command line, takes the frame at the time of each row all "
    "the same, which may be the frame of another row"
)
_SHOWN = 8  # maximum number of episodes that a message names


def _trust(episode: EpisodeTimes) -> str:
    """Return the remedy that takes frames by time alone, if each row has one then. Else an empty text."""
    stop = math.inf if episode.count is None else episode.count.declared_stop
    trusting = replace(episode, interval=(episode.interval[0], stop), count=None)
    return _TRUST if (trusting.packets() != NONE).all() else ""


def _only_if(short: int) -> str:
    # The last frame that is left shows the same moment as its row only if no frame before it is missing.
    return (
        ". This is right only if the end of the video is missing, and not a frame before: the last frames then fit the actions "
        f"and states of their rows in `dali-stream preview URI --drop-n-last-frames {short} --plots`"
    )


def _in_frames(tolerance: float) -> str:
    return {TOLERANCE: "a quarter of a frame", 0.5: "half a frame"}.get(tolerance, f"{tolerance:.2g} frames")


def _distances(away: float, tolerance: float) -> str:
    """Describe a distance above the tolerance, with as many digits as it takes to show that it is larger."""
    for digits in range(2, 17):
        texts = [f"{value:.{digits}g}" if 0 < value < 1e-3 else f"{value:.{digits + 2}f}" for value in (away, tolerance)]
        if texts[0] != texts[1]:
            break
    return f"{texts[0]} s away, but at most {texts[1]} s"


def _seconds(interval: Interval, timestamp: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Return times in the file, as float64. The float32 of the rows is too coarse for a file of several hours."""
    return interval[0] + timestamp.astype(np.float64)
