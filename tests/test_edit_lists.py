"""Files that were cut without encoding them again: FFmpeg says which frames their edit lists show, and when."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from support import videos as data
from support.datasets import Camera, build
from support.datasets import videos as files_of
from support.servers import Server
from support.slow import slow
from support.tools import prepared

from dali_stream import Dataset, DecodeError
from dali_stream.decode import trial
from dali_stream.mp4.format import describe
from dali_stream.mp4.index import VideoIndex, read_index
from dali_stream.storage import LocalStore

CODECS = {
    "h264": data.h264(12),
    "h264-open": data.h264(12, open_gop=True),
    "h264-no-idr": data.h264_without_idr(),
    "hevc-open": data.hevc(12, open_gop=True),
    "mpeg4-b": data.mpeg4(12, b_frames=2),
    "av1-2": data.av1(2),
    "av1-30": data.av1(30),
    "vp9": data.vp9(12),
    "vp9-hidden": data.vp9(12, hidden=True),
}
# Options of FFmpeg before the source and before the result.
CUTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "head": (("-ss", "0.5"), ()),
    "head and tail": (("-ss", "0.5", "-t", "1"), ()),
    "tail": ((), ("-t", "1.1")),
    "inside a frame": (("-ss", "0.517"), ()),
    "inside a frame, in milliseconds": (("-ss", "0.517"), ("-video_track_timescale", "1000")),
    "with a delay": (("-ss", "0.5"), ("-copyts",)),
    "with another delay": (("-ss", "0.5"), ("-output_ts_offset", "0.3")),
    "by the option of the result": ((), ("-ss", "0.5")),
}
_FAST = {
    ("h264", "head and tail"), ("h264-open", "inside a frame"), ("h264-no-idr", "head"), ("hevc-open", "with a delay"),
    ("mpeg4-b", "head"), ("av1-2", "inside a frame, in milliseconds"), ("av1-30", "head and tail"), ("vp9-hidden", "head"),
}  # fmt: skip


def cut(source: Path, target: Path, how: str) -> Path:
    before, after = CUTS[how]
    data.ffmpeg(*before, "-i", source, "-c", "copy", *after, target)
    return target


def patched(source: Path, target: Path, edits: Sequence[tuple[int, int, int]]) -> Path:
    """A copy of a file with another edit list, of (duration in milliseconds, first tick of the media, rate)."""
    tree = data.boxes(source.read_bytes())
    assert [kind for kind, _ in tree][-1] == b"moov"  # so no offset changes
    rows = b"".join(struct.pack(">IiHH", *edit, 0) for edit in edits)
    data.box(tree, b"moov", b"trak", b"edts", b"elst")[1] = struct.pack(">II", 0, len(edits)) + rows
    target.write_bytes(data.unboxed(tree))
    return target


def index_of(video: Path) -> VideoIndex:
    return read_index(LocalStore(str(video.parent)), video.name)


def delivered(root: Path | str, **options: object) -> list[tuple[int, int]]:
    """The identities of all frames of a dataset, row by row."""
    with data.loader(root, shuffle=False, **options) as loader:
        batches = list(loader)
    order = np.argsort(torch.cat([batch["index"] for batch in batches]).numpy())
    return data.identities(torch.cat([batch[data.CAMERA] for batch in batches])[order])


def nearest(shown: data.Shown, seconds: Sequence[float]) -> list[tuple[int, int]]:
    """LeRobot's rule: the frame whose time is nearest to each time."""
    return [shown.identity[int(np.argmin(np.abs(np.array(shown.seconds) - time)))] for time in seconds]


@pytest.mark.parametrize(
    ("codec", "how"), [(c, h) if (c, h) in _FAST else slow(c, h) for c in CODECS for h in CUTS], ids=lambda name: name
)
def test_each_row_has_the_frame_that_ffmpeg_shows(codec: str, how: str, tmp_path: Path) -> None:
    whole = data.encode(data.draw(), tmp_path / "whole.mp4", CODECS[codec])
    video = cut(whole, tmp_path / "cut.mp4", how)
    shown, index = data.shown_by_ffmpeg(video), index_of(video)
    assert len(index.displayed) == len(shown.seconds) == len(index) - index.hidden
    pts = index.pts(index.displayed_packets) / index.timescale
    np.testing.assert_allclose(pts, shown.seconds, atol=1e-5)
    root = data.dataset_of(tmp_path / "set", video, shown.seconds)
    assert delivered(root) == shown.identity


