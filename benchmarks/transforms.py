"""Rate of LeRobot's image transforms with a Loader, and with LeRobot's DataLoader with as many worker processes.

    PYTHON benchmarks/transforms.py FOLDER [--image-size 224x224] [--workers 2] [--memory-budget 256MiB] [--rounds 3] [--json]

PYTHON is that of an environment with LeRobot 0.6.1 and this package. The sides take turns. Each turn begins a new epoch and
measures batches after the first ones, for which nothing is trained. With --image-size, LeRobot resizes frames in
`image_transforms` after its transforms, and the Loader before them, as in `dali-stream lerobot-train`.

A Loader decodes frames ahead until its memory is full, and decodes fewer at the end of an epoch, so measure a whole epoch.
On a virtual machine, memory that is written for the first time can take longer than decoding into it.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
import time
from collections.abc import Iterator
from typing import Any

from dali_stream.checks.frame_size import frame_size, join_sizes
from dali_stream.integrations import lerobot
from dali_stream.tools import environment

WARM = 24  # batches before the measurement


def main() -> None:
    options = parse()
    rates: dict[str, list[float]] = {}
    for _ in range(options.rounds):
        for name, side in (
            ("LeRobot", stock),
            ("Loader", ours),
            ("Loader, no transforms", functools.partial(ours, plain=True)),
        ):
            rates.setdefault(name, []).append(side(options))
    print(environment.report_json(report(options, rates)) if options.json else "\n".join(lines(rates)))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="folder of a LeRobot dataset")
    parser.add_argument("--image-size", type=frame_size, metavar="HxW", help="default: the recorded size")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--memory-budget", default="256MiB", help="of the Loader (default: 256MiB)")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--batches", type=int, default=40, help="measured batches of a turn")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args(join_sizes())


def dataset(options: argparse.Namespace, transform: Any) -> Any:
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    return LeRobotDataset("local", root=options.folder, image_transforms=transform)


def transforms() -> Any:
    """LeRobot's transforms with their default settings."""
    from lerobot.transforms import ImageTransforms, ImageTransformsConfig

    return ImageTransforms(ImageTransformsConfig(enable=True))


def stock(options: argparse.Namespace) -> float:
    """Batches per second of LeRobot's DataLoader, with the arguments of its training script."""
    import torch
    from torchvision.transforms import v2

    steps = [transforms(), *([v2.Resize(options.image_size)] if options.image_size else [])]
    loader = torch.utils.data.DataLoader(
        dataset(options, v2.Compose(steps)),
        num_workers=options.workers,
        batch_size=options.batch_size,
        shuffle=True,
        prefetch_factor=2 if options.workers else None,
    )
    return rate(iter(loader), options)


def ours(options: argparse.Namespace, plain: bool = False) -> float:
    """Batches per second of a Loader with as many workers."""
    loader = lerobot.make_loader(
        dataset(options, None if plain else transforms()),
        batch_size=options.batch_size,
        num_workers=options.workers,
        device="cpu",
        image_size=options.image_size,
        memory_budget=options.memory_budget,
    )
    with loader:
        return rate(iter(loader), options)


def rate(batches: Iterator[Any], options: argparse.Namespace) -> float:
    """Return the batches per second after the first ones."""
    for _ in itertools.islice(batches, WARM):
        pass
    started = time.perf_counter()
    count = sum(1 for _ in itertools.islice(batches, options.batches))
    return count / (time.perf_counter() - started)


def report(options: argparse.Namespace, rates: dict[str, list[float]]) -> dict[str, Any]:
    settings = {name: value for name, value in vars(options).items() if name not in ("folder", "json")}
    speedup = [ours / theirs for ours, theirs in zip(rates["Loader"], rates["LeRobot"], strict=True)]
    return {**settings, "batches_per_s": rates, "speedup": statistics.median(speedup), **environment.ran_on("cpu")}


def lines(rates: dict[str, list[float]]) -> Iterator[str]:
    for name, values in rates.items():
        yield f"{name:24} {statistics.median(values):7.2f} batches/s   ({', '.join(f'{value:.2f}' for value in values)})"


if __name__ == "__main__":
    main()
