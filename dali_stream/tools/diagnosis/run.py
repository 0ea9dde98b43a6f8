"""`doctor`: asks libraries in processes of their own, and turns their answers into findings."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any

from dali_stream.dataset import Dataset
from dali_stream.tools.diagnosis import answers, dataset, gpu, machine, software
from dali_stream.tools.diagnosis.frames import Decoders, Deep
from dali_stream.tools.diagnosis.report import DoctorReport, Finding
from dali_stream.tools.isolated import Answer, Call, call, calling


def doctor(
    uri: str | os.PathLike[str] | None = None,
    *,
    cache_dir: str | os.PathLike[str] | None = None,
    limit_s: float = 120.0,
    deep: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
    **options: Any,
) -> DoctorReport:
    """Examines this machine, and optionally a dataset. Whatever is wrong with them becomes a finding, not an exception.

    Args:
        uri: a dataset, as for `Dataset`; None: the machine only.
        cache_dir: as for `Dataset`; checks its disk.
        limit_s: Seconds that a library may take to load, or a decoder to decode, before it counts as hanging. A first import
            of torch from a network file system takes a minute.
        deep: check all files and rows, and decode every frame of the selected cameras and episodes. Otherwise one frame of
            each camera is decoded, and up to 1000 episodes and files are checked, or 32 of remote data.
        progress: called as (frames decoded, frames in all), from several threads, if `deep`.
        options: Further arguments of `Dataset`: `revision`, `data_files_root`, `storage_options`, `cameras`, `episodes`,
            `clock`, `tolerance_s`.

    Returns:
        Findings, each with a status and a remedy, and the facts they are based on.

    Raises:
        ValueError: an argument does not fit the address.
    """
    opened = None if uri is None else dataset.opened(uri, cache_dir=cache_dir, **options)  # checks the arguments
    with contextlib.ExitStack() as stack:
        if isinstance(opened, Dataset):
            stack.enter_context(contextlib.closing(opened))
        groups = [
            stack.enter_context(calling(_calls(*names), limit_s))
            for names in (("driver", "nvdec"), ("dali",), ("torch", "torchcodec"))
        ]
        driver, nvdec, dali, torch, torchcodec = (answer for called in groups for answer in called(0).answers)
        ffmpeg = call(_calls("ffmpeg"), limit_s).answers[0] if torchcodec.error else Answer({})
        findings, gpus = gpu.examine(driver, nvdec)
        cuda = tuple(driver.value["cuda"]) if gpus else None
        found, versions = software.examine(software.Asked(dali, torch, torchcodec, ffmpeg, cuda, len(gpus)))
        findings += found
        found, facts = machine.examine(cache_dir, len(gpus))
        findings += found
        seen = None
        if isinstance(opened, Dataset):
            usable = {name: first["index"] for name, first in gpu.alike(gpus).items() if not first["error"]}
            every = Deep(opened, progress) if deep and not torchcodec.error else None
            found, seen = dataset.examine(opened, Decoders(not torchcodec.error, not dali.error, usable), limit_s, every)
            findings += found
    findings += [opened] if isinstance(opened, Finding) else []
    return DoctorReport(tuple(findings), tuple(gpus), versions, facts, seen)


def _calls(*names: str) -> list[Call]:
    """Calls of functions of `answers`."""
    return [(str(answers.__file__), name, {}) for name in names]
