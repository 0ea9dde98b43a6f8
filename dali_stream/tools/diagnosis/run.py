"""List of all checks of `doctor`, and the functions that run them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from dali_stream.dataset import Dataset
from dali_stream.errors import DaliStreamError, StorageError, prefixed
from dali_stream.lerobot import mixture_file
from dali_stream.tools.diagnosis import answers, frames, gpu, machine, rows, software, video
from dali_stream.tools.diagnosis.camera import Camera, decode_frames
from dali_stream.tools.diagnosis.frames import Decoders, Deep
from dali_stream.tools.diagnosis.looks import broken
from dali_stream.tools.diagnosis.machine import Machine
from dali_stream.tools.diagnosis.mixed import check_mixture
from dali_stream.tools.diagnosis.report import PROBLEM, Check, DoctorReport, Finding, run_checks
from dali_stream.tools.diagnosis.rows import Rows
from dali_stream.tools.isolated import call

# The checks, in the order of the report. To add one, write a function from a context to findings, and add a line here.
MACHINE_CHECKS: Sequence[Check[Machine]] = (
    gpu.check_driver,
    gpu.check_gpus,
    software.check_python,
    software.check_dali,
    software.check_torch,
    software.check_torchcodec,
    software.check_ffmpeg_program,
    machine.check_container,
    machine.check_cores,
    machine.check_memory,
    machine.check_shared_memory,
    machine.check_disk,
)
DATASET_CHECKS: Sequence[Check[Rows]] = (
    rows.check_metadata,
    rows.check_statistics,
    rows.check_files,
    rows.check_rows,
    rows.check_actions,
    rows.check_tasks,
)
FILE_CHECKS: Sequence[Check[Camera]] = (video.check_broken_files, video.check_all_frames, video.check_pyav)
VIDEO_CHECKS: Sequence[Check[Camera]] = (  # if at least one file is whole
    video.check_format,
    video.check_structure,
    video.check_routes,
    video.check_remarks,
    video.check_timestamps,
    video.check_ends,
    video.check_gops,
    video.check_frame,
    video.check_speeds,
)
# Each group runs in one process. After a crash or hang, the remaining questions of the group are skipped.
_QUESTIONS = ((answers.driver, answers.nvdec), (answers.dali,), (answers.torch, answers.torchcodec))


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
        uri: Address of a dataset, or of a mixture file (`.yaml`, `.yml` or `.json`), whose datasets are examined one after the
            other. Default: None, which examines only the machine.
        cache_dir: Folder of the cache, as in `Dataset`. Its disk is checked.
        limit_s: Time limit in seconds. A decoder that takes longer, or a library that takes longer to load, counts as hanging.
            The first import of torch from a network file system can take a minute. Default: 120.
        deep: Whether to check all files and rows, and to decode every frame of the selected cameras and episodes. Otherwise one
            frame of each camera is decoded, and at most 1000 episodes and files are checked, or 32 of remote data. Default:
            False.
        progress: Function that is called with (frames decoded, number of frames) of each dataset, if `deep`.
        options: Further arguments of `Dataset`: `revision`, `data_files_root`, `storage_options`, `cameras`, `episodes`,
            `clock`, `tolerance_s`. They apply to each dataset of a mixture.

    Returns:
        Findings, each with a status and a remedy, and the facts on which they are based.

    Raises:
        ValueError: If an argument does not fit the address, or if the mixture file cannot be read.
    """
    if cache_dir is not None:
        options["cache_dir"] = cache_dir
    mixture = mixture_file.read(uri, options) if uri is not None and mixture_file.is_mixture_file(uri) else None
    parts = mixture["datasets"] if mixture else {} if uri is None else {"": {"uri": uri, **options}}
    opened, datasets = dict[str, Dataset | Finding](), dict[str, Dataset]()
    with contextlib.ExitStack() as stack:
        for name, arguments in parts.items():  # first, so that an invalid argument fails before the slow questions
            opened[name] = found = open_dataset(name=name, **arguments)
            if isinstance(found, Dataset):
                datasets[name] = found
                stack.callback(found.close)
        this_machine = _ask(limit_s, cache_dir)
        findings = list(run_checks(MACHINE_CHECKS, this_machine))
        decoders = _decoders(this_machine)
        facts: dict[str, Any] = dict.fromkeys(opened)
        for name, dataset in opened.items():
            if isinstance(dataset, Finding):
                own = [dataset]
            else:
                every = Deep(dataset, progress) if deep and decoders.torchcodec else None
                own, facts[name] = examine(dataset, decoders, limit_s, every)
            findings += [replace(finding, name=f"{name}: {finding.name}") for finding in own] if mixture else own
        if mixture:
            findings += check_mixture(mixture, datasets)
    return DoctorReport(
        findings=tuple(findings),
        gpus=tuple(this_machine.gpus),
        software=software.versions(this_machine),
        machine=this_machine.limits._asdict(),
        dataset={"uri": os.fspath(uri), "datasets": facts} if uri is not None and mixture else facts.get(""),
    )


