"""`dali-stream preview`: a contact sheet of one batch."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

import dali_stream
from dali_stream import Dataset, DatasetError, Mixture
from dali_stream.checks.text import listed
from dali_stream.cli import arguments, console, datasets, kinds, runs
from dali_stream.errors import counted
from dali_stream.run import description

if TYPE_CHECKING:
    from dali_stream.tools.sheet import Depth

_PLOTTED = 4  # maximum number of episodes of a dataset without cameras
_SAMPLES = 8  # default number of samples of a dataset
_ACTION = "Give the key of a feature with --action"


@arguments.with_options(image_size=None, delta_timestamps=None, normalize=None, seed=None)
def preview(
    dataset: arguments.DatasetOptions,
    loader: arguments.LoaderOptions,
    uris: Annotated[
        list[str] | None, Argument(metavar="URI", help="The dataset; or several, or a mixture file. Optional with --config.")
    ] = None,
    out: Annotated[Path, kinds.png(help="Output file.")] = Path("sheet.png"),
    batch_size: Annotated[
        int | None, kinds.count(help="Samples on the sheet. Default: 8, or the whole batch of a run.")
    ] = None,
    plots: Annotated[bool, Option("--plots", help="Plot actions and states below the frames.")] = False,
    action: arguments.Action = None,
    drop_n_last_frames: Annotated[
        int | None, kinds.natural(help="Rows to leave out at the end of each episode, whose video may lack their frames.")
    ] = None,
    dali_graph: runs.GraphFunction = None,
    config: runs.ConfigFile = None,
    state: runs.StateFile = None,
    epoch: Annotated[int | None, kinds.natural(help="Epoch of a run's batch.")] = None,
    batch: Annotated[int | None, kinds.natural(help="Number of a run's batch in its epoch, from 0.")] = None,
    rank: Annotated[int, kinds.natural(help="Rank of the batch of a run.")] = 0,
) -> None:
    """Draw the first batch of an epoch as the model sees it, captioned with tasks and indices.

    With --config, draw the batch that a run saw at --epoch and --batch, or its last batch before --state was saved. Frames,
    augmentation, actions and states are those of the run. For a dataset without cameras, plot state and action of up to four
    episodes, which are vectors of floats. For several datasets or a mixture file, draw a batch of their mixture.
    """
    if config is not None or state is not None:
        fixed: dict[str, object] = {"window": loader.pop("delta_timestamps"), **loader, "action": action}
        if "image_size" in loader:  # its value for "recorded" is None
            fixed["image_size"] = kinds.RECORDED
        fixed |= {name: dataset.get(name) for name in ("clock", "tolerance_s", "trust_timestamps", "episodes", "cameras")}
        fixed["drop_n_last_frames"] = drop_n_last_frames
        _refuse(fixed, "must not be given with --config, which has it")
        sheet = _of_run(config, state, uris or [], dataset, epoch, batch, rank, dali_graph)
    else:
        if not uris:
            raise ValueError("URI must be given, or --config")
        _refuse({"epoch": epoch, "batch": batch, "rank": rank or None}, "must be given with --config")
        batch_size = batch_size or _SAMPLES
        options = {**dataset, "drop_n_last_frames": drop_n_last_frames or 0}
        with console.progress("decoding a batch"), datasets.opened(uris, options) as opened:
            datasets.check_action(action, opened)
            if not opened.cameras and isinstance(opened, Dataset):
                _plot(opened, out, batch_size, action)
                return
            graph = runs.graph(dali_graph)
            loaded = {**loader, "batch_size": batch_size, "seed": loader["seed"] or 0, "dali_graph": graph}
            sheet = _of_dataset(opened, plots or not opened.cameras, action, loaded)
    _save(sheet, out, batch_size, plots)


@dataclass(frozen=True)
class _Sheet:
    """Content of a sheet: a title, a batch, its windows, the keys of its images and of the features to plot, and the meaning
    of its distances."""

    title: str
    batch: Mapping[str, Any]
    windows: Mapping[str, list[float]]
    images: list[str]
    numbers: list[str]
    depth: Mapping[str, Depth]


def _of_dataset(dataset: Dataset | Mixture, plots: bool, action: str | None, options: dict[str, Any]) -> _Sheet:
    """Return the sheet with the first batch of a dataset or mixture."""
    from dali_stream.tools import sheet

    numbers = sheet.plotted(dataset, action)
    shown = [*dataset.cameras, *(numbers if plots else ())]
    for key in options["delta_timestamps"]:
        if key not in shown:
            raise ValueError(f"--window has unknown key {key!r}. Available: {listed(shown)}")
    dtype = "float32" if options["dali_graph"] else "uint8"  # graph functions of training runs usually expect floats
    options |= {"image_dtype": dtype, "last_batch": "partial", "rank": 0, "world_size": 1}
    with dali_stream.Loader(dataset, **options) as loader:
        batch = next(iter(loader))
    title = f"{_name(dataset)}: {len(batch['index'])} of {dataset.num_frames} frames, seed {options['seed']}"
    images = sheet.image_keys(batch, dataset)
    return _Sheet(title, batch, options["delta_timestamps"], images, numbers, _depth(dataset, images, "mm"))


def _of_run(
    config: Path | None,
    state: Path | None,
    uris: list[str],
    where: arguments.DatasetOptions,
    epoch: int | None,
    batch: int | None,
    rank: int,
    dali_graph: str | None,
) -> _Sheet:
    """Return the sheet with a batch of a run. Frames are denormalized, since normalized values are not valid colours."""
    from dali_stream.tools import sheet

    described, saved = runs.config_and_state(config, state)
    if (epoch is None) != (batch is None) or (batch is None and saved is None):
        raise ValueError(f"--epoch and --batch must be given together, got {epoch} and {batch}. Without them, give --state")
    if len(uris) > 1:
        raise ValueError(f"URI must be the one dataset of the run, got {counted(len(uris), 'URI')}")
    graph = runs.graph(dali_graph, described["dali_graph"])
    with (
        console.progress("decoding a batch"),
        closing(description.open_described(described["dataset"], {**where, "uri": uris[0] if uris else None})) as dataset,
    ):
        if epoch is None or batch is None:
            assert saved is not None
            epoch, batch = description.last_batch(described, saved, dataset.orders().positions)
        values = dali_stream.batch_at(described, epoch, batch, graph, rank=rank, dataset=dataset)
        normalizer = dali_stream.Normalizer(dataset, described["loader"]["normalize"])
        images = sheet.image_keys(values, dataset)
        scaled = {key: values[key] for key in images if key in normalizer.modes}
        values |= normalizer.inverse(scaled | {key: values[key] for key in ("dataset_index",) if key in values})
        where_in_run = f"epoch {epoch}, batch {batch}, rank {rank} of {described['loader']['world_size']}"
        numbers = [key for key in sheet.plotted(dataset) if key in values]
    loader = described["loader"]
    depth = _depth(dataset, images, loader.get("depth_unit", "mm"))
    return _Sheet(f"{_name(dataset)}: {where_in_run}", values, loader["delta_timestamps"], images, numbers, depth)


def _depth(dataset: Dataset | Mixture, images: list[str], unit: str) -> dict[str, Depth]:
    """Return the meaning of the images that are distances, by key."""
    from dali_stream.decode.depth import distance_of_nothing
    from dali_stream.tools.sheet import Depth

    features = {key: dataset.features[key] for key in images if key in dataset.features}
    return {key: Depth(unit, distance_of_nothing(each, unit)) for key, each in features.items() if each.is_depth}


def _save(drawn: _Sheet, out: Path, most: int | None, plots: bool) -> None:
    from dali_stream.tools import sheet

    numbers = drawn.numbers if plots or not drawn.images else []
    if not drawn.images and not numbers:
        raise DatasetError(
            f"the batch has neither frames nor an action or observations to show, only {listed(drawn.batch)}. {_ACTION}"
        )
    shown = sheet.samples(drawn.batch, drawn.images, drawn.windows, numbers, drawn.depth)[:most]
    sheet.save(out, drawn.title, shown)
    console.say(f"{out}: {counted(len(shown), 'sample')} of {', '.join((*drawn.images, *numbers))}")


def _refuse(options: Mapping[str, object], why: str) -> None:
    """Raise ValueError if one of these options has a value."""
    if given := [name for name, value in options.items() if value is not None and value != {}]:
        raise ValueError(f"--{given[0].replace('_', '-')} {why}")


def _name(dataset: Dataset | Mixture) -> str:
    return ", ".join(dataset.source.dataset_names) or Path(dataset.uri).name


def _plot(dataset: Dataset, out: Path, most: int, action: str | None) -> None:
    from dali_stream.tools import sheet

    keys = sheet.plotted(dataset, action)
    if not keys:
        raise DatasetError(
            f"{dataset.uri}: no camera is recorded or selected, and it has neither action nor observations. {_ACTION}"
        )
    shown = sheet.episodes(dataset, keys, min(most, _PLOTTED))
    sheet.save(out, f"{_name(dataset)}: {len(shown)} of {counted(dataset.num_episodes, 'episode')}", shown)
    console.say(f"{out}: {', '.join(keys)} of {counted(len(shown), 'episode')}")
