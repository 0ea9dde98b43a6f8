"""`selftest`: all stages, each in steps, and the report."""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from dali_stream import process
from dali_stream.decode.capability import DriverError, capability, gpus
from dali_stream.decode.dali import COLOUR_TOLERANCE
from dali_stream.decode.route import DALI_ON_CPU, TORCHCODEC_CUDA
from dali_stream.decode.torchcodec_cuda import unavailable
from dali_stream.demo.encode import CODECS
from dali_stream.tools import environment
from dali_stream.tools.isolated import call
from dali_stream.tools.selftest import cases

IMPORTANT = ("h264", "hevc", "av1", "vp9", "mpeg4")  # codecs, most important first, as are GOPs
GOPS = (2, 12, 30, 1)
SIZE, FAST = (240, 320), (480, 640)  # of most videos, and of those of the speed stage
SIZES = ((368, 640), SIZE, FAST)  # on the same decoders
# Each has the coded size of the one before, in blocks of 16 and of 8: tests a decoder that is reused for another size.
PADDED = ((368, 640), (360, 640), (248, 328), (242, 326))
RESIZED = 224, 224
SHORT = 2  # the GOP of videos of many sizes: LeRobot's own
LIMIT_S = 460.0
_GROWTH = 1.1, 64 << 20  # of memory in the soak stage: 10 %, and a margin for allocators
_STEP_S = 90.0  # the limit of a step that takes seconds
_START_S = 15.0  # what a step needs at most before it measures
_SHARES = {"identity": 0.3, "cases": 0.25, "lockstep": 0.4, "verdict": 0.4, "soak": 0.5, "speed": 1.0}  # of the remaining time
_BUSY_THREADS = 4, 8, 16
EXIT_S = 15.0  # for a process to end after its step has returned
_STEPS = {  # name: (module, function)
    "write": ("videos", "write"),
    "mix": ("videos", "mix"),
    "identity": ("identity", "measure"),
    "speed": ("speed", "measure"),
    "torchcodec": ("speed", "measure_torchcodec"),
    "case": ("cases", "measure"),
    "busy": ("speed", "measure_busy"),
    "lockstep": ("lockstep", "measure"),
    "two loaders": ("lockstep", "measure_two"),
    "soak": ("soak", "measure"),
}
Progress = Callable[[str, int, int], None]
Report = dict[str, Any]


def selftest(
    device: str = "auto",
    *,
    gops: Sequence[int] = GOPS,
    soak_s: float = 30.0,
    speed_s: float = 1.0,
    limit_s: float = LIMIT_S,
    progress: Progress | None = None,
    keep: Callable[[Report], None] | None = None,
) -> Report:
    """Tests DALI's video decoder on this machine, most important parts first.

    Args:
        device: "auto": the GPU, if there is one; "cuda:1"; "cpu": the codecs that DALI decodes there, to test this test.
        gops: distances of keyframes, most important first.
        soak_s: seconds of streaming; each comparison in lockstep takes a third of it.
        speed_s: seconds per speed measurement.
        limit_s: seconds in all. Steps without time are left out, and listed.
        progress: called as (step, done, total).
        keep: called with the report after each stage; its status is "unfinished" until the end.

    Returns:
        A dict for JSON. `status`: "passed", "failed", "unfinished" (no failure, but out of time) or, without a GPU, "not run".
        `problems`: failures; `left_out`: steps without time; `codecs`: {codec: why it is not tested, or empty}; `engines` of
        NVDEC per codec; `identity`: a row per codec, GOP and shape of request, which counts only if `refused`, why the loader
        would not use NVDEC for such a video, is empty; `cases`: such rows for videos that the loader keeps from NVDEC, also of
        torchcodec's decoder; `verdict`: frames/s on a busy GPU in `rows`, and the `ratio` of NVDEC's best to the CPU;
        `lockstep`, `soak`, `speed`: see the modules.

    Raises:
        ValueError: the requested GPU does not exist.
    """
    gpu, started = process.gpu(device), time.perf_counter()
    if gpu is None and device != "cpu":
        return _without_gpu()
    named = "cpu" if gpu is None else f"cuda:{gpu}"
    with tempfile.TemporaryDirectory(prefix="dali_stream-selftest-") as folder:
        run = _Run(Path(folder), gpu, named, tuple(gops), progress)
        report: Report = {
            "status": "unfinished",
            "problems": [],
            "left_out": run.left_out,
            "device": named,
            "gpu": None if gpu is None else dataclasses.asdict(gpus()[gpu]),
            "codecs": run.codecs,
            "engines": {} if gpu is None else {codec: capability(gpu, codec, "420", 8).engines for codec in run.codecs},
            "tolerance": COLOUR_TOLERANCE,
            **environment.ran_on(named),
        }
        stages: dict[str, Callable[[], Any]] = {
            "identity": run.identity,
            "cases": run.cases,
            "lockstep": lambda: run.lockstep(soak_s / 3),
            "verdict": lambda: run.verdict(speed_s),
            "soak": lambda: run.soak(soak_s),
            "speed": lambda: run.speed(speed_s),
        }
        for name, stage in stages.items():
            now = time.perf_counter()
            run.until = now + _SHARES[name] * (started + limit_s - now)
            report |= {name: stage(), "seconds": time.perf_counter() - started}
            report["problems"] = run.problems(report)
            if name == list(stages)[-1]:
                report["status"] = "failed" if report["problems"] else "unfinished" if run.left_out else "passed"
            if keep is not None:
                keep(report)
    return report


