"""Training run on Accelerate: the loop, its validation, its metrics and its checkpoints."""

from __future__ import annotations

import math
import signal
import sys
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.tracking import get_available_trackers
from accelerate.utils import ProjectConfiguration, broadcast_object_list
from filelock import FileLock, Timeout
from torch import Tensor, nn
from tqdm import tqdm

import dali_stream
from training import charts, checkpoint, journal
from training.data import Data, open_data
from training.lerobot_act import LeRobotAct
from training.policy import ChunkPolicy, actions, recorded
from training.preemption import Preemption

WARM_UP = 100  # steps in which the learning rate increases
# Arguments that affect the training, but may change when a run resumes.
COURSE = ("batch_size", "max_steps", "learning_rate", "weight_decay", "clip")


def main(arguments: Namespace) -> None:
    """Train, or draw a batch. See `train.main`."""
    preemption = Preemption()
    cpu = arguments.device == "cpu" or not torch.cuda.is_available()
    bf16 = not cpu and torch.cuda.is_bf16_supported(including_emulation=False)
    logs = ProjectConfiguration(str(arguments.out), str(arguments.out / "tensorboard"))
    try:
        installed = [str(each) for each in get_available_trackers()]
        if missing := set(arguments.log_with) - set(installed):
            raise ValueError(f"--log-with must be of the trackers that are installed, {installed}, got {', '.join(missing)}")
        trackers = None if arguments.show else [journal.JsonLines(arguments.out), *arguments.log_with]
        accelerator = Accelerator(cpu=cpu, mixed_precision="bf16" if bf16 else "no", log_with=trackers, project_config=logs)
        accelerator.gradient_accumulation_steps = 1  # Accelerate's configuration may have more, which divides gradients
        if arguments.show:
            show_batch(arguments, accelerator)
            return
        run = Run(arguments, accelerator)
    except (ValueError, OSError, dali_stream.DaliStreamError) as error:
        print(f"train.py: {error}", file=sys.stderr)
        sys.exit(2)
    try:
        finished = run.train(preemption)
    except OSError as error:
        sys.exit(f"train.py: {error}")
    finally:
        run.close()
    accelerator.end_training()
    if not finished:
        preemption.leave()


def make_policy(arguments: Namespace, data: Data) -> nn.Module:
    """Create the policy that the arguments select. Its random weights are a function of the seed."""
    torch.manual_seed(arguments.seed)
    if arguments.policy == "compact":
        return ChunkPolicy(data.cameras, data.state, data.action, arguments.chunk, data.tasks, data.datasets)
    size, pretrained = arguments.image_size, not arguments.from_scratch
    return LeRobotAct(data.cameras, size, data.state, data.action, arguments.chunk, pretrained)


