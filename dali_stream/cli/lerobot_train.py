"""`dali-stream lerobot-train`: LeRobot's training script with a Loader instead of its own data loading."""

from __future__ import annotations

import sys
import traceback

import typer

from dali_stream.cli import console
from dali_stream.errors import DaliStreamError


def lerobot_train(context: typer.Context) -> None:
    """Run LeRobot's lerobot-train with its own arguments, and load its data through a Loader.

    Arguments of the Loader begin with --loader, such as --loader.image_size=224x224. On several GPUs, run `accelerate launch -m
    dali_stream lerobot-train ARGS`. --help lists all arguments.
    """
    from dali_stream.integrations import lerobot
    from dali_stream.integrations.lerobot.arguments import ARGUMENTS, PREFIX, split_arguments

    arguments, rest = split_arguments(context.args)
    script = lerobot.patch(**arguments)
    if {"-h", "--help"} & {*rest}:
        console.say(f"arguments of the Loader: {', '.join(PREFIX + name for name in ARGUMENTS)}")
        console.say("")
        console.say("arguments of LeRobot:")
    sys.argv = ["lerobot-train", *rest]  # LeRobot reads its arguments from here, more than once
    try:
        script.main()
    except DaliStreamError:
        raise
    except Exception:
        traceback.print_exc()  # the messages of LeRobot's errors are not sufficient without the traceback
        raise typer.Exit(1) from None
