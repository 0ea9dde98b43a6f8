"""Video files that lack frames of their episodes, or whose times are wrong: no row gets the frame of another row in silence."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from support.broken import FROM, edit_table, put
from support.datasets import EPISODE_TABLE, Camera, build
from support.doctor import looked_at
from support.programs import failed, pictures
from support.slow import examples, slow
from support.tools import prepared
from support.videos import CAMERA, FPS, SIZE, av1, draw, encode_apart, ffmpeg, h264, loader, mpeg4, write_dataset
from support.wild import delivered

from dali_stream import DaliStreamError, Dataset, DecodeError, Mixture, ResumeError
from dali_stream.checks.arrays import NONE
from dali_stream.cli import main
from dali_stream.demo import read_identities
from dali_stream.mp4.counting import FileEpisodes, count_rows
from dali_stream.mp4.index import VideoIndex, video_index
from dali_stream.mp4.timing import EpisodeTimes

LENGTHS = (12, 12, 12)
Missing = dict[int, Sequence[int]]  # {episode: numbers of its frames that the video lacks}


def lacking(
    folder: Path,
    missing: Missing,
    *,
    measures: bool = False,
    codec: tuple[str, ...] = mpeg4(5),
    lengths: Sequence[int] = LENGTHS,
) -> Path:
    """A dataset with all episodes in one file, each encoded on its own, which lacks frames.

    `from_timestamp` counts the rows of the episodes before. If the writer `measures`, it counts the frames that the video has.
    """
    parts = [np.delete(draw((n,), first=e), missing.get(e, []), 0) for e, n in enumerate(lengths)]
    root = write_dataset(folder / "data", [encode_apart(parts, folder / "video.mp4", codec)], [lengths])
    if measures:
        stops = np.cumsum([len(part) for part in parts])
        starts = stops - [len(part) for part in parts]
        edit_table(root, EPISODE_TABLE, lambda table: put(table, FROM, (starts / FPS).tolist()))
        edit_table(root, EPISODE_TABLE, lambda table: put(table, FROM.replace("from", "to"), (stops / FPS).tolist()))
    return root


def rows_of(lengths: Sequence[int], episodes: Sequence[int], drop: int = 0) -> dict[int, tuple[int, int]]:
    """{index of each row of some episodes: the frame that it must have}."""
    first = np.cumsum([0, *lengths])
    return {int(first[e]) + n: (e, n) for e in episodes for n in range(lengths[e] - drop)}


def refused(dataset: Path | Dataset, **options: Any) -> str:
    """The message with which a Loader refuses a dataset."""
    with pytest.raises(DecodeError) as raised:
        delivered(dataset, **options)
    return str(raised.value)


def right(root: Path, lengths: Sequence[int] = LENGTHS) -> list[int]:
    """The episodes that are delivered one by one. Each of their frames is the right one."""
    kept = []
    for episode in range(len(lengths)):
        try:
            frames = delivered(Dataset(root, episodes=[episode]))
        except DecodeError:
            continue
        assert frames == rows_of(lengths, [episode])
        kept.append(episode)
    return kept


# ---- fewer frames than rows


@pytest.mark.parametrize(
    ("missing", "codec", "whole"),
    [
        pytest.param({0: [11]}, mpeg4(5), [], id="the last of the first episode"),
        slow({0: [0]}, mpeg4(2), [], id="the first of the first episode"),
        pytest.param({1: [4]}, mpeg4(5), [0], id="inside the second episode"),
        pytest.param({2: [4]}, mpeg4(5), [0, 1], id="inside the last episode"),
        pytest.param({0: [10, 11]}, mpeg4(2), [], id="as many as a GOP is long"),
        slow({0: [5], 1: [7]}, mpeg4(5), [], id="in two episodes"),
        slow({0: [11]}, h264(12), [], id="of H.264 with B-frames"),
        slow({0: [11]}, av1(2), [], id="of AV1"),
    ],
)
def test_rows_after_a_missing_frame_are_refused(
    tmp_path: Path, missing: Missing, codec: tuple[str, ...], whole: list[int]
) -> None:
    """`from_timestamp` counts rows, so that each later row finds the frame of the next one at its time."""
    root = lacking(tmp_path, missing, codec=codec)
    lacks = sum(map(len, missing.values()))
    message = refused(root, shuffle=False, batch_size=1) if not whole else refused(Dataset(root, episodes=[1 + whole[-1]]))
    if len(whole) < 2:
        assert f"the file has {36 - lacks} frames, and its episodes have 36 rows" in message
        assert "drop_n_last_frames" not in message
    assert right(root) == whole
    if whole:  # as the message says
        assert delivered(Dataset(root, episodes=whole)) == rows_of(LENGTHS, whole)
    with pytest.raises(DecodeError, match="rows"):
        Dataset(root, cameras=[CAMERA]).compute_stats([CAMERA])


def test_the_episodes_that_a_message_names_are_all_that_must_be_left_out(tmp_path: Path) -> None:
    root = lacking(tmp_path, {1: [4]})
    [named] = re.findall(r"leave its 2 episodes ([\d, ]+) out with episodes=", refused(Dataset(root, episodes=[2])))
    rest = sorted({0, 1, 2} - {int(number) for number in named.split(", ")})
    assert delivered(Dataset(root, episodes=rest)) == rows_of(LENGTHS, rest)


def test_trust_in_timestamps_takes_the_frames_that_time_alone_names(tmp_path: Path) -> None:
    root = lacking(tmp_path, {0: [11]})
    assert "Dataset(trust_timestamps=True), or --trust-timestamps on the command line" in refused(root)
    trusting = Dataset(root, trust_timestamps=True, drop_n_last_frames=1)
    by_time = [(0, n) for n in range(11)] + [(e, n) for e in (1, 2) for n in range(1, 12)]
    assert list(delivered(trusting, shuffle=False).values()) == by_time
    assert trusting.fingerprint != Dataset(root, drop_n_last_frames=1).fingerprint
    with loader(trusting) as first, loader(Dataset(root, drop_n_last_frames=1)) as second:
        state = first.state_dict()
        with pytest.raises(ResumeError, match=r"These parts differ: clock \(clock=, tolerance_s=, trust_timestamps=\)"):
            second.load_state_dict(state)


@pytest.mark.parametrize(
    ("missing", "codec"),
    [
        pytest.param({0: [11]}, mpeg4(5), id="of the first episode"),
        pytest.param({1: [11]}, mpeg4(5), id="of the second episode"),
        pytest.param({0: [10, 11]}, mpeg4(2), id="as many as a GOP is long"),
    ],
)
def test_last_frames_that_are_missing_are_dropped_where_later_episodes_begin_right(
    tmp_path: Path, missing: Missing, codec: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    """`from_timestamp` follows the video, so that no other episode is moved."""
    root = lacking(tmp_path, missing, measures=True, codec=codec)
    [short], [lacks] = missing, map(len, missing.values())
    message = refused(root, shuffle=False)
    assert f"the episode has 12 rows, and its video {12 - lacks} frames" in message
    [drop] = re.findall(r"Dataset\(drop_n_last_frames=(\d)\) leaves the last", message)
    assert "right only if the end of the video is missing, and not a frame before" in message
    assert delivered(Dataset(root, drop_n_last_frames=int(drop))) == rows_of(LENGTHS, [0, 1, 2], lacks)
    assert f"episode {short} has 12 rows, and its video {12 - lacks} frames" in caplog.text
    assert right(root) == [episode for episode in range(3) if episode != short]
    finding = looked_at(Dataset(root))[f"{CAMERA} timestamps"]
    assert finding.text.startswith(f"{CAMERA}: episode {short}, frame {12 - lacks}: ")
    assert f". Dataset(drop_n_last_frames={drop}) leaves the last" in finding.text
    assert looked_at(Dataset(root, drop_n_last_frames=int(drop)))[f"{CAMERA} timestamps"].status == "ok"


@pytest.mark.parametrize("version", ["v3.0", "v2.1"])
def test_an_episode_in_a_file_of_its_own_is_refused_as_a_whole(
    tmp_path: Path, version: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Counting does not tell whether its end is missing. The message says so, and how to see it."""
    files = [encode_apart([draw((12,), first=0)], tmp_path / "0.mp4", mpeg4(5))]
    files.append(encode_apart([np.delete(draw((12,), first=1), 3, 0)], tmp_path / "1.mp4", mpeg4(5)))
    root = build(tmp_path / "data", [12, 12], {}, cameras={CAMERA: Camera(files, [[12], [12]], SIZE)}, fps=FPS, version=version)
    for row in (0, 11):  # before the missing frame and after it
        message = refused(Dataset(root, episodes=[1], frames={1: [(row, row + 1), (11, 12)][: 1 + (row < 11)]}), shuffle=False)
        assert "the episode has 12 rows, and its video 11 frames" in message
    assert "right only if the end of the video is missing, and not a frame before" in message
    assert "`dali-stream preview URI --drop-n-last-frames 1 --plots`" in message
    assert delivered(Dataset(root, episodes=[0])) == rows_of([12, 12], [0])
    assert not caplog.text
    delivered(Dataset(root, drop_n_last_frames=1))
    assert (
        "episode 1 has 12 rows, and its video 11 frames. Rows that are not left out have the right frames only if"
        in caplog.text
    )


