"""Measure the gains and costs of `dali-stream prepare`.

    python benchmarks/prepare.py speed URI... [--rounds 5] [--out REPORT.json]
    python benchmarks/prepare.py codecs URI [--rounds 5] [--out REPORT.json]
    python benchmarks/prepare.py overhead [--tasks 100000] [--out REPORT.json]
    python benchmarks/prepare.py chart REPORT.json --out CHART.svg

speed     frames/s of the first epoch at 224×224 on this CPU, and size in bytes, of each dataset before and after
          `prepare --for cpu --size 224x224`. Both are measured in turns, and the medians are reported.
codecs    frames/s of decoding every tenth frame of a 224×224 video, and bytes per frame, for H.264, AV1 and MJPEG at GOP 1 and
          2, each with the lowest quality that has at least 37 dB PSNR over RGB. Also the rate of a Loader on 4 episodes that
          `prepare` encodes with three of these settings. The settings of `--for cpu` were chosen from these results.
chart     chart of the rates in a report of `speed`, as drawn by `make figures`
overhead  time per empty task, on 1 and 2 processes; speedup of 2 processes over 1 for tasks of 50 ms; and time and
          memory of the process that keeps the state of a run with many files, with an executor that answers at once
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
from drawing import HEADING, ROW, Bar, Picture, bars, new_figure, spoken, style
from torchcodec.decoders import VideoDecoder

import dali_stream
from dali_stream.system.process import cores, processor
from dali_stream.tools import environment
from dali_stream.tools.preparation import executors
from dali_stream.tools.preparation.place import LocalPlace
from dali_stream.tools.preparation.plan import Plan
from dali_stream.tools.preparation.state import RunState

SIZE = (224, 224)
TARGET_DB = 37.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, call in (("speed", speed), ("codecs", codecs), ("overhead", overhead)):
        subparser = commands.add_parser(name)
        subparser.set_defaults(call=call)
        if name != "overhead":
            subparser.add_argument("uri", nargs="+" if name == "speed" else None)  # type: ignore[arg-type]
            subparser.add_argument("--rounds", type=int, default=5)
        else:
            subparser.add_argument("--tasks", type=int, default=100_000)
        subparser.add_argument("--out", type=Path)
    subparser = commands.add_parser("chart")
    subparser.add_argument("report", type=Path)
    subparser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    if arguments.command == "chart":
        arguments.out.write_text(chart(json.loads(arguments.report.read_text())).svg())
        return 0
    machine = {"processor": processor(), "cores": cores(), "python": platform.python_version(), "torch": torch.__version__}
    report = {"command": arguments.command, "date": date.today().isoformat(), "machine": machine, **arguments.call(arguments)}
    text = environment.report_json(report)
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n")
    return 0


# ---- speed


def speed(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure the rates and sizes of each dataset before and after `prepare`."""
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for uri in arguments.uri:
            name, out = Path(uri).name, f"{folder}/{Path(uri).name}"
            begin = time.perf_counter()
            report = dali_stream.tools.prepare(uri, out, for_="cpu", size=SIZE)
            took = time.perf_counter() - begin
            rates: dict[str, list[float]] = {"before": [], "after": []}
            for _ in range(arguments.rounds):
                for state, address in (("before", uri), ("after", out)):
                    rates[state].append(rate(address))
            cameras = report.as_dict()["cameras"]
            results[name] = {
                "frames": report.frames,
                "prepare_s": round(took, 1),
                "bytes": {"before": nbytes(uri), "after": nbytes(out)},
                "frames_per_s": {state: round(statistics.median(values)) for state, values in rates.items()},
                "rounds": {state: [round(value) for value in values] for state, values in rates.items()},
                "cameras": cameras,
            }
    return {"size": SIZE, "datasets": results}


def rate(uri: str) -> float:
    """Return the rate of the first epoch without its first batch, in delivered frames/s."""
    dataset = dali_stream.Dataset(uri)
    with dali_stream.Loader(dataset, batch_size=32, image_size=SIZE, image_dtype="uint8", device="cpu") as loader:
        batches, count = iter(loader), 0
        next(batches)
        begin = time.perf_counter()
        for batch in batches:
            count += len(batch["index"]) * len(dataset.cameras)
        return count / (time.perf_counter() - begin)


