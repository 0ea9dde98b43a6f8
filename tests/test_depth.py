"""Depth cameras: video of 12-bit codes, and images in rows, as LeRobot 0.6.1 writes them."""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import logging
import math
import re
import shutil
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support.batches import equal
from support.datasets import Camera, Column, build, change_info, image_file, noise
from support.programs import pictures
from support.servers import Server
from support.slow import slow
from support.tools import prepared
from support.videos import box, boxes, ffmpeg, turned, unboxed

from dali_stream import DaliStreamError, Dataset, DatasetError, DecodeError, Loader, Mixture
from dali_stream.cli import main
from dali_stream.decode.depth import decode_clip_in_parts, distance_of_nothing
from dali_stream.integrations import lerobot
from dali_stream.mp4.clip import TIMESCALE, Clip, pack
from dali_stream.mp4.format import describe
from dali_stream.mp4.index import read_index
from dali_stream.storage import LocalStore
from dali_stream.tools import sheet

pytest.importorskip("av")

KEY, SIZE, LENGTHS, FPS = "observation.images.depth", (48, 64), (9, 5, 7), 10
MARKED = {"is_depth_map": True, "video.pix_fmt": "gray12le"}


def x265(params: str) -> tuple[str, ...]:
    """Arguments of FFmpeg for lossless video."""
    return ("-c:v", "libx265", "-pix_fmt", "gray12le", "-x265-params", f"lossless=1:{params}:log-level=none")


X265 = x265("keyint=2:min-keyint=2")  # LeRobot's writer; open GOPs are the default of x265


def codes(row: int) -> np.ndarray:
    """The codes of a frame, from all 4096."""
    return np.random.default_rng(row).integers(0, 4096, SIZE, np.uint16)


def dequantized(values: np.ndarray, unit: str, info: Mapping[str, Any]) -> torch.Tensor:
    """Distances of codes, with the operations of LeRobot 0.6.1 (lerobot/datasets/depth_utils.py)."""
    least, most = info.get("video.depth_min", 0.01), info.get("video.depth_max", 10.0)
    shift = info.get("video.shift", 3.5)
    distances = torch.from_numpy(values.astype(np.int64)).to(torch.float32)
    if info.get("video.use_log", True):
        low, high = math.log(least + shift), math.log(most + shift)
        distances.mul_((high - low) / 4095).add_(low).exp_().sub_(shift)
    else:
        distances.mul_((most - least) / 4095).add_(least)
    distances.clamp_(least, most)
    return distances.mul_(1000).round_().clamp_(0, 65535) if unit == "mm" else distances


def moving_codes(row: int) -> np.ndarray:
    """The codes of a frame of which the encoder predicts most from other frames, so that it uses B-frames."""
    y, x = np.mgrid[: SIZE[0], : SIZE[1]]
    return ((x * 20 + y * 7 + row * 37 + codes(row) % 8) % 4096).astype(np.uint16)


def write(
    root: Path,
    info: Mapping[str, Any] = MARKED,
    *,
    version: str = "v3.0",
    first: int = 0,
    encoder: tuple[str, ...] = X265,
    moving: bool = False,
) -> Path:
    """A dataset with depth video. Frame `row` has `codes(first + row)`, or `moving_codes`."""
    files, episodes = [], [[length] for length in LENGTHS] if version != "v3.0" else [LENGTHS]
    row = first
    for number, lengths in enumerate(episodes):
        frames = np.stack([(moving_codes if moving else codes)(row + n) for n in range(sum(lengths))])
        row += sum(lengths)
        files.append(root.with_name(f"{root.name}-{number}.mp4"))
        source = ("-f", "rawvideo", "-pix_fmt", "gray12le", "-s", f"{SIZE[1]}x{SIZE[0]}", "-r", str(FPS), "-i", "-")
        ffmpeg(*source, *encoder, files[-1], stdin=frames.tobytes())
    action = Column("float32", [2], np.arange(2 * sum(LENGTHS)).reshape(-1, 2))
    build(root, LENGTHS, {"action": action}, cameras={KEY: Camera(files, episodes, SIZE)}, fps=FPS, version=version)
    return with_entry(root, {"shape": [*SIZE, 1], "info": dict(info)})


