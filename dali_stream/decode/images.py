"""Frames that are stored as images (PNG, JPEG) in Parquet rows, decoded with Pillow as LeRobot does."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from dali_stream.cache.memory import Memory
from dali_stream.cache.slots import Slots
from dali_stream.counters import Counters
from dali_stream.decode.decoder import Decoded, Pool, even_tasks, named
from dali_stream.decode.resize import resize
from dali_stream.errors import DecodeError
from dali_stream.lerobot.dataset import DatasetFiles
from dali_stream.schedule.schedule import Step
from dali_stream.storage import Store

Array = npt.NDArray[Any]
Int64 = npt.NDArray[np.int64]


class ImageDecoder:
    """A `Decoder` of a camera whose frames are images in Parquet rows, into slots.

    Args:
        dataset: where they are.
        key: the camera.
        counters: what to add to.
        slots: where decoded frames go.
        size: (height, width) that they are resized to.
    """

    def __init__(self, dataset: DatasetFiles, key: str, counters: Counters, slots: Slots, size: tuple[int, int]) -> None:
        self.key, self._dataset, self._counters, self._slots, self._size = key, dataset, counters, slots, size

    def learn(self, memory: Memory, episode: int) -> tuple[Int64, Int64]:
        """As of `Decoder`: each frame is a GOP of its own."""
        frames = np.arange(self._dataset.lengths[episode])
        return frames, frames

    def start(self, pool: Pool, step: Step, frames: Int64, memory: Memory, store: Store) -> Decoded:
        """As of `Decoder`."""
        planned, tasks = step.frames[self.key], []
        if len(planned.slot):
            encoded = memory.gather(self.key, planned.episode, planned.frame)
            task = even_tasks(np.arange(1, len(planned.slot) + 1))
            for part in (task == number for number in np.unique(task)):
                own = encoded[part], planned.episode[part], planned.frame[part], planned.slot[part].tolist()
                tasks.append(pool.submit(self._decode, *own))
        return Decoded(self._slots, planned, tasks, {})

    def close(self) -> None:
        """Frees the slots."""
        self._slots.free()

    def _decode(self, encoded: Array, episode: Int64, frame: Int64, slots: list[int]) -> None:
        timed = self._counters.timed
        with timed("decode_s"):
            for i, slot in enumerate(slots):
                try:
                    pixels = decode(encoded[i], self._dataset.picture_size(self.key))
                    with timed("resize_s"):
                        pixels = resize(pixels[None], self._size)
                    self._slots.put([slot], pixels)
                except DecodeError as error:
                    self._slots.fail(slot, named(self._dataset, self.key, int(episode[i]), frame[i : i + 1], error))
        self._counters.add(clips=1, decoded_frames=len(slots))


def decode(data: bytes, size: tuple[int, ...]) -> npt.NDArray[np.uint8]:
    """Decodes one image to (H, W, 3) uint8 RGB. `size` is the promised (height, width).

    Raises:
        DecodeError: it is damaged, is not RGB, or has another size than promised.
    """
    try:
        with Image.open(io.BytesIO(data)) as image:
            if image.mode != "RGB" or (image.height, image.width) != tuple(size):
                raise DecodeError(
                    f"the image is {image.mode} of {image.height}×{image.width}, and RGB of {size[0]}×{size[1]} is promised"
                )
            return np.array(image)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise DecodeError(f"the image is damaged: {error}") from error
