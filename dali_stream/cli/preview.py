"""`dali-stream preview`: a contact sheet of one batch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

import dali_stream
from dali_stream import Dataset, DatasetError, Mixture
from dali_stream.cli import arguments, console
from dali_stream.errors import counted

_PLOTTED = 4  # episodes of a dataset without cameras, at most


def preview(
    uris: arguments.Uris,
    out: Annotated[Path, typer.Option(metavar="PNG", help="Output file.")] = Path("sheet.png"),
    batch_size: Annotated[int, typer.Option(metavar="N", parser=arguments.count, help="Samples on the sheet.")] = 8,
    window: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CAMERA=SECONDS",
            help="A camera's window, relative to the current frame: 'observation.images.top=-0.1,0'. May be repeated.",
        ),
    ] = None,
    image_size: Annotated[str | None, typer.Option(metavar="HxW", help="Resize frames, like Loader(image_size=...).")] = None,
    seed: Annotated[
        int, typer.Option(metavar="N", parser=arguments.natural, help="Seed of the order; another seed shows other frames.")
    ] = 0,
    episodes: arguments.Episodes = None,
    cameras: arguments.Cameras = None,
    revision: arguments.Revision = None,
    data_files_root: arguments.DataFilesRoot = None,
    cache_dir: arguments.CacheDir = None,
    storage_options: arguments.StorageOptions = None,
    clock: arguments.Clock = None,
    tolerance_s: arguments.ToleranceS = None,
) -> None:
    """Draw the first batch of an epoch as the model sees it, captioned with tasks and indices.

    Of a dataset without cameras: plots of state and action of up to four episodes. Of several datasets, or a mixture file: a
    batch of their mixture.
    """
    arguments.png("--out", out)
    size, windows = arguments.size("--image-size", image_size), arguments.windows("--window", window or [])
    place: dict[str, Any] = {"revision": revision, "data_files_root": data_files_root, "cache_dir": cache_dir}
    place |= arguments.located_by(clock, tolerance_s)
    place |= {"cameras": arguments.names(cameras), "episodes": arguments.numbers("--episodes", episodes)}
    with (
        console.progress("decoding a batch"),
        arguments.opened_mixture(uris, storage_options=storage_options, **place) as dataset,
    ):
        if not dataset.cameras:
            _plot(dataset, out, batch_size)
            return
        for key in windows:
            if key not in dataset.cameras:
                raise ValueError(f"--window has unknown camera {key!r}. Available: {', '.join(dataset.cameras)}")
        with dali_stream.Loader(
            dataset, batch_size=batch_size, delta_timestamps=windows, image_size=size, image_dtype="uint8", seed=seed,
            last_batch="partial", rank=0, world_size=1,
        ) as loader:  # fmt: skip
            from dali_stream.tools import sheet

            shown = sheet.samples(next(iter(loader)), dataset.cameras, windows)
    sheet.save(out, f"{_name(dataset)}: {len(shown)} of {dataset.num_frames} frames, seed {seed}", shown)
    typer.echo(f"{out}: {counted(len(shown), 'sample')} of {', '.join(dataset.cameras)}")


def _name(dataset: Dataset | Mixture) -> str:
    return ", ".join(dataset.dataset_names) or Path(dataset.uri).name


def _plot(dataset: Dataset | Mixture, out: Path, most: int) -> None:
    from dali_stream.tools import sheet

    if not isinstance(dataset, Dataset):
        raise DatasetError(f"{dataset.uri} has no cameras; plots of state and action are of one dataset, so give one URI")
    keys = sheet.plotted(dataset)
    if not keys:
        raise DatasetError(f"{dataset.uri}: no camera is recorded or selected, and it has neither action nor observations")
    shown = sheet.plot(out, dataset, keys, min(most, _PLOTTED))
    typer.echo(f"{out}: {', '.join(keys)} of {counted(shown, 'episode')}")
