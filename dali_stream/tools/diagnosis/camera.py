"""Checks of a video camera: format, decoder and its reason, timestamps, cost of long GOPs, and a decoded frame."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from dali_stream.dataset import Dataset
from dali_stream.decode import speed
from dali_stream.decode.capability import capability
from dali_stream.decode.route import refusal, smallest_coded_size
from dali_stream.errors import DaliStreamError, DecodeError, MemoryBudgetError, counted
from dali_stream.mp4.clip import is_avc, pack
from dali_stream.mp4.format import describe
from dali_stream.mp4.hidden import hidden_frames
from dali_stream.mp4.index import LACKING, VideoIndex, read_index
from dali_stream.order import Order, default_pools
from dali_stream.order.batches import Batches
from dali_stream.schedule.budget import Sizes, divide, horizon
from dali_stream.schedule.plan import Limits
from dali_stream.speed.decodes import decodes, median_gop
from dali_stream.tools.description import LOOK_AT, CameraReport, contradictions, describe_video, find_frames
from dali_stream.tools.diagnosis import answers
from dali_stream.tools.diagnosis.frames import LEAST_PSNR_DB, Decoded, Decoders, Deep, Task, Via
from dali_stream.tools.diagnosis.gpu import NOTHING_TO_DO
from dali_stream.tools.diagnosis.looks import look
from dali_stream.tools.diagnosis.report import OK, PROBLEM, WARNING, Check, Result, run_checks
from dali_stream.tools.diagnosis.rows import FrameTimes, Rows
from dali_stream.tools.isolated import Call

_SHOWN = 3  # maximum number of broken files reported per camera
# The cost of GOPs is the number of frames decoded per delivered frame. It is simulated for the settings below.
_COSTLY = 4.0  # minimum cost at which long GOPs are reported
_BATCH = 64
_SIZE = 224, 224
_BUDGETS = 4 << 30, 16 << 30  # default memory_budget, and a large one, in bytes
_GOOD = 1.5  # cost of a GOP of 2 without a cache
_EPISODES = 2000  # maximum number of simulated episodes


class Camera:
    """Subject of the checks of a video camera.

    Attributes:
        key: Key of the camera.
        dataset: Dataset of the camera.
        decoders: Decoders that load on this machine.
        files: Number of files.
        tables: Indices of at most 32 files that are not broken.
        times: Checks that each row of the camera has a frame.
        reports: {"CPU" or kind of GPU: description of the videos}.
        results: Results by name. Results of decoded frames are added later, since all cameras are decoded together.
        facts: Facts for the report.
        task: Frame to decode. None if no frame can be located.
        speeds: {(camera, kind of GPU): call that measures the speed}. See `frames.measure_speeds`.
    """

    def __init__(self, key: str, rows: Rows, decoders: Decoders, deep: Deep | None) -> None:
        self.key, self.dataset, self.decoders = key, rows.dataset, decoders
        self.times = FrameTimes(rows, key)
        self.results: dict[str, Result] = {}
        self.facts: dict[str, Any] = {"kind": "video"}
        self.task: Task | None = None
        self.speeds: dict[tuple[str, str], Call] = {}
        self._rows = rows
        self.tables = self._read_files(rows, deep)

    def run(self, checks: Mapping[str, Check[Camera]]) -> None:
        """Run checks on the files that are not broken, and choose a frame to decode.

        Raises:
            StorageError: If a file cannot be fetched.
        """
        if not self.tables:
            return
        try:
            places = {"CPU": None, **self.decoders.gpus}
            store = self.dataset.data_store
            self.video = describe(self.tables[0].configs[0])
            self.reports = {where: describe_video(self.tables, store, gpu) for where, gpu in places.items()}
            self.results.update((f"{self.key} {name}".rstrip(), result) for name, result in run_checks(checks, self))
            self._choose_frame()
        except DaliStreamError as error:
            self.results[f"{self.key} file"] = self.broken(self.tables[0].path, error)

    def broken(self, path: str, error: DaliStreamError) -> Result:
        """Return the result for a file that cannot be read or decoded."""
        where = self.dataset.data_store.where(path)
        kind, remedy = look(self.dataset.data_store, path)
        text = f"{where}: {str(error).removeprefix(f'{where}: ')}{'. ' if kind else ''}{kind[:1].upper()}{kind[1:]}"
        return PROBLEM, text, remedy or "copy or fetch the dataset again"

    def _read_files(self, rows: Rows, deep: Deep | None) -> list[VideoIndex]:
        """Check files, and add a result for each broken one. Return the indices of the files to describe."""
        tables, errors = [], list[Result]()
        paths, file_of = self.dataset.table.video[self.key].paths, self.dataset.files(self.key)
        files = np.unique(file_of)
        self.files, chosen = len(files), files[rows.spread(len(files))]
        described = chosen[:: -(-len(chosen) // LOOK_AT)]
        for file in chosen.tolist():
            try:
                table = read_index(self.dataset.data_store, paths[file])
                episodes = np.flatnonzero(file_of == file)
                packets = self.times.find(table, episodes[rows.spread(len(episodes))].tolist())
                if deep:
                    deep.decode_videos(self.key, table, packets)
                if file in described:
                    tables.append(table)
            except DaliStreamError as error:
                errors.append(self.broken(paths[file], error))
        for n, result in enumerate(errors[:_SHOWN], start=1):
            self.results[f"{self.key} file {n}"] = result
        if len(errors) > _SHOWN:
            text = f"{len(errors)} of {len(chosen)} checked files are broken"
            self.results[f"{self.key} files"] = PROBLEM, text, "copy the dataset again"
        return tables

    def _choose_frame(self) -> None:
        """Choose a frame to decode: the middle of the first selected episode in the first file.

        A frame in the middle depends on earlier frames, so decoding it tests more than a first frame would.
        """
        dataset, table = self.dataset, self.tables[0]
        file = dataset.table.video[self.key].paths.index(table.path)
        episode = int(np.argmax(dataset.files(self.key) == file))
        frame = int(dataset.lengths[episode]) // 2
        self.facts["frame"] = {"episode": int(dataset.episodes[episode]), "frame": frame}
        seconds = self._rows.seconds(episode)
        if seconds is None:
            seconds = np.arange(dataset.lengths[episode]) / dataset.fps
        packet = int(find_frames(dataset, self.key, table, episode, seconds)[0][frame])
        if packet != LACKING:  # the check of timestamps reports a missing frame
            # FFmpeg outputs every frame of an H.264 file with open GOPs only if it decodes from the start. See `decode`.
            clip = pack(dataset.data_store, [table], [packet], from_the_start=table.open_gops and is_avc(table))
            self.task = Task(self.key, clip, self.video, self._choose_decoders())

    def _choose_decoders(self) -> list[Via]:
        """Return the decoders that a Loader could choose for this video. Add calls that measure the speed of GPUs."""
        store, table, decoders = self.dataset.data_store, self.tables[0], [Via("torchcodec")] * self.decoders.torchcodec
        if not self.decoders.dali:
            return decoders
        if not refusal(None, self.video, table):
            decoders.append(Via("DALI on the CPU", dali=True))
        for where, gpu in self.decoders.gpus.items():
            if self.reports[where].route.decoder == "dali":
                decoders.append(Via(f"NVDEC of {where}", True, gpu))
                if self.decoders.torchcodec:
                    with contextlib.suppress(DecodeError):  # decoding the chosen frame reports the error
                        clips, gop = speed.request_clips(store, table, gpu), speed.median_gop(table)
                        call = partial(answers.speed, clips, self.video, gop, gpu, len(self.dataset.videos))
                        self.speeds[self.key, where] = call
        return decoders


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
    """Describe open GOPs, B-frames, hidden frames and the colour matrix."""
    report, matrix = camera.reports["CPU"], camera.video.matrix
    hidden, frames = hidden_frames(camera.dataset.data_store, camera.tables[0], camera.video.codec)
    has = {"open GOPs": report.open_gops, "B-frames": report.b_frames, f"{hidden} hidden frames in {frames} frames": hidden}
    traits = ", ".join(name for name, applies in has.items() if applies) or "no open GOPs, B-frames or hidden frames"
    camera.facts |= {"colour_matrix": matrix, "hidden_frames": hidden, "hidden_of": frames}
    return OK, f"{traits}; colours {camera.video.matrix_name}", ""


def check_routes(camera: Camera) -> dict[str, Result]:
    """Check for each kind of GPU whether NVDEC decodes the camera. The results name the decoder and the reason."""
    camera.facts["routes"] = {
        where: dataclasses.asdict(report.route) | {"change": report.route_change} for where, report in camera.reports.items()
    }
    return {f"on {where}": _check_route(camera, where, report) for where, report in camera.reports.items()}


def _check_route(camera: Camera, where: str, report: CameraReport) -> Result:
    on_nvdec = where != "CPU" and report.route.decoder == "dali"
    text = report.route.reason if on_nvdec else f"{report.route.decoder}: {report.route.reason}"
    if report.route_change:
        text += f"; torchcodec from a later file: {report.route_change}"
    if where == "CPU" or (on_nvdec and not report.route_change):
        return OK, text, ""
    gpu, size = camera.decoders.gpus[where], (report.height, report.width)
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
    return camera.times.result()


def check_gops(camera: Camera) -> Result | None:
    """Check the cost of long GOPs, and whether the frame cache compensates for it."""
    tables = camera.tables
    gops = np.concatenate([table.gop_lengths for table in tables])
    # A decoder decodes k frames to deliver the k-th frame of a GOP, so a random frame of a GOP of n frames costs (n + 1) / 2.
    plain = float((gops * (gops + 1) / 2).sum() / gops.sum())
    if plain < _COSTLY:
        return None
    text = f"GOP {median_gop(tables)} decodes {plain:.0f} frames per delivered frame without a frame cache"
    shorter, status = "`dali-stream prepare URI OUT --codec h264 --gop 2`", WARNING
    remedy = f"{shorter} makes it 1.5"
    if cached := _cached(camera.dataset, camera.key, tables):
        budget, first, later = cached
        cache = f'memory_budget="{budget >> 30}GiB" with image_size={_SIZE}'
        text += f". {cache} brings it to about {first:.1f}" + ("" if later else ", and to 0 after the first epoch")
        text += f", {shorter} to 1.5"
        remedy = f"give the Loader {cache}, or use {shorter}"
        if budget == _BUDGETS[0] and first <= _GOOD:
            status = OK  # the default budget is sufficient
    return status, text, "" if status == OK else remedy


def _cached(dataset: Dataset, camera: str, tables: Sequence[VideoIndex]) -> tuple[int, float, float] | None:
    """Return a memory budget in bytes, and the cost in the first epoch and in later epochs.

    The budget is the smallest of `_BUDGETS` that makes the cost in the first epoch good, or otherwise the largest. The result
    is None if no budget holds a batch.
    """
    lengths = dataset.lengths[:_EPISODES]
    batches = Batches(int(lengths.sum()), min(_BATCH, int(lengths.sum())), 1, "drop")
    consumers, pool = default_pools(batches.batch_size, 1)
    window = np.zeros(1, np.int64)
    frame = math.prod(_SIZE) * 3 * len(dataset.videos)
    sizes = Sizes(
        lengths=dataset.lengths,
        batch_size=batches.batch_size,
        episodes=min(consumers * (pool + 1), dataset.num_episodes),
        row_bytes=dataset.row_bytes,
        least_row_bytes=dataset.row_bytes_without_objects,
        files={camera: len(np.unique(dataset.table.video[camera].index[dataset.rows]))},
        indices={camera: tables[0]},
        windows={camera: window},
        fetched=dataset.data_store.remote,
        frame_bytes=frame,
        in_progress=2 * batches.largest * frame,
    )
    best = None
    for budget in _BUDGETS:
        try:
            kept = divide(budget, sizes).frames
        except MemoryBudgetError:
            continue
        # The simulated part must not fit in the cache unless the whole dataset does. Otherwise, the simulation would decode
        # nothing in later epochs.
        kept = int(lengths.sum()) if kept >= dataset.lengths.sum() else min(kept, int(lengths.sum()) - 1)
        first, later = decodes(
            lengths, lambda epoch: Order(lengths, True, 0, epoch, consumers, pool), batches, window, median_gop(tables),
            Limits(kept, 2, horizon(kept, int(lengths.sum()))),
        )  # fmt: skip
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


def check_frame(camera: Camera, decoded: Mapping[str, Decoded]) -> dict[str, Result]:
    """Check the frame that each decoder delivered. Correct decoders deliver nearly equal frames."""
    right = [name for name, each in decoded.items() if not each.error]
    return {f"{camera.key} frame, {name}": _check_decoded(camera, name, each, right) for name, each in decoded.items()}


def _check_decoded(camera: Camera, name: str, decoded: Decoded, right: list[str]) -> Result:
    if decoded.error and right:  # another decoder succeeds, so the file is not broken
        remedy = f"the loader uses {right[0]}. Check this decoder's version and driver, and please report it"
        return PROBLEM, f"{decoded.error}. {right[0]} decodes it", remedy
    if decoded.error:
        return camera.broken(camera.tables[0].path, DecodeError(f"{name}: {decoded.error}"))
    if decoded.psnr_db is None:
        return OK, "decoded", ""
    text = f"decoded; {decoded.psnr_db:g} dB PSNR against {right[0]}"
    if decoded.psnr_db >= LEAST_PSNR_DB:
        return OK, text, ""
    remedy = 'use Loader(decode="torchcodec"), and please report it with the file'
    return PROBLEM, f"{text}. Two correct decoders have {LEAST_PSNR_DB:g} or more", remedy
