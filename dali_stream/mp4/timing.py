"""Search for the packet of each row of a dataset: the nearest one in time, if it is near enough and in the episode."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from dali_stream.mp4.index import LACKING, Int64, VideoIndex

TOLERANCE = 0.25  # in frames: small enough for a unique frame, and large enough for times that are rounded to milliseconds
BY_FRAME_INDEX = (
    'Dataset(clock="frame_index"), or --clock frame_index on the command line, locates frames by frame_index / fps. '
    "`dali-stream prepare URI OUT --clock frame_index` writes a copy with regular timestamps"
)
Interval = tuple[float, float]  # from_timestamp of an episode and of the next one: [start, stop) in seconds of the file


def find_packets(
    table: VideoIndex, interval: Interval, timestamp: npt.NDArray[Any], fps: float, tolerance_s: float | None = None
) -> Int64:
    """Return the packets with the frames of an episode's rows.

    Args:
        table: Index of the file that contains the episode.
        interval: Time range [start, stop) of the episode in the file, in seconds.
        timestamp: Time of each row since the start of the episode, in seconds, shape (n,).
        fps: Frames per second of the dataset.
        tolerance_s: Maximum distance between the times of a row and its frame, in seconds. Default: a quarter of a frame.

    Returns:
        Packet of each row, int64, shape (n,). It is `LACKING` if the nearest frame is farther away than `tolerance_s`, or if
        its time plus `tolerance_s` is outside the interval. `explain` returns which of these is the reason.
    """
    tolerance = TOLERANCE / fps if tolerance_s is None else tolerance_s
    seconds = _seconds(interval, timestamp)
    # Times are rounded, so the first frame may be displayed slightly before its episode starts. With the tolerance added, it
    # belongs to this episode and not to the previous one.
    if found := table.consecutive(seconds, tolerance):
        packets, shown = found
        if interval[0] <= shown[0] + tolerance and shown[-1] + tolerance < interval[1]:
            return packets
    samples, away, shown = table.nearest(seconds)
    at = shown + tolerance
    exists = (away <= tolerance) & (interval[0] <= at) & (at < interval[1])
    return samples if exists.all() else np.where(exists, samples, LACKING)


def explain(table: VideoIndex, interval: Interval, timestamp: float, fps: float, tolerance_s: float | None = None) -> str:
    """Return why `find_packets` finds no packet for a row, and what to do. See `find_packets` for the arguments."""
    tolerance = TOLERANCE / fps if tolerance_s is None else tolerance_s
    half = math.floor(0.5e4 / fps) / 1e4  # half the duration of a frame in seconds, rounded down to four digits
    seconds = _seconds(interval, np.array([timestamp]))
    [sample], [away], [shown] = table.nearest(seconds)
    number = int(np.flatnonzero(table.display_order == sample)[0])
    nearest = (
        f"timestamp {timestamp:.4f} s after from_timestamp {interval[0]:.4f} s asks for {seconds[0]:.4f} s of the file. The "
        f"nearest frame, number {number} of {len(table)}, is at {shown:.4f} s"
    )
    if not away <= tolerance:
        nearest += f", {_distances(away, tolerance)} ({_in_frames(tolerance * fps)}) is allowed"
        if abs(timestamp - round(timestamp * fps) / fps) > tolerance:
            near = tolerance < half and away <= half
            accepts = f", and Dataset(tolerance_s={half}) accepts frames up to half a frame away" if near else ""
            return (
                f"{nearest}. The timestamp is not a multiple of 1/fps = {1 / fps:.4g} s, so it is probably a wall-clock time. "
                f"{BY_FRAME_INDEX}{accepts}"
            )
        return (
            f"{nearest}. The video is shorter than its episode, or its timestamps drift. Record or copy the dataset again. If "
            f"each row has its frame all the same: {BY_FRAME_INDEX}"
        )
    following = f", and the next episode of the file begins at {interval[1]:.4f} s" if math.isfinite(interval[1]) else ""
    return (
        f"{nearest}, {away:.4f} s away, outside its episode, which begins at {interval[0]:.4f} s{following}. The rows are "
        "offset against the video, or meta/episodes is wrong. Record or convert the dataset again"
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
