"""Checks of delivered frames: a frame at another time or of another size than requested is an error, not a sample."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import torch
from support import videos as data
from support.skipping import skip_frame
from support.slow import slow, slow_after
from torchcodec import FrameBatch

import dali_stream
from dali_stream.decode import torchcodec as decode
from dali_stream.demo import read_identities

FILE = data.VIDEO.format(data.CAMERA, 0)
CODECS = {
    "av1": data.av1(2),
    "av1-hidden": data.av1(30),
    "h264": data.h264(12),
    "hevc": data.hevc(12),
    "vp9": data.vp9(12),
    "mpeg4": data.mpeg4(12),
    "mpeg4-b": data.mpeg4(12, b_frames=2),
}
SIZES = {  # without B-frames: a raw stream does not hold their times
    "h264": ((*data.h264(12), "-bf", "0"), "h264"),
    "hevc": ((*data.X265, "-g", "12", "-tune", "zerolatency"), "hevc"),
    "av1": (data.av1(2), "obu"),
}


def error_of(dataset: Path | dali_stream.Dataset, **options: object) -> str:
    """The message that an epoch ends with."""
    with data.loader(dataset, **options) as loader, pytest.raises(dali_stream.DecodeError) as caught:
        list(loader)
    return str(caught.value)


def sampled(*numbers: int) -> dict[int, list[tuple[int, int]]]:
    """These frames of a file, as `Dataset(frames=)` takes them."""
    ranges: dict[int, list[tuple[int, int]]] = {}
    for episode, frame in map(data.identity, numbers):
        ranges.setdefault(episode, []).append((frame, frame + 1))
    return ranges


@pytest.mark.parametrize("codec", slow_after(3, CODECS))
def test_a_frame_that_the_decoder_skips_is_not_replaced_by_its_neighbour(codec: str, tmp_path: Path) -> None:
    """One changed bit makes FFmpeg skip a frame. FFmpeg reports no error, and only the time of the delivered frame is wrong."""
    root = data.recorded(tmp_path, CODECS[codec])
    skipped = skip_frame(root, FILE)
    episode, frame = data.identity(skipped)
    # The neighbour is not sampled, and the cache has no room for it. Otherwise it would be requested as well, and the decoder
    # would run out of frames, which is an error anyway. On a large dataset, most requests are like this one.
    dataset = dali_stream.Dataset(root, frames=sampled(skipped, *range(skipped + 2, skipped + 6)))
    options = {"shuffle": False, "batch_size": 5, "memory_budget": 1 << 20}
    message = error_of(dataset, **options)
    assert re.search(rf"^{data.CAMERA}: episode {episode}, frame {frame}: .*{FILE}", message), message
    with data.loader(dataset, on_error="substitute", **options) as loader:
        samples = list(data.samples(loader))
        assert loader.stats()["substituted"] == 1
    delivered = [(e, f) for e, f, _ in samples]
    assert (episode, frame) not in delivered
    assert data.identities(torch.stack([image for *_, image in samples])) == delivered


@pytest.mark.parametrize("codec", ["h264", *map(slow, ("hevc", "av1"))])
def test_a_frame_size_that_changes_in_the_middle_of_a_file(codec: str, tmp_path: Path) -> None:
    """Two recordings end to end in one stream: the sample description is that of the first, the packets have the second's."""
    arguments, form = SIZES[codec]
    stream = b""
    for size in (data.SIZE, (data.SIZE[0], data.SIZE[1] + 32)):
        part = data.encode(data.draw((36,), size=size), tmp_path / "part.mp4", arguments)
        data.ffmpeg("-i", part, "-c", "copy", "-f", form, tmp_path / "part.raw")
        stream += (tmp_path / "part.raw").read_bytes()
    (tmp_path / "both.raw").write_bytes(stream)
    times = "setts=pts=N*512:dts=N*512:time_base=1/15360"
    data.ffmpeg("-f", form, "-i", tmp_path / "both.raw", "-c", "copy", "-bsf:v", times, tmp_path / "video.mp4")
    message = error_of(data.write_dataset(tmp_path / "data", [tmp_path / "video.mp4"], [(36, 36)]), shuffle=False)
    assert re.search(rf"^{data.CAMERA}: episode 1, frame 0: .*{FILE}: .*128(×|, )160", message), message


def test_a_batch_of_another_size_than_the_decoder_announces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A simulated decoder delivers it: torchcodec itself refuses frames of another size. See the comment at the check."""

    class Cropping(decode.VideoDecoder):
        def get_frames_at(self, indices: list[int]) -> FrameBatch:
            batch = super().get_frames_at(indices)
            return dataclasses.replace(batch, data=batch.data[:, :-2])

    root = data.recorded(tmp_path, data.h264(12))
    monkeypatch.setattr(decode, "VideoDecoder", Cropping)
    message = error_of(root, image_size=(64, 80))
    place = rf"^{data.CAMERA}: episode \d, frame \d+: .*{FILE}: "
    assert re.search(rf"{place}its decoded frames must be 128×160.*, got 126×160", message), message


def test_a_frame_after_a_keyframe_that_is_no_idr_frame_is_decoded_alone(tmp_path: Path) -> None:
    """FFmpeg does not show the last frames of a clip that begins with such a keyframe."""
    root = data.recorded(tmp_path, data.h264_without_idr())
    for number in (14, 15, 28):
        dataset = dali_stream.Dataset(root, frames=sampled(number))
        options = {"batch_size": 1, "shuffle": False, "last_batch": "partial", "memory_budget": 1 << 20}
        [batch] = data.loader(dataset, image_dtype="uint8", **options)
        [identity] = read_identities(batch[data.CAMERA].movedim(-3, -1).numpy())
        assert (*data.identity(number), 0) == tuple(identity)
