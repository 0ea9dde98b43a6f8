"""Frames of depth cameras: decoding of their video with PyAV, resizing, and conversion to distances, as in LeRobot.

LeRobot stores depth as video of 12-bit codes or as images in rows. Frames are cached as they are stored: codes as uint16, and
images as float32. Distances are computed when a batch is made, since they depend on the unit and on the dataset.
"""

from __future__ import annotations

import functools
import importlib
import io
import logging
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from dali_stream.cache.buffers import Buffers
from dali_stream.checks.arrays import Int64
from dali_stream.errors import DaliStreamError, DecodeError
from dali_stream.lerobot.features import Feature, Quantization
from dali_stream.lerobot.source import Source
from dali_stream.mp4.clip import TICK, TIMESCALE, Clip
from dali_stream.mp4.format import VideoFormat
from dali_stream.system.install import install_command
from dali_stream.system.log_records import DATASET_LOG
from dali_stream.system.workers import Workers

if TYPE_CHECKING:
    import torch

Frames = npt.NDArray[Any]
Floats = npt.NDArray[np.float32]
_CODES, _MM_PER_M, _MOST_MM = 4096, 1000.0, 65535.0
_PIXELS = "gray12le"  # LeRobot converts each frame to this format of FFmpeg
_log = logging.getLogger(DATASET_LOG)


def pyav(key: str) -> Any:
    """Return the module of PyAV. `key` is the camera that needs it.

    Raises:
        DaliStreamError: If PyAV cannot be imported.
    """
    try:
        return importlib.import_module("av")
    except (ImportError, OSError) as error:
        raise DaliStreamError(
            f"The depth camera {key} needs PyAV, which cannot be loaded ({error}). Install the extra depth, "
            f"`{install_command('depth')}`, or leave the camera out of cameras"
        ) from error


def decode_clip_in_parts(
    clip: Clip, expected: VideoFormat, part: int, device: str = "cpu"
) -> Iterator[tuple[list[int], torch.Tensor, int]]:
    """Decode the requests of a clip as 12-bit codes. See `torchcodec.decode_clip_in_parts`.

    Yields:
        Numbers of the requests in this part, their codes as a uint16 tensor of shape (n, H, W, 1), and the number of frames
        that were decoded since the previous part.
    """
    import av
    import torch

    if expected.rotation:
        raise DecodeError(
            f"depth maps must not be turned for display, and the file asks for {expected.rotation}°. "
            "Leave the camera out of cameras"
        )
    requests_of: dict[int | None, list[int]] = {}
    for request, number in enumerate(clip.frames):
        requests_of.setdefault(number, []).append(request)
    requests, codes, decoded = list[int](), list[Frames](), clip.coded_frames
    try:
        with av.open(io.BytesIO(clip.data)) as container:
            stream = container.streams.video[0]
            stream.codec_context.thread_count = 1
            for frame in container.decode(stream):
                # The time is compared, since a decoder may skip a damaged frame without an error.
                own = requests_of.pop(_number(frame), [])
                if own:
                    codes += [_codes(frame, expected)] * len(own)
                    requests += own
                while requests and (len(requests) >= part or not requests_of):
                    yield requests[:part], torch.from_numpy(np.stack(codes[:part])), decoded
                    requests, codes, decoded = requests[part:], codes[part:], 0
                if not requests_of:
                    return
    except (av.error.FFmpegError, ValueError, IndexError) as error:
        raise DecodeError(f"the {expected.codec} decoder failed: {error}") from error
    raise DecodeError(
        f"the {expected.codec} decoder did not deliver {len(requests_of)} of the requested frames, because the encoded data is "
        "damaged before or at them"
    )


def _number(frame: Any) -> int | None:
    """Return the place of a decoded frame in its clip, in display order."""
    if frame.pts is None:
        return None
    place = float(frame.pts * frame.time_base) * TIMESCALE / TICK
    return round(place) if abs(place - round(place)) <= 0.25 else None


def _codes(frame: Any, expected: VideoFormat) -> npt.NDArray[np.uint16]:
    if frame.is_corrupt:
        raise DecodeError(f"the {expected.codec} decoder reported that the encoded data is damaged")
    if (frame.height, frame.width) != (expected.height, expected.width):
        raise DecodeError(
            f"its decoded frames must be {expected.height}×{expected.width}, as its sample description says, got "
            f"{frame.height}×{frame.width}"
        )
    codes: npt.NDArray[np.uint16] = frame.to_ndarray(format=_PIXELS)
    return codes[..., None]


