"""The frame of a video that a row gets: the clock, the tolerance, and datasets with timestamps of a wall clock."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from support.datasets import ROWS
from support.videos import CAMERA, EPISODES, FPS, h264, identities, loader, recorded, samples, shifted

from dali_stream import Dataset, DatasetError, DecodeError, ResumeError

HALF = 0.5 / FPS


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two episodes in one file, whose timestamps are frame_index / fps. Read only."""
    return recorded(tmp_path_factory.mktemp("exact"), h264(12))


@pytest.fixture
def root(exact: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(exact, tmp_path / "data"))


def with_times(root: Path, frames: Sequence[float]) -> Path:
    """The dataset with these timestamps, in frames; one per row."""
    table = pq.read_table(root / ROWS)
    times = pa.array((np.asarray(frames) / FPS).astype(np.float32))
    pq.write_table(table.set_column(table.column_names.index("timestamp"), "timestamp", times), root / ROWS)
    return root


def wall_clock(root: Path, jitter: float) -> tuple[Path, np.ndarray]:
    """The dataset with timestamps that begin 0.31 frames late, and are up to `jitter` frames off; and these, in frames."""
    index = np.concatenate([np.arange(n) for n in EPISODES])
    frames = index + 0.31 + np.random.default_rng(0).uniform(-jitter, jitter, len(index)) * (index > 0)
    return with_times(root, frames), frames


def test_wall_clock_timestamps_are_named_as_such_with_their_remedies(root: Path) -> None:
    wall_clock(root, 0.15)
    with pytest.raises(DecodeError) as raised:
        list(loader(root, shuffle=False))
    message = str(raised.value)
    assert message.startswith(f"{CAMERA}: episode 0, frame 0: ")
    assert "timestamp 0.0103 s after from_timestamp 0.0000 s asks for 0.0103 s of the file" in message
    assert "The nearest frame, number 0 of 72, is at 0.0000 s, 0.0103 s away" in message
    assert "at most 0.0083 s (a quarter of a frame) is allowed" in message
    assert "not a multiple of 1/fps = 0.03333 s, so it is probably a wall-clock time" in message
    assert 'Dataset(clock="frame_index"), or --clock frame_index on the command line, locates frames by frame_index' in message
    assert "`dali-stream prepare URI OUT --clock frame_index` writes" in message
    assert "Dataset(tolerance_s=0.0166) accepts" in message


@pytest.mark.parametrize("jitter", [0.15, 0.6])
def test_frames_by_frame_index(root: Path, jitter: float) -> None:
    """The frames are right whatever the timestamps are. The timestamps are delivered unchanged."""
    _, frames = wall_clock(root, jitter)
    dataset = Dataset(root, clock="frame_index")
    batches = list(loader(dataset, delta_timestamps={CAMERA: [-1 / FPS, 0.0]}))
    assert sum(len(batch["index"]) for batch in batches) == sum(EPISODES)
    for batch in batches:
        places = list(zip(batch["episode_index"].tolist(), batch["frame_index"].tolist(), strict=True))
        assert identities(batch[CAMERA][:, 1]) == places
        assert identities(batch[CAMERA][:, 0]) == [(episode, max(frame - 1, 0)) for episode, frame in places]
        np.testing.assert_array_equal(batch["timestamp"], (frames[batch["index"]] / FPS).astype(np.float32))


def test_frames_by_frame_index_need_no_rising_timestamps(root: Path) -> None:
    with_times(root, [0.0] * sum(EPISODES))
    with pytest.raises(DatasetError, match=r"Invalid timestamp of row .* must be greater than"):
        list(loader(root))
    found = list(samples(loader(Dataset(root, clock="frame_index"))))
    assert len(found) == sum(EPISODES)
    assert identities(torch.stack([frames for *_, frames in found])) == [(episode, frame) for episode, frame, _ in found]


def test_a_larger_tolerance_delivers_the_nearest_frame(root: Path) -> None:
    """As LeRobot's `tolerance_s` does: where the clock is more than half a frame late, that is the next one."""
    index = np.concatenate([np.arange(n) for n in EPISODES])
    late = np.where(index % 5 == 4, 0.7, 0.4) * (index < 30)
    with_times(root, index + late)
    places = zip(np.repeat([0, 1], EPISODES).tolist(), index.tolist(), strict=True)
    expected = dict(zip(places, np.round(index + late), strict=True))
    for episode, frame, frames in samples(loader(Dataset(root, tolerance_s=HALF))):
        assert identities(frames[None]) == [(episode, expected[episode, frame])]


