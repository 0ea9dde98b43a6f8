"""Context of the checks of a video camera: what its files contain, the frames of its rows, and a decoded frame."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from dali_stream.checks.arrays import NONE, Int64
from dali_stream.decode import rate
from dali_stream.decode.audit import difference
from dali_stream.decode.refusal import refusal
from dali_stream.decode.video_files import VideoFiles
from dali_stream.errors import DaliStreamError, DecodeError, FrameSizeError, counted
from dali_stream.mp4.clip import is_avc, pack
from dali_stream.mp4.counting import TOLERANCE
from dali_stream.mp4.format import VideoFormat
from dali_stream.mp4.hidden import hidden_frames
from dali_stream.mp4.index import VideoIndex, read_index
from dali_stream.mp4.timing import explain, what_helps
from dali_stream.system import process
from dali_stream.system.cached import cached_property
from dali_stream.tools.description import LOOK_AT, CameraReport, describe_video
from dali_stream.tools.diagnosis import answers
from dali_stream.tools.diagnosis.frames import Decoders, Deep, call_by_name
from dali_stream.tools.diagnosis.report import Finding, Status
from dali_stream.tools.diagnosis.rows import Rows
from dali_stream.tools.isolated import Answer, Call, call

_LOADED_S = 60.0  # time limit for loading PyAV, in seconds
_MEASURED_S = 2.0  # time for measuring the speed of both decoders of a camera, in seconds


class Fault(NamedTuple):
    """Reason why rows of an episode have no frame, or a frame of another size.

    Attributes:
        text: Continuation of "episode 3".
        remedy: Advice to the user. Empty if nothing helps but leaving the episode out.
        is_size: Whether frames of the episode have another size than `meta/info.json` says.
    """

    text: str
    remedy: str = ""
    is_size: bool = False


class Camera:
    """Context of the checks of a video camera. Its files are read when it is created, and `decode_frames` decodes a frame.

    Attributes:
        key: Key of the camera.
        dataset: Dataset of the camera.
        deep: Decoder of all frames, or None.
        places: {"CPU" or kind of GPU: index of the CUDA device, None for the CPU}.
        files, files_read: Number of files, and of those that were read.
        broken: {path of a broken file: error}.
        tables: Indices of at most 32 files that are not broken.
        checked: Number of episodes whose rows were compared with the frames.
        faults: {episode: fault}.
        frame: Episode and frame that the decoders decode. Empty before one is chosen.
        decoded: {decoder: answer with the frame}. Empty if the chosen frame cannot be located, or with a `pyav_error`.
        speeds: {kind of GPU: answer of `rate.measure`}.
        decode_error: Error of the attempt to read the chosen frame, or None.
    """

    def __init__(self, key: str, rows: Rows, decoders: Decoders, deep: Deep | None) -> None:
        self.key, self.dataset, self.deep, self._rows, self._decoders = key, rows.dataset, deep, rows, decoders
        self.places: dict[str, int | None] = {"CPU": None, **decoders.gpus}
        self.broken: dict[str, DaliStreamError] = {}
        self.tables: list[VideoIndex] = []
        self.checked, self.faults = 0, self._short_episodes()
        self.frame: dict[str, int] = {}
        self.decoded: Mapping[str, Answer] = {}
        self.speeds: Mapping[str, Answer] = {}
        self.decode_error: DaliStreamError | None = None
        self._packets: dict[int, Int64] = {}  # {episode of the first of `tables`: packets of its rows}
        self._video_files = VideoFiles(self.dataset.source, key)
        self._read_files()

    @property
    def is_depth(self) -> bool:
        """Whether the camera records depth."""
        return self.dataset.features[self.key].is_depth

    @cached_property
    def pyav_error(self) -> str:
        """Reason why PyAV cannot decode a depth camera. Empty if it loads, and for other cameras."""
        return call([answers.pyav], _LOADED_S).answers[0].reason if self.is_depth else ""

    @cached_property
    def video(self) -> VideoFormat:
        """Format of the first file. Raises DecodeError if its sample description is broken."""
        return self.tables[0].format()

    @cached_property
    def reports(self) -> dict[str, CameraReport]:
        """Description of the videos for each of `places`. Raises DecodeError if a sample description is broken."""
        store = self.dataset.data_store
        return {place: describe_video(self.tables, store, gpu, self.is_depth) for place, gpu in self.places.items()}

    @cached_property
    def hidden(self) -> tuple[int, int]:
        """Number of hidden frames, and of the frames that were examined. Raises DaliStreamError if they cannot be read."""
        return hidden_frames(self.dataset.data_store, self.tables[0], self.video.codec)

    @property
    def reference(self) -> str:
        """First decoder that delivered the frame, which is torchcodec unless it failed. Empty if none did."""
        return next((name for name, answer in self.decoded.items() if not answer.error), "")

    def difference(self, decoder: str) -> str | None:
        """Return how a decoder's frame differs from that of `reference`, see `audit.difference`.

        Return None for `reference` itself, and for a decoder that delivered no frame.
        """
        reference, own = self.reference, self.decoded[decoder]
        if own.error or decoder == reference:
            return None
        name = "FFmpeg's" if reference == "torchcodec" else f"that of {reference}"
        return difference(own.value[None], self.decoded[reference].value[None], name)[1]

    def finding(self, name: str, status: Status, text: str, remedy: str = "") -> Finding:
        """Return a finding about the camera. The key of the camera is put before `name`."""
        return Finding("dataset", f"{self.key} {name}".rstrip(), status, text, remedy)

    def calls(self) -> tuple[dict[str, Call], dict[str, Call]]:
        """Choose a frame. Return {decoder: call that decodes it}, and {kind of GPU: call that measures the speed}.

        An error becomes `decode_error`.
        """
        try:
            return self._calls() if self.tables and not self.pyav_error else ({}, {})
        except DaliStreamError as error:
            self.decode_error = error
            return {}, {}

    def _read_files(self) -> None:
        """Locate the frames of rows, file by file. With `deep`, also decode them."""
        store, videos = self.dataset.data_store, self.dataset.table.video[self.key]
        paths, file_of = videos.paths, videos.index[self.dataset.rows]
        files = np.unique(file_of)
        chosen = files[self._rows.spread(len(files))]
        self.files, self.files_read = len(files), len(chosen)
        described = chosen[:: -(-len(chosen) // LOOK_AT)]
        for file in chosen.tolist():
            try:
                table = read_index(store, paths[file])
                episodes = np.flatnonzero(file_of == file)
                packets = dict(self._locate(table, episodes[self._rows.spread(len(episodes))].tolist()))
                if self.deep and not self.pyav_error:
                    self.deep.decode_videos(self.key, table, packets)
            except DaliStreamError as error:
                self.broken[paths[file]] = error
                continue
            if not self.tables:
                self._packets = packets
            if file in described:
                self.tables.append(table)

    def _locate(self, table: VideoIndex, episodes: Iterable[int]) -> Iterator[tuple[int, Int64]]:
        """Yield (episode, packets of its rows) for episodes of a file. The packet of a row without a frame is `NONE`.

        Episodes that cannot be checked are left out.
        """
        dataset = self.dataset
        for episode in episodes:
            rows = self._rows.read(episode)
            if rows is None:
                continue
            self.checked += 1
            times = dataset.episode_times(self.key, episode, table, rows)
            packets = times.packets()
            numbers = np.arange(dataset.sampled_lengths[episode])
            sampled = dataset.sampled(np.full_like(numbers, episode), numbers)
            if len(missing := sampled[packets[sampled] == NONE]):
                frame = times.to_explain(missing)
                text = f", frame {frame}: {dataset.data_store.where(table.path)}: {explain(times, frame)}"
                self.faults[episode] = Fault(text, what_helps(times))
            try:
                self._video_files.checked(table, packets[packets != NONE], episode)
            except DecodeError as error:
                is_size = isinstance(error, FrameSizeError)
                self.faults[episode] = self.faults.get(episode, Fault(f": {error}"))._replace(is_size=is_size)
                if not is_size:
                    continue
            yield episode, packets

    def _short_episodes(self) -> dict[int, Fault]:
        """Return faults of episodes that, according to the metadata, are longer than their interval of the file."""
        dataset = self.dataset
        start, stop = (times[self.key][dataset.rows] for times in (dataset.table.start, dataset.table.stop))
        some = np.flatnonzero(dataset.sampled_lengths)
        last = dataset.sampled(some, dataset.sampled_lengths[some] - 1)
        end = dataset.table.to_timestamp[self.key][dataset.rows]
        shares = np.isfinite(end) & (end > stop + TOLERANCE / dataset.fps)  # with the next episode, if the frames agree
        short = some[((stop - start)[some] <= (last + TOLERANCE) / dataset.fps) & ~shares[some]].tolist()
        return {
            episode: Fault(
                f": meta/episodes: it begins at {start[episode]:.4f} s and the next episode of the file at "
                f"{stop[episode]:.4f} s, too early for {counted(int(dataset.lengths[episode]), 'frame')} at {dataset.fps:g} fps"
            )
            for episode in short
        }

    def _calls(self) -> tuple[dict[str, Call], dict[str, Call]]:
        """See `calls`. The frame is the middle one of an episode, and its decoders are those that a Loader could choose.

        A frame in the middle depends on earlier frames, so decoding it tests more than a first frame would.
        """
        dataset, table, store = self.dataset, self.tables[0], self.dataset.data_store
        if not self._packets:  # the rows are broken, which must not hide a broken decoder
            videos = dataset.table.video[self.key]
            episode = int(np.argmax(videos.index[dataset.rows] == videos.number(table.path)))
            frames = np.arange(dataset.lengths[episode])
            rows = {"timestamp": frames / dataset.fps, "frame_index": frames}
            self._packets[episode] = dataset.episode_times(self.key, episode, table, rows).packets()
        episode, packets = next(iter(self._packets.items()))
        frame = len(packets) // 2
        packet = int(packets[frame])
        self.frame = {"episode": int(dataset.episodes[episode]), "frame": frame}
        if packet == NONE:  # the check of timestamps reports it
            return {}, {}
        # FFmpeg outputs every frame of an H.264 file with open GOPs only if it decodes from the start. See `decode`.
        clip = pack(store, [table], [packet], from_the_start=table.open_gops and is_avc(table))
        if self.is_depth:
            return {"PyAV": partial(answers.decode_depth, clip, self.video)}, {}
        decodes: dict[str, Call] = {}
        speeds: dict[str, Call] = {}
        if self._decoders.torchcodec:
            decodes["torchcodec"] = partial(answers.decode, clip, self.video, False, None)
        for place, gpu in self.places.items() if self._decoders.dali else ():
            decoder = "DALI on the CPU" if gpu is None else f"NVDEC of {place}"
            if refusal(None, self.video, table) if gpu is None else self.reports[place].route.decoder == "torchcodec":
                continue
            nvdec = "dali" if gpu is None else self.reports[place].route.decoder
            decodes[decoder] = partial(answers.decode, clip, self.video, nvdec == "dali", gpu)
            if gpu is not None and self._decoders.torchcodec:
                with contextlib.suppress(DecodeError):  # decoding the chosen frame reports the error
                    clips = rate.request_clips(store, table, gpu, nvdec)
                    arguments = clips, self.video, gpu, len(dataset.videos), process.cores(), _MEASURED_S, nvdec
                    speeds[place] = partial(rate.measure, *arguments)
        return decodes, speeds


def decode_frames(cameras: Sequence[Camera], limit_s: float) -> None:
    """Decode a frame of each camera with each decoder, and measure the speeds, with one process per decoder.

    Args:
        cameras: Cameras, which get `decoded` and `speeds`.
        limit_s: Time limit of each process, in seconds.
    """
    calls = {camera.key: camera.calls() for camera in cameras}
    decoded = call_by_name({key: decodes for key, (decodes, _) in calls.items()}, limit_s)
    speeds = call_by_name({key: speeds for key, (_, speeds) in calls.items()}, limit_s)
    for camera in cameras:
        camera.decoded, camera.speeds = decoded[camera.key], speeds[camera.key]
