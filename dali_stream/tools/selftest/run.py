"""`selftest`: runs all stages, which consist of steps, and makes the report."""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
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
from dali_stream.tools.selftest import cases, identity, lockstep, soak, speed, videos

IMPORTANT = ("h264", "hevc", "av1", "vp9", "mpeg4")  # codecs, most important first
GOPS = (2, 12, 30, 1)  # GOP lengths in frames, most important first
SIZE, FAST = (240, 320), (480, 640)  # (height, width) of most videos, and of videos whose speed is measured
SIZES = ((368, 640), SIZE, FAST)  # sizes that the same decoders decode
# The first two sizes have the same coded size in blocks of 16, and the last two in blocks of 8. They test a decoder that is
# reused for a video of another size but the same coded size.
PADDED = ((368, 640), (360, 640), (248, 328), (242, 326))
RESIZED = 224, 224
SHORT = 2  # GOP length of the videos of several sizes, as in LeRobot's videos
LIMIT_S = 460.0
_GROWTH = 1.1, 64 << 20  # tolerated growth of memory in the soak stage: 10 %, and a margin for allocators in bytes
_STEP_S = 90.0  # time limit of a step that takes seconds
_START_S = 15.0  # maximum time that a step needs before it measures
# Maximum share of the remaining time that each stage may use.
_SHARES = {"identity": 0.3, "cases": 0.25, "lockstep": 0.4, "verdict": 0.4, "soak": 0.5, "speed": 1.0}
_BUSY_THREADS = 4, 8, 16
EXIT_S = 15.0  # time allowed for a process to end after its step has returned
_STEPS: Mapping[str, Callable[..., Any]] = {
    "write": videos.write,
    "mix": videos.mix,
    "identity": identity.measure,
    "speed": speed.measure,
    "torchcodec": speed.measure_torchcodec,
    "case": cases.measure,
    "busy": speed.measure_busy,
    "lockstep": lockstep.measure,
    "two loaders": lockstep.measure_two,
    "soak": soak.measure,
}
_AT_A_TIME = ("write", "identity", "case")  # steps that can run concurrently, since they measure no speed
Progress = Callable[[str, int, int], None]
Report = dict[str, Any]
Video = tuple[str, int, tuple[int, int]]
"""Codec, GOP and (height, width) of the videos of a demo dataset."""