def open_dataset(uri: str | os.PathLike[str], name: str = "", **options: Any) -> Dataset | Finding:
    """Open a dataset. Return the dataset, or a finding if it cannot be opened.

    Args:
        uri: Address of the dataset.
        name: Name of the dataset in its mixture. Default: "", for the only dataset.
        options: Other arguments of `Dataset`.

    Raises:
        ValueError: If an argument does not fit the address.
    """
    try:
        return Dataset(uri, **options)
    except DaliStreamError as error:
        return _unreadable(error)
    except (ValueError, TypeError) as error:
        if not name:
            raise
        raise prefixed(f"dataset {name!r}", error) from error


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


def _decoders(this_machine: Machine) -> Decoders:
    loads = {name: not answer.error and "failed" not in answer.value for name, answer in this_machine.answers.items()}
    gpus = {name: first["index"] for name, first in gpu.group_equal(this_machine.gpus).items() if not first["error"]}
    return Decoders(loads["torchcodec"], loads["dali"], gpus)


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
    findings: list[Finding] = []
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
        for finding in run_checks(DATASET_CHECKS, subject):
            findings.append(finding)
    except StorageError as error:  # the findings before it are kept
        return [*findings, _unreadable(error)], facts
    for key in dataset.images:
        findings += frames.check_images(key, dataset, deep)
        height, width = dataset.features[key].frame_size
        cameras[key] = {"kind": "image", "height": height, "width": width}
    videos = [Camera(key, subject, decoders, deep) for key in dataset.videos]
    decode_frames(videos, limit_s)
    for camera in videos:
        findings += _examine_video(camera)
        cameras[camera.key] = video.facts(camera)
    return findings, facts


def _examine_video(camera: Camera) -> Iterator[Finding]:
    """Run the checks of a video camera. If its first whole file turns out to be damaged, the checks end with a finding."""
    yield from run_checks(FILE_CHECKS, camera)
    if camera.tables:
        try:
            yield from run_checks(VIDEO_CHECKS, camera)
        except DaliStreamError as error:
            yield broken(f"{camera.key} file", camera.dataset.data_store, camera.tables[0].path, error)


def refusal(dataset: Dataset) -> str:
    """Return why a Loader would refuse an episode of a dataset, or "" if it reads them all. No frame is decoded."""
    subject, nothing = Rows(dataset, deep=True), Decoders(torchcodec=False, dali=False, gpus={})
    findings = list(run_checks((rows.check_rows, rows.check_tasks), subject))
    for key in dataset.videos:
        camera = Camera(key, subject, nothing, None)
        findings += run_checks((video.check_broken_files, video.check_timestamps), camera)
    return next((finding.text for finding in findings if finding.status == PROBLEM), "")
