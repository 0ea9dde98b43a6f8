"""Decoding of packed clips with DALI: on a GPU with NVDEC, and for VP8, VP9 and MJPEG also on the CPU.

The loader adds the operator to its graph, and `DaliDecoder` packs the clips for it. `decode` runs the operator in a separate
pipeline. In this module, `gpu` is the number of a CUDA device, or None for the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from dali_stream.cache.buffers import Buffers
from dali_stream.cache.open_episodes import OpenEpisodes
from dali_stream.checks.arrays import NONE, Array, Int64
from dali_stream.decode.capability import SESSIONS_PER_ENGINE
from dali_stream.decode.decoder import named
from dali_stream.decode.refusal import refusal
from dali_stream.decode.resize import resize
from dali_stream.decode.turns import turns
from dali_stream.decode.video_files import VideoFiles
from dali_stream.errors import DaliStreamError, DatasetError, DecodeError, StorageError
from dali_stream.lerobot.source import Source
from dali_stream.mp4.clip import Clip, UnsafeForNvdec, pack
from dali_stream.mp4.index import VideoIndex
from dali_stream.observe.counters import Counters
from dali_stream.schedule.plan import BatchPlan
from dali_stream.schedule.samples import Samples
from dali_stream.storage import Store
from dali_stream.system.install import install_command
from dali_stream.system.shared_memory import block_of
from dali_stream.system.workers import Workers

try:
    from nvidia.dali import fn, tensors, types
    from nvidia.dali.pipeline import OperatorConcurrency, Pipeline, StreamPolicy
except ImportError as error:
    raise DaliStreamError(
        f"NVIDIA DALI cannot be imported ({error}). Install it with `{install_command('cuda12')}` (driver 525 or later) "
        f"or `{install_command('cuda13')}` (driver 580 or later), never both"
    ) from error

if TYPE_CHECKING:
    from nvidia.dali.data_node import DataNode

Frames = npt.NDArray[np.uint8]
Audited = Callable[[Samples], npt.NDArray[np.bool_]]
Encoded = tuple[npt.NDArray[np.uint8], npt.NDArray[np.int32]]  # bytes of a clip, and indices of its frames, increasing


class WindowRequest(NamedTuple):
    """Frames and packets of one sample, which is a window of one episode.

    Attributes:
        sample: Sample of the batch.
        episode: Episode of the sample.
        frames: Frame indices of the window within the episode, shape (T,).
        packets: Packets of these frames in the file, shape (T,).
        file: Index of the file.
    """

    sample: int
    episode: int
    frames: Array
    packets: Array
    file: VideoIndex


class DaliClip(NamedTuple):
    """Encoded sample for DALI.

    Attributes:
        clip: Bytes of the clip.
        frames: Indices of the requested frames in the clip, increasing, int32.
        order: Index in `frames` of each step of the window, int32, shape (T,).
        request: Frames that the clip contains.
        expected: Frames of the window as FFmpeg decodes them, resized, shape (T, H, W, 3), or FFmpeg's error. None if the
            sample is not audited.
    """

    clip: Array
    frames: Array
    order: Array
    request: WindowRequest
    expected: Frames | DecodeError | None


def refused(source: Source, key: str, request: WindowRequest, reason: object, steps: slice = slice(None)) -> DecodeError:
    """Return the error for a sample that DALI cannot decode, or that it must not decode because frames would be wrong.

    Args:
        source: Episodes of the Loader.
        key: Name of the camera.
        request: The sample.
        reason: Reason, for the message.
        steps: Steps of the window that the message names. Default: all.
    """
    where = source.data_store.where(request.file.path)
    error = DecodeError(f'{where}: {reason}. Use decode="auto" in place of decode="dali"')
    return named(source, key, request.episode, request.frames[steps], error)


class Clips:
    """`Work` of `DaliDecoder`.

    Args:
        audited: Mask of the samples that are audited, shape (B,).

    Attributes:
        packed: Clip of each sample, or None for a sample in `failed`.
    """

    def __init__(self, audited: npt.NDArray[np.bool_]) -> None:
        self.audited = audited
        self.packed: list[DaliClip | None] = [None] * len(audited)
        self.tasks: list[Future[None]] = []
        self.failed: dict[int, DaliStreamError] = {}

    def collect(self, buffers: Buffers, dtype: type[np.generic], copiers: Workers) -> list[DaliClip | None]:
        return self.packed


class DaliDecoder(VideoFiles):
    """`Decoder` of a camera's video that packs one clip per sample. DALI's graph decodes the clips.

    It keeps no decoded frames, so each batch decodes all frames of its samples.

    Args:
        source: Episodes of the Loader.
        key: Name of the camera.
        counters: Counters of the Loader.
        gpu: CUDA device, or None for the CPU.
        size: Size (height, width) of the frames in batches, for audits.
        audited: Function that returns which samples of a batch are audited, shape (B,), or None for no audits. With such a
            function, the first sample of each file is audited as well.
        any_size: See `VideoFiles`.
    """

    def __init__(
        self,
        source: Source,
        key: str,
        counters: Counters,
        gpu: int | None,
        size: tuple[int, int],
        audited: Audited | None,
        any_size: bool,
    ) -> None:
        super().__init__(source, key, any_size)
        self._counters, self._gpu, self._size, self._audited = counters, gpu, size, audited
        self._first: dict[str, object] = {}  # {path of a file: object of the task that audits its first sample}

    def start(self, workers: Workers, plan: BatchPlan, episodes: OpenEpisodes, store: Store) -> Clips:
        """See `Decoder.start`."""
        clips = Clips(np.zeros(len(plan.samples.episode), np.bool_) if self._audited is None else self._audited(plan.samples))
        requests = self._requests(clips, plan, episodes)
        clips.tasks += [workers.submit(self.make, store, request, clips) for request in requests]
        return clips

    def close(self) -> None:
        """Do nothing, because no decoded frames are kept."""

    def make(self, store: Store, request: WindowRequest, work: Clips) -> None:
        """Pack the clip of a sample.

        DALI decodes each frame of the window once, in increasing order. `DaliClip.order` then restores the order of the window.

        Raises:
            DecodeError: If DALI would decode the clip wrongly on a GPU.
        """
        unique, steps = np.unique(request.packets, return_inverse=True)
        try:
            with self._counters.timed("pack_s"):
                indices, for_nvdec = [request.file] * len(unique), self._gpu is not None
                clip = pack(store, indices, unique.tolist(), for_nvdec=for_nvdec, timed=self._counters.timed)
        except UnsafeForNvdec as error:
            raise refused(self._source, self.key, request, error) from error
        except (DecodeError, DatasetError, StorageError) as error:
            if isinstance(error, DecodeError):
                error = self.named(request.episode, request.frames, request.file, error)
            work.failed[request.sample] = error.with_traceback(None)  # it would keep packets and pixels
            return
        self._counters.add(clips=1, decoded_frames=clip.coded_frames)
        places = np.array(clip.frames, np.int32)
        # argsort(argsort(places)) is the rank of each place, which is its index in the sorted places.
        order = np.argsort(np.argsort(places))[steps.reshape(-1)].astype(np.int32)
        mark = object()  # `setdefault` is atomic, so only one task finds its own object in the dict
        is_first = self._audited is not None and self._first.setdefault(request.file.path, mark) is mark
        expected = self._expected(store, request) if is_first or work.audited[request.sample] else None
        data = np.frombuffer(clip.data, np.uint8)
        work.packed[request.sample] = DaliClip(data, np.sort(places), order, request, expected)

    def _requests(self, work: Clips, plan: BatchPlan, episodes: OpenEpisodes) -> list[WindowRequest]:
        """Return a request for each sample. Errors of samples that fail a check are added to `work`. See `Decoder.start`.

        Raises:
            DecodeError: If DALI must not decode a file.
        """
        requests, shown = [], plan.shown_in_episode[self.key]
        for sample, episode in enumerate(plan.samples.episode.tolist()):
            packets = plan.packets[self.key][sample]
            try:
                index = self._locate(episodes, episode, shown[sample], packets)
            except DecodeError as error:
                work.failed[sample] = DecodeError(str(error))  # without the traceback, see `named`
                continue
            request = WindowRequest(sample, episode, shown[sample], packets, index)
            if reason := refusal(self._gpu, self.format(index, int(packets[0])), index):
                raise refused(self._source, self.key, request, reason)
            requests.append(request)
        return requests

    def _locate(self, episodes: OpenEpisodes, episode: int, frames: Int64, packets: Int64) -> VideoIndex:
        """Return the index of the episode's file, after all checks that are possible without decoding.

        Raises:
            DecodeError: If a frame has no packet, or the file differs from the metadata.
        """
        if (packets == NONE).any():
            raise self.missing(episodes, episode, frames[packets == NONE])
        try:
            index = episodes.index(self.key, episode)
            self.checked(index, packets, episode)
        except DecodeError as error:
            raise named(self._source, self.key, episode, frames, error) from error
        return index

    def _expected(self, store: Store, request: WindowRequest) -> Frames | DecodeError:
        """Return the frames of a sample for an audit, which FFmpeg decodes and torch resizes, or FFmpeg's error."""
        from dali_stream.decode.torchcodec import decode as decode_on_cpu  # the trial has imported it

        self._counters.add(audited=1)
        unique, steps = np.unique(request.packets, return_inverse=True)
        try:
            video = self.format(request.file, int(unique[0]))
            frames, _ = decode_on_cpu(store, [request.file] * len(unique), unique.tolist(), video)
        except DecodeError as error:
            return error.with_traceback(None)  # it would keep packets and pixels
        return resize(frames, self._size)[steps.reshape(-1)]


