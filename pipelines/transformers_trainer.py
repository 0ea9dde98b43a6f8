"""Behaviour cloning with the Trainer of Hugging Face's transformers (pip install transformers), on one or many GPUs.

python pipelines/transformers_trainer.py URI --out DIR [--resume] [--max-steps 1000] [--batch-size 32] ...
torchrun --nproc-per-node 8 pipelines/transformers_trainer.py URI --out DIR ...
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from action_chunks import augmented, colour_cameras
from training.policy import ACTION, STATE, ChunkPolicy
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

import dali_stream
from dali_stream.checks.frame_size import frame_size, join_sizes

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
    parser = argparse.ArgumentParser(description="Behaviour cloning under the Trainer of transformers")
    parser.add_argument("uri", help="a LeRobot v3 dataset")
    parser.add_argument("--out", type=Path, required=True, help="folder of checkpoints")
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint in --out, if it has one")
    parser.add_argument("--max-steps", type=int, default=1000)
    parser.add_argument("--save-every", type=int, default=500, help="steps between checkpoints")
    parser.add_argument("--batch-size", type=int, default=32, help="samples per step of all processes together")
    parser.add_argument("--chunk", type=int, default=50, help="actions per chunk, one per frame")
    parser.add_argument("--image-size", type=frame_size, default=(224, 224), metavar="HxW")
    parser.add_argument("--device", choices=("auto", "cpu"), default="auto")
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
    state, action = (math.prod(dataset.features.get(key, {"shape": [0]})["shape"]) for key in (STATE, ACTION))
    torch.manual_seed(0)
    policy = ChunkPolicy(colour_cameras(dataset), state, action, arguments.chunk, max(dataset.tasks, default=0) + 1)
    policy.to(memory_format=torch.contiguous_format)  # safetensors cannot save other formats
    with dali_stream.Loader(  # gets its rank from torch.distributed, which TrainingArguments has initialized
        dataset,
        batch_size=settings.per_device_train_batch_size,
        delta_timestamps={ACTION: [step / dataset.fps for step in range(arguments.chunk)]},
        dali_graph=augmented(policy.cameras, arguments.image_size),
        normalize={key: "mean_std" for key in (ACTION, STATE) if key in dataset.features},
        memory_format="contiguous",
        device=str(settings.device),
    ) as loader:
        trainer = Cloning(policy, settings, callbacks=[SaveLoader()])
        trainer.loader = loader
        if checkpoint:
            if not (file := Path(checkpoint, LOADER)).exists():
                parser.error(f"{checkpoint} has no {LOADER}, as if it was cut off. Remove it to continue from the one before")
            loader.load_state_dict(torch.load(file, weights_only=True))
        trainer.train(resume_from_checkpoint=checkpoint)


if __name__ == "__main__":
    main()
