"""`doctor`: asks libraries in processes of their own, and turns their answers into findings."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from dali_stream.dataset import Dataset
from dali_stream.tools.doctor import answers, dataset, gpu, machine, software
from dali_stream.tools.doctor.frames import Decoders, Deep, Progress
from dali_stream.tools.doctor.report import Finding, Report
from dali_stream.tools.isolated import Answer, call

LIMIT_S = 120.0  # per process; a first import of torch from a network file system takes a minute


def doctor(
    uri: str | os.PathLike[str] | None = None,
    *,
    cache_dir: str | os.PathLike[str] | None = None,
    limit_s: float = LIMIT_S,
    deep: bool = False,
    progress: Progress = lambda done, total: None,
    **options: Any,
) -> Report:
    """Examines this machine, and optionally a dataset. Whatever is wrong with them becomes a finding, not an exception.

    Args:
        uri: a dataset, as for `Dataset`; None: the machine only.
        cache_dir: as for `Dataset`; checks its disk.
        limit_s: seconds for a library to load, or for a decoder to decode, before it counts as hanging.
        deep: check all files and rows, and decode every frame of the selected cameras and episodes. Otherwise one frame of
            each camera is decoded, and up to 1000 episodes and files are checked, or 32 of remote data.
        progress: called as (frames decoded, frames in all), from several threads, if `deep`.
        options: further arguments of `Dataset`: `revision`, `data_files_root`, `storage_options`, `cameras`, `episodes`.

    Returns:
        Findings, each with a status and a remedy, and the facts they are based on.

    Raises:
        ValueError: an argument does not fit the address.
    """
    opened = None if uri is None else dataset.opened(uri, cache_dir=cache_dir, **options)  # checks the arguments
    libraries = (("driver", "nvdec"), ("dali",), ("torch", "torchcodec"))
    with contextlib.closing(opened) if isinstance(opened, Dataset) else contextlib.nullcontext():
        with ThreadPoolExecutor() as pool:
            answered = pool.map(functools.partial(_answers, limit_s), libraries)
            driver, nvdec, dali, torch, torchcodec = (answer for group in answered for answer in group)
        ffmpeg = _answers(limit_s, ("ffmpeg",))[0] if torchcodec.error else Answer({})
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
    return Report(tuple(findings), tuple(gpus), versions, facts, seen)


def _answers(limit_s: float, names: Sequence[str]) -> list[Answer]:
    """What functions of `answers` return."""
    return call([(str(answers.__file__), name, {}) for name in names], limit_s).answers
