"""Behaviour cloning with action chunks, predicted from frames, state and task, on one or many GPUs.

python pipelines/train.py URI --out DIR [--resume] [--max-steps N] [--val-episodes N] ...
accelerate launch --multi_gpu --num_processes 8 pipelines/train.py URI --out DIR ...                 one process per GPU
accelerate launch --multi_gpu --num_processes 2 pipelines/train.py URI --out DIR --device cpu ...    on a CPU

With --multi_gpu, Accelerate starts several processes, also on a CPU. With `accelerate launch --cpu`, it starts only one process
and ignores --num_processes. `torchrun --nproc-per-node N` also starts N processes. The output says how many processes train.

URI may also be a mixture file (.yaml, .yml or .json) of several datasets. See docs/mixtures.md.

The program writes a checkpoint of Accelerate (model, optimizer and loader) to DIR/checkpoints, metrics.jsonl and the files of
other trackers to DIR, and at the end chunks.png, which shows predicted and recorded actions.

With --resume, a run that was killed continues from its last checkpoint, with the next sample. The number of processes may
change, but it must divide the consumers of the order, which --loader consumers=N sets. --batch-size is the number of samples of
all processes together, so the batches stay the same.

On SIGTERM or Ctrl-C, the program finishes the current batch and saves the run, and each process exits with 143 or 130. torchrun
and accelerate launch exit with 1 instead. They kill the processes after 30 s, or after TORCH_ELASTIC_SHUTDOWN_TIMEOUT seconds.
If a checkpoint cannot be written, the program exits with 1, and the previous checkpoint remains.

The program requires tensorboard and matplotlib: pip install -c constraints.txt '.[train]' in the checkout.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":  # before torch is imported, which takes seconds
    # Threads of OpenMP sleep while they wait, so that they leave a CPU with other work to it. torch reads this on import.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("GOMP_SPINCOUNT", "0")
    if os.environ.get("RANK", "0") == "0":
        print("train.py: importing torch", file=sys.stderr, flush=True)

import argparse
import math
import signal
from collections.abc import Sequence
from itertools import chain, repeat
from typing import Any

import torch
import yaml
from accelerate import Accelerator
from accelerate.tracking import get_available_trackers
from accelerate.utils import ProjectConfiguration, broadcast_object_list
from filelock import FileLock, Timeout
from plain_loop import Policy, actions, positive, recorded, training_parser
from tqdm import tqdm
from training import charts, checkpoint
from training.data import open_data
from training.journal import JsonLines
from training.preemption import Preemption

import dali_stream
from dali_stream.checks.frame_size import join_sizes

WARM_UP = 100  # steps in which the learning rate increases
WEIGHT_DECAY, CLIP = 1e-4, 1.0  # of AdamW, and the largest norm of a gradient


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line. Exit if it is invalid."""
    parser = training_parser("Behaviour cloning on a dataset, or on a mixture file of several. See docs/training.md")
    add = parser.add_argument
    add("--learning-rate", type=float, default=3e-4, help="peak, after the warm-up and before the cosine decay")
    add("--val-episodes", type=int, default=0, help="episodes of each dataset held out to validate on before each checkpoint")
    add("--log-every", type=positive, default=10, help="steps between entries of metrics.jsonl and of the other trackers")
    trackers = "trackers of Accelerate, such as tensorboard and wandb, in addition to metrics.jsonl"
    add("--log-with", nargs="*", default=["tensorboard"], metavar="NAME", help=trackers)
    add("--seed", type=int, default=0, help="seed of weights, order and augmentation")
    named: dict[str, Any] = {"nargs": "+", "action": "extend", "type": _named, "default": [], "metavar": "NAME=VALUE"}
    add("--dataset", **named, help="arguments of dali_stream.Dataset, such as revision=v2 cache_dir=/cache clock=frame_index")
    add("--loader", **named, help="arguments of dali_stream.Loader, such as shuffle=sharded consumers=64 frame_cache=/frames")
    parser.set_defaults(max_steps=20_000)
    arguments = parser.parse_args(join_sizes(argv))
    arguments.loader, arguments.dataset = dict(arguments.loader), dict(arguments.dataset)
    return arguments


def _named(text: str) -> tuple[str, Any]:
    """Return the name and the value of NAME=VALUE. The value is YAML: true, 8, 0.1, a text, or [a, b]."""
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"must be NAME=VALUE, got {text!r}")
    try:
        return name, yaml.safe_load(value)
    except yaml.YAMLError:
        raise argparse.ArgumentTypeError(f"must be NAME=VALUE with a value in YAML, got {text!r}") from None


