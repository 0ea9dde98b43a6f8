"""The whole self-test: what is tried on this machine, and whether it passed."""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from dali_stream import environment, process
from dali_stream.demo.encode import CODECS
from dali_stream.selftest import step
from dali_stream.video.capability import DriverError, capability, gpus
from dali_stream.video.dali import COLOUR_TOLERANCE
from dali_stream.video.route import DALI_ON_CPU

GOPS = (1, 2, 12, 30)
SIZE = (240, 320)
SIZES = ((360, 640), (242, 326))  # coded as 368 rows, and as 256 × 336
FAST, FAST_GOP = (480, 640), 2  # the videos for speed: LeRobot's own, mostly
_PADDED = SIZES[0]  # and one whose coded size is another than its display size, which decoders are looked up by
_GROWTH = 1.1, 64 << 20  # of memory while soaking: a tenth, and what allocators keep
_LIMIT_S = 90.0  # for a step that takes seconds
Progress = Callable[[str, int, int], None]
Report = dict[str, Any]


def selftest(
    device: str = "auto",
    *,
    gops: Sequence[int] = GOPS,
    soak_s: float = 30.0,
    speed_s: float = 1.0,
    progress: Progress | None = None,
    keep: Callable[[Report], None] | None = None,
) -> Report:
    """Tries DALI's video decoder on this machine.

    Args:
        device: "auto", the GPU if there is one; "cuda:1"; "cpu": the test itself, on the codecs that DALI decodes there.
        gops: distances of key frames.
        soak_s: seconds of streaming.
        speed_s: seconds per measurement of speed.
        progress: called as (what, done, total).
        keep: gets the report after each stage, with the status "unfinished" until it is whole.

    Returns:
        What JSON can hold. `status` is "passed", "failed" or, without a GPU, "not run"; `problems` say what failed.
        `codecs` {codec: why it is not tried, or empty}; `engines` of NVDEC per codec; `identity`, a row per codec, GOP and
        shape of request: where `refused` says why the loader would not give NVDEC such a video, the row is for information
        and fails nothing; `loader`, `soak`, `speed`: see the modules.

    Raises:
        ValueError: a GPU is asked for that is not there.
    """
    gpu = process.gpu(device)
    if gpu is None and device != "cpu":
        return _without_gpu()
    named, started = "cpu" if gpu is None else f"cuda:{gpu}", time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="dali_stream-selftest-") as folder:
        run = _Run(Path(folder), gpu, named, tuple(gops), progress)
        run.write()
        report: Report = {
            "status": "unfinished",
            "problems": [],
            "device": named,
            "gpu": None if gpu is None else dataclasses.asdict(gpus()[gpu]),
            "codecs": run.codecs,
            "engines": {} if gpu is None else {codec: capability(gpu, codec, "420", 8).engines for codec in run.codecs},
            "tolerance": COLOUR_TOLERANCE,
            **environment.ran_on(named),
        }
        stages = {
            "identity": run.identity,
            "loader": run.loader,
            "soak": lambda: run.soak(soak_s),
            "speed": lambda: run.speed(speed_s),
        }
        for name, stage in stages.items():
            report |= {name: stage(), "seconds": time.perf_counter() - started}
            report["problems"] = run.problems(report)
            if name == list(stages)[-1]:
                report["status"] = "failed" if report["problems"] else "passed"
            if keep is not None:
                keep(report)
    return report


def _without_gpu() -> Report:
    reason = "no GPU that torch can use was found, so NVDEC was not tried; `dali-stream doctor` says what is missing"
    try:
        there = gpus()
    except DriverError:
        there = ()
    if there:  # a GPU that cannot be used is no machine without one
        return {"status": "failed", "problems": [f"the driver has {there[0].name}, and {reason}"], "reason": reason}
    return {"status": "not run", "problems": [], "reason": reason}