def with_entry(root: Path, entry: Mapping[str, Any], key: str = KEY) -> Path:
    features = json.loads((root / "meta/info.json").read_text())["features"]
    features[key] |= entry
    change_info(root, features=features)
    return root


def copy_of(root: Path, folder: Path) -> Path:
    return Path(shutil.copytree(root, folder / "set"))


def write_images(root: Path, values: Any, info: Mapping[str, Any], kind: str = "TIFF", **options: Any) -> Path:
    """A dataset with depth images. `values(row)` is an array, or the bytes of a file."""
    files = []
    for row in range(sum(LENGTHS)):
        image = values(row)
        if not isinstance(image, bytes):
            Image.fromarray(image).save(data := io.BytesIO(), kind)
            image = data.getvalue()
        files.append({"bytes": image, "path": None})
    return build(root, LENGTHS, {KEY: Column("image", [*SIZE, 1], files, {"is_depth_map": True, **info})}, fps=FPS, **options)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset with depth video, with LeRobot's default quantization. Read only."""
    return write(tmp_path_factory.mktemp("depth") / "set")


def assert_as_written(batch: Mapping[str, Any], unit: str = "mm", info: Mapping[str, Any] = MARKED, first: int = 0) -> None:
    expected = torch.stack([dequantized(codes(first + row), unit, info)[None] for row in batch["index"].tolist()])
    assert batch[KEY].dtype == torch.float32
    assert torch.equal(batch[KEY], expected)


LINEAR = {"video.use_log": False, "video.depth_min": 0.2, "video.depth_max": 3}


@pytest.mark.parametrize("unit", ["mm", "m"])
@pytest.mark.parametrize("info", [{}, LINEAR, {"video.shift": 0.25, "video.depth_max": 80.0}], ids=str)
def test_distances_are_those_of_lerobot(root: Path, tmp_path: Path, info: dict[str, Any], unit: str) -> None:
    info = MARKED | info
    with_entry(copy_of(root, tmp_path), {"info": info})
    for options in ({}, {"image_dtype": "uint8"}, {"memory_format": "contiguous"}):
        with Loader(tmp_path / "set", batch_size=4, depth_unit=unit, last_batch="partial", **options) as loader:
            seen = []
            for _ in range(2):
                for batch in loader:
                    assert_as_written(batch, unit, info)
                    seen += batch["index"].tolist()
        assert sorted(seen) == sorted([*range(sum(LENGTHS))] * 2)


@pytest.mark.parametrize(
    ("entry", "version"),
    [
        ({"info": {"video.is_depth_map": True}}, "v3.0"),
        ({"info": None, "video_info": {"video.is_depth_map": True}}, "v2.1"),
        ({"shape": [*SIZE, 3]}, "v3.0"),
        ({"shape": [1, *SIZE]}, "v3.0"),
    ],
    ids=str,
)
def test_older_marks_and_shapes(tmp_path: Path, entry: dict[str, Any], version: str) -> None:
    with Loader(with_entry(write(tmp_path / "set", version=version), entry), batch_size=5) as loader:
        for batch in loader:
            assert_as_written(batch)


