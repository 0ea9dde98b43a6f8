"""Cameras whose frames are images in Parquet rows: every way they are stored, every kind of image, windows, caches, memory."""

from __future__ import annotations

import io
import re
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image
from support.datasets import ODD_CAMERA, ODD_SIZE, TOP, Camera, Column, build, image_file, noise
from support.servers import Server
from support.tools import prepared
from support.videos import SIZE, draw, encode, h264

from dali_stream import DaliStreamError, Dataset, DatasetError, DecodeError, Loader, MemoryBudgetError, Mixture
from dali_stream.decode.resize import resize
from dali_stream.demo import read_identities
from dali_stream.lerobot.rows import RowReader

LENGTHS = (3, 2)
FRAMES = [(episode, frame) for episode, length in enumerate(LENGTHS) for frame in range(length)]
HEIGHT, WIDTH = ODD_SIZE


def written(root: Path, values: Any, shape: tuple[int, ...] = (*ODD_SIZE, 3), info: dict[str, Any] | None = None) -> Path:
    """A dataset of one camera, whose column holds `values`."""
    return build(root, LENGTHS, {ODD_CAMERA: Column("image", shape, values, info)})


def structs(files: list[bytes]) -> list[dict[str, Any]]:
    return [{"bytes": file, "path": f"frame-{i:06d}.png"} for i, file in enumerate(files)]


def delivered(dataset: Path | Dataset, **options: Any) -> torch.Tensor:
    """The frames of an epoch in recorded order, (N, C, H, W)."""
    with Loader(dataset, batch_size=len(FRAMES), shuffle=False, image_dtype="uint8", device="cpu", **options) as loader:
        [batch] = list(loader)
    frames: torch.Tensor = batch[ODD_CAMERA]
    return frames


def with_pillow(file: bytes, mode: str) -> np.ndarray:
    """(C, H, W) of an image file, by Pillow alone."""
    pixels = np.array(Image.open(io.BytesIO(file)).convert(mode))
    return np.moveaxis(pixels.reshape(*pixels.shape[:2], -1), -1, 0)


# ------------------------------------------------------------------------ how images are stored

PNGS = [image_file(noise(*place)) for place in FRAMES]
NAMES = [f"images/camera/frame-{i:06d}.png" for i in range(len(FRAMES))]
STORED = {
    "bytes and path": lambda: pa.array(structs(PNGS), pa.struct([("bytes", pa.binary()), ("path", pa.string())])),
    "path and bytes": lambda: pa.array(structs(PNGS), pa.struct([("path", pa.string()), ("bytes", pa.large_binary())])),
    "bytes alone": lambda: pa.array([{"bytes": png} for png in PNGS]),
    "no paths": lambda: pa.array([{"bytes": png, "path": None} for png in PNGS]),
    "binary": lambda: pa.array(PNGS, pa.binary()),
    "large binary": lambda: pa.array(PNGS, pa.large_binary()),
}


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("shape", [(HEIGHT, WIDTH, 3), (3, HEIGHT, WIDTH)])
def test_images_are_read_however_they_are_stored(tmp_path: Path, stored: str, shape: tuple[int, ...]) -> None:
    found = delivered(written(tmp_path, STORED[stored](), shape))
    np.testing.assert_array_equal(found.numpy(), [with_pillow(png, "RGB") for png in PNGS])
    assert read_identities(found.movedim(1, -1).numpy())[:, :2].tolist() == [list(place) for place in FRAMES]


ELSEWHERE = {
    "a struct without bytes": lambda: [{"bytes": None, "path": name} for name in NAMES],
    "a struct of paths": lambda: pa.array([{"path": name} for name in NAMES]),
    "paths": lambda: pa.array(NAMES),
}


@pytest.mark.parametrize("stored", ELSEWHERE)
@pytest.mark.parametrize("remote", [False, True])
def test_images_in_files_of_the_dataset_are_read(tmp_path: Path, stored: str, remote: bool) -> None:
    root = with_files(tmp_path, stored)
    with Server(root) as server:
        found = delivered(Dataset(server.url if remote else root), memory_budget="1MiB")
        np.testing.assert_array_equal(found.numpy(), [with_pillow(png, "RGB") for png in PNGS])
        if remote:
            assert sorted(request.path for request in server.requests if ".png" in request.path) == [f"/{n}" for n in NAMES]
            sizes: list[int] = []
            RowReader(Dataset(server.url)).read(0, sizes.append)
            assert sum(sizes) > sum(map(len, PNGS[: LENGTHS[0]]))
        server.requests.clear()
        with Loader(Dataset(server.url, cameras=[]), batch_size=5) as loader:
            assert len(list(loader)) == 1
        assert not [request.path for request in server.requests if ".png" in request.path]


