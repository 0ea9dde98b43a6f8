"""Decoding of frames that are stored as images (PNG, JPEG, WebP) in Parquet rows, with Pillow, as in LeRobot.

LeRobot returns each image with the channels of its file. This module returns all images with the channels in the metadata.
Images of depth cameras are TIFF or PNG files with one value of 16 bits or a float32 per pixel.
"""

from __future__ import annotations

import functools
import io
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from dali_stream.cache.frame_files import Records
from dali_stream.cache.frames_on_disk import Decoding, FramesOnDisk
from dali_stream.cache.open_episodes import OpenEpisodes
from dali_stream.cache.slots import Slots
from dali_stream.decode.decoder import TASK_FRAMES, OtherSizes, SlotWork, even_tasks, named
from dali_stream.decode.depth import resize_nearest
from dali_stream.decode.resize import resize
from dali_stream.errors import DecodeError, FrameSizeError
from dali_stream.lerobot.features import CHANNELS, Feature
from dali_stream.lerobot.source import Source
from dali_stream.observe.counters import Counters
from dali_stream.observe.waiting import working
from dali_stream.schedule.frames import FramePlan, Reads
from dali_stream.schedule.plan import BatchPlan
from dali_stream.storage import Store, lfs
from dali_stream.system.workers import Workers


class _Frame(NamedTuple):
    """Frame that a task decodes, see `WantedFrame`. `data` is its encoded image."""

    data: bytes
    records: Records | None
    episode: int
    in_episode: int
    packet: int
    slot: int


class ImageDecoder:
    """`Decoder` of a camera whose frames are images in Parquet rows.

    Args:
        source: Episodes of the Loader.
        key: Name of the camera.
        counters: Counters of the Loader.
        slots: Slots into which the decoder puts frames.
        size: Size (height, width) of the frames in batches, in pixels.
        any_size: Whether images may have another size than `meta/info.json` says, since they are resized.
        on_disk: See `TorchcodecDecoder`.
    """

    def __init__(
        self,
        source: Source,
        key: str,
        counters: Counters,
        slots: Slots,
        size: tuple[int, int],
        any_size: bool,
        on_disk: FramesOnDisk | None,
    ) -> None:
        self.key, self._source, self._counters, self._slots, self._size = key, source, counters, slots, size
        self._any_size, self._other_sizes = any_size, OtherSizes(source, key)
        self._on_disk = on_disk

    def start(self, workers: Workers, plan: BatchPlan, episodes: OpenEpisodes, store: Store) -> SlotWork:
        """See `Decoder.start`."""
        planned = plan.frames[self.key]
        frames, ends = self._frames(planned, episodes), np.arange(1, len(planned.slot) + 1)
        task = even_tasks(ends, TASK_FRAMES) if len(ends) else ends
        tasks = [frames(np.flatnonzero(task == number).tolist()) for number in np.unique(task)]
        if self._on_disk is None:
            return SlotWork(self._slots, planned, [workers.submit(self._decode, own) for own in tasks], {})
        decoding = Decoding(self._frames(planned.reads, episodes), self._decode)

        def begin(own: list[_Frame]) -> tuple[list[_Frame], Decoding]:
            return own, decoding

        begins = [functools.partial(begin, own) for own in tasks]
        reading, started, batch = self._on_disk.start(workers, planned, planned.reads, begins, decoding)
        return SlotWork(self._slots, planned, reading + started, {}, batch)

    def close(self) -> None:
        """Free the slots."""
        self._slots.free()

    def _frames(self, plan: FramePlan | Reads, episodes: OpenEpisodes) -> Callable[[list[int]], list[_Frame]]:
        """Return a function that returns some frames of a plan, by their numbers in it, also when their episodes are closed."""
        if not len(plan.slot):
            return lambda numbers: []
        encoded = episodes.table.values(self.key, plan.episode, plan.frame)
        disk = self._on_disk
        records = {each: None if disk is None else disk.records(each) for each in set(plan.episode.tolist())}

        def frames(numbers: list[int]) -> list[_Frame]:
            columns = (column[numbers].tolist() for column in (encoded, plan.episode, plan.frame, plan.slot))
            return [_Frame(data, records[e], e, frame, frame, slot) for data, e, frame, slot in zip(*columns, strict=True)]

        return frames

    def _decode(self, frames: list[_Frame]) -> None:
        """Decode images, and put them into slots, in a decode thread."""
        timed = self._counters.timed
        with timed("decode_s"), working("decodes {} images of {}", len(frames), self.key):
            for frame in frames:
                try:
                    feature = self._source.part_of(frame.episode).features[self.key]
                    pixels = decode(frame.data, feature, self._any_size)
                    height, width, _ = pixels.shape
                    self._other_sizes.add(frame.episode, (height, width), f"episode {self._source.episodes[frame.episode]}")
                    with timed("resize_s"):
                        scale = resize_nearest if feature.is_depth else resize
                        resized = scale(pixels[None], self._size)
                        self._slots.put([frame.slot], resized)
                    if self._on_disk is not None:
                        self._on_disk.add([(frame, {}, resized[0])])
                except DecodeError as error:
                    whose = self._source, self.key, frame.episode, np.array([frame.in_episode])
                    self._slots.fail(frame.slot, named(*whose, error))
        self._counters.add(clips=1, decoded_frames=len(frames), stored_frames=len(frames))