def test_substitutes_take_the_place_of_all_rows_that_may_be_wrong(tmp_path: Path) -> None:
    root = lacking(tmp_path, {2: [11]}, measures=True)
    with loader(root, on_error="substitute", batch_size=36) as batches:
        shown = {index for batch in batches for index in batch["index"].tolist()}
        assert batches.stats()["substituted"] == 12
    assert shown == set(range(24))


def test_frames_that_are_missing_by_their_times_move_no_others(tmp_path: Path) -> None:
    """The gap is where the frame is missing, so that all other rows are right by their times."""
    whole = encode_apart([draw((n,), first=e) for e, n in enumerate(LENGTHS)], tmp_path / "whole.mp4", mpeg4(1))
    ffmpeg("-i", whole, "-c", "copy", "-bsf:v", r"noise=drop=eq(n\,11)+eq(n\,17)", tmp_path / "video.mp4")
    root = write_dataset(tmp_path / "data", [tmp_path / "video.mp4"], [LENGTHS])
    assert "the episode has 12 rows, and its video 11 frames" in (message := refused(Dataset(root, episodes=[0])))
    assert "Dataset(drop_n_last_frames=1) leaves" in message
    assert "right only if the end of the video is missing" in message  # the gap is at the end of the episode
    assert delivered(Dataset(root, episodes=[0], drop_n_last_frames=1)) == rows_of(LENGTHS, [0], 1)
    others = Dataset(root, frames={0: [(0, 11)], 1: [(0, 5), (6, 12)], 2: [(0, 12)]})
    assert delivered(others) == {n: at for n, at in rows_of(LENGTHS, [0, 1, 2]).items() if n not in (11, 17)}