def with_files(root: Path, stored: str) -> Path:
    """A dataset whose images are in files of their own."""
    (written(root, ELSEWHERE[stored]()) / NAMES[0]).parent.mkdir(parents=True)
    for name, png in zip(NAMES, PNGS, strict=True):
        (root / name).write_bytes(png)
    return root


def test_a_file_of_an_image_that_is_missing_or_outside_is_named(tmp_path: Path) -> None:
    root = with_files(tmp_path / "missing", "paths")
    (root / NAMES[4]).unlink()
    with pytest.raises(DatasetError, match=rf"episode 1: {ODD_CAMERA}: frame 1: .*{NAMES[4]}"):
        delivered(root)
    for number, name in enumerate(("/tmp/cache/frame.png", "gs://bucket/frame.png")):
        outside = written(tmp_path / f"{number}", pa.array([name] * len(PNGS)))
        with pytest.raises(DatasetError, match=rf"episode 0: {ODD_CAMERA}: the image of frame 0 .*{name}.*Embed it"):
            delivered(outside)
    with pytest.raises(DatasetError, match=r"must be a path within the dataset"):
        delivered(written(tmp_path / "up", pa.array(["../frame.png"] * len(PNGS))))


@pytest.mark.parametrize("stored", ELSEWHERE)
def test_images_in_files_of_their_own_are_not_prepared(tmp_path: Path, stored: str) -> None:
    with pytest.raises(DaliStreamError, match="only those in the rows are copied"):
        prepared(with_files(tmp_path / "data", stored), tmp_path / "out")


@pytest.mark.parametrize("value", [None, {"bytes": None, "path": None}])
def test_a_missing_image_is_an_error_that_names_its_frame(tmp_path: Path, value: dict[str, None] | None) -> None:
    values = [*structs(PNGS)[:4], value]
    with pytest.raises(DatasetError, match=rf"episode 1: {ODD_CAMERA}: 1 of 2 images are missing, the first of frame 1"):
        delivered(written(tmp_path, values))


# ------------------------------------------------------------------------ kinds of images

Change = Callable[[Image.Image], bytes]


def opaque(image: Image.Image) -> Image.Image:
    image.putalpha(255)
    return image


def clear(image: Image.Image) -> Image.Image:
    image.putalpha(Image.fromarray(np.arange(HEIGHT * WIDTH, dtype=np.uint8).reshape(HEIGHT, WIDTH)))
    return image


def palette(image: Image.Image) -> Image.Image:
    return image.quantize(64)


# LeRobot delivers these too: the channels of the file, if the metadata promise the same number of channels.
SAME: dict[str, tuple[int, str, Change]] = {
    "grey PNG": (1, "L", lambda image: image_file(image.convert("L"))),
    "grey JPEG": (1, "L", lambda image: image_file(image.convert("L"), "JPEG", quality=95)),
    "RGB JPEG": (3, "RGB", lambda image: image_file(image, "JPEG", quality=95)),
    "RGBA": (4, "RGBA", lambda image: image_file(clear(image))),
}
# These become RGB without a loss.
CONVERTED: dict[str, Change] = {
    "grey": lambda image: image_file(image.convert("L")),
    "black and white": lambda image: image_file(image.convert("1")),
    "palette": lambda image: image_file(palette(image)),
    "opaque RGBA": lambda image: image_file(opaque(image)),
}


@pytest.mark.parametrize("kind", SAME)
@pytest.mark.parametrize("channels_first", [False, True])
def test_images_keep_their_channels(tmp_path: Path, kind: str, channels_first: bool) -> None:
    channels, mode, change = SAME[kind]
    files = [change(noise(*place)) for place in FRAMES]
    shape = (channels, *ODD_SIZE) if channels_first else (*ODD_SIZE, channels)
    found = delivered(written(tmp_path, structs(files), shape))
    assert found.shape == (len(FRAMES), channels, *ODD_SIZE)
    np.testing.assert_array_equal(found.numpy(), [with_pillow(file, mode) for file in files])