def test_windows_repeat_the_first_and_last_frame_of_an_episode(root: Path) -> None:
    steps, starts = (-3, 0, 2), np.cumsum([0, *LENGTHS])
    deltas = {KEY: [step / FPS for step in steps]}
    with Loader(root, batch_size=4, delta_timestamps=deltas, image_dtype="uint8") as loader:
        for batch in loader:
            assert batch[KEY].shape == (4, 3, 1, *SIZE)
            for sample, row in enumerate(batch["index"].tolist()):
                episode = int(batch["episode_index"][sample])
                rows = np.array(steps) + row
                inside = (rows >= starts[episode]) & (rows < starts[episode + 1])
                shown = rows.clip(starts[episode], starts[episode + 1] - 1).tolist()
                expected = torch.stack([dequantized(codes(each), "mm", {})[None] for each in shown])
                assert torch.equal(batch[KEY][sample], expected)
                assert batch[f"{KEY}_is_pad"][sample].tolist() == (~inside).tolist()


@pytest.mark.parametrize("size", [(20, 28), (96, 128), (48, 64), (37, 41)])  # two pixels may be equally near with the last one
def test_a_resized_frame_has_measured_distances_only(root: Path, size: tuple[int, int]) -> None:
    with Loader(root, batch_size=6, image_size=size) as loader:
        for batch in loader:
            for frame, row in zip(batch[KEY], batch["index"].tolist(), strict=True):
                whole = dequantized(codes(row), "mm", {})
                expected = torch.nn.functional.interpolate(whole[None, None], size, mode="nearest-exact")[0]
                assert torch.equal(frame, expected)


def test_over_a_network_and_after_a_resume(root: Path) -> None:
    with Server(root) as server:
        with Loader(server.url, batch_size=4) as loader:
            batches = iter(loader)
            assert_as_written(next(batches))
            state, expected = loader.state_dict(), next(batches)
        with Loader(server.url, batch_size=4) as loader:
            loader.load_state_dict(state)
            batch = next(iter(loader))
    assert_as_written(batch)
    assert equal(batch, expected)


def test_frames_are_cached_as_codes(root: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"batch_size": 7, "frame_cache": tmp_path / "frames"}
    with Loader(root, **options) as loader:
        for batch in loader:
            assert_as_written(batch)
        assert loader.stats()["decoded_bytes"] == sum(LENGTHS) * math.prod(SIZE) * 2
        assert loader.stats()["disk_written_bytes"] == sum(LENGTHS) * math.prod(SIZE) * 2
    [key] = (json.loads(path.read_text()) for path in (tmp_path / "frames").rglob("key.json"))
    assert "PyAV" in key, "frames of another version are kept apart"
    assert "torchcodec" not in key
    with Loader(root, depth_unit="m", **options) as loader:  # the unit is not that of the stored frames
        for batch in loader:
            assert_as_written(batch, "m")
        assert loader.stats()["decoded_frames"] == 0


@pytest.mark.usefixtures("gpu_machine")
def test_depth_stays_in_the_memory_of_the_cpu_beside_a_gpu_cache(root: Path, small: Path) -> None:
    mixture = Mixture({"depth": root, "colours": small}, weights={"depth": 1, "colours": 1}, missing="pad")
    options: dict[str, Any] = {"batch_size": 8, "device": "cuda", "image_size": (32, 32), "image_dtype": "uint8"}
    with Loader(mixture, gpu_cache="16MiB", **options) as found, Loader(mixture, **options) as expected:
        for _ in range(2):
            assert all(itertools.starmap(equal, zip(found, expected, strict=True)))


def test_frames_that_memory_does_not_hold_are_decoded_again(root: Path) -> None:
    with Loader(root, batch_size=4, memory_budget=200_000) as small, Loader(root, batch_size=4) as large:
        for _ in range(2):
            for ours, theirs in zip(small, large, strict=True):
                assert equal(ours, theirs)