def test_a_gap_at_the_end_of_an_episode_does_not_show_which_frame_is_missing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A writer places each episode by its rows, and the frames that it got one after the other."""
    for lost in (4, 11):
        parts = [np.delete(draw((n,), first=e), [lost] * (e == 0), 0) for e, n in enumerate(LENGTHS)]
        apart = encode_apart(parts, tmp_path / f"apart{lost}.mp4", mpeg4(5))
        placed, root = tmp_path / f"placed{lost}.mp4", tmp_path / f"data{lost}"
        ffmpeg("-i", apart, "-c", "copy", "-bsf:v", r"setts=ts=TS+gte(N\,11)*DURATION", placed)
        root = write_dataset(root, [placed], [LENGTHS])
        for rows in ([(0, 12)], [(5, 6), (11, 12)]):
            message = refused(Dataset(root, frames={0: rows}), shuffle=False)
            assert "the episode has 12 rows, and its video 11 frames" in message
            assert "Dataset(drop_n_last_frames=1) leaves the last 1 row of each episode out" in message
            assert "right only if the end of the video is missing, and not a frame before" in message
        assert right(root) == [1, 2]
        assert not caplog.text
        cut = delivered(Dataset(root, frames={0: [(0, 11)], 1: [(0, 12)]}))
        assert "Rows that are not left out have the right frames only if the end of the video is missing" in caplog.text
        caplog.clear()
    assert cut == {n: frame for n, frame in rows_of(LENGTHS, [0, 1]).items() if n != 11}  # its end is missing indeed
    assert delivered(Dataset(root, drop_n_last_frames=1)) == rows_of(LENGTHS, [0, 1, 2], 1)


def test_raw_h264_with_wrong_times_is_refused(tmp_path: Path) -> None:
    """A remux of raw H.264 with B-frames has the times of decoding, and an edit list that hides its first frames."""
    whole = encode_apart([draw((n,), first=e) for e, n in enumerate(LENGTHS)], tmp_path / "whole.mp4", h264(12))
    ffmpeg("-i", whole, "-c", "copy", "-f", "h264", tmp_path / "video.h264")
    ffmpeg("-f", "h264", "-r", str(FPS), "-i", tmp_path / "video.h264", "-c", "copy", tmp_path / "video.mp4")
    root = write_dataset(tmp_path / "data", [tmp_path / "video.mp4"], [LENGTHS])
    message = refused(root)
    assert "the file has 34 frames (2 more are hidden by its edit list), and its episodes have 36 rows" in message
    assert "drop_n_last_frames" not in message
    assert right(root) == []
    assert refused(Dataset(root, drop_n_last_frames=2))


def test_a_file_that_was_encoded_in_one_run_shows_nothing_by_its_keyframes(tmp_path: Path) -> None:
    """Each episode seems to begin with a keyframe, since its length is a multiple of the GOP."""
    frames = np.delete(draw(LENGTHS), 4, 0)
    root = write_dataset(tmp_path / "data", [encode_apart([frames], tmp_path / "video.mp4", mpeg4(2))], [LENGTHS])
    assert right(root) == []


# ---- as many frames as rows


@pytest.mark.parametrize("late", [0.8, *map(slow, (-0.8, 1.0)), -1.0, slow(-1.8)])
def test_time_and_count_must_name_the_same_frame(tmp_path: Path, late: float) -> None:
    """`from_timestamp` is wrong from the second episode on. A quarter of a frame is within the tolerance."""
    root = lacking(tmp_path, {})
    starts = np.array([0, 12 + late, 24 + late]) / FPS
    edit_table(root, EPISODE_TABLE, lambda table: put(table, FROM, starts.tolist()))
    message = refused(Dataset(root, episodes=[2]), shuffle=False)
    number = 24 + round(late)
    assert f"The nearest frame, number {number} of 36," in message
    assert "the file has exactly as many frames as rows, and by counting it is frame number 24" in message
    assert "from_timestamp or the timestamps are wrong" in message
    assert right(root) == ([0] if late > 0 else [])
    finding = looked_at(Dataset(root, episodes=[1]))[f"{CAMERA} timestamps"]
    assert (finding.status, "by counting" in finding.text) == ("problem", True)
    edit_table(root, EPISODE_TABLE, lambda table: put(table, FROM, [0.0, 12 / FPS, 24 / FPS]))  # as the message says
    assert delivered(root) == rows_of(LENGTHS, [0, 1, 2])


@pytest.mark.parametrize(
    ("frames", "codec", "short"),
    [((13, 12, 11), mpeg4(5), 2), ((11, 12, 13), mpeg4(5), 0), slow((13, 12, 11), mpeg4(2), 2), slow((13, 12, 11), av1(2), 2)],
)
def test_keyframes_show_that_one_episode_has_more_frames_and_another_one_fewer(
    tmp_path: Path, frames: tuple[int, ...], codec: tuple[str, ...], short: int
) -> None:
    """`from_timestamp` follows the video, which has as many frames as rows by coincidence."""
    parts = [draw((n,), first=e) for e, n in enumerate(frames)]
    root = write_dataset(tmp_path / "data", [encode_apart(parts, tmp_path / "video.mp4", codec)], [LENGTHS])
    stops = np.cumsum(frames)
    edit_table(root, EPISODE_TABLE, lambda table: put(table, FROM, ((stops - frames) / FPS).tolist()))
    edit_table(root, EPISODE_TABLE, lambda table: put(table, FROM.replace("from", "to"), (stops / FPS).tolist()))
    assert right(root) == [episode for episode in range(3) if episode != short]
    message = refused(Dataset(root, episodes=[short]))
    assert "the episode has 12 rows, and its video 11 frames" in message
    assert "by counting" not in message
    assert "right only if the end of the video is missing, and not a frame before" in message
    [drop] = re.findall(r"Dataset\(drop_n_last_frames=(\d)\) leaves the last", message)
    assert delivered(Dataset(root, drop_n_last_frames=int(drop))) == rows_of(LENGTHS, [0, 1, 2], 1)


@pytest.mark.parametrize(
    ("missing", "more", "codec", "whole"),
    [
        pytest.param({0: [4]}, {2: 1}, mpeg4(5), [], id="a frame at the end"),
        pytest.param({1: [4]}, {2: 1}, mpeg4(5), [0, 3], id="a frame before the last episode"),
        slow({2: [11]}, {0: 1}, mpeg4(5), [3], id="a frame in front"),
        slow({0: [4, 7]}, {2: 2}, mpeg4(5), [3], id="two frames"),
        slow({1: [4]}, {2: 1}, mpeg4(2), [0, 3], id="of short GOPs"),
        slow({1: [4]}, {2: 1}, av1(2), [0, 3], id="of AV1"),
        slow({1: [4]}, {2: 1}, h264(250), [0, 3], id="of H.264"),
    ],
)
def test_another_frame_in_place_of_a_missing_one_is_noticed(
    tmp_path: Path, missing: Missing, more: dict[int, int], codec: tuple[str, ...], whole: list[int]
) -> None:
    """`from_timestamp` counts rows, as many as frames, but no episode concerned begins where it was encoded."""
    lengths = LENGTHS if not whole else (*LENGTHS, 12)
    parts = [np.delete(draw((n + more.get(e, 0),), first=e), missing.get(e, []), 0) for e, n in enumerate(lengths)]
    root = write_dataset(tmp_path / "data", [encode_apart(parts, tmp_path / "video.mp4", codec)], [lengths])
    wrong = [episode for episode in range(len(lengths)) if episode not in whole]
    message = refused(Dataset(root, episodes=wrong), shuffle=False)
    assert f"the file has {sum(lengths)} frames, as many as its episodes have rows, but its keyframes do not fit" in message
    assert f"leave its {len(wrong)} episodes {', '.join(map(str, wrong))} out with episodes=" in message
    assert right(root, lengths) == whole
    if whole:  # as the message says
        assert delivered(Dataset(root, episodes=whole)) == rows_of(lengths, whole)


@pytest.mark.parametrize("to_timestamp", ["next start", "rows", "last frame", "infinite"])
@examples(200)
@given(seed=st.integers(0, 2**32 - 1), fewer=st.booleans())
def test_healthy_files_of_a_variable_rate_are_delivered(to_timestamp: str, seed: int, fewer: bool) -> None:
    """Rows have the times of their frames, on a clock with jitter and drift. Other frames may be between the episodes."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 40, rng.integers(1, 6))
    steps = rng.uniform(0.6, 1.4, lengths.sum() + 5 * fewer) * rng.uniform(0.7, 1.5)  # frames from one frame to the next
    ticks = np.round(np.append(0, np.cumsum(steps)[:-1]) * 1000).astype(np.int64)
    index, first = file_of([len(ticks)], 5, True, ticks, FPS * 1000), np.cumsum(lengths) - lengths
    seconds = np.append(ticks, ticks[-1] + 1000) / (FPS * 1000)
    start = seconds[first]
    end = {
        "next start": seconds[first + lengths],
        "rows": start + lengths / FPS,
        "last frame": seconds[first + lengths - 1],
        "infinite": np.full(len(lengths), np.inf),
    }[to_timestamp]
    result = count_rows(FileEpisodes(np.arange(len(lengths)), start, lengths, end), index, FPS)
    for episode, length in enumerate(lengths.tolist()):
        numbers, own = np.arange(length), result.of(episode)
        shown = seconds[first[episode] + numbers] - start[episode] + rng.uniform(0, 0.2, length) / FPS
        times = EpisodeTimes(index, (start[episode], own.stop), shown, numbers, FPS, 0.25 / FPS, count=own)
        np.testing.assert_array_equal(times.packets(), first[episode] + numbers)