def test_a_tolerance_keeps_to_the_episode(root: Path) -> None:
    shifted(root, 1.0)
    with pytest.raises(DecodeError, match=r"episode 0, frame 30: .* outside its episode"):
        list(loader(Dataset(root, tolerance_s=HALF, trust_timestamps=True), shuffle=False))
    with pytest.raises(DecodeError, match=r"episode 0, frame 0.*: .* by counting it is frame number 0"):
        list(loader(Dataset(root, tolerance_s=HALF), shuffle=False))


def test_a_smaller_tolerance_is_kept(root: Path) -> None:
    shifted(root, 0.1)
    assert len(list(loader(root))) > 0
    with pytest.raises(DecodeError, match=r"0.0033 s away, but at most 0.0001 s \(0.003 frames\) is allowed"):
        list(loader(Dataset(root, tolerance_s=1e-4)))


@pytest.mark.parametrize(
    ("late", "tolerance_s", "said"),
    [
        (0.1, 1e-7, r"0\.0033 s away, but at most 1e-07 s \(3e-06 frames\)"),
        (3e-5, 1e-7, r"\de-06 s away, but at most 1e-07 s"),
        (0.25002, None, r"0\.00833\d+ s away, but at most 0\.00833\d+ s \(a quarter of a frame\)"),
    ],
)
def test_the_error_shows_that_a_frame_is_farther_away_than_the_tolerance(
    late: float, tolerance_s: float | None, said: str, root: Path
) -> None:
    """With the digits that this takes."""
    with pytest.raises(DecodeError, match=said) as caught:
        list(loader(Dataset(shifted(root, late), tolerance_s=tolerance_s), shuffle=False))
    away, allowed = re.findall(r"([-\d.e]+) s away, but at most ([-\d.e]+) s", str(caught.value))[0]
    assert float(away) > float(allowed)


def test_lerobots_tolerance_opens_what_lerobot_writes(exact: Path) -> None:
    assert sum(1 for _ in samples(loader(Dataset(exact, tolerance_s=1e-4)))) == sum(EPISODES)


def test_timestamps_that_drift_have_the_clock_as_a_remedy(root: Path) -> None:
    """At the end of an episode they are multiples of 1/fps, of frames that the episode does not have."""
    with_times(root, np.concatenate([np.arange(n) * 2.0 for n in EPISODES]))
    with pytest.raises(DecodeError, match=r'frame 1: .* by counting it is frame number 32.* Dataset\(clock="frame_index"\)'):
        list(loader(Dataset(root, episodes=[1]), shuffle=False, batch_size=2))
    trusting = Dataset(root, episodes=[1], trust_timestamps=True)
    with pytest.raises(DecodeError, match=r'If each row has its frame all the same: Dataset\(clock="frame_index"\)'):
        list(loader(trusting, shuffle=False))
    assert len(list(samples(loader(Dataset(root, clock="frame_index"))))) == sum(EPISODES)


def test_statistics_are_of_the_frames_by_that_clock(exact: Path, root: Path) -> None:
    wall_clock(root, 0.6)
    with pytest.raises(DecodeError, match="wall-clock"):
        Dataset(root).compute_stats([CAMERA])
    found = Dataset(root, clock="frame_index").compute_stats([CAMERA])[CAMERA]
    expected = Dataset(exact).compute_stats([CAMERA])[CAMERA]
    assert all(np.array_equal(found[name], expected[name]) for name in expected)


def test_the_fingerprint_has_what_is_not_the_default(exact: Path) -> None:
    default = Dataset(exact)
    assert (default.clock, default.tolerance_s) == ("timestamp", 0.25 / FPS)
    assert Dataset(exact, clock="timestamp", tolerance_s=0.25 / FPS).fingerprint == default.fingerprint
    others = [Dataset(exact, clock="frame_index"), Dataset(exact, tolerance_s=1e-4), Dataset(exact, tolerance_s=HALF)]
    assert len({dataset.fingerprint for dataset in (default, *others)}) == 4
    with loader(default) as first, loader(others[0]) as second, pytest.raises(ResumeError, match="These parts differ: clock"):
        second.load_state_dict(first.state_dict())


@pytest.mark.parametrize("tolerance_s", [0, -1.0, float("nan"), 0.5001 / FPS, 1.0, True, "1e-4"])
def test_a_tolerance_beyond_half_a_frame_is_refused(exact: Path, tolerance_s: object) -> None:
    with pytest.raises(ValueError, match=r"tolerance_s must be positive and at most half a frame, 0.0166667 s at 30 fps, got"):
        Dataset(exact, tolerance_s=tolerance_s)  # type: ignore[arg-type]


def test_an_unknown_clock_is_refused(exact: Path) -> None:
    with pytest.raises(ValueError, match="clock must be one of 'timestamp', 'frame_index', got 'wall'"):
        Dataset(exact, clock="wall")