def test_the_cuts_hide_frames_at_both_ends_and_with_every_codec(tmp_path: Path) -> None:
    for codec, arguments in CODECS.items():
        whole = data.encode(data.draw(), tmp_path / "whole.mp4", arguments)
        index = index_of(cut(whole, tmp_path / "cut.mp4", "head"))
        assert (index.displayed.start, index.displayed.stop) == (index.hidden, len(index))
        assert index.hidden > 0, codec
    tail = index_of(patched(whole, tmp_path / "tail.mp4", [(1000, 0, 1)]))
    assert (tail.displayed, tail.hidden) == (range(30), data.FRAMES - 30)


@pytest.mark.parametrize("codec", ["h264", *map(slow, ("av1-30", "vp9-hidden"))])
def test_a_decoder_is_tried_on_displayed_frames(codec: str, tmp_path: Path) -> None:
    whole = data.encode(data.draw(), tmp_path / "whole.mp4", CODECS[codec])
    index = index_of(cut(whole, tmp_path / "cut.mp4", "head"))
    assert trial._frames(index)[0][0] == index.displayed_packets[0]
    assert trial.trial("torchcodec-cuda", LocalStore(str(tmp_path)), index, describe(index.configs[0]), None) == ""


def test_windows_of_a_cut_file(tmp_path: Path) -> None:
    """A window ends at the first row of its episode, although the file has frames before it."""
    whole = data.encode(data.draw(), tmp_path / "whole.mp4", data.h264(12, open_gop=True))
    shown = data.shown_by_ffmpeg(video := cut(whole, tmp_path / "cut.mp4", "head"))
    root = data.dataset_of(tmp_path / "set", video, shown.seconds)
    first = len(shown.seconds) // 3
    with data.loader(root, delta_timestamps={data.CAMERA: [-4 / data.FPS, -1 / data.FPS, 0.0]}) as loader:
        for episode, frame, window in data.samples(loader):
            rows = [max(frame - step, 0) + first * episode for step in (4, 1, 0)]
            assert data.identities(window) == [shown.identity[row] for row in rows]


@pytest.mark.parametrize("edits", [
    [(1000, 1024 + 5 * 512, 1)],  # the first frame of the part
    [(1000, 1024 + 5 * 512 + 1, 1)],  # a tick into it
    [(2000, 1024, 1)],
    [(2001, 1024, 1)],  # a millisecond, so the part ends in a frame
    [(2400, 0, 1)],  # begins before the first frame, whose time still is 0
    [(100, -1, 1), (33, -1, 1), (1000, 8000, 1)],
    [(1, 10240, 1)],  # a single frame
    [(1000, -500, 1)],
])  # fmt: skip
def test_the_parts_of_an_edit_list_are_ffmpegs(edits: list[tuple[int, int, int]], tmp_path: Path) -> None:
    whole = data.encode(data.draw(), tmp_path / "whole.mp4", data.h264(12))
    shown = data.shown_by_ffmpeg(video := patched(whole, tmp_path / "cut.mp4", edits))
    index = index_of(video)
    np.testing.assert_allclose(index.pts(index.displayed_packets) / index.timescale, shown.seconds, atol=1e-5)
    if len(shown.seconds) > 2:
        assert delivered(data.dataset_of(tmp_path / "set", video, shown.seconds)) == shown.identity


