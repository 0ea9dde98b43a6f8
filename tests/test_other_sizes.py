"""Frames of another size than info.json says: an error with what to do, which is then done, and frames told by their stamps."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support import videos as data
from support.datasets import ODD_CAMERA, Column, build, image_file, video
from support.slow import slow

from dali_stream import Dataset, DecodeError
from dali_stream.cli import main
from dali_stream.tools import prepare

STATED = (64, 96)  # the size in info.json, of frames of 128×160
PLACES = [data.identity(number) for number in range(data.FRAMES)]
REMEDY = (
    r"Set image_size=\(height, width\), which reads frames of any size, or write a copy of this size with `(dali-stream .*?)`"
)


def written(folder: Path, kind: str) -> Path:
    if kind == "image":
        values = [{"bytes": image_file(Image.fromarray(frame)), "path": None} for frame in data.draw()]
        return build(folder / "set", data.EPISODES, {ODD_CAMERA: Column("image", (*STATED, 3), values)}, fps=data.FPS)
    arguments = {"h264": data.h264(12), "vp9": data.vp9(12)}[kind]
    return data.write_dataset(folder / "set", [data.encode(data.draw(), folder / "a.mp4", arguments)], size=STATED)


def check(root: Path | Dataset, size: tuple[int, int], **options: Any) -> None:
    """Check that every frame has this size and belongs to its row."""
    with data.loader(root, **options) as loader:
        [camera] = loader.dataset.cameras
        shown = [(batch["episode_index"], batch["frame_index"], batch[camera]) for batch in loader]
    episode, frame, pixels = (torch.cat(parts) for parts in zip(*shown, strict=True))
    assert pixels.shape == (data.FRAMES, 3, *size)
    assert sorted(zip(episode.tolist(), frame.tolist(), strict=True)) == PLACES
    assert data.identities(pixels) == list(zip(episode.tolist(), frame.tolist(), strict=True))


@pytest.mark.parametrize("kind", ["h264", slow("image")])
def test_the_error_says_what_to_do_and_it_helps(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = written(tmp_path, kind)
    [camera] = Dataset(root).cameras
    with data.loader(root) as loader, pytest.raises(DecodeError) as raised:
        next(iter(loader))
    message = str(raised.value)
    assert re.search(rf"{camera}: episode \d, frame \d+: .*must be .*64×96.*, got .*128×160. {REMEDY}", message), message
    caplog.clear()
    check(root, (150, 180), image_size=(150, 180))
    [warning] = [record.getMessage() for record in caplog.records]
    assert re.search(rf"{camera}: .*frames are 128×160, and not 64×96 as meta/info.json says", warning)
    [command] = re.findall(REMEDY, message)
    words = shlex.split(command.replace("URI", str(root)).replace("OUT", str(tmp_path / "out")))
    assert main([*words[1:], "--jobs", "1"]) == 0
    check(tmp_path / "out", (128, 160))


def test_the_size_in_info_json_may_be_asked_for(tmp_path: Path) -> None:
    """It is then a size as any other."""
    root = written(tmp_path, "h264")
    with data.loader(root, image_size=STATED) as loader:
        batch = next(iter(loader))
    whole = data.whole_file(video(root))
    number = int(batch["index"][0])
    expected = torch.nn.functional.interpolate(
        whole[number : number + 1].contiguous(memory_format=torch.channels_last), STATED, mode="bilinear", antialias=True
    )
    assert torch.equal(batch[data.CAMERA][:1], expected)


def test_files_of_several_sizes(tmp_path: Path) -> None:
    sizes = [(128, 160), (160, 130), (120, 128)]
    files = [data.encode(data.draw(size=size), tmp_path / f"{n}.mp4", data.h264(12)) for n, size in enumerate(sizes)]
    root = data.write_dataset(tmp_path / "set", files, [data.EPISODES] * 3, size=(128, 160))
    with data.loader(root, image_size=(128, 160)) as loader:
        shown = [(e % 2, f, frame) for e, f, frame in data.samples(loader)]
    assert len(shown) == 3 * data.FRAMES
    assert data.identities(torch.stack([frame for *_, frame in shown])) == [(e, f) for e, f, _ in shown]


def test_dali_reads_them_too(tmp_path: Path) -> None:
    root = written(tmp_path, "vp9")
    with data.loader(root, decode="dali") as loader, pytest.raises(DecodeError, match="must be 64×96"):
        next(iter(loader))
    check(root, (150, 180), image_size=(150, 180), decode="dali", audit=1)


def test_prepare_asks_for_a_size(tmp_path: Path) -> None:
    """Rather than to squeeze frames into the size of info.json."""
    root = written(tmp_path, "h264")
    report = prepare(root, tmp_path / "out", codec="h264", jobs=1)
    assert "frames must be 64×96, as meta/info.json says, got 128×160. " in next(iter(report.failed.values()))
    assert "--size 128x160" in next(iter(report.failed.values()))


def test_statistics_are_those_of_the_frames(tmp_path: Path) -> None:
    root = written(tmp_path, "h264")
    computed = Dataset(root).compute_stats([data.CAMERA])[data.CAMERA]
    frames = data.whole_file(video(root)).numpy() / 255
    np.testing.assert_allclose(computed["mean"].ravel(), frames.mean((0, 2, 3)), rtol=1e-5)
