"""Layout of one stream of batches, which follows from the configuration of a loader and the decoder of each camera."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dali_stream.cache.buffers import KEPT
from dali_stream.cache.frame_files import FrameFiles
from dali_stream.checks.arguments import budget_text
from dali_stream.checks.arrays import NONE
from dali_stream.decode.route import Route
from dali_stream.errors import DecodeError, MemoryBudgetError
from dali_stream.pipeline.config import Config
from dali_stream.schedule.budget import Parts, Sizes, divide
from dali_stream.schedule.samples import FrameSet
from dali_stream.system.cached import cached_property


@dataclass(frozen=True)
class Layout:
    """Division of the cameras among decoders, and how their frames get into batches.

    Attributes:
        config: Configuration of the loader.
        routes: {camera: decoder}.
    """

    config: Config
    routes: Mapping[str, Route]

    @cached_property
    def cached(self) -> list[str]:
        """Cameras whose decoded frames are cached. These are all cameras that DALI does not decode."""
        return [key for key in self.config.source.cameras if self.routes[key].decoder != "dali"]

    @cached_property
    def on_dali(self) -> list[str]:
        """Cameras that DALI decodes."""
        return [key for key in self.config.source.cameras if self.routes[key].decoder == "dali"]

    @cached_property
    def in_gpu_cache(self) -> list[str]:
        """Cameras whose decoded frames are in the GPU's memory. Depth is converted on the CPU."""
        config = self.config
        return [key for key in self.cached if config.gpu_cache is not None and not config.source.features[key].is_depth]

    @cached_property
    def in_memory(self) -> list[str]:
        """Cameras whose decoded frames are in the CPU's memory."""
        return [key for key in self.cached if key not in self.in_gpu_cache]

    @property
    def uses_dali(self) -> bool:
        """Whether a DALI graph makes the batches: for a GPU, for a user's function, or if DALI decodes a camera."""
        return self.config.gpu is not None or self.config.augments or bool(self.on_dali)

    @property
    def copied_dtype(self) -> type[np.generic]:
        """Type of frames when they are copied into a batch: uint8 or float32. A DALI graph converts them afterwards."""
        return np.uint8 if self.uses_dali or self.config.image_dtype == "uint8" else np.float32

    @property
    def channels_first(self) -> bool:
        """Whether the channels of a frame in a batch precede its height and width in memory."""
        return not self.uses_dali and self.config.memory_format == "contiguous"

    @property
    def kept_buffers(self) -> int:
        """Number of batches whose memory is kept for later ones. Frames are read directly into batches in progress."""
        direct = any(map(self.reads_directly, self.cached))
        return max(KEPT, self.config.in_progress + 3) if direct else KEPT

    def reads_directly(self, camera: str) -> bool:
        """Return whether frames on disk are read directly into batches, which have them in the same type and order."""
        # Frames of depth cameras are converted afterwards.
        same = self.copied_dtype is np.uint8 or self.config.frame_dtype(camera) is not np.uint8
        return self.config.frame_folder is not None and same and not self.channels_first

    def frame_files(self) -> dict[str, FrameFiles]:
        """Return {camera: its frames on disk}, which is empty without a frame cache on disk."""
        config = self.config
        if config.frame_folder is None:
            return {}
        keys = {camera: config.pixel_key(camera, self.routes[camera]) for camera in self.cached}
        return {camera: FrameFiles(config.frame_folder, key, config.frame_bytes(camera)) for camera, key in keys.items()}

    @property
    def needed(self) -> dict[str, FrameSet]:
        """{camera whose frames are cached: frames that the batches of this rank show in any epoch}, see `Config.needed`."""
        return {camera: frames for camera, frames in self.config.needed.items() if camera in self.cached}

    @cached_property
    def sizes(self) -> Sizes:
        """Sizes that determine how memory_budget is divided. The index of each camera's first video file is read for them."""
        config, source, indices = self.config, self.config.source, {}
        for camera, videos in source.videos.items():
            with contextlib.suppress(DecodeError):  # the first batch that needs the file reports the error
                first = int(np.argmax(videos.file != NONE))
                indices[camera] = config.indices.of(camera, first, source.data_store)
        direct = filter(self.reads_directly, self.in_memory)
        return Sizes(
            lengths=source.lengths,
            batch_size=config.batches.largest,
            episodes=config.orders.episodes_in_use(config.arguments, config.batches),
            row_bytes=source.row_bytes + config.table_bytes,
            least_row_bytes=source.row_bytes_without_objects + config.table_bytes,
            files={camera: _count(videos.file) for camera, videos in source.videos.items()},
            indices=indices,
            windows={camera: config.windows.widest(camera) for camera in source.videos},
            fetched=source.data_store.remote,
            frame_bytes=sum(map(config.frame_bytes, self.in_memory)),
            scattered=config.arguments.shuffle == "global",
            needed=max(map(len, self.needed.values()), default=None),
            # Slots, and the memory of batches into which frames are read directly.
            in_progress_bytes=config.in_progress
            * config.batches.largest
            * (config.sample_bytes(self.in_memory) + config.sample_bytes(direct)),
        )

    @cached_property
    def parts(self) -> Parts:
        """Division of memory_budget. Raises MemoryBudgetError if it, or gpu_cache, does not hold one batch."""
        parts = divide(self.config.memory_budget, self.sizes)
        if not self.in_gpu_cache:
            return parts
        kept = self._kept_on_gpu()
        return parts._replace(kept=min(kept, parts.kept) if self.sizes.frame_bytes else kept)

    def _kept_on_gpu(self) -> int:
        """Return how many frames of each camera gpu_cache holds beside those of the batches in progress."""
        config, frame_bytes = self.config, sum(map(self.config.frame_bytes, self.in_gpu_cache))
        assert config.gpu_cache is not None
        batch = config.batches.largest * config.sample_bytes(self.in_gpu_cache)
        least = config.in_progress * batch + frame_bytes  # and a black frame for each camera
        if least > config.gpu_cache:
            raise MemoryBudgetError(
                f"gpu_cache must be at least {least} bytes for {config.in_progress} batches in progress, got "
                f'{config.gpu_cache}. Use a larger gpu_cache, such as "{budget_text(least)}", or a smaller prefetch or '
                "batch_size"
            )
        return min((config.gpu_cache - least) // frame_bytes, self.sizes.frames)

    @property
    def keeps_all(self) -> bool:
        """Whether all decoded frames that this rank needs fit in memory, so that no epoch after the first decodes any."""
        return not self.on_dali and self.parts.kept >= self.sizes.frames

    def frame_folder_text(self) -> str:
        """Return how full the frame cache on disk is, for the log."""
        config = self.config
        assert config.frame_folder is not None
        frames, own = int(config.source.lengths.sum()), self.needed
        of_rank = sum(len(own[c]) * config.frame_bytes(c) for c in self.cached) if own else 0
        part = f", those of this rank {of_rank / 1e9:.3g} GB" if own else ""
        sizes = ", ".join(dict.fromkeys("{}×{}".format(*config.frame_size(camera)) for camera in self.cached))
        return (
            f"frame_cache {config.frame_folder.path} has {config.frame_folder.size() / 1e9:.3g} GB. All frames of this dataset "
            f"take {frames * sum(map(config.frame_bytes, self.cached)) / 1e9:.3g} GB at {sizes}{part}"
        )


def _count(files: npt.NDArray[np.int64]) -> int:
    """Return the number of different files. `files` has the file of each episode."""
    return len(np.unique(files[files != NONE]))
