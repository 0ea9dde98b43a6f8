"""`dali-stream bench`: how fast batches come, without a model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dali_stream.cli import arguments, console

if TYPE_CHECKING:
    from rich.table import Table


def bench(
    uri: Annotated[str, typer.Argument(metavar="URI", help="The dataset.")],
    mode: Annotated[
        str, typer.Option(metavar="single|sarm|action_chunk", help="Current frames; 8 steps 1 s apart; frames and 50 actions.")
    ] = "single",
    source: Annotated[
        str | None, typer.Option(metavar="LABEL", help="What reports call the place of the data; its scheme unless given.")
    ] = None,
    batch_size: Annotated[int, typer.Option(metavar="N", parser=arguments.count, help="Samples per batch and rank.")] = 64,
    num_batches: Annotated[int, typer.Option(metavar="N", parser=arguments.count, help="Batches that are timed.")] = 100,
    warmup: Annotated[int, typer.Option(metavar="N", parser=arguments.count, help="Batches before those.")] = 10,
    threads: Annotated[
        int | None, typer.Option(metavar="N", parser=arguments.count, help="Of the decoders; the cores unless given.")
    ] = None,
    decode: Annotated[str, typer.Option(metavar="auto|dali|torchcodec", help="Decoder; auto: NVDEC where it can.")] = "auto",
    image_size: Annotated[
        str, typer.Option(metavar="HxW|recorded", help="Size to resize frames to, or the recorded one.")
    ] = "224x224",
    image_dtype: Annotated[str, typer.Option(metavar="uint8|float32", help="Of the frames.")] = "uint8",
    device: Annotated[str, typer.Option(metavar="auto|cpu|cuda|cuda:N", help="Where batches are made.")] = "auto",
    consumers: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            parser=arguments.count,
            help="Of the order, a multiple of the ranks; chosen for the batch unless given.",
        ),
    ] = None,
    memory_budget: Annotated[str, typer.Option(metavar="SIZE", help="Bound of resident encoded bytes, per rank.")] = "4GiB",
    revision: arguments.Revision = None,
    data_files_root: arguments.DataFilesRoot = None,
    cache_dir: arguments.CacheDir = None,
    storage_options: arguments.StorageOptions = None,
    out_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write SOURCE-MODE-DECODE.json and .csv into this folder.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Measure data loading alone: batches are brought to the device and dropped.

    Rates are sustained: frames over wall-clock time from after the warm-up to the last batch, per node. Several ranks:
    accelerate launch benchmarks/streaming.py URI ... Exit code 1 where no frame was measured.
    """
    console.load_library()
    from accelerate import PartialState
    from accelerate.utils import gather_object

    from dali_stream import process
    from dali_stream.tools.bench.measure import Settings, measure
    from dali_stream.tools.bench.report import node_report, write

    if source is not None and not re.fullmatch(r"[\w.-]{1,64}", source):
        raise ValueError(f"--source is {source!r}; it names the report's file: up to 64 letters, digits, '_', '.' and '-'")
    if out_dir is not None:
        out_dir.mkdir(parents=True, exist_ok=True)
    place = {"revision": revision, "data_files_root": data_files_root, "cache_dir": cache_dir}
    size = None if image_size == "recorded" else arguments.size("--image-size", image_size)
    loader: dict[str, Any] = {
        "batch_size": batch_size, "threads": threads, "decode": decode, "image_size": size, "image_dtype": image_dtype,
        "consumers": consumers, "memory_budget": memory_budget,
    }  # fmt: skip
    state = PartialState(cpu=process.gpu(device) is None)
    dataset = arguments.dataset(uri, storage_options=storage_options, **place)
    own = measure(dataset, Settings(mode, num_batches, warmup, loader), device, state.wait_for_everyone)
    ranks = gather_object([own])
    # A process that ends with Gloo's threads alive may abort: https://github.com/pytorch/pytorch/pull/179291.
    state.destroy_process_group()
    if not state.is_main_process:
        return
    label = source or (dataset.uri.partition("://")[0] if "://" in dataset.uri else "local")
    head = {"dataset": dataset.uri, "source": label, "mode": mode, "num_batches": num_batches, "warmup": warmup}
    head |= {"episodes": dataset.num_episodes, "dataset_frames": dataset.num_frames, "fps": dataset.fps}
    head |= {"cameras": {key: dataset.picture_size(key) for key in dataset.cameras}}
    place["data_files_root"] = data_files_root and dataset.data_store.where("")  # without credentials
    report = node_report(ranks, head | place | loader | {"threads": threads or process.cores()})
    if out_dir is not None:
        report["written"] = str(write(report, out_dir))
    if as_json:
        console.print_json(report)
    else:
        console.results().print(_table(report))


def _table(report: dict[str, Any]) -> Table:
    from dali_stream.pipeline.bottleneck import STAGES

    made = console.pairs()
    size = "recorded size" if report["image_size"] is None else "×".join(map(str, report["image_size"]))
    what = f"{report['mode']}, batches of {report['batch_size']}, {size}, {report['image_dtype']}"
    made.add_row("dataset", f"{report['dataset']}: {what}")
    made.add_row("speed", f"{report['frames_per_s_node']:.0f} frames/s, {report['samples_per_s']:.0f} samples/s, per node")
    ranks = "1 rank" if report["ranks"] == 1 else f"{report['ranks']} ranks"
    made.add_row("measured", f"{report['frames']} frames in {report['wallclock_s']:.1f} s, by {ranks}")
    made.add_row("first batch", f"{report['first_batch_latency_s']:.2f} s after the Loader was made")
    waits = ", ".join(f"p{p} {report[f'p{p}_sample_latency_ms']:.1f} ms" for p in (50, 95, 99))
    made.add_row("wait for a batch", waits)
    made.add_row("bottleneck", report["bottleneck"]["text"])
    for who, stages in STAGES.items():
        made.add_row(who, ", ".join(f"{name} {report['stage_s_total'][key]:.1f} s" for key, name in stages.items()))
    made.add_row("CPU", f"{report['cpu_s_per_sample'] * 1e3:.2f} ms a sample")
    decoded = report["decoded_per_delivered_frame"]
    made.add_row("decoded", "no video" if decoded is None else f"{decoded:.2f} frames for each one delivered")
    fetched, hits = (console.megabytes(report[key]) for key in ("fetched_bytes", "cached_bytes"))
    made.add_row("network", f"{fetched} in {report['requests']} requests; {hits} from the cache")
    made.add_row("mixture", f"{report['unique_episodes_per_batch']:.1f} episodes in a batch")
    made.add_row("peak memory", f"{console.megabytes(report['peak_rss_bytes'])} of a process")
    if report["peak_gpu_bytes"] is not None:
        made.add_row("", f"{console.megabytes(report['peak_gpu_bytes'])} of the GPU, by all processes")
    for camera, route in report["routes"].items():
        made.add_row(camera.rpartition(".")[2], f"{route['decoder']}: {route['reason']}")
    machine = report["machine"]
    made.add_row("machine", f"{machine['processor']}, {machine['cores']} cores, {machine['gpu'] or report['device']}")
    return made
