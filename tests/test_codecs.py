"""The frame delivered is the frame asked for: every codec, GOP structure and file layout, bit for bit against a plain
sequential decode, and by the stamp in the picture."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dali_stream.video.table import read_table
from dali_stream.storage import LocalStore
import video_data as data

STEPS = (-5, 0, 2, 2, -1, 0)  # out of order, with repeats, over the edges of GOPs and of the episode

CODECS = {
    "av1-2": data.av1(2),
    "av1-30-hidden": data.av1(30),
    **{f"h264-{gop}": data.h264(gop) for gop in (1, 2, 12, 30, 250)},
    **{f"h264-open-{gop}": data.h264(gop, open_gop=True) for gop in (2, 12, 30, 250)},
    **{f"hevc-{gop}": data.hevc(gop) for gop in (1, 2, 12, 30, 250)},
    **{f"hevc-open-{gop}": data.hevc(gop, open_gop=True) for gop in (2, 12, 30, 250)},
    "vp9-12": data.vp9(12),
    "vp9-12-hidden": data.vp9(12, hidden=True),
    "vp9-30-hidden": data.vp9(30, hidden=True),
    "mpeg4-12": data.mpeg4(12),
    "mpeg4-12-b": data.mpeg4(12, b_frames=2),
    "h264-10bit": data.h264(12, pixels="yuv420p10le"),
    "h264-422": data.h264(12, pixels="yuv422p"),
    "h264-444": data.h264(12, pixels="yuv444p"),
    "hevc-10bit-open": data.hevc(12, open_gop=True, pixels="yuv420p10le"),
    "hevc-444": data.hevc(12, pixels="yuv444p"),
    "av1-10bit": data.av1(12, pixels="yuv420p10le"),
    "vp9-10bit": data.vp9(12, pixels="yuv420p10le"),
    "vp9-444": data.vp9(12, pixels="yuv444p"),
}


@pytest.mark.parametrize("name", CODECS)
def test_every_frame_of_every_codec_is_the_frame_asked_for(name: str, tmp_path: Path) -> None:
    video = data.encode(data.draw(), tmp_path / "video.mp4", CODECS[name])
    check_identity(data.write_dataset(tmp_path / "set", [video]), [video])


def check_identity(root: Path, files: list[Path], episodes: tuple[tuple[int, ...], ...] = (data.EPISODES,)) -> None:
    """Single frames and windows of a whole epoch against sequential decodes of the files."""
    truth = torch.cat([data.whole_file(path) for path in files])
    lengths = [length for held in episodes for length in held]
    assert len(truth) == sum(lengths)
    first = [sum(lengths[:i]) for i in range(len(lengths))]
    with data.loader(root) as loader:
        found = {(e, f): picture for e, f, picture in data.samples(loader)}
    assert found.keys() == {(e, f) for e, length in enumerate(lengths) for f in range(length)}
    assert data.identities(torch.stack(list(found.values()))) == list(found)
    assert [key for key, picture in found.items() if not picture.equal(truth[first[key[0]] + key[1]])] == []
    deltas = {data.CAMERA: [step / data.FPS for step in STEPS]}
    wrong = []
    with data.loader(root, delta_timestamps=deltas, batch_size=8, seed=1) as loader:
        for episode, frame, window in data.samples(loader):
            steps = [min(max(frame + step, 0), lengths[episode] - 1) for step in STEPS]
            expected = truth[[first[episode] + step for step in steps]]
            wrong += [(episode, frame)] if not window.equal(expected) else []
    assert wrong == []
