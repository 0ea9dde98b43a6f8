"""`dali-stream bench`: throughput without a model."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from dali_stream.cli import arguments, console
from dali_stream.errors import counted
from dali_stream.observe import tracing


@arguments.with_dataset_options
def bench(
    options: arguments.DatasetOptions,
    uris: arguments.Uris,
    mode: Annotated[
        str, typer.Option(metavar="single|sarm|action_chunk", help="Current frames; 8 steps 1 s apart; frames and 50 actions.")
    ] = "single",
    action: arguments.Action = None,
    source: Annotated[
        str | None, typer.Option(metavar="LABEL", help="Name of the storage in reports; default: the URI's scheme.")
    ] = None,
    batch_size: Annotated[int, typer.Option(metavar="N", parser=arguments.count, help="Samples per batch and rank.")] = 64,
    num_batches: Annotated[int, typer.Option(metavar="N", parser=arguments.count, help="Timed batches.")] = 100,
    warmup: Annotated[int, typer.Option(metavar="N", parser=arguments.count, help="Batches before timing starts.")] = 10,
    num_threads: Annotated[
        int | None, typer.Option(metavar="N", parser=arguments.count, help="Decode threads; default: the number of cores.")
    ] = None,
    decode: Annotated[
        str, typer.Option(metavar="auto|dali|torchcodec|torchcodec-cuda", help="Decoder; auto: the faster one.")
    ] = "auto",
    image_size: Annotated[str, typer.Option(metavar="HxW|recorded", help="Size of the frames.")] = "224x224",
    image_dtype: Annotated[str, typer.Option(metavar="uint8|float32", help="Type of the frames.")] = "uint8",
    device: Annotated[str, typer.Option(metavar="auto|cpu|cuda|cuda:N", help="Device of the batches.")] = "auto",
    consumers: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            parser=arguments.count,
            help="Consumers of the order, a multiple of the ranks; default: fits the batch.",
        ),
    ] = None,
    memory_budget: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Memory for caches and prefetching, per rank. Default: up to 4GiB.")
    ] = None,
    frame_cache: arguments.FrameCache = None,
    frame_cache_bytes: arguments.FrameCacheBytes = None,
    out_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write SOURCE-MODE-DECODE.json and .csv into this folder.")
    ] = None,
    trace: Annotated[Path | None, typer.Option(metavar="FILE", help="Record a trace for ui.perfetto.dev.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
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
    size = None if image_size == "recorded" else arguments.size("--image-size", image_size)
    loader: dict[str, Any] = {
        "batch_size": batch_size, "num_threads": num_threads, "decode": decode, "image_size": size, "image_dtype": image_dtype,
        "consumers": consumers, "memory_budget": memory_budget, "frame_cache": frame_cache,
        "frame_cache_bytes": frame_cache_bytes,
    }  # fmt: skip
    settings: dict[str, Any] = {"mode": mode, "num_batches": num_batches, "warmup": warmup, "loader": loader, "action": action}
    given = options.arguments()
    with arguments.opened_mixture(uris, **given) as dataset:
        arguments.check_action(action, dataset)
        place = {"revision": options.revision, "cache_dir": options.cache_dir}
        place |= {name: given[name] for name in ("clock", "tolerance_s") if name in given}
        place["data_files_root"] = options.data_files_root and dataset.source.data_store.where("")  # without credentials
        recording = contextlib.nullcontext() if trace is None or os.environ.get("RANK", "0") != "0" else tracing.trace(trace)
        with console.progress("warm-up, batches", enabled=not as_json) as show, recording:
            report = run(dataset, **settings, device=device, head={"source": source, **place}, progress=show)
    if report is not None:  # only the main rank has a report
        _show(report if out_dir is None else report | {"written": str(write(report, out_dir))}, as_json)


def _show(report: dict[str, Any], as_json: bool) -> None:
    if as_json:
        console.print_json(report)
    else:
        console.results().print(_table(report))


def _speed(report: dict[str, Any]) -> str:
    return f"{report['frames_per_s_node']:.0f} frames/s, {report['samples_per_s']:.0f} samples/s, per node"


def _cpu(ms: dict[str, float | None]) -> str:
    """Return the CPU time of the threads as text, without those that did nothing."""
    names = {"decoded_frame": "decode a frame", "delivered_frame": "copy a frame", "sample": "plan a sample"}
    parts = [f"{ms[key]:.2f} ms to {name}" for key, name in names.items() if ms[key] is not None]
    return f"; {', '.join(parts)}"


def _table(report: dict[str, Any]) -> Table:
    from dali_stream.tools.bench import stage_seconds

    table = console.pairs()
    size = "recorded size" if report["image_size"] is None else "×".join(map(str, report["image_size"]))
    settings = f"{report['mode']}, batches of {report['batch_size']}, {size}, {report['image_dtype']}"
    table.add_row("dataset", f"{report['dataset']}: {settings}")
    for name, part in report.get("datasets", {}).items():
        table.add_row(name, f"{part['samples']} samples, {part['delivered']:.1%}; its share is {part['share']:.1%}")
    later = report["later_epochs"]
    table.add_row("speed" if later is None else "first epoch", _speed(report))
    if later:
        decoded = later["decoded_per_delivered_frame"]
        work = f"{decoded:.2f} frames per delivered frame" if decoded else "nothing"
        table.add_row("later epochs", f"{_speed(later)}; they decode {work}, because all frames fit in memory_budget")
    table.add_row(
        "measured", f"{report['frames']} frames in {report['wallclock_s']:.1f} s, by {counted(report['ranks'], 'rank')}"
    )
    table.add_row("first batch", f"{report['first_batch_latency_s']:.2f} s after creating the Loader")
    waits = ", ".join(f"p{p} {report[f'p{p}_sample_latency_ms']:.1f} ms" for p in (50, 95, 99))
    table.add_row("wait for a batch", waits)
    table.add_row("bottleneck", report["bottleneck"]["text"])
    if later:
        table.add_row("", f"In later epochs: {later['bottleneck']['text']}")
    for who, seconds in stage_seconds(report).items():
        table.add_row(who, ", ".join(f"{name} {value:.1f} s" for name, value in seconds.items()))
    table.add_row("CPU", f"{report['cpu_s_per_sample'] * 1e3:.2f} ms a sample{_cpu(report['cpu_ms'])}")
    decoded = report["decoded_per_delivered_frame"]
    table.add_row("decoded", "no video" if decoded is None else f"{decoded:.2f} frames per delivered frame")
    fetched, hits = (console.megabytes(report[key]) for key in ("fetched_bytes", "cached_bytes"))
    table.add_row("network", f"{fetched} in {report['requests']} requests; {hits} from the cache")
    table.add_row("mixing", f"{report['unique_episodes_per_batch']:.1f} episodes per batch")
    table.add_row("peak memory", f"{console.megabytes(report['peak_rss_bytes'])} of a process")
    if report["peak_gpu_bytes"] is not None:
        table.add_row("", f"{console.megabytes(report['peak_gpu_bytes'])} of the GPU, all processes")
    for camera, route in report["routes"].items():
        table.add_row(camera.rpartition(".")[2], f"{route['decoder']}: {route['reason']}")
    machine = report["machine"]
    table.add_row("machine", f"{machine['processor']}, {machine['cores']} cores, {machine['gpu'] or report['device']}")
    return table
