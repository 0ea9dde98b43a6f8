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
from dali_stream.tools.diagnosis.machine import Decoders, Machine
from dali_stream.tools.diagnosis.report import OK, PROBLEM, DoctorReport, Finding
from dali_stream.tools.diagnosis.rows import Rows
from dali_stream.tools.isolated import call

# The checks of datasets and cameras, in the order of the report. To add one, write a function from a context to findings, and
# add a line here.
DATASET_CHECKS: Sequence[Callable[[Rows], list[Finding]]] = (
    rows.check_statistics,
    rows.check_files,
    rows.check_rows,
    rows.check_tasks,
)
VIDEO_CHECKS: Sequence[Callable[[Camera], list[Finding]]] = (  # those after the first need a whole file
    camera.check_broken_files,
    camera.check_format,
    camera.check_routes,
    camera.check_timestamps,
    camera.check_frame,
)
# Each group runs in one process. After a crash or hang, the remaining questions of the group are skipped.
_QUESTIONS = ((answers.driver, answers.nvdec), (answers.dali,), (answers.torch, answers.torchcodec))


def doctor(
    uri: str | os.PathLike[str] | None = None,
    *,
    limit_s: float = 120.0,
    deep: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
    **options: Any,
) -> DoctorReport:
    """Examine this machine, and optionally a dataset. Errors become findings instead of exceptions.

    Args:
        uri: Address of a dataset, or of a mixture file (`.yaml`, `.yml` or `.json`), whose datasets are examined one after the
            other. Default: None, which examines only the machine.
        limit_s: Time limit in seconds. A decoder that takes longer, or a library that takes longer to load, counts as hanging.
            The first import of torch from a network file system can take a minute. Default: 120.
        deep: Whether to check all files and rows, and to read every frame of the selected cameras and episodes. Otherwise one
            frame of each camera is decoded, and at most 1000 episodes and files are checked, or 32 of remote data. Default:
            False.
        progress: Function that is called with (batches read, number of batches) of each dataset, if `deep`.
        options: Further arguments of `Dataset`, such as `cache_dir`, `revision`, `storage_options`, `cameras` and `episodes`.
            They apply to each dataset of a mixture.

    Returns:
        Findings, each with a status, and what each GPU decodes.

    Raises:
        ValueError: If an argument does not fit the address, or if the mixture file cannot be read.
    """
    if uri is None and (deep or options):
        given = ", ".join(["deep"] * deep + list(options))
        raise ValueError(f"the address of a dataset must be given with {given}, got none")
    mixture = mixture_file.read(uri, options) if uri is not None and mixture_file.is_mixture_file(uri) else None
    parts = mixture["datasets"] if mixture else {} if uri is None else {"": {"uri": uri, **options}}
    opened, datasets = dict[str, Dataset | Finding](), dict[str, Dataset]()
    with contextlib.ExitStack() as stack:
        for name, arguments in parts.items():  # first, so that an invalid argument fails before the slow questions
            opened[name] = found = open_dataset(name=name, **arguments)
            if isinstance(found, Dataset):
                datasets[name] = found
                stack.callback(found.close)
        this_machine = _ask(limit_s)
        checks = (machine.check_driver, machine.check_gpus, machine.check_software)
        findings = [finding for check in checks for finding in check(this_machine)]
        decoders = this_machine.decoders
        every = progress if deep and decoders.torchcodec else None
        for name, dataset in opened.items():
            own = [dataset] if isinstance(dataset, Finding) else examine(dataset, decoders, limit_s, every)
            findings += [replace(finding, name=f"{name}: {finding.name}") for finding in own] if mixture else own
        if mixture and len(datasets) == len(opened):  # otherwise, a finding says why a dataset cannot be opened
            findings.append(check_mixture(mixture, datasets))
    return DoctorReport(tuple(findings), tuple(this_machine.gpus))


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


def _ask(limit_s: float) -> Machine:
    """Ask all questions."""
    with ThreadPoolExecutor(len(_QUESTIONS)) as pool:
        groups = pool.map(lambda questions: zip(questions, call(questions, limit_s).answers, strict=True), _QUESTIONS)
        known = {question.__name__: answer for group in groups for question, answer in group}
    return Machine(machine.read_gpus(known["driver"], known["nvdec"]), known)


def examine(
    dataset: Dataset, decoders: Decoders, limit_s: float, deep: Callable[[int, int], None] | None = None
) -> list[Finding]:
    """Run all checks of a dataset, and decode frames.

    Args:
        dataset: Dataset to check.
        decoders: Decoders that load on this machine.
        limit_s: Time limit of all decoders of a camera together, in seconds.
        deep: Function that is called with (batches read, number of batches) while all frames are read. Default: None, which
            checks only a part of a large dataset.
    """
    findings: list[Finding] = []
    subject = Rows(dataset, deep is not None)
    for check in DATASET_CHECKS:
        try:
            findings += check(subject)
        except StorageError as error:
            return [*findings, Finding("dataset", "storage", PROBLEM, str(error))]
        except DaliStreamError as error:
            findings.append(Finding("dataset", check.__name__.removeprefix("check_"), PROBLEM, str(error)))
    findings += [frames.check_images(key, dataset) for key in dataset.images]
    for key in dataset.videos:
        video = Camera(key, subject, decoders)
        video.decode(limit_s)
        findings += _examine_video(video)
    if deep:
        findings.append(frames.check_all_frames(dataset, deep))
    return findings


def _examine_video(video: Camera) -> Iterator[Finding]:
    """Run the checks of a video camera. If its first whole file turns out to be damaged, the checks end with a finding."""
    try:
        for check in VIDEO_CHECKS if video.tables else VIDEO_CHECKS[:1]:
            yield from check(video)
    except DaliStreamError as error:
        yield video.finding("file", PROBLEM, camera.located(video.dataset.data_store, video.tables[0].path, error))


def check_mixture(arguments: Mapping[str, Any], datasets: Mapping[str, Dataset]) -> Finding:
    """Check that datasets can be mixed.

    Args:
        arguments: Arguments of the `Mixture` by name, as the mixture file has them.
        datasets: Its datasets by name.
    """
    try:
        mixture = Mixture(**{**arguments, "datasets": datasets})
    except (DaliStreamError, ValueError, TypeError) as error:
        return Finding("dataset", "mixture", PROBLEM, str(error), "correct the mixture file as the message says")
    text = f"{counted(len(datasets), 'dataset')}, {counted(len(mixture), 'sample')} an epoch"
    return Finding("dataset", "mixture", OK, text)


def refusal(dataset: Dataset) -> str:
    """Return why a Loader would refuse an episode of a dataset, or "" if it reads them all. No frame is decoded.

    Raises:
        DaliStreamError: If metadata or files cannot be read.
    """
    subject, nothing = Rows(dataset, deep=True), Decoders(torchcodec=False, dali=False, gpus={})
    findings = [*rows.check_rows(subject), *rows.check_tasks(subject)]
    for key in dataset.videos:
        video = Camera(key, subject, nothing)
        findings += [*camera.check_broken_files(video), *camera.check_timestamps(video)]
    return next((finding.text for finding in findings if finding.status == PROBLEM), "")
