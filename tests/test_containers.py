"""Videos in other containers that are named .mp4: the error names the container, and its command leads to the same frames.

AVI is encoded again, since it has no display times: B-frames that are copied would be shown in the order of decoding.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest
from support import videos as data
from support.slow import slow

from dali_stream import Dataset, DecodeError
from dali_stream.mp4.boxes import other_container
from dali_stream.tools.description import describe
from dali_stream.tools.diagnosis.frames import Decoders
from dali_stream.tools.diagnosis.run import examine

FORMATS = {  # name of the container: FFmpeg's name for its format, and encoders
    "Matroska or WebM": ("matroska", data.h264(12)),
    "WebM": ("webm", data.vp9(12, hidden=True)),
    "AVI": ("avi", data.mpeg4(12)),
    "AVI with B-frames": ("avi", data.h264(12)),
    "MPEG-TS": ("mpegts", data.hevc(12, open_gop=True)),
    "Flash Video": ("flv", data.h264(12)),
}
NO_DECODER = Decoders(torchcodec=False, dali=False, gpus={})


def delivered(root: Path) -> list[tuple[int, int]]:
    """The identities of all frames of a dataset, row by row."""
    with data.loader(root, shuffle=False) as loader:
        found = sorted((e, f, data.identities(frame[None])[0]) for e, f, frame in data.samples(loader))
    return [identity for *_, identity in found]


def command_in(error: DecodeError) -> str:
    """The command that a message names."""
    (command,) = re.findall(r"`(ffmpeg .*?)`", str(error))
    return str(command)


def follow(command: str, source: Path) -> Path:
    """Runs the command of a message for a file. Returns the file that it writes."""
    target = source.with_name("new.mp4")
    names = {"IN": source, "OUT": target, "OUT.mp4": target}
    subprocess.run([names.get(word, word) for word in shlex.split(command)], check=True, capture_output=True)
    return target


@pytest.mark.parametrize("name", [slow(n) if n in ("WebM", "Flash Video") else n for n in FORMATS])
def test_another_container_is_named_with_a_command_that_helps(name: str, tmp_path: Path) -> None:
    kind, arguments = FORMATS[name]
    whole = data.encode(data.draw(), tmp_path / "whole.mp4", arguments)
    data.ffmpeg("-i", whole, "-c", "copy", "-f", kind, tmp_path / "video.mp4")
    root = data.write_dataset(tmp_path / "set", [tmp_path / "video.mp4"])
    name, file = name.partition(" with")[0], data.VIDEO.format(data.CAMERA, 0)
    with pytest.raises(DecodeError, match=f"{file}: .*the file is .*{name}.*, and not MP4") as caught:
        delivered(root)
    command = command_in(caught.value)
    assert command in "".join(describe(Dataset(root)).cameras[data.CAMERA].broken)
    (finding,) = [f for f in examine(Dataset(root), NO_DECODER, 120)[0] if f.name == f"{data.CAMERA} file 1"]
    assert name in finding.text
    assert command in finding.remedy
    right = data.write_dataset(tmp_path / "right", [follow(command, tmp_path / "video.mp4")])
    assert delivered(right) == [data.identity(number) for number in range(data.FRAMES)]


@pytest.mark.parametrize("options", [("-movflags", "frag_keyframe+empty_moov"), ("-map", "0:v", "-map", "0:v")], ids=str)
def test_the_commands_for_fragments_and_for_several_tracks(options: tuple[str, ...], tmp_path: Path) -> None:
    whole = data.encode(data.draw(), tmp_path / "whole.mp4", data.h264(12))
    data.ffmpeg("-i", whole, "-c", "copy", *options, tmp_path / "video.mp4")
    with pytest.raises(DecodeError) as caught:
        delivered(data.write_dataset(tmp_path / "set", [tmp_path / "video.mp4"]))
    right = data.write_dataset(tmp_path / "right", [follow(command_in(caught.value), tmp_path / "video.mp4")])
    assert delivered(right) == [data.identity(number) for number in range(data.FRAMES)]


def test_a_transport_stream_with_times_before_its_packets(tmp_path: Path) -> None:
    whole = data.encode(data.draw(), tmp_path / "whole.mp4", data.h264(12))
    data.ffmpeg("-i", whole, "-c", "copy", "-f", "mpegts", "-mpegts_m2ts_mode", "1", tmp_path / "video.m2ts")
    assert other_container((tmp_path / "video.m2ts").read_bytes()[:200])[0] == "MPEG-TS"


@pytest.mark.parametrize("first", [b"", b"G", b"G" + bytes(199), b"RIFF\0\0\0\0WAVE", b"\0\0\0\x20ftypisom", bytes(200)])
def test_what_is_no_other_container(first: bytes) -> None:
    assert other_container(first) == ("", "")
