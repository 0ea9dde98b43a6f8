"""Windows against an obvious reference, frame by frame."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from support.slow import examples

from dali_stream.order.windows import TOLERANCE_S, beyond_every_episode, looks_like_frames, offsets, window

KEYS = ("action", "observation.state")


@given(
    st.lists(st.integers(-40, 40), min_size=1, max_size=8),
    st.lists(st.tuples(st.integers(1, 30), st.integers(0, 29)), min_size=1, max_size=8),
)
@examples(200)
def test_a_window_is_clamped_to_its_episode(steps: list[int], places: list[tuple[int, int]]) -> None:
    length = np.array([length for length, _ in places])
    frame = np.array([frame % n for n, frame in places])
    shown, pad = window(np.array(steps), frame, length)
    assert shown.shape == pad.shape == (len(places), len(steps))
    assert pad.dtype == np.bool_
    for row, (n, current) in enumerate(zip(length.tolist(), frame.tolist(), strict=True)):
        for column, step in enumerate(steps):
            asked = current + step
            expected = 0 if asked < 0 else n - 1 if asked >= n else asked
            assert shown[row, column] == expected
            assert pad[row, column] == (asked < 0 or asked >= n)


@given(
    st.lists(st.integers(-500, 500), min_size=1, max_size=20),
    st.sampled_from((1, 5, 10, 15, 24, 29.97, 30, 50, 60, 100)),
    st.floats(-0.9, 0.9),
)
@examples(200)
def test_offsets_are_rounded_to_frames_within_the_tolerance(steps: list[int], fps: float, away: float) -> None:
    seconds = [step / fps + away * TOLERANCE_S for step in steps]
    assert offsets({"action": seconds}, fps, KEYS)["action"].tolist() == steps


@given(st.integers(-500, 500), st.sampled_from((1, 10, 29.97, 30, 60)), st.floats(-0.5, 0.5))
@examples(200)
def test_a_delta_between_frames_is_refused(step: int, fps: float, away: float) -> None:
    assume(abs(away) / fps > 1.1 * TOLERANCE_S)
    with pytest.raises(ValueError, match=r"delta_timestamps\['action'\] must be multiples of 1/fps"):
        offsets({"action": [0.0, (step + away) / fps]}, fps, KEYS)


def test_the_message_names_the_delta_and_the_nearest_frame() -> None:
    message = "delta_timestamps['action'] must be multiples of 1/fps = 0.1 s within 0.0001 s, got 0.12, whose nearest"
    with pytest.raises(ValueError, match=re.escape(message) + r" frame is at 0\.1 s"):
        offsets({"action": [0.0, 0.12]}, 10, KEYS)


@pytest.mark.parametrize(
    ("deltas", "message"),
    [
        ({"actoin": [0.0]}, "Unknown key 'actoin' in delta_timestamps. Available: action, observation.state"),
        ({"action": []}, r"delta_timestamps\['action'\] must be a list of one or more numbers of seconds, got \[\]"),
        ({"action": 0.1}, "must be a list of one or more numbers of seconds, got"),
        ({"action": [[0.0]]}, "must be a list of one or more numbers"),
        ({"action": [0.0, float("nan")]}, "must be a list of one or more numbers"),
        ({"action": [float("inf")]}, "must be a list of one or more numbers"),
        ({"action": "0.1"}, r"delta_timestamps\['action'\] must be a list of one or more numbers of seconds, got '0\.1'"),
        ({"action": "012"}, "must be a list of one or more numbers of seconds, got '012'"),
        ({"action": ["0.1", "0.2"]}, r"must be a list of one or more numbers of seconds, got \['0\.1', '0\.2'\]"),
        ({"action": [0.0, "0.1"]}, "must be a list of one or more numbers"),
        ({"action": np.array(["0.1"])}, "must be a list of one or more numbers"),
        ({"action": [b"0"]}, "must be a list of one or more numbers"),
        ({"action": [None]}, r"delta_timestamps\['action'\]"),
        pytest.param({"action": ["a"]}, r"delta_timestamps\['action'\]"),
        pytest.param({"action": [[0.0], [0.0, 0.1]]}, r"delta_timestamps\['action'\]"),
    ],
)
def test_what_is_no_window_is_refused(deltas: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        offsets(deltas, 10, KEYS)


def test_none_is_no_window() -> None:
    assert offsets({}, 10, KEYS) == {}


@pytest.mark.parametrize(
    ("seconds", "fps", "expected"),
    [
        (range(16), 10, True),  # 11 of 16 steps are beyond the longest episode
        (range(-4, 4), 30, True),
        (range(4), 10, False),  # only one of them
        (range(9), 10, False),  # half of them are, but not more
        ([0.0, 0.1, 0.2], 10, False),
        ([-9.0, -8.0, 0.5], 10, False),  # not all are whole seconds
        (range(100), 1, False),  # where both are the same
        ([-1000.0, 0.0], 10, False),  # the first frame
    ],
)
def test_windows_that_were_meant_in_frames(seconds: list[float], fps: int, expected: bool) -> None:
    """Two datasets have episodes of up to 50 and 30 frames. A step must be beyond both."""
    frames = np.array([[round(step * fps) for step in seconds]] * 2)
    beyond = beyond_every_episode(frames, np.array([50, 20, 30]), np.array([0, 0, 1]))
    assert beyond.tolist() == [abs(step * fps) >= 50 for step in seconds]
    assert looks_like_frames(list(seconds), frames, beyond) == expected
