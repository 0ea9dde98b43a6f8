"""What a loader is set to: all that does not change from epoch to epoch."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from dali_stream.cache.indices import IndexCache
from dali_stream.decode.decoder import CLIP_FRAMES
from dali_stream.decode.route import Route
from dali_stream.errors import DecodeError
from dali_stream.lerobot.source import ABSENT, Source
from dali_stream.order.batches import Batches
from dali_stream.order.order import EpochOrder
from dali_stream.order.orders import Orders
from dali_stream.order.state import OrderArguments
from dali_stream.order.windows import Windows
from dali_stream.pipeline.substitutes import Substitutes
from dali_stream.schedule.budget import Sizes, batches_in_progress
from dali_stream.schedule.episodes import EpisodeTable

SUBSTITUTE = "is_substitute"  # the key of the mask of samples that could not be decoded
DATASET = "dataset"  # the key of the name of each sample's dataset, of a mixture
SAMPLE = "sample"  # the key of the random numbers that a sample brings for augmentation


@dataclass(frozen=True)
class Config:
    """Immutable configuration of a loader."""

    dataset: Source
    orders: Orders
    batches: Batches
    windows: Windows
    arguments: OrderArguments
    rank: int
    num_threads: int
    prefetch: int | None
    memory_budget: int
    image_size: tuple[int, int] | None
    image_dtype: str
    memory_format: str
    indices: IndexCache
    max_substitutes: float | None
    gpu: int | None
    augments: bool
    audit: int
    substitutes: Substitutes = field(default_factory=Substitutes)

    def order(self, epoch: int) -> EpochOrder:
        """The order of one epoch."""
        return self.orders.of(epoch, self.arguments)

    def order_state(self) -> dict[str, Any]:
        """What order and augmentation are a function of, beside dataset and epoch."""
        return self.arguments.state() | self.orders.state | ({"seed": self.arguments.seed} if self.augments else {})

    def frame_size(self, camera: str) -> tuple[int, int]:
        """(height, width) of a camera's frames when the CPU has decoded and resized them."""
        return self.image_size or self.dataset.picture_size(camera)

    def frame_shape(self, camera: str) -> tuple[int, int, int]:
        """(height, width, channels) of such a frame."""
        return *self.frame_size(camera), self.dataset.features[camera].channels

    def frame_bytes(self, camera: str) -> int:
        """Memory of such a frame."""
        return math.prod(self.frame_shape(camera))

    def on_cpu(self, routes: Mapping[str, Route]) -> list[str]:
        """Cameras that the CPU decodes, given the decoder of each."""
        return [key for key in self.dataset.cameras if routes[key].decoder == "torchcodec"]

    def uses_dali(self, on_cpu: Sequence[str]) -> bool:
        """Whether batches come out of a DALI graph: for a GPU, for a user's graph, and if NVDEC decodes a camera.

        Args:
            on_cpu: Cameras that the CPU decodes.
        """
        return self.gpu is not None or self.augments or len(on_cpu) < len(self.dataset.cameras)

    @property
    def audits_apart(self) -> bool:
        """Whether frames that DALI decodes are outputs of their own for audits, since a user's graph may change them."""
        return self.audit > 0 and self.augments

    @property
    def depth(self) -> int:
        """Batches in progress: `prefetch`, or enough that all threads have work while the oldest batch is waited for."""
        if self.prefetch is not None:
            return self.prefetch
        frames = self.batches.batch_size * sum(map(self.windows.steps, self.dataset.cameras))
        return batches_in_progress(self.num_threads, frames, CLIP_FRAMES)

    @property
    def table_bytes(self) -> int:
        """Memory of a row in the tables that say where its frames are."""
        cameras, remote = self.dataset.cameras, self.dataset.data_store.remote
        return EpisodeTable.row_bytes(len(cameras), len(self.dataset.videos) if remote else 0)

    def squeezed(self, camera: str) -> bool:
        """Whether a sample has one frame without a time axis. LeRobot drops the axis of one step for videos only."""
        return self.windows.steps(camera) == 1 and (camera not in self.windows or camera in self.dataset.videos)

    def sizes(self, on_cpu: Sequence[str]) -> Sizes:
        """What batches need of memory_budget. Reads the indices of the first video files."""
        dataset, indices = self.dataset, {}
        for camera in dataset.videos:
            with contextlib.suppress(DecodeError):  # the first batch that needs the file says what is wrong
                first = int(np.argmax(dataset.files(camera) != ABSENT))
                indices[camera] = self.indices.of(camera, first, dataset.data_store)
        frame_bytes = {camera: self.frame_bytes(camera) for camera in on_cpu}
        table_bytes = self.table_bytes
        return Sizes(
            lengths=dataset.lengths,
            batch_size=self.batches.batch_size,
            episodes=self.orders.episodes_in_use(self.arguments, self.batches),
            row_bytes=dataset.row_bytes + table_bytes,
            least_row_bytes=dataset.row_bytes_without_objects + table_bytes,
            files={camera: _count(dataset.files(camera)) for camera in dataset.videos},
            indices=indices,
            windows={camera: self.windows.widest(camera) for camera in dataset.videos},
            fetched=dataset.data_store.remote,
            frame_bytes=sum(frame_bytes.values()),
            scattered=self.arguments.shuffle == "global",
            in_progress=self.depth * self.batches.largest * sum(self.windows.steps(c) * n for c, n in frame_bytes.items()),
        )

    def columns(self) -> list[str]:
        """Keys that go through DALI as plain arrays."""
        features = self.dataset.features.items()
        keys = [key for key, f in features if not (f.is_camera or f.is_text)]
        keys += [f"{key}_is_pad" for key in self.windows.offsets]
        keys += self.dataset.constants
        return keys + [SUBSTITUTE] * (self.max_substitutes is not None) + [SAMPLE] * self.augments


def _count(files: npt.NDArray[np.int64]) -> int:
    """How many files there are."""
    return len(np.unique(files[files != ABSENT]))
