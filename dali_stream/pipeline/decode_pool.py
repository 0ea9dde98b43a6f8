"""Pool of decode threads, with the decoder of each camera."""

from __future__ import annotations

import math
from collections.abc import Mapping

from dali_stream.cache.buffers import Buffers
from dali_stream.cache.frames_on_disk import FramesOnDisk
from dali_stream.cache.open_episodes import OpenEpisodes
from dali_stream.cache.slots import Slots
from dali_stream.decode.decoder import Decoder, VideoAndImages, Work
from dali_stream.decode.images import ImageDecoder
from dali_stream.decode.processes import DecodeProcesses
from dali_stream.decode.route import TORCHCODEC_CUDA, Route
from dali_stream.decode.torchcodec_cuda import device_name
from dali_stream.decode.torchcodec_decoder import TorchcodecDecoder
from dali_stream.observe.counters import Counters
from dali_stream.order.uniforms import audited
from dali_stream.pipeline.layout import Layout
from dali_stream.schedule.budget import copy_threads
from dali_stream.schedule.plan import BatchPlan
from dali_stream.storage import Store
from dali_stream.system.heap import TRIM_AFTER, trim_memory
from dali_stream.system.workers import Workers


class DecodePool:
    """Pool of threads that turn encoded video and images into frames, or into clips for DALI.

    Args:
        layout: Configuration of the loader, with the decoders.
        slot_counts: {camera whose decoded frames are cached: number of slots for them}.
        counters: Counters to add to.
        buffers: Memory for batches.

    Attributes:
        decoders: {camera: decoder}.
        slots: {camera: its cached frames}.
        on_disk: {camera: its frames on disk}. Empty without a frame cache on disk.
        copiers: Threads that copy frames together with the calling thread.
        dtype: Type of the frames of a batch, except those of depth cameras. See `Layout.copied_dtype`.
        buffers: See above.
        starter: Thread that starts the runs of the DALI graph.
    """

    def __init__(self, layout: Layout, slot_counts: Mapping[str, int], counters: Counters, buffers: Buffers) -> None:
        config, routes = layout.config, layout.routes
        self._config, self._counters = config, counters
        self.dtype, self.buffers = layout.copied_dtype, buffers
        self.slots = {key: _slots(layout, key, count) for key, count in slot_counts.items()}
        direct = {key: self.buffers for key in slot_counts if layout.reads_directly(key)}
        self.on_disk = {
            key: FramesOnDisk(key, files, self.slots[key], counters, direct.get(key))
            for key, files in layout.frame_files().items()
        }
        self._processes = _processes(layout)
        self.decoders = {key: self._decoder(key, routes[key]) for key in config.source.cameras}
        self._on_cpu = {key for key, route in routes.items() if route.decoder in ("torchcodec", "pyav")}
        self._decoded_bytes = 0
        self._workers = Workers("dali_stream decode", config.num_threads)
        self.copiers = Workers("dali_stream copy", copy_threads(config.num_threads) - 1, counters.copying)
        self.starter = Workers("dali_stream graph", 1, counters.copying)

    def _decoder(self, key: str, route: Route) -> Decoder:
        config, source, size = self._config, self._config.source, self._config.frame_size(key)
        any_size = config.image_size is not None
        if key not in self.slots:
            from dali_stream.decode.dali import DaliDecoder

            choose = (lambda samples: audited(samples.position, samples.epoch, config.audit)) if config.audit else None
            return DaliDecoder(source, key, self._counters, config.gpu, size, choose, any_size)
        slots, on_disk = self.slots[key], self.on_disk.get(key)
        decoders: list[Decoder] = []
        if key in source.videos:
            gpu = config.gpu if route.decoder == TORCHCODEC_CUDA else None
            processes = self._processes
            share = config.task_share
            decoders.append(TorchcodecDecoder(source, key, self._counters, slots, any_size, on_disk, share, gpu, processes))
        if key in source.images:
            decoders.append(ImageDecoder(source, key, self._counters, slots, size, any_size, on_disk))
        return VideoAndImages(source, key, slots, *decoders) if len(decoders) == 2 else decoders[0]

    def start(self, plan: BatchPlan, episodes: OpenEpisodes, stores: Mapping[str, Store]) -> dict[str, Work]:
        """Start the decode tasks of a batch.

        Args:
            plan: Plan of the batch.
            episodes: Open episodes.
            stores: {camera: store from which its encoded video is read}. Other cameras are read
                from the session of `episodes`.

        Returns:
            {camera: tasks in progress}.
        """
        self._count(plan)
        store = episodes.store  # if it is remote, a session, whose reads end when the planner is stopped
        return {
            key: decoder.start(self._workers, plan, episodes, stores.get(key, store)) for key, decoder in self.decoders.items()
        }

    def _count(self, plan: BatchPlan) -> None:
        """Count cache hits and evictions. Return free memory to the system after every `TRIM_AFTER` bytes per thread."""
        for key, planned in plan.frames.items():
            self._counters.add(memory_hits=planned.hits, frames_evicted_before_use=planned.evicted)
            if key in self._on_cpu:
                self._decoded_bytes += planned.decodes * math.prod(self._config.source.features[key].shape)
        if self._decoded_bytes >= TRIM_AFTER * len(self._workers):
            self._decoded_bytes = 0
            trim_memory()

    def stop(self) -> None:
        """Cancel tasks that have not begun. Return without waiting for the others."""
        self._workers.stop()
        if self._processes is not None:
            self._processes.stop()
        self.copiers.stop()
        self.starter.stop()

    def join(self) -> None:
        """Wait for the threads to end, after `stop`, and free the decoded frames."""
        self._workers.join()
        if self._processes is not None:
            self._processes.join()
        self.starter.join()  # before the copiers, to which it may submit work
        self.copiers.join()
        # Memory is freed explicitly, since DALI may keep references to the decoders for a while.
        for decoder in self.decoders.values():
            decoder.close()
        for frames in self.on_disk.values():
            frames.close()


def _slots(layout: Layout, camera: str, count: int) -> Slots:
    config, shape = layout.config, layout.config.frame_shape(camera)
    if camera in layout.in_gpu_cache:
        from dali_stream.cache.gpu_slots import GpuSlots

        return GpuSlots(count, shape, device_name(config.gpu))
    return Slots(count, shape, config.frame_dtype(camera))


def _processes(layout: Layout) -> DecodeProcesses | None:
    """Return the decode processes. None if the CPU decodes no video, or if the configuration has no decode processes."""
    config, videos = layout.config, layout.config.source.videos
    on_cpu = [key for key in layout.cached if key in videos and layout.routes[key].decoder != TORCHCODEC_CUDA]
    if not config.decode_processes or not on_cpu:
        return None
    return DecodeProcesses(config.decode_processes, config.num_threads, max(map(config.frame_bytes, on_cpu)))