def _without_gpu() -> Report:
    reason = "no GPU that torch can use was found, so NVDEC was not tested; `dali-stream doctor` shows what is missing"
    try:
        there = gpus()
    except DriverError:
        there = ()
    if there:  # an unusable GPU is a failure
        return {"status": "failed", "problems": [f"the driver has {there[0].name}, and {reason}"], "reason": reason}
    return {"status": "not run", "problems": [], "reason": reason}


def step(name: str, *, time_limit_s: float, **arguments: Any) -> Report:
    """Calls a step with keyword arguments that JSON can hold, in a process of its own: a driver that crashes is a result.

    Returns:
        What the step returns, or {"failed": reason}. Also `exit`, if the step returned and its process then crashed or hung,
        and `out_of_time`, if it did not return within its time limit.
    """
    module, function = _STEPS[name]
    own = str(Path(__file__).with_name(f"{module}.py")), function, arguments
    [answer], ended, stderr = call([own], time_limit_s, EXIT_S)
    if answer.kind == "hang":
        return {"failed": answer.error, "out_of_time": True}
    if answer.kind == "crash":
        return {"failed": f"{answer.error}: {stderr[-300:]}"}
    result = {"failed": f"{answer.kind}: {answer.error}"} if answer.error else dict(answer.value)
    return result | ({"exit": f"after the step had returned, {ended}: {stderr[-300:]}"} if ended else {})


