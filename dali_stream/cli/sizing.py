"""Rows of the table of `dali-stream why` with the needs of a node."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dali_stream.cli import console
from dali_stream.errors import counted

if TYPE_CHECKING:
    from rich.table import Table

    from dali_stream.tools.sizing import Need, Sizing

RANGES = "a range that contains 4 of 5 measured rates (of gains: the smallest and the largest)"
EXTRAPOLATED = (
    "Measured here, with one rank: the work of a batch. Extrapolated: another number of cores or ranks. This assumes that the "
    "cores are as fast as those here, that the training program of each rank takes 1 core, and that all ranks share a network "
    "like the one here. Without --memory-budget, a rank has the default of a Loader here. Give it if the memory of the node "
    "differs."
)
_LITTLE = 0.005  # smallest use of a resource to print


def add_rows(table: Table, sizing: Sizing) -> None:
    """Add the needs of a node to a table with two columns."""
    node = sizing.node
    for name, need in (("first epoch", sizing.first), (later_epochs(sizing), sizing.later)):
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


def later_epochs(sizing: Sizing | None) -> str:
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