@pytest.mark.parametrize("kind", CONVERTED)
def test_images_become_rgb_where_nothing_is_lost(tmp_path: Path, kind: str) -> None:
    files = [CONVERTED[kind](noise(*place)) for place in FRAMES]
    found = delivered(written(tmp_path, structs(files)))
    np.testing.assert_array_equal(found.numpy(), [with_pillow(file, "RGB") for file in files])


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_an_image_is_turned_as_its_exif_says(tmp_path: Path, kind: str) -> None:
    """The library `datasets` does so, and LeRobot reads images with it."""
    files = [oriented(noise(*place).rotate(90, expand=True), kind) for place in FRAMES]
    found = delivered(written(tmp_path, structs(files)))
    assert read_identities(found.movedim(1, -1).numpy())[:, :2].tolist() == [list(place) for place in FRAMES]


def oriented(image: Image.Image, kind: str) -> bytes:
    """An image that is displayed turned by 90°."""
    exif = Image.Exif()
    exif[274] = 6
    return image_file(image, kind, exif=exif)


def deep_png(channels: int) -> bytes:
    """A PNG of 16 bits a channel, which Pillow may open as one of 8 bits."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", WIDTH, HEIGHT, 16, 0 if channels == 1 else 2, 0, 0, 0)
    lines = (b"\0" + bytes(2 * channels * WIDTH)) * HEIGHT
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(lines)) + chunk(b"IEND", b"")


REFUSED: dict[str, tuple[int, Change, str]] = {
    "16-bit grey": (
        1,
        lambda _: deep_png(1),
        r"must be L of .*, got a PNG of 16 bits per channel \(Pillow's mode I;16\).*cameras=",
    ),
    "16-bit RGB": (
        3,
        lambda _: deep_png(3),
        r"must be RGB of .*, got a PNG of 16 bits per channel \(Pillow's mode RGB\).*cameras=",
    ),
    "CMYK": (3, lambda image: image_file(image.convert("CMYK"), "JPEG"), "mode CMYK"),
    "RGB for grey": (1, image_file, "the image must be L of 120×128, got RGB of 120×128"),
    "transparent RGBA for RGB": (3, lambda image: image_file(clear(image)), "the image must be RGB of .*, got RGBA of 120×128"),
    "another size": (3, lambda image: image_file(image.resize((130, 120))), "must be RGB of 120×128, got RGB of 120×130"),
    "a turned size": (3, lambda image: image_file(image.resize((120, 128))), "must be RGB of 120×128, got RGB of 128×120"),
    "half a file": (3, lambda image: image_file(image)[:9999], "the image is damaged"),
    "TIFF": (
        3,
        lambda image: image_file(image, "TIFF"),
        "must be a PNG, JPEG or WebP file, got 46.* that begin with 49 49 2a 00",
    ),
    "no image": (3, lambda _: b"\0" * 9, "must be a PNG, JPEG or WebP file, got 9 bytes that begin with 00 00"),
    "turned by EXIF": (
        3,
        lambda image: oriented(image, "JPEG"),
        r"must be RGB of 120×128, got RGB of 128×120 \(turned as its EXIF .*\)\. Set image_size=.* --size 128x120",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_an_image_that_cannot_be_delivered_as_it_is_is_an_error(tmp_path: Path, kind: str) -> None:
    channels, change, said = REFUSED[kind]
    files = [*(image_file(noise(*place).convert("L" if channels == 1 else "RGB")) for place in FRAMES[:4]), change(noise(1, 1))]
    with pytest.raises(DecodeError, match=rf"^{ODD_CAMERA}: episode 1, frame 1: .*{said}"):
        delivered(written(tmp_path, structs(files), (*ODD_SIZE, channels)))


# ------------------------------------------------------------------------ hostile images

POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 128 120\n%%LanguageLevel: 2\n%%EndComments\nshowpage\n%%EOF\n"


def test_no_program_is_run_for_an_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow runs Ghostscript to read PostScript, which can read and write files."""
    program = tmp_path / "bin/gs"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\ntouch {tmp_path}/was-run\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")
    root = written(tmp_path / "data", structs([POSTSCRIPT] * len(FRAMES)))
    with pytest.raises(DecodeError, match=r"must be a PNG, JPEG or WebP file, got .* that begin with 25 21 50 53"):
        delivered(root)
    with pytest.raises(DecodeError, match="must be a PNG, JPEG or WebP file"):
        Dataset(root).compute_stats([ODD_CAMERA])
    assert not (tmp_path / "was-run").exists()


