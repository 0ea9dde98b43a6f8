"""Checks of a video camera: files, format, decoders and their reasons, frames of the rows, a decoded frame.

The frames of rows are located by the code that a Loader uses, so what it refuses has its error.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from dali_stream.checks.arrays import NONE, Int64
from dali_stream.decode import rate
from dali_stream.decode.audit import difference
from dali_stream.decode.capability import capability
from dali_stream.decode.refusal import refusal, smallest_coded_size
from dali_stream.decode.video_files import VideoFiles
from dali_stream.errors import DaliStreamError, DecodeError, FrameSizeError, counted
from dali_stream.mp4.clip import is_avc, pack
from dali_stream.mp4.counting import TOLERANCE
from dali_stream.mp4.format import VideoFormat
from dali_stream.mp4.hidden import hidden_frames
from dali_stream.mp4.index import VideoIndex, read_index
from dali_stream.mp4.timing import explain
from dali_stream.system import cpu
from dali_stream.system.cached import cached_property
from dali_stream.system.install import install_command
from dali_stream.tools.description import LOOK_AT, CameraReport, contradictions, describe_video
from dali_stream.tools.diagnosis import answers
from dali_stream.tools.diagnosis.frames import Decoders, Deep, call_by_name, find_flat_colour, located
from dali_stream.tools.diagnosis.machine import NOTHING_TO_DO
from dali_stream.tools.diagnosis.report import OK, PROBLEM, WARNING, Finding, Status
from dali_stream.tools.diagnosis.rows import ROWS_FIRST, Rows
from dali_stream.tools.isolated import Answer, Call, call

_LOADED_S = 60.0  # time limit for loading PyAV, in seconds
_MEASURED_S = 2.0  # time for measuring the speed of both decoders of a camera, in seconds
_MOST = 100  # maximum number of the frame that is decoded: some files must be decoded from the start
_NOT_HERE = ("route", "route_change", "bytes", "remarks", "broken")  # attributes of a `CameraReport` that facts do not repeat
_SHOWN = 3  # maximum number of broken files reported per camera


class Camera:
    """Context of the checks of a video camera. Its files are read when it is created, and `decode_frames` decodes a frame.

    Attributes:
        key: Key of the camera.
        dataset: Dataset of the camera.
        deep: Decoder of all frames, or None.
        places: {"CPU" or kind of GPU: index of the CUDA device, None for the CPU}.
        files, files_read: Number of files, and of those that were read.
        broken: {path of a broken file: error message}.
        tables: Indices of at most 32 files that are not broken.
        checked: Number of episodes whose rows were compared with the frames.
        faults: {episode: error message about its first row without a frame, or about a frame of another size}.
        frame: Number of the frame of the first of `tables` that the decoders decode.
        decoded: {decoder: answer with the frame}. Empty without `tables`, or with a `pyav_error`.
        speeds: {kind of GPU: answer of `rate.measure`}.
    """

    def __init__(self, key: str, rows: Rows, decoders: Decoders, deep: Deep | None) -> None:
        self.key, self.dataset, self.deep, self._rows, self._decoders = key, rows.dataset, deep, rows, decoders
        self.places: dict[str, int | None] = {"CPU": None, **decoders.gpus}
        self.broken: dict[str, str] = {}
        self.tables: list[VideoIndex] = []
        self.checked, self.faults = 0, dict[int, str]()
        self.frame = 0
        self.decoded: Mapping[str, Answer] = {}
        self.speeds: Mapping[str, Answer] = {}
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

    def _read_files(self) -> None:
        """Locate the frames of rows, file by file. With `deep`, also decode them."""
        dataset, videos = self.dataset, self.dataset.table.video[self.key]
        paths, file_of = videos.paths, videos.index[dataset.rows]
        files = np.unique(file_of)
        # Episodes that begin later than the next one of their file allows. Frames are missing unless their times say otherwise.
        start, stop = (times[self.key][dataset.rows] for times in (dataset.table.start, dataset.table.stop))
        short = np.flatnonzero((stop - start) * dataset.fps < dataset.lengths - TOLERANCE)[:LOOK_AT]
        chosen = np.union1d(files[self._rows.spread(len(files))], file_of[short])
        self.files, self.files_read = len(files), len(chosen)
        described = chosen[:: -(-len(chosen) // LOOK_AT)]
        for file in chosen.tolist():
            own = np.flatnonzero(file_of == file)
            episodes = np.union1d(own[self._rows.spread(len(own))], np.intersect1d(own, short)).tolist()
            try:
                table = read_index(dataset.data_store, paths[file])
                packets = dict(self._locate(table, episodes))
                if self.deep and not self.pyav_error:
                    self.deep.decode_videos(self.key, table, packets)
            except DaliStreamError as error:
                self.broken[paths[file]] = located(dataset.data_store, paths[file], error)
                continue
            if file in described:
                self.tables.append(table)

    def _locate(self, table: VideoIndex, episodes: Iterable[int]) -> Iterator[tuple[int, Int64]]:
        """Yield (episode, packets of its rows) for episodes of a file. The packet of a row without a frame is `NONE`.

        Episodes whose rows are broken are left out.

        Raises:
            DaliStreamError: If a sample description is broken, or if rows cannot be read.
        """
        dataset, files = self.dataset, self._video_files
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
                error = DecodeError(explain(times, frame))
                self.faults[episode] = str(files.named(episode, np.array([frame]), table, error))
            try:
                files.checked(table, packets[packets != NONE], episode)
            except FrameSizeError as error:
                self.faults.setdefault(episode, f"episode {dataset.episodes[episode]}: {error}")
            yield episode, packets

    def calls(self) -> tuple[dict[str, Call], dict[str, Call]]:
        """Return the calls that decode a frame of the first of `tables` with each decoder that a Loader could choose.

        The frame is inside the file. It depends on earlier frames, so decoding it tests more than a first frame would.

        Returns:
            {decoder: call that decodes the frame}, and {kind of GPU: call that measures the speed}.

        Raises:
            DaliStreamError: If the file is broken.
        """
        table, store, video = self.tables[0], self.dataset.data_store, self.video
        self.frame = min(len(table.displayed) // 2, _MOST)
        # FFmpeg outputs every frame of an H.264 file with open GOPs only if it decodes from the start. See `decode`.
        packets = [int(table.displayed_packets[self.frame])]
        clip = pack(store, [table], packets, from_the_start=table.open_gops and is_avc(table))
        if self.is_depth:
            return {"PyAV": partial(answers.decode_depth, clip, video)}, {}
        decodes: dict[str, Call] = {}
        speeds: dict[str, Call] = {}
        if self._decoders.torchcodec:
            decodes["torchcodec"] = partial(answers.decode, clip, video, False, None)
        if self._decoders.dali and not refusal(None, video, table):
            decodes["DALI on the CPU"] = partial(answers.decode, clip, video, True, None)
        for place, gpu in self._decoders.gpus.items() if self._decoders.dali else ():
            if (nvdec := self.reports[place].route.decoder) == "torchcodec":
                continue
            decodes[f"NVDEC of {place}"] = partial(answers.decode, clip, video, nvdec == "dali", gpu)
            if self._decoders.torchcodec:
                with contextlib.suppress(DecodeError):  # decoding the chosen frame reports the error
                    clips = rate.request_clips(store, table, gpu, nvdec)
                    arguments = clips, video, gpu, len(self.dataset.videos), cpu.cores(), _MEASURED_S, nvdec
                    speeds[place] = partial(rate.measure, *arguments)
        return decodes, speeds


def decode_frames(cameras: Sequence[Camera], limit_s: float) -> None:
    """Decode a frame of each camera with each decoder, and measure the speeds, with one process per decoder.

    Args:
        cameras: Cameras, which get `decoded` and `speeds`.
        limit_s: Time limit of each process, in seconds.
    """
    calls: dict[str, tuple[dict[str, Call], dict[str, Call]]] = {camera.key: ({}, {}) for camera in cameras}
    for camera in cameras:
        try:
            if camera.tables and not camera.pyav_error:
                calls[camera.key] = camera.calls()
        except DaliStreamError as error:
            path = camera.tables[0].path
            camera.broken[path] = located(camera.dataset.data_store, path, error)
    decoded = call_by_name({key: decodes for key, (decodes, _) in calls.items()}, limit_s)
    speeds = call_by_name({key: speeds for key, (_, speeds) in calls.items()}, limit_s)
    for camera in cameras:
        camera.decoded, camera.speeds = decoded[camera.key], speeds[camera.key]


def facts(camera: Camera) -> dict[str, Any]:
    """Return the facts about a camera for the report. Those that a broken file hides are left out."""
    decoded = {name: {"error": each.reason, "difference": camera.difference(name)} for name, each in camera.decoded.items()}
    speeds = {place: {} if each.error else dataclasses.asdict(each.value) for place, each in camera.speeds.items()}
    facts: dict[str, Any] = {"kind": "video", "decoded": decoded, "speed": speeds}
    with contextlib.suppress(DaliStreamError):
        if camera.tables:
            facts |= {"file": camera.tables[0].path, "frame": camera.frame, "colour_matrix": camera.video.matrix}
            report, reports = dataclasses.asdict(camera.reports["CPU"]), camera.reports.items()
            facts |= {key: value for key, value in report.items() if key not in _NOT_HERE}
            facts["routes"] = {place: {**vars(each.route), "change": each.route_change} for place, each in reports}
            facts |= dict(zip(("hidden_frames", "hidden_of"), camera.hidden, strict=True), files=camera.files)
            facts["hidden_by_edit_lists"] = sum(table.hidden for table in camera.tables)
    return facts


def check_broken_files(camera: Camera) -> list[Finding]:
    """Report the first broken files."""
    shown = list(camera.broken.values())[:_SHOWN]
    findings = [camera.finding(f"file {n}", PROBLEM, text) for n, text in enumerate(shown, start=1)]
    if len(camera.broken) > _SHOWN:
        text = f"{len(camera.broken)} of {camera.files_read} checked files are broken"
        findings.append(camera.finding("files", PROBLEM, text, "copy the dataset again"))
    return findings


def check_all_frames(camera: Camera) -> list[Finding]:
    """Check that all frames were decoded, with `deep`."""
    return [camera.deep.finding(camera.key)] if camera.deep and not camera.pyav_error else []


def check_pyav(camera: Camera) -> list[Finding]:
    """Check that PyAV loads, if the camera records depth."""
    if not camera.pyav_error:
        return []
    text = f"PyAV, which decodes the video of depth cameras, cannot be loaded ({camera.pyav_error})"
    remedy = f"install the extra depth, `{install_command('depth')}`, or leave the camera out (cameras=...)"
    return [camera.finding("PyAV", PROBLEM, text, remedy)]


def check_format(camera: Camera) -> list[Finding]:
    """Describe the codec, the frame size and the GOPs."""
    report = camera.reports["CPU"]
    gop = f"{report.gop_min}" if report.gop_min == report.gop_max else f"{report.gop_min} to {report.gop_max}"
    kind = " ".join(filter(None, (report.codec, report.profile, report.pixel_format)))
    files = f"{report.files_looked_at} of {counted(camera.files, 'file')} checked"
    others = "".join(f"; other files: {name}" for name in report.other_formats)
    # A decoder decodes k frames to deliver the k-th frame of a GOP, so a random frame of a GOP of n frames costs (n + 1) / 2.
    gops = np.concatenate([table.gop_lengths for table in camera.tables])
    cost = f"{(gops * (gops + 1) / 2).sum() / gops.sum():.3g} decodes per random frame"
    return [camera.finding("", OK, f"{kind}, {report.height}×{report.width}, GOP {gop} ({cost}), {files}{others}")]


def check_structure(camera: Camera) -> list[Finding]:
    """Describe open GOPs, B-frames, hidden frames, frames that edit lists hide, and the colour matrix."""
    report, (hidden, frames) = camera.reports["CPU"], camera.hidden
    cut = sum(table.hidden for table in camera.tables)
    has = {
        "open GOPs": report.open_gops,
        "B-frames": report.b_frames,
        f"{hidden} hidden frames in {frames} frames": hidden,
        f"{cut} of {sum(map(len, camera.tables))} frames hidden by edit lists": cut,
    }
    traits = ", ".join(name for name, applies in has.items() if applies) or "no open GOPs, B-frames or hidden frames"
    return [camera.finding("structure", OK, f"{traits}; colours {camera.video.matrix_name}")]


def check_routes(camera: Camera) -> list[Finding]:
    """Check for each kind of GPU whether NVDEC decodes the camera. The findings name the decoder and the reason."""
    findings = []
    for (place, report), gpu in zip(camera.reports.items(), camera.places.values(), strict=True):
        route, size = report.route, (report.height, report.width)
        on_nvdec = gpu is not None and route.decoder != "torchcodec"
        text = route.reason if on_nvdec else f"{route.decoder}: {route.reason}"
        if report.route_change:
            text += f"; torchcodec from a later file: {report.route_change}"
        if gpu is None or route.decoder == "pyav" or (on_nvdec and not report.route_change):
            findings.append(camera.finding(f"on {place}", OK, text))
            continue
        codecs = (codec for codec in ("hevc", "h264") if smallest_coded_size(codec, *size) == size)
        codec = next((codec for codec in codecs if not capability(gpu, codec, "420", 8).refusal(*size)), "")
        remedy = (
            f"`dali-stream prepare URI OUT --codec {codec}` re-encodes the dataset for this GPU" if codec else NOTHING_TO_DO
        )
        findings.append(camera.finding(f"on {place}", WARNING, text, remedy))
    return findings


def check_remarks(camera: Camera) -> list[Finding]:
    """Check that meta/info.json describes the first file correctly."""
    remedy = "correct meta/info.json: the Loader uses its shape, and everything else as the file has it"
    remarks = contradictions(camera.dataset, camera.key, camera.tables[0])
    return [camera.finding(f"remark {n}", WARNING, text, remedy) for n, text in enumerate(remarks, start=1)]


def check_timestamps(camera: Camera) -> list[Finding]:
    """Check that the timestamp of each row locates a frame of its episode, and that its size is that of `meta/info.json`."""
    faults, episodes = camera.faults, camera.dataset.num_episodes
    if faults:
        more = f". {len(faults)} of {episodes} episodes have such faults" if len(faults) > 1 else ""
        return [camera.finding("timestamps", PROBLEM, f"{faults[min(faults)]}{more}")]
    if not camera.checked:
        text = "whether each row has a frame is unknown, since no row could be read"
        return [camera.finding("timestamps", WARNING, text, ROWS_FIRST)]
    text = f"each row has a frame of its episode, in {camera.checked} checked episodes of {episodes}"
    return [camera.finding("timestamps", OK, text)]


def check_ends(camera: Camera) -> list[Finding]:
    """Check that no `to_timestamp` is before the end of the last frame of its episode."""
    dataset = camera.dataset
    early = dataset.episodes[dataset.table.ends_early(camera.key, dataset.fps)[dataset.rows]]
    if not len(early):
        return []
    text = (
        f"to_timestamp is less than the end of the last frame in {len(early)} of {counted(dataset.num_episodes, 'episode')}, "
        f"such as {early[0]}. No frame is lost, since frames are located by from_timestamp and the next episode"
    )
    return [camera.finding("to_timestamp", WARNING, text, "`dali-stream prepare URI OUT` writes a copy with correct times")]


def check_frame(camera: Camera) -> list[Finding]:
    """Check the frame that each decoder delivered, with the tolerance with which a Loader compares decoders."""
    findings, place = list[Finding](), camera.dataset.data_store.where(camera.tables[0].path)
    for decoder, answer in camera.decoded.items():
        name, other, differs = f"frame, {decoder}", camera.reference, camera.difference(decoder)
        text, remedy = "decoded" if differs is None else f"decoded, like {other}", ""
        if answer.error and other:  # another decoder succeeds, so the file is not broken
            text, remedy = f"{answer.reason}. {other} decodes it", f"the loader uses {other}. Please report it with the file"
        elif answer.error:
            text, remedy = f"{place}: {decoder}: {answer.reason}", "copy the file again, or exclude its episodes"
        elif differs:
            switch = 'use Loader(decode="torchcodec"), and ' if other == "torchcodec" else ""
            text, remedy = f"its frame {differs}", f"{switch}please report it with the file"
        findings.append(camera.finding(name, PROBLEM if remedy else OK, text, remedy))
    if camera.reference:
        image = camera.decoded[camera.reference].value
        findings += find_flat_colour(f"{camera.key} picture", image, f"{place}: frame {camera.frame}")
    return findings


def check_speeds(camera: Camera) -> list[Finding]:
    """Report for each kind of GPU which decoder is faster."""
    findings = []
    for place, answer in camera.speeds.items():
        name, rates = f"speed on {place}", answer.value
        if answer.error:
            remedy = 'use Loader(decode="torchcodec") if the Loader fails, too'
            findings.append(camera.finding(name, WARNING, f"it could not be measured: {answer.reason}", remedy))
            continue
        ratio, takes = rates.nvdec / rates.cpu, "NVDEC" if rates.nvdec_is_faster else "the CPU"
        text = f'{rates}: NVDEC has {ratio:.2f} of the CPU\'s speed, so decode="auto" takes {takes}'
        findings.append(camera.finding(name, OK, text))
    return findings
