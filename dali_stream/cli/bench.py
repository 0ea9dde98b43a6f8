"""`dali-stream bench`: throughput without a model."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from dali_stream.cli import arguments, console, datasets, kinds
from dali_stream.errors import counted
from dali_stream.observe import tracing


@arguments.with_options(
    batch_size=64, num_threads=None, decode="auto", image_size="224x224", image_dtype="uint8", device="auto", consumers=None,
    memory_budget=None, frame_cache=None, frame_cache_bytes=None,
)  # fmt: skip
def bench(
    dataset: arguments.DatasetOptions,
    loader: arguments.LoaderOptions,
    uris: arguments.Uris,
    mode: Annotated[
        str, Option(metavar="single|sarm|action_chunk", help="Current frames; 8 steps 1 s apart; frames and 50 actions.")
    ] = "single",
    action: arguments.Action = None,
    source: Annotated[
        str | None, Option(metavar="LABEL", help="Name of the storage in reports; default: the URI's scheme.")
    ] = None,
    num_batches: Annotated[int, kinds.count(help="Timed batches.")] = 100,
    warmup: Annotated[int, kinds.count(help="Batches before timing starts.")] = 10,
    out_dir: Annotated[Path | None, Option(metavar="DIR", help="Write SOURCE-MODE-DECODE.json into this folder.")] = None,
    trace: Annotated[Path | None, Option(metavar="FILE", help="Record a trace for ui.perfetto.dev.")] = None,
    as_json: arguments.Json = False,
) -> None:
    """Measure data loading alone: batches are moved to the device and dropped.

    A rate is the number of frames per second of a node, from the end of the warm-up to the last batch. If all frames fit in
    --memory-budget, each frame is decoded once. The first epoch is then timed separately from later ones.

    A dataset without cameras is measured with --mode action_chunk, in samples per second.

    To use several ranks, run `accelerate launch benchmarks/streaming.py URI ...`. The exit code is 1 if no frame was measured.
    """
    from dali_stream.tools.bench import run, write

    if source is not None and not re.fullmatch(r"[\w.-]{1,64}", source):
        raise ValueError(f"--source must be up to 64 letters, digits, '_', '.' and '-', got {source!r}")
    if out_dir is not None:
        out_dir.mkdir(parents=True, exist_ok=True)
    head: dict[str, Any] = {"source": source, "revision": dataset.get("revision"), "cache_dir": dataset.get("cache_dir")}
    head |= {name: dataset[name] for name in ("clock", "tolerance_s", "trust_timestamps") if name in dataset}
    if "episodes" in dataset:  # `episodes` of a report is their number
        head["selected_episodes"] = dataset["episodes"]
    settings: dict[str, Any] = {"mode": mode, "num_batches": num_batches, "warmup": warmup, "action": action}
    settings |= {"device": loader.pop("device"), "loader": loader}
    with datasets.opened(uris, dataset) as opened:
        datasets.check_action(action, opened)
        head["data_files_root"] = dataset.get("data_files_root") and opened.source.data_store.where("")  # without credentials
        recording = contextlib.nullcontext() if trace is None or os.environ.get("RANK", "0") != "0" else tracing.trace(trace)
        with console.progress("warm-up, batches", enabled=not as_json) as show, recording:
            report = run(opened, **settings, head=head, progress=show)
    if report is None:  # only the main rank has a report
        return
    if out_dir is not None:
        report["written"] = str(write(report, out_dir))
    console.show(report if as_json else [console.pairs(_rows(report))])


def _speed(report: dict[str, Any]) -> str:
    return f"{report['frames_per_s_node']:.0f} frames/s, {report['samples_per_s']:.0f} samples/s, per node"


def _cpu(ms: dict[str, float | None]) -> str:
    """Return the CPU time of the threads as text, without those that did nothing."""
    names = {"decoded_frame": "decode a frame", "delivered_frame": "copy a frame", "sample": "plan a sample"}
    parts = [f"{ms[key]:.2f} ms to {name}" for key, name in names.items() if ms[key] is not None]
    return f"; {', '.join(parts)}"


def _rows(report: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the names and values of the table."""
    from dali_stream.tools.bench import stage_seconds

    size = "recorded size" if report["image_size"] is None else "×".join(map(str, report["image_size"]))
    settings = f"{report['mode']}, batches of {report['batch_size']}, {size}, {report['image_dtype']}"
    yield "dataset", f"{report['dataset']}: {settings}"
    for name, part in report.get("datasets", {}).items():
        yield name, f"{part['samples']} samples, {part['delivered']:.1%}; its share is {part['share']:.1%}"
    later = report["later_epochs"]
    yield "speed" if later is None else "first epoch", _speed(report)
    if later:
        decoded = later["decoded_per_delivered_frame"]
        work = f"{decoded:.2f} frames per delivered frame" if decoded else "nothing"
        yield "later epochs", f"{_speed(later)}; they decode {work}, because all frames fit in memory_budget"
    yield "measured", f"{report['frames']} frames in {report['wallclock_s']:.1f} s, by {counted(report['ranks'], 'rank')}"
    yield "first batch", f"{report['first_batch_latency_s']:.2f} s after creating the Loader"
    yield "wait for a batch", ", ".join(f"p{p} {report[f'p{p}_sample_latency_ms']:.1f} ms" for p in (50, 95, 99))
    yield "bottleneck", report["bottleneck"]["text"]
    if later:
        yield "", f"In later epochs: {later['bottleneck']['text']}"
    for who, seconds in stage_seconds(report).items():
        yield who, ", ".join(f"{name} {value:.1f} s" for name, value in seconds.items())
    yield "CPU", f"{report['cpu_s_per_sample'] * 1e3:.2f} ms a sample{_cpu(report['cpu_ms'])}"
    decoded = report["decoded_per_delivered_frame"]
    yield "decoded", "no video" if decoded is None else f"{decoded:.2f} frames per delivered frame"
    fetched, hits = (console.megabytes(report[key]) for key in ("fetched_bytes", "cached_bytes"))
    yield "network", f"{fetched} in {report['requests']} requests; {hits} from the cache"
    yield "mixing", f"{report['unique_episodes_per_batch']:.1f} episodes per batch"
    yield from console.machine_rows(report, "a process")