def decode(data: bytes, feature: Feature, any_size: bool = False) -> npt.NDArray[Any]:
    """Decode one image, and turn it according to its EXIF orientation.

    The image has as many channels as `feature`: 1 (grey), 3 (RGB) or 4 (RGBA). A file with other channels is converted if this
    loses no information, for example from grey, palette or opaque RGBA to RGB. A depth map is returned as it is stored.

    Args:
        data: Bytes of the PNG, JPEG or WebP file, or of the TIFF or PNG file of a depth camera.
        feature: Feature of the camera.
        any_size: Whether the image may have another size than `feature`. Default: False.

    Returns:
        Image of shape (H, W, C), uint8, or float32 for a depth camera.

    Raises:
        FrameSizeError: If the image has another size than `feature`.
        DecodeError: If the image is damaged, is of another format, has more than 8 bits per channel, or has other channels than
            `feature`. For a depth camera, if it is not a TIFF or PNG file with 16 bits or a float32 per pixel.
    """
    (height, width), mode, depth = feature.frame_size, CHANNELS[feature.channels], feature.is_depth
    expected = f"the image must be {'a depth map' if depth else mode} of {height}×{width}"
    try:
        # Pillow has readers for some fifty other formats, and the one for PostScript runs a program.
        with Image.open(io.BytesIO(data), formats=_DEPTH_FORMATS if depth else _FORMATS) as image:
            deep = data[:8] == _PNG and data[24] == 16
            # Older versions of Pillow read a PNG of 16 bits in mode I, with the same values.
            if depth and image.mode not in _DEPTH_MODES and not (deep and image.mode == "I"):
                raise DecodeError(
                    f"{expected} with 16 bits or a float32 per pixel, got Pillow's mode {image.mode}. "
                    "Leave the camera out of cameras"
                )
            if not depth and (deep or image.mode not in _MODES):
                raise DecodeError(
                    f"{expected} with 8 bits per channel, got "
                    f"{'a PNG of 16 bits per channel' if deep else 'another format'} (Pillow's mode {image.mode}). Leave the "
                    "camera out with cameras=..., or convert its images to 8 bits"
                )
            # The size in the header is compared before Pillow allocates memory for the pixels. The EXIF orientation may swap
            # the sides, and is known later, since it may follow the pixels in a PNG.
            size = image.height, image.width
            if (remedy := feature.size_fault(size, any_size)) and feature.size_fault(size[::-1], any_size):
                raise FrameSizeError(f"{expected}, got {image.mode} of {size[0]}×{size[1]}. {remedy}")
            turned = ""
            if ExifTags.Base.Orientation in image.getexif():
                image, turned = ImageOps.exif_transpose(image), " (turned as its EXIF orientation asks)"
            size = image.height, image.width
            if remedy := feature.size_fault(size, any_size):
                raise FrameSizeError(f"{expected}, got {image.mode} of {size[0]}×{size[1]}{turned}. {remedy}")
            if depth:
                return np.array(image, np.float32)[..., None]
            pixels = _converted(image, mode)
            if pixels is None:
                raise DecodeError(f"{expected}, got {image.mode} of {size[0]}×{size[1]}")
            return np.array(pixels).reshape(*size, -1)
    except UnidentifiedImageError as error:
        got = lfs.pointer(data) or f"got {len(data)} bytes that begin with {data[:8].hex(' ')}"
        kinds = "TIFF or PNG" if depth else "PNG, JPEG or WebP"
        raise DecodeError(f"the image must be a {kinds} file, {got}") from error
    except _DAMAGED as error:
        raise DecodeError(f"the image is damaged: {error}. Copy the dataset again, or leave its episode out") from error


_FORMATS, _DEPTH_FORMATS = ("PNG", "JPEG", "WEBP"), ("TIFF", "PNG")
_BOMBS = Image.DecompressionBombError, Image.DecompressionBombWarning  # Python may be set to raise warnings
# Damaged files cause many kinds of errors in Pillow. Its TIFF reader calculates with values of any type from the file.
_DAMAGED = (
    *(OSError, SyntaxError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError, struct.error),
    *_BOMBS,
)
_PNG = b"\x89PNG\r\n\x1a\n"  # byte 24 of a PNG is the bit depth: https://www.w3.org/TR/png-3/#11IHDR
_MODES = ("1", "L", "P", "LA", "RGB", "RGBA")
_DEPTH_MODES = ("I;16", "I;16B", "I;16L", "F")


def _converted(image: Image.Image, mode: str) -> Image.Image | None:
    """Return the image in another mode of Pillow, or None if the conversion would lose information."""
    if image.mode == mode:
        return image
    if mode == "L":
        return image.convert(mode) if image.mode == "1" else None
    full = image.convert("RGBA")
    transparent = full.getchannel("A").getextrema() != (255, 255)
    return full if mode == "RGBA" else None if transparent else full.convert(mode)
