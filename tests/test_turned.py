"""Videos that are displayed turned, as cameras that are mounted on their side write them, against torchcodec and the stamps.

The frames of these datasets are upright as they are displayed. Those in the files lie on their side.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support import videos as data
from support.datasets import video
from support.doctor import looked_at
from support.programs import pictures
from support.slow import slow
from support.tools import prepared, table_of
from torchcodec.decoders import VideoDecoder  # type: ignore[attr-defined]  # exported, but not by __all__

from dali_stream import Dataset, DecodeError
from dali_stream.cli import main
from dali_stream.decode import torchcodec
from dali_stream.mp4.boxes import UPRIGHT
from dali_stream.tools.description import describe

SHOWN = (160, 128)  # (height, width) as they are displayed


def file_of(folder: Path, degrees: int, arguments: tuple[str, ...] = data.h264(12), **options: Any) -> Path:
    """A video of 160×128 as it is displayed."""
    lying = np.ascontiguousarray(np.rot90(data.draw(size=SHOWN), -degrees // 90, (1, 2)))
    stored = data.encode(lying, folder / f"stored{degrees}.mp4", arguments)
    return data.turned(stored, folder / f"turned{degrees}.mp4", degrees, **options)


def dataset_of(folder: Path, degrees: int, arguments: tuple[str, ...] = data.h264(12), **options: Any) -> Path:
    return data.write_dataset(folder / "set", [file_of(folder, degrees, arguments, **options)], size=SHOWN)


@pytest.fixture(scope="module")
def lying(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of H.264 with B-frames, to be turned by 90°. Read only."""
    return dataset_of(tmp_path_factory.mktemp("lying"), 90)


def check(root: Path | Dataset, expected: torch.Tensor, **options: Any) -> dict[str, Any]:
    """Check that every frame is upright and equals torchcodec's. Return the Loader's counters."""
    with data.loader(root, **options) as loader:
        shown = list(data.samples(loader))
        stats = loader.stats()
    assert sorted((e, f) for e, f, _ in shown) == [data.identity(n) for n in range(data.FRAMES)]
    assert data.identities(torch.stack([frame for *_, frame in shown])) == [(e, f) for e, f, _ in shown]
    for episode, frame, pixels in shown:
        assert torch.equal(pixels, expected[frame + episode * data.EPISODES[0]])
    return stats


CODECS = {"av1": data.av1(30), "hevc": data.hevc(12), "open GOPs": data.h264(12, open_gop=True), "vp9": data.vp9(12)}


@pytest.mark.parametrize("degrees", [90, -90, slow(180)])
def test_frames_are_delivered_as_they_are_displayed(tmp_path: Path, degrees: int) -> None:
    root = dataset_of(tmp_path, degrees)
    check(root, data.whole_file(tmp_path / f"turned{degrees}.mp4"))


@pytest.mark.parametrize("codec", [slow(codec) for codec in CODECS])
def test_frames_of_every_codec(tmp_path: Path, codec: str) -> None:
    root = dataset_of(tmp_path, 90, CODECS[codec])
    check(root, data.whole_file(tmp_path / "turned90.mp4"))


@pytest.mark.parametrize("degrees", [90, 180])
def test_a_movie_that_turns_all_of_its_tracks(tmp_path: Path, degrees: int) -> None:
    """The matrix is in the header of the movie, from where FFmpeg takes it too."""
    root = dataset_of(tmp_path, degrees, movie=True)
    expected = data.whole_file(tmp_path / f"turned{degrees}.mp4")
    check(root, expected)
    prepared(root, tmp_path / "out")
    check(tmp_path / "out", expected)


MIRRORED = {
    "left to right": (-1, 0, 0, 1), "top to bottom": (1, 0, 0, -1), "transposed": (0, 1, 1, 0), "transverse": (0, -1, -1, 0),
}  # fmt: skip


@pytest.mark.parametrize("how", ["left to right", *map(slow, ("top to bottom", "transposed", "transverse"))])
def test_a_matrix_that_mirrors_frames_only_turns_them(how: str, tmp_path: Path) -> None:
    """As in torchcodec, and so in LeRobot. Mirrored stamps cannot be read, so the frames are compared with torchcodec's."""
    whole = data.encode(data.draw(), tmp_path / "whole.mp4", data.h264(12))
    mirrored = data.displayed_by(whole, tmp_path / "mirrored.mp4", MIRRORED[how])
    expected = data.whole_file(mirrored)
    plain = data.whole_file(whole)
    assert any(torch.equal(expected, torch.rot90(plain, turns, (2, 3))) for turns in range(4))
    root = data.write_dataset(tmp_path / "set", [mirrored], size=tuple(expected.shape[2:]))
    copy = tmp_path / "copy"
    prepared(root, copy)
    for each in (root, copy):
        with data.loader(each) as loader:
            shown = list(data.samples(loader))
        assert len(shown) == data.FRAMES
        assert all(torch.equal(pixels, expected[frame + episode * data.EPISODES[0]]) for episode, frame, pixels in shown)