def decode_threads(num_threads: int, engines: int, cameras: int) -> int:
    """Return the number of threads of a DALI pipeline that decodes on NVDEC.

    DALI opens one decoding session per thread and camera, and keeps up to 100 sessions (2.4.0, `NVDECCache`). If an engine has
    more than a few sessions, they probably wait for each other. On an H100, 4 and 16 threads were equally fast with a clip per
    frame.

    Args:
        num_threads: Number of decode threads of the Loader, the upper limit.
        engines: Number of NVDEC engines of the GPU.
        cameras: Number of cameras that NVDEC decodes.
    """
    return max(min(num_threads, SESSIONS_PER_ENGINE * engines // cameras), 1)


def empty_pipeline(batch_size: int, gpu: int | None, threads: int, prefetch: int) -> Pipeline:
    """Return a pipeline without operators, with the executor settings of all pipelines.

    Args:
        batch_size: Maximum number of samples of a batch.
        gpu: CUDA device, or None for the CPU.
        threads: Number of threads.
        prefetch: Number of batches that the pipeline prefetches.
    """
    return Pipeline(
        batch_size=batch_size,
        num_threads=threads,
        device_id=gpu,
        prefetch_queue_depth=prefetch,
        exec_dynamic=True,  # permits passing buffers to torch without a copy
        # With one stream per backend, DALI's default, another operator may reuse the buffers of a decoder while they are still
        # being copied. This follows from the sources of DALI 2.4. Only this setting was run on a GPU.
        stream_policy=StreamPolicy.SINGLE,
        concurrency=OperatorConcurrency.BACKEND,
    )


def operator(clips: DataNode, frames: DataNode, gpu: int | None) -> DataNode:
    """Add the video decoder to a pipeline.

    Args:
        clips: Bytes of an MP4 for each sample.
        frames: Frame indices for each sample, increasing and without repetitions. For a repeated frame, DALI would decode the
            clip from its beginning again.
        gpu: CUDA device, or None for the CPU.

    Returns:
        RGB frames of each sample, uint8, shape (F, H, W, 3).
    """
    # With pad_mode "none", a missing frame is an error. Other modes silently return padding instead. affine=True would pin the
    # threads to cores, which are the same cores in every process of a machine.
    device = "cpu" if gpu is None else "mixed"
    return fn.decoders.video(clips, device=device, frames=frames, pad_mode="none", affine=False)


def as_input(array: Array, gpu: int) -> tensors.TensorListCPU:
    """Return an array of `Buffers` for CUDA device `gpu`, shape (B, ...), as an input that DALI uploads directly.

    DALI assumes that the pages of an array are not locked, and copies it to locked pages of its own before it uploads it
    (`ForwardCurrentData` in its `input_operator.cc`).
    """
    import torch

    block = block_of(array)
    with torch.cuda.device(gpu):  # DALI notes the current device as that of the memory
        return tensors.TensorListCPU(array, is_pinned=block is None or block.is_locked)


def encoded(clip: Clip) -> Encoded:
    """Return a clip in the form for `pipeline` and `decode`. Its frame indices must be increasing, without repetitions."""
    return np.frombuffer(clip.data, np.uint8), np.array(clip.frames, np.int32)


def pipeline(
    source: Callable[[], Sequence[Encoded]], batch_size: int, gpu: int | None, threads: int, prefetch: int
) -> Pipeline:
    """Return a pipeline that decodes clips and does nothing else.

    Args:
        source: Function that returns the next batch of up to `batch_size` clips.
        batch_size: Maximum number of clips of a batch.
        gpu: CUDA device, or None for the CPU.
        threads: Number of threads.
        prefetch: Number of batches that the pipeline prefetches.
    """
    made = empty_pipeline(batch_size, gpu, threads, prefetch)
    with made:
        clips, frames = fn.external_source(
            lambda: [list(parts) for parts in zip(*source(), strict=True)],
            num_outputs=2, dtype=[types.UINT8, types.INT32], ndim=[1, 1],
        )  # fmt: skip
        made.set_outputs(operator(clips, frames, gpu))
    return made


def decode(clips: Sequence[Encoded], gpu: int | None, threads: int) -> list[Frames]:
    """Decode clips in one batch.

    Args:
        clips: Results of `encoded`.
        gpu: CUDA device, or None for the CPU.
        threads: Number of threads.

    Returns:
        RGB frames of each clip in the CPU's memory, uint8, shape (F, H, W, 3).

    Raises:
        DecodeError: If DALI cannot decode one of the clips.
    """
    decoder = pipeline(lambda: clips, len(clips), gpu, threads, prefetch=1)
    try:
        with turns(gpu).alone():
            decoder.build()
            [decoded] = decoder.run()
            on_cpu = decoded if gpu is None else decoded.as_cpu()
            return [np.array(on_cpu.at(i)) for i in range(len(clips))]
    except RuntimeError as error:
        raise DecodeError(f"DALI's video decoder failed: {explanation(error)}") from error


def explanation(error: RuntimeError) -> str:
    """Return the message of a failed operator without its traceback, at most 300 characters."""
    text = str(error).partition("encountered:")[2] or str(error)
    return " ".join(text.partition("C++ context")[0].split())[:300]
