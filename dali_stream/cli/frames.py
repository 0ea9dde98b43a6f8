"""`dali-stream frames`: lists, removes and fills the frame cache on disk."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from dali_stream.cli import arguments, console

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the frame cache.")]
frames = typer.Typer(add_completion=False, rich_markup_mode=None, help="List, remove and fill the frame cache on disk.")


@frames.command("list", short_help="Show what a frame cache holds.")
def show(
    folder: Folder,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Show the frames in a cache by size and versions, with their size on disk and their last use.

    Frames of another size, or of another version of torch, torchcodec or FFmpeg, are never used. They stay until they are
    removed.
    """
    from dali_stream.cache.frame_files import NVDEC
    from dali_stream.tools.stored_frames import stored

    found = stored(folder)
    if as_json:
        console.print_json({"frames": [each._asdict() for each in found]})
        return
    table = console.table("name", "frames", "versions", "files", "on disk", "last use", right=("files", "on disk"))
    for each in found:
        versions = ", ".join(f"{name} {each.key[name]}" for name in ("torch", "torchcodec", "FFmpeg") if name in each.key)
        versions += f", {each.key[NVDEC]}" if NVDEC in each.key else ""
        used = datetime.datetime.fromtimestamp(each.used).strftime("%Y-%m-%d %H:%M")
        size = console.megabytes(each.size)
        table.add_row(each.name, each.key.get("frames", ""), versions, str(each.files), size, used)
    console.results().print(table)


@frames.command("remove", short_help="Remove frames from a frame cache.")
def remove(
    folder: Folder,
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="Names that `dali-stream frames list DIR` shows.")],
) -> None:
    """Remove frames from a cache. Loaders that use them meanwhile decode them again."""
    from dali_stream.tools import stored_frames

    console.say(f"removed {console.megabytes(stored_frames.remove(folder, names))}")


@frames.command("fill", short_help="Decode a dataset into a frame cache.")
@arguments.with_dataset_options
def fill(
    options: arguments.DatasetOptions,
    uris: arguments.Uris,
    frame_cache: Annotated[Path, typer.Option(metavar="DIR", help="Folder of the frame cache.")],
    image_size: Annotated[str, typer.Option(metavar="HxW|recorded", help="Size of the frames.")],
    frame_cache_bytes: arguments.FrameCacheBytes = None,
    num_threads: Annotated[
        int | None, typer.Option(metavar="N", parser=arguments.count, help="Decode threads. Default: the number of cores.")
    ] = None,
    episodes: arguments.Episodes = None,
    cameras: arguments.Cameras = None,
) -> None:
    """Decode the frames of a dataset into a cache, so that no epoch of a run decodes them.

    After an interruption, the same command continues. Several processes, also of several machines that share the folder, divide
    the work if `RANK` and `WORLD_SIZE` are set, as torchrun does.
    """
    from dali_stream.tools import stored_frames

    place = options.arguments(cameras=arguments.names(cameras), episodes=arguments.numbers("--episodes", episodes))
    loader: dict[str, Any] = {"frame_cache": frame_cache, "frame_cache_bytes": frame_cache_bytes, "num_threads": num_threads}
    loader["image_size"] = None if image_size == "recorded" else arguments.size("--image-size", image_size)
    with (
        arguments.opened_mixture(uris, **place) as dataset,
        console.progress("batches") as bar,
    ):
        stats = stored_frames.fill(dataset, bar, **loader)
    added = console.megabytes(stats["frame_cache_disk_written_bytes"])
    if stats["substituted"]:
        console.say(f"{stats['substituted']} samples have frames that cannot be decoded, and were left out")
    console.say(f"{frame_cache}: {added} added, {stats['frame_cache_disk_hits']} of {stats['frames']} frames were read from it")
