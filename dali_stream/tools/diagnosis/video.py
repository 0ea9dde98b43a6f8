"""Checks of a video camera: files, formats, decoders and their reasons, timestamps, cost of long GOPs, a decoded frame."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from typing import Any

import numpy as np

from dali_stream.checks.arguments import budget_text
from dali_stream.decode import rate
from dali_stream.decode.capability import capability
from dali_stream.decode.refusal import smallest_coded_size
from dali_stream.errors import DaliStreamError, DecodeError, counted
from dali_stream.mp4.timing import BY_FRAME_INDEX
from dali_stream.system import memory_limit, process
from dali_stream.system.install import install_command
from dali_stream.tools.description import CameraReport, contradictions
from dali_stream.tools.diagnosis.camera import Camera
from dali_stream.tools.diagnosis.frames import find_flat_colour
from dali_stream.tools.diagnosis.gpu import NOTHING_TO_DO
from dali_stream.tools.diagnosis.looks import broken
from dali_stream.tools.diagnosis.report import OK, PROBLEM, WARNING, Finding
from dali_stream.tools.diagnosis.rows import ROWS_FIRST
from dali_stream.tools.isolated import Answer

_SHOWN = 3  # maximum number of broken files reported per camera
_COSTLY = 4.0  # frames decoded per delivered frame, without a cache, from which GOPs are reported as long; that of a GOP of 7
_SIZE = 224, 224


def facts(camera: Camera) -> dict[str, Any]:
    """Return the facts about a camera for the report. Those that a broken file hides are left out."""
    facts: dict[str, Any] = {"kind": "video"}
    with contextlib.suppress(DaliStreamError):
        if camera.tables:
            facts |= _facts_of_files(camera)
    if camera.frame:
        facts["frame"] = camera.frame
    errors = {name: answer.reason for name, answer in camera.decoded.items()}
    facts["decoded"] = {name: {"error": error, "difference": camera.difference(name)} for name, error in errors.items()}
    facts["speed"] = {place: {} if each.error else dataclasses.asdict(each.value) for place, each in camera.speeds.items()}
    return facts


def _facts_of_files(camera: Camera) -> dict[str, Any]:
    routes = ("route", "route_change", "bytes", "remarks", "broken")  # routes are reported per GPU
    report = {key: value for key, value in dataclasses.asdict(camera.reports["CPU"]).items() if key not in routes}
    hidden, frames = camera.hidden
    return report | {
        "files": camera.files,
        "colour_matrix": camera.video.matrix,
        "hidden_frames": hidden,
        "hidden_of": frames,
        "hidden_by_edit_lists": sum(table.hidden for table in camera.tables),
        "routes": {
            place: dataclasses.asdict(report.route) | {"change": report.route_change}
            for place, report in camera.reports.items()
        },
    }


def check_broken_files(camera: Camera) -> list[Finding]:
    """Check that each file can be read."""
    store, count = camera.dataset.data_store, len(camera.broken)
    shown = enumerate(list(camera.broken.items())[:_SHOWN], start=1)
    findings = [broken(f"{camera.key} file {n}", store, path, error) for n, (path, error) in shown]
    if count > _SHOWN:
        text = f"{count} of {camera.files_read} checked files are broken"
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
    text = f"{kind}, {report.height}×{report.width}, GOP {gop}, {files}{others}"
    return [camera.finding("", OK, text)]


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
    return [_check_route(camera, place, report) for place, report in camera.reports.items()]


def _check_route(camera: Camera, place: str, report: CameraReport) -> Finding:
    name, gpu = f"on {place}", camera.places[place]
    route, size = report.route, (report.height, report.width)
    on_nvdec = gpu is not None and route.decoder != "torchcodec"
    text = route.reason if on_nvdec else f"{route.decoder}: {route.reason}"
    if report.route_change:
        text += f"; torchcodec from a later file: {report.route_change}"
    if gpu is None or route.decoder == "pyav" or (on_nvdec and not report.route_change):
        return camera.finding(name, OK, text)
    for codec in ("hevc", "h264"):
        if not capability(gpu, codec, "420", 8).refusal(*size) and smallest_coded_size(codec, *size) == size:
            remedy = f"`dali-stream prepare URI OUT --codec {codec}` re-encodes the dataset for this GPU"
            return camera.finding(name, WARNING, text, remedy)
    return camera.finding(name, WARNING, text, NOTHING_TO_DO)


def check_remarks(camera: Camera) -> list[Finding]:
    """Check that meta/info.json describes the first file correctly."""
    remedy = "correct meta/info.json: the Loader uses its shape, and everything else as the file has it"
    remarks = contradictions(camera.dataset, camera.key, camera.tables[0])
    return [camera.finding(f"remark {n}", WARNING, text, remedy) for n, text in enumerate(remarks, start=1)]


def check_timestamps(camera: Camera) -> list[Finding]:
    """Check that the timestamp of each row locates a frame of its episode."""
    dataset, faults = camera.dataset, camera.faults
    if not faults and not camera.checked:
        text = "whether each row has a frame is unknown, since no row could be read"
        return [camera.finding("timestamps", WARNING, text, ROWS_FIRST)]
    if not faults:
        text = f"each row has a frame of its episode, in {camera.checked} checked episodes of {dataset.num_episodes}"
        return [camera.finding("timestamps", OK, text)]
    first = min(faults)
    more = f". {len(faults)} of {dataset.num_episodes} episodes have such faults" if len(faults) > 1 else ""
    remedy = "exclude these episodes (episodes=...), or record or convert the dataset again"
    if len(faults) == camera.checked:
        remedy = "leave the camera out (cameras=...), or record or convert the dataset again"
    remedies = {fault.remedy for fault in faults.values()}
    if all(fault.is_size for fault in faults.values()):
        remedy = "correct the shape in meta/info.json, or do what the message says"
    elif len(remedies) == 1 and "" not in remedies:  # the same helps in all of them
        [remedy] = remedies
        if remedy.startswith(BY_FRAME_INDEX):
            remedy = f"each row has its frame at frame_index / fps. {remedy}"
    return [camera.finding("timestamps", PROBLEM, f"episode {dataset.episodes[first]}{faults[first].text}{more}", remedy)]


def check_ends(camera: Camera) -> list[Finding]:
    """Check that no `to_timestamp` is before the end of the last frame of its episode."""
    dataset, key = camera.dataset, camera.key
    early = np.flatnonzero(dataset.table.ends_early(key, dataset.fps)[dataset.rows])
    if not len(early):
        return []
    row = dataset.rows[early[0]]
    start, end = (float(times[key][row]) for times in (dataset.table.start, dataset.table.to_timestamp))
    text = (
        f"to_timestamp is less than the end of the last frame in {len(early)} of {counted(dataset.num_episodes, 'episode')}: "
        f"episode {dataset.episodes[early[0]]} has {counted(int(dataset.lengths[early[0]]), 'frame')} at {dataset.fps:g} fps "
        f"from {start:.4f} s to {end:.4f} s. No frame is lost, since frames are located by from_timestamp and the next episode"
    )
    remedy = "`dali-stream prepare URI OUT` writes a copy with correct times"
    return [camera.finding("to_timestamp", WARNING, text, remedy)]


def check_gops(camera: Camera) -> list[Finding]:
    """Check that GOPs are short enough for random access, unless the default memory_budget holds all frames of the dataset.

    At least half of a budget is for decoded frames.
    """
    if camera.is_depth:  # `prepare` does not re-encode it
        return []
    gops = np.concatenate([table.gop_lengths for table in camera.tables])
    # A decoder decodes k frames to deliver the k-th frame of a GOP, so a random frame of a GOP of n frames costs (n + 1) / 2.
    cost = float((gops * (gops + 1) / 2).sum() / gops.sum())
    if cost < _COSTLY:
        return []
    text = f"GOP {int(np.median(gops))} decodes {cost:.0f} frames per delivered frame without the cache in memory"
    frames = camera.dataset.num_frames * len(camera.dataset.videos)
    default = memory_limit.budget(None, memory_limit.memory_limit(), process.local_ranks().count).size
    if frames * math.prod(_SIZE) * 3 <= default // 2:
        held = f"which holds all frames of {_SIZE[0]}×{_SIZE[1]} with the default memory_budget of {budget_text(default)}"
        return [camera.finding("GOPs", OK, f"{text}, {held}")]
    remedy = (
        "use a larger memory_budget, a smaller image_size, or `dali-stream prepare URI OUT --codec h264 --gop 2`. "
        "`dali-stream bench URI` measures the frames per second with each of them"
    )
    return [camera.finding("GOPs", WARNING, text, remedy)]


def check_frame(camera: Camera) -> list[Finding]:
    """Check the frame that each decoder delivered, with the tolerance with which a Loader compares decoders.

    Raises:
        DaliStreamError: If the file of the frame cannot be read.
    """
    if camera.decode_error:
        raise camera.decode_error
    findings = [_check_decoded(camera, name) for name in camera.decoded]
    if camera.reference:
        findings += find_flat_colour(f"{camera.key} picture", camera.decoded[camera.reference].value, **camera.frame)
    return findings


def _check_decoded(camera: Camera, decoder: str) -> Finding:
    name, error, other = f"frame, {decoder}", camera.decoded[decoder].reason, camera.reference
    if error and other:  # another decoder succeeds, so the file is not broken
        remedy = f"the loader uses {other}. Check this decoder's version and driver, and please report it"
        return camera.finding(name, PROBLEM, f"{error}. {other} decodes it", remedy)
    if error:
        return broken(
            f"{camera.key} {name}", camera.dataset.data_store, camera.tables[0].path, DecodeError(f"{decoder}: {error}")
        )
    text = camera.difference(decoder)
    if not text:
        like = "torchcodec on the CPU" if other == "torchcodec" else other
        return camera.finding(name, OK, "decoded" if text is None else f"decoded, like {like}")
    remedy = "please report it with the file"
    if other == "torchcodec":
        remedy = f'use Loader(decode="torchcodec"), and {remedy}'
    return camera.finding(name, PROBLEM, f"its frame {text}", remedy)


def check_speeds(camera: Camera) -> list[Finding]:
    """Report for each kind of GPU which decoder is faster."""
    return [_check_speed(camera, f"speed on {place}", answer) for place, answer in camera.speeds.items()]


def _check_speed(camera: Camera, name: str, answer: Answer) -> Finding:
    if answer.error:
        remedy = 'use Loader(decode="torchcodec") if the Loader fails, too'
        return camera.finding(name, WARNING, f"it could not be measured: {answer.reason}", remedy)
    rates: rate.Rates = answer.value
    ratio, takes = rates.nvdec / rates.cpu, "NVDEC" if rates.nvdec_is_faster else "the CPU"
    text = f'{rates}: NVDEC has {ratio:.2f} of the CPU\'s speed, so decode="auto" takes {takes}'
    return camera.finding(name, OK, text)
