"""Search for the packet of each row of a dataset: the nearest one in time, if it is near enough and in the episode."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dali_stream.checks.arrays import NONE, Float64, Int64
from dali_stream.errors import counted
from dali_stream.mp4.index import VideoIndex

TOLERANCE = 0.25  # in frames: small enough for a unique frame, and large enough for times that are rounded to milliseconds
BY_FRAME_INDEX = (
    'Dataset(clock="frame_index"), or --clock frame_index on the command line, locates frames by frame_index / fps. '
    "`dali-stream prepare URI OUT --clock frame_index` writes a copy with regular timestamps"
)
Interval = tuple[float, float]  # from_timestamp of an episode and of the next one: [start, stop) in seconds of the file


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
    """

    index: VideoIndex
    interval: Interval
    seconds: npt.NDArray[Any]
    frame_index: npt.NDArray[Any]
    fps: float
    tolerance: float

    def packets(self, rows: Any = slice(None)) -> Int64:
        """Return the packets of some rows, by default of all. See `find_packets`. `explain` returns why a row has none."""
        return find_packets(self.index, self.interval, self.seconds[rows], self.tolerance)

    def nearest(self, rows: Any) -> tuple[Int64, Float64, Float64]:
        """Find the frames that are nearest to some rows. See `VideoIndex.nearest`."""
        return self.index.nearest(_seconds(self.interval, self.seconds[rows]))

    def count_frames(self) -> int:
        """Return the number of displayed frames of the file that belong to the episode. See `find_packets`."""
        displayed = self.index.displayed
        at = self.index.shown_at[displayed.start : displayed.stop] / self.index.timescale + self.tolerance
        return int(((self.interval[0] <= at) & (at < self.interval[1])).sum())


def explain(episode: EpisodeTimes, frame: int, *, prepares: bool = False) -> str:
    """Return why a row has no packet, and what to do.

    Args:
        episode: Episode with a row that has no packet.
        frame: The row.
        prepares: Whether the reader of the message runs `prepare`, which has no `drop_n_last_frames`. Default: False.
    """
    interval, tolerance, fps = episode.interval, episode.tolerance, episode.fps
    timestamp = float(episode.seconds[frame])
    [packet], [away], [shown] = episode.nearest([frame])
    number = int(np.flatnonzero(episode.index.displayed_packets == packet)[0])
    nearest = (
        f"timestamp {timestamp:.4f} s after from_timestamp {interval[0]:.4f} s asks for {interval[0] + timestamp:.4f} s of the "
        f"file. The nearest frame, number {number} of {len(episode.index.displayed)}, is at {shown:.4f} s"
    )
    advice = what_helps(episode, prepares=prepares)
    if away <= tolerance:
        following = f", and the next episode of the file begins at {interval[1]:.4f} s" if math.isfinite(interval[1]) else ""
        return (
            f"{nearest}, {away:.4f} s away, outside its episode, which begins at {interval[0]:.4f} s{following}. The rows are "
            f"offset against the video, or meta/episodes is wrong. {advice}"
        )
    nearest += f", {_distances(away, tolerance)} ({_in_frames(tolerance * fps)}) is allowed"
    if abs(timestamp - round(timestamp * fps) / fps) > tolerance:
        cause = f"The timestamp is not a multiple of 1/fps = {1 / fps:.4g} s, so it is probably a wall-clock time"
    else:
        cause = "The video is shorter than its episode, or its timestamps drift"
        if advice.startswith(BY_FRAME_INDEX):
            advice = f"If each row has its frame all the same: {advice}"
    count = episode.count_frames()
    return f"{nearest}. {cause}: the episode has {len(episode.seconds)} rows, and its video {count} frames. {advice}"


def what_helps(episode: EpisodeTimes, *, prepares: bool = False) -> str:
    """Return what to do about an episode with rows that have no frame. See `explain` for the arguments.

    Each remedy is tried on the episode, and named only if each row then has a frame of its own.
    """
    tolerance, fps, rows = episode.tolerance, episode.fps, np.arange(len(episode.seconds))
    half = math.floor(0.5e4 / fps) / 1e4  # half the duration of a frame in seconds, rounded down to four digits

    def helps(seconds: npt.NDArray[Any], tolerance: float) -> bool:
        packets = find_packets(episode.index, episode.interval, seconds, tolerance)
        return bool((packets != NONE).all() and len(np.unique(packets)) == len(packets))

    if (episode.nearest(episode.packets() == NONE)[1] <= tolerance).all():
        return _AGAIN  # these rows have frames, but of another episode
    count = episode.count_frames()
    remedies = []
    # Numbers that count otherwise, or other frames between those of the rows, would give rows the frames of their neighbours.
    if np.array_equal(episode.frame_index, rows) and count == len(rows) and helps(rows / fps, tolerance):
        remedies.append(BY_FRAME_INDEX)
    if tolerance < half and helps(episode.seconds, half):
        remedies.append(f"Dataset(tolerance_s={half}) accepts frames up to half a frame away")
    short = len(rows) - count
    if not remedies and 0 < short < len(rows) and not prepares and helps(episode.seconds[:-short], tolerance):
        remedies.append(
            f"Dataset(drop_n_last_frames={short}) leaves the last {counted(short, 'row')} of each episode out. With windows "
            "that reach ahead, leave as many more out"
        )
    return ". ".join(remedies) or _AGAIN + (", or let --drop-broken find all such episodes" if prepares else "")


_AGAIN = "Record or convert the dataset again, or leave the episode out with episodes=, or the camera with cameras="


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
