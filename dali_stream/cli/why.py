"""`dali-stream why`: shows why a Loader is slow, and the predicted effect of each remedy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

from rich.table import Table
from typer import Option

from dali_stream.cli import arguments, console, kinds
from dali_stream.errors import counted

if TYPE_CHECKING:
    from dali_stream.tools import Need, Sizing, Speed, WhyReport

_RANGES = "the smallest and the largest"
_SIZED_RANGES = "a range that contains 4 of 5 measured rates (of gains: the smallest and the largest)"
_EXTRAPOLATED = (
    "Measured here, with one rank: the work of a batch. Extrapolated: another number of cores or ranks. This assumes that the "
    "cores are as fast as those here, that the training program of each rank takes 1 core, and that all ranks share a network "
    "like the one here. Without --memory-budget, a rank has the default of a Loader here. Give it if the memory of the node "
    "differs."
)
_LITTLE = 0.005  # smallest use of a resource to print
_FULL = 0.95  # minimum share of the needed batches per second at which a Loader keeps up


@arguments.with_options(
    batch_size=64, image_size=kinds.RECORDED, image_dtype="float32", delta_timestamps=None, consumers=None, device="auto",
    num_threads=None, memory_budget=None, frame_cache=None, frame_cache_bytes=None,
)  # fmt: skip
def why(
    dataset: arguments.DatasetOptions,
    loader: arguments.LoaderOptions,
    uri: arguments.Uri,
    step_ms: Annotated[
        float | None, Option(metavar="MS", help="Milliseconds of a training step without loading, on the GPU.")
    ] = None,
    ranks: Annotated[int | None, kinds.count(help="Ranks of a node to size, one per GPU.")] = None,
    node_cores: Annotated[int | None, kinds.count("--cores", help="Cores of this node. Default: those here.")] = None,
    epochs: Annotated[int, kinds.count(help="Epochs of the run, from which gains are computed.")] = 10,
    anyway: Annotated[bool, Option("--anyway", help="Predict even if other processes use the cores.")] = False,
    as_json: arguments.Json = False,
) -> None:
    """Say which stage limits a Loader on this machine, and predict the batches per second after each remedy.

    The command streams a part of the dataset, or of a mixture file. To measure `prepare`, it rewrites a few episodes into a
    temporary folder. Each rate is measured three times, in turns with the others. This takes about a minute. If other processes
    use more than a fifth of the cores meanwhile, the command predicts nothing, unless you pass --anyway.

    With --ranks or --cores, and --step-ms, it predicts for a node with these ranks and cores: whether they are enough, what
    runs out first, and the memory, disk and network that training needs.
    """
    from dali_stream.tools import why as study

    if step_ms is not None and step_ms <= 0:
        raise ValueError(f"--step-ms must be greater than 0, got {step_ms:g}")
    with console.progress(enabled=not as_json) as show:
        report = study(
            uri,
            step_s=None if step_ms is None else step_ms / 1000,
            epochs=epochs,
            ranks=ranks,
            node_cores=node_cores,
            dataset=dataset,
            loader=loader,
            anyway=anyway,
            progress=lambda text: show(0, 1, text),
        )
    console.show(report.as_dict() if as_json else _text(report))


def _text(report: WhyReport) -> Iterator[Table | str]:
    """Yield the tables and lines of the report."""
    table = console.pairs()
    later = _later_epochs(report.sizing)
    for name, speed in (("first epoch", report.first), (later, report.later)):
        decodes = f"{speed.decodes:.2f} frames decoded per delivered frame"
        table.add_row(name, f"{_rate(speed)} batches/s, limited by {speed.limit}; {decodes}")
    if report.needed is not None:
        slow = [
            name
            for name, speed in (("the first epoch", report.first), (later.replace("second", "the second"), report.later))
            if speed.batches_per_s < _FULL * report.needed
        ]
        verdict = f"training waits in {' and in '.join(slow)}" if slow else "the loader keeps up"
        table.add_row("the model needs", f"{report.needed:.3g} batches/s: {verdict}")
    if report.sizing is not None:
        _add_needs(table, report.sizing)
    yield table
    columns = ("first epoch", later, "gain")
    table = console.table("remedy", *columns, "price", right=columns)
    for remedy in report.remedies:
        gain = f"{remedy.gain:.2f} ({remedy.gain_range[0]:.2f} to {remedy.gain_range[1]:.2f})"
        table.add_row(remedy.name, _rate(remedy.first), _rate(remedy.later), gain, remedy.price)
    if report.remedies:
        yield table
    else:
        yield "No remedy raises the rate."
    for note in report.notes:
        yield f"{note}."
    yield (
        f"Predicted batches/s. Gain: batches/s of a run of {report.epochs} epochs, divided by those without the remedy. "
        f"Rates and gains are medians of three rounds, with {_SIZED_RANGES if report.sizing else _RANGES} in brackets."
    )
    if report.sizing is not None:
        yield _EXTRAPOLATED
    if report.busy is not None:
        yield f"Other processes used {report.busy:.0%} of the cores meanwhile."


def _rate(speed: Speed) -> str:
    low, high = speed.range
    return f"{speed.batches_per_s:.3g} ({low:.3g} to {high:.3g})"


def _add_needs(table: Table, sizing: Sizing) -> None:
    """Add the needs of a node to a table with two columns."""
    node = sizing.node
    for name, need in (("first epoch", sizing.first), (_later_epochs(sizing), sizing.later)):
        low, high = need.cores_range
        cores = f"{need.cores:.1f} ({low:.1f} to {high:.1f}) of {counted(node.cores, 'core')}"
        table.add_row(f"cores, {name}", f"{cores}: {_verdict(need, node.cores)}")
        use = ", ".join(f"{resource} {share:.0%}" for resource, share in need.use.items() if share >= _LITTLE)
        table.add_row("", f"first to run out: {need.first}; use during a step: {use}")
    of = f"of {counted(node.ranks, 'rank')}"
    whole = console.megabytes(sizing.memory_for_all_frames)
    table.add_row("memory", f"{console.megabytes(sizing.memory)} {of}; {whole} to keep all frames that a rank decodes")
    if sizing.frame_cache:
        table.add_row("local disk", f"{console.megabytes(sizing.frame_cache)} for a frame_cache with all decoded frames")
    if sizing.videos:
        rate, videos = console.megabytes(sizing.network), console.megabytes(sizing.videos)
        table.add_row("network", f"{rate}/s of video if the data are remote, until a cache_dir has all {videos}")


def _later_epochs(sizing: Sizing | None) -> str:
    """Return the name of the epochs that the later speeds are of. See `WhyReport`."""
    return "second epoch" if sizing and sizing.node.ranks > 1 else "later epochs"


def _verdict(need: Need, cores: int) -> str:
    """Return whether the cores are enough, or which other resource is not."""
    low, high = need.cores_range
    if not need.enough and need.first not in ("CPU cores", "decode threads"):
        name = need.first if need.first == "copying" else f"the {need.first}"
        return f"{name} is too slow, and more cores do not change that"
    if low > cores:
        return "not enough"
    return "enough" if high <= cores and need.enough else "too close to say"