def bomb(width: int, height: int) -> bytes:
    """The head of a PNG that is all of it. Pillow finds out when it decodes the pixels."""
    whole = image_file(Image.new("RGB", (width, 1)))
    header = b"IHDR" + struct.pack(">II", width, height) + whole[24:29]
    return whole[:12] + header + struct.pack(">I", zlib.crc32(header)) + whole[33:60]


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("image_size", [None, (60, 80)])
@pytest.mark.parametrize("size", [(6000, 6000), (13000, 13000)])
def test_the_size_is_compared_before_pixels_are_decoded(
    tmp_path: Path, size: tuple[int, int], image_size: tuple[int, int] | None
) -> None:
    """The pixels are missing, and the message is not about them."""
    root = written(tmp_path, structs([bomb(*size)] * len(FRAMES)))
    said = f"the image must be RGB of 120×128, got RGB of {size[1]}×{size[0]}. Frames of this size are read only if meta/info"
    with pytest.raises(DecodeError, match=said):
        delivered(root, image_size=image_size)


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_the_size_of_a_truncated_image_is_compared_first(tmp_path: Path, kind: str) -> None:
    root = written(tmp_path, structs([image_file(noise(0, 0).resize((130, 120)), kind)[:5000]] * len(FRAMES)))
    with pytest.raises(DecodeError, match="must be RGB of 120×128, got RGB of 120×130"):
        delivered(root)
    with pytest.raises(DecodeError, match="the image is damaged"):
        delivered(root, image_size=(60, 80))


@pytest.mark.parametrize("shape", [[120], [120, 128], [120, 128, 2], [120, 128, 3, 1]])
def test_a_shape_that_no_image_has_is_an_error(tmp_path: Path, shape: list[int]) -> None:
    with pytest.raises(DatasetError, match=r"shape of camera 'observation.image' .*: must be \(H, W, C\) or \(C, H, W\)"):
        Dataset(written(tmp_path, structs(PNGS), tuple(shape)))


# ------------------------------------------------------------------------ as video


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_images_are_resized_as_torch_does_it(tmp_path: Path, channels: int) -> None:
    mode = {1: "L", 3: "RGB", 4: "RGBA"}[channels]
    files = [image_file(noise(*place).convert(mode)) for place in FRAMES]
    root = written(tmp_path, structs(files), (*ODD_SIZE, channels))
    whole = torch.from_numpy(np.stack([with_pillow(file, mode) for file in files])).contiguous(
        memory_format=torch.channels_last
    )
    expected = torch.nn.functional.interpolate(whole, size=(60, 80), mode="bilinear", antialias=True)
    assert delivered(root, image_size=(60, 80)).equal(expected)


def test_frames_that_have_the_size_stay_where_they_are() -> None:
    frames = np.zeros((2, 12, 16, 3), np.uint8)
    assert resize(frames, (12, 16)) is frames
    assert resize(frames, (16, 12)).shape == (2, 16, 12, 3)


def test_images_and_video_come_in_one_batch(tmp_path: Path, small: Path) -> None:
    """As a camera of a mixture, whose datasets store it in one way or the other."""
    mixed = Mixture(
        {"video": small, "images": written(tmp_path, structs(PNGS))}, keys={"images": {ODD_CAMERA: TOP}}, missing="pad"
    )
    seen = set[str]()
    with Loader(mixed, batch_size=8, image_dtype="uint8", device="cpu", shuffle="global") as loader:
        for batch in loader:
            shown = read_identities(batch[TOP].movedim(1, -1).numpy())[:, :2]
            np.testing.assert_array_equal(shown, np.stack([batch["episode_index"], batch["frame_index"]], 1))
            seen |= set(batch["dataset"])
    assert seen == {"video", "images"}


@pytest.mark.parametrize("channels", [1, 4])
def test_images_of_other_channels_pass_through_a_pipeline(tmp_path: Path, channels: int) -> None:
    files = [image_file(noise(*place).convert({1: "L", 4: "RGBA"}[channels])) for place in FRAMES]
    root = written(tmp_path, structs(files), (*ODD_SIZE, channels))
    assert delivered(root, dali_graph=lambda nodes: nodes).equal(delivered(root))


@pytest.mark.parametrize("channels", [1, 3])
def test_images_are_normalized_per_channel(tmp_path: Path, channels: int) -> None:
    files = [image_file(noise(*place).convert({1: "L", 3: "RGB"}[channels])) for place in FRAMES]
    root = written(tmp_path, structs(files), (*ODD_SIZE, channels))
    stats = Dataset(root).compute_stats([ODD_CAMERA])
    assert stats[ODD_CAMERA]["mean"].shape == (channels, 1, 1)
    with Loader(Dataset(root, stats=stats), batch_size=5, normalize={ODD_CAMERA: "mean_std"}, device="cpu") as loader:
        frames = next(iter(loader))[ODD_CAMERA]
    torch.testing.assert_close(frames.mean((0, 2, 3)), torch.zeros(channels), atol=1e-4, rtol=0)
    torch.testing.assert_close(frames.std((0, 2, 3)), torch.ones(channels), atol=1e-3, rtol=0)


