"""`selftest`: runs the three parts, which consist of steps in separate processes, and makes the report."""

from __future__ import annotations

import dataclasses
import itertools
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from dali_stream.decode.audit import COLOUR_TOLERANCE
from dali_stream.decode.capability import DriverError, capability, gpus
from dali_stream.decode.refusal import DALI_ON_CPU
from dali_stream.decode.route import TORCHCODEC_CUDA
from dali_stream.decode.torchcodec_cuda import device_name, unavailable
from dali_stream.demo.encode import CODECS
from dali_stream.system import cpu
from dali_stream.system.gpu import gpu_index
from dali_stream.tools import environment
from dali_stream.tools.isolated import call
from dali_stream.tools.selftest import identity, load, speed, videos

IMPORTANT = ("h264", "hevc", "av1", "vp9", "mpeg4")  # codecs, most important first
GOPS = (2, 12, 30, 1)  # GOP lengths in frames, most important first
SIZE, FAST = (240, 320), (480, 640)  # (height, width) of most videos, and of videos whose speed is measured
SIZES = ((368, 640), SIZE, FAST)  # sizes that the same decoders decode
# The first two sizes have the same coded size in blocks of 16, and the last two in blocks of 8. They test a decoder that is
# reused for a video of another size but the same coded size.
PADDED = ((368, 640), (360, 640), (248, 328), (242, 326))
SHORT = 2  # GOP length of the videos of several sizes, as in LeRobot's videos
MANY_THREADS = max(32, 2 * cpu.cores())  # decode threads of a Loader, more than its default
_GROWTH = 1.1, 64 << 20  # tolerated growth of memory over several epochs: 10 %, and a margin for allocators in bytes
_STEP_S = 90.0  # time limit of a step that takes seconds
_START_S = 15.0  # maximum time that a step needs before it measures
EXIT_S = 15.0  # time allowed for a process to end after its step has returned
_AT_A_TIME = (videos.write, identity.identity, identity.case)  # steps that can run concurrently, since they measure no speed
Progress = Callable[[str, int, int], None]
Report = dict[str, Any]
Step = Callable[..., list[Report] | Report | None]
"""Function of a step, which runs in a separate process. It returns rows, one row, or None."""
Video = tuple[str, int, tuple[int, int]]
"""Codec, GOP and (height, width) of the videos of a demo dataset."""


@dataclass(frozen=True)
class Job:
    """One call of a step.

    Attributes:
        step: Function of the step.
        test: Subject of the test, for the report, such as "h264, GOP 12".
        decoder: Tested decoder, for the report. Empty for a step that tests none.
        arguments: Arguments of the step.
        seconds: Time that the step measures, in seconds.
    """

    step: Step
    test: str
    decoder: str
    arguments: Report
    seconds: float = 0.0

    @property
    def name(self) -> str:
        """Name for messages, such as "identity of h264, GOP 12, dali"."""
        return f"{self.step.__name__.replace('_', ' ')} of {', '.join(filter(None, (self.test, self.decoder)))}"


