"""Configuration of a loader, which is the same for all epochs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dali_stream.cache.frame_folder import FrameFolder, has_frames, pixel_key
from dali_stream.cache.frames_on_disk import READ_FRAMES
from dali_stream.cache.indices import IndexCache
from dali_stream.decode.decoder import TASK_FRAMES, task_frames
from dali_stream.decode.route import TORCHCODEC_CUDA, Route
from dali_stream.lerobot.source import Source
from dali_stream.order.batches import Batches
from dali_stream.order.order import EpochOrder
from dali_stream.order.orders import Orders
from dali_stream.order.shard import Pieces
from dali_stream.order.state import OrderArguments
from dali_stream.order.windows import Windows
from dali_stream.pipeline.substitutes import Substitutes
from dali_stream.schedule.budget import batches_in_progress
from dali_stream.schedule.episodes import EpisodeTable
from dali_stream.schedule.samples import FrameSet, shown_frames
from dali_stream.system.cached import cached_property

SUBSTITUTE = "is_substitute"  # key of the mask of samples that could not be decoded
DATASET = "dataset"  # key of the names of the samples' datasets, for a mixture
SAMPLE = "sample"  # key of the samples' random numbers for augmentation


@dataclass(frozen=True)
class Config:
    """Configuration of a loader. Its fields do not change, but `indices`, `frame_folder` and `substitutes` have state.

    Attributes:
        source: Selected episodes and features.
        orders: Orders of the epochs.
        batches: Division of an epoch into global batches.
        windows: Windows of the features.
        arguments: Arguments of the order.
        rank: Rank of this process.
        num_threads: Number of decode threads.
        prefetch: Number of batches in progress. None for the number that `in_progress` computes.
        memory_budget: Memory budget in bytes.
        image_size: Size (height, width) to which frames are resized. None for the recorded size.
        image_dtype: "float32" or "uint8".
        depth_unit: Unit of the distances of depth cameras, "m" or "mm".
        memory_format: "channels_last" or "contiguous".
        indices: Cache of the indices of video files.
        max_substitutes: Maximum share of a batch that may be substituted. None if undecodable samples raise an error.
        gpu: Index of the CUDA device. None for CPU batches.
        augments: Whether the user gives a function for the DALI graph.
        audit: Average number of samples per audit. 0 turns audits off.
        gpu_cache: Bytes of the GPU's memory for decoded frames. None to keep them in the CPU's memory.
        frame_folder: Folder of the frame cache on disk, or None without one.
        in_process: Whether the training process makes the batches, whatever decodes them.
        decode_processes: Number of decode processes, see `decode.processes`.
        substitutes: Log of the substituted samples.
    """

    source: Source
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
    depth_unit: str
    memory_format: str
    indices: IndexCache
    max_substitutes: float | None
    gpu: int | None
    augments: bool
    audit: int
    gpu_cache: int | None = None
    frame_folder: FrameFolder | None = None
    in_process: bool = True
    decode_processes: int = 0
    substitutes: Substitutes = field(default_factory=Substitutes)

    def order(self, epoch: int) -> EpochOrder:
        """Return the order of an epoch."""
        return self.orders.of(epoch, self.arguments)

    @cached_property
    def shard(self) -> Pieces | None:
        """Frames that this rank samples in every epoch, see `EpochOrder.shard`."""
        return self.order(0).shard(self.rank, self.batches.world_size) if self.arguments.shuffle == "sharded" else None

    @cached_property
    def needed(self) -> dict[str, FrameSet]:
        """{camera: frames that the batches of this rank show in any epoch}.

        It is empty if the rank shows all frames, or if a rank without a sample is padded with the samples of other ranks.
        """
        padded = self.batches.last_batch == "pad" and self.batches.frames < self.batches.world_size
        if padded or (pieces := self.shard) is None:
            return {}
        found: dict[bytes, FrameSet] = {}  # cameras with equal offsets share a set
        for offsets in map(self.windows.of, self.source.cameras):
            if offsets.tobytes() not in found:
                found[offsets.tobytes()] = shown_frames(pieces, offsets, self.source.lengths, self.source.dataset_of)
        return {camera: found[self.windows.of(camera).tobytes()] for camera in self.source.cameras}

    def order_state(self) -> dict[str, Any]:
        """Return the arguments that, for a given dataset and epoch, determine the order and the augmentation."""
        return self.arguments.state() | self.orders.state | ({"seed": self.arguments.seed} if self.augments else {})

    def frame_size(self, camera: str) -> tuple[int, int]:
        """Return the size (height, width) of a camera's frames after decoding and resizing."""
        return self.image_size or self.source.frame_size(camera)

    def frame_shape(self, camera: str) -> tuple[int, int, int]:
        """Return the shape (height, width, channels) of a camera's frames after decoding and resizing."""
        return *self.frame_size(camera), self.source.features[camera].channels

    def frame_dtype(self, camera: str) -> type[np.generic]:
        """Return the type of a camera's frames after decoding and resizing: uint8, or for depth cameras uint16 or float32.

        Codes of depth video are uint16. Depth images in rows may contain floats, so all frames of their camera are float32.
        """
        if not self.source.features[camera].is_depth:
            return np.uint8
        return np.float32 if camera in self.source.images else np.uint16

    def frame_bytes(self, camera: str) -> int:
        """Return the memory of a frame of shape `frame_shape` and type `frame_dtype`, in bytes."""
        return math.prod(self.frame_shape(camera)) * np.dtype(self.frame_dtype(camera)).itemsize

    def with_stored(self, routes: Mapping[str, Route]) -> dict[str, Route]:
        """Return the routes, with the CPU for a camera of which the frame cache on disk has frames that the CPU decoded.

        Such frames are stored apart from those of NVDEC, which would have to decode them again.
        """
        changed = dict(routes)
        if self.frame_folder is not None:
            on_cpu = Route("torchcodec", f"frame_cache {self.frame_folder.path} has frames that the CPU decoded")
            for camera, route in routes.items():
                if route.decoder == TORCHCODEC_CUDA and has_frames(self.frame_folder, self.pixel_key(camera, on_cpu)):
                    changed[camera] = on_cpu
        return changed

    def pixel_key(self, camera: str, route: Route) -> dict[str, str]:
        """Return what the stored frames of a camera depend on besides its video, if a route decodes them."""
        video, images = camera in self.source.videos, camera in self.source.images
        shape, any_size = self.frame_shape(camera), self.image_size is not None
        dtype, nvdec = self.frame_dtype(camera), route.decoder == TORCHCODEC_CUDA
        return pixel_key(shape, video, images, any_size, nvdec, None if dtype is np.uint8 else dtype)

    @property
    def audits_apart(self) -> bool:
        """Whether the graph has additional outputs for audits: the decoded frames, before the user's function changes them."""
        return self.audit > 0 and self.augments

    @property
    def in_progress(self) -> int:
        """Number of batches in progress: `prefetch`, but at most an epoch, or enough to keep all threads busy.

        There are more than 16, or than two per thread, only if their frames take at most 1/8 of `memory_budget` or `gpu_cache`,
        and only for video of local files, since fetched video and encoded images of batches in progress take memory, too. They
        take at most half of `gpu_cache`.
        """
        if self.prefetch is not None:
            return min(self.prefetch, self.batches.count(0))
        task = max((task_frames(self.source.features[key].frame_size) for key in self.source.cameras), default=TASK_FRAMES)
        if self.frame_folder is not None:
            task = max(task, READ_FRAMES)
        # With a frame cache on disk, frames may be read into the memory of their batches.
        copies = 1 if self.frame_folder is None else 2
        batch_bytes = max(self.batches.batch_size * self.sample_bytes(self.source.cameras) * copies, 1)
        shared = not self.source.images and not self.source.data_store.remote
        affordable = (self.gpu_cache or self.memory_budget) // 8 // batch_bytes if shared else 0
        number = batches_in_progress(self.num_threads, self._batch_frames, task, affordable)
        return number if self.gpu_cache is None else max(min(number, self.gpu_cache // 2 // batch_bytes), 2)

    @property
    def task_share(self) -> int:
        """Number of frames of a decode task at which the frames of all batches in progress make two tasks per thread."""
        return self.in_progress * self._batch_frames // (2 * self.num_threads)

    @property
    def _batch_frames(self) -> int:
        return self.batches.batch_size * sum(map(self.windows.steps, self.source.cameras))

    @property
    def table_bytes(self) -> int:
        """Memory of the entries of a row in the tables that locate its frames, in bytes."""
        cameras, remote = self.source.cameras, self.source.data_store.remote
        return EpisodeTable.row_bytes(len(cameras), len(self.source.videos) if remote else 0)

    def sample_bytes(self, cameras: Iterable[str]) -> int:
        """Return the bytes of the decoded frames of cameras in a sample."""
        return sum(self.windows.steps(camera) * self.frame_bytes(camera) for camera in cameras)

    def squeezed(self, camera: str) -> bool:
        """Return whether a sample has a single frame of a camera, without a time axis.

        As in LeRobot, a window of one step has no time axis for videos, but it has one for images.
        """
        return self.windows.steps(camera) == 1 and (camera not in self.windows or camera in self.source.videos)

    def columns(self) -> list[str]:
        """Return the keys of the values that are neither frames nor text. DALI passes these through as plain arrays."""
        features = self.source.features.items()
        keys = [key for key, f in features if not (f.is_camera or f.is_text)]
        keys += [f"{key}_is_pad" for key in self.windows.offsets]
        keys += self.source.constants
        return keys + [SUBSTITUTE] * (self.max_substitutes is not None) + [SAMPLE] * self.augments
