"""Behaviour cloning with the Trainer of Hugging Face's transformers (pip install transformers), on several GPUs with torchrun.

python pipelines/transformers_trainer.py URI --out DIR [--resume] [--max-steps 1000] [--batch-size 32] ...
torchrun --nproc-per-node 8 pipelines/transformers_trainer.py URI --out DIR ...
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from plain_loop import Policy, loader_arguments, training_parser
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

import dali_stream
from dali_stream.checks.frame_size import join_sizes

LOADER = "loader.pt"  # file in each checkpoint


class Cloning(Trainer):
    """Trainer that gets its batches from a Loader."""

    loader: dali_stream.Loader

    def get_train_dataloader(self) -> Any:
        return self.loader

    def compute_loss(self, model: torch.nn.Module, inputs: dict[str, Any], *_: Any, **__: Any) -> torch.Tensor:
        return model(inputs)  # the batch is a single argument, because its keys are not valid names of arguments


class SaveLoader(TrainerCallback):
    """Callback that saves the state of the Loader in every checkpoint."""

    def on_save(self, args: TrainingArguments, state: Any, control: Any, **others: Any) -> None:
        if state.is_world_process_zero:  # the loader's state is the same on each rank
            file = Path(args.output_dir, f"checkpoint-{state.global_step}", LOADER)
            torch.save(others["train_dataloader"].state_dict(), partial := file.with_suffix(".partial"))
            os.replace(partial, file)  # atomic, so that a killed run leaves no part of a file


def main(argv: Sequence[str] | None = None) -> None:
    """Train."""
    parser = training_parser("Behaviour cloning under the Trainer of transformers")
    arguments = parser.parse_args(join_sizes(argv))
    checkpoint = get_last_checkpoint(arguments.out) if arguments.out.exists() else None
    if checkpoint and not arguments.resume:
        parser.error(f"{checkpoint} exists already. Continue from it with --resume, or name another --out")
    settings = TrainingArguments(
        str(arguments.out),
        max_steps=arguments.max_steps,
        save_steps=arguments.save_every,
        learning_rate=3e-4,
        lr_scheduler_type="constant",
        use_cpu=arguments.device == "cpu",
        ignore_data_skip=True,  # the Trainer must not skip batches, because the Loader continues at its position
        ddp_find_unused_parameters=False,
        report_to="none",
    )
    if arguments.batch_size % settings.world_size:
        parser.error(f"--batch-size must be a multiple of the {settings.world_size} processes, got {arguments.batch_size}")
    settings.per_device_train_batch_size = arguments.batch_size // settings.world_size
    dataset = dali_stream.Dataset(arguments.uri)
    torch.manual_seed(0)
    policy = Policy(dataset, arguments.chunk)
    options = loader_arguments(dataset, arguments.chunk, arguments.image_size)
    options |= {"batch_size": settings.per_device_train_batch_size, "memory_format": "contiguous"}
    # The Loader gets its rank from torch.distributed, which TrainingArguments has initialized.
    with dali_stream.Loader(dataset, device=str(settings.device), **options) as loader:
        trainer = Cloning(policy, settings, callbacks=[SaveLoader()])
        trainer.loader = loader
        if checkpoint:
            if not (file := Path(checkpoint, LOADER)).exists():
                parser.error(f"{checkpoint} has no {LOADER}, as if it was cut off. Remove it to continue from the one before")
            loader.load_state_dict(torch.load(file, weights_only=True))
        trainer.train(resume_from_checkpoint=checkpoint)


if __name__ == "__main__":
    main()
