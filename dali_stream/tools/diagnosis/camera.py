"""Checks of a video camera: files, format, decoders and their reasons, frames of the rows, a decoded frame.

The frames of rows are located by the code that a Loader uses, so what it refuses has its error.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial

import numpy as np

from dali_stream.checks.arrays import NONE
from dali_stream.decode.audit import difference
from dali_stream.decode.capability import capability
from dali_stream.decode.refusal import refusal
from dali_stream.decode.route import refusal_of_nvdec
from dali_stream.decode.video_files import VideoFiles
from dali_stream.errors import DaliStreamError, DecodeError, FrameSizeError, counted
from dali_stream.mp4.clip import is_avc, pack
from dali_stream.mp4.counting import TOLERANCE
from dali_stream.mp4.format import VideoFormat
from dali_stream.mp4.index import VideoIndex, read_index
from dali_stream.mp4.timing import explain
from dali_stream.storage import Store
from dali_stream.system.cached import cached_property
from dali_stream.system.torchcodec_import import NVDEC_REMEDY
from dali_stream.tools.description import LOOK_AT, CameraReport, describe_video
from dali_stream.tools.diagnosis import answers
from dali_stream.tools.diagnosis.machine import NOTHING_TO_DO, Decoders
from dali_stream.tools.diagnosis.report import OK, PROBLEM, WARNING, Finding, Status
from dali_stream.tools.diagnosis.rows import ROWS_FIRST, Rows
from dali_stream.tools.isolated import Answer, Call, call_each

_MOST = 100  # maximum number of the frame that is decoded: some files must be decoded from the start
_SHOWN = 3  # maximum number of broken files reported per camera


class Camera:
    """Context of the checks of a video camera. Its files are read when it is created, and `decode` decodes a frame.

    Attributes:
        key: Key of the camera.
        dataset: Dataset of the camera.
        places: {"CPU" or kind of GPU: index of the CUDA device, None for the CPU}.
        files, files_read: Number of files, and of those that were read.
        broken: {path of a broken file: error message}.
        tables: Indices of at most 32 files that are not broken.
        checked: Number of episodes whose rows were compared with the frames.
        faults: {episode: error message about its first row without a frame, or about a frame of another size}.
        decoded: {decoder: answer with the frame}. Empty without `tables`.
    """

    def __init__(self, key: str, rows: Rows, decoders: Decoders) -> None:
        self.key, self.dataset, self._rows, self._decoders = key, rows.dataset, rows, decoders
        self.places: dict[str, int | None] = {"CPU": None, **decoders.gpus}
        self.broken: dict[str, str] = {}
        self.tables: list[VideoIndex] = []
        self.checked, self.faults = 0, dict[int, str]()
        self.decoded: Mapping[str, Answer] = {}
        self._video_files = VideoFiles(self.dataset.source, key)
        self._read_files()

    @property
    def is_depth(self) -> bool:
        """Whether the camera records depth."""
        return self.dataset.features[self.key].is_depth

    @cached_property
    def video(self) -> VideoFormat:
        """Format of the first file. Raises DecodeError if its sample description is broken."""
        return self.tables[0].format()

    @cached_property
    def reports(self) -> dict[str, CameraReport]:
        """Description of the videos for each of `places`. Raises DecodeError if a sample description is broken."""
        store = self.dataset.data_store
        return {place: describe_video(self.tables, store, gpu, self.is_depth) for place, gpu in self.places.items()}

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
        """Locate the frames of rows, file by file."""
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
                self._locate(table, episodes)
            except DaliStreamError as error:
                self.broken[paths[file]] = located(dataset.data_store, paths[file], error)
                continue
            if file in described:
                self.tables.append(table)

    def _locate(self, table: VideoIndex, episodes: Iterable[int]) -> None:
        """Locate the frames of the rows of a file's episodes. Add to `faults`. Episodes with broken rows are left out.

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

    def calls(self) -> dict[str, Call]:
        """Return {decoder: call that decodes a frame of the first of `tables`} for each decoder that a Loader could choose.

        The frame is inside the file. It depends on earlier frames, so decoding it tests more than a first frame would.

        Raises:
            DaliStreamError: If the file is broken.
        """
        table, video = self.tables[0], self.video
        # FFmpeg outputs every frame of an H.264 file with open GOPs only if it decodes from the start. See `decode`.
        packets = [int(table.displayed_packets[min(len(table.displayed) // 2, _MOST)])]
        clip = pack(self.dataset.data_store, [table], packets, from_the_start=table.open_gops and is_avc(table))
        if self.is_depth:
            return {"PyAV": partial(answers.decode_depth, self.key, clip, video)}
        calls: dict[str, Call] = {}
        if self._decoders.torchcodec:
            calls["torchcodec"] = partial(answers.decode, clip, video, False, None)
            on_nvdec = [place for place in self._decoders.gpus if self.reports[place].route.decoder != "torchcodec"]
            for place in on_nvdec:
                calls[f"NVDEC of {place}"] = partial(answers.decode, clip, video, False, self._decoders.gpus[place])
        if self._decoders.dali and not refusal(None, video, table):
            calls["DALI on the CPU"] = partial(answers.decode, clip, video, True, None)
        return calls

    def decode(self, limit_s: float) -> None:
        """Decode a frame with each decoder in another process, which takes at most `limit_s` seconds. Set `decoded`."""
        try:
            calls = self.calls() if self.tables else {}
        except DaliStreamError as error:
            path = self.tables[0].path
            self.broken[path] = located(self.dataset.data_store, path, error)
            return
        self.decoded = dict(zip(calls, call_each(list(calls.values()), limit_s), strict=True))


def located(store: Store, path: str, error: DaliStreamError) -> str:
    """Return the message of an error, with the address of the file unless the message has it already."""
    where, text = store.where(path), str(error)
    return text if where in text else f"{where}: {text}"


def check_broken_files(camera: Camera) -> list[Finding]:
    """Report the first broken files."""
    shown = list(camera.broken.values())[:_SHOWN]
    findings = [camera.finding(f"file {n}", PROBLEM, text) for n, text in enumerate(shown, start=1)]
    if len(camera.broken) > _SHOWN:
        text = f"{len(camera.broken)} of {camera.files_read} checked files are broken"
        findings.append(camera.finding("files", PROBLEM, text, "copy the dataset again"))
    return findings


def check_format(camera: Camera) -> list[Finding]:
    """Name the codec, the frame size, the colours, and the formats of other files."""
    report = camera.reports["CPU"]
    kind = " ".join(filter(None, (report.codec, report.profile, report.pixel_format)))
    files = f"{report.files_looked_at} of {counted(camera.files, 'file')} checked"
    others = "".join(f"; other files: {name}" for name in report.other_formats)
    size = f"{report.height}×{report.width}"
    return [camera.finding("", OK, f"{kind}, {size}, colours {camera.video.matrix_name}, {files}{others}")]


def check_routes(camera: Camera) -> list[Finding]:
    """Check for each kind of GPU whether NVDEC decodes the camera. The findings name the decoder and the reason."""
    findings = []
    for (place, report), gpu in zip(camera.reports.items(), camera.places.values(), strict=True):
        route, size = report.route, (report.height, report.width)
        on_nvdec = gpu is not None and route.decoder != "torchcodec"
        text = route.reason if on_nvdec else f"{route.decoder}: {route.reason}"
        if report.route_change:
            text += f"; torchcodec from a later file: {report.route_change}"
        # A refusal is asked for again, since the CPU is also chosen where it has many threads per NVDEC engine.
        refused = refusal_of_nvdec(gpu, camera.video, camera.tables[0], camera.dataset.data_store)
        if gpu is None or route.decoder == "pyav" or not (refused or report.route_change):
            findings.append(camera.finding(f"on {place}", OK, text))
            continue
        codec = next((codec for codec in ("hevc", "h264") if not capability(gpu, codec, "420", 8).refusal(*size)), "")
        remedy = (
            f"`dali-stream prepare URI OUT --codec {codec}` re-encodes the dataset for this GPU" if codec else NOTHING_TO_DO
        )
        if route.reason.endswith(NVDEC_REMEDY):  # the text says what to install
            remedy = ""
        findings.append(camera.finding(f"on {place}", WARNING, text, remedy))
    return findings


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


def check_frame(camera: Camera) -> list[Finding]:
    """Check the frame that each decoder delivered, with the tolerance with which a Loader compares decoders."""
    findings, place = list[Finding](), camera.dataset.data_store.where(camera.tables[0].path)
    for decoder, answer in camera.decoded.items():
        other, differs = camera.reference, camera.difference(decoder)
        text, remedy = "decoded" if differs is None else f"decoded, like {other}", ""
        if answer.error and other:  # another decoder succeeds, so the file is not broken
            text, remedy = f"{answer.reason}. {other} decodes it", f"the loader uses {other}. Please report it with the file"
        elif answer.kind == "DaliStreamError":  # a library is missing, and the message says which
            text = answer.reason
        elif answer.error:
            text, remedy = f"{place}: {decoder}: {answer.reason}", "copy the file again, or exclude its episodes"
        elif differs:
            switch = 'use Loader(decode="torchcodec"), and ' if other == "torchcodec" else ""
            text, remedy = f"its frame {differs}", f"{switch}please report it with the file"
        findings.append(camera.finding(f"frame, {decoder}", PROBLEM if answer.error or differs else OK, text, remedy))
    return findings
