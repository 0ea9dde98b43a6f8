"""Windows of frames around samples, and their conversion from seconds (`delta_timestamps`) to frame offsets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dali_stream.checks.arrays import Int64
from dali_stream.checks.text import listed

TOLERANCE_S = 1e-4  # maximum difference of a delta from a multiple of 1/fps, in seconds: LeRobot's default of `tolerance_s`


class BetweenFrames(ValueError):
    """Error for an offset that is not a multiple of 1/fps."""


@dataclass(frozen=True)
class Windows:
    """Windows of frames around a sample, by key.

    Attributes:
        offsets: Frame offsets of each key that has a window, shape (M, T). The M datasets have separate offsets, because their
            frame rates may differ. All other keys have only the current frame.
    """

    offsets: Mapping[str, Int64]

    def __contains__(self, key: str) -> bool:
        return key in self.offsets

    def of(self, key: str) -> Int64:
        """Return the frame offsets of a key, shape (M, T), or zeros of shape (1, 1) for a key without a window."""
        return self.offsets.get(key, np.zeros((1, 1), np.int64))

    def widest(self, key: str) -> Int64:
        """Return the frame offsets of a key in the dataset with the widest window, shape (T,)."""
        offsets = self.of(key)
        return offsets[np.argmax(np.ptp(offsets, axis=1))]

    def steps(self, key: str) -> int:
        """Return the number of frames T in the window of a key, or 1 if the key has no window."""
        return self.of(key).shape[1]


def offsets(deltas: Mapping[str, Sequence[float]], fps: float, keys: Sequence[str], nearest: bool = False) -> dict[str, Int64]:
    """Convert windows from seconds to frame offsets, round(delta * fps).

    Args:
        deltas: Seconds relative to the current frame, {key: [seconds, ...]}.
        fps: Frames per second of the dataset.
        keys: Keys that may have a window.
        nearest: Whether to round a delta between two frames to the nearest one, instead of raising an error. Default: False.

    Returns:
        {key: frame offsets of shape (T,)}.

    Raises:
        BetweenFrames: If a delta is not a multiple of 1/fps within 0.1 ms.
        ValueError: If a key is unknown, or if a window is empty or has a value that is not a finite number.
    """
    if not isinstance(deltas, Mapping):
        raise ValueError(f"delta_timestamps must be a dict of lists of seconds by key, got {deltas!r}")
    frame_offsets = {}
    for key, values in deltas.items():
        if key not in keys:
            raise ValueError(f"Unknown key {key!r} in delta_timestamps. Available: {listed(keys)}")
        try:
            texts = any(isinstance(value, (str, bytes)) for value in values)  # NumPy would convert them
            seconds = np.empty(0) if texts else np.asarray(values, np.float64)
        except (TypeError, ValueError):
            seconds = np.empty(0)
        if seconds.ndim != 1 or not len(seconds) or not np.isfinite(seconds).all():
            raise ValueError(f"delta_timestamps[{key!r}] must be a list of one or more numbers of seconds, got {values!r}")
        frames = np.round(seconds * fps)
        wrong = np.abs(seconds * fps - frames) / fps > TOLERANCE_S
        if wrong.any() and not nearest:
            raise BetweenFrames(
                f"delta_timestamps[{key!r}] must be multiples of 1/fps = {1 / fps:.6g} s within {TOLERANCE_S} s, got "
                f"{seconds[wrong][0]}, whose nearest frame is at {frames[wrong][0] / fps:.6g} s"
            )
        frame_offsets[key] = frames.astype(np.int64)
    return frame_offsets


def beyond_every_episode(frames: Int64, lengths: Int64, dataset_of: Int64) -> npt.NDArray[np.bool_]:
    """Return which steps of a window are outside the episode for every sample.

    Args:
        frames: Frame offsets for each dataset, shape (M, T).
        lengths: Number of frames of each episode, shape (E,).
        dataset_of: Dataset of each episode, shape (E,).

    Returns:
        Whether each step is outside, shape (T,).
    """
    longest = np.zeros(len(frames), np.int64)
    np.maximum.at(longest, dataset_of, lengths)
    beyond: npt.NDArray[np.bool_] = np.all(np.abs(frames) >= longest[:, None], axis=0)
    return beyond


def looks_like_frames(seconds: Sequence[float], frames: Int64, beyond: npt.NDArray[np.bool_]) -> bool:
    """Return whether a window in seconds was probably meant in frames, such as `range(16)`.

    This is the case if all steps are whole seconds, and more than half of them and at least two are beyond every episode. A
    single step far away does not count, because it is a way to ask for the first or the last frame.

    Args:
        seconds: Steps of the window in seconds, shape (T,).
        frames: Steps of the window as frame offsets for each dataset, shape (M, T).
        beyond: Result of `beyond_every_episode` for the window, shape (T,).
    """
    steps = np.asarray(seconds, np.float64)
    whole = (steps == np.round(steps)).all() and (frames != steps).any()  # at 1 fps, seconds and frames are the same
    return bool(whole and beyond.sum() >= 2 and 2 * beyond.sum() > len(beyond))


def window(
    offset: npt.NDArray[np.int64], frame: npt.NDArray[np.int64], length: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Return the frames of a window around each sample, clamped to the episode.

    Args:
        offset: Frame offsets of the window, shape (T,) or (B, T).
        frame: Frame index of each sample within its episode, shape (B,).
        length: Number of frames of each sample's episode, shape (B,).

    Returns:
        Frame indices in [0, length), and a mask that is True for frames outside the episode, both of shape (B, T).
    """
    wanted = frame[:, None] + offset
    clamped = np.clip(wanted, 0, length[:, None] - 1)
    return clamped, clamped != wanted