def test_files_that_are_turned_and_files_that_are_not(tmp_path: Path) -> None:
    files = [file_of(tmp_path, degrees) for degrees in (0, 90, -90)]
    root = data.write_dataset(tmp_path / "set", files, [data.EPISODES] * 3, size=SHOWN)
    with data.loader(root, batch_size=32) as loader:
        shown = [(e % 2, f, frame) for e, f, frame in data.samples(loader)]
    assert len(shown) == 3 * data.FRAMES
    assert data.identities(torch.stack([frame for *_, frame in shown])) == [(e, f) for e, f, _ in shown]


def test_dali_leaves_them_to_torchcodec(tmp_path: Path) -> None:
    root = dataset_of(tmp_path, 90, data.vp9(12))
    expected = data.whole_file(tmp_path / "turned90.mp4")
    with pytest.raises(ValueError, match=r'decode="dali": the file asks for rotated frames.*Use decode="auto"'):
        data.loader(root, decode="dali")
    check(root, expected, decode="auto")


def test_dali_refuses_a_later_file(tmp_path: Path) -> None:
    """The first file is upright, so DALI begins."""
    files = [file_of(tmp_path, degrees, data.vp9(12)) for degrees in (0, 90)]
    root = data.write_dataset(tmp_path / "set", files, [data.EPISODES] * 2, size=SHOWN)
    with data.loader(root, decode="dali") as loader, pytest.raises(DecodeError, match="rotated frames"):
        list(loader)


def test_torchcodec_that_cannot_turn_is_an_error(lying: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As versions before 0.11, which deliver frames as they are stored."""

    class Old(VideoDecoder):  # type: ignore[misc]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self.metadata = SimpleNamespace(height=128, width=160)

    monkeypatch.setattr(torchcodec, "VideoDecoder", Old)
    with (
        data.loader(lying) as loader,
        pytest.raises(DecodeError, match=r"does not turn frames by 90°.*Install torchcodec 0\.11"),
    ):
        next(iter(loader))


# ---- what the programs say and write


def test_info_and_doctor_have_the_displayed_size(lying: Path) -> None:
    camera = describe(Dataset(lying)).cameras[data.CAMERA]
    assert (camera.height, camera.width, camera.remarks, camera.broken) == (*SHOWN, (), ())
    findings = looked_at(lying)
    assert [finding for finding in findings.values() if finding.status != "ok"] == []
    assert f", {SHOWN[0]}×{SHOWN[1]}, " in findings[data.CAMERA].text


def test_a_shape_as_the_frames_are_stored_is_named(lying: Path, tmp_path: Path) -> None:
    root = data.write_dataset(tmp_path / "set", [video(lying)], size=(128, 160))
    with data.loader(root) as loader, pytest.raises(DecodeError, match=r"frames must be 128×160.*got 160×128"):
        next(iter(loader))
    [remark] = describe(Dataset(root)).cameras[data.CAMERA].remarks
    assert "shape 128×160, and the file has 160×128" in remark


def test_statistics_are_those_of_the_frames(lying: Path) -> None:
    computed = Dataset(lying).compute_stats([data.CAMERA])[data.CAMERA]
    frames = data.whole_file(video(lying)).numpy() / 255
    assert computed["count"].tolist() == [data.FRAMES]
    np.testing.assert_allclose(computed["mean"].ravel(), frames.mean((0, 2, 3)), rtol=1e-5)


def test_the_preview_shows_them_upright(lying: Path, tmp_path: Path) -> None:
    assert main(["preview", str(lying), "--batch-size", "2", "--out", str(tmp_path / "a.png")]) == 0
    expected = data.whole_file(video(lying)).movedim(1, -1).numpy()
    for said, pixels in pictures(tmp_path / "a.png"):
        np.testing.assert_array_equal(pixels, expected[said["frame"] + said["episode"] * data.EPISODES[0]])


def test_a_copy_is_displayed_in_the_same_way(lying: Path, tmp_path: Path) -> None:
    prepared(lying, tmp_path / "out")
    check(tmp_path / "out", data.whole_file(video(lying)))


def test_encoded_frames_are_upright_in_the_file(lying: Path, tmp_path: Path) -> None:
    """They are no longer turned, so a decoder that does not turn frames shows them upright, and NVDEC may decode them."""
    prepared(lying, tmp_path / "out", codec="h264", crf=12)
    check(tmp_path / "out", data.whole_file(path := video(tmp_path / "out")))
    index, form = table_of(path)
    assert index.track_header[:36] == UPRIGHT
    assert (form.height, form.width) == SHOWN


def test_a_selected_size_is_that_of_upright_frames(lying: Path) -> None:
    with data.loader(lying, image_size=(150, 140)) as loader:
        for episode, frame, pixels in data.samples(loader):
            assert pixels.shape == (3, 150, 140)
            assert data.identities(pixels[None]) == [(episode, frame)]
    assert Dataset(lying).features[data.CAMERA].frame_size == SHOWN
