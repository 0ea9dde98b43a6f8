"""Findings on one camera: its video format, its decoder and why, what long GOPs cost, and one decoded frame."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from dali_stream.dataset import Dataset
from dali_stream.decode import speed
from dali_stream.decode.capability import capability
from dali_stream.decode.route import refusal, smallest_coded_size
from dali_stream.errors import DaliStreamError, DatasetError, DecodeError, MemoryBudgetError, counted
from dali_stream.mp4.clip import is_avc, pack
from dali_stream.mp4.format import VideoFormat, describe
from dali_stream.mp4.hidden import hidden_frames
from dali_stream.mp4.index import LACKING, VideoIndex, read_index
from dali_stream.mp4.timing import explain, find_packets
from dali_stream.order import Order, default_pools
from dali_stream.order.batches import Batches
from dali_stream.schedule.budget import Sizes, divide, horizon
from dali_stream.schedule.plan import Limits
from dali_stream.tools.description import CameraReport, contradictions, describe_video, video_files
from dali_stream.tools.diagnosis.frames import LEAST_PSNR_DB, Decoded, Decoders, Deep, Task
from dali_stream.tools.diagnosis.gpu import NOTHING_TO_DO
from dali_stream.tools.diagnosis.looks import look
from dali_stream.tools.diagnosis.report import OK, PROBLEM, WARNING, Result
from dali_stream.tools.diagnosis.rows import Rows, Timing, spread
from dali_stream.tools.diagnosis.speed import Speed
from dali_stream.tools.forecast import decodes, median_gop

_SHOWN = 3  # broken files reported per camera
# What long GOPs cost.
_COSTLY = 4.0  # frames decoded per delivered one, from which on a finding says so
_BATCH = 64
_SIZE = 224, 224
_BUDGETS = 4 << 30, 16 << 30  # the default, and a large one
_GOOD = 1.5  # what a GOP of 2 costs
_EPISODES = 2000  # that are simulated, at most


class Camera:
    """A video camera of a dataset.

    `deep` decodes all of its frames. Without, one frame is decoded, and up to 1000 files are checked, or 32 of remote data.

    Attributes:
        found: by the name of the finding; all but those on the frame, which is decoded together with those of other cameras.
        facts: for the report.
        task: the frame to decode; None if there is none.
        speeds: Speeds to measure, one per GPU that decodes the camera.
    """

    def __init__(self, dataset: Dataset, key: str, rows: Rows, decoders: Decoders, deep: Deep | None) -> None:
        self.key, self._dataset, self._decoders, self._rows, self._deep = key, dataset, decoders, rows, deep
        self.found: dict[str, Result] = {}
        self.facts: dict[str, Any] = {"kind": "video"}
        self.task: Task | None = None
        self.speeds: list[Speed] = []
        self._path = ""
        try:
            self._look()
        except DaliStreamError as error:
            self.found[f"{key} file"] = self._broken(self._path, error)

    def decoded(self, decoded: Mapping[str, Decoded]) -> dict[str, Result]:
        """Return the findings on the frame by name."""
        right = [route for route, each in decoded.items() if not each.error]
        return {f"{self.key} frame, {route}": self._of_frame(route, each, right) for route, each in decoded.items()}

    def _of_frame(self, route: str, decoded: Decoded, right: list[str]) -> Result:
        """`right` are the routes that decode it."""
        if decoded.error and right:  # the file is fine
            remedy = f"the loader uses {right[0]}; check this decoder's version and driver, and please report it"
            return PROBLEM, f"{decoded.error}; {right[0]} decodes it", remedy
        if decoded.error:
            return self._broken(self._path, DecodeError(f"{route}: {decoded.error}"))
        if decoded.psnr_db is None:
            return OK, "decoded", ""
        text = f"decoded; {decoded.psnr_db:g} dB PSNR against {right[0]}"
        if decoded.psnr_db >= LEAST_PSNR_DB:
            return OK, text, ""
        remedy = 'use Loader(decode="torchcodec"), and please report it with the file'
        return PROBLEM, f"{text}; two correct decoders have {LEAST_PSNR_DB:g} or more", remedy

    def _look(self) -> None:
        paths, described = video_files(self._dataset, self.key)
        timing = Timing(self._dataset, self.key, self._rows)
        tables = self._tables([paths[i] for i in spread(self._dataset, len(paths), bool(self._deep))], described, timing)
        if not tables:
            return
        table = tables[0]
        self._path = table.path
        video = describe(table.configs[0])
        places: dict[str, int | None] = {"CPU": None, **self._decoders.gpus}
        reports = {where: describe_video(tables, self._dataset.data_store, gpu, len(paths), 0) for where, gpu in places.items()}
        self._describe(reports["CPU"], video, table)
        self.found |= {f"{self.key} on {where}": self._route(where, report) for where, report in reports.items()}
        self.facts["routes"] = {
            where: dataclasses.asdict(report.route) | {"change": report.route_change} for where, report in reports.items()
        }
        remedy = "correct meta/info.json: the Loader goes by the file, but for the shape"
        for n, remark in enumerate(contradictions(self._dataset, self.key, table), start=1):
            self.found[f"{self.key} remark {n}"] = WARNING, remark, remedy
        self.found[f"{self.key} timestamps"] = timing.found()
        if early := _early_ends(self._dataset, self.key):
            self.found[f"{self.key} to_timestamp"] = early
        if cost := _cost_of_gops(self._dataset, self.key, tables):
            self.found[f"{self.key} GOPs"] = cost
        self._choose_frame(table, video, list(self._routes(video, table, reports)), timing)
        self.speeds = list(self._speeds(video, table, reports))

    def _tables(self, chosen: list[str], described: list[str], timing: Timing) -> list[VideoIndex]:
        """Checks these files; broken ones become findings. Returns the indices of those in `described`."""
        tables, broken = [], 0
        files = self._dataset.table.video[self.key]
        index, number = files.index[self._dataset.rows], {path: n for n, path in enumerate(files.paths)}
        for path in sorted({*chosen, *described}, key=number.__getitem__):
            try:
                table = read_index(self._dataset.data_store, path)
                episodes = np.flatnonzero(index == number[path]).tolist()
                own = [episodes[i] for i in spread(self._dataset, len(episodes), bool(self._deep))]
                packets = timing.examine(table, own)
                if self._deep:
                    self._deep.video(self.key, table, packets)
                if path in described:
                    tables.append(table)
            except DaliStreamError as error:
                broken += 1
                if broken <= _SHOWN:
                    self.found[f"{self.key} file {broken}"] = self._broken(path, error)
        if broken > _SHOWN:
            text = f"{broken} of {len(chosen)} checked files are broken"
            self.found[f"{self.key} files"] = PROBLEM, text, "copy the dataset again"
        return tables

    def _broken(self, path: str, error: DaliStreamError) -> Result:
        store = self._dataset.data_store
        said, remedy = look(store, path) if path else ("", "")
        where = store.where(path)
        text = f"{where}: {str(error).removeprefix(f'{where}: ')}{'; ' if said else ''}{said}"
        return PROBLEM, text, remedy or "copy or fetch the dataset again"

    def _describe(self, report: CameraReport, video: VideoFormat, table: VideoIndex) -> None:
        gop = f"{report.gop_min}" if report.gop_min == report.gop_max else f"{report.gop_min} to {report.gop_max}"
        kind = " ".join(filter(None, (report.codec, report.profile, report.pixel_format)))
        files = f"{report.files_looked_at} of {counted(report.files, 'file')} checked"
        others = "".join(f"; other files: {f}" for f in report.other_formats)
        self.found[self.key] = OK, f"{kind}, {report.height}×{report.width}, GOP {gop}, {files}{others}", ""
        hidden, of = hidden_frames(self._dataset.data_store, table, video.codec)
        has = {"open GOPs": report.open_gops, "B-frames": report.b_frames, f"{hidden} hidden frames in {of} frames": hidden}
        traits = ", ".join(name for name, there in has.items() if there) or "no open GOPs, B-frames or hidden frames"
        self.found[f"{self.key} structure"] = OK, f"{traits}; colours {video.matrix_name}", ""
        own = dataclasses.asdict(report)
        for key in ("route", "route_change", "bytes", "remarks", "broken"):  # routes are reported per GPU
            del own[key]
        self.facts |= own | {"colour_matrix": video.matrix, "hidden_frames": hidden, "hidden_of": of}

    def _route(self, where: str, report: CameraReport) -> Result:
        on_nvdec = where != "CPU" and report.route.decoder == "dali"
        text = report.route.reason if on_nvdec else f"{report.route.decoder}: {report.route.reason}"
        if report.route_change:
            text += f"; torchcodec from a later file: {report.route_change}"
        if where == "CPU" or (on_nvdec and not report.route_change):
            return OK, text, ""
        gpu = self._decoders.gpus[where]
        size = report.height, report.width
        helps = [
            codec
            for codec in ("hevc", "h264")
            if not capability(gpu, codec, "420", 8).refusal(*size) and smallest_coded_size(codec, *size) == size
        ]
        remedy = (
            f"`dali-stream transcode URI OUT --codec {helps[0]}` re-encodes the dataset for this GPU"
            if helps
            else NOTHING_TO_DO
        )
        return WARNING, text, remedy

    def _choose_frame(
        self, table: VideoIndex, video: VideoFormat, routes: list[tuple[str, bool, int | None]], timing: Timing
    ) -> None:
        """Chooses the middle of the first selected episode in this file, whose decoding needs earlier frames."""
        dataset = self._dataset
        files = dataset.table.video[self.key]
        episode = int(np.argmax(files.index[dataset.rows] == files.paths.index(table.path)))
        frame = int(dataset.lengths[episode]) // 2
        self.facts["frame"] = {"episode": int(dataset.episodes[episode]), "frame": frame}
        found = self._rows.seconds(episode)
        timestamp = frame / dataset.fps if found is None else float(found[frame])
        interval = dataset.table.interval(self.key, dataset.rows[episode])
        sample = int(find_packets(table, interval, np.array([timestamp]), dataset.fps, dataset.tolerance_s)[0])
        if sample == LACKING and episode in timing.faults:
            return  # another finding has it
        if sample == LACKING:
            why = explain(table, interval, timestamp, dataset.fps, dataset.tolerance_s)
            raise DecodeError(f"episode {dataset.episodes[episode]}, frame {frame}: {why}")
        size = dataset.picture_size(self.key)
        if (video.height, video.width) != size:
            raise DatasetError(f"has frames of {video.height}×{video.width}, and meta/info.json has {size[0]}×{size[1]}")
        # FFmpeg outputs all frames of an H.264 file with open GOPs only from its start (see `decode`).
        clip = pack(dataset.data_store, [table], [sample], from_the_start=table.open_gops and is_avc(table))
        if routes:
            self.task = Task(self.key, clip, video, routes)

    def _routes(
        self, video: VideoFormat, table: VideoIndex, reports: Mapping[str, CameraReport]
    ) -> Iterator[tuple[str, bool, int | None]]:
        """The decoders that a Loader could choose for this video."""
        if self._decoders.torchcodec:
            yield "torchcodec", False, None
        if self._decoders.dali:
            if not refusal(None, video, table):
                yield "DALI on the CPU", True, None
            for name, gpu in self._decoders.gpus.items():  # not run on a GPU yet
                if reports[name].route.decoder == "dali":
                    yield f"NVDEC of {name}", True, gpu

    def _speeds(self, video: VideoFormat, table: VideoIndex, reports: Mapping[str, CameraReport]) -> Iterator[Speed]:
        """Speeds to measure on the GPUs that decode this video."""
        for where, gpu in self._decoders.gpus.items() if self._decoders.torchcodec and self._decoders.dali else ():
            if reports[where].route.decoder == "dali":
                with contextlib.suppress(DecodeError):  # the frame that is decoded shows what is wrong
                    clips = speed.request_clips(self._dataset.data_store, table, gpu)
                    yield Speed(self.key, where, clips, video, speed.median_gop(table), gpu)


def _cost_of_gops(dataset: Dataset, camera: str, tables: Sequence[VideoIndex]) -> Result | None:
    """The finding on a camera's GOPs; None if they are short."""
    gops = np.concatenate([np.diff(np.append(table.keyframes, len(table))) for table in tables])
    plain = float((gops * (gops + 1) / 2).sum() / gops.sum())
    if plain < _COSTLY:
        return None
    text = f"GOP {median_gop(tables)} decodes {plain:.0f} frames per delivered frame without a frame cache"
    shorter, status = "`dali-stream transcode URI OUT --codec h264 --gop 2`", WARNING
    remedy = f"{shorter} makes it 1.5"
    if found := _cached(dataset, camera, tables):
        budget, first, later = found
        cache = f'memory_budget="{budget >> 30}GiB" with image_size={_SIZE}'
        text += f"; {cache} brings it to about {first:.1f}" + ("" if later else ", and to 0 after the first epoch")
        text += f", {shorter} to 1.5"
        remedy = f"give the Loader {cache}; or {shorter}"
        if budget == _BUDGETS[0] and first <= _GOOD:
            status = OK  # the default does it
    return status, text, "" if status == OK else remedy


