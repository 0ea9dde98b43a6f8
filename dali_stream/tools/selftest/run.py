"""`selftest`: runs all stages, which consist of steps, and makes the report."""

from __future__ import annotations

import dataclasses
import itertools
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from dali_stream.decode.audit import COLOUR_TOLERANCE
from dali_stream.decode.capability import DriverError, capability, gpus
from dali_stream.decode.refusal import DALI_ON_CPU
from dali_stream.decode.route import TORCHCODEC_CUDA
from dali_stream.decode.torchcodec_cuda import device_name, unavailable
from dali_stream.demo.encode import CODECS
from dali_stream.system import process
from dali_stream.tools import environment
from dali_stream.tools.isolated import call
from dali_stream.tools.selftest import frames, loaders, speed, videos

IMPORTANT = ("h264", "hevc", "av1", "vp9", "mpeg4")  # codecs, most important first
GOPS = (2, 12, 30, 1)  # GOP lengths in frames, most important first
SIZE, FAST = (240, 320), (480, 640)  # (height, width) of most videos, and of videos whose speed is measured
SIZES = ((368, 640), SIZE, FAST)  # sizes that the same decoders decode
# The first two sizes have the same coded size in blocks of 16, and the last two in blocks of 8. They test a decoder that is
# reused for a video of another size but the same coded size.
PADDED = ((368, 640), (360, 640), (248, 328), (242, 326))
SHORT = 2  # GOP length of the videos of several sizes, as in LeRobot's videos
_GROWTH = 1.1, 64 << 20  # tolerated growth of memory in the soak stage: 10 %, and a margin for allocators in bytes
_STEP_S = 90.0  # time limit of a step that takes seconds
_START_S = 15.0  # maximum time that a step needs before it measures
EXIT_S = 15.0  # time allowed for a process to end after its step has returned
_AT_A_TIME = (videos.write, frames.identity, frames.case)  # steps that can run concurrently, since they measure no speed
Progress = Callable[[str, int, int], None]
Report = dict[str, Any]
Step = Callable[..., list[Report] | Report | None]
"""Function of a step, which runs in a separate process. It returns rows, one row, or None."""
Video = tuple[str, int, tuple[int, int]]
"""Codec, GOP and (height, width) of the videos of a demo dataset."""
Jobs = dict[str, tuple[Report, Report]]
"""Jobs of a step: {label: (first entries of each row, arguments)}."""


def selftest(
    device: str = "auto",
    *,
    soak_s: float = 30.0,
    speed_s: float = 1.0,
    limit_s: float = 460.0,
    progress: Progress = lambda step, done, total: None,
    keep: Callable[[Report], None] = lambda report: None,
) -> Report:
    """Test DALI's video decoder on this machine, the most important codecs and stages first.

    Args:
        device: "auto" for the GPU if the machine has one, "cuda:1", or "cpu" for the codecs that DALI decodes on the CPU.
            Default: "auto".
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
        - `lockstep`, `verdict`, `soak`, `speed`: Rows of these stages. See the methods of `_Run`, and the modules.

        A row of a step that failed has the entry `failed`, and lacks the results.

    Raises:
        ValueError: If the requested GPU does not exist.
    """
    gpu, started = process.gpu(device), time.perf_counter()
    if gpu is None and device != "cpu":
        return _without_gpu()
    with tempfile.TemporaryDirectory(prefix="dali_stream-selftest-") as folder:
        run = _Run(Path(folder), gpu, soak_s, speed_s, progress)
        report: Report = {
            "status": "unfinished",
            "problems": [],
            "left_out": run.left_out,
            "device": device_name(gpu),
            "gpu": None if gpu is None else dataclasses.asdict(gpus()[gpu]),
            "codecs": run.codecs,
            "engines": {} if gpu is None else {codec: capability(gpu, codec, "420", 8).engines for codec in run.codecs},
            "tolerance": COLOUR_TOLERANCE,
            **environment.ran_on(device_name(gpu)),
        }
        for name, (stage, share, _, _) in _STAGES.items():
            now = time.perf_counter()
            run.until = now + share * (started + limit_s - now)
            report |= {name: list(stage(run)), "seconds": time.perf_counter() - started}
            report["problems"] = [*run.problems, *_problems(report)]
            if name == list(_STAGES)[-1]:
                report["status"] = "failed" if report["problems"] else "unfinished" if run.left_out else "passed"
            keep(report)
    return report


