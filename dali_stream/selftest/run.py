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
from dali_stream.video.capability import capability, gpus
from dali_stream.video.dali import COLOUR_TOLERANCE
from dali_stream.video.route import DALI_ON_CPU

GOPS = (1, 2, 12, 30)
SIZE = (240, 320)
SIZES = ((360, 640), (242, 326))  # coded as 368 rows, and as 256 × 336
FAST = (480, 640), 2  # size and GOP of the videos for speed: LeRobot's own, mostly
_GROWTH = 1.1, 64 << 20  # of memory while soaking: a tenth, and what allocators keep
Progress = Callable[[str, int, int], None]


def selftest(
    device: str = "auto",
    *,
    gops: Sequence[int] = GOPS,
    soak_s: float = 30.0,
    speed_s: float = 1.0,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Tries DALI's video decoder on this machine.

    Args:
        device: "auto", the GPU if there is one; "cuda:1"; "cpu": the test itself, on the codecs that DALI decodes there.
        gops: distances of key frames.
        soak_s: seconds of streaming at the end.
        speed_s: seconds per measurement of speed.
        progress: called as (what, done, total).

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
        reason = "no GPU that torch can use was found, so NVDEC was not tried; `dali-stream doctor` says what is missing"
        return {"status": "not run", "reason": reason, "problems": []}
    named, started = "cpu" if gpu is None else f"cuda:{gpu}", time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="dali_stream-selftest-") as folder:
        run = _Run(Path(folder), gpu, named, tuple(gops), progress)
        run.write()
        identity = run.identity()
        report = {"identity": identity, "loader": run.loader(), "speed": run.speed(speed_s), "soak": run.soak(soak_s)}
    problems = run.problems(report)
    return {
        "status": "failed" if problems else "passed",
        "problems": problems,
        "device": named,
        "gpu": None if gpu is None else dataclasses.asdict(gpus()[gpu]),
        "codecs": run.codecs,
        "engines": {codec: capability(gpu, codec, "420", 8).engines for codec in run.codecs} if gpu is not None else {},
        **report,
        "tolerance": COLOUR_TOLERANCE,
        "versions": environment.versions(),
        "machine": environment.machine(named),
        "date": time.strftime("%Y-%m-%d"),
        "seconds": time.perf_counter() - started,
    }


