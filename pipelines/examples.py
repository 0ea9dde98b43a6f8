"""Command lines and output that the example pipelines share."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

import dali_stream
from dali_stream.checks.frame_size import frame_size, join_sizes


class Parser(argparse.ArgumentParser):
    """Parser with the options that all examples have.

    Args:
        description: Subject of the program.
        batch_size: Default of --batch-size.
    """

    def __init__(self, description: str, batch_size: int = 32) -> None:
        super().__init__(description=description)
        self.add_argument("uri", help="a LeRobot dataset")
        self.add_argument("--batch-size", type=int, default=batch_size, help="samples per step of all processes together")
        self.add_argument("--image-size", type=frame_size, default=(224, 224), metavar="HxW")

    def streams(self, batches: int = 50) -> Parser:
        """Add the option of programs that only stream. `batches` is its default."""
        self.add_argument("--batches", type=int, default=batches)
        return self

    def trains(self, devices: Sequence[str] = ("auto", "cpu")) -> Parser:
        """Add the options of programs that train. `devices` are the values of --device."""
        self.add_argument("--out", type=Path, required=True, help="folder of checkpoints, the same for all processes")
        self.add_argument(
            "--resume", action="store_true", help="continue from the checkpoint in --out, or start if it has none"
        )
        self.add_argument("--max-steps", type=int, default=1000)
        self.add_argument("--save-every", type=int, default=500, help="steps between checkpoints")
        self.add_argument("--chunk", type=int, default=50, help="actions per chunk, one per frame")
        self.add_argument("--device", choices=devices, default="auto", help="auto: the GPU if one exists")
        return self

    def parse(self, argv: Sequence[str] | None) -> argparse.Namespace:
        """Parse a command line, in which a size may also be two words."""
        return self.parse_args(join_sizes(argv))


def show(loader: dali_stream.Loader, batches: int) -> None:
    """Stream some batches of one epoch, and print the routes, the keys and shapes of the first batch, and the rate."""
    with loader:
        for camera, route in loader.routes.items():
            print(f"{camera} by {route.decoder}: {route.reason}")
        started, samples = time.perf_counter(), 0
        for number, batch in enumerate(loader, start=1):
            samples += len(batch["index"])
            if number == 1:
                for key, value in batch.items():
                    is_tensor = hasattr(value, "shape")
                    print(f"{key}: {tuple(value.shape)} {value.dtype}" if is_tensor else f"{key}: {value[0]!r}, ...")
            if number == batches:
                break
        print(f"{samples / (time.perf_counter() - started):.0f} samples/s, the first batch included")