class _Run:
    """The stages, and the folders of videos that they share."""

    def __init__(self, root: Path, gpu: int | None, device: str, gops: tuple[int, ...], progress: Progress | None) -> None:
        self._root, self._gpu, self._device, self._progress = root, gpu, device, progress
        self.codecs = {codec: _why_not(gpu, codec) for codec in CODECS}
        self._gops = {codec: [gop for gop in gops if gop >= CODECS[codec].min_gop] for codec in CODECS}
        self._unwritten: dict[str, str] = {}
        self._longest: dict[str, str] = {}  # per codec, the folder with the longest GOP that the loader gives to DALI

    def _tried(self) -> list[str]:
        return [codec for codec, reason in self.codecs.items() if not reason]

    def write(self) -> None:
        """Writes all videos. A codec that FFmpeg cannot encode here is left out."""
        tried = self._tried()
        wanted = [(codec, gop, SIZE) for codec in tried for gop in self._gops[codec]]
        wanted += [(codec, FAST_GOP, size) for codec in tried for size in (*SIZES, FAST)]
        wanted += [] if self._gpu is None or "av1" in tried else [("av1", FAST_GOP, SIZE)]
        jobs: list[Report] = [{"folder": self._folder(*w), "codec": w[0], "gop": w[1], "size": w[2]} for w in wanted]
        for job, made in zip(jobs, self._each("write", jobs), strict=True):
            if made.get("failed"):
                self._unwritten.setdefault(job["codec"], f"its videos cannot be written: {made['failed']}")
        self.codecs |= {codec: self._unwritten.get(codec, "") for codec in tried}

    def identity(self) -> list[Report]:
        """A row per codec, GOP (or "mixed sizes") and shape of request."""
        cases = [(codec, str(gop), [self._folder(codec, gop, SIZE)]) for codec in self._tried() for gop in self._gops[codec]]
        sizes = (*SIZES, FAST)
        cases += [(codec, "mixed sizes", [self._folder(codec, FAST_GOP, size) for size in sizes]) for codec in self._tried()]
        rows = []
        found = self._each("identity", [{"folders": folders, "gpu": self._gpu} for _, _, folders in cases])
        for (codec, gop, folders), result in zip(cases, found, strict=True):
            shapes = result.get("shapes", {"": {"pictures": 0, "wrong": 0, "mean_error": None, "failed": result.get("failed")}})
            refused = result.get("refused", "")
            rows += [{"codec": codec, "gop": gop, "shape": s, "refused": refused, **row} for s, row in shapes.items()]
            if len(folders) == 1 and not refused:
                self._longest[codec] = folders[0]
        return rows

    def loader(self) -> list[Report]:
        """Two epochs of each codec through the Loader on the DALI route."""
        jobs = [{"folder": f, "device": self._device, "decode": "dali", "seconds": 0} for f in self._longest.values()]
        return [{"codec": codec, **result} for codec, result in zip(self._longest, self._each("soak", jobs), strict=True)]

    def soak(self, seconds: float) -> Report:
        """The Loader for a while. On a GPU the second camera is AV1, on the route that "auto" gives it there."""
        if not self._longest:
            return {"failed": "there is no codec that the loader gives to DALI here"}
        folder, decode = next(iter(self._longest.values())), "dali"
        if self._gpu is not None and "av1" not in self._unwritten:
            mixed, decode = str(self._root / "mixed"), "auto"
            self._each("mix", [{"folder": mixed, "top": folder, "side": self._folder("av1", FAST_GOP, SIZE)}])
            folder = mixed
        job = {"folder": folder, "device": self._device, "decode": decode, "seconds": seconds}
        return self._each("soak", [job], limit_s=_LIMIT_S + 2 * seconds)[0]

    def speed(self, seconds: float) -> list[Report]:
        """Per codec and size a row per setting, and one of torchcodec."""
        cores = process.cores()
        settings = [(1, cores, 1), (4, cores, 1), (16, cores, 1), (1, cores, 2), (16, cores, 2), (1, max(cores // 2, 1), 1)]
        limit, rows = _LIMIT_S + 4 * seconds * len(settings), []
        for codec in self._tried():
            for size, tried in ((FAST, settings), (_PADDED, settings[:1])):
                folder, head = self._folder(codec, FAST_GOP, size), {"codec": codec, "size": list(size)}
                job = {"folder": folder, "gpu": self._gpu, "settings": tried, "seconds": seconds}
                [dali] = self._each("speed", [job], limit_s=limit)
                rows += [{**head, "decoder": "dali", **row} for row in dali.get("rows", [dali])]
                rows[-1]["gpu_bytes"] = dali.get("gpu_bytes")
                job = {"folder": folder, "threads": cores, "seconds": seconds}
                [cpu] = self._each("torchcodec", [job], limit_s=limit)
                rows.append({**head, "decoder": "torchcodec", "threads": cores, **cpu})
        return rows

    def problems(self, report: Report) -> list[str]:
        """What failed so far, a sentence each."""
        found = [f"{codec}: {reason}" for codec, reason in self._unwritten.items() if self.codecs[codec] == reason]
        for row in report["identity"]:
            if wrong := "" if row["refused"] else _wrong(row):
                found.append(f"{row['codec']}, GOP {row['gop']}, {row['shape']}: {wrong}")
        for row in report.get("loader", []):
            if wrong := _wrong_epochs(row, cameras=2):
                found.append(f"{row['codec']} through the Loader: {wrong}")
        if "soak" in report and (wrong := _wrong_epochs(report["soak"], cameras=1) or _growth(report["soak"])):
            found.append(f"soak: {wrong}")
        return found + [f"speed of {row['codec']}: {row['failed']}" for row in report.get("speed", []) if row.get("failed")]

    def _folder(self, codec: str, gop: int, size: tuple[int, int]) -> str:
        return str(self._root / f"{codec}-{gop}-{size[0]}x{size[1]}")

    def _each(self, name: str, jobs: list[dict[str, Any]], limit_s: float = _LIMIT_S) -> list[Report]:
        """Runs a step per job: videos and identity some at a time, what measures by itself."""
        at_a_time = max(1, min(4, process.cores() // 2)) if name in ("write", "identity") else 1
        results = []
        with ThreadPoolExecutor(at_a_time) as pool:
            for result in pool.map(lambda job: step.run(name, time_limit_s=limit_s, **job), jobs):
                results.append(result)
                if self._progress is not None:
                    self._progress(name, len(results), len(jobs))
        return results


def _why_not(gpu: int | None, codec: str) -> str:
    if gpu is not None:
        return capability(gpu, codec, "420", 8).refusal(*SIZE)
    return "" if codec in DALI_ON_CPU else f"DALI decodes {', '.join(DALI_ON_CPU)} on a CPU"


def _wrong(row: Report) -> str:
    if row["failed"]:
        return str(row["failed"])
    if row["wrong"]:
        return f"{row['wrong']} of {row['pictures']} pictures are of another frame"
    if row["mean_error"] is None or row["mean_error"] > COLOUR_TOLERANCE:
        return f"the pictures differ from FFmpeg's by {row['mean_error']} on average, and {COLOUR_TOLERANCE} is tolerated"
    return ""


def _wrong_epochs(row: Report, cameras: int) -> str:
    """What is wrong with epochs whose first `cameras` have to be on the DALI route."""
    if row.get("failed"):
        return str(row["failed"])
    if row["wrong"]:
        return f"{row['wrong']} of {row['pictures']} pictures are of another frame"
    if row["route_changes"] or set(list(row["routes"].values())[:cameras]) != {"dali"}:
        return f"a camera is not on the DALI route: {row['routes']}"
    return ""


def _growth(row: Report) -> str:
    for kind in ("memory", "gpu_memory"):
        used = row[kind]
        if used and used["first"] and used["last"] > used["first"] * _GROWTH[0] + _GROWTH[1]:
            return f"{kind} grew from {used['first']} to {used['last']} bytes in {row['epochs']} epochs"
    return ""