def test_a_mixture_has_the_distances_of_each_dataset(root: Path, tmp_path: Path, small: Path) -> None:
    linear = MARKED | LINEAR
    other = write(tmp_path / "linear", linear, first=100)
    images = write_images(tmp_path / "images", lambda row: codes(200 + row), {"depth_unit": "mm"}, stats=False)
    datasets = {"log": Dataset(root), "linear": other, "images": images, "none": Dataset(small)}
    mixture = Mixture(datasets, missing="pad", weights=dict.fromkeys(datasets, 1), epoch_samples=90)
    seen = set()
    with Loader(mixture, batch_size=6, image_size=SIZE, depth_unit="m", frame_cache=tmp_path / "frames") as loader:
        for batch in [*loader, *loader]:
            for sample, (name, row) in enumerate(zip(batch["dataset"], batch["index"].tolist(), strict=True)):
                expected = {
                    "log": lambda row: dequantized(codes(row), "m", {}),
                    "linear": lambda row: dequantized(codes(100 + row), "m", linear),
                    "images": lambda row: torch.from_numpy(codes(200 + row).astype(np.float32)) / 1000,
                    "none": lambda _: torch.zeros(SIZE),
                }[name](row)
                assert torch.equal(batch[KEY][sample, 0], expected), name
                assert bool(batch[f"{KEY}_is_missing"][sample]) == (name == "none")
                seen.add(name)
    assert seen == set(datasets)
    with pytest.raises(ValueError, match=rf"{KEY}\n    log: video 48×64 depth\n    none: missing"):
        Mixture({"log": root, "none": small})


def test_depth_and_colours_are_not_one_camera(root: Path, tmp_path: Path) -> None:
    grey = build(
        tmp_path / "grey", LENGTHS, {KEY: Column("image", [*SIZE, 1], [{"bytes": b"", "path": None}] * sum(LENGTHS))}, fps=FPS
    )
    with pytest.raises(ValueError, match="Features with the same key must be compatible"):
        Mixture({"depth": root, "grey": grey}, missing="pad")


@pytest.mark.parametrize(("keyint", "frames"), [(8, "bframes=4:b-pyramid=1:open-gop=1"), (500, "bframes=4")])
def test_long_gops_and_b_frames(tmp_path: Path, keyint: int, frames: str) -> None:
    root = write(tmp_path / "set", encoder=x265(f"keyint={keyint}:min-keyint=8:{frames}"), moving=True)
    starts = np.cumsum([0, *LENGTHS])
    with Loader(root, batch_size=5, delta_timestamps={KEY: [-0.3, 0.2]}) as loader:
        for batch in loader:
            for sample, row in enumerate(batch["index"].tolist()):
                episode = int(batch["episode_index"][sample])
                rows = np.clip([row - 3, row + 2], starts[episode], starts[episode + 1] - 1).tolist()
                expected = torch.stack([dequantized(moving_codes(each), "mm", {})[None] for each in rows])
                assert torch.equal(batch[KEY][sample], expected)


# ------------------------------------------------------------------------ images in rows


def millimetres(row: int) -> np.ndarray:
    return np.random.default_rng(row).integers(0, 1 << 16, SIZE, np.uint16)


def metres(row: int) -> np.ndarray:
    return millimetres(row).astype(np.float32) / np.float32(7000)