class _Run:
    """The steps, and the folders of videos that they share."""

    def __init__(self, root: Path, gpu: int | None, device: str, gops: tuple[int, ...], progress: Progress | None) -> None:
        self._root, self._gpu, self._device, self._progress = root, gpu, device, progress
        self.codecs = {codec: _why_not(gpu, codec) for codec in CODECS}
        self._tried = [codec for codec, reason in self.codecs.items() if not reason]
        self._gops = {codec: [gop for gop in gops if gop >= CODECS[codec].min_gop] for codec in self._tried}
        self._longest: dict[str, str] = {}  # per codec, the folder with the longest GOP that the loader gives to DALI

    def write(self) -> None:
        """Writes all videos."""
        wanted = [(codec, gop, SIZE) for codec in self._tried for gop in self._gops[codec]]
        wanted += [(codec, FAST[1], size) for codec in self._tried for size in (*SIZES, FAST[0])]
        wanted += [] if self._gpu is None or "av1" in self._tried else [("av1", 2, SIZE)]
        jobs = [{"folder": self._folder(*w), "codec": w[0], "gop": w[1], "size": w[2]} for w in wanted]
        failed = [
            f"{job['codec']}: {made['failed']}" for job, made in zip(jobs, self._each("write", jobs), strict=True) if made
        ]
        if failed:
            raise RuntimeError(f"the videos of the self-test cannot be written: {failed[0]}")

    def identity(self) -> list[dict[str, Any]]:
        """A row per codec, GOP (or "mixed sizes") and shape of request."""
        cases = [(codec, str(gop), [self._folder(codec, gop, SIZE)]) for codec in self._tried for gop in self._gops[codec]]
        cases += [(codec, "mixed sizes", [self._folder(codec, FAST[1], s) for s in (*SIZES, FAST[0])]) for codec in self._tried]
        rows = []
        found = self._each("identity", [{"folders": folders, "gpu": self._gpu} for _, _, folders in cases])
        for (codec, gop, folders), result in zip(cases, found, strict=True):
            shapes = result.get("shapes", {"": {"pictures": 0, "wrong": 0, "mean_error": None, "failed": result.get("failed")}})
            refused = result.get("refused", "")
            rows += [{"codec": codec, "gop": gop, "shape": s, "refused": refused, **row} for s, row in shapes.items()]
            if len(folders) == 1 and not refused:
                self._longest[codec] = folders[0]
        return rows

    def loader(self) -> list[dict[str, Any]]:
        """Two epochs of each codec through the Loader on the DALI route."""
        jobs = [{"folder": f, "device": self._device, "decode": "dali", "seconds": 0} for f in self._longest.values()]
        found = self._each("soak", jobs)
        return [{"codec": codec, **result} for codec, result in zip(self._longest, found, strict=True)]

    def speed(self, seconds: float) -> list[dict[str, Any]]:
        """A row per codec and setting, and one of torchcodec."""
        cores, rows = process.cores(), []
        threads = sorted({min(4, cores), min(8, cores), cores})
        settings = [(clip, t, ahead) for ahead in (1, 2) for t in threads for clip in (1, 4, 16)]
        for codec in self._tried:
            folder = self._folder(codec, FAST[1], FAST[0])
            [dali] = self._each("speed", [{"folder": folder, "gpu": self._gpu, "settings": settings, "seconds": seconds}])
            [cpu] = self._each("torchcodec", [{"folder": folder, "threads": cores, "seconds": seconds}])
            rows += [{"codec": codec, "decoder": "dali", **row} for row in dali.get("rows", [dali])]
            rows.append({"codec": codec, "decoder": "torchcodec", "threads": cores, **cpu})
        return rows

    def soak(self, seconds: float) -> dict[str, Any]:
        """The Loader for a while. On a GPU with two cameras of different codecs, each on the route that "auto" gives it."""
        if not self._longest:
            return {"failed": "there is no codec that the loader gives to DALI here"}
        folder, decode = next(iter(self._longest.values())), "dali"
        if self._gpu is not None:
            mixed, decode = str(self._root / "mixed"), "auto"
            self._each("mix", [{"folder": mixed, "top": folder, "side": self._folder("av1", 2, SIZE)}])
            folder = mixed
        [result] = self._each("soak", [{"folder": folder, "device": self._device, "decode": decode, "seconds": seconds}])
        return result

    def problems(self, report: dict[str, Any]) -> list[str]:
        """What failed, a sentence each."""
        found = []
        for row in report["identity"]:
            if wrong := "" if row["refused"] else _wrong(row):
                found.append(f"{row['codec']}, GOP {row['gop']}, {row['shape']}: {wrong}")
        for row in report["loader"]:
            if wrong := _wrong_epochs(row, {"dali"}):
                found.append(f"{row['codec']} through the Loader: {wrong}")
        found += [f"speed of {row['codec']}: {row['failed']}" for row in report["speed"] if row.get("failed")]
        if wrong := _wrong_epochs(report["soak"], {"dali", "torchcodec"}):
            found.append(f"soak: {wrong}")
        return found

    def _folder(self, codec: str, gop: int, size: tuple[int, int]) -> str:
        return str(self._root / f"{codec}-{gop}-{size[0]}x{size[1]}")

    def _each(self, name: str, jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Runs a step per job, some at a time; measurements of speed are given one by one."""
        results, done = [], 0
        with ThreadPoolExecutor(max(1, min(4, process.cores() // 2))) as pool:
            for result in pool.map(lambda job: step.run(name, **job), jobs):
                results.append(result)
                done += 1
                if self._progress is not None:
                    self._progress(name, done, len(jobs))
        return results


def _why_not(gpu: int | None, codec: str) -> str:
    if gpu is not None:
        return capability(gpu, codec, "420", 8).refusal(*SIZE)
    return "" if codec in DALI_ON_CPU else f"DALI decodes {', '.join(DALI_ON_CPU)} on a CPU"


def _wrong(row: dict[str, Any]) -> str:
    if row["failed"]:
        return str(row["failed"])
    if row["wrong"]:
        return f"{row['wrong']} of {row['pictures']} pictures are of another frame"
    if row["mean_error"] is None or row["mean_error"] > COLOUR_TOLERANCE:
        return f"the pictures differ from FFmpeg's by {row['mean_error']} on average, and {COLOUR_TOLERANCE} is tolerated"
    return ""


def _wrong_epochs(row: dict[str, Any], routes: set[str]) -> str:
    if row.get("failed"):
        return str(row["failed"])
    if row["wrong"]:
        return f"{row['wrong']} of {row['pictures']} pictures are of another frame"
    if row["route_changes"] or not set(row["routes"].values()) <= routes:
        return f"a camera left the DALI route: {row['routes']}"
    for kind in ("memory", "gpu_memory"):
        used = row[kind]
        if used and used["first"] and used["last"] > used["first"] * _GROWTH[0] + _GROWTH[1]:
            return f"{kind} grew from {used['first']} to {used['last']} bytes in {row['epochs']} epochs"
    return ""
