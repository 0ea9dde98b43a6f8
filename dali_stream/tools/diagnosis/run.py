"""Table of all checks of `doctor`, and the functions that run them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from dali_stream.dataset import Dataset
from dali_stream.errors import DaliStreamError, StorageError
from dali_stream.tools.diagnosis import answers, camera, gpu, machine, rows, software
from dali_stream.tools.diagnosis.camera import Camera
from dali_stream.tools.diagnosis.frames import Decoders, Deep, call_by_name, check_images
from dali_stream.tools.diagnosis.machine import Machine
from dali_stream.tools.diagnosis.report import PROBLEM, Area, Check, DoctorReport, Finding, Result, as_findings, run_checks
from dali_stream.tools.diagnosis.rows import Rows
from dali_stream.tools.isolated import call

# Each group runs in one process. After a crash or hang, the remaining questions of the group are skipped.
_QUESTIONS = ((answers.driver, answers.nvdec), (answers.dali,), (answers.torch, answers.torchcodec))
MACHINE: tuple[Area, ...] = ("gpu", "software", "machine")
"""Areas whose checks get a `Machine`. Checks of "dataset" get `Rows`, and checks of "camera" get a `Camera`."""
CHECKS: Mapping[str, Mapping[str, Check[Any]]] = {
    "gpu": {
        "driver": gpu.check_driver,
        "GPUs": gpu.check_gpus,
    },
    "software": {
        "Python": software.check_python,
        "DALI": software.check_dali,
        "torch": software.check_torch,
        "torchcodec": software.check_torchcodec,
        "ffmpeg program": software.check_ffmpeg_program,
    },
    "machine": {
        "container": machine.check_container,
        "cores": machine.check_cores,
        "memory": machine.check_memory,
        "shared memory": machine.check_shared_memory,
        "disk": machine.check_disk,
    },
    "dataset": {
        "metadata": rows.check_metadata,
        "statistics": rows.check_statistics,
        "files": rows.check_files,
        "rows": rows.check_rows,
        "actions": rows.check_actions,
        "tasks": rows.check_names,
    },
    "camera": {
        "": camera.check_format,
        "structure": camera.check_structure,
        "routes": camera.check_routes,
        "remarks": camera.check_remarks,
        "timestamps": camera.check_timestamps,
        "to_timestamp": camera.check_ends,
        "GOPs": camera.check_gops,
    },
}
"""Checks by area and name, in the order of the report. To add a check, write a function and add a line here.