def selftest(
    device: str = "auto",
    *,
    gops: Sequence[int] = GOPS,
    soak_s: float = 30.0,
    speed_s: float = 1.0,
    limit_s: float = LIMIT_S,
    progress: Progress = lambda step, done, total: None,
    keep: Callable[[Report], None] = lambda report: None,
) -> Report:
    """Test DALI's video decoder on this machine, the most important codecs and stages first.

    Args:
        device: "auto" for the GPU if the machine has one, "cuda:1", or "cpu" for the codecs that DALI decodes on the CPU.
            Default: "auto".
        gops: GOP lengths in frames, most important first. Default: 2, 12, 30, 1.
        soak_s: Duration of the soak stage in seconds. Each comparison in lockstep takes a third of it. Default: 30.
        speed_s: Duration of each speed measurement in seconds. Default: 1.
        limit_s: Time limit in seconds. Steps for which no time remains are left out, and listed in the report. Default: 460.
        progress: Function that is called with (step, done, total).
        keep: Function that is called with the report after each stage. The status is "unfinished" until the last stage.

    Returns:
        A dict for JSON with

        - `status`: "passed", "failed", "unfinished" if steps were left out without a failure, or "not run" without a GPU.
        - `problems`, `left_out`: Descriptions of failures, and the steps that were left out.
        - `codecs`, `engines`: {codec: reason why it is not tested, or ""}, and {codec: number of NVDEC engines}.
        - `identity`: A row per codec, GOP and shape of request. A row counts only if `refused`, the reason why the Loader would
          not use NVDEC for such a video, is empty.
        - `cases`: Such rows for videos that the Loader does not decode with NVDEC, and for torchcodec's NVDEC decoder.
        - `verdict`: `rows` with frames/s on a busy GPU, and the `ratio` of NVDEC's best rate to that of the CPU.
        - `lockstep`, `soak`, `speed`: See the modules.

    Raises:
        ValueError: If the requested GPU does not exist.
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
            report["problems"] = [*run.unwritten(), *_problems(report), *run.exits]
            if name == list(stages)[-1]:
                report["status"] = "failed" if report["problems"] else "unfinished" if run.left_out else "passed"
            keep(report)
    return report


def _without_gpu() -> Report:
    reason = "no GPU that torch can use was found, so NVDEC was not tested. `dali-stream doctor` shows what is missing"
    try:
        unusable = gpus()
    except DriverError:
        unusable = ()
    if unusable:
        return {"status": "failed", "problems": [f"the driver has {unusable[0].name}, and {reason}"], "reason": reason}
    return {"status": "not run", "problems": [], "reason": reason}


def step(name: str, *, time_limit_s: float, **arguments: Any) -> Report:
    """Run a step in a separate process, so that a crash of the driver becomes a result.

    Args:
        name: Name in `_STEPS`.
        time_limit_s: Time limit in seconds.
        arguments: Arguments of the step.

    Returns:
        The result of the step, or {"failed": reason}. `exit` is added if the step returned, but its process then crashed or
        hung, and `out_of_time` if the step did not return within its time limit.
    """
    [answer], ended, stderr = call([partial(_STEPS[name], **arguments)], time_limit_s, EXIT_S)
    if answer.kind == "hang":
        return {"failed": answer.error, "out_of_time": True}
    if answer.kind == "crash":
        return {"failed": f"{answer.error}: {stderr[-300:]}"}
    result = {"failed": f"{answer.kind}: {answer.error}"} if answer.error else dict(answer.value or {})
    return result | ({"exit": f"after the step had returned, {ended}: {stderr[-300:]}"} if ended else {})


class _Run:
    """The stages, and the videos that they share.

    Attributes:
        codecs: {codec: reason why it is not tested, or ""}.
        left_out: Steps for which no time remained.
        exits: Descriptions of steps whose process crashed or hung after its answer.
        until: Value of `time.perf_counter` at which the current stage must end.
    """

    def __init__(self, root: Path, gpu: int | None, device: str, gops: tuple[int, ...], progress: Progress) -> None:
        self._root, self._gpu, self._device, self._progress = root, gpu, device, progress
        self.codecs = {codec: _refusal(gpu, codec) for codec in sorted(CODECS, key=IMPORTANT.index)}
        self._gops, self.until, self.left_out, self.exits = gops, 0.0, list[str](), list[str]()
        self._written: set[Video] = set()
        self._unwritten: dict[str, str] = {}
        self._longest: dict[str, int] = {}  # {codec: longest GOP that the Loader decodes with DALI}

    def identity(self) -> list[Report]:
        """Return a row per GOP (or set of sizes), codec and shape of request."""
        rounds = {f"GOP {gop}": [(gop, SIZE)] for gop in self._gops}
        rounds |= {name: [(SHORT, size) for size in sizes] for name, sizes in (("sizes", SIZES), ("padded sizes", PADDED))}
        rows = []
        for name, kinds in rounds.items():
            codecs = [codec for codec in self._tried() if kinds[0][0] >= CODECS[codec].min_gop]
            self._write([(codec, *kind) for codec in codecs for kind in kinds])
            jobs = {
                f"{codec}, {name}": {"folders": [self._folder((codec, *kind)) for kind in kinds], "gpu": self._gpu}
                for codec in codecs
                if self._written.issuperset((codec, *kind) for kind in kinds)
            }
            for label, result in self._each("identity", jobs):
                codec = label.partition(",")[0]
                rows += _shape_rows({"codec": codec, "videos": name}, result)
                if len(kinds) == 1 and not result.get("refused"):
                    self._longest[codec] = max(self._longest.get(codec, 0), kinds[0][0])
        return rows

    def cases(self) -> list[Report]:
        """Return a row per case, decoder and shape of request."""
        jobs = {
            f"{case}: {decoder}": {"case": case, "decoder": decoder, "gpu": self._gpu}
            for decoder in cases.DECODERS
            for case in cases.CASES
        }
        rows = []
        for label, result in self._each("case", jobs):
            case, decoder = jobs[label]["case"], jobs[label]["decoder"]
            head = {"codec": str(case).partition(" ")[0].strip(","), "videos": case, "decoder": decoder}
            rows += _shape_rows(head | {key: result.get(key) for key in ("clip_ms", "gpu_growth")}, result)
        return rows

    def lockstep(self, seconds: float) -> list[Report]:
        """Return a row per codec at the recorded size, a row for two Loaders, and rows for resized frames and torchcodec."""
        plain = {
            codec: {"folder": self._folder((codec, gop, SIZE)), "device": self._device, "seconds": seconds}
            for codec, gop in self._longest.items()
        }
        tests: list[tuple[str, str, Report]] = [("lockstep", "recorded size", {"image_size": None})]
        tests += [("two loaders", "two Loaders", {}), ("lockstep", "resized", {"image_size": RESIZED})]
        if self._decodes_with_torchcodec():
            tests.append(("lockstep", TORCHCODEC_CUDA, {"image_size": None, "decode": TORCHCODEC_CUDA}))
        rows = []
        for name, test, options in tests:
            codecs = list(plain)[:1] if name == "two loaders" else list(plain)
            jobs = {f"{codec}, {test}": plain[codec] | options for codec in codecs}
            rows += [{"loader": label, **row} for label, row in self._each(name, jobs, seconds)]
        return rows

    def verdict(self, seconds: float) -> Report:
        """Return frames/s of the most important codec on a busy GPU and on the CPU. Empty if no codec was decoded."""
        video = next(((codec, SHORT, FAST) for codec in self._longest), None)
        if video is None or not self._write([video]):
            return {}
        codec, rows = video[0], list[Report]()
        cpu = self._on_cpu(f"{codec} on the CPU", video, seconds)
        for decoder in ["dali"] + [TORCHCODEC_CUDA] * self._decodes_with_torchcodec():
            job: Report = {"folder": self._folder(video), "decoder": decoder, "gpu": self._gpu, "threads": list(_BUSY_THREADS)}
            job["seconds"] = seconds
            rows += self._rows("busy", f"{codec}, {decoder}", job, 4 * seconds * len(_BUSY_THREADS))
        nvdec = [row["frames_per_s"] for row in rows if "frames_per_s" in row]
        ratio = max(nvdec) / cpu[0]["frames_per_s"] if nvdec and cpu and cpu[0].get("frames_per_s") else None
        return {"codec": codec, "rows": rows + cpu, "ratio": ratio}

    def soak(self, seconds: float) -> Report:
        """Return the results of the Loader over a longer time. On a GPU, the second camera is AV1, and `decode` is "auto"."""
        if not self._longest:
            return {} if self.left_out else {"failed": "the loader decodes no codec with DALI here"}
        codec, gop = next(iter(self._longest.items()))
        folder, decode = self._folder((codec, gop, SIZE)), "dali"
        av1 = ("av1", SHORT, SIZE)
        if self._gpu is not None and self._write([av1]):
            mixed, decode = str(self._root / "mixed"), "auto"
            self._rows("mix", "two datasets", {"folder": mixed, "top": folder, "side": self._folder(av1)})
            folder = mixed
        seconds = max(0.0, min(seconds, self.until - time.perf_counter() - _START_S))
        job = {"folder": folder, "device": self._device, "decode": decode, "seconds": seconds}
        return next(iter(self._rows("soak", "the Loader", job, 2 * seconds)), {})

    def speed(self, seconds: float) -> list[Report]:
        """Return a row per codec, size and setting, and one of torchcodec per codec and size."""
        cores = process.cores()
        settings = [(1, cores, 1), (4, cores, 1), (16, cores, 1), (1, cores, 2), (16, cores, 2), (1, max(cores // 2, 1), 1)]
        rows = []
        for size, tried in ((FAST, settings), (PADDED[1], settings[:1])):
            for video in [(codec, SHORT, size) for codec in self._tried()]:
                if self._write([video]):
                    label = f"{video[0]}, {size[0]}×{size[1]}"
                    job = {"folder": self._folder(video), "gpu": self._gpu, "settings": tried, "seconds": seconds}
                    own = [{"decoder": "dali", **row} for row in self._rows("speed", label, job, 4 * seconds * len(tried))]
                    own += self._on_cpu(label, video, seconds)
                    rows += [{"codec": video[0], "size": list(size), **row} for row in own]
        return rows

    def unwritten(self) -> list[str]:
        """Return the errors of videos that could not be written although DALI decodes their codec."""
        return [f"{codec}: {reason}" for codec, reason in self._unwritten.items() if self.codecs[codec] == reason]

    def _on_cpu(self, label: str, video: Video, seconds: float) -> list[Report]:
        """Return the row of torchcodec on all cores, in a list. Empty if no time remains."""
        job = {"folder": self._folder(video), "threads": process.cores(), "seconds": seconds}
        rows = self._rows("torchcodec", label, job, 4 * seconds)
        return [{"decoder": "torchcodec", "threads": job["threads"], **row} for row in rows]

    def _decodes_with_torchcodec(self) -> bool:
        """Return whether torchcodec can decode on this GPU."""
        return self._gpu is not None and not unavailable(self._gpu)

    def _tried(self) -> list[str]:
        return [codec for codec, reason in self.codecs.items() if not reason]

    def _folder(self, video: Video) -> str:
        codec, gop, (height, width) = video
        return str(self._root / f"{codec}-{gop}-{height}x{width}")

    def _write(self, wanted: Sequence[Video]) -> bool:
        """Write videos that do not exist yet. Return whether all exist. A codec that FFmpeg cannot encode is not tested."""
        videos = {
            f"{codec}, GOP {gop}, {height}×{width}": (codec, gop, (height, width)) for codec, gop, (height, width) in wanted
        }
        jobs: dict[str, Report] = {
            label: {"folder": self._folder(video), "codec": video[0], "gop": video[1], "size": video[2]}
            for label, video in videos.items()
            if video not in self._written
        }
        for label, result in self._each("write", jobs):
            codec = jobs[label]["codec"]
            if result.get("failed"):
                self._unwritten.setdefault(codec, f"its videos cannot be written: {result['failed']}")
                self.codecs[codec] = self.codecs[codec] or self._unwritten[codec]
            else:
                self._written.add(videos[label])
        return self._written.issuperset(wanted)

    def _rows(self, name: str, label: str, job: Report, seconds: float = 0.0) -> list[Report]:
        """Run a step once. Return its rows, or its result as the only row. Empty if no time remains."""
        return [row for _, result in self._each(name, {label: job}, seconds) for row in result.get("rows", [result])]

    def _each(self, name: str, jobs: Mapping[str, Report], seconds: float = 0.0) -> list[tuple[str, Report]]:
        """Run a step per job.

        Args:
            name: Name of the step.
            jobs: Arguments of the step by label.
            seconds: Time that the step measures, in seconds.

        Returns:
            (label, result) of each job. Jobs for which no time remains are added to `left_out` instead.
        """
        results = []
        limit = _STEP_S + seconds

        def run(job: Report) -> Report | None:
            # A step that exceeds its own limit has failed. A step that only exceeds the time of its stage is left out.
            left = self.until - time.perf_counter()
            result = step(name, time_limit_s=min(limit, left), **job) if left > 0 else {"out_of_time": True}
            return None if result.pop("out_of_time", False) and left < limit else result

        with ThreadPoolExecutor(max(1, min(8, process.cores() // 2)) if name in _AT_A_TIME else 1) as pool:
            for number, (label, result) in enumerate(zip(jobs, pool.map(run, jobs.values()), strict=True), 1):
                if result is None:
                    self.left_out.append(f"{name} of {label}")
                else:
                    self.exits += [f"{name} of {label}: {result.pop('exit')}"] if "exit" in result else []
                    results.append((label, result))
                self._progress(name, number, len(jobs))
        return results


def _refusal(gpu: int | None, codec: str) -> str:
    """Return the reason why DALI does not decode a codec. Empty if it does."""
    if gpu is not None:
        return capability(gpu, codec, "420", 8).refusal(*SIZE)
    return "" if codec in DALI_ON_CPU else f"DALI decodes {', '.join(DALI_ON_CPU)} on a CPU"


def _shape_rows(head: Report, result: Report) -> list[Report]:
    """Return a row per shape of request, or a single row for a step that failed."""
    failed = {"": {"frames": 0, "wrong": 0, "mean_error": None, "failed": result.get("failed", "")}}
    head = head | {"refused": result.get("refused", "")}
    return [{**head, "shape": shape, **row} for shape, row in (result.get("shapes") or failed).items()]


def _problems(report: Report) -> Iterator[str]:
    """Yield the first problem of each row of the report. Rows of videos that the Loader refuses do not count."""
    for stage, (label, checks) in _CHECKS.items():
        rows = report.get(stage) or []
        rows = rows.get("rows", [rows]) if isinstance(rows, dict) else rows
        for row in rows:
            if problem := "" if row.get("refused") else next(filter(None, (check(row) for check in checks)), ""):
                yield f"{label.format(**row)}: {problem}"


def _failure(row: Report) -> str:
    return str(row.get("failed") or "")


def _wrong_frames(row: Report) -> str:
    return f"{row['wrong']} of {row['frames']} frames are of another frame" if row["wrong"] else ""


def _colours(row: Report) -> str:
    if row["mean_error"] is None or row["mean_error"] > COLOUR_TOLERANCE:
        return f"the frames differ from FFmpeg's by {row['mean_error']} on average, and at most {COLOUR_TOLERANCE} is allowed"
    return ""


def _routes(row: Report, cameras: int) -> str:
    """Check that the first cameras all have the same decoder, which is not torchcodec, and never changed it."""
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


_CHECKS: Mapping[str, tuple[str, Sequence[Callable[[Report], str]]]] = {
    "identity": ("{codec}, {videos}, {shape}", (_failure, _wrong_frames, _colours)),
    "cases": ("{videos}, {decoder}, {shape}", (_failure, _wrong_frames, _colours)),
    "lockstep": ("{loader}, in lockstep with torchcodec", (_failure, _wrong_frames, partial(_routes, cameras=2))),
    "soak": ("soak", (_failure, _wrong_frames, partial(_routes, cameras=1), _growth)),
    "verdict": ("speed on a busy GPU", (_failure,)),
    "speed": ("speed of {codec}", (_failure,)),
}
"""{stage: (label of a row, its checks)}. A check returns the problem, or an empty string."""