@pytest.mark.parametrize(("stored", "kind"), [("mm", "TIFF"), ("m", "TIFF"), ("mm", "PNG"), (None, "TIFF")])
@pytest.mark.parametrize("unit", ["mm", "m"])
def test_depth_images(tmp_path: Path, stored: str | None, unit: str, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    values = metres if stored == "m" else millimetres
    root = write_images(tmp_path / "set", values, {"depth_unit": stored} if stored else {}, kind)
    with Loader(root, batch_size=5, depth_unit=unit, delta_timestamps={KEY: [0.0]}) as loader:
        for batch in loader:
            for frame, row in zip(batch[KEY], batch["index"].tolist(), strict=True):
                expected = torch.from_numpy(values(row).astype(np.float32))
                if stored not in (None, unit):
                    expected = expected * 1000 if unit == "mm" else expected / 1000
                assert torch.equal(frame, expected[None, None])  # an image keeps the axis of a window of one step
    assert ("meta/info.json has no depth_unit" in caplog.text) == (stored is None)


@pytest.mark.parametrize("size", [(20, 28), (37, 41)])
def test_resized_depth_images_are_cached_on_disk(tmp_path: Path, size: tuple[int, int]) -> None:
    root = write_images(tmp_path / "set", metres, {"depth_unit": "m"})
    for decoded in (sum(LENGTHS), 0):
        with Loader(root, batch_size=7, image_size=size, frame_cache=tmp_path / "frames") as loader:
            for batch in loader:
                whole = torch.stack([torch.from_numpy(metres(row))[None] for row in batch["index"].tolist()]) * 1000
                assert torch.equal(batch[KEY], torch.nn.functional.interpolate(whole, size, mode="nearest-exact"))
            assert loader.stats()["decoded_frames"] == decoded


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (image_file(noise(0, 0).resize(SIZE[::-1])), "16 bits or a float32 per pixel, got Pillow's mode RGB"),
        (image_file(noise(0, 0).resize(SIZE[::-1]), "JPEG"), "must be a TIFF or PNG file"),
        (image_file(Image.fromarray(np.zeros((10, 10), np.uint16)), "TIFF"), "must be a depth map of 48×64, got I;16 of 10×10"),
    ],
)
def test_other_images_are_an_error(tmp_path: Path, data: bytes, says: str) -> None:
    root = write_images(tmp_path / "set", lambda _: data, {"depth_unit": "mm"})
    with Loader(root, batch_size=4) as loader, pytest.raises(DecodeError, match=f"{KEY}: episode .*{says}"):
        next(iter(loader))


RATIONAL_STRIPS = b"\x16\x01\x04\x00", b"\x16\x01\x0a\x00"  # the TIFF tag RowsPerStrip, as an integer and as a fraction


def test_a_damaged_image_is_an_error_and_can_be_substituted(tmp_path: Path) -> None:
    """Pillow raises a TypeError for this file."""

    def values(row: int) -> np.ndarray | bytes:
        Image.fromarray(millimetres(row)).save(data := io.BytesIO(), "TIFF")
        return data.getvalue() if row % 3 else data.getvalue().replace(RATIONAL_STRIPS[0], RATIONAL_STRIPS[1], 1)

    root = write_images(tmp_path / "set", values, {"depth_unit": "mm"})
    with Loader(root, batch_size=8, shuffle=False) as loader, pytest.raises(DecodeError, match=f"{KEY}: episode 0, frame 0"):
        next(iter(loader))
    with Loader(root, batch_size=sum(LENGTHS), on_error="substitute") as loader:
        batch = next(iter(loader))
    assert batch["is_substitute"].sum() == len(range(0, sum(LENGTHS), 3))


# ------------------------------------------------------------------------ errors