def _without_gpu() -> Report:
    reason = "no GPU that torch can use was found, so NVDEC was not tested. `dali-stream doctor` shows what is missing"
    try:
        problems = [f"the driver has {unusable.name}, and {reason}" for unusable in gpus()[:1]]
    except DriverError:
        problems = []
    return {"status": "failed" if problems else "not run", "problems": problems, "reason": reason}


def run_step(step: Step, *, time_limit_s: float, **arguments: Any) -> Report:
    """Run a step in a separate process, so that a crash of the driver becomes a result.

    Args:
        step: Function of the step.
        time_limit_s: Time limit in seconds.
        arguments: Arguments of the step.

    Returns:
        {"rows": rows of the step}, or {"failed": reason}. `exit` is added if the step returned, but its process then crashed or
        hung, and `out_of_time` if the step did not return within its time limit.
    """
    [answer], ended, stderr = call([partial(step, **arguments)], time_limit_s, EXIT_S)
    if answer.kind == "hang":
        return {"failed": answer.error, "out_of_time": True}
    if answer.kind == "crash":
        return {"failed": f"{answer.error}: {stderr[-300:]}"}
    rows = answer.value if isinstance(answer.value, list) else [answer.value or {}]
    result: Report = {"failed": f"{answer.kind}: {answer.error}"} if answer.error else {"rows": rows}
    return result | ({"exit": f"after the step had returned, {ended}: {stderr[-300:]}"} if ended else {})


