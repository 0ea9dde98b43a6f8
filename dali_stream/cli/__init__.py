"""The program `dali-stream`: its commands and error messages.

After a bad argument, the program prints its error to stderr and exits with code 2. After a failed run, it exits with code 1,
and after Ctrl-C with code 130. Commands import heavy modules (torch, torchcodec, DALI) only when they run, so that --help is
fast.
"""

from __future__ import annotations

import itertools
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated

import typer

import dali_stream
from dali_stream.checks.frame_size import join_sizes
from dali_stream.checks.text import visible
from dali_stream.cli import console
from dali_stream.cli.bench import bench
from dali_stream.cli.demo import demo
from dali_stream.cli.doctor import doctor
from dali_stream.cli.frames import frames
from dali_stream.cli.info import info
from dali_stream.cli.lerobot_train import lerobot_train
from dali_stream.cli.prepare import prepare
from dali_stream.cli.preview import preview
from dali_stream.cli.selftest import selftest
from dali_stream.cli.stats import stats
from dali_stream.system.torchcodec_import import compile_nothing

__all__ = ["main"]

PROGRAM = "dali-stream"
# Click's UsageError. Depending on its version, typer imports Click or contains a copy of it.
_UsageError = typer.BadParameter.__bases__[0]

app = typer.Typer(
    name=PROGRAM,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(short_help="Measure data loading alone.")(bench)
app.command(short_help="Make a small dataset, stream and measure it.")(demo)
app.command(short_help="Diagnose this machine and a dataset.")(doctor)
app.add_typer(frames, name="frames", short_help="List, remove and fill the frame cache on disk.")
app.command(short_help="Describe a dataset.")(info)
app.command(
    short_help="Run LeRobot's training script on a Loader.",
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []},
)(lerobot_train)
app.command(short_help="Rewrite a dataset for training.")(prepare)
app.command(short_help="Draw a batch as the model sees it.")(preview)
app.command(short_help="Compute the statistics that normalize needs.")(stats)
app.command(short_help="Test NVDEC through DALI on this machine.")(selftest)


def _print_version(enabled: bool) -> None:
    if enabled:
        typer.echo(f"{PROGRAM} {dali_stream.__version__}")
        raise typer.Exit()


@app.callback()
def _program(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="On failure, show the traceback; also allowed after a command.")
    ] = False,
) -> None:
    """Stream LeRobot datasets into training through NVIDIA DALI.

    A dataset (URI) is a local folder, the id of a Hub repository, or an address such as hf://, s3://, gs:// or https://.
    To start without a dataset, run `dali-stream demo`.
    """


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program, and return its exit code.

    Args:
        arguments: Arguments without the name of the program. Default: the arguments of this process.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # the encoding of a terminal may lack "×"
    if "lerobot-train" not in words:  # LeRobot may compile the policy
        compile_nothing()
    try:
        _run(join_sizes([argument for argument in words if argument != "--debug"], ("--image-size", "--size")))
        sys.stdout.flush()
        return 0
    except typer.Exit as done:
        return done.exit_code
    except BrokenPipeError:
        # The reader has closed the pipe, as `head` does. Redirect stdout, so that flushing its buffer at exit does not fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (Exception, KeyboardInterrupt) as error:
        if debug:
            for line in traceback.format_exc().splitlines():
                console.say(line, err=True)
        code, message = _explain(error)
        print(f"{PROGRAM}: {message}", file=sys.stderr)  # noqa: T201 - this is the program
        return code


def _run(arguments: list[str]) -> None:
    """Run a command like `app()`, but without typer's error handling."""
    command = typer.main.get_command(app)
    with command.make_context(PROGRAM, arguments) as context:
        command.invoke(context)


def _explain(error: BaseException) -> tuple[int, str]:
    """Return the exit code and the message for an error.

    The message is one line, except that indented lines of a ValueError are kept.
    """
    if isinstance(error, (KeyboardInterrupt, typer.Abort)):
        return 130, "interrupted"
    if isinstance(error, typer.BadParameter) and error.param and error.message.startswith("must "):
        return 2, _one_line(f"{error.param.opts[0]} {error.message}")  # of a parser in kinds.py
    if isinstance(error, _UsageError):
        path = error.ctx.command_path if error.ctx else PROGRAM  # type: ignore[attr-defined]  # Click's UsageError
        message = error.format_message().removesuffix(".")  # type: ignore[attr-defined]
        end = "" if message.endswith("?") else "."
        return 2, _one_line(f"{message}{end} See {path} --help")
    if isinstance(error, ValueError):
        parts = itertools.groupby(str(error).splitlines(), lambda line: line.startswith("  "))
        return 2, "\n".join(
            "\n".join(map(visible, lines)) if is_table else _one_line(" ".join(lines)) for is_table, lines in parts
        )
    if isinstance(error, OSError) and error.strerror:
        return 1, _one_line(f"{error.filename or 'the output'}: {error.strerror}. Use --debug to see where")
    if isinstance(error, (dali_stream.DaliStreamError, OSError, RuntimeError)) and str(error):
        return 1, _one_line(str(error))
    return 1, _one_line(f"{type(error).__name__}: {error}. Use --debug to see where, and please report it")


def _one_line(text: str) -> str:
    return visible(" ".join(text.split()))