def test_statistics_of_few_images_are_of_all_of_them(tmp_path: Path) -> None:
    root = written(tmp_path, structs(PNGS))
    found = Dataset(root).compute_stats([ODD_CAMERA])[ODD_CAMERA]
    levels = np.stack([with_pillow(file, "RGB") for file in PNGS]) / 255
    assert found["count"].tolist() == [len(PNGS)]
    np.testing.assert_allclose(found["mean"], levels.mean((0, 2, 3), keepdims=True)[0], rtol=1e-6)


def test_each_image_of_overlapping_windows_is_decoded_once(odd: Path) -> None:
    windows = {ODD_CAMERA: [-0.2, -0.1, 0.0, 0.1]}
    with Loader(odd, batch_size=7, delta_timestamps=windows, image_dtype="uint8", device="cpu") as loader:
        for _ in range(2):
            for batch in loader:
                found = read_identities(batch[ODD_CAMERA].movedim(2, -1).flatten(0, 1).numpy())[:, 1].reshape(7, 4)
                lengths = np.array([(5, 1, 8, 7)[episode] for episode in batch["episode_index"]])[:, None]
                wanted = batch["frame_index"].numpy()[:, None] + [-2, -1, 0, 1]
                np.testing.assert_array_equal(found, np.clip(wanted, 0, lengths - 1))
        assert loader.stats()["decoded_frames"] == 21
        assert loader.stats()["memory_hits"] > 0


@pytest.mark.slow
def test_images_stay_within_the_memory_budget(tmp_path: Path) -> None:
    """12 episodes of 12 images, of some 46 KB each, and room for three; any budget delivers the same batches."""
    lengths, rng = (12,) * 12, np.random.default_rng(0)
    files = [image_file(Image.fromarray(rng.integers(0, 256, (*ODD_SIZE, 3), np.uint8))) for _ in range(sum(lengths))]
    root = build(tmp_path, lengths, {ODD_CAMERA: Column("image", (*ODD_SIZE, 3), structs(files))})
    least = 12 * len(files[0]) * 3
    options: dict[str, Any] = {"batch_size": 2, "consumers": 1, "episode_pool_size": 2, "image_dtype": "uint8", "device": "cpu"}
    with Loader(root, **options) as plenty, Loader(root, memory_budget=least, **options) as little:
        most, count = 0, 0
        for expected, batch in zip(plenty, little, strict=True):
            assert batch["index"].tolist() == expected["index"].tolist()
            for index, frame in zip(batch["index"].tolist(), batch[ODD_CAMERA], strict=True):
                np.testing.assert_array_equal(frame.numpy(), with_pillow(files[index], "RGB"))
            most, count = max(most, little.stats()["resident_bytes"]), count + len(batch["index"])
        assert plenty.stats()["row_bytes"] > sum(map(len, files))
    assert count == sum(lengths)
    assert 0 < most <= least * 5 // 4
    with pytest.raises(MemoryBudgetError):
        Loader(root, memory_budget=1, **options)


def test_a_budget_that_images_leave_too_small_for_video_is_an_error_with_one_that_is_enough(tmp_path: Path) -> None:
    """The sizes of images are unknown before they are read, so the constructor accepts the budget."""
    video = encode(draw(LENGTHS), tmp_path / "video.mp4", h264(2), fps=10)
    root = build(
        tmp_path / "data",
        LENGTHS,
        {ODD_CAMERA: Column("image", (*ODD_SIZE, 3), structs(PNGS))},
        cameras={TOP: Camera([video], [LENGTHS], SIZE)},
    )
    options: dict[str, Any] = {"batch_size": len(FRAMES), "device": "cpu", "shuffle": False, "image_dtype": "uint8"}
    with Server(root) as server:
        budget: int | str = sum(map(len, PNGS)) + video.stat().st_size
        with Loader(server.url, memory_budget=budget, **options) as loader, pytest.raises(MemoryBudgetError) as caught:
            list(loader)
        [budget] = re.findall(r'for encoded video, .* Use a larger memory_budget, such as "(\w+)", or', str(caught.value))
        with Loader(server.url, memory_budget=budget, **options) as loader:
            [batch] = loader
    assert read_identities(batch[TOP].movedim(1, -1).numpy())[:, :2].tolist() == [list(place) for place in FRAMES]