# ---- the command line


def test_preview_shows_the_rows_of_a_short_episode(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As the message says, so that one can see whether the end is missing."""
    root, sheet = lacking(tmp_path, {0: [11]}, measures=True), tmp_path / "sheet.png"
    [command] = re.findall(r"`dali-stream (preview) URI (--drop-n-last-frames \d --plots)`", refused(root))
    more = ["--out", str(sheet), "--episodes", "0", "--batch-size", "11"]
    assert main([command[0], str(root), *command[1].split(), *more]) == 0
    assert sorted(tuple(read_identities(pixels[None])[0, :2]) for _, pixels in pictures(sheet)) == [(0, n) for n in range(11)]
    capsys.readouterr()
    assert "the episode has 12 rows, and its video 11 frames" in failed(capsys, [command[0], root, *more], 1)


def test_trust_is_an_option_of_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = lacking(tmp_path, {0: [11]})
    command = ["preview", root, "--out", tmp_path / "sheet.png", "--episodes", "1", "--batch-size", "8"]
    assert "its episodes have 36 rows" in failed(capsys, command, 1)
    assert main([*map(str, command), "--trust-timestamps"]) == 0


def test_trust_is_kept_in_files_that_describe_datasets(tmp_path: Path) -> None:
    root, file = lacking(tmp_path, {0: [11]}), tmp_path / "mixture.json"
    arguments = {"uri": str(root), "trust_timestamps": True, "drop_n_last_frames": 1}
    file.write_text(json.dumps({"datasets": {"a": arguments}}))
    with loader(Mixture.from_file(file), delta_timestamps={}) as batches:
        assert len(list(batches)) == len(batches)


# ---- prepare


def test_prepare_drops_what_a_loader_refuses(tmp_path: Path) -> None:
    root = lacking(tmp_path, {1: [4]})
    with pytest.raises(DaliStreamError, match=r"the file has 35 frames, and its episodes have 36 rows.*let --drop-broken"):
        prepared(root, tmp_path / "refused")
    report = prepared(root, tmp_path / "out", drop_broken=True)
    assert list(report.dropped) == ["1", "2"]
    assert delivered(tmp_path / "out") == rows_of(LENGTHS, [0])
    with pytest.raises(
        DaliStreamError, match=r"all 3 episodes cannot be read: .*from_timestamp or the timestamps are wrong|35"
    ):
        prepared(lacking(tmp_path / "other", {0: [11]}), tmp_path / "none", drop_broken=True)


@pytest.mark.parametrize("options", [{}, slow({"codec": "h264", "gop": 2}, id="encoded")])
def test_prepare_keeps_the_episodes_beside_a_short_one(tmp_path: Path, options: dict[str, Any]) -> None:
    root = lacking(tmp_path, {0: [3]}, measures=True)
    report = prepared(root, tmp_path / "out", drop_broken=True, **options)
    assert list(report.dropped) == ["0"]
    assert list(delivered(tmp_path / "out", shuffle=False).values()) == list(rows_of(LENGTHS, [1, 2]).values())


# ---- episodes that share frames


@pytest.mark.parametrize(("episodes", "frames"), [(None, 24), ([0, 2], 24), slow([1], 24), slow(None, 36), slow([0, 2], 40)])
def test_episodes_that_overlap_share_their_frames(tmp_path: Path, episodes: list[int] | None, frames: int) -> None:
    """Windows around events: frames 0 to 11, 6 to 17 and 12 to 23 of one video."""
    root = overlapping(tmp_path, frames)
    found = delivered(Dataset(root, episodes=episodes))
    chosen = range(3) if episodes is None else episodes
    assert found == {12 * e + n: (0, 6 * e + n) for e in chosen for n in range(12)}
    if episodes is None:
        assert looked_at(Dataset(root))[f"{CAMERA} timestamps"].status == "ok"
        prepared(root, tmp_path / "out")
        assert delivered(tmp_path / "out") == found


def test_windows_of_a_video_that_lacks_a_frame_are_refused(tmp_path: Path) -> None:
    root = overlapping(tmp_path, 24, [3])
    message = refused(root)
    assert "the file has 23 frames, and its episodes have 24 rows" in message
    with pytest.raises(DecodeError):
        delivered(Dataset(root, episodes=[2]))


def test_frames_that_an_encoder_began_anew_are_not_shared(tmp_path: Path) -> None:
    """`to_timestamp` counts rows, so that the first episode seems to share a frame with the second one."""
    root = lacking(tmp_path, {0: [11]}, measures=True)
    stops = np.array([12, 23, 35]) / FPS
    edit_table(root, EPISODE_TABLE, lambda table: put(table, FROM.replace("from", "to"), stops.tolist()))
    assert "the episode has 12 rows, and its video 11 frames" in refused(Dataset(root, episodes=[0]))
    assert right(root) == [1, 2]


@pytest.mark.parametrize("takes", [20, 30])
def test_windows_of_a_video_of_several_takes_share_their_frames(tmp_path: Path, takes: int) -> None:
    """Some windows begin at a take, and the window before has a few frames of the take."""
    video = encode_apart(np.split(draw((60,)), range(takes, 60, takes)), tmp_path / "video.mp4", mpeg4(12))
    root = windows(tmp_path, video, 10, [13] * 5)
    expected = {13 * e + n: (0, 10 * e + n) for e in range(5) for n in range(13)}
    assert delivered(root) == expected
    assert delivered(Dataset(root, episodes=[1])) == {n: at for n, at in expected.items() if n // 13 == 1}
    assert delivered(Dataset(root, trust_timestamps=True)) == expected


@pytest.mark.parametrize(
    ("takes", "length", "codec"),
    [
        pytest.param(60, 12, mpeg4(250), id="as many rows as frames"),
        pytest.param(10, 11, mpeg4(6), id="each begins at a take"),
    ],
)
def test_windows_that_counting_contradicts_are_delivered_as_the_message_says(
    tmp_path: Path, takes: int, length: int, codec: tuple[str, ...]
) -> None:
    video = encode_apart(np.split(draw((60,)), range(takes, 60, takes)), tmp_path / "video.mp4", codec)
    root = windows(tmp_path, video, 10, [length] * 5)
    for chosen in (None, [0], [1]):
        message = refused(Dataset(root, episodes=chosen), shuffle=False)
        assert "Dataset(trust_timestamps=True), or --trust-timestamps on the command line" in message
    expected = {length * e + n: (0, 10 * e + n) for e in range(5) for n in range(length)}
    assert delivered(Dataset(root, trust_timestamps=True)) == expected


def test_trust_in_timestamps_is_named_only_where_each_row_has_a_frame_by_its_time(tmp_path: Path) -> None:
    root = lacking(tmp_path, {0: [11]})
    assert "trust_timestamps" in refused(Dataset(root, episodes=[1]))
    assert len(delivered(Dataset(root, episodes=[1], trust_timestamps=True))) == 12
    assert "trust_timestamps" not in refused(Dataset(root, episodes=[2]))  # its last row has no frame by its time
    assert "the episode has 12 rows" in refused(Dataset(root, episodes=[2], trust_timestamps=True))


def windows(folder: Path, video: Path, stride: int, lengths: Sequence[int]) -> Path:
    """A dataset whose episodes begin every `stride` frames of a video, as `to_timestamp` says too."""
    root, starts = write_dataset(folder / "data", [video], [lengths]), stride * np.arange(len(lengths))
    edit_table(root, EPISODE_TABLE, lambda table: put(table, FROM, (starts / FPS).tolist()))
    edit_table(root, EPISODE_TABLE, lambda table: put(table, FROM.replace("from", "to"), ((starts + lengths) / FPS).tolist()))
    return root


def overlapping(folder: Path, count: int, missing: Sequence[int] = ()) -> Path:
    frames = np.delete(draw((count,)), missing, 0)
    return windows(folder, encode_apart([frames], folder / "video.mp4", mpeg4(5)), 6, LENGTHS)


# ---- any file


def file_of(
    parts: Sequence[int], gop: int, in_one_run: bool, times: npt.NDArray[np.int64] | None = None, timescale: int = FPS
) -> VideoIndex:
    """The index of a file with these numbers of frames of its episodes, by default at a constant rate."""
    runs = [sum(parts)] if in_one_run else parts
    starts = np.cumsum([0, *runs])
    keyframes = np.concatenate([np.arange(start, start + n, gop) for start, n in zip(starts, runs, strict=False)])
    n = sum(parts)
    return video_index(
        "a.mp4", (b"",), b"", timescale, offset=np.arange(n), size=np.ones(n, np.int64), keyframes=keyframes,
        pts=np.arange(n) if times is None else times, config=np.zeros(n, np.int64), index_bytes=0,
    )  # fmt: skip


@examples(1000)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    gop=st.sampled_from([1, 2, 3, 5, 12, 250]),
    in_one_run=st.booleans(),
    measures=st.booleans(),
    data=st.data(),
)
def test_no_row_gets_the_frame_of_another_row(
    lengths: list[int], gop: int, in_one_run: bool, measures: bool, data: st.DataObject
) -> None:
    """Whatever is missing, wherever, and however the file was written. Rows without a frame of theirs are refused."""
    rows = [(e, n) for e, length in enumerate(lengths) for n in range(length)]
    gone = data.draw(st.lists(st.sampled_from(rows), max_size=4, unique=True))
    frames = [row for row in rows if row not in gone]
    parts = [sum(e == episode for e, _ in frames) for episode in range(len(lengths))]
    if not all(parts):
        return
    index, sizes = file_of(parts, gop, in_one_run), np.array(parts if measures else lengths)
    start = (np.cumsum(sizes) - sizes) / FPS
    whole = FileEpisodes(np.arange(len(lengths)), start, np.array(lengths), start + sizes / FPS)
    result = count_rows(whole, index, FPS)
    for episode, length in enumerate(lengths):
        numbers, own = np.arange(length), result.of(episode)
        times = EpisodeTimes(index, (start[episode], own.stop), numbers / FPS, numbers, FPS, 0.25 / FPS, count=own)
        packets = times.packets()
        delivered = [(n, frames[packet]) for n, packet in enumerate(packets.tolist()) if packet != NONE]
        assert all(frame == (episode, n) for n, frame in delivered)
        if not gone:
            assert len(delivered) == length
        if measures and not in_one_run and parts[episode] == length and parts[-1] == lengths[-1]:
            assert len(delivered) == length
            assert frames[own.first] == (episode, 0)  # its frames are counted, too