def beside_a_hidden_frame(folder: Path) -> tuple[Path, data.Shown]:
    """A file whose last hidden frame has the time 1 ms, and its first displayed frame 2 ms."""
    whole = data.encode(data.draw(), folder / "whole.mp4", data.av1(30))
    tree = data.boxes(whole.read_bytes())
    durations = [(14, 512), (1, 15), (data.FRAMES - 15, 512)]  # 15 ticks are 1 ms
    rows = b"".join(struct.pack(">II", *run) for run in durations)
    data.box(tree, *data.STBL, b"stts")[1] = struct.pack(">II", 0, len(durations)) + rows
    whole.write_bytes(data.unboxed(tree))
    video = patched(whole, folder / "video.mp4", [(2, -1, 1), (1900, 14 * 512 + 15, 1)])
    shown = data.shown_by_ffmpeg(video)
    assert shown.seconds[0] == pytest.approx(0.002, abs=1e-4)
    index = index_of(video)
    assert index.shown_at(index.displayed.start - 1) / index.timescale == pytest.approx(0.001, abs=1e-4)
    return video, shown


def test_a_hidden_frame_is_no_candidate_for_a_row_although_it_is_nearest(tmp_path: Path) -> None:
    video, shown = beside_a_hidden_frame(tmp_path)
    root = data.dataset_of(tmp_path / "set", video, shown.seconds, late=-0.002)
    assert delivered(root) == shown.identity
    prepared(root, tmp_path / "out")
    assert delivered(tmp_path / "out") == shown.identity
    (copy,) = files_of(tmp_path / "out")
    assert nearest(data.shown_by_ffmpeg(copy), row_seconds(tmp_path / "out")[0]) == shown.identity


def test_a_cut_file_that_is_fetched(tmp_path: Path) -> None:
    """Only blocks of GOPs with displayed frames are fetched, and the packets of hidden frames in them are used."""
    whole = data.encode(data.draw(), tmp_path / "whole.mp4", data.hevc(12, open_gop=True))
    shown = data.shown_by_ffmpeg(video := cut(whole, tmp_path / "cut.mp4", "inside a frame"))
    with Server(data.dataset_of(tmp_path / "set", video, shown.seconds)) as server:
        assert delivered(server.url) == shown.identity


def test_a_row_before_or_after_the_edit_has_no_frame(tmp_path: Path) -> None:
    whole = data.encode(data.draw(), tmp_path / "whole.mp4", data.h264(12))
    video = cut(whole, tmp_path / "cut.mp4", "head and tail")
    seconds = np.arange(-2, 40) / data.FPS
    root = data.dataset_of(tmp_path / "set", video, seconds.tolist())
    with pytest.raises(DecodeError, match=r"nearest frame, number 0 of 32, is at 0.0000 s, 0.0667 s away"):
        delivered(Dataset(root, trust_timestamps=True))
    with pytest.raises(DecodeError, match=r"the file has 32 frames .*, and its episodes have 42 rows"):
        delivered(root)


def test_vp9_through_dali(tmp_path: Path) -> None:
    whole = data.encode(data.draw(), tmp_path / "whole.mp4", data.vp9(12))
    shown = data.shown_by_ffmpeg(video := cut(whole, tmp_path / "cut.mp4", "head and tail"))
    root = data.dataset_of(tmp_path / "set", video, shown.seconds)
    assert index_of(video).hidden
    with data.loader(root, decode="dali") as loader:
        found = {(e, f): data.identities(frame[None])[0] for e, f, frame in data.samples(loader)}
        assert loader.routes[data.CAMERA].decoder == "dali"
    assert [found[key] for key in sorted(found)] == shown.identity


# ---- datasets of cut files


def cut_recordings(folder: Path, arguments: tuple[str, ...], version: str) -> tuple[Path, list[tuple[int, int]]]:
    """A dataset of three episodes, each a file that was cut, and the identities of its rows by LeRobot's rule."""
    files, identities, lengths = [], [], []
    for episode, begin in enumerate((0.5, 0.55, 0.0)):
        whole = data.encode(data.draw((40,), first=episode), folder / f"whole-{episode}.mp4", arguments)
        data.ffmpeg("-ss", begin, "-i", whole, "-c", "copy", folder / f"{episode}.mp4")
        shown = data.shown_by_ffmpeg(folder / f"{episode}.mp4")
        lengths.append(len(shown.seconds) - 3)  # a recording has a few more frames than rows
        identities += nearest(shown, (np.arange(lengths[-1]) / data.FPS).tolist())
        files.append(folder / f"{episode}.mp4")
    camera = Camera(files, [[length] for length in lengths], data.SIZE)
    build(folder / "data", lengths, {}, cameras={data.CAMERA: camera}, fps=data.FPS, version=version)
    return folder / "data", identities