def nbytes(uri: str) -> int:
    return sum(path.stat().st_size for path in Path(uri, "videos").rglob("*.mp4"))


@style()
def chart(report: dict[str, Any]) -> Picture:
    """Draw bars of the rates before and after `prepare`."""
    states = {"before": "as recorded", "after": "prepared"}
    title = f"Frames/s of the first epoch at 224×224, {report['machine']['cores']} cores"
    rows = [
        Bar(f"{name}, {label}", each["frames_per_s"][state], f"{each['frames_per_s'][state]}", state == "after")
        for name, each in report["datasets"].items()
        for state, label in states.items()
    ]
    figure = new_figure(HEADING + ROW * len(rows))
    bars(figure.subplots(), title, rows)
    return Picture(figure, title, spoken(title, rows))


# ---- codecs

_ENCODERS = {
    "H.264": (["-c:v", "libx264", "-preset", "veryfast", "-bf", "0", "-sc_threshold", "0"], "-crf", range(8, 40)),
    "AV1": (
        ["-c:v", "libsvtav1", "-preset", "10", "-svtav1-params", "pred-struct=1:enable-tf=0:scm=0"],
        "-crf",
        range(20, 64, 2),
    ),
    "MJPEG": (["-c:v", "mjpeg", "-pix_fmt", "yuvj420p"], "-q:v", range(2, 20)),
}