A check that returns several results names them itself.
"""


def doctor(
    uri: str | os.PathLike[str] | None = None,
    *,
    cache_dir: str | os.PathLike[str] | None = None,
    limit_s: float = 120.0,
    deep: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
    **options: Any,
) -> DoctorReport:
    """Examine this machine, and optionally a dataset. Errors become findings instead of exceptions.

    Args:
        uri: Address of a dataset. Default: None, which examines only the machine.
        cache_dir: Folder of the cache, as in `Dataset`. Its disk is checked.
        limit_s: Time limit in seconds. A decoder that takes longer, or a library that takes longer to load, counts as hanging.
            The first import of torch from a network file system can take a minute. Default: 120.
        deep: Whether to check all files and rows, and to decode every frame of the selected cameras and episodes. Otherwise one
            frame of each camera is decoded, and at most 1000 episodes and files are checked, or 32 of remote data. Default:
            False.
        progress: Function that is called with (frames decoded, number of frames), if `deep`.
        options: Further arguments of `Dataset`: `revision`, `data_files_root`, `storage_options`, `cameras`, `episodes`,
            `clock`, `tolerance_s`.

    Returns:
        Findings, each with a status and a remedy, and the facts on which they are based.

    Raises:
        ValueError: If an argument does not fit the address.
    """
    # The dataset is opened first, so that an invalid argument fails before the slow questions.
    opened = None if uri is None else open_dataset(uri, cache_dir=cache_dir, **options)
    facts = None
    with contextlib.closing(opened) if isinstance(opened, Dataset) else contextlib.nullcontext():
        subject = _ask(limit_s, cache_dir)
        findings = [finding for area in MACHINE for finding in as_findings(area, run_checks(CHECKS[area], subject))]
        if isinstance(opened, Dataset):
            loads = {name: not answer.error for name, answer in subject.answers.items()}
            usable = {name: first["index"] for name, first in gpu.group_equal(subject.gpus).items() if not first["error"]}
            every = Deep(opened, progress) if deep and loads["torchcodec"] else None
            more, facts = examine(opened, Decoders(loads["torchcodec"], loads["dali"], usable), limit_s, every)
            findings += more
        elif opened is not None:
            findings.append(opened)
    return DoctorReport(tuple(findings), tuple(subject.gpus), software.versions(subject), subject.limits._asdict(), facts)


def open_dataset(uri: str | os.PathLike[str], **options: Any) -> Dataset | Finding:
    """Open a dataset. Return the dataset, or a finding if it cannot be opened.

    Args:
        uri: Address of the dataset.
        options: Other arguments of `Dataset`.

    Raises:
        ValueError: If an argument does not fit the address.
    """
    try:
        return Dataset(uri, **options)
    except DaliStreamError as error:
        return _unreadable(error)


def _unreadable(error: DaliStreamError) -> Finding:
    """Return the finding for a dataset that cannot be opened or reached."""
    if isinstance(error, StorageError):
        remedy = "check what the message names: the address, the network or the credentials"
        return Finding("dataset", "storage", PROBLEM, str(error), remedy)
    return Finding("dataset", "metadata", PROBLEM, str(error), "repair what the message names, or copy the dataset again")


def _ask(limit_s: float, cache_dir: str | os.PathLike[str] | None) -> Machine:
    """Ask all questions."""
    with ThreadPoolExecutor(len(_QUESTIONS)) as pool:
        groups = pool.map(lambda questions: zip(questions, call(questions, limit_s).answers, strict=True), _QUESTIONS)
        known = {question.__name__: answer for group in groups for question, answer in group}
    return Machine(gpu.read_gpus(known["driver"], known["nvdec"]), known, cache_dir)


def examine(
    dataset: Dataset, decoders: Decoders, limit_s: float, deep: Deep | None = None
) -> tuple[list[Finding], dict[str, Any]]:
    """Run all checks of a dataset, and decode frames.

    Args:
        dataset: Dataset to check.
        decoders: Decoders that load on this machine.
        limit_s: Time limit of a decoder for one frame of each camera, in seconds.
        deep: Decoder of all frames. Default: None, which checks only a part of a large dataset.

    Returns:
        Findings, and the facts for the report.
    """
    results: dict[str, Result] = {}
    cameras: dict[str, Any] = {}
    facts = {
        "uri": dataset.uri,
        "address": dataset.store.address,
        "episodes": dataset.num_episodes,
        "frames": dataset.num_frames,
        "fps": dataset.fps,
        "cameras": cameras,
    }
    subject = Rows(dataset, deep is not None)
    try:
        results.update(run_checks(CHECKS["dataset"], subject))  # results before an error are kept
        videos = [Camera(key, subject, decoders, deep) for key in dataset.videos]
        for each in videos:
            each.run(CHECKS["camera"])
    except StorageError as error:
        return [*as_findings("dataset", results.items()), _unreadable(error)], facts
    decoded = call_by_name({each.key: each.decodes for each in videos}, limit_s)
    speeds = call_by_name({each.key: each.speeds for each in videos}, limit_s)
    for key in dataset.images:
        height, width = dataset.features[key].frame_size
        results |= _of_camera(key, check_images(dataset, key, deep))
        cameras[key] = {"kind": "image", "height": height, "width": width}
    for each in videos:
        each.results |= camera.check_frame(each, decoded[each.key])
        if deep:
            each.results["all frames"] = deep.result(each.key)
        each.results |= camera.check_speeds(each, speeds[each.key])
        results |= _of_camera(each.key, each.results)
        cameras[each.key] = each.facts
    return as_findings("dataset", results.items()), facts


def refusal(dataset: Dataset) -> str:
    """Return why a Loader would refuse an episode of a dataset, or "" if it reads them all. No frame is decoded."""
    subject, nothing = Rows(dataset, deep=True), Decoders(torchcodec=False, dali=False, gpus={})
    results = [rows.check_rows(subject), rows.check_names(subject)]
    for key in dataset.videos:
        each = Camera(key, subject, nothing, None)
        results += [*each.results.values(), camera.check_timestamps(each)]
    return next((text for status, text, _ in results if status == PROBLEM), "")


def _of_camera(key: str, results: Mapping[str, Result]) -> dict[str, Result]:
    return {f"{key} {name}".rstrip(): result for name, result in results.items()}
