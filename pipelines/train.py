"""Behaviour cloning with action chunks, predicted from frames, state and task, on one or many GPUs.

python pipelines/train.py URI --out DIR [--resume] [--max-steps N] [--val-episodes N] ...
accelerate launch --multi_gpu --num_processes 8 pipelines/train.py URI --out DIR ...                 one process per GPU
accelerate launch --multi_gpu --num_processes 2 pipelines/train.py URI --out DIR --device cpu ...    on a CPU

With --multi_gpu, Accelerate starts several processes, also on a CPU. With `accelerate launch --cpu`, it starts only one process
and ignores --num_processes. `torchrun --nproc-per-node N` also starts N processes. The first line of the output contains the
number of processes.

URI may also be a mixture file (.yaml, .yml or .json) of several datasets. See docs/mixtures.md.

The program writes checkpoint.pt (model, optimizer and loader), metrics.jsonl and TensorBoard's files to DIR, and at the end
loss.png and chunks.png. With --show EPOCH BATCH, it draws the batch of any step to batch.png. See docs/replay.md.

With --resume, a run that was killed continues from its last checkpoint, with the next sample. The number of processes may
change, but it must divide --consumers. --batch-size is the number of samples of all processes together, so the batches stay the
same.

On SIGTERM or Ctrl-C, the program finishes the current batch and saves the run, and each process exits with 143 or 130. torchrun
and accelerate launch exit with 1 instead. They kill the processes after 30 s, or after TORCH_ELASTIC_SHUTDOWN_TIMEOUT seconds.

The program requires tensorboard and matplotlib: pip install -c constraints.txt '.[train]' in the checkout.
"""

from __future__ import annotations

import argparse
import math
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from filelock import FileLock, Timeout
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn
from training import charts, checkpoint
from training.arguments import parse
from training.data import Data, open_data
from training.journal import Journal, read
from training.lerobot_act import LeRobotAct
from training.policy import ChunkPolicy, actions, recorded
from training.preemption import Preemption

import dali_stream

WARM_UP = 100  # steps in which the learning rate increases
MODEL = ("policy", "chunk", "image_size")  # arguments that determine the model and must equal those of the checkpoint
# Arguments that affect the training, but may change when a run resumes.
COURSE = ("batch_size", "max_steps", "learning_rate", "weight_decay", "clip")


def main(argv: Sequence[str] | None = None) -> None:
    """Train. Exit with 143 or 130 if SIGTERM or Ctrl-C ends the run early."""
    preemption = Preemption()
    arguments = parse(argv, __doc__)
    cpu = arguments.device == "cpu" or not torch.cuda.is_available()
    bf16 = not cpu and torch.cuda.is_bf16_supported(including_emulation=False)
    accelerator = Accelerator(cpu=cpu, mixed_precision="bf16" if bf16 else "no")
    accelerator.gradient_accumulation_steps = 1  # overrides Accelerate's configuration, where a larger number divides gradients
    try:
        if arguments.show:
            show_batch(arguments, accelerator)
            return
        run = Run(arguments, accelerator)
    except (ValueError, OSError, dali_stream.DaliStreamError) as error:
        print(f"train.py: {error}", file=sys.stderr)
        sys.exit(2)
    try:
        finished = run.train(preemption)
    finally:
        run.close()
    accelerator.end_training()
    if not finished:
        preemption.leave()


def make_policy(arguments: argparse.Namespace, data: Data) -> nn.Module:
    """Create the policy that the arguments select. Its random weights are a function of the seed."""
    torch.manual_seed(arguments.seed)
    if arguments.policy == "compact":
        return ChunkPolicy(data.cameras, data.state, len(data.action_names), arguments.chunk, data.tasks, data.datasets)
    size, pretrained = arguments.image_size, not arguments.from_scratch
    return LeRobotAct(data.cameras, size, data.state, len(data.action_names), arguments.chunk, pretrained)


def show_batch(arguments: argparse.Namespace, accelerator: Accelerator) -> None:
    """Draw the batch --show of a run, which may be in progress, to batch.png. Nothing is trained.

    Raises:
        ValueError: If the arguments do not fit the dataset or the checkpoint, or the epoch has no such batch.
        DaliStreamError: If the dataset cannot be read, or the checkpoint belongs to another dataset.
    """
    data, file = open_data(arguments, accelerator), arguments.out / "checkpoint.pt"
    try:
        if file.exists():  # check that its order is that of the arguments
            data.train.load_state_dict(checkpoint.load(file, {name: getattr(arguments, name) for name in MODEL})["loader"])
        batch = data.train.batch_at(*arguments.show)
        if accelerator.is_main_process:
            arguments.out.mkdir(parents=True, exist_ok=True)
            charts.samples(arguments.out / "batch.png", data, batch)
    finally:
        data.close()


