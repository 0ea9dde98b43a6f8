"""Checks of a video camera: format, decoder and its reason, timestamps, cost of long GOPs, and a decoded frame."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from dali_stream.checks.none import NONE
from dali_stream.decode import rate
from dali_stream.decode.capability import capability
from dali_stream.decode.refusal import refusal, smallest_coded_size
from dali_stream.decode.video_files import VideoFiles
from dali_stream.errors import DaliStreamError, DecodeError, FrameSizeError, MemoryBudgetError, counted
from dali_stream.mp4.clip import is_avc, pack
from dali_stream.mp4.hidden import hidden_frames
from dali_stream.mp4.index import Int64, VideoIndex, read_index
from dali_stream.mp4.timing import BY_FRAME_INDEX, TOLERANCE, EpisodeTimes, what_helps
from dali_stream.order import Order, default_pools
from dali_stream.order.batches import Batches
from dali_stream.schedule.budget import Sizes, divide, horizon
from dali_stream.schedule.plan import Limits
from dali_stream.system import process
from dali_stream.tools.decodes import decodes, median_gop
from dali_stream.tools.description import LOOK_AT, CameraReport, contradictions, describe_video, find_frames
from dali_stream.tools.diagnosis import answers
from dali_stream.tools.diagnosis.frames import FLAT, LEAST_PSNR_DB, Decoders, Deep, flat_colour, psnr
from dali_stream.tools.diagnosis.gpu import NOTHING_TO_DO
from dali_stream.tools.diagnosis.looks import broken
from dali_stream.tools.diagnosis.report import OK, PROBLEM, WARNING, Check, Result, run_checks
from dali_stream.tools.diagnosis.rows import ROWS_FIRST, Rows
from dali_stream.tools.isolated import Answer, Call

_SHOWN = 3  # maximum number of broken files reported per camera
# The cost of GOPs is the number of frames decoded per delivered frame. It is simulated for the settings below.
_COSTLY = 4.0  # minimum cost at which long GOPs are reported
_BATCH = 64
_SIZE = 224, 224
_BUDGETS = 4 << 30, 16 << 30  # default memory_budget, and a large one, in bytes
_GOOD = 1.5  # cost of a GOP of 2 without a cache
_MEASURED_S = 2.0  # time for measuring the speed of both decoders of a camera, in seconds


class Camera:
    """Subject of the checks of a video camera.

    Attributes:
        key: Key of the camera.
        rows: Rows of its dataset.
        dataset: Dataset of the camera.
        places: {"CPU" or kind of GPU: index of the CUDA device, None for the CPU}.
        files: Number of files.
        tables: Indices of at most 32 files that are not broken.
        checked: Number of episodes whose rows were compared with the frames.
        faults: {episode: reason why it has rows without frames}.
        of_other_size: Episodes of `faults` whose frames have another size than `meta/info.json` says.
        remedies: {episode of `faults`: what to do about its rows without frames}.
        reports: {place: description of the videos}.
        results: Results by name. Results of decoded frames are added later, since all cameras are decoded together.
        facts: Facts for the report.
        decodes: {decoder: call that decodes a frame}. Empty if the chosen frame cannot be located.
        speeds: {kind of GPU: call that measures the speed}.
    """

    def __init__(self, key: str, rows: Rows, decoders: Decoders, deep: Deep | None) -> None:
        self.key, self.rows, self.dataset, self._decoders = key, rows, rows.dataset, decoders
        self.places = {"CPU": None, **decoders.gpus}
        self.tables: list[VideoIndex] = []
        self.checked, self.faults, self.remedies = 0, self._short_episodes(), dict[int, str]()
        self.of_other_size = set[int]()
        self.results: dict[str, Result] = {}
        self.facts: dict[str, Any] = {"kind": "video"}
        self.decodes: dict[str, Call] = {}
        self.speeds: dict[str, Call] = {}
        self._packets: dict[int, Int64] = {}  # {episode of the first of `tables`: packets of its rows}
        self._video_files = VideoFiles(rows.dataset.source, key)
        self._read_files(deep)

    def run(self, checks: Mapping[str, Check[Camera]]) -> None:
        """Run checks on the files that are not broken, and choose a frame to decode."""
        if not self.tables:
            return
        store = self.dataset.data_store
        try:
            self.video = self.tables[0].format()
            is_depth = self.dataset.features[self.key].is_depth
            self.reports = {place: describe_video(self.tables, store, gpu, is_depth) for place, gpu in self.places.items()}
            self.results.update(run_checks(checks, self))
            self._choose_frame()
        except DaliStreamError as error:
            self.results["file"] = broken(store, self.tables[0].path, error)

    def _read_files(self, deep: Deep | None) -> None:
        """Locate the frames of rows, file by file. Add a result for each broken file."""
        store, videos = self.dataset.data_store, self.dataset.table.video[self.key]
        paths, file_of = videos.paths, videos.index[self.dataset.rows]
        files, errors = np.unique(file_of), list[Result]()
        self.files, chosen = len(files), files[self.rows.spread(len(files))]
        described = chosen[:: -(-len(chosen) // LOOK_AT)]
        for file in chosen.tolist():
            try:
                table = read_index(store, paths[file])
                episodes = np.flatnonzero(file_of == file)
                packets = dict(self._locate(table, episodes[self.rows.spread(len(episodes))].tolist()))
                if deep:
                    deep.decode_videos(self.key, table, packets)
            except DaliStreamError as error:
                errors.append(broken(store, paths[file], error))
                continue
            if not self.tables:
                self._packets = packets
            if file in described:
                self.tables.append(table)
        self.results |= {f"file {n}": result for n, result in enumerate(errors[:_SHOWN], start=1)}
        if len(errors) > _SHOWN:
            text = f"{len(errors)} of {len(chosen)} checked files are broken"
            self.results["files"] = PROBLEM, text, "copy the dataset again"

    def _locate(self, table: VideoIndex, episodes: Iterable[int]) -> Iterator[tuple[int, Int64]]:
        """Yield (episode, packets of its rows) for episodes of a file. The packet of a row without a frame is `NONE`.

        Episodes that cannot be checked are left out.
        """
        dataset = self.dataset
        for episode in episodes:
            rows = self.rows.read(episode)
            if rows is None:
                continue
            self.checked += 1
            packets, fault = find_frames(dataset, self.key, table, episode, rows)
            if fault:
                self.faults[episode] = f", {fault}"
                place = dataset.table.interval(self.key, dataset.rows[episode])
                times = dataset.seconds(rows), rows["frame_index"], dataset.fps, dataset.tolerance_s
                self.remedies[episode] = what_helps(EpisodeTimes(table, place, *times))
            try:
                self._video_files.checked(table, packets[packets != NONE], episode)
            except DecodeError as error:
                self.faults.setdefault(episode, f": {error}")
                if not isinstance(error, FrameSizeError):
                    continue
                self.of_other_size.add(episode)
            yield episode, packets

    def _short_episodes(self) -> dict[int, str]:
        """Return {episode: fault} of episodes that, according to the metadata, are longer than their interval of the file."""
        dataset = self.dataset
        start, stop = (times[self.key][dataset.rows] for times in (dataset.table.start, dataset.table.stop))
        short = np.flatnonzero(stop - start <= (dataset.lengths - 1 + TOLERANCE) / dataset.fps).tolist()
        return {
            episode: f": meta/episodes: it begins at {start[episode]:.4f} s and the next episode of the file at "
            f"{stop[episode]:.4f} s, too early for {counted(int(dataset.lengths[episode]), 'frame')} at {dataset.fps:g} fps"
            for episode in short
        }

    def _choose_frame(self) -> None:
        """Choose the middle frame of an episode, and the decoders that a Loader could choose for it.

        A frame in the middle depends on earlier frames, so decoding it tests more than a first frame would.
        """
        dataset, table, store = self.dataset, self.tables[0], self.dataset.data_store
        if not self._packets:  # the rows are broken, which must not hide a broken decoder
            videos = dataset.table.video[self.key]
            episode = int(np.argmax(videos.index[dataset.rows] == videos.number(table.path)))
            frames = np.arange(dataset.lengths[episode])
            rows = {"timestamp": frames / dataset.fps, "frame_index": frames}
            self._packets[episode] = find_frames(dataset, self.key, table, episode, rows)[0]
        episode, packets = next(iter(self._packets.items()))
        frame = len(packets) // 2
        packet = int(packets[frame])
        self.facts["frame"] = {"episode": int(dataset.episodes[episode]), "frame": frame}
        if packet == NONE:  # the check of timestamps reports it
            return
        # FFmpeg outputs every frame of an H.264 file with open GOPs only if it decodes from the start. See `decode`.
        clip = pack(store, [table], [packet], from_the_start=table.open_gops and is_avc(table))
        if dataset.features[self.key].is_depth:
            self.decodes["PyAV"] = partial(answers.decode_depth, clip, self.video, self.key)
            return
        if self._decoders.torchcodec:
            self.decodes["torchcodec"] = partial(answers.decode, clip, self.video, False, None)
        for place, gpu in self.places.items() if self._decoders.dali else ():
            decoder = "DALI on the CPU" if gpu is None else f"NVDEC of {place}"
            if refusal(None, self.video, table) if gpu is None else self.reports[place].route.decoder == "torchcodec":
                continue
            nvdec = "dali" if gpu is None else self.reports[place].route.decoder
            self.decodes[decoder] = partial(answers.decode, clip, self.video, nvdec == "dali", gpu)
            if gpu is not None and self._decoders.torchcodec:
                with contextlib.suppress(DecodeError):  # decoding the chosen frame reports the error
                    clips = rate.request_clips(store, table, gpu, nvdec)
                    arguments = clips, self.video, gpu, len(dataset.videos), process.cores(), _MEASURED_S, nvdec
                    self.speeds[place] = partial(rate.measure, *arguments)


def check_format(camera: Camera) -> Result:
    """Describe the codec, the frame size and the GOPs."""
    report = camera.reports["CPU"]
    gop = f"{report.gop_min}" if report.gop_min == report.gop_max else f"{report.gop_min} to {report.gop_max}"
    kind = " ".join(filter(None, (report.codec, report.profile, report.pixel_format)))
    files = f"{report.files_looked_at} of {counted(camera.files, 'file')} checked"
    others = "".join(f"; other files: {name}" for name in report.other_formats)
    routes = ("route", "route_change", "bytes", "remarks", "broken")  # routes are reported per GPU
    camera.facts |= {key: value for key, value in dataclasses.asdict(report).items() if key not in routes}
    camera.facts["files"] = camera.files
    return OK, f"{kind}, {report.height}×{report.width}, GOP {gop}, {files}{others}", ""


def check_structure(camera: Camera) -> Result:
    """Describe open GOPs, B-frames, hidden frames, frames that edit lists hide, and the colour matrix."""
    report, matrix = camera.reports["CPU"], camera.video.matrix
    hidden, frames = hidden_frames(camera.dataset.data_store, camera.tables[0], camera.video.codec)
    cut = sum(table.hidden for table in camera.tables)
    has = {
        "open GOPs": report.open_gops,
        "B-frames": report.b_frames,
        f"{hidden} hidden frames in {frames} frames": hidden,
        f"{cut} of {sum(map(len, camera.tables))} frames hidden by edit lists": cut,
    }
    traits = ", ".join(name for name, applies in has.items() if applies) or "no open GOPs, B-frames or hidden frames"
    camera.facts |= {"colour_matrix": matrix, "hidden_frames": hidden, "hidden_of": frames, "hidden_by_edit_lists": cut}
    return OK, f"{traits}; colours {camera.video.matrix_name}", ""


def check_routes(camera: Camera) -> dict[str, Result]:
    """Check for each kind of GPU whether NVDEC decodes the camera. The results name the decoder and the reason."""
    camera.facts["routes"] = {
        place: dataclasses.asdict(report.route) | {"change": report.route_change} for place, report in camera.reports.items()
    }
    return {f"on {place}": _check_route(camera.places[place], report) for place, report in camera.reports.items()}


def _check_route(gpu: int | None, report: CameraReport) -> Result:
    route, size = report.route, (report.height, report.width)
    on_nvdec = gpu is not None and route.decoder != "torchcodec"
    text = route.reason if on_nvdec else f"{route.decoder}: {route.reason}"
    if report.route_change:
        text += f"; torchcodec from a later file: {report.route_change}"
    if gpu is None or route.decoder == "pyav" or (on_nvdec and not report.route_change):
        return OK, text, ""
    for codec in ("hevc", "h264"):
        if not capability(gpu, codec, "420", 8).refusal(*size) and smallest_coded_size(codec, *size) == size:
            return WARNING, text, f"`dali-stream prepare URI OUT --codec {codec}` re-encodes the dataset for this GPU"
    return WARNING, text, NOTHING_TO_DO


def check_remarks(camera: Camera) -> dict[str, Result]:
    """Check that meta/info.json describes the first file correctly."""
    remedy = "correct meta/info.json: the Loader uses its shape, and everything else as the file has it"
    remarks = contradictions(camera.dataset, camera.key, camera.tables[0])
    return {f"remark {n}": (WARNING, remark, remedy) for n, remark in enumerate(remarks, start=1)}


def check_timestamps(camera: Camera) -> Result:
    """Check that the timestamp of each row locates a frame of its episode."""
    dataset, faults = camera.dataset, camera.faults
    if not faults and not camera.checked:
        return WARNING, "whether each row has a frame is unknown, since no row could be read", ROWS_FIRST
    if not faults:
        return OK, f"each row has a frame of its episode, in {camera.checked} checked episodes of {dataset.num_episodes}", ""
    first = min(faults)
    more = f". {len(faults)} of {dataset.num_episodes} episodes have such faults" if len(faults) > 1 else ""
    remedy = "exclude these episodes (episodes=...), or record or convert the dataset again"
    if len(faults) == camera.checked:
        remedy = "leave the camera out (cameras=...), or record or convert the dataset again"
    shared = {camera.remedies.get(episode, "") for episode in faults}
    if faults.keys() == camera.of_other_size:
        remedy = "correct the shape in meta/info.json, or do what the message says"
    elif len(shared) == 1 and "" not in shared:  # the same helps in all of them
        [remedy] = shared
        if remedy.startswith(BY_FRAME_INDEX):
            remedy = f"each row has its frame at frame_index / fps. {remedy}"
    return PROBLEM, f"episode {dataset.episodes[first]}{faults[first]}{more}", remedy


def check_gops(camera: Camera) -> Result | None:
    """Check the cost of long GOPs, and whether the frame cache compensates for it."""
    tables = camera.tables
    if camera.dataset.features[camera.key].is_depth:  # `prepare` does not re-encode it
        return None
    gops = np.concatenate([table.gop_lengths for table in tables])
    # A decoder decodes k frames to deliver the k-th frame of a GOP, so a random frame of a GOP of n frames costs (n + 1) / 2.
    plain = float((gops * (gops + 1) / 2).sum() / gops.sum())
    if plain < _COSTLY:
        return None
    text = f"GOP {median_gop(tables)} decodes {plain:.0f} frames per delivered frame without a frame cache"
    shorter, status = "`dali-stream prepare URI OUT --codec h264 --gop 2`", WARNING
    remedy = f"{shorter} makes it 1.5"
    if cached := _cached(camera):
        budget, first, later = cached
        cache = f'memory_budget="{budget >> 30}GiB" with image_size={_SIZE}'
        text += f". {cache} brings it to about {first:.1f}" + ("" if later else ", and to 0 after the first epoch")
        text += f", {shorter} to 1.5"
        remedy = f"give the Loader {cache}, or use {shorter}"
        if budget == _BUDGETS[0] and first <= _GOOD:
            status = OK  # the default budget is sufficient
    return status, text, "" if status == OK else remedy


def _cached(camera: Camera) -> tuple[int, float, float] | None:
    """Return a memory budget in bytes, and the cost in the first epoch and in later epochs.

    The budget is the smallest of `_BUDGETS` that makes the cost in the first epoch good, or otherwise the largest. The result
    is None if no budget holds a batch.
    """
    dataset, frames, window = camera.dataset, camera.dataset.num_frames, np.zeros(1, np.int64)
    batches = Batches(frames, min(_BATCH, frames), 1, "drop")
    consumers, pool = default_pools(batches.batch_size, 1)
    source, frame_bytes = dataset.source, math.prod(_SIZE) * 3 * len(dataset.videos)
    sizes = Sizes(
        lengths=dataset.lengths,
        batch_size=batches.batch_size,
        episodes=min(consumers * (pool + 1), dataset.num_episodes),
        row_bytes=source.row_bytes,
        least_row_bytes=source.row_bytes_without_objects,
        files={camera.key: camera.files},
        indices={camera.key: camera.tables[0]},
        windows={camera.key: window},
        fetched=dataset.data_store.remote,
        frame_bytes=frame_bytes,
        in_progress_bytes=2 * batches.largest * frame_bytes,
    )

    def order(epoch: int) -> Order:
        return Order(dataset.lengths, True, 0, epoch, consumers, pool)

    best = None
    for budget in _BUDGETS:
        with contextlib.suppress(MemoryBudgetError):
            kept = divide(budget, sizes).kept
            limits = Limits(kept, 2, horizon(kept, frames))
            first, later = decodes(dataset.lengths, order, batches, window, median_gop(camera.tables), limits)
            best = budget, first.decoded, later.decoded
            if first.decoded <= _GOOD:
                break
    return best


def check_ends(camera: Camera) -> Result | None:
    """Check that no `to_timestamp` is before the end of the last frame of its episode."""
    dataset, key = camera.dataset, camera.key
    early = np.flatnonzero(dataset.table.ends_early(key, dataset.fps)[dataset.rows])
    if not len(early):
        return None
    row = dataset.rows[early[0]]
    start, end = (float(times[key][row]) for times in (dataset.table.start, dataset.table.to_timestamp))
    text = (
        f"to_timestamp is less than the end of the last frame in {len(early)} of {counted(dataset.num_episodes, 'episode')}: "
        f"episode {dataset.episodes[early[0]]} has {counted(int(dataset.lengths[early[0]]), 'frame')} at {dataset.fps:g} fps "
        f"from {start:.4f} s to {end:.4f} s. No frame is lost, since frames are located by from_timestamp and the next episode"
    )
    return WARNING, text, "`dali-stream prepare URI OUT` writes a copy with correct times"


def check_frame(camera: Camera, decoded: Mapping[str, Answer]) -> dict[str, Result]:
    """Check the frame that each decoder delivered. Correct decoders deliver nearly equal frames."""
    right = [name for name, answer in decoded.items() if not answer.error]
    psnr_db = {name: psnr(decoded[right[0]].value, decoded[name].value) for name in right[1:]}
    results, facts = dict[str, Result](), dict[str, Any]()
    for name, answer in decoded.items():
        facts[name] = {"error": answer.reason, "psnr_db": psnr_db.get(name)}
        results[f"frame, {name}"] = _check_decoded(camera, name, right, **facts[name])
    camera.facts["decoded"] = facts
    if right and (colour := flat_colour(decoded[right[0]].value)):
        results["picture"] = WARNING, "episode {episode}, frame {frame} is ".format(**camera.facts["frame"]) + colour, FLAT
    return results


def _check_decoded(camera: Camera, name: str, right: Sequence[str], error: str, psnr_db: float | None) -> Result:
    if error and right:  # another decoder succeeds, so the file is not broken
        remedy = f"the loader uses {right[0]}. Check this decoder's version and driver, and please report it"
        return PROBLEM, f"{error}. {right[0]} decodes it", remedy
    if error:
        return broken(camera.dataset.data_store, camera.tables[0].path, DecodeError(f"{name}: {error}"))
    if psnr_db is None:
        return OK, "decoded", ""
    text = f"decoded; {psnr_db:g} dB PSNR against {right[0]}"
    if psnr_db >= LEAST_PSNR_DB:
        return OK, text, ""
    remedy = 'use Loader(decode="torchcodec"), and please report it with the file'
    return PROBLEM, f"{text}. Two correct decoders have {LEAST_PSNR_DB:g} or more", remedy


def check_speeds(camera: Camera, measured: Mapping[str, Answer]) -> dict[str, Result]:
    """Report for each kind of GPU which decoder is faster, according to the answers of `rate.measure`."""
    facts = {place: {} if answer.error else dataclasses.asdict(answer.value) for place, answer in measured.items()}
    camera.facts["speed"] = facts
    return {f"speed on {place}": _check_speed(answer) for place, answer in measured.items()}


def _check_speed(answer: Answer) -> Result:
    if answer.error:
        return WARNING, f"it could not be measured: {answer.reason}", 'use Loader(decode="torchcodec") if the Loader fails, too'
    rates: rate.Rates = answer.value
    ratio, takes = rates.nvdec / rates.cpu, "NVDEC" if rates.nvdec_is_faster else "the CPU"
    return OK, f'{rates}: NVDEC has {ratio:.2f} of the CPU\'s speed, so decode="auto" takes {takes}', ""