class _Run:
    """The stages, and their videos.

    Attributes: `codecs` {codec: why it is not tested, or empty}; `left_out`, steps without time; `until`, the `perf_counter`
    at which the current stage ends.
    """

    def __init__(self, root: Path, gpu: int | None, device: str, gops: tuple[int, ...], progress: Progress | None) -> None:
        self._root, self._gpu, self._device, self._progress = root, gpu, device, progress
        self.codecs = {codec: _why_not(gpu, codec) for codec in sorted(CODECS, key=IMPORTANT.index)}
        self._gops, self.until, self.left_out = gops, 0.0, list[str]()
        self._written: set[str] = set()
        self._unwritten: dict[str, str] = {}
        self._exits: list[str] = []  # of steps whose process crashed after its answer
        self._longest: dict[str, int] = {}  # per codec, the longest GOP that the loader decodes with DALI

    def identity(self) -> list[Report]:
        """A row per codec, GOP (or set of sizes) and shape of request, GOP by GOP."""
        rounds = {f"GOP {gop}": [(gop, SIZE)] for gop in self._gops}
        rounds |= {name: [(SHORT, size) for size in sizes] for name, sizes in (("sizes", SIZES), ("padded sizes", PADDED))}
        rows = []
        for name, videos in rounds.items():
            codecs = [codec for codec in self._tried() if videos[0][0] >= CODECS[codec].min_gop]
            self._write([(codec, *video) for codec in codecs for video in videos])
            jobs = {
                f"{codec}, {name}": {"folders": folders, "gpu": self._gpu}
                for codec in codecs
                if self._written.issuperset(folders := [self._folder(codec, *video) for video in videos])
            }
            for label, result in self._each("identity", jobs).items():
                codec, refused = label.partition(",")[0], result.get("refused", "")
                failed = {"": {"frames": 0, "wrong": 0, "mean_error": None, "failed": result.get("failed")}}
                shapes = result.get("shapes", failed)
                rows += [{"codec": codec, "videos": name, "shape": s, "refused": refused, **row} for s, row in shapes.items()]
                if len(videos) == 1 and not refused:
                    self._longest[codec] = max(self._longest.get(codec, 0), videos[0][0])
        return rows

    def cases(self) -> list[Report]:
        """A row per case, decoder and shape of request."""
        jobs = {
            f"{case}: {decoder}": {"case": case, "decoder": decoder, "gpu": self._gpu}
            for decoder in cases.DECODERS
            for case in cases.CASES
        }
        rows = []
        for label, result in self._each("case", jobs).items():
            case, _, decoder = label.rpartition(": ")
            head: Report = {"codec": case.partition(" ")[0].strip(","), "videos": case, "decoder": decoder}
            head |= {key: result.get(key) for key in ("clip_ms", "gpu_growth")} | {"refused": result.get("refused", "")}
            nothing = {"": {"frames": 0, "wrong": 0, "mean_error": None, "failed": result.get("failed", "")}}
            rows += [{**head, "shape": shape, **row} for shape, row in (result.get("shapes") or nothing).items()]
        return rows

    def lockstep(self, seconds: float) -> list[Report]:
        """A row per codec at the recorded size, one for two Loaders at a time, and rows for resized frames and torchcodec."""
        jobs: list[tuple[str, str, dict[str, Any]]] = []
        plain = {
            codec: {"folder": self._folder(codec, gop, SIZE), "device": self._device, "seconds": seconds}
            for codec, gop in self._longest.items()
        }
        jobs += [("lockstep", f"{codec}, recorded size", {**job, "image_size": None}) for codec, job in plain.items()]
        jobs += [("two loaders", f"{codec}, two Loaders", job) for codec, job in list(plain.items())[:1]]
        jobs += [("lockstep", f"{codec}, resized", {**job, "image_size": RESIZED}) for codec, job in plain.items()]
        if self._decodes_with_torchcodec():
            other = {"image_size": None, "decode": TORCHCODEC_CUDA}
            jobs += [("lockstep", f"{codec}, {TORCHCODEC_CUDA}", {**job, **other}) for codec, job in plain.items()]
        return [
            {"loader": label, **row}
            for step_name, label, job in jobs
            for row in self._each(step_name, {label: job}, seconds).values()
        ]

    def verdict(self, seconds: float) -> Report:
        """Frames/s on a busy GPU beside torchcodec on the CPU, of the codec that matters most; empty if none was decoded."""
        video = next(((codec, SHORT, FAST) for codec in self._longest), None)
        if video is None or not self._write([video]):
            return {}
        folder, cores = self._folder(*video), process.cores()
        on_cpu = {f"{video[0]} on the CPU": {"folder": folder, "threads": cores, "seconds": seconds}}
        [cpu] = self._each("torchcodec", on_cpu, 4 * seconds).values() or [{}]
        rows: list[Report] = []
        for decoder in ["dali"] + [TORCHCODEC_CUDA] * self._decodes_with_torchcodec():
            job = {"folder": folder, "decoder": decoder, "gpu": self._gpu, "threads": list(_BUSY_THREADS), "seconds": seconds}
            for found in self._each("busy", {f"{video[0]}, {decoder}": job}, 4 * seconds * len(_BUSY_THREADS)).values():
                rows += found.get("rows", [found])
        nvdec = [row["frames_per_s"] for row in rows if "frames_per_s" in row]
        ratio = max(nvdec) / cpu["frames_per_s"] if nvdec and cpu.get("frames_per_s") else None
        rows += [{"decoder": "torchcodec", "threads": cores, **cpu}] if cpu else []
        return {"codec": video[0], "rows": rows, "ratio": ratio}

    def _decodes_with_torchcodec(self) -> bool:
        """Whether torchcodec decodes on this GPU."""
        return self._gpu is not None and not unavailable(self._gpu)

    def soak(self, seconds: float) -> Report:
        """The Loader over a longer time; empty without time. On a GPU, the second camera is AV1, on the route of "auto"."""
        if not self._longest:
            return {} if self.left_out else {"failed": "the loader decodes no codec with DALI here"}
        codec, gop = next(iter(self._longest.items()))
        folder, decode = self._folder(codec, gop, SIZE), "dali"
        av1 = ("av1", SHORT, SIZE)
        if self._gpu is not None and self._write([av1]):
            mixed, decode = str(self._root / "mixed"), "auto"
            self._each("mix", {"two datasets": {"folder": mixed, "top": folder, "side": self._folder(*av1)}})
            folder = mixed
        seconds = max(0.0, min(seconds, self.until - time.perf_counter() - _START_S))
        job = {"folder": folder, "device": self._device, "decode": decode, "seconds": seconds}
        return self._each("soak", {"the Loader": job}, 2 * seconds).get("the Loader", {})

    def speed(self, seconds: float) -> list[Report]:
        """Per codec and size, a row per setting and one of torchcodec."""
        cores = process.cores()
        settings = [(1, cores, 1), (4, cores, 1), (16, cores, 1), (1, cores, 2), (16, cores, 2), (1, max(cores // 2, 1), 1)]
        rows = []
        for size, tried in ((FAST, settings), (PADDED[1], settings[:1])):
            for codec in self._tried():
                video = codec, SHORT, size
                if not self._write([video]):
                    continue
                folder, label = self._folder(*video), f"{codec}, {size[0]}×{size[1]}"
                head = {"codec": codec, "size": list(size)}
                job = {"folder": folder, "gpu": self._gpu, "settings": tried, "seconds": seconds}
                for dali in self._each("speed", {label: job}, 4 * seconds * len(tried)).values():
                    rows += [{**head, "decoder": "dali", **row} for row in dali.get("rows", [dali])]
                    rows[-1]["gpu_bytes"] = dali.get("gpu_bytes")
                job = {"folder": folder, "threads": cores, "seconds": seconds}
                for cpu in self._each("torchcodec", {label: job}, 4 * seconds).values():
                    rows.append({**head, "decoder": "torchcodec", "threads": cores, **cpu})
        return rows

    def problems(self, report: Report) -> list[str]:
        """Failures so far."""
        found = [f"{codec}: {reason}" for codec, reason in self._unwritten.items() if self.codecs[codec] == reason]
        for row in report["identity"]:
            if wrong := "" if row["refused"] else _wrong(row) or _colours(row):
                found.append(f"{row['codec']}, {row['videos']}, {row['shape']}: {wrong}")
        for row in report.get("cases", []):
            if wrong := "" if row["refused"] else _wrong(row) or _colours(row):
                found.append(f"{row['videos']}, {row['decoder']}, {row['shape']}: {wrong}")
        for row in report.get("lockstep", []):
            if wrong := _wrong(row) or _routes(row, cameras=2):
                found.append(f"{row['loader']}, in lockstep with torchcodec: {wrong}")
        if (row := report.get("soak")) and (wrong := _wrong(row) or _routes(row, cameras=1) or _growth(row)):
            found.append(f"soak: {wrong}")
        rows = (report.get("verdict") or {}).get("rows", [])
        found += [f"speed on a busy GPU: {row['failed']}" for row in rows if row.get("failed")]
        found += [f"speed of {row['codec']}: {row['failed']}" for row in report.get("speed", []) if row.get("failed")]
        return found + self._exits

    def _tried(self) -> list[str]:
        return [codec for codec, reason in self.codecs.items() if not reason]

    def _folder(self, codec: str, gop: int, size: tuple[int, int]) -> str:
        return str(self._root / f"{codec}-{gop}-{size[0]}x{size[1]}")

    def _write(self, wanted: list[tuple[str, int, tuple[int, int]]]) -> bool:
        """Writes these videos unless they exist; returns whether all do. A codec that FFmpeg cannot encode is left out."""
        folders = {self._folder(*w): w for w in wanted}
        jobs = {
            f"{codec}, GOP {gop}, {size[0]}×{size[1]}": {"folder": folder, "codec": codec, "gop": gop, "size": size}
            for folder, (codec, gop, size) in folders.items()
            if folder not in self._written
        }
        for label, made in self._each("write", jobs).items():
            codec = label.partition(",")[0]
            if made.get("failed"):
                self._unwritten.setdefault(codec, f"its videos cannot be written: {made['failed']}")
                self.codecs[codec] = self.codecs[codec] or self._unwritten[codec]
            else:
                self._written.add(str(jobs[label]["folder"]))
        return self._written.issuperset(folders)

    def _each(self, name: str, jobs: Mapping[str, dict[str, Any]], seconds: float = 0.0) -> dict[str, Report]:
        """Runs a step per job: several at a time for "write", "identity" and "case", one at a time for measurements.

        `jobs` are their arguments by name, and `seconds` those of a measurement. Returns results by name, without those of jobs
        without time, which are in `left_out`.
        """
        results = {}
        limit = _STEP_S + seconds

        def run(job: dict[str, Any]) -> Report | None:
            left = self.until - time.perf_counter()
            found = step(name, time_limit_s=min(limit, left), **job) if left > 0 else {"out_of_time": True}
            return None if found.pop("out_of_time", False) and left < limit else found

        at_a_time = max(1, min(8, process.cores() // 2)) if name in ("write", "identity", "case") else 1
        with ThreadPoolExecutor(at_a_time) as pool:
            for number, (label, result) in enumerate(zip(jobs, pool.map(run, jobs.values()), strict=True), 1):
                if result is None:
                    self.left_out.append(f"{name} of {label}")
                else:
                    self._exits += [f"{name} of {label}: {result.pop('exit')}"] if "exit" in result else []
                    results[label] = result
                if self._progress is not None:
                    self._progress(name, number, len(jobs))
        return results


def _why_not(gpu: int | None, codec: str) -> str:
    if gpu is not None:
        return capability(gpu, codec, "420", 8).refusal(*SIZE)
    return "" if codec in DALI_ON_CPU else f"DALI decodes {', '.join(DALI_ON_CPU)} on a CPU"


def _wrong(row: Report) -> str:
    if row.get("failed"):
        return str(row["failed"])
    return f"{row['wrong']} of {row['frames']} frames are of another frame" if row["wrong"] else ""


def _colours(row: Report) -> str:
    if row["mean_error"] is None or row["mean_error"] > COLOUR_TOLERANCE:
        return f"the frames differ from FFmpeg's by {row['mean_error']} on average, and at most {COLOUR_TOLERANCE} is allowed"
    return ""


def _routes(row: Report, cameras: int) -> str:
    """What is wrong unless NVDEC decodes the first `cameras`."""
    decoders = set(list(row["routes"].values())[:cameras])
    if row["route_changes"] or len(decoders) != 1 or decoders == {"torchcodec"}:
        return f"a camera is not on the DALI route: {row['routes']}"
    return ""


def _growth(row: Report) -> str:
    for kind in ("memory", "gpu_memory"):
        used = row[kind]
        if used and used["first"] and used["last"] > used["first"] * _GROWTH[0] + _GROWTH[1]:
            return f"{kind} grew from {used['first']} to {used['last']} bytes in {row['epochs']} epochs"
    return ""