def resize_nearest(frames: Frames, size: tuple[int, int]) -> Frames:
    """Resize frames of shape (N, H, W, 1) to `size` (height, width). Each value is that of the nearest pixel.

    The pixels are those of `torch.nn.functional.interpolate(mode="nearest-exact")`, which has no kernel for uint16. Other
    kernels compute means, and the mean of two distances is a distance that nobody measured.
    """
    height, width = frames.shape[1:3]
    if size == (height, width):
        return frames
    return frames[:, _nearest(height, size[0])[:, None], _nearest(width, size[1])]


def _nearest(old: int, new: int) -> npt.NDArray[np.int64]:
    """Return the nearest of `old` pixels for each of `new` pixels. If two are equally near, torch's rounding decides."""
    import torch

    places = torch.arange(old, dtype=torch.float32)[None, None]
    return torch.nn.functional.interpolate(places, new, mode="nearest-exact")[0, 0].to(torch.int64).numpy()


class Distances:
    """Conversion of the stored frames of one depth camera to distances.

    Args:
        source: Episodes of the Loader.
        key: Name of the camera.
        unit: Unit of the distances, "m" or "mm".
    """

    def __init__(self, source: Source, key: str, unit: str) -> None:
        features = [part.features.get(key) for part in source.parts]
        self._convert = [_zeros if feature is None else _conversion(feature, unit) for feature in features]
        for part, feature in zip(source.parts, features, strict=True):
            if feature is not None and feature.is_image and feature.depth_unit is None:
                _log.warning(
                    "%s: %s: meta/info.json has no depth_unit of its depth images. Their values are delivered as they are "
                    "stored, and not converted to %s",
                    *(part.dataset.uri, key, unit),
                )

    def of(self, stored: Frames, dataset: Int64, buffers: Buffers, copiers: Workers) -> Floats:
        """Return the distances of a batch.

        Args:
            stored: Stored frames, shape (B, T, H, W, 1).
            dataset: Number of each sample's dataset, shape (B,).
            buffers: Pool of memory for batches.
            copiers: Threads that help the calling thread.

        Returns:
            Distances, float32 of the same shape. They are 0 for samples whose dataset lacks the camera.
        """
        distances = buffers.take(stored.shape, np.float32)
        steps = iter([(n, t) for n in range(len(stored)) for t in range(stored.shape[1])])

        def convert() -> None:
            for n, t in steps:  # each thread takes another frame when it has converted one
                self._convert[dataset[n]](stored[n, t], distances[n, t])

        others = [copiers.submit(convert) for _ in range(min(len(copiers), len(stored) - 1))]
        convert()
        for other in others:
            other.result()
        return distances


def _conversion(feature: Feature, unit: str) -> Callable[[Frames, Floats], None]:
    """Return the function that converts a stored frame of a dataset, shape (H, W, 1), to distances."""
    if feature.is_video:
        table = _distances_of_codes(feature.quantization, unit)

        def look_up(stored: Frames, out: Floats) -> None:
            # Indices of another type would be converted in small pieces, which takes longer.
            np.take(table, stored.astype(np.intp), out=out, mode="clip")

        return look_up
    change = {"mm": np.multiply, "m": np.divide}[unit]  # a division as in LeRobot, which is rounded differently

    def scale(stored: Frames, out: Floats) -> None:
        if feature.depth_unit in (None, unit):
            out[:] = stored
        else:
            change(stored, np.float32(_MM_PER_M), out=out)

    return scale


def distance_of_nothing(feature: Feature, unit: str) -> float:
    """Return the distance of pixels at which a depth camera measured nothing.

    LeRobot stores a distance of 0 in video as code 0, which becomes `depth_min`. Images contain 0.
    """
    return float(_distances_of_codes(feature.quantization, unit)[0]) if feature.is_video else 0.0


def _zeros(_: Frames, out: Floats) -> None:
    out[:] = 0


@functools.cache
def _distances_of_codes(quantization: Quantization, unit: str) -> Floats:
    """Return the distance of each code, shape (4096,).

    These are the operations of `dequantize_depth` in LeRobot 0.6.1, in its order and with torch, so the results have the same
    bits.
    """
    import torch

    least, most, shift, use_log = quantization
    low, high = (math.log(least + shift), math.log(most + shift)) if use_log else (float(least), float(most))
    distances = torch.arange(_CODES, dtype=torch.float32).mul_((high - low) / (_CODES - 1)).add_(low)
    if use_log:
        distances.exp_().sub_(float(shift))
    distances.clamp_(float(least), float(most))
    if unit == "mm":
        distances.mul_(_MM_PER_M).round_().clamp_(0.0, _MOST_MM)
    result: Floats = distances.numpy()
    return result
