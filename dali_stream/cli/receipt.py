"""`dali-stream receipt`: shows when a run has seen an episode."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from dali_stream.cli import arguments, console, runs
from dali_stream.errors import counted
from dali_stream.run import description
from dali_stream.tools import receipt as make_receipt


def receipt(
    episode: Annotated[int, typer.Option(metavar="N", parser=arguments.natural, help="Index of the episode.")],
    uri: Annotated[str | None, typer.Argument(metavar="URI", help="The run's dataset, if it has moved.")] = None,
    config: runs.ConfigFile = None,
    state: runs.StateFile = None,
    log: Annotated[
        Path | None, typer.Option(metavar="JSONL", help="metrics.jsonl of train.py, which says the step of each position.")
    ] = None,
    dataset: Annotated[str | None, typer.Option(metavar="NAME", help="The episode's dataset in a mixture.")] = None,
    cache_dir: arguments.CacheDir = None,
    storage_options: arguments.StorageOptions = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object, with every position.")] = False,
) -> None:
    """Say in which epochs, at which positions and in which steps a run has seen an episode, for example a retracted one.

    The answer is computed from the order without reading frames. It covers the run up to --state, or up to the last entry of
    --log.
    """
    described, saved = runs.config_and_state(config, state)
    where = {"uri": uri, "cache_dir": cache_dir, "storage_options": arguments.json_object("--storage-options", storage_options)}
    with (
        console.progress("epochs", enabled=not json) as show,
        closing(description.open_described(described["dataset"], where)) as opened,
    ):
        report = make_receipt(described, episode, until=saved, log=log, mixed=dataset or "", dataset=opened, progress=show)
    if json:
        console.print_json(report.as_dict())
        return
    of_dataset = f" of {report.dataset}" if report.dataset else ""
    until = f"up to epoch {report.until[0]}, position {report.until[1]}"
    if not report.selected:
        console.say(f"episode {episode}{of_dataset} is not among the run's episodes, so no epoch has shown it, {until}")
        return
    console.say(
        f"episode {episode}{of_dataset}: {counted(report.samples, 'sample')} in {counted(len(report.epochs), 'epoch')}, {until}"
    )
    table = console.table("epoch", "samples", "positions", "steps", right=("epoch", "samples"))
    for seen in report.epochs:
        steps = [step for step in seen.steps if step is not None]
        count = len(seen.positions) + len(seen.padded)
        table.add_row(str(seen.epoch), str(count), _span(seen.positions), _span(steps) if steps else "unknown")
    if report.epochs:
        console.results().print(table)
        console.say("positions and steps are the first and the last; --json prints all")


def _span(numbers: list[int]) -> str:
    return f"{min(numbers)} to {max(numbers)}"
