"""`doctor`: asks libraries questions in separate processes, and runs the checks."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from dali_stream.dataset import Dataset
from dali_stream.tools.diagnosis import answers, dataset, gpu, software
from dali_stream.tools.diagnosis.checks import CHECKS, MACHINE
from dali_stream.tools.diagnosis.frames import Decoders, Deep
from dali_stream.tools.diagnosis.machine import Machine
from dali_stream.tools.diagnosis.report import DoctorReport, Finding, as_findings, run_checks
from dali_stream.tools.isolated import Answer, call

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
        uri: Address of a dataset. Default: None, which examines only the machine.
        cache_dir: Folder of the cache, as in `Dataset`. Its disk is checked.
        limit_s: Time limit in seconds. A decoder that takes longer, or a library that takes longer to load, counts as hanging.
            The first import of torch from a network file system can take a minute. Default: 120.
        deep: Whether to check all files and rows, and to decode every frame of the selected cameras and episodes. Otherwise one
            frame of each camera is decoded, and at most 1000 episodes and files are checked, or 32 of remote data. Default:
            False.
        progress: Function that is called from several threads with (frames decoded, number of frames), if `deep`.
        options: Further arguments of `Dataset`: `revision`, `data_files_root`, `storage_options`, `cameras`, `episodes`,
            `clock`, `tolerance_s`.

    Returns:
        Findings, each with a status and a remedy, and the facts on which they are based.

    Raises:
        ValueError: If an argument does not fit the address.
    """
    # The dataset is opened first, so that an invalid argument fails before the slow questions.
    opened = None if uri is None else dataset.opened(uri, cache_dir=cache_dir, **options)
    with contextlib.ExitStack() as stack:
        if isinstance(opened, Dataset):
            stack.enter_context(contextlib.closing(opened))
        subject, nvdec_gpus = _ask(limit_s, cache_dir)
        findings = [finding for area in MACHINE for finding in as_findings(area, run_checks(CHECKS[area], subject))]
        facts = None
        if isinstance(opened, Dataset):
            has_torchcodec = not subject.answers["torchcodec"].error
            decoders = Decoders(has_torchcodec, not subject.answers["dali"].error, nvdec_gpus)
            every = Deep(opened, progress) if deep and has_torchcodec else None
            more, facts = dataset.examine(opened, decoders, limit_s, every)
            findings += more
    if isinstance(opened, Finding):
        findings.append(opened)
    limits = subject.limits._asdict()
    return DoctorReport(tuple(findings), tuple(subject.gpus), software.versions(subject), limits, facts)


def _ask(limit_s: float, cache_dir: str | os.PathLike[str] | None) -> tuple[Machine, dict[str, int]]:
    """Ask all questions. Return the machine, and {name: index} of one GPU of each kind whose NVDEC capabilities are known."""
    with ThreadPoolExecutor(len(_QUESTIONS)) as pool:
        called = list(pool.map(lambda functions: call(functions, limit_s), _QUESTIONS))
    known = {
        function.__name__: answer
        for functions, each in zip(_QUESTIONS, called, strict=True)
        for function, answer in zip(functions, each.answers, strict=True)
    }
    known["ffmpeg"] = call([answers.ffmpeg], limit_s).answers[0] if known["torchcodec"].error else Answer({})
    gpus = gpu.read_gpus(known["driver"], known["nvdec"])
    usable = {name: first["index"] for name, first in gpu.group_equal(gpus).items() if not first["error"]}
    return Machine(gpus, known, cache_dir), usable