def row_seconds(root: Path) -> list[list[float]]:
    """The time of each row in its file by LeRobot's rule, for each file of a dataset of v3.0."""
    table = pq.read_table(root / "meta/episodes").sort_by("episode_index").to_pydict()
    rows = pa.concat_tables(map(pq.read_table, sorted(root.glob("data/*/*.parquet")))).sort_by("index")
    episode, times = rows["episode_index"].to_numpy(), rows["timestamp"].to_numpy().astype(np.float64)
    starts = np.array(table[f"videos/{data.CAMERA}/from_timestamp"])
    chunk, file = (np.array(table[f"videos/{data.CAMERA}/{name}_index"]) for name in ("chunk", "file"))
    number = np.unique(1000 * chunk + file, return_inverse=True)[1]
    return [(starts[episode] + times)[number[episode] == each].tolist() for each in range(number.max() + 1)]


@pytest.mark.slow
@pytest.mark.parametrize("version", ["v2.1", "v3.0"])
@pytest.mark.parametrize("codec", ["h264-open", "av1-30", *map(slow, ("h264", "hevc-open", "mpeg4-b", "av1-2", "vp9"))])
def test_a_dataset_of_cut_files_and_its_copy(codec: str, version: str, tmp_path: Path) -> None:
    root, identities = cut_recordings(tmp_path, CODECS[codec], version)
    assert delivered(root) == identities
    prepared(root, tmp_path / "out")
    assert delivered(tmp_path / "out") == identities
    found = []
    for path, seconds in zip(files_of(tmp_path / "out"), row_seconds(tmp_path / "out"), strict=True):
        assert b"elst" not in path.read_bytes()
        found += nearest(data.shown_by_ffmpeg(path), seconds)
    assert found == identities


@pytest.mark.slow
def test_a_dataset_of_cut_files_encoded_again(tmp_path: Path) -> None:
    root, identities = cut_recordings(tmp_path, data.hevc(12, open_gop=True), "v2.1")
    prepared(root, tmp_path / "out", codec="h264", gop=2)
    assert delivered(tmp_path / "out") == identities


# ---- edit lists that stay refused


@pytest.mark.parametrize("edits", [
    pytest.param([(300, -1, 1), (500, 1024, 1), (500, 20480, 1)], id="two parts"),
    pytest.param([(1000, 5120, 2)], id="twice as fast"),
])  # fmt: skip
@pytest.mark.parametrize("codec", ["h264", "av1-30", slow("vp9")])
def test_the_command_for_other_edit_lists(edits: list[tuple[int, int, int]], codec: str, tmp_path: Path) -> None:
    whole = data.encode(data.draw(), tmp_path / "whole.mp4", CODECS[codec])
    video = patched(whole, tmp_path / "video.mp4", edits)
    shown = data.shown_by_ffmpeg(video)
    with pytest.raises(DecodeError, match="the edit list must be one part at rate 1") as caught:
        delivered(data.dataset_of(tmp_path / "set", video, shown.seconds))
    new = data.follow(data.command_in(caught.value), video)
    assert delivered(data.dataset_of(tmp_path / "new set", new, shown.seconds)) == shown.identity


def test_a_list_that_hides_all_frames(tmp_path: Path) -> None:
    whole = data.encode(data.draw(), tmp_path / "whole.mp4", data.av1(2))
    with pytest.raises(DecodeError, match="must display a frame, got 72 hidden frames"):
        index_of(patched(whole, tmp_path / "video.mp4", [(1000, 512 * data.FRAMES, 1)]))
