"""A video index holds the values that it was made from, in little memory, and finds frames by their times."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.slow import examples

from dali_stream import DecodeError
from dali_stream.mp4.blocks import cut
from dali_stream.mp4.boxes import box
from dali_stream.mp4.clip import span
from dali_stream.mp4.index import VideoIndex, read_index, video_index
from dali_stream.mp4.muxer import Track, head
from dali_stream.storage import LocalStore

PAUSES = {"pauses": 137, "overlaps": -412}  # ticks, of 512 from frame to frame


def index_of(
    frames: int, *, b_frames: bool, steady: bool, gap: bool, pause: int = 0, most: int = 60_000, gop: int = 12
) -> VideoIndex:
    """An index of a file with packets of up to `most` bytes, and a keyframe every `gop` packets.

    With or without B-frames, at a constant frame rate or not, with sound between its chunks or not. After every 300 frames,
    the next frame is `pause` ticks later, or earlier if it is negative.
    """
    random, every = np.random.default_rng(0), np.arange(frames)
    size = random.integers(500, most, frames)
    pts = every * 512 if steady else np.cumsum(random.integers(300, 700, frames))
    pts = pts + every // 300 * pause
    if b_frames:
        order = every.reshape(-1, 4)[:, [0, 3, 1, 2]].ravel()
        pts = pts[np.argsort(order)]
    offset = 48 + np.cumsum(size) - size + (every // 30 * 4000 if gap else 0)
    return video_index(
        "video.mp4", (b"\0\0\0\0avc1",), bytes(44), 15360,
        offset=offset, size=size, pts=pts, keyframes=every[::gop], config=np.zeros(frames), index_bytes=100,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("b_frames", "steady", "gap", "expected"),
    [(False, True, False, 5.4), (False, False, True, 13.4), (True, True, False, 13.4), (True, False, True, 21.4)],
)
def test_the_memory_of_an_index_is_counted(b_frames: bool, steady: bool, gap: bool, expected: float) -> None:
    index = index_of(48_000, b_frames=b_frames, steady=steady, gap=gap)
    assert index.reordered == b_frames
    assert index.nbytes / len(index) == pytest.approx(expected, abs=0.1)
    # A copy in another process takes no more.
    copy = pickle.loads(pickle.dumps(index))
    arrays = [*vars(copy).values(), *(copy.reordering or ())]
    assert sum(each.nbytes for each in arrays if isinstance(each, np.ndarray)) == pytest.approx(index.nbytes, rel=0.01)


@pytest.mark.parametrize("first", [-700, 0, 1 << 31, 1 << 32, 1 << 60])
@pytest.mark.parametrize("place", [48, (1 << 32) - 300, (1 << 32) - 1, 1 << 40])
@pytest.mark.parametrize("gap", [0, 7, 1 << 33])
@pytest.mark.parametrize("steady", [True, False])
def test_large_and_negative_numbers_are_kept(first: int, place: int, gap: int, steady: bool) -> None:
    size = np.array([100, 0, 150, 50, 1 << 31])
    offset = place + np.cumsum(size) - size + np.array([0, 0, gap, gap, gap])
    pts = first + 512 * np.array([0, 3, 1, 2, 4 if steady else 5])
    index = video_index(
        "file", (bytes(80),), bytes(44), 15360, offset=offset, size=size, pts=pts, keyframes=np.array([0, 4]),
        config=np.zeros(5, np.int8), index_bytes=0,
    )  # fmt: skip
    assert index.offset.tolist() == offset.tolist()
    assert index.end.tolist() == (offset + size).tolist()
    assert index.size().tolist() == size.tolist()
    assert [index.size(packet) for packet in range(5)] == size.tolist()
    assert index.pts().tolist() == [index.pts(packet) for packet in range(5)] == pts.tolist()
    assert index.pts(slice(1, 4)).tolist() == index.pts(np.arange(1, 4)).tolist() == pts[1:4].tolist()
    assert (index.pts(0) - index.pts(1), index.pts(1) - index.pts(0)) == (-1536, 1536)
    if first < 1 << 53:  # where seconds are exact enough
        assert index.nearest(pts[[1, 0, 4, 2]] / 15360)[0].tolist() == [1, 0, 4, 2]


@given(
    st.booleans(),
    st.booleans(),
    st.lists(st.floats(-10, 100) | st.sampled_from([float("nan"), float("inf"), -1e30]), max_size=50),
)
@examples(100)
def test_the_nearest_frame_is_that_of_a_search_through_all(b_frames: bool, steady: bool, seconds: list[float]) -> None:
    index = index_of(2400, b_frames=b_frames, steady=steady, gap=False)
    times = np.array([*seconds, *(index.pts()[:5] / 15360), *((index.pts()[7:9] + 0.5) / 15360)])
    packets, away, _ = index.nearest(times)
    shown = index.pts() / 15360
    finite = np.isfinite(times)
    expected = np.abs(shown[:, None] - times[finite]).min(0)
    np.testing.assert_array_equal(away[finite], expected)
    np.testing.assert_array_equal(np.abs(shown[packets] - times)[finite], expected)
    assert not (away[~finite] < 1).any()


@given(
    st.booleans(),
    st.sampled_from(["steady", "pauses", "overlaps", "jitter"]),
    st.integers(0, 2399),
    st.integers(1, 60),
    st.floats(0, 1),
    st.integers(0, 1 << 32),
)
@example(False, "steady", 0, 1, 0.5, 0)  # a single frame
@examples(200)
def test_the_nearest_frames_of_an_episode_are_those_of_a_search_of_all(
    b_frames: bool, times: str, first: int, count: int, share: float, seed: int
) -> None:
    index = index_of(2400, b_frames=b_frames, steady=times != "jitter", gap=False, pause=PAUSES.get(times, 0))
    every = index.pts() / 15360
    episode = index.shown_at(slice(first, first + count)) / 15360
    seconds = episode + np.random.default_rng(seed).uniform(-share, share, len(episode)) * 256 / 15360
    packets, away, shown = index.nearest(seconds)
    np.testing.assert_array_equal(shown, every[packets])
    np.testing.assert_array_equal(away, np.abs(every[:, None] - seconds).min(0))


def test_the_frame_after_the_last_one_may_be_the_nearest() -> None:
    """A second recording begins 200 ticks after frame 299, and the rows are 120 ticks late, which is within the tolerance."""
    index = index_of(600, b_frames=False, steady=True, gap=False, pause=200 - 512)
    assert index.nearest((np.arange(300) * 512 + 120) / 15360)[0][-2:].tolist() == [298, 300]


@pytest.mark.parametrize("pts", [[512, 0], [1536, 1024, 512, 0]])
def test_frames_in_reverse_display_order_keep_their_times(pts: list[int]) -> None:
    n = len(pts)
    index = video_index(
        "file", (bytes(80),), bytes(44), 15360, offset=np.arange(n) * 10, size=np.full(n, 10), pts=np.array(pts),
        keyframes=np.array([0]), config=np.zeros(n, np.int8), index_bytes=0,
    )  # fmt: skip
    assert index.reordered
    assert index.pts().tolist() == pts
    assert index.nearest(np.array(pts) / 15360)[0].tolist() == list(range(n))


@pytest.mark.parametrize("pts", [[0, 512, 512, 1024], [0, 1024, 1024, 512]])
def test_two_frames_at_the_same_time_are_refused(tmp_path: Path, pts: list[int]) -> None:
    n, config = len(pts), box(b"vp08", bytes(78))
    track = Track(15360, bytes(44), (config,), np.full(n, 10), np.array(pts), np.ones(n, np.bool_), np.zeros(n, np.int64), 512)
    (tmp_path / "video.mp4").write_bytes(head(track) + bytes(10 * n))
    with pytest.raises(DecodeError, match="two frames at the same time"):
        read_index(LocalStore(str(tmp_path)), "video.mp4")


@pytest.mark.parametrize("pts", [[0, 1 << 33], [3 << 30, 0]])  # more than a duration holds, and than a shift
def test_times_that_the_tables_of_an_mp4_cannot_hold_are_refused(pts: list[int]) -> None:
    track = Track(
        15360, bytes(44), (bytes(86),), np.full(2, 10), np.array(pts), np.ones(2, np.bool_), np.zeros(2, np.int64), 512
    )
    with pytest.raises(DecodeError, match="consecutive frames must be at most 2\\^32 ticks apart"):
        head(track)


@pytest.mark.parametrize(("gop", "b_frames"), [(1, False), (4, False), (4, True), (60, True)])
def test_blocks_are_whole_gops_that_hold_what_their_frames_need(gop: int, b_frames: bool) -> None:
    index = index_of(240, b_frames=b_frames, steady=True, gap=False, most=1000, gop=gop)
    packets = index.display_order[20:150].astype(np.int64)
    blocks = cut(index, packets, index.decode_starts(packets), 3000)
    assert len(blocks.start) <= len(packets)
    assert (blocks.start[1:] == blocks.stop[:-1]).all()
    assert {*blocks.start.tolist()} <= {*index.offset[index.keyframes].tolist()}
    for frame, packet in enumerate(packets.tolist()):
        first, last = span(index, packet)
        assert blocks.start[blocks.first[frame]] <= index.offset[first]
        assert index.end[last] <= blocks.stop[blocks.last[frame]]
