"""`dali-stream preview`: a contact sheet of one batch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

import dali_stream
from dali_stream import Dataset, DatasetError, Mixture
from dali_stream.checks.text import listed
from dali_stream.cli import arguments, console, datasets, kinds, runs
from dali_stream.errors import counted

if TYPE_CHECKING:
    from dali_stream.tools.picture import BatchSheet

_PLOTTED = 4  # maximum number of episodes of a dataset without cameras
_ACTION = "Give the key of a feature with --action"


@arguments.with_options(
    batch_size=8, image_size=None, image_dtype=None, depth_unit="mm", delta_timestamps=None, normalize=None, seed=None,
    consumers=None, last_batch=None, on_error="raise", max_substitutes=1.0, device="auto", decode="auto", num_threads=None,
    memory_budget=None, frame_cache=None, frame_cache_bytes=None,
)  # fmt: skip
def preview(
    dataset: arguments.DatasetOptions,
    loader: arguments.LoaderOptions,
    uris: arguments.Uris,
    out: Annotated[Path, kinds.png(help="Output file.")] = Path("sheet.png"),
    plots: Annotated[bool, Option("--plots", help="Plot actions and states below the frames.")] = False,
    action: arguments.Action = None,
    drop_n_last_frames: Annotated[
        int, kinds.natural(help="Rows to leave out at the end of each episode, whose video may lack their frames.")
    ] = 0,
    dali_graph: runs.GraphFunction = None,
    state: runs.StateFile = None,
    epoch: Annotated[int | None, kinds.natural(help="Epoch of the batch.")] = None,
    batch: Annotated[int | None, kinds.natural(help="Index of the batch in its epoch, from 0.")] = None,
    rank: Annotated[int, kinds.natural(help="Rank of the batch.")] = 0,
    world_size: Annotated[int, kinds.count(help="Number of ranks.")] = 1,
) -> None:
    """Draw a batch as the model sees it, captioned with tasks and indices.

    It is the first batch of a Loader with these options, or the one at --epoch and --batch. With --state, it is the last batch
    of a run before this state was saved, or the one at --epoch and --batch. The state has the order, and the other options must
    be those of the run. For a dataset without cameras, plot state and action of up to four episodes, which are vectors of
    floats. For several datasets or a mixture file, draw a batch of their mixture.
    """
    if (epoch is None) != (batch is None):
        raise ValueError(f"--epoch and --batch must be given together, got {epoch} and {batch}")
    saved = None if state is None else runs.state(state)
    chosen = None if epoch is None or batch is None else (epoch, batch)
    options = {**dataset, "drop_n_last_frames": drop_n_last_frames}
    with console.progress("decoding a batch"), datasets.opened(uris, options) as opened:
        datasets.check_action(action, opened)
        if not opened.cameras and isinstance(opened, Dataset) and saved is None and chosen is None:
            _plot(opened, out, loader["batch_size"], action)
            return
        # A Loader drops the samples that do not fill the last batch, so the batch number of a state counts without them.
        last_batch = loader["last_batch"] or ("partial" if saved is None else "drop")
        loaded = {
            **loader,
            "last_batch": last_batch,
            "dali_graph": runs.graph(dali_graph),
            "rank": rank,
            "world_size": world_size,
        }
        drawn = _of_batch(opened, plots or not opened.cameras, action, loaded, saved, chosen)
    from dali_stream.tools import sheet

    sheet.save(out, drawn.title, drawn.samples)
    console.say(f"{out}: {counted(len(drawn.samples), 'sample')} of {', '.join(drawn.keys)}")


def _of_batch(
    dataset: Dataset | Mixture,
    plots: bool,
    action: str | None,
    options: dict[str, Any],
    state: Mapping[str, Any] | None,
    chosen: tuple[int, int] | None,
) -> BatchSheet:
    """Return the sheet with a batch.

    Args:
        dataset: Dataset or mixture.
        plots: Whether to plot actions and states.
        action: Key of the feature to plot first.
        options: Arguments of the Loader. A seed or an image_dtype of None was not given.
        state: State of a run, or None for a new Loader.
        chosen: Epoch and index of the batch. None for the first batch, or for the last one before `state` was saved.
    """
    from dali_stream.tools import picture, sheet

    numbers = sheet.plotted(dataset, action) if plots else []
    shown = [*dataset.cameras, *numbers]
    for key in options["delta_timestamps"]:
        if key not in shown:
            raise ValueError(f"--window has unknown key {key!r}. Available: {listed(shown)}")
    order = state.get("order") if state is not None else None
    order = order if isinstance(order, Mapping) else {}
    # Graph functions of training runs usually expect floats.
    options["image_dtype"] = options["image_dtype"] or ("float32" if options["dali_graph"] else "uint8")
    options["seed"] = order.get("seed", 0) if options["seed"] is None else options["seed"]
    with dali_stream.Loader(dataset, **options, shuffle=order.get("shuffle", True), in_process=True) as loader:
        if state is not None:
            loader.load_state_dict(state)
        epoch, number = chosen or ((0, 0) if state is None else _last(loader, state, options))
        return picture.batch_sheet(loader, epoch, number, numbers, options, f". {_ACTION}")


def _last(loader: dali_stream.Loader, state: Mapping[str, Any], options: Mapping[str, Any]) -> tuple[int, int]:
    """Return epoch and index of the last batch before a state, which the Loader has loaded, was saved."""
    if loader.batch_index:
        stride = options["batch_size"] * options["world_size"]
        if state["position"] % stride:
            raise ValueError(
                f"--batch-size times --world-size must divide the position of --state, {state['position']}, got {stride}. "
                "Give the values of the run"
            )
        return loader.epoch, loader.batch_index - 1
    if loader.epoch:
        return loader.epoch - 1, len(loader) - 1
    raise ValueError("--state must be one that was saved after a batch, got the beginning of a run")


def _plot(dataset: Dataset, out: Path, most: int, action: str | None) -> None:
    from dali_stream.tools import picture, sheet

    keys = sheet.plotted(dataset, action)
    if not keys:
        raise DatasetError(
            f"{dataset.uri}: no camera is recorded or selected, and it has neither action nor observations. {_ACTION}"
        )
    shown = sheet.episodes(dataset, keys, min(most, _PLOTTED))
    sheet.save(out, f"{picture.dataset_name(dataset)}: {len(shown)} of {counted(dataset.num_episodes, 'episode')}", shown)
    console.say(f"{out}: {', '.join(keys)} of {counted(len(shown), 'episode')}")