def codecs(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure decoding rates and sizes of each codec and GOP at nearly equal quality."""
    frames = sample(arguments.uri)
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        made = {}
        for codec, (usual, option, values) in _ENCODERS.items():
            for gop in (1,) if codec == "MJPEG" else (1, 2):
                settings = usual
                if codec == "AV1" and gop == 1:  # SVT-AV1 marks only the first frame as a keyframe
                    settings = ["-c:v", "libaom-av1", "-cpu-used", "8", "-usage", "realtime", "-b:v", "0"]
                name, low, high = f"{codec}, GOP {gop}", 0, len(values) - 1
                path = Path(folder, f"{codec}-{gop}.mp4")
                while low < high:  # a binary search for the lowest quality with at least TARGET_DB
                    middle = (low + high + 1) // 2
                    if encoded(frames, path, [*settings, "-g", str(gop), option, str(values[middle])]) >= TARGET_DB:
                        low = middle
                    else:
                        high = middle - 1
                psnr = encoded(frames, path, [*settings, "-g", str(gop), option, str(values[low])])
                made[name] = path
                results[name] = {
                    "psnr": round(psnr, 2),
                    option[1:]: values[low],
                    "bytes_per_frame": round(path.stat().st_size / len(frames)),
                }
        rates: dict[str, list[float]] = {name: [] for name in made}
        for _ in range(arguments.rounds):
            for name, path in made.items():
                rates[name].append(decoding_rate(path, len(frames)))
        for name, values_of in rates.items():
            results[name]["frames_per_s_per_thread"] = round(statistics.median(values_of))
        prepared = {}
        for name, codec, gop in (("H.264, GOP 1", "h264", 1), ("H.264, GOP 2", "h264", 2), ("AV1, GOP 2", "av1", 2)):
            prepared[name] = f"{folder}/{codec}-{gop}"
            options: dict[str, Any] = {
                "size": SIZE,
                "codec": codec,
                "gop": gop,
                "crf": results[name]["crf"],
                "episodes": range(4),
            }
            dali_stream.tools.prepare(arguments.uri, prepared[name], **options)
        loaded: dict[str, list[float]] = {name: [] for name in prepared}
        for _ in range(arguments.rounds):
            for name, out in prepared.items():
                loaded[name].append(rate(out))
        for name, values_of in loaded.items():
            results[name]["loader_frames_per_s"] = round(statistics.median(values_of))
    return {"frames": len(frames), "size": SIZE, "codecs": results}


def sample(uri: str, count: int = 300) -> np.ndarray:
    """Return the first frames of a dataset at 224×224, shape (n, H, W, 3)."""
    dataset = dali_stream.Dataset(uri)
    options: dict[str, Any] = {"batch_size": count, "shuffle": False, "image_size": SIZE, "image_dtype": "uint8"}
    with dali_stream.Loader(dataset, device="cpu", **options) as loader:
        frames = next(iter(loader))[dataset.cameras[0]]
    return frames.permute(0, 2, 3, 1).contiguous().numpy()


def encoded(frames: np.ndarray, path: Path, settings: list[str]) -> float:
    """Encode frames. Return the PSNR over RGB, in dB."""
    raw = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{SIZE[1]}x{SIZE[0]}", "-r", "30", "-i", "-"]
    pixels = [] if "-pix_fmt" in settings else ["-pix_fmt", "yuv420p"]
    command = ["ffmpeg", "-hide_banner", "-loglevel", "error", "-y", *raw, *pixels, *settings, str(path)]
    subprocess.run(
        command,
        input=frames.tobytes(),
        check=True,
        env={"SVT_LOG": "1", "PATH": str(Path(shutil.which("ffmpeg") or "").parent)},
    )
    decoded = VideoDecoder(path, dimension_order="NHWC").get_frames_in_range(0, len(frames)).data.numpy()
    return float(10 * np.log10(255**2 / np.mean((decoded.astype(np.float32) - frames) ** 2)))


def decoding_rate(path: Path, count: int) -> float:
    """Return the rate of one thread that decodes every tenth frame, each with its GOP prefix, in frames/s."""
    decoder = VideoDecoder(path, num_ffmpeg_threads=1)
    wanted = list(range(1, count, 10))
    begin = time.perf_counter()
    for frame in wanted:
        decoder.get_frame_at(frame)
    return len(wanted) / (time.perf_counter() - begin)


# ---- overhead


def nothing(task: dict[str, Any]) -> dict[str, Any]:
    return {"path": task["path"], "note": {"bytes": 1}, "upload": None}


def work(task: dict[str, Any]) -> dict[str, Any]:
    """Use 50 ms of CPU time."""
    end = time.thread_time() + 0.05
    while time.thread_time() < end:
        pass
    return nothing(task)


def seconds(jobs: int, call: Any, count: int) -> float:
    """Return the time of `count` tasks in seconds, without the time in which the processes start."""
    tasks = [{"path": f"file-{n}"} for n in range(count)]
    results = (result for result in executors.in_processes(call, tasks, jobs) if result is not None)
    for _ in range(jobs):
        next(results)
    begin = time.perf_counter()
    assert len(list(results)) == count - jobs
    return time.perf_counter() - begin


def overhead(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure the overhead per task, and the time and memory of the process that keeps the state of a run."""
    per_task = {jobs: 1000 * seconds(jobs, nothing, 500) / 500 for jobs in (1, 2)}
    one, two = (statistics.median(seconds(jobs, work, 100) for _ in range(3)) for jobs in (1, 2))
    episodes = [
        {"old": n, "new": n, "length": 300, "data": "data/chunk-000/file-000.parquet", "place": 0, "first": 0}
        for n in range(20)
    ]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tasks = [
        {"path": f"videos/camera/chunk-000/file-{n}.mp4", "camera": "camera", "episodes": episodes}
        for n in range(arguments.tasks)
    ]
    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        run = RunState(LocalPlace(folder), Plan({}, json.loads(json.dumps(tasks))), {}, lambda status: None)
        for result in map(nothing, tasks):
            run.add(result)
            run.update()
        run.update("finishing")
        took, memory = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert run.written == arguments.tasks
    return {
        "ms_per_task": {str(jobs): round(value, 2) for jobs, value in per_task.items()},
        "two_workers_against_one": round(one / two, 2),
        "simulated_tasks": arguments.tasks,
        "coordinator_s": round(took, 1),
        "coordinator_mb": round(memory / 1024),
    }


if __name__ == "__main__":
    sys.exit(main())
