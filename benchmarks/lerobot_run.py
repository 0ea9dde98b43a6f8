"""Runs LeRobot's training script once and records what it does. benchmarks/lerobot_train.py starts it.

    python benchmarks/lerobot_run.py SPEC.json -- ARGUMENTS OF lerobot-train

SPEC has
    side       "loader" for `dali-stream lerobot-train`, "stock" for the script as it is, "ordered" for the script as it is, in
               the order of a Loader: its DataLoader gets a FrameSampler, and a generator of its own, because creating an
               iterator draws from torch's global one
    trains     whether the policy is trained; without, a step only takes a batch through the preprocessor
    kill_at    number of the step of this process at which it kills itself, or null
    out        file; a JSON object per line: the frames of each batch, the loss of each step, the time, and what LeRobot logs of
               its evaluation. The rank is appended to its name.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

spec = json.loads(Path(sys.argv[1]).read_text())
words = sys.argv[3:]
torch.set_num_threads(1)  # the script gets one of two cores, and sums in the same order each time

from lerobot.scripts import lerobot_train as script  # noqa: E402 - after the threads are set

out = Path(f"{spec['out']}.{os.environ.get('RANK', '0')}").open("w", buffering=1)
steps = 0


def record(**entry: Any) -> None:
    out.write(json.dumps(entry) + "\n")


def recorded_cycle(loader: Any, cycle: Any = script.cycle) -> Iterator[Any]:
    global steps
    for batch in cycle(loader):
        steps += 1
        if steps == spec["kill_at"]:
            os.kill(os.getpid(), signal.SIGKILL)
        cameras = {
            key: [str(value.dtype), value.is_contiguous()]
            for key, value in batch.items()
            if "image" in key and "pad" not in key
        }
        record(index=batch["index"].tolist(), time=time.perf_counter(), cameras=cameras)
        yield batch


def recorded_update(tracker: Any, *arguments: Any, update: Any = script.update_policy, **named: Any) -> Any:
    if not spec["trains"]:
        return tracker, {}
    result = update(tracker, *arguments, **named)
    record(loss=result[0].metrics["loss"].val)
    return result


class Evaluations(logging.Handler):
    """Records the losses of evaluations, which LeRobot only logs."""

    def emit(self, entry: logging.LogRecord) -> None:
        if "eval_loss=" in (text := entry.getMessage()):
            record(eval=text)


class Ordered(torch.utils.data.DataLoader):  # a class, since accelerate asks isinstance
    """DataLoader that samples a training set in the order of a Loader."""

    def __init__(self, dataset: Any, **arguments: Any) -> None:
        from dali_stream import Dataset, FrameSampler

        if (sampler := arguments.get("sampler")) is not None or arguments.get("shuffle"):
            drop = spec["drop_last"]
            own = Dataset(dataset.root, episodes=dataset.episodes, drop_last=drop)
            if hasattr(sampler, "indices"):  # the same frames, however they are ordered
                assert sorted(sampler.indices) == sorted(FrameSampler(own))
            sampler = FrameSampler(own, seed=spec["seed"], batch_size=arguments["batch_size"])
            arguments |= {"sampler": sampler, "shuffle": False}
        super().__init__(dataset, generator=torch.Generator(), **arguments)


script.cycle = recorded_cycle
script.update_policy = recorded_update
logging.getLogger().addHandler(Evaluations())
setup = script.init_logging


def init_logging(*arguments: Any, **named: Any) -> None:
    setup(*arguments, **named)  # removes handlers
    logging.getLogger().addHandler(Evaluations())


script.init_logging = init_logging
if spec["side"] == "loader":
    from dali_stream.cli import main

    sys.exit(main(["lerobot-train", *words]))
if spec["side"] == "ordered":
    torch.utils.data.DataLoader = Ordered
sys.argv = ["lerobot-train", *words]
script.main()
