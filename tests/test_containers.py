"""Videos in other containers that are named .mp4, and MP4s of unusual form. A Loader reads them, or names a command that helps.

Commands are tried on files that begin at time 0 and on files that begin later, with rows that have the times of the file. AVI
is encoded again, since it has no display times: B-frames that are copied would be shown in the order of decoding.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support import videos as data
from support.datasets import videos as files_of
from support.doctor import looked_at
from support.slow import slow
from support.tools import prepared

from dali_stream import Dataset, DecodeError
from dali_stream.mp4.boxes import other_container
from dali_stream.tools import prepare
from dali_stream.tools.description import describe

FORMATS = {  # name of the container: FFmpeg's name for its format, and encoders
    "Matroska or WebM": ("matroska", data.h264(12)),
    "WebM": ("webm", data.vp9(12, hidden=True)),
    "AVI": ("avi", data.mpeg4(12)),
    "AVI with B-frames": ("avi", data.h264(12)),
    "MPEG-TS": ("mpegts", data.hevc(12, open_gop=True)),
    "Flash Video": ("flv", data.h264(12)),
}
LATE = 2 / data.FPS  # time at which files begin. without -copyts, FFmpeg moves them to time 0


def delivered(root: Path) -> list[tuple[int, int]]:
    """The identities of all frames of a dataset, row by row."""
    with data.loader(root, shuffle=False) as loader:
        found = sorted((e, f, data.identities(frame[None])[0]) for e, f, frame in data.samples(loader))
    return [identity for *_, identity in found]


def check_command(command: str, video: Path, shown: data.Shown) -> None:
    """Check that rows with the times of a file have its frames after the command of a message."""
    right = data.dataset_of(video.parent / "right", data.follow(command, video), shown.seconds)
    assert delivered(right) == shown.identity == [data.identity(number) for number in range(data.FRAMES)]


def check_doctor(command: str, root: Path) -> None:
    """Check that the doctor names the command, too."""
    [finding] = [finding for finding in looked_at(root).values() if finding.status == "problem"]
    assert command in finding.text


def shown_in(video: Path, name: str) -> data.Shown:
    """The frames of a file, and their times. FFmpeg delays those of AVI with B-frames, which begin at time 0."""
    shown = data.shown_by_ffmpeg(video)
    return shown if name != "AVI with B-frames" else shown._replace(seconds=(np.arange(data.FRAMES) / data.FPS).tolist())


@pytest.mark.parametrize("begin", [LATE, slow(0.0)])
@pytest.mark.parametrize("name", [slow(n) if n in ("WebM", "Flash Video") else n for n in FORMATS])
def test_another_container_is_named_with_a_command_that_helps(name: str, begin: float, tmp_path: Path) -> None:
    kind, arguments = FORMATS[name]
    whole = data.encode(data.draw(), tmp_path / "whole.mp4", arguments)
    offset = () if name.startswith("AVI") else ("-output_ts_offset", str(begin))
    data.ffmpeg("-i", whole, "-c", "copy", *offset, "-f", kind, tmp_path / "video.mp4")
    shown = shown_in(tmp_path / "video.mp4", name)
    root = data.dataset_of(tmp_path / "set", tmp_path / "video.mp4", shown.seconds)
    name, file = name.partition(" with")[0], data.VIDEO.format(data.CAMERA, 0)
    with pytest.raises(DecodeError, match=f"{file}: .*the file is .*{name}.*, and not MP4") as caught:
        delivered(root)
    command = data.command_in(caught.value)
    assert command in "".join(describe(Dataset(root)).cameras[data.CAMERA].broken)
    check_doctor(command, root)
    check_command(command, tmp_path / "video.mp4", shown)


@pytest.mark.slow
def test_rows_that_count_from_the_first_frame_of_a_transport_stream(tmp_path: Path) -> None:
    """A transport stream begins late. For these rows, docs/troubleshooting.md leaves -copyts out."""
    whole = data.encode(data.draw(), tmp_path / "whole.mp4", data.hevc(12))
    data.ffmpeg("-i", whole, "-c", "copy", "-f", "mpegts", video := tmp_path / "video.mp4")
    shown = data.shown_by_ffmpeg(video)
    assert shown.seconds[0] > 1
    counted = shown._replace(seconds=(np.arange(data.FRAMES) / data.FPS).tolist())
    with pytest.raises(DecodeError, match="the file is MPEG-TS") as caught:
        delivered(data.dataset_of(tmp_path / "set", video, counted.seconds))
    check_command(data.command_in(caught.value).replace("-copyts ", ""), video, counted)


@pytest.mark.parametrize("arguments", [data.mpeg4(1), slow(data.h264(12), id="B-frames")])
def test_gaps_of_an_avi_stay(arguments: tuple[str, ...], tmp_path: Path) -> None:
    """A recorder that drops frames writes empty packets in their place."""
    kept = [number for number in range(data.FRAMES) if number not in (35, 41, 60)]
    left_out = "select=not(eq(n\\,35)+eq(n\\,41)+eq(n\\,60))"
    whole = data.encode(data.draw(), tmp_path / "whole.mp4", data.mpeg4(1))
    data.ffmpeg(
        "-i", whole, "-vf", left_out, "-fps_mode", "passthrough", *arguments, "-f", "avi", video := tmp_path / "video.mp4"
    )
    seconds, identities = [number / data.FPS for number in kept], [data.identity(number) for number in kept]
    with pytest.raises(DecodeError, match="the file is AVI") as caught:
        delivered(data.dataset_of(tmp_path / "set", video, seconds))
    mended = data.follow(data.command_in(caught.value), video)
    assert delivered(data.dataset_of(tmp_path / "right", mended, seconds)) == identities


OPTIONS = {
    "fragmented": ("-movflags", "frag_keyframe+empty_moov"),
    "fragmented in part": ("-movflags", "frag_keyframe"),
    "two video tracks": ("-map", "0:v", "-map", "0:v"),
}


@pytest.mark.parametrize("begin", [LATE, slow(0.0)])
@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.parametrize("codec", ["h264", slow("mpeg4"), slow("av1")])
def test_the_commands_for_fragments_and_for_several_tracks(codec: str, kind: str, begin: float, tmp_path: Path) -> None:
    arguments = {"h264": data.h264(12), "mpeg4": data.mpeg4(12), "av1": data.av1(12)}[codec]
    whole = data.encode(data.draw(), tmp_path / "whole.mp4", arguments)
    shown = data.shown_by_ffmpeg(whole)
    data.ffmpeg("-i", whole, "-c", "copy", *OPTIONS[kind], "-output_ts_offset", str(begin), video := tmp_path / "video.mp4")
    if kind != "two video tracks":
        shown = data.shown_by_ffmpeg(video)
    else:
        shown = shown._replace(seconds=[time + begin for time in shown.seconds])
    with pytest.raises(DecodeError, match=f"{data.VIDEO.format(data.CAMERA, 0)}: {kind.split()[0]}|one video track") as caught:
        delivered(root := data.dataset_of(tmp_path / "set", video, shown.seconds))
    check_doctor(command := data.command_in(caught.value), root)
    check_command(command, video, shown)


def test_a_file_that_announces_fragments_and_has_none_is_read(tmp_path: Path) -> None:
    """As a recorder leaves it that stops before its first fragment."""
    whole = data.encode(data.draw(), tmp_path / "whole.mp4", data.h264(12))
    tree = data.boxes(whole.read_bytes())
    data.box(tree, b"moov")[1].append([b"mvex", bytes(8) + b"trex"])
    whole.write_bytes(data.unboxed(tree))
    assert delivered(data.write_dataset(tmp_path / "set", [whole])) == [data.identity(n) for n in range(data.FRAMES)]


def test_the_command_for_sound(tmp_path: Path) -> None:
    """`prepare` copies packets of video only."""
    whole = data.encode(data.draw(), tmp_path / "whole.mp4", data.h264(12))
    video, sound = tmp_path / "video.mp4", ("-f", "lavfi", "-i", "sine=duration=3")
    data.ffmpeg("-i", whole, *sound, "-c:v", "copy", "-c:a", "aac", "-output_ts_offset", str(LATE), video)
    root = data.dataset_of(tmp_path / "set", video, (shown := data.shown_by_ffmpeg(video)).seconds)
    [why] = prepare(root, tmp_path / "out", jobs=1).failed.values()
    assert "has sound" in why
    check_command(data.command_in(DecodeError(why)), video, shown)


CODECS = {
    "h264": data.h264(12), "hevc": data.hevc(12), "av1": data.av1(12), "vp9": data.vp9(12), "mpeg4": data.mpeg4(12),
    "mjpeg": ("-c:v", "mjpeg", "-q:v", "2", "-pix_fmt", "yuvj420p"), "open GOPs": data.hevc(12, open_gop=True),
}  # fmt: skip


def with_table(whole: Path, video: Path, change: Callable[[list[data.Box]], None]) -> Path:
    """Writes a file whose sample table (its boxes) was changed. The media data stay where they are, in front of it."""
    tree = data.boxes(whole.read_bytes())
    assert [kind for kind, _ in tree][-1] == b"moov"
    change(data.box(tree, *data.STBL)[1])
    video.write_bytes(data.unboxed(tree))
    return video


def without_size(table: list[data.Box]) -> None:
    stsd = data.box(table, b"stsd")
    stsd[1] = stsd[1][:40] + bytes(4) + stsd[1][44:]


@pytest.mark.parametrize("codec", ["h264", *map(slow, ("hevc", "av1"))])
def test_a_sample_description_without_a_size_has_that_of_its_headers(codec: str, tmp_path: Path) -> None:
    whole = data.encode(data.draw(), tmp_path / "whole.mp4", CODECS[codec])
    root = data.write_dataset(tmp_path / "set", [with_table(whole, tmp_path / "video.mp4", without_size)])
    assert delivered(root) == [data.identity(number) for number in range(data.FRAMES)]
    camera = describe(Dataset(root)).cameras[data.CAMERA]
    assert (camera.height, camera.width, camera.broken) == (*data.SIZE, ())
    prepared(root, tmp_path / "copy")
    assert delivered(tmp_path / "copy") == [data.identity(number) for number in range(data.FRAMES)]
    (copy,) = files_of(tmp_path / "copy")
    assert data.box(data.boxes(copy.read_bytes()), *data.STBL, b"stsd")[1][40:44] == struct.pack(">HH", *data.SIZE[::-1])


@pytest.mark.parametrize("codec", ["mpeg4", *map(slow, ("vp9", "mjpeg"))])
def test_the_command_for_a_sample_description_without_a_size(codec: str, tmp_path: Path) -> None:
    whole = data.encode(data.draw(), tmp_path / "whole.mp4", (*CODECS[codec], "-output_ts_offset", str(LATE)))
    video = with_table(whole, tmp_path / "video.mp4", without_size)
    shown = data.shown_by_ffmpeg(video)
    with pytest.raises(DecodeError, match="frame size of the sample description must be positive, got 0×0") as caught:
        delivered(root := data.dataset_of(tmp_path / "set", video, shown.seconds))
    check_doctor(command := data.command_in(caught.value), root)
    check_command(command, video, shown)


def with_keyframes(change: Callable[[list[int]], list[int]]) -> Callable[[list[data.Box]], None]:
    """Changes the numbers of keyframes."""

    def changed(table: list[data.Box]) -> None:
        stss = data.box(table, b"stss")
        numbers = change(np.frombuffer(stss[1][8:], ">u4").tolist())
        stss[1] = bytes(4) + np.array([len(numbers), *numbers]).astype(">u4").tobytes()

    return changed


@pytest.mark.parametrize("codec", ["h264", *map(slow, ("hevc", "av1", "vp9", "mpeg4", "open GOPs"))])
def test_keyframes_that_are_counted_from_0(codec: str, tmp_path: Path) -> None:
    whole = data.encode(data.draw(), tmp_path / "whole.mp4", CODECS[codec])
    from_0 = with_keyframes(lambda numbers: [number - 1 for number in numbers])
    root = data.write_dataset(tmp_path / "set", [with_table(whole, tmp_path / "video.mp4", from_0)])
    assert delivered(root) == [data.identity(number) for number in range(data.FRAMES)]


@pytest.mark.parametrize("how", ["without the first", slow("each one late"), slow("none")])
@pytest.mark.parametrize("codec", ["h264", *map(slow, ("hevc", "av1", "vp9", "mpeg4", "open GOPs"))])
def test_the_command_for_keyframes_that_begin_late(codec: str, how: str, tmp_path: Path) -> None:
    whole = data.encode(data.draw(), tmp_path / "whole.mp4", (*CODECS[codec], "-output_ts_offset", str(LATE)))
    changes: dict[str, Callable[[list[int]], list[int]]] = {
        "without the first": lambda numbers: numbers[1:],
        "each one late": lambda numbers: [number + 1 for number in numbers],
        "none": lambda numbers: [],
    }
    video = with_table(whole, tmp_path / "video.mp4", with_keyframes(changes[how]))
    shown = data.shown_by_ffmpeg(whole)
    with pytest.raises(DecodeError, match=r"invalid stss table \(keyframes\): must be 1, \.\.\. up to 72") as caught:
        delivered(root := data.dataset_of(tmp_path / "set", video, shown.seconds))
    check_doctor(command := data.command_in(caught.value), root)
    check_command(command, video, shown)


def test_a_transport_stream_with_times_before_its_packets(tmp_path: Path) -> None:
    whole = data.encode(data.draw(), tmp_path / "whole.mp4", data.h264(12))
    data.ffmpeg("-i", whole, "-c", "copy", "-f", "mpegts", "-mpegts_m2ts_mode", "1", tmp_path / "video.m2ts")
    assert other_container((tmp_path / "video.m2ts").read_bytes()[:200])[0] == "MPEG-TS"


@pytest.mark.parametrize("first", [b"", b"G", b"G" + bytes(199), b"RIFF\0\0\0\0WAVE", b"\0\0\0\x20ftypisom", bytes(200)])
def test_what_is_no_other_container(first: bytes) -> None:
    assert other_container(first) == ("", "")