def show_batch(arguments: Namespace, accelerator: Accelerator) -> None:
    """Draw the batch --show of a run, which may be in progress, to batch.png. Nothing is trained.

    Raises:
        ValueError: If the arguments do not fit the dataset or the checkpoint, or the epoch has no such batch.
        DaliStreamError: If the dataset cannot be read, or the checkpoint belongs to another dataset.
    """
    data = open_data(arguments, accelerator)
    try:
        if saved := checkpoint.newest(arguments.out):  # check that its order is that of the arguments
            checkpoint.check(saved, arguments, data.train)
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

    def __init__(self, arguments: Namespace, accelerator: Accelerator) -> None:
        self.arguments, self.accelerator, self.step = arguments, accelerator, 0
        saved, out = checkpoint.newest(arguments.out), arguments.out
        if saved and not arguments.resume:
            raise ValueError(f"{saved} already exists. Continue from it with --resume, or name another --out")
        out.mkdir(parents=True, exist_ok=True)
        self.lock = FileLock(out / ".lock")
        if accelerator.is_main_process:
            try:
                self.lock.acquire(timeout=0)
            except Timeout:
                raise ValueError(f"another run is writing to {out}. End it, or name another --out") from None
        self.data = open_data(arguments, accelerator)
        model = make_policy(arguments, self.data)
        optimizer = torch.optim.AdamW(model.parameters(), arguments.learning_rate)
        self.model, self.optimizer = accelerator.prepare(model, optimizer)
        self.sound = torch.tensor(True, device=accelerator.device)
        checkpoint.register(accelerator, self.data.train)
        before = {}
        if saved:
            state = checkpoint.check(saved, arguments, self.data.train)
            self.step, before = state["step"], state["arguments"]
            checkpoint.load(saved, accelerator)
        if accelerator.is_main_process:
            journal.cut(out, self.step)
        # A run that was saved when a signal interrupted its validation repeats this validation.
        validated = [entry["step"] for entry in journal.read(out) if "val_error" in entry]
        self.unvalidated = broadcast_object_list([self._is_validated_at(self.step) and self.step not in validated])[0]
        options = {"name": out.name, "dir": str(out), "config": vars(arguments) | {"out": str(out)}}
        accelerator.init_trackers("dali_stream", None, {"tensorboard": {"purge_step": self.step + 1}, "wandb": options})
        self._introduce(before)
        self.data.train.metrics()  # the next call covers the time from here on

    def train(self, preemption: Preemption) -> bool:
        """Train up to --max-steps steps. Return False if a signal ends the run earlier."""
        arguments, batches, asked = self.arguments, self._batches(), False
        terminal = sys.stderr.isatty() and self.accelerator.is_main_process
        with tqdm(total=arguments.max_steps, initial=self.step, unit="step", disable=not terminal) as bar:
            while self.unvalidated or self.step < arguments.max_steps:
                if not self.unvalidated:
                    self.step += 1
                    loss = self._descend(next(batches))
                    bar.update()
                    asked, last = preemption.agreed(), self.step == arguments.max_steps
                    if self.step % arguments.log_every == 0 or last:
                        self._log(loss)
                    self.unvalidated = self._is_validated_at(self.step)
                if self.unvalidated and not asked:
                    asked = not self._validate(preemption)
                if asked or self.step % arguments.save_every == 0 or self.step == arguments.max_steps:
                    self._save()
                if asked:
                    self._print(
                        f"{signal.Signals(preemption.signal).name}: ended at step {self.step}, saved; --resume continues"
                    )
                    return False
        if self.accelerator.is_main_process:
            charts.loss_curves(arguments.out / "loss.png", journal.read(arguments.out))
            charts.action_chunks(arguments.out / "chunks.png", self.data, self.accelerator.unwrap_model(self.model))
        return True

    def close(self) -> None:
        """Close the loaders, and unlock the folder for other runs."""
        self.data.close()
        self.lock.release()

    def _batches(self) -> Iterator[dict[str, Any]]:
        while True:
            yield from self.data.train  # one epoch, or the rest of an epoch after a resume

    def _is_validated_at(self, step: int) -> bool:
        due = step % self.arguments.val_every == 0 or step == self.arguments.max_steps
        return self.data.val is not None and step > 0 and due

    def _descend(self, batch: dict[str, Any]) -> Tensor:
        """Make one step of the optimizer. Return the loss of this process's part of the batch."""
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

    def _log(self, loss: Tensor) -> None:
        """Log the mean loss of this step over all processes, and what the loader did since the last entry."""
        self._check_sound()
        loader, accelerator = self.data.train, self.accelerator
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
        self.data.train.metrics()  # the time of the validation does not count as training
        if asked:
            return False
        values = {"val_error": own / count, "mean_error": mean / count}
        self.accelerator.log(values, self.step)
        self._print_values("", values)
        self.unvalidated = False
        return True

    def _save(self) -> None:
        """Save the run. All processes are at the same step, and have the same state.

        Raises:
            OSError: If the checkpoint cannot be written. The previous one remains. The other processes exit with 1.
        """
        self._check_sound()
        problem = None
        if self.accelerator.is_main_process:
            try:
                checkpoint.save(self.accelerator, self.arguments, self.step)
            except OSError as error:
                problem = error
        [is_saved] = broadcast_object_list([problem is None])  # the others wait here until the checkpoint is complete
        if problem is not None:
            raise problem
        if not is_saved:
            sys.exit(1)
        self.data.train.metrics()

    def _introduce(self, before: dict[str, Any]) -> None:
        """Print the planned steps, the number of processes, and what differs from the arguments of the checkpoint."""
        for name in COURSE if before else ():
            if before[name] != (now := getattr(self.arguments, name)):
                option = f"--{name.replace('_', '-')}"
                self._print(
                    f"{option} was {before[name]} and is {now} from here on, so the run differs from an uninterrupted one"
                )
        data, most, processes = self.data, self.arguments.max_steps, self.accelerator.num_processes
        held_out = data.val.dataset.num_episodes if data.val else 0
        episodes = f"{data.train.dataset.num_episodes} episodes to train on, {held_out} to validate on"
        todo = f"steps {self.step + 1} to {most}"
        if self.step >= most:
            todo = f"step {self.step} is done already, of {most}: nothing is trained"
        self._print(f"{processes} process{'es' * (processes > 1)} on {self.accelerator.device.type}; {episodes}; {todo}")

    def _print_values(self, left: str, values: dict[str, float]) -> None:
        text = ", ".join(f"{name} {value:.4g}" for name, value in values.items())
        self._print(f"step {self.step} of {self.arguments.max_steps}{left}: {text}")

    def _print(self, text: str) -> None:
        if self.accelerator.is_main_process:
            tqdm.write(text, file=sys.stderr)  # above the progress bar
            sys.stderr.flush()
