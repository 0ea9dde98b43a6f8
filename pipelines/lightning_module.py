"""Behaviour cloning under PyTorch Lightning's Trainer (pip install lightning), on one or many GPUs.

python pipelines/lightning_module.py URI --out DIR [--resume] [--max-steps 1000] [--batch-size 32] [--devices 8] ...
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from plain_loop import Policy, loader_arguments, training_parser

import dali_stream
from dali_stream.checks.frame_size import join_sizes


class Epochs(dali_stream.Loader):
    """Loader for a Trainer with max_steps.

    If a Trainer resumes from the end of an epoch, it first requests the rest of this epoch. The rest must be empty, but a
    Loader would begin the next epoch.
    """

    trainer: Any

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if self.batch_index or self.trainer.fit_loop.batch_idx < 0:  # the Loader is within an epoch, or the Trainer starts one
            yield from super().__iter__()


class Cloning(LightningModule):
    """LightningModule with a policy that imitates recorded actions, and the Loader of its data."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        super().__init__()
        self.arguments, self.dataset, self.saved = arguments, dali_stream.Dataset(arguments.uri), None
        torch.manual_seed(0)
        self.policy = Policy(self.dataset, arguments.chunk)

    def train_dataloader(self) -> dali_stream.Loader:
        """Create the Loader. It needs its rank, and torch.distributed is initialized when Lightning calls this method.

        Lightning does not wrap the Loader, because it is not a torch DataLoader.
        """
        size, device = self.arguments.batch_size // self.trainer.world_size, str(self.device)
        options = loader_arguments(self.dataset, self.arguments.chunk, self.arguments.image_size)
        self.loader = Epochs(self.dataset, batch_size=size, device=device, **options)
        self.loader.trainer = self.trainer
        if self.saved:
            self.loader.load_state_dict(self.saved)
        return self.loader

    def training_step(self, batch: dict[str, Any]) -> torch.Tensor:
        self.log("loss", loss := self.policy(batch), prog_bar=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 3e-4)

    # Lightning saves and loads the state of a loader itself. However, it does not load the state if a run without max_steps
    # resumes from the end of an epoch.
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["loader"] = self.loader.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.saved = checkpoint["loader"]


def main(argv: Sequence[str] | None = None) -> None:
    """Train. Save every --save-every steps and at the end of each epoch, which for Lightning is also the step --max-steps."""
    parser = training_parser("Behaviour cloning under PyTorch Lightning")
    parser.add_argument("--devices", default="auto", help="how many GPUs; with --device cpu, how many processes")
    arguments = parser.parse_args(join_sizes(argv))
    if (file := arguments.out / "last.ckpt").exists() and not arguments.resume:
        parser.error(f"{file} exists already. Continue from it with --resume, or name another --out")
    saves = [
        ModelCheckpoint(arguments.out, "last", every_n_train_steps=n, enable_version_counter=False)
        for n in (arguments.save_every, None)
    ]
    where: dict[str, Any] = {"default_root_dir": arguments.out, "accelerator": arguments.device, "devices": arguments.devices}
    trainer = Trainer(max_steps=arguments.max_steps, callbacks=[*saves], **where)
    if arguments.batch_size % trainer.world_size:
        parser.error(f"--batch-size must be a multiple of the {trainer.world_size} processes, got {arguments.batch_size}")
    trainer.fit(module := Cloning(arguments), ckpt_path=file if file.exists() else None)
    module.loader.close()


if __name__ == "__main__":
    main()