class _Run:
    """The stages, and the videos that they share.

    Attributes:
        codecs: {codec: reason why it is not tested, or ""}.
        left_out: Steps for which no time remained.
        problems: Codecs whose videos cannot be written, and steps whose process crashed or hung after its answer.
        until: Value of `time.perf_counter` at which the current stage must end.
    """

    def __init__(self, root: Path, gpu: int | None, soak_s: float, speed_s: float, progress: Progress) -> None:
        self._root, self._gpu, self._soak_s, self._speed_s, self._progress = root, gpu, soak_s, speed_s, progress
        self.codecs = {codec: _refusal(gpu, codec) for codec in IMPORTANT}
        self.until, self.left_out, self.problems = 0.0, list[str](), list[str]()
        self._nvdec = ["dali"] if unavailable(gpu) else ["dali", TORCHCODEC_CUDA]
        self._written: set[Video] = set()
        self._longest: dict[str, Video] = {}  # {codec: video with the longest GOP that the Loader decodes with DALI}

    def identity(self) -> Iterator[Report]:
        """Yield a row per GOP (or set of sizes), codec and shape of request."""
        rounds = {f"GOP {gop}": [(gop, SIZE)] for gop in GOPS}
        rounds |= {"sizes": [(SHORT, size) for size in SIZES], "padded sizes": [(SHORT, size) for size in PADDED]}
        for name, kinds in rounds.items():
            groups = {codec: [(codec, *kind) for kind in kinds] for codec in self._tried(kinds[0][0])}
            self._write([video for group in groups.values() for video in group])
            jobs: Jobs = {}
            for codec, group in groups.items():
                if self._written.issuperset(group):
                    job = {"folders": [self._folder(video) for video in group], "gpu": self._gpu}
                    jobs[f"{codec}, {name}"] = ({"codec": codec, "videos": name}, job)
            for row in self._each(frames.identity, jobs):
                yield row
                [video, *others] = groups[row["codec"]]
                if not others and not row.get("refused"):
                    self._longest[row["codec"]] = max(self._longest.get(row["codec"], video), video)

    def cases(self) -> Iterator[Report]:
        """Yield a row per case, decoder and shape of request."""
        jobs: Jobs = {}
        for decoder, case in itertools.product(frames.DECODERS, frames.CASES):
            head = {"codec": case.partition(" ")[0].strip(","), "videos": case, "decoder": decoder}
            jobs[f"{case}: {decoder}"] = (head, {"name": case, "decoder": decoder, "gpu": self._gpu})
        return self._each(frames.case, jobs)

    def lockstep(self) -> Iterator[Report]:
        """Yield a row per codec at the recorded size, a row per Loader of two, and rows for resized frames and torchcodec."""
        tests: dict[str, Report] = {"recorded size": {}, "two Loaders": {}, "resized": {"image_size": (224, 224)}}
        tests |= {decoder: {"decode": decoder} for decoder in self._nvdec[1:]}
        seconds = self._soak_s / 3
        for test, options in tests.items():
            step, codecs = (loaders.two_loaders, 1) if test == "two Loaders" else (loaders.lockstep, len(self._longest))
            jobs: Jobs = {}
            for codec, video in list(self._longest.items())[:codecs]:
                arguments = {"folder": self._folder(video), "device": device_name(self._gpu), "seconds": seconds, **options}
                jobs[f"{codec}, {test}"] = ({"loader": f"{codec}, {test}"}, arguments)
            yield from self._each(step, jobs, seconds)

    def verdict(self) -> Iterator[Report]:
        """Yield rows of the most important codec on a busy GPU. See `_speeds`."""
        settings = [{"per_clip": 1, "threads": threads} for threads in (4, 8, 16)]
        for codec in list(self._longest)[:1]:
            yield from self._speeds((codec, SHORT, FAST), self._nvdec, settings, busy=True)

    def soak(self) -> Iterator[Report]:
        """Yield the row of the Loader over a longer time. On a GPU, the second camera is AV1, and `decode` is "auto"."""
        for video in list(self._longest.values())[:1]:
            folder, decode, av1 = self._folder(video), "dali", ("av1", SHORT, SIZE)
            if self._gpu is not None and self._write([av1]):
                try:
                    folder, decode = videos.mix(str(self._root / "mixed"), folder, self._folder(av1)), "auto"
                except OSError as error:  # such as a full disk
                    self.problems.append(f"the dataset of two codecs cannot be written: {error}")
            seconds = max(0.0, min(self._soak_s, self.until - time.perf_counter() - _START_S))
            job = {"folder": folder, "device": device_name(self._gpu), "decode": decode, "seconds": seconds}
            yield from self._each(loaders.soak, {"the Loader": ({}, job)}, 2 * seconds)
        if not self._longest and not self.left_out:
            yield {"failed": "the loader decodes no codec with DALI here"}

    def speed(self) -> Iterator[Report]:
        """Yield rows of each codec and size. See `_speeds`."""
        cores = process.cores()
        tried = ((1, cores, 1), (4, cores, 1), (16, cores, 1), (1, cores, 2), (16, cores, 2), (1, max(cores // 2, 1), 1))
        settings = [dict(zip(("per_clip", "threads", "prefetch"), setting, strict=True)) for setting in tried]
        for size, own in ((FAST, settings), (PADDED[1], settings[:1])):
            for codec in self._tried(SHORT):
                yield from self._speeds((codec, SHORT, size), ["dali"], own, busy=False)

    def _speeds(self, video: Video, nvdec: Sequence[str], settings: list[dict[str, int]], busy: bool) -> Iterator[Report]:
        """Yield a row of torchcodec on all cores, and a row per decoder and setting, whose `ratio` is relative to that row."""
        if not self._write([video]):
            return
        codec, _, (height, width) = video
        job = {"folder": self._folder(video), "gpu": self._gpu, "settings": settings, "seconds": self._speed_s, "busy": busy}
        on_cpu = {"gpu": None, "settings": [{"threads": process.cores()}]}
        jobs: Jobs = {}
        for decoder in ("torchcodec", *nvdec):
            head = {"codec": codec, "size": [height, width], "decoder": decoder}
            arguments = job | {"decoder": decoder} | (on_cpu if decoder == "torchcodec" else {})
            jobs[f"{codec}, {height}×{width}, {decoder}, {'busy' if busy else 'idle'} GPU"] = (head, arguments)
        cpu = 0.0
        for row in self._each(speed.speed, jobs, 4 * self._speed_s * len(settings)):
            rate = row.get("frames_per_s", 0.0)
            if row["decoder"] == "torchcodec":
                cpu = rate
            elif rate and cpu:
                row["ratio"] = rate / cpu
            yield row

    def _tried(self, gop: int) -> list[str]:
        """Return the codecs that are tested and can be encoded with a GOP length."""
        return [codec for codec, reason in self.codecs.items() if not reason and gop >= CODECS[codec].min_gop]

    def _folder(self, video: Video) -> str:
        codec, gop, (height, width) = video
        return str(self._root / f"{codec}-{gop}-{height}x{width}")

    def _write(self, wanted: Sequence[Video]) -> bool:
        """Write videos that do not exist yet. Return whether all exist. A codec that FFmpeg cannot encode is not tested."""
        jobs: Jobs = {}
        for video in wanted:
            if video not in self._written:
                codec, gop, size = video
                arguments = {"folder": self._folder(video), "codec": codec, "gop": gop, "size": size}
                jobs[f"{codec}, GOP {gop}, {size[0]}×{size[1]}"] = ({"video": video}, arguments)
        for row in self._each(videos.write, jobs):
            codec = row["video"][0]
            if "failed" not in row:
                self._written.add(row["video"])
            elif not self.codecs[codec]:
                self.codecs[codec] = f"its videos cannot be written: {row['failed']}"
                self.problems.append(f"{codec}: {self.codecs[codec]}")
        return self._written.issuperset(wanted)

    def _each(self, step: Step, jobs: Jobs, seconds: float = 0.0) -> Iterator[Report]:
        """Run a step per job. Jobs for which no time remains are added to `left_out`.

        Args:
            step: Function of the step. Its name is the name of the step in messages.
            jobs: See `Jobs`.
            seconds: Time that the step measures, in seconds.

        Yields:
            The rows of the jobs. A job that failed has one row with the entry `failed`.
        """
        limit, name = _STEP_S + seconds, step.__name__.replace("_", " ")

        def run(job: tuple[Report, Report]) -> Report | None:
            # A step that exceeds its own limit has failed. A step that only exceeds the time of its stage is left out.
            left = self.until - time.perf_counter()
            result = run_step(step, time_limit_s=min(limit, left), **job[1]) if left > 0 else {"out_of_time": True}
            return None if result.pop("out_of_time", False) and left < limit else result

        with ThreadPoolExecutor(min(8, process.cores()) if step in _AT_A_TIME else 1) as pool:
            for number, (label, result) in enumerate(zip(jobs, pool.map(run, jobs.values()), strict=True), 1):
                self._progress(name, number, len(jobs))
                if result is None:
                    self.left_out.append(f"{name} of {label}")
                    continue
                if "exit" in result:
                    self.problems.append(f"{name} of {label}: {result.pop('exit')}")
                yield from (jobs[label][0] | row for row in result.get("rows", [result]))


def _refusal(gpu: int | None, codec: str) -> str:
    """Return the reason why DALI does not decode a codec. Empty if it does."""
    if gpu is not None:
        return capability(gpu, codec, "420", 8).refusal(*SIZE)
    return "" if codec in DALI_ON_CPU else f"DALI decodes {', '.join(DALI_ON_CPU)} on a CPU"


def _problems(report: Report) -> Iterator[str]:
    """Yield the first problem of each row of the report. Rows of videos that the Loader refuses do not count."""
    for name, (_, _, label, checks) in _STAGES.items():
        for row in (row for row in report.get(name, []) if not row.get("refused")):
            if problem := row.get("failed") or next(filter(None, (check(row) for check in checks)), ""):
                yield f"{label.format_map(defaultdict(str, row))}: {problem}"


def _wrong_frames(row: Report) -> str:
    return f"{row['wrong']} of {row['frames']} frames are of another frame" if row["wrong"] else ""


def _colours(row: Report) -> str:
    if row["mean_error"] <= COLOUR_TOLERANCE:
        return ""
    return f"the frames differ from FFmpeg's by {row['mean_error']} on average, and at most {COLOUR_TOLERANCE} is allowed"


def _routes(row: Report, cameras: int) -> str:
    """Check that the first cameras all have the same decoder, which is not torchcodec, and never changed it."""
    decoders = set(list(row["routes"].values())[:cameras])
    if row["route_changes"] or len(decoders) != 1 or decoders == {"torchcodec"}:
        return f"a camera is not on the requested route: {row['routes']}"
    return ""


def _growth(row: Report) -> str:
    for kind in ("memory", "gpu_memory"):
        used = row[kind]
        if used and used["first"] and used["last"] > used["first"] * _GROWTH[0] + _GROWTH[1]:
            return f"{kind} grew from {used['first']} to {used['last']} bytes in {row['epochs']} epochs"
    return ""


_STAGES: Mapping[str, tuple[Callable[[_Run], Iterator[Report]], float, str, Sequence[Callable[[Report], str]]]] = {
    "identity": (_Run.identity, 0.3, "{codec}, {videos}, {shape}", (_wrong_frames, _colours)),
    "cases": (_Run.cases, 0.25, "{videos}, {decoder}, {shape}", (_wrong_frames, _colours)),
    "lockstep": (_Run.lockstep, 0.4, "{loader}, in lockstep with torchcodec", (_wrong_frames, partial(_routes, cameras=2))),
    "verdict": (_Run.verdict, 0.4, "speed on a busy GPU", ()),
    "soak": (_Run.soak, 0.5, "soak", (_wrong_frames, partial(_routes, cameras=1), _growth)),
    "speed": (_Run.speed, 1.0, "speed of {codec}", ()),
}
"""{stage: (method that yields its rows, maximum share of the remaining time, label of a row, checks of a row)}.

A check returns the problem, or an empty string. A row with the entry `failed` is a problem in every stage.
"""
