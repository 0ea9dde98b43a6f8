"""Options that several commands share. Each is declared here once, with its name, its help and its parser.

A command that reads a dataset has all options in `SourceOptions` or `DatasetOptions`. Add an option to one of these classes to
add it to all of these commands. `bench` also names those in its report. A command that makes a Loader names its options in
`LoaderOptions`, with their defaults. See `with_options`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypedDict, get_type_hints

from typer import Argument, Option

from dali_stream.cli import kinds

Uri = Annotated[str, Argument(metavar="URI", help="The dataset.")]
Uris = Annotated[list[str], Argument(metavar="URI", help="The dataset; or several, or a mixture file (.yaml, .yml or .json).")]
Action = Annotated[
    str | None, Option(metavar="KEY", help="Feature with the actions. Default: 'action', or the only one like it.")
]
Json = Annotated[bool, Option("--json", help="Print one JSON object instead of text.")]


class SourceOptions(TypedDict, total=False):
    """Keyword arguments of `Dataset` from the options that say which dataset, and which part of it, a command reads."""

    episodes: Annotated[Any, kinds.numbers(help="Only these episodes, such as 0,3,5-8.")]
    cameras: Annotated[Any, kinds.names(help="Only these cameras, separated by commas; '' for none.")]
    revision: Annotated[str, Option(metavar="REV", help="Branch, tag or commit of a Hub repository.")]
    data_files_root: Annotated[
        str, Option(metavar="URI", help="Location of data/ and videos/ if not next to meta/, such as a bucket.")
    ]
    storage_options: Annotated[
        Any, kinds.json_object(help="Storage options such as credentials, for example '{\"anon\": true}' for public S3.")
    ]
    clock: Annotated[
        str,
        Option(
            metavar="timestamp|frame_index",
            help="Locate frames by timestamp (default), or by frame_index / fps for wall-clock timestamps.",
        ),
    ]
    tolerance_s: Annotated[
        float,
        Option(metavar="SECONDS", help="Largest distance of a frame from its row's time. Default: a quarter of a frame."),
    ]


class DatasetOptions(SourceOptions, total=False):
    """Those of `SourceOptions`, and those that `prepare` does not have: the cache, and trust in timestamps."""

    cache_dir: Annotated[str, Option(metavar="DIR", help="Cache fetched bytes in this folder, for later runs too.")]
    trust_timestamps: Annotated[
        bool, Option("--trust-timestamps", help="Take the frames at the rows' times even if the number of frames is not right.")
    ]


class LoaderOptions(TypedDict, total=False):
    """Keyword arguments of `Loader` from the options that say how frames are loaded. The option --window sets delta_timestamps.

    A command that lacks an option has no entry for it.
    """

    batch_size: Annotated[Any, kinds.count(help="Samples per batch and rank.")]
    image_size: Annotated[Any, kinds.image_size(help="Size of the frames.")]
    image_dtype: Annotated[str, Option(metavar="uint8|float32", help="Type of the frames.")]
    depth_unit: Annotated[str, Option(metavar="mm|m", help="Unit of the distances of depth cameras.")]
    delta_timestamps: Annotated[
        list[Any] | None,
        kinds.window(
            "--window",
            help="Window of a camera or a feature, relative to the current frame: 'observation.images.top=-0.1,0'. May be "
            "repeated.",
        ),
    ]
    normalize: Annotated[
        str | None, Option(metavar="MODE", help="Normalize actions and states: mean_std, min_max or quantiles.")
    ]
    seed: Annotated[Any, kinds.natural(help="Seed of the order; another seed shows other frames. Default: 0.")]
    consumers: Annotated[Any, kinds.count(help="Consumers of the order, a multiple of the ranks. Default: fits the batch.")]
    last_batch: Annotated[
        str | None,
        Option(
            metavar="drop|partial|pad",
            help="Last samples, if they fill no batch. Default: partial, or drop with --state.",
        ),
    ]
    on_error: Annotated[str, Option(metavar="raise|substitute", help="Samples that cannot be decoded.")]
    max_substitutes: Annotated[float, Option(metavar="SHARE", help="Maximum share of a batch that may be replaced.")]
    device: Annotated[str, Option(metavar="auto|cpu|cuda|cuda:N", help="Device of the batches.")]
    decode: Annotated[str, Option(metavar="auto|dali|torchcodec|torchcodec-cuda", help="Decoder; auto: NVDEC or the CPU.")]
    num_threads: Annotated[Any, kinds.count(help="Decode threads per rank. Default: the number of cores.")]
    decode_processes: Annotated[
        int | None, Option(metavar="N", help="Processes that decode for them. Default: one for every 8 threads from 12 on.")
    ]
    memory_budget: Annotated[
        str | None, Option(metavar="SIZE", help="Memory for caches and prefetching, per rank. Default: up to 4GiB.")
    ]
    frame_cache: Annotated[
        Path | None, Option(metavar="DIR", help="Keep decoded frames in this folder, for all ranks and for later runs.")
    ]
    frame_cache_bytes: Annotated[
        str | None, Option(metavar="SIZE", help="Size limit of --frame-cache, such as 200GiB. Default: none on a disk.")
    ]
    gpu_cache: Annotated[str | None, Option(metavar="SIZE", help="Memory of the GPU for decoded frames. Default: none.")]


def with_options(**loader: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that gives a command the options of its parameters `dataset` and `loader`.

    The parameter `dataset`, of type `SourceOptions` or `DatasetOptions`, gets those that were given. The parameter `loader`, of
    type `LoaderOptions`, gets all that the command has.

    Args:
        loader: Options in `LoaderOptions` that the command has, with their defaults. The default of a required option is `...`.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        parameters = inspect.signature(command, eval_str=True).parameters
        own = [each for name, each in parameters.items() if name not in _ARGUMENTS]
        groups = {}
        for name in [name for name in _ARGUMENTS if name in parameters]:
            hints = get_type_hints(parameters[name].annotation, include_extras=True)
            defaults = loader if name == "loader" else dict.fromkeys(hints)
            groups[name] = [_parameter(option, hints[option], default) for option, default in defaults.items()]

        @functools.wraps(command)
        def run(**given: Any) -> None:
            chosen = {name: {option.name: given.pop(option.name) for option in options} for name, options in groups.items()}
            command(**{name: _ARGUMENTS[name](options) for name, options in chosen.items()}, **given)

        # Typer reads both.
        options = [*own, *(option for each in groups.values() for option in each)]
        run.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
        run.__annotations__ = {option.name: option.annotation for option in options}
        return run

    return decorate


def _parameter(name: str, kind: Any, default: Any) -> inspect.Parameter:
    default = inspect.Parameter.empty if default is ... else default
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)


def _dataset_arguments(options: dict[str, Any]) -> dict[str, Any]:
    """Return keyword arguments of `Dataset`, from those options that were given."""
    return {name: value for name, value in options.items() if value is not None}


def _loader_arguments(options: dict[str, Any]) -> dict[str, Any]:
    """Return keyword arguments of `Loader`, from the parsed values of its options. An `image_size` of None was not given."""
    arguments = dict(options)
    if options.get("image_size", ...) is None:
        del arguments["image_size"]
    elif options.get("image_size") == kinds.RECORDED:
        arguments["image_size"] = None
    if "delta_timestamps" in options:
        windows: dict[str, list[float]] = {}
        for key, deltas in options["delta_timestamps"] or ():
            if key in windows:
                raise ValueError(
                    f"--window must have each camera once, got {key} twice. Write all of its seconds in one option"
                )
            windows[key] = deltas
        arguments["delta_timestamps"] = windows
    return arguments


# Functions from the parsed values of the options to the keyword arguments that a command gets.
_ARGUMENTS = {"loader": _loader_arguments, "dataset": _dataset_arguments}