def selftest(
    device: str = "auto",
    *,
    soak_s: float = 30.0,
    speed_s: float = 1.0,
    limit_s: float = 460.0,
    progress: Progress = lambda step, done, total: None,
    keep: Callable[[Report], None] = lambda report: None,
) -> Report:
    """Test DALI's video decoder on this machine, the most important codecs and steps first.

    Args:
        device: "auto" for the GPU if the machine has one, "cuda:1", or "cpu" for the codecs that DALI decodes on the CPU.
            Default: "auto".
        soak_s: Time to stream epochs, in seconds. Each comparison of two Loaders takes a third of it. Default: 30.
        speed_s: Duration of each speed measurement in seconds. Default: 1.
        limit_s: Time limit in seconds. Steps for which no time remains are left out, and listed in the report. Default: 460.
        progress: Function that is called with (part, done, total).
        keep: Function that is called with the report after each step. The status is "unfinished" until the last step.

    Returns:
        A dict for JSON with

        - `status`: "passed", "failed", "unfinished" if steps were left out without a failure, or "not run" without a GPU.
        - `problems`, `left_out`: Descriptions of failures, and the steps that were left out.
        - `codecs`, `engines`: {codec: reason why it is not tested, or ""}, and {codec: number of NVDEC engines}.
        - `identity`: Whether frames are right. A row per kind of video, decoder and shape of request. A row counts only if
          `refused`, the reason why the Loader would not use this decoder for such a video, is empty.
        - `load`: Whether frames stay right under load. A row per Loader.
        - `speed`: A row per kind of video, decoder and setting. `busy` is whether other work kept the GPU busy meanwhile.

        Each row has `test`, what was tested, and `decoder`. `identity.measure_shape`, `load.lockstep`, `load.soak` and
        `speed.speed` describe the other entries. A row of a step that failed has the entry `failed`, and lacks the results.

    Raises:
        ValueError: If the requested GPU does not exist.
    """
    gpu, started = gpu_index(device), time.perf_counter()
    if gpu is None and device != "cpu":
        return _without_gpu()
    with tempfile.TemporaryDirectory(prefix="dali_stream-selftest-") as folder:
        run = _Run(Path(folder), gpu, soak_s, speed_s, started + limit_s, progress)
        parts: dict[str, Iterator[Report]] = {
            "identity": run.check_identity(),
            "load": run.check_load(),
            "speed": run.measure_speed(),
        }
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
            **{part: [] for part in parts},
        }

        def update() -> None:
            rows = itertools.chain.from_iterable(report[part] for part in parts)
            report["problems"] = [*run.problems, *filter(None, map(_problem, rows))]
            report["seconds"] = time.perf_counter() - started

        for part, rows in parts.items():
            for row in rows:
                report[part].append(row)
                update()
                keep(report)
        update()
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
    """The three parts, and the videos that they share.

    Attributes:
        codecs: {codec: reason why it is not tested, or ""}.
        left_out: Steps for which no time remained.
        problems: Codecs whose videos cannot be written, and steps whose process crashed or hung after its answer.
    """

    def __init__(self, root: Path, gpu: int | None, soak_s: float, speed_s: float, end: float, progress: Progress) -> None:
        self._root, self._gpu, self._soak_s, self._speed_s, self._progress = root, gpu, soak_s, speed_s, progress
        self.codecs = {codec: _refusal(gpu, codec) for codec in IMPORTANT}
        self.left_out, self.problems = list[str](), list[str]()
        self._until = self._end = end  # values of `time.perf_counter` at which the current steps, and all steps, must end
        self._nvdec = ["dali"] if unavailable(gpu) else ["dali", TORCHCODEC_CUDA]
        self._written: set[Video] = set()
        self._longest: dict[str, Video] = {}  # {codec: video with the longest GOP that the Loader decodes with DALI}

    def check_identity(self) -> Iterator[Report]:
        """Yield rows of DALI's decoder per GOP (or set of sizes) and codec, then of videos that it is not trusted with."""
        self._take(0.3)
        rounds = {f"GOP {gop}": [(gop, SIZE)] for gop in GOPS}
        rounds |= {"sizes": [(SHORT, size) for size in SIZES], "padded sizes": [(SHORT, size) for size in PADDED]}
        for name, kinds in rounds.items():
            groups = {f"{codec}, {name}": [(codec, *kind) for kind in kinds] for codec in self._tried(kinds[0][0])}
            self._write([video for group in groups.values() for video in group])
            jobs = [
                Job(identity.identity, test, "dali", {"folders": list(map(self._folder, group)), "gpu": self._gpu})
                for test, group in groups.items()
                if self._written.issuperset(group)
            ]
            for row in self._rows("identity", jobs):
                yield row
                [video, *others] = groups[row["test"]]
                if not others and not row.get("refused"):
                    self._longest[video[0]] = max(self._longest.get(video[0], video), video)
        self._take(0.25)
        jobs = [
            Job(identity.case, case, decoder, {"name": case, "decoder": decoder, "gpu": self._gpu})
            for decoder, case in itertools.product(identity.DECODERS, identity.CASES)
        ]
        yield from self._rows("identity", jobs)

    def check_load(self) -> Iterator[Report]:
        """Yield rows of Loaders whose batches are held, then of a Loader that streams epochs."""
        self._take(0.4)
        longest = list(self._longest.items())
        first, others = longest[:1], longest[1:]
        # Most important first, since on a GPU the time is enough for about five of them.
        jobs = [job for decoder in self._nvdec for job in self._lockstep("recorded size", first, decode=decoder)]
        if self._gpu is not None and TORCHCODEC_CUDA in self._nvdec:
            on_gpu: dict[str, Any] = {"image_size": (224, 224), "gpu_cache": "128MiB"}  # slots are used again
            jobs += self._lockstep("gpu_cache", first, decode=TORCHCODEC_CUDA, **on_gpu)
        jobs += self._lockstep("two Loaders", first, load.two_loaders)
        jobs += self._lockstep(f"{MANY_THREADS} threads", first, num_threads=MANY_THREADS)
        jobs += [job for decoder in self._nvdec for job in self._lockstep("recorded size", others, decode=decoder)]
        jobs += self._lockstep("resized", longest, image_size=(224, 224))
        yield from self._rows("load", jobs)
        self._take(0.3)
        yield from self._rows("load", [self._soak(video) for _, video in first])
        if not longest and not self.left_out:
            yield {"test": "Loader", "decoder": "dali", "failed": "the loader decodes no codec with DALI here"}

    def _lockstep(
        self, name: str, tested: Sequence[tuple[str, Video]], step: Step = load.lockstep, **options: Any
    ) -> list[Job]:
        """Return a job per (codec, video), which compares Loaders. See `load.lockstep` for the options."""
        seconds, decoder = self._soak_s / 3, options.get("decode", "dali")
        given = {"device": device_name(self._gpu), "seconds": seconds, **options}
        return [
            Job(step, f"{codec}, {name}", decoder, {"folder": self._folder(video), **given}, seconds) for codec, video in tested
        ]

    def _soak(self, video: Video) -> Job:
        """Return the job that streams epochs. With torchcodec on NVDEC, the second camera is AV1, and `decode` is "auto"."""
        folder, decode, av1 = self._folder(video), "dali", ("av1", SHORT, SIZE)
        if self._gpu is not None and TORCHCODEC_CUDA in self._nvdec and self._write([av1]):
            try:
                folder, decode = videos.mix(str(self._root / "mixed"), folder, self._folder(av1)), "auto"
            except OSError as error:  # such as a full disk
                self.problems.append(f"the dataset of two codecs cannot be written: {error}")
        seconds = max(0.0, min(self._soak_s, self._until - time.perf_counter() - _START_S))
        arguments = {"folder": folder, "device": device_name(self._gpu), "decode": decode, "seconds": seconds}
        return Job(load.soak, "epochs", decode, arguments, 2 * seconds)

    def measure_speed(self) -> Iterator[Report]:
        """Yield rows of the most important codec on a busy GPU, then of each codec and size on an idle one."""
        self._take(0.6)
        settings = [{"per_clip": 1, "threads": threads} for threads in (4, 8, 16)]
        for codec in list(self._longest)[:1]:
            yield from self._speeds((codec, SHORT, FAST), self._nvdec, settings, busy=True)
        self._take(1.0)
        cores = cpu.cores()
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
        test, seconds = f"{codec}, {height}×{width}, {'busy' if busy else 'idle'} GPU", 4 * self._speed_s * len(settings)
        given = {"folder": self._folder(video), "gpu": self._gpu, "settings": settings, "seconds": self._speed_s, "busy": busy}
        on_cpu = {"gpu": None, "settings": [{"threads": cpu.cores()}]}
        jobs = [Job(speed.speed, test, "torchcodec", given | {"decoder": "torchcodec"} | on_cpu, seconds)]
        jobs += [Job(speed.speed, test, decoder, given | {"decoder": decoder}, seconds) for decoder in nvdec]
        reference = 0.0
        for row in self._rows("speed", jobs):
            row["busy"] = busy
            rate = row.get("frames_per_s", 0.0)
            if row["decoder"] == "torchcodec":
                reference = rate
            elif rate and reference:
                row["ratio"] = rate / reference
            yield row

    def _take(self, share: float) -> None:
        """Give the following steps a share of the remaining time."""
        now = time.perf_counter()
        self._until = now + share * (self._end - now)

    def _tried(self, gop: int) -> list[str]:
        """Return the codecs that are tested and can be encoded with a GOP length."""
        return [codec for codec, reason in self.codecs.items() if not reason and gop >= CODECS[codec].min_gop]

    def _folder(self, video: Video) -> str:
        codec, gop, (height, width) = video
        return str(self._root / f"{codec}-{gop}-{height}x{width}")

    def _write(self, wanted: Sequence[Video]) -> bool:
        """Write videos that do not exist yet. Return whether all exist. A codec that FFmpeg cannot encode is not tested."""
        new = {f"{codec}, GOP {gop}, {h}×{w}": (codec, gop, (h, w)) for codec, gop, (h, w) in wanted}
        new = {test: video for test, video in new.items() if video not in self._written}
        jobs = [
            Job(videos.write, test, "", {"folder": self._folder(video), "codec": video[0], "gop": video[1], "size": video[2]})
            for test, video in new.items()
        ]
        for row in self._rows("videos", jobs):
            codec = new[row["test"]][0]
            if "failed" not in row:
                self._written.add(new[row["test"]])
            elif not self.codecs[codec]:
                self.codecs[codec] = f"its videos cannot be written: {row['failed']}"
                self.problems.append(f"{codec}: {self.codecs[codec]}")
        return self._written.issuperset(wanted)

    def _rows(self, part: str, jobs: Sequence[Job]) -> Iterator[Report]:
        """Run jobs, one after the other if they measure time. Jobs for which no time remains are added to `left_out`.

        Args:
            part: Name for `progress`.
            jobs: Jobs of steps that can all run concurrently, or of which none can.

        Yields:
            The rows of the jobs, with `test` and `decoder`. A job that failed has one row with the entry `failed`.
        """

        def run(job: Job) -> Report | None:
            # A step that exceeds its own limit has failed. A step that only exceeds the time of its part is left out.
            limit, left = _STEP_S + job.seconds, self._until - time.perf_counter()
            result = run_step(job.step, time_limit_s=min(limit, left), **job.arguments) if left > 0 else {"out_of_time": True}
            return None if result.pop("out_of_time", False) and left < limit else result

        concurrently = all(job.step in _AT_A_TIME for job in jobs)
        with ThreadPoolExecutor(min(8, cpu.cores()) if concurrently else 1) as pool:
            for number, (job, result) in enumerate(zip(jobs, pool.map(run, jobs), strict=True), 1):
                self._progress(part, number, len(jobs))
                if result is None:
                    self.left_out.append(job.name)
                    continue
                if "exit" in result:
                    self.problems.append(f"{job.name}: {result.pop('exit')}")
                yield from ({"test": job.test, "decoder": job.decoder} | row for row in result.get("rows", [result]))


