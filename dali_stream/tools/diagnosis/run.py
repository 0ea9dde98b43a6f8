"""List of all checks of `doctor`, and the functions that run them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from dali_stream.dataset import Dataset
from dali_stream.errors import DaliStreamError, StorageError, counted, prefixed
from dali_stream.lerobot import mixture_file
from dali_stream.mixture import Mixture
from dali_stream.tools.diagnosis import answers, camera, frames, machine, rows
from dali_stream.tools.diagnosis.camera import Camera
from dali_stream.tools.diagnosis.frames import Decoders, Deep
from dali_stream.tools.diagnosis.machine import Machine
from dali_stream.tools.diagnosis.report import OK, PROBLEM, WARNING, DoctorReport, Finding
from dali_stream.tools.diagnosis.rows import Rows
from dali_stream.tools.isolated import call
from dali_stream.tools.mixture import repeated_often

# The checks of datasets and cameras, in the order of the report. To add one, write a function from a context to findings, and
# add a line here.
DATASET_CHECKS: Sequence[Callable[[Rows], list[Finding]]] = (
    rows.check_metadata,
    rows.check_statistics,
    rows.check_files,
    rows.check_rows,
    rows.check_actions,
    rows.check_tasks,
)
FILE_CHECKS: Sequence[Callable[[Camera], list[Finding]]] = (
    camera.check_broken_files,
    camera.check_all_frames,
    camera.check_pyav,
)
VIDEO_CHECKS: Sequence[Callable[[Camera], list[Finding]]] = (  # if at least one file is whole
    camera.check_format,
    camera.check_structure,
    camera.check_routes,
    camera.check_remarks,
    camera.check_timestamps,
    camera.check_ends,
    camera.check_frame,
    camera.check_speeds,
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
        Findings, each with a status, and the facts on which they are based.

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
        checks = (machine.check_driver, machine.check_gpus, machine.check_software, machine.check_limits)
        findings = [finding for check in checks for finding in check(this_machine)]
        decoders = _decoders(this_machine)
        facts: dict[str, Any] = dict.fromkeys(opened)
        for name, dataset in opened.items():
            if isinstance(dataset, Finding):
                own = [dataset]
            else:
                every = Deep(dataset, progress) if deep and decoders.torchcodec else None
                own, facts[name] = examine(dataset, decoders, limit_s, every)
            findings += [replace(finding, name=f"{name}: {finding.name}") for finding in own] if mixture else own
        if mixture and len(datasets) == len(opened):  # otherwise, a finding says why a dataset cannot be opened
            findings.append(check_mixture(mixture, datasets))
    return DoctorReport(
        findings=tuple(findings),
        gpus=tuple(this_machine.gpus),
        software=this_machine.versions,
        machine=this_machine.limits,
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
        return Finding("dataset", "storage" if isinstance(error, StorageError) else "metadata", PROBLEM, str(error))
    except (ValueError, TypeError) as error:
        if not name:
            raise
        raise prefixed(f"dataset {name!r}", error) from error


def _ask(limit_s: float, cache_dir: str | os.PathLike[str] | None) -> Machine:
    """Ask all questions."""
    with ThreadPoolExecutor(len(_QUESTIONS)) as pool:
        groups = pool.map(lambda questions: zip(questions, call(questions, limit_s).answers, strict=True), _QUESTIONS)
        known = {question.__name__: answer for group in groups for question, answer in group}
    return Machine(machine.read_gpus(known["driver"], known["nvdec"]), known, cache_dir)


def _decoders(this_machine: Machine) -> Decoders:
    loads = {name: not answer.error and "failed" not in answer.value for name, answer in this_machine.answers.items()}
    gpus = {name: first["index"] for name, first in machine.group_equal(this_machine.gpus).items() if not first["error"]}
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
    for check in DATASET_CHECKS:
        try:
            findings += check(subject)
        except StorageError as error:
            return [*findings, Finding("dataset", "storage", PROBLEM, str(error))], facts
        except DaliStreamError as error:
            findings.append(Finding("dataset", check.__name__.removeprefix("check_"), PROBLEM, str(error)))
    for key in dataset.images:
        findings += frames.check_images(key, dataset, deep)
        height, width = dataset.features[key].frame_size
        cameras[key] = {"kind": "image", "height": height, "width": width}
    videos = [Camera(key, subject, decoders, deep) for key in dataset.videos]
    camera.decode_frames(videos, limit_s)
    for video in videos:
        findings += _examine_video(video)
        cameras[video.key] = camera.facts(video)
    return findings, facts


def _examine_video(video: Camera) -> Iterator[Finding]:
    """Run the checks of a video camera. If its first whole file turns out to be damaged, the checks end with a finding."""
    try:
        for check in (*FILE_CHECKS, *(VIDEO_CHECKS if video.tables else ())):
            yield from check(video)
    except DaliStreamError as error:
        yield video.finding("file", PROBLEM, frames.located(video.dataset.data_store, video.tables[0].path, error))


def check_mixture(arguments: Mapping[str, Any], datasets: Mapping[str, Dataset]) -> Finding:
    """Check that datasets can be mixed, and that an epoch does not repeat the frames of one much more often.

    Args:
        arguments: Arguments of the `Mixture` by name, as the mixture file has them.
        datasets: Its datasets by name.
    """
    try:
        mixture = Mixture(**{**arguments, "datasets": datasets})
    except (DaliStreamError, ValueError, TypeError) as error:
        return Finding("dataset", "mixture", PROBLEM, str(error), "correct the mixture file as the message says")
    text = f"{counted(len(datasets), 'dataset')}, {counted(len(mixture), 'sample')} an epoch"
    if warning := repeated_often(dict(zip(datasets, mixture.shares.passes.tolist(), strict=True))):
        return Finding("dataset", "mixture", WARNING, f"{text}. {warning}", "change the weights, or give repeats instead")
    return Finding("dataset", "mixture", OK, text)


def refusal(dataset: Dataset) -> str:
    """Return why a Loader would refuse an episode of a dataset, or "" if it reads them all. No frame is decoded.

    Raises:
        DaliStreamError: If metadata or files cannot be read.
    """
    subject, nothing = Rows(dataset, deep=True), Decoders(torchcodec=False, dali=False, gpus={})
    findings = [*rows.check_rows(subject), *rows.check_tasks(subject)]
    for key in dataset.videos:
        video = Camera(key, subject, nothing, None)
        findings += [*camera.check_broken_files(video), *camera.check_timestamps(video)]
    return next((finding.text for finding in findings if finding.status == PROBLEM), "")