class Run:
    """A training run, which starts at step 0 or at its checkpoint.

    Args:
        arguments: Arguments of the command line.
        accelerator: Accelerator of this process.

    Raises:
        ValueError: If the arguments do not fit the dataset or the checkpoint, or another run is writing to the folder.
        DaliStreamError: If the dataset cannot be read, or the checkpoint belongs to another dataset.
    """

    def __init__(self, arguments: argparse.Namespace, accelerator: Accelerator) -> None:
        self.arguments, self.accelerator, self.step = arguments, accelerator, 0
        self.unvalidated = False  # whether the validation after this step is still to do
        self.console = Console(stderr=True, quiet=not accelerator.is_main_process, markup=False)
        self.file = arguments.out / "checkpoint.pt"
        if self.file.exists() and (arguments.dummy or not arguments.resume):
            raise ValueError(f"{self.file} already exists. Continue from it with --resume, or name another --out")
        arguments.out.mkdir(parents=True, exist_ok=True)
        self.lock = FileLock(arguments.out / ".lock")
        if accelerator.is_main_process:
            try:
                self.lock.acquire(timeout=0)
            except Timeout:
                raise ValueError(f"another run is writing to {arguments.out}. End it, or name another --out") from None
        self.data = open_data(arguments, accelerator)
        if not arguments.dummy:
            model = make_policy(arguments, self.data)
            optimizer = torch.optim.AdamW(model.parameters(), arguments.learning_rate)
            self.model, self.optimizer = accelerator.prepare(model, optimizer)
            self.sound = torch.tensor(True, device=accelerator.device)
        if self.file.exists():
            self._load()
        self.journal = Journal(arguments.out, self.step) if accelerator.is_main_process else None
        self._introduce()
        self._mark()

    def train(self, preemption: Preemption) -> bool:
        """Train up to --max-steps steps. Return False if a signal ends the run earlier."""
        arguments = self.arguments
        if self.unvalidated:  # the run was saved when a signal interrupted the validation
            if not self._validate(preemption):
                return self._cut_short(preemption)
            self._save()
        with self._progress() as bar:
            for batch in self._batches():
                self.step += 1
                loss = self._descend(batch)
                asked, last = preemption.agreed(), self.step == arguments.max_steps
                if self.step % arguments.log_every == 0 or last:
                    self._log(loss)
                self.unvalidated = self.step % arguments.val_every == 0 or last
                if self.unvalidated and not asked:
                    asked = not self._validate(preemption)
                if self.step % arguments.save_every == 0 or last or asked:
                    self._save()
                bar.update(bar.task_ids[0], completed=self.step)
                if asked:
                    return self._cut_short(preemption)
        if self.accelerator.is_main_process and not arguments.dummy:
            charts.loss_curves(arguments.out / "loss.png", read(arguments.out))
            charts.action_chunks(arguments.out / "chunks.png", self.data, self.accelerator.unwrap_model(self.model))
        return True

    def _cut_short(self, preemption: Preemption) -> bool:
        saved = "" if self.arguments.dummy else ", saved; --resume continues from this step"
        self.console.print(f"{signal.Signals(preemption.signal).name}: ended at step {self.step}{saved}")
        return False

    def close(self) -> None:
        """Close the loaders and the journal, and unlock the folder for other runs."""
        self.data.close()
        self.lock.release()
        if self.journal is not None:
            self.journal.close()

    def _batches(self) -> Iterator[dict[str, Any]]:
        while self.step < self.arguments.max_steps:
            for batch in self.data.train:
                yield batch
                if self.step == self.arguments.max_steps:
                    return

    def _descend(self, batch: dict[str, Any]) -> Tensor | None:
        """Make one step of the optimizer. Return the loss of this process's part of the batch, or None without a model."""
        if self.arguments.dummy:
            return None
        # A policy's random numbers are a function of the step, so a resumed run uses the same numbers as an uninterrupted one.
        torch.manual_seed(hash((self.arguments.seed, self.step, self.accelerator.process_index)))
        for group in self.optimizer.param_groups:  # a checkpoint may have loaded other values
            group["lr"], group["weight_decay"] = self._rate(), self.arguments.weight_decay
        loss = self.model(batch)
        self.accelerator.backward(loss)
        norm = self.accelerator.clip_grad_norm_(self.model.parameters(), self.arguments.clip)
        self.sound &= torch.isfinite(norm)  # read only before saving and logging, because reading waits for the GPU
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def _rate(self) -> float:
        cosine = (1 + math.cos(math.pi * (self.step - 1) / self.arguments.max_steps)) / 2
        return self.arguments.learning_rate * min(self.step / WARM_UP, cosine)

    def _log(self, loss: Tensor | None) -> None:
        """Log the mean loss of this step over all processes, and the speed since the last entry."""
        values: dict[str, Any] = {}
        if loss is not None:
            self._check_sound()
            values = {"loss": float(self.accelerator.reduce(loss, "mean")), "learning_rate": self._rate()}
        loader, (step, marked, waited) = self.data.train, self.marked
        seconds = time.perf_counter() - marked
        state = loader.state_dict()
        values |= {
            "samples_per_s": (self.step - step) * self.arguments.batch_size / seconds,
            "wait_share": (loader.stats()["wait_s"] - waited) / seconds,
            "epoch": state["epoch"],
            "batch": loader.batch_index - 1,
            "position": state["position"],
        }
        self._note("train", values)
        if self.journal is not None:
            self.journal.show(self.step, "loader", loader.metrics())
        self._mark()

    def _mark(self) -> None:
        """Begin a new interval of measuring the speed."""
        self.marked = (self.step, time.perf_counter(), self.data.train.stats()["wait_s"])

    def _check_sound(self) -> None:
        """Check that all gradients so far were finite. All processes have the same gradient, so all of them raise or none.

        Raises:
            FloatingPointError: If a gradient was not finite.
        """
        if not self.sound:
            raise FloatingPointError(
                f"a gradient was not finite, at step {self.step} or shortly before, so nothing is saved after it. Resume "
                "from the last checkpoint with a smaller --learning-rate, or a smaller --clip"
            )

    @torch.no_grad()
    def _validate(self, preemption: Preemption) -> bool:
        """Log the mean absolute error on the validation episodes, and the error of predicting the mean, in standard deviations.

        Returns:
            Whether the validation was completed. A signal interrupts it, and the resumed run repeats it.
        """
        if self.data.val is None or self.arguments.dummy:
            self.unvalidated = False
            return True
        policy, totals = self.accelerator.unwrap_model(self.model).eval(), torch.zeros(3, device=self.accelerator.device)
        asked = False
        for batch in self.data.val:
            batch = self.data.train.normalizer(batch)
            right, real = actions(batch), recorded(batch)
            with self.accelerator.autocast():
                wrong = policy.predict(batch) - right
            totals += torch.stack([wrong[real].abs().sum(), right[real].abs().sum(), real.sum()])
            if asked := preemption.agreed():  # each process has the same number of batches, so all of them end here or none
                break
        policy.train()
        own, mean, count = self.accelerator.reduce(totals, "sum").tolist()
        self._mark()
        if asked:
            return False
        self._note("validation", {"val_error": own / count, "mean_error": mean / count})
        self.unvalidated = False
        return True

    def _note(self, kind: str, values: dict[str, Any]) -> None:
        if self.journal is not None:
            self.journal.add(self.step, kind, values)
            text = ", ".join(f"{name} {value:.4g}" for name, value in values.items())
            self.console.print(f"step {self.step}: {text}", soft_wrap=True)

    def _save(self) -> None:
        """Save the run. All processes are at the same step, and their loaders have the same state."""
        if not self.arguments.dummy:
            self._check_sound()
        if self.accelerator.is_main_process and not self.arguments.dummy:
            state = {
                "arguments": {name: getattr(self.arguments, name) for name in (*MODEL, *COURSE)},
                "model": self.accelerator.unwrap_model(self.model).state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "loader": self.data.train.state_dict(),
                "step": self.step,
                "unvalidated": self.unvalidated,
            }
            checkpoint.save(self.file, state)
        self.accelerator.wait_for_everyone()  # a process that ends earlier would cause the launcher to kill the others
        self._mark()

    def _load(self) -> None:
        state = checkpoint.load(self.file, {name: getattr(self.arguments, name) for name in MODEL})
        self.data.train.load_state_dict(state["loader"])  # first, because this call detects a different dataset
        self.accelerator.unwrap_model(self.model).load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.unvalidated = state["step"], state.get("unvalidated", False)
        for name in COURSE:
            before, now = state["arguments"].get(name), getattr(self.arguments, name)
            if before != now:
                self.console.print(f"--{name.replace('_', '-')} was {before} and is {now} from here on: it is not the same run")

    def _introduce(self) -> None:
        """Print the planned steps, and the number of processes, since a launcher may start fewer than expected."""
        data, arguments = self.data, self.arguments
        held_out = data.val.dataset.num_episodes if data.val else 0
        episodes = f"{data.train.dataset.num_episodes} episodes to train on, {held_out} to validate on"
        todo = f"steps {self.step + 1} to {arguments.max_steps}"
        if self.step >= arguments.max_steps:
            todo = f"step {self.step} is done already, of {arguments.max_steps}: nothing is trained"
        processes = self.accelerator.num_processes
        started = f"{processes} process{'es' * (processes > 1)} on {self.accelerator.device.type}"
        self.console.print(f"{started}; {episodes}; {todo}", soft_wrap=True)

    def _progress(self) -> Progress:
        columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        bar = Progress(*columns, console=self.console, disable=not self.console.is_terminal)
        bar.add_task("", total=self.arguments.max_steps, completed=self.step)
        return bar


if __name__ == "__main__":
    main()