def _refusal(gpu: int | None, codec: str) -> str:
    """Return the reason why DALI does not decode a codec. Empty if it does."""
    if gpu is not None:
        return capability(gpu, codec, "420", 8).refusal(*SIZE)
    return "" if codec in DALI_ON_CPU else f"DALI decodes {', '.join(DALI_ON_CPU)} on a CPU"


def _problem(row: Report) -> str:
    """Return what is wrong with a row of the report. Empty if nothing is, or if the Loader would refuse the video."""
    if row.get("refused"):
        return ""
    problem = row.get("failed") or next(_faults(row), "")
    name = ", ".join(filter(None, (row["test"], row["decoder"], row.get("shape"))))
    return f"{name}: {problem}" if problem else ""


def _faults(row: Report) -> Iterator[str]:
    """Yield the faults of a row: wrong frames or colours, a camera on another route, and memory that grew over the epochs."""
    if row.get("wrong"):
        yield f"{row['wrong']} of {row['frames']} frames are of another frame"
    error = row.get("mean_error", 0.0)
    if not error <= COLOUR_TOLERANCE:  # NaN is wrong, too
        yield f"the frames differ from FFmpeg's by {error} on average, and at most {COLOUR_TOLERANCE} is allowed"
    if "routes" in row:
        # With "auto", the second camera has a codec that NVDEC may not decode, so only the first one counts.
        decoders = set(list(row["routes"].values())[: 1 if row["decoder"] == "auto" else None])
        if row["route_changes"] or len(decoders) != 1 or decoders == {"torchcodec"}:
            yield f"a camera is not on the requested route: {row['routes']}"
    for kind in ("memory", "gpu_memory"):
        used = row.get(kind)
        if used and used["first"] and used["last"] > used["first"] * _GROWTH[0] + _GROWTH[1]:
            yield f"{kind} grew from {used['first']} to {used['last']} bytes in {row['epochs']} epochs"
