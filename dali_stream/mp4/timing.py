"""Which packet of a video file holds the frame of which row: the nearest in time, if it is near enough and of the episode."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from dali_stream.mp4.index import LACKING, Int64, VideoIndex

TOLERANCE = 0.25  # of a frame: no other frame can be meant, and files whose clock is coarse (milliseconds) still fit
Interval = tuple[float, float]  # from_timestamp and to_timestamp of an episode: [start, stop) in seconds of the file


def find_packets(table: VideoIndex, interval: Interval, timestamp: npt.NDArray[Any], fps: float) -> Int64:
    """The packets that hold the frames of an episode's rows.

    Args:
        table: of the file that holds the episode.
        interval: the episode's place in the file, [start, stop) in seconds.
        timestamp: (n,) seconds since the episode began, as the rows have them.
        fps: frames per second of the dataset.

    Returns:
        (n,) packets of the file. `LACKING` where the nearest frame is more than a quarter of a frame away from the row's
        time, or lies outside the interval by as much; `explain` says which it is.
    """
    samples, away = table.nearest(_seconds(interval, timestamp))
    return np.where((away <= TOLERANCE / fps) & _inside(table, interval, samples, fps), samples, LACKING)


def explain(table: VideoIndex, interval: Interval, timestamp: float, fps: float) -> str:
    """Why `find_packets` has no packet for this row, and what to do."""
    seconds = _seconds(interval, np.array([timestamp]))
    [sample], [away] = table.nearest(seconds)
    number = int(np.flatnonzero(table.display_order == sample)[0])
    found = (
        f"timestamp {timestamp:.4f} s after from_timestamp {interval[0]:.4f} s asks for {seconds[0]:.4f} s of the file; the "
        f"nearest frame, number {number} of {len(table)}, is at {table.pts[sample] / table.timescale:.4f} s, {away:.4f} s away"
    )
    if not away <= TOLERANCE / fps:
        return (
            f"{found}, and at most {TOLERANCE / fps:.4f} s (a quarter of a frame) is allowed. The video is shorter than its "
            "episode, or its timestamps drift. Record, convert or copy the dataset again"
        )
    return (
        f"{found}, and lies outside its episode, from_timestamp {interval[0]:.4f} s up to before to_timestamp "
        f"{interval[1]:.4f} s. The rows are offset against the video, or meta/episodes is wrong. Record or convert the "
        "dataset again"
    )


def _seconds(interval: Interval, timestamp: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Time in the file, in float64: the rows' float32 is coarser than a frame where a file has hours."""
    return interval[0] + timestamp.astype(np.float64)


def _inside(table: VideoIndex, interval: Interval, samples: Int64, fps: float) -> npt.NDArray[np.bool_]:
    at = table.pts[samples] / table.timescale + TOLERANCE / fps
    inside: npt.NDArray[np.bool_] = (interval[0] <= at) & (at < interval[1])
    return inside