def test_without_pyav_the_error_names_the_extra(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(
        DaliStreamError, match=rf"The depth camera {KEY} needs PyAV.*Install the extra depth, `pip install 'av>="
    ):
        Loader(root, batch_size=4)
    with Loader(Dataset(root, cameras=[]), batch_size=4) as loader:
        assert KEY not in next(iter(loader))
    with Loader(write_images(tmp_path / "set", metres, {"depth_unit": "m"}), batch_size=4) as loader:  # Pillow decodes images
        assert next(iter(loader))[KEY].shape == (4, 1, *SIZE)


@pytest.mark.parametrize(
    ("info", "says"),
    [
        ({"video.depth_min": "0"}, "depth_min, depth_max and shift must be finite numbers"),
        ({"video.depth_max": 0.01}, "depth_min must be less than depth_max, got 0.01 and 0.01"),
        ({"video.shift": -1}, r"depth_min \+ shift must be positive with use_log"),
        ({"video.use_log": 1}, "use_log must be true or false, got 1"),
        ({"video.depth_max": 10**400}, "depth_min, depth_max and shift must be finite numbers of at most 1e"),
    ],
)
def test_invalid_metadata_are_an_error(root: Path, tmp_path: Path, info: dict[str, Any], says: str) -> None:
    with_entry(copy_of(root, tmp_path), {"info": MARKED | info})
    with pytest.raises(
        DatasetError, match=rf"Invalid info of depth camera '{KEY}' in .*info\.json: {says}.*leave the camera out"
    ):
        Dataset(tmp_path / "set")
    Dataset(tmp_path / "set", cameras=[])


def test_the_unit_of_images_is_checked(root: Path, tmp_path: Path) -> None:
    images = write_images(tmp_path / "images", millimetres, {"depth_unit": "cm"})
    with pytest.raises(
        DatasetError, match=rf"Invalid info of depth camera '{KEY}' .*: depth_unit must be \"m\" or \"mm\", got 'cm'"
    ):
        Dataset(images)
    Dataset(images, cameras=[])
    with_entry(copy_of(root, tmp_path), {"info": MARKED | {"depth_unit": "cm"}})  # it has no effect on video
    Dataset(tmp_path / "set")


def test_invalid_arguments_are_an_error(root: Path) -> None:
    with pytest.raises(ValueError, match="depth_unit must be"):
        Loader(root, batch_size=4, depth_unit="cm")
    with pytest.raises(ValueError, match=f"normalize must not name a depth camera, got '{KEY}'"):
        Loader(root, batch_size=4, normalize={KEY: "mean_std"})
    assert KEY not in Dataset(root).compute_stats()
    with pytest.raises(ValueError, match=f"Depth camera '{KEY}'"):
        Dataset(root).compute_stats([KEY])


def test_a_damaged_frame_is_an_error_and_can_be_substituted(root: Path, tmp_path: Path) -> None:
    copy = copy_of(root, tmp_path)
    [file] = copy.rglob("*.mp4")
    content = bytearray(file.read_bytes())
    begin = content.index(b"mdat")
    middle = begin + (len(content) - begin) // 2
    content[middle : middle + 4000] = bytes(4000)
    file.write_bytes(content)
    with Loader(copy, batch_size=sum(LENGTHS)) as loader, pytest.raises(DecodeError, match=rf"{KEY}: episode \d+, frame"):
        next(iter(loader))
    with Loader(copy, batch_size=sum(LENGTHS), on_error="substitute") as loader:
        batch = next(iter(loader))
    good = ~batch["is_substitute"]
    assert 0 < good.sum() < len(good)
    assert_as_written({KEY: batch[KEY][good], "index": batch["index"][good]})


def test_frames_that_the_decoder_marks_as_damaged_are_an_error(tmp_path: Path) -> None:
    """FFmpeg's decoder of H.264 conceals the damage, delivers the frame, and marks it."""
    encoder = ("-c:v", "libx264", "-pix_fmt", "gray10le", "-bf", "0", "-g", "30")
    root = write(tmp_path / "set", encoder=encoder, moving=True)
    [file] = root.rglob("*.mp4")
    index = read_index(LocalStore(str(file.parent)), file.name)
    content = bytearray(file.read_bytes())
    start, stop = int(index.offset[4]), int(index.end[4])
    for at in range((start + stop) // 2, stop - 4):
        content[at] ^= 0x5A
    file.write_bytes(content)
    options: dict[str, Any] = {"batch_size": 4, "shuffle": False}
    with Loader(root, **options) as loader:
        batches = iter(loader)
        next(batches)
        with pytest.raises(DecodeError, match=rf"{KEY}: episode 0, frame 4.* reported that the encoded data is damaged"):
            next(batches)


def test_frames_at_other_times_are_not_delivered(root: Path) -> None:
    """The frames of a clip have the times 0, 1, 2... If a decoder guesses another one, it is not known which frame it is."""
    [file] = root.rglob("*.mp4")
    store = LocalStore(str(file.parent))
    index = read_index(store, file.name)
    clip = pack(store, [index], [1])
    assert (clip.frames, clip.coded_frames) == ([1], 2)
    tree = boxes(bytes(clip.data))
    header = box(tree, b"moov", b"trak", b"mdia", b"mdhd")
    for time, delivered in ((1.0, True), (0.99, True), (1.35, False), (0.65, False)):
        units = round(TIMESCALE / time).to_bytes(4, "big")  # per second
        header[1] = header[1][:20] + units + header[1][24:]
        changed = Clip(bytearray(unboxed(tree)), clip.frames, clip.coded_frames)
        parts = decode_clip_in_parts(changed, describe(index.configs[0]), 1)
        if delivered:
            [(requests, frames, _)] = parts
            assert requests == [0]
            assert np.array_equal(frames[0, ..., 0].numpy(), codes(1))
        else:
            with pytest.raises(DecodeError, match="did not deliver 1 of the requested frames"):
                list(parts)


def test_parts_with_repeated_requests_are_not_larger(root: Path) -> None:
    """A decode process has memory for a limited number of frames."""
    [file] = root.rglob("*.mp4")
    store = LocalStore(str(file.parent))
    index = read_index(store, file.name)
    clip = pack(store, [index], [1])
    repeated = replace(clip, frames=clip.frames * 5)
    parts = list(decode_clip_in_parts(repeated, describe(index.configs[0]), 2))
    assert [(requests, decoded) for requests, _, decoded in parts] == [([0, 1], 2), ([2, 3], 0), ([4], 0)]
    for requests, frames, _ in parts:
        assert np.array_equal(frames[..., 0].numpy(), np.stack([codes(1)] * len(requests)))


@pytest.mark.parametrize("degrees", [180, slow(90)])
def test_a_video_that_is_displayed_turned_is_an_error(root: Path, tmp_path: Path, degrees: int) -> None:
    """PyAV does not turn frames."""
    copy = copy_of(root, tmp_path)
    [file] = copy.rglob("*.mp4")
    turned(file, file, degrees)
    says = rf"must not be turned for display, .* {degrees}°\. Leave the camera out of cameras"
    with Loader(copy, batch_size=4, image_size=SIZE) as loader, pytest.raises(DecodeError, match=says):
        next(iter(loader))
    with Loader(Dataset(copy, cameras=[]), batch_size=4) as loader:
        assert len(list(loader)) == sum(LENGTHS) // 4


# ------------------------------------------------------------------------ the rest of the package


def test_a_dali_graph_gets_distances(root: Path) -> None:
    pytest.importorskip("nvidia.dali")

    def nearer(nodes: dict[str, Any]) -> dict[str, Any]:
        return nodes | {KEY: nodes[KEY] * 0.5}

    with Loader(root, batch_size=4, device="cpu", dali_graph=nearer) as changed, Loader(root, batch_size=4) as plain:
        for ours, theirs in zip(changed, plain, strict=True):
            assert torch.equal(ours[KEY], theirs[KEY] * 0.5)


def test_a_batch_of_a_run_has_the_unit_of_the_run(root: Path) -> None:
    with Loader(root, batch_size=4, depth_unit="m") as loader:
        assert equal(loader.batch_at(0, 0), next(iter(loader)))


def test_prepare_copies_depth(root: Path, tmp_path: Path) -> None:
    prepared(root, tmp_path / "out", codec="h264", size=(24, 32))
    with Loader(tmp_path / "out", batch_size=4) as loader:
        for batch in loader:
            assert_as_written(batch)
    images = write_images(tmp_path / "images", metres, {"depth_unit": "m"})
    prepared(images, tmp_path / "same", size=(24, 32))
    with Loader(tmp_path / "same", batch_size=4) as copied, Loader(images, batch_size=4) as original:
        for ours, theirs in zip(copied, original, strict=True):
            assert equal(ours, theirs)
    with pytest.raises(ValueError, match=f"images_to_video must be False for '{KEY}', a depth camera"):
        prepared(images, tmp_path / "other", images_to_video=True)


@pytest.mark.parametrize(("options", "scale"), [([], r"\d+ to \d+ mm"), (["--depth-unit", "m"], r"[\d.]+ to [\d.]+ m")])
def test_preview_shows_false_colours_with_a_scale(
    root: Path, tmp_path: Path, options: list[str], scale: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, drawn, make = tmp_path / "sheet.png", list[sheet.Sample](), sheet.samples

    def samples(*arguments: Any) -> list[sheet.Sample]:
        drawn.extend(make(*arguments))
        return drawn

    monkeypatch.setattr(sheet, "samples", samples)
    assert main(["preview", str(root), "--out", str(out), "--batch-size", "3", *options]) == 0
    assert all(re.fullmatch(scale, sample.strips[0].scale) for sample in drawn)
    shown = pictures(out)
    assert len(shown) == 3
    for _, frame in shown:
        assert frame.shape == (*SIZE, 3)
        assert (frame != frame[..., :1]).any()  # not grey


def test_preview_shows_nothing_measured_in_black(root: Path) -> None:
    """LeRobot stores a distance of 0 as code 0 of video, which becomes depth_min."""
    feature = Dataset(root).features[KEY]
    for unit, expected in {"mm": "20 to 30 mm", "m": "0.02 to 0.03 m"}.items():
        nothing = dequantized(np.zeros(1, np.uint16), unit, MARKED).item()
        assert nothing > 0
        scale = 1 if unit == "mm" else 1000
        values = torch.tensor([nothing, 20 / scale, math.inf, 30 / scale, math.nan]).reshape(1, 1, 1, 5)
        batch = {KEY: values, **{key: torch.zeros(1, dtype=torch.int64) for key in ("index", "episode_index", "frame_index")}}
        depth = {KEY: sheet.Depth(unit, distance_of_nothing(feature, unit))}
        [sample] = sheet.samples(batch, [KEY], {}, depth=depth)
        assert sample.strips[0].scale == expected
        assert sample.strips[0].data.any(-1).tolist() == [[[False, True, False, True, False]]]


@pytest.mark.slow
@pytest.mark.usefixtures("doctor_here")
def test_doctor_and_info_know_depth(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["info", str(root)])
    assert "pyav" in capsys.readouterr().out
    main(["doctor", str(root), "--deep", "--json"])
    findings = json.loads(capsys.readouterr().out)
    said = json.dumps(findings)
    assert "torchcodec decodes to 8" in said
    assert '"problem"' not in said


@pytest.mark.usefixtures("doctor_here")
@pytest.mark.parametrize("options", [[], ["--deep"]], ids=str)
def test_doctor_says_that_pyav_is_missing_and_does_not_blame_the_file(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    main(["doctor", str(root), *options, "--json"])
    findings = json.loads(capsys.readouterr().out)["findings"]
    problems = [finding for finding in findings if finding["status"] == "problem"]
    assert [problem["name"] for problem in problems] == [f"{KEY} frame, PyAV", *["all frames"] * len(options)]
    for problem in problems:
        assert problem["text"].startswith(f"The depth camera {KEY} needs PyAV, which cannot be loaded (")
        assert "pip install 'av>=" in problem["text"]
        assert problem["remedy"] == ""


@dataclasses.dataclass
class Meta:
    root: Path
    features: dict[str, Any]


@dataclasses.dataclass
class LeRobotDataset:
    """The attributes of a LeRobotDataset that `make_loader` reads."""

    meta: Meta
    depth_output_unit: str = "m"

    def image_transforms(self, frame: torch.Tensor) -> torch.Tensor:
        return frame * 0


def test_lerobots_loader_has_its_unit_and_does_not_transform_depth(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    dataset = LeRobotDataset(Meta(root, dict(Dataset(root).features)))
    with lerobot.make_loader(dataset, batch_size=4, device="cpu") as loader:
        for batch in loader:
            assert_as_written(batch, "m")
