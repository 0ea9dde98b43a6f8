"""`dali-stream stats`: computes the statistics that `normalize` needs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

from dali_stream.cli import arguments, console, datasets, kinds
from dali_stream.dataset import Dataset
from dali_stream.errors import counted
from dali_stream.mixture import Mixture
from dali_stream.storage.local_files import replace_text


@arguments.with_options()
def stats(
    dataset: arguments.DatasetOptions,
    uri: arguments.Uri,
    out: Annotated[Path | None, kinds.new_file(help="A new file. Default: standard output.")] = None,
) -> None:
    """Compute statistics as LeRobot defines them, as JSON in the form of meta/stats.json.

    The statistics of rows are exact, except for quantiles of more than four million numbers. The statistics of cameras are
    computed from a sample of the frames, as in LeRobot. The dataset is not changed. To add statistics to a dataset that has
    none, use --out DATASET/meta/stats.json. Otherwise, pass them to Dataset(uri, stats=json.load(open(FILE))).

    For a mixture file, the JSON has the statistics of each dataset by its name. Write them into the file, as the `stats` of the
    dataset.
    """
    with datasets.opened([uri], dataset) as opened:
        if isinstance(opened, Mixture):
            computed = {name: _computed(part, f"{name}: episodes") for name, part in opened.datasets.items()}
            size = f"{counted(len(computed), 'dataset')} with {counted(opened.num_episodes, 'episode')}"
        else:
            computed = _computed(opened, "episodes")
            size = f"{counted(len(computed), 'feature')} in {counted(opened.num_episodes, 'episode')}"
    if out is None:
        sys.stdout.write(_json(computed))
        return
    replace_text(out, _json(computed))
    console.say(f"{out}: {size}")


def _computed(dataset: Dataset, description: str) -> dict[str, Any]:
    """Return the statistics of a dataset for JSON, and show the progress."""
    with console.progress(description) as show:
        stats = dataset.compute_stats(progress=show)
    return {key: {name: value.tolist() for name, value in each.items()} for key, each in stats.items()}


def _json(computed: dict[str, Any]) -> str:
    return json.dumps(computed, indent=4) + "\n"