def _cached(dataset: Dataset, camera: str, tables: Sequence[VideoIndex]) -> tuple[int, float, float] | None:
    """The first of two budgets that makes the cost small, or else the larger, and the cost in the first epoch and later."""
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
    found = None
    for budget in _BUDGETS:
        try:
            kept = divide(budget, sizes).frames
        except MemoryBudgetError:
            continue
        kept = int(lengths.sum()) if kept >= dataset.lengths.sum() else min(kept, int(lengths.sum()) - 1)
        first, later = decodes(
            lengths, lambda epoch: Order(lengths, True, 0, epoch, consumers, pool), batches, window, median_gop(tables),
            Limits(kept, 2, horizon(kept, int(lengths.sum()))),
        )  # fmt: skip
        found = budget, first, later
        if first <= _GOOD:
            break
    return found


def _early_ends(dataset: Dataset, camera: str) -> Result | None:
    """Return a warning if `to_timestamp` of some episodes lies before the end of their last frame."""
    early = np.flatnonzero(dataset.table.ends_early(camera, dataset.fps)[dataset.rows])
    if not len(early):
        return None
    row = dataset.rows[early[0]]
    start, end = (float(times[camera][row]) for times in (dataset.table.start, dataset.table.to_timestamp))
    text = (
        f"to_timestamp lies before the end of the last frame in {len(early)} of {counted(dataset.num_episodes, 'episode')}: "
        f"episode {dataset.episodes[early[0]]} has {counted(int(dataset.lengths[early[0]]), 'frame')} at {dataset.fps:g} fps "
        f"from {start:.4f} s to {end:.4f} s. No frame is lost, since frames are located by from_timestamp and the next episode"
    )
    return WARNING, text, "`dali-stream convert URI OUT` writes a copy with correct times"