class Run:
    """A training run, which starts at step 0 or at its checkpoint.

    Args:
        arguments: Arguments of the command line, see `parse`.

    Raises:
        ValueError, TypeError, OSError: If the arguments do not fit the dataset or the checkpoint.
        DaliStreamError: If the dataset cannot be read, or the checkpoint belongs to another dataset.
    """

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments, self.step, self.norm = arguments, 0, torch.tensor(0.0)
        out, cpu = arguments.out, arguments.device == "cpu"
        if (saved := checkpoint.newest(out)) and not arguments.resume:
            raise ValueError(f"{saved} already exists. Continue from it with --resume, or name another --out")
        installed = [str(each) for each in get_available_trackers()]
        if missing := set(arguments.log_with) - set(installed):
            raise ValueError(f"--log-with must be of the trackers that are installed, {installed}, got {', '.join(missing)}")
        journal, logs = JsonLines(out / "metrics.jsonl"), ProjectConfiguration(str(out), str(out / "tensorboard"))
        out.mkdir(parents=True, exist_ok=True)
        self.accelerator = accelerator = Accelerator(cpu=cpu, log_with=[journal, *arguments.log_with], project_config=logs)
        self.lock = FileLock(out / ".lock")
        if accelerator.is_main_process:
            try:
                self.lock.acquire(timeout=0)
            except Timeout:
                raise ValueError(f"another run is writing to {out}. End it, or name another --out") from None
        accelerator.gradient_accumulation_steps = 1  # Accelerate's configuration may have more, which divides gradients
        self.train_loader, self.val_loader, self.example = open_data(arguments, accelerator)
        torch.manual_seed(arguments.seed)
        self.policy = Policy(self.train_loader.dataset, arguments.chunk)
        optimizer = torch.optim.AdamW(self.policy.parameters(), weight_decay=WEIGHT_DECAY)
        self.model, self.optimizer = accelerator.prepare(self.policy, optimizer)
        accelerator.register_for_checkpointing(self.train_loader)
        validated = True
        if saved:
            self.step, validated, changes = checkpoint.load(accelerator, saved, arguments)
            for text in changes:
                self._print(f"{text} from here on")
        if broadcast_object_list([self.step])[0] != self.step:
            raise ValueError(
                f"--out must be the same folder for all processes, got {out} without the checkpoint of the first one"
            )
        if accelerator.is_main_process:
            journal.cut(self.step)
        # A run that was saved when a signal interrupted its validation repeats this validation.
        self.unvalidated = not validated and self.val_loader is not None
        wandb = {"name": out.name, "dir": str(out), "config": vars(arguments) | {"out": str(out)}}
        accelerator.init_trackers("dali_stream", None, {"tensorboard": {"purge_step": self.step + 1}, "wandb": wandb})
        episodes = [loader.dataset.num_episodes if loader else 0 for loader in (self.train_loader, self.val_loader)]
        self._print(
            f"processes: {accelerator.num_processes} on {accelerator.device.type}; episodes: {episodes[0]} to train on, "
            f"{episodes[1]} to validate on; steps: {self.step} of {arguments.max_steps} are done"
        )
        self.train_loader.metrics()  # the next call covers the time from here on

    def train(self, preemption: Preemption) -> bool:
        """Train up to --max-steps steps. Return False if a signal ends the run earlier."""
        arguments, main, last = self.arguments, self.accelerator.is_main_process, self.arguments.max_steps
        batches = chain.from_iterable(repeat(self.train_loader))  # epoch after epoch, from the position of the loader
        with tqdm(total=last, initial=self.step, unit="step", disable=not (main and sys.stderr.isatty())) as bar:
            while True:
                asked = preemption.agreed() or (self.unvalidated and not self._validate(preemption))
                if asked or self._is_due():
                    self._save()
                if asked:
                    name = signal.Signals(preemption.signal).name
                    self._print(f"{name}: ended at step {self.step}, saved; --resume continues")
                    return False
                if self.step >= last:
                    break
                self.step += 1
                loss = self._descend(next(batches))
                bar.update()
                if self.step % arguments.log_every == 0 or self.step == last:
                    self._log(loss)
                self.unvalidated = self._is_due() and self.val_loader is not None
        if main:
            charts.action_chunks(arguments.out / "chunks.png", self.train_loader, self.example, self.policy)
        return True

    def close(self) -> None:
        """Close the loaders, and unlock the folder for other runs."""
        self.lock.release()
        for loader in filter(None, (self.train_loader, self.val_loader)):
            loader.close()

    def _is_due(self) -> bool:
        """Return whether a checkpoint is written at this step, and the policy validated before."""
        every, last = self.arguments.save_every, self.arguments.max_steps
        return self.step >= last or (self.step > 0 and self.step % every == 0)

    def _descend(self, batch: dict[str, Any]) -> torch.Tensor:
        """Make one step of the optimizer. Return the loss of this process's part of the batch."""
        # A policy's random numbers are a function of the step, so a resumed run uses the same numbers as an uninterrupted one.
        torch.manual_seed(hash((self.arguments.seed, self.step, self.accelerator.process_index)))
        for group in self.optimizer.param_groups:
            group["lr"] = self._rate()
        loss = self.model(batch)
        self.accelerator.backward(loss)
        self.norm = self.accelerator.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def _rate(self) -> float:
        cosine = (1 + math.cos(math.pi * (self.step - 1) / self.arguments.max_steps)) / 2
        return self.arguments.learning_rate * min(self.step / WARM_UP, cosine)

    def _log(self, loss: torch.Tensor) -> None:
        """Log the mean loss of this step over all processes, and what the loader did since the last entry."""
        self._check_finite()
        loader, accelerator = self.train_loader, self.accelerator
        metrics = loader.metrics()
        values = {
            "loss": float(accelerator.reduce(loss, "mean")),
            "learning_rate": self._rate(),
            "samples_per_s": metrics.pop("samples_per_s") * accelerator.num_processes,
            "wait_share": metrics.pop("wait_share"),
            "epoch": loader.epoch,
            "batch": loader.batch_index - 1,
        }
        accelerator.log(values | {f"loader/{name}": value for name, value in metrics.items()}, self.step)
        left = (self.arguments.max_steps - self.step) * self.arguments.batch_size / max(values["samples_per_s"], 1e-9)
        self._print_values(f", {tqdm.format_interval(left)} left", values)

    @torch.no_grad()
    def _validate(self, preemption: Preemption) -> bool:
        """Log the mean absolute error on the validation episodes, and the error of predicting the mean, in standard deviations.

        Returns:
            Whether the validation was completed. A signal interrupts it, and the resumed run repeats it.
        """
        totals, asked = torch.zeros(3, device=self.accelerator.device), False
        self.policy.eval()
        for batch in self.val_loader:
            batch = self.train_loader.normalizer(batch)
            right, real = actions(batch), recorded(batch)
            with self.accelerator.autocast():
                wrong = self.policy.predict(batch) - right
            totals += torch.stack([wrong[real].abs().sum(), right[real].abs().sum(), real.sum()])
            if asked := preemption.agreed():  # each process has the same number of batches, so all of them end here or none
                break
        self.policy.train()
        own, mean, count = self.accelerator.reduce(totals, "sum").tolist()
        self.train_loader.metrics()  # the time of the validation does not count as training
        if not asked:
            values = {"val_error": own / count, "mean_error": mean / count}
            self.accelerator.log(values, self.step)
            self._print_values("", values)
            self.unvalidated = False
        return not asked

    def _save(self) -> None:
        """Save the run. All processes are at the same step, and have the same state.

        Raises:
            FloatingPointError: If the gradient of the last step was not finite, in all processes. Nothing is saved.
            OSError: If the checkpoint cannot be written. The previous one remains. The other processes exit with 1.
        """
        self._check_finite()
        problem = None
        if self.accelerator.is_main_process:
            try:
                checkpoint.save(self.accelerator, self.arguments, self.step, not self.unvalidated)
            except OSError as error:
                problem = error
        [is_saved] = broadcast_object_list([problem is None])  # the others wait here until the checkpoint is complete
        if problem is not None:
            raise problem
        if not is_saved:
            sys.exit(1)
        self.train_loader.metrics()

    def _check_finite(self) -> None:
        """Raise an error if the gradient of the last step was not finite, unless the step was skipped, as float16 does.

        After such a gradient, neither the weights nor any later gradient are finite. Reading it waits for the GPU.
        """
        if not math.isfinite(self.norm) and not self.optimizer.step_was_skipped:
            raise FloatingPointError(
                f"a gradient was not finite, at step {self.step} or before, so nothing is saved. Resume from the last "
                "checkpoint with a smaller --learning-rate"
            )

    def _print_values(self, left: str, values: dict[str, float]) -> None:
        text = ", ".join(f"{name} {value:.4g}" for name, value in values.items())
        self._print(f"step {self.step} of {self.arguments.max_steps}{left}: {text}")

    def _print(self, text: str) -> None:
        if self.accelerator.is_main_process:
            tqdm.write(text, file=sys.stderr)  # above the progress bar
            sys.stderr.flush()


def main(argv: Sequence[str] | None = None) -> None:
    """Train. Exit with 143 or 130 if SIGTERM or Ctrl-C ends the run early, and with 1 if a checkpoint cannot be written."""
    arguments, preemption = parse(argv), Preemption()
    try:
        run = Run(arguments)
    except (ValueError, TypeError, OSError, dali_stream.DaliStreamError) as error:
        print(f"train.py: {error}", file=sys.stderr)
        sys.exit(2)
    try:
        finished = run.train(preemption)
    except (OSError, FloatingPointError, dali_stream.DaliStreamError) as error:
        sys.exit(f"train.py: {error}")
    finally:
        run.close()
    run.accelerator.end_training()
    if not finished:
        preemption.leave()


if __name__ == "__main__":
    main()
