"""`dali-stream frames`: lists, removes, fills and verifies the frame cache on disk."""

from __future__ import annotations

import datetime
import shlex
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument

from dali_stream.cli import arguments, console, datasets
from dali_stream.errors import counted

Folder = Annotated[Path, Argument(metavar="DIR", help="Folder of the frame cache on disk.")]
_SHOWN = 20  # maximum number of episodes with frames that differ to show
frames = typer.Typer(add_completion=False, rich_markup_mode=None, help="List, remove, fill and verify the frame cache on disk.")


@frames.command("list", short_help="Show what a frame cache on disk holds.")
def show(
    folder: Folder,
    as_json: arguments.Json = False,
) -> None:
    """Show the frames in a cache by size and versions, with their size on disk and their last use.

    Frames of another size, or of another version of torch, torchcodec, FFmpeg or PyAV, are never used. They stay until they are
    removed.
    """
    from dali_stream.cache.frame_folder import LAYOUT, NVDEC
    from dali_stream.tools.stored_frames import FrameGroup, stored

    def row(each: FrameGroup) -> tuple[str, ...]:
        versions = ", ".join(
            f"{name} {each.key[name]}" for name in ("torch", "torchcodec", "FFmpeg", "PyAV") if name in each.key
        )
        versions += f", {each.key[NVDEC]}" if NVDEC in each.key else ""
        versions += ", of an earlier layout (not used)" if each.key["layout"] != LAYOUT else ""
        used = datetime.datetime.fromtimestamp(each.used).strftime("%Y-%m-%d %H:%M")
        return each.name, each.key.get("frames", ""), versions, str(each.files), console.megabytes(each.size), used

    found = stored(folder)
    columns = ("name", "frames", "versions", "files", "on disk", "last use")
    table = console.table(*columns, right=("files", "on disk"), rows=map(row, found))
    console.show({"frames": [each._asdict() for each in found]} if as_json else [table])


@frames.command("remove", short_help="Remove frames from a frame cache on disk.")
def remove(
    folder: Folder,
    names: Annotated[list[str], Argument(metavar="NAME", help="Names that `dali-stream frames list DIR` shows.")],
) -> None:
    """Remove frames from a cache. Loaders that use them meanwhile decode them again."""
    from dali_stream.tools import stored_frames

    console.say(f"removed {console.megabytes(stored_frames.remove(folder, names))}")


@frames.command("fill", short_help="Decode a dataset into a frame cache on disk.")
@arguments.with_options(frame_cache=..., image_size=..., frame_cache_bytes=None, num_threads=None)
def fill(dataset: arguments.DatasetOptions, loader: arguments.LoaderOptions, uris: arguments.Uris) -> None:
    """Decode the frames of a dataset into a cache, so that no epoch of a run decodes them.

    After an interruption, the same command continues. Several processes, also of several machines that share the folder, divide
    the work if `RANK` and `WORLD_SIZE` are set, as torchrun does.
    """
    from dali_stream.tools import stored_frames

    with datasets.opened(uris, dataset) as opened, console.progress("batches") as bar:
        stats = stored_frames.fill(opened, bar, **loader)
    added = console.megabytes(stats["disk_written_bytes"])
    if stats["substituted"]:
        console.say(f"{stats['substituted']} samples have frames that cannot be decoded, and were left out")
    hits = f"{stats['disk_hits']} of {stats['frames']} frames were read from it"
    console.say(f"{loader['frame_cache']}: {added} added, {hits}")


@frames.command("verify", short_help="Compare a frame cache on disk with a dataset.")
@arguments.with_options(frame_cache=..., image_size=..., num_threads=None, memory_budget=None)
def verify(dataset: arguments.DatasetOptions, loader: arguments.LoaderOptions, uris: arguments.Uris) -> None:
    """Decode all frames of a dataset, and compare them with those that a run would read from a cache.

    This takes as long as filling the cache. No frame is added. The exit code is 1 if a frame differs.
    """
    from dali_stream.tools import stored_frames

    with datasets.opened(uris, dataset) as opened, console.progress("batches") as bar:
        found = stored_frames.verify(opened, bar, **loader)
    for (episode, camera), numbers in list(found.different.items())[:_SHOWN]:
        console.say(f"{episode}, {camera}: {counted(len(numbers), 'frame')} differ, the first is {numbers[0]}")
    count, folder = sum(map(len, found.different.values())), loader["frame_cache"]
    console.say(f"{folder}: {found.read} of {found.frames} frames were read from it, and {count or 'none'} of them differ")
    if count:
        console.say(f"Remove them with `dali-stream frames remove {shlex.quote(str(folder))} NAME`, and decode them again")
        raise typer.Exit(1)
