"""Runs LeRobot's training script once and records what it does. benchmarks/lerobot_train.py starts it.

    python benchmarks/lerobot_programs/run.py SPEC.json -- ARGUMENTS OF lerobot-train

SPEC.json contains an object with the entries
    side       "loader" for `dali-stream lerobot-train`, "stock" for the unchanged script, or "ordered" for the script in the
               order of a Loader. For "ordered", the script's DataLoader gets a FrameSampler. It also gets a separate generator,
               because otherwise each new iterator of a DataLoader draws a number from torch's global generator. "repeated" is
               the unchanged script, which gets its first batch again in each step.
    trains     whether the policy is trained; if false, a step only preprocesses a batch
    kill_at    step, counted from the start of this process, at which the process kills itself, or null
    seed, drop_n_last_frames   arguments of the FrameSampler
    records    "times" to record nothing but the times of batches, on any number of threads, for measurements of speed
    out        path of the output file, to which the rank is appended. Each line of the file is a JSON object: the indices and
               frames of a batch with hashes of its depth maps, the loss of a step, or a message that LeRobot logs about its
               evaluation.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import torch
from lerobot.scripts import lerobot_train as script

from dali_stream import Dataset, FrameSampler
from dali_stream.cli import main as dali_stream_main


class Recorder:
    """Wrapper of functions of the script that records batches and losses."""

    def __init__(self, spec: dict[str, Any], file: TextIO) -> None:
        self._spec, self._file, self._steps = spec, file, 0
        self._only_times = spec.get("records") == "times"
        self._cycle, self._update, self._init_logging = script.cycle, script.update_policy, script.init_logging
        script.cycle, script.update_policy, script.init_logging = self.cycle, self.update, self.init_logging

    def record(self, **entry: Any) -> None:
        self._file.write(json.dumps(entry) + "\n")

    def cycle(self, loader: Any) -> Iterator[Any]:
        batches = self._cycle(loader)
        if self._spec["side"] == "repeated":
            batches = itertools.repeat(next(batches))
        for batch in batches:
            self._steps += 1
            if self._only_times:
                self.record(time=time.perf_counter())
                yield batch
                continue
            if self._steps == self._spec["kill_at"]:
                os.kill(os.getpid(), signal.SIGKILL)
            frames = [value for key, value in batch.items() if "image" in key and torch.is_tensor(value) and value.ndim > 3]
            described = sorted({f"{value.dtype}, {'' if value.is_contiguous() else 'not '}contiguous" for value in frames})
            depth = {
                key: hashlib.sha256(value.numpy().tobytes()).hexdigest()
                for key, value in batch.items()
                if "depth" in key and torch.is_tensor(value) and value.ndim == 4
            }
            self.record(index=batch["index"].tolist(), frames=described, depth=depth)
            yield batch

    def update(self, tracker: Any, *arguments: Any, **named: Any) -> Any:
        if not self._spec["trains"]:
            return tracker, {}
        result = self._update(tracker, *arguments, **named)
        if not self._only_times:
            self.record(loss=result[0].metrics["loss"].val)
        return result

    def init_logging(self, *arguments: Any, **named: Any) -> None:
        self._init_logging(*arguments, **named)  # removes all handlers
        logging.getLogger().addHandler(Evaluations(self))


class Evaluations(logging.Handler):
    """Logging handler that records the losses of evaluations, which LeRobot only logs."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def emit(self, record: logging.LogRecord) -> None:
        if "eval_loss=" in (text := record.getMessage()):
            self._recorder.record(eval=text)


def ordered(spec: dict[str, Any]) -> type[torch.utils.data.DataLoader[Any]]:
    """Return a DataLoader class that samples the training set in the order of a Loader.

    It is a subclass of torch's DataLoader, because accelerate tests for this class with isinstance.
    """

    class Ordered(torch.utils.data.DataLoader[Any]):
        def __init__(self, dataset: Any, **arguments: Any) -> None:
            sampler = arguments.get("sampler")
            if sampler is not None or arguments.get("shuffle"):
                selection = Dataset(dataset.root, episodes=dataset.episodes, drop_n_last_frames=spec["drop_n_last_frames"])
                if hasattr(sampler, "indices"):
                    assert sorted(sampler.indices) == sorted(FrameSampler(selection)), "LeRobot samples other frames"
                sampler = FrameSampler(selection, seed=spec["seed"], batch_size=arguments["batch_size"])
                arguments |= {"sampler": sampler, "shuffle": False}
            super().__init__(dataset, **({"generator": torch.Generator()} | arguments))

    return Ordered


def main(spec: dict[str, Any], words: list[str]) -> int:
    """Run the script. Return its exit code."""
    if spec.get("records") != "times":
        torch.set_num_threads(1)  # so that floating-point sums are always computed in the same order
    with Path(f"{spec['out']}.{os.environ.get('RANK', '0')}").open("w", buffering=1) as file:
        Recorder(spec, file)
        if spec["side"] == "loader":
            return dali_stream_main(["lerobot-train", *words])
        if spec["side"] == "ordered":
            torch.utils.data.DataLoader = ordered(spec)
        sys.argv = ["lerobot-train", *words]
        script.main()
        return 0


if __name__ == "__main__":
    sys.exit(main(json.loads(Path(sys.argv[1]).read_text()), sys.argv[3:]))
