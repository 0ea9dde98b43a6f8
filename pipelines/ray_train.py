"""Behaviour cloning with Ray Train (pip install 'ray[train]'). If a worker dies, the run continues on the remaining workers.

python pipelines/ray_train.py URI --out DIR [--resume] [--workers 1 8] [--max-steps 1000] [--batch-size 48] ...

Run the program on a machine of the Ray cluster, whose address may be in RAY_ADDRESS. Without a cluster, the program starts one
on this machine. All nodes need this folder, the dataset and DIR at the same paths.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import ray
import torch
from plain_loop import Policy, loader_arguments, training_parser
from ray import train as ray_train
from ray.train.torch import TorchTrainer, get_device, prepare_model

import dali_stream
from dali_stream.checks.frame_size import join_sizes


def train(arguments: dict[str, Any]) -> None:
    """Train in a worker, from the start or from the last checkpoint. Ray has already initialized torch.distributed."""
    rank, ranks = ray_train.get_context().get_world_rank(), ray_train.get_context().get_world_size()
    if arguments["batch_size"] % ranks:
        raise ValueError(f"--batch-size must be a multiple of the {ranks} workers, got {arguments['batch_size']}")
    dataset, device = dali_stream.Dataset(arguments["uri"]), get_device()
    torch.manual_seed(0)
    policy = Policy(dataset, arguments["chunk"]).to(device)
    model, optimizer, step = prepare_model(policy), torch.optim.AdamW(policy.parameters(), 3e-4), 0
    options = loader_arguments(dataset, arguments["chunk"], arguments["image_size"])
    size = arguments["batch_size"] // ranks
    with dali_stream.Loader(
        dataset, batch_size=size, device=str(device), **options
    ) as loader:  # its rank is torch.distributed's
        parts: dict[str, Any] = {"model": policy, "optimizer": optimizer, "loader": loader}
        if checkpoint := ray_train.get_checkpoint():
            with checkpoint.as_directory() as folder:
                saved = torch.load(Path(folder, "checkpoint.pt"), map_location="cpu", weights_only=True)
            step = saved["step"]
            for name, part in parts.items():
                part.load_state_dict(saved[name])
        while step < arguments["max_steps"]:
            for batch in islice(loader, arguments["max_steps"] - step):
                loss = model(batch)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                step += 1
                if step % arguments["save_every"] == 0 or step == arguments["max_steps"]:
                    save(step, loss.item(), parts if rank == 0 else None)  # the loader's state is the same on each rank


def save(step: int, loss: float, parts: dict[str, Any] | None) -> None:
    """Report a step to Ray, on rank 0 together with a checkpoint of `parts`. Ray waits until all workers have reported."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = None
        if parts is not None:
            saved = {name: part.state_dict() for name, part in parts.items()} | {"step": step}
            torch.save(saved, Path(folder, "checkpoint.pt"))
            checkpoint = ray_train.Checkpoint.from_directory(folder)
        ray_train.report({"step": step, "loss": loss}, checkpoint=checkpoint)


def main(argv: Sequence[str] | None = None) -> None:
    """Train. If the program itself is killed, start it again with --resume. Ray then finds the last checkpoint in --out."""
    parser = training_parser("Behaviour cloning under Ray Train", devices=("auto", "cuda", "cpu"))
    workers = "least and most workers; the run takes as many as the cluster has room for"
    parser.add_argument("--workers", type=int, nargs=2, default=(1, 8), metavar=("LEAST", "MOST"), help=workers)
    parser.add_argument("--max-failures", type=int, default=3, help="failures of workers after which the run ends")
    parser.set_defaults(save_every=100, batch_size=48)
    arguments = parser.parse_args(join_sizes(argv))
    if arguments.out.exists() and not arguments.resume:
        parser.error(f"{arguments.out} exists already. Continue from it with --resume, or name another --out")
    if not ray.is_initialized():
        ray.init()
    gpu = arguments.device == "cuda" or (arguments.device == "auto" and "GPU" in ray.cluster_resources())
    if Path(arguments.uri).exists():
        arguments.uri = str(Path(arguments.uri).resolve())  # workers have their own working directory
    names = ("uri", "max_steps", "save_every", "batch_size", "chunk", "image_size")
    TorchTrainer(
        train,
        train_loop_config={name: getattr(arguments, name) for name in names},
        scaling_config=ray_train.ScalingConfig(num_workers=tuple(arguments.workers), use_gpu=gpu),
        run_config=ray_train.RunConfig(
            name=arguments.out.name,
            storage_path=str(arguments.out.resolve().parent),
            checkpoint_config=ray_train.CheckpointConfig(num_to_keep=2),
            failure_config=ray_train.FailureConfig(max_failures=arguments.max_failures),
        ),
    ).fit()


if __name__ == "__main__":
    main()
