"""`dali-stream bench`: throughput without a model."""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from dali_stream.cli import arguments, console, datasets, kinds
from dali_stream.errors import counted
from dali_stream.observe import tracing
from dali_stream.system.cpu import available_cores

if TYPE_CHECKING:
    from dali_stream.tools.bench import Node


@arguments.with_options(
    batch_size=64, num_threads=None, decode_processes=None, decode="auto", image_size="224x224", image_dtype="uint8",
    device="auto", consumers=None, memory_budget=None, frame_cache=None, frame_cache_bytes=None, gpu_cache=None,
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
    step_ms: Annotated[
        float | None, Option(metavar="MS", help="Milliseconds of a training step without loading: print what its node needs.")
    ] = None,
    ranks: Annotated[int | None, kinds.count(help="Ranks of the node, one per GPU. Default: those on this machine.")] = None,
    node_cores: Annotated[int | None, kinds.count("--cores", help="Cores of the node. Default: those here.")] = None,
    as_json: arguments.Json = False,
) -> None:
    """Measure data loading alone: batches are moved to the device and dropped.

    A rate is the number of frames per second of a node, from the end of the warm-up to the last batch. If all frames fit in
    --memory-budget, each frame is decoded once. The first epoch is then timed separately from later ones.

    A dataset without cameras is measured with --mode action_chunk, in samples per second.

    With --step-ms, the command also prints the cores, memory and disk that a node needs so that no rank waits for batches. It
    computes them from the measured CPU time, and assumes that the cores of the node are as fast as those here.

    To use several ranks, run `accelerate launch -m dali_stream bench URI ...`. The exit code is 1 if no frame was measured.
    """
    from dali_stream.tools.bench import run, write

    node = _node(step_ms, ranks, node_cores)
    if source is not None and not re.fullmatch(r"[\w.-]{1,64}", source):
        raise ValueError(f"--source must be up to 64 letters, digits, '_', '.' and '-', got {source!r}")
    if out_dir is not None:
        out_dir.mkdir(parents=True, exist_ok=True)
    head: dict[str, Any] = {"source": source, "revision": dataset.get("revision"), "cache_dir": dataset.get("cache_dir")}
    head |= {name: dataset[name] for name in ("clock", "tolerance_s", "trust_timestamps") if name in dataset}
    if "episodes" in dataset:  # `episodes` of a report is their number
        head["selected_episodes"] = dataset["episodes"]
    settings: dict[str, Any] = {"mode": mode, "num_batches": num_batches, "warmup": warmup, "action": action, "node": node}
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


def _node(step_ms: float | None, ranks: int | None, node_cores: int | None) -> Node | None:
    """Return the node of the options, or None without --step-ms."""
    from dali_stream.tools.bench import Node

    if step_ms is None:
        for name, value in (("--ranks", ranks), ("--cores", node_cores)):
            if value is not None:
                raise ValueError(f"--step-ms must be given with {name}: the milliseconds of a training step without loading")
        return None
    if not 0 < step_ms < math.inf:
        raise ValueError(f"--step-ms must be greater than 0, got {step_ms:g}. Leave it out if it is unknown")
    here = available_cores()
    return Node(ranks or here.ranks.count, node_cores or here.count * here.ranks.count, step_ms / 1000)


def _speed(report: dict[str, Any]) -> str:
    return f"{report['frames_per_s_node']:.0f} frames/s, {report['samples_per_s']:.0f} samples/s, per node"


def _cpu(ms: dict[str, float | None]) -> str:
    """Return the CPU time of the threads as text, without those that did nothing."""
    names = {"decoded_frame": "decode a frame", "delivered_frame": "copy a frame", "sample": "plan a sample"}
    parts = [f"{ms[key]:.2f} ms to {name}" for key, name in names.items() if ms[key] is not None]
    return f"; {', '.join(parts)}"


def _needs(node: dict[str, Any], memory_budget: str) -> Iterator[tuple[str, str]]:
    """Yield the rows with what a node needs."""
    needed, least, decoded = node["cores_needed"], node["cores_without_decoding"], node["decoded_per_delivered_frame"]
    work = "" if decoded is None else f", with {decoded:.2f} frames decoded per delivered frame; {least:.1f} without decoding"
    enough = "enough" if needed <= node["cores"] else "enough without decoding" if least <= node["cores"] else "not enough"
    yield "node", f"{needed:.1f} cores for {counted(node['ranks'], 'rank')} and a step of {node['step_s'] * 1e3:g} ms{work}"
    yield "", f"{counted(node['cores'], 'core')}: {enough}"
    if node["planner_s"] > node["step_s"]:
        yield "", f"the planner of a rank takes {node['planner_s'] * 1e3:.0f} ms per step, and more cores do not change that"
    memory, disk, rate = (console.megabytes(node[key]) for key in ("memory_bytes", "frame_cache_bytes", "network_bytes_per_s"))
    yield "", f"{memory} of memory: for each rank, a memory_budget of {memory_budget} and 1 GB"
    yield "", f"{disk} of local disk for a frame_cache of all frames"
    if node["network_bytes_per_s"]:
        yield "", f"{rate}/s over the network, until a cache_dir has the dataset"


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
    if report["node"] is not None:
        yield from _needs(report["node"], report["memory_budget"])
    yield "mixing", f"{report['unique_episodes_per_batch']:.1f} episodes per batch"
    yield from console.machine_rows(report, "a process")
