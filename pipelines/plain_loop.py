"""Behaviour cloning in a plain PyTorch loop, on one or many GPUs. Copy this file, and replace the policy with your own.

python pipelines/plain_loop.py URI --out DIR [--resume] [--max-steps 1000] [--batch-size 32] [--chunk 50] [--image-size 224 224]
torchrun --nproc-per-node 8 pipelines/plain_loop.py URI --out DIR ...

It differs from a loop with a `torch.utils.data.DataLoader` only in the loader. It needs no DistributedSampler, because each
process gets its own share; no set_epoch, because each `for` loop is the next epoch; no worker_init_fn, because augmentation is
a function of seed and position; and neither pin_memory nor `.to(device)`, because batches are already on the device.
"""

from __future__ import annotations

import argparse
import functools
import math
import os
from collections.abc import Mapping, Sequence
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import torch
from nvidia.dali import math as dali_math
from torch import Tensor, distributed, nn

import dali_stream
from dali_stream import Dataset, Mixture, augment
from dali_stream.checks.frame_size import frame_size, join_sizes

STATE, ACTION = "observation.state", "action"
LOG_EVERY = 10  # steps
RANK, RANKS = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))  # set by torchrun


def loader_arguments(dataset: Dataset | Mixture, chunk: int, size: tuple[int, int]) -> dict[str, Any]:
    """Return the arguments of a Loader for action chunks: augmented frames, and normalized states and actions.

    Args:
        dataset: Dataset or mixture. Frames of a mixture are resized before they are cropped, because DALI needs one size.
        chunk: Number of actions per chunk, one per frame.
        size: Size (height, width) of the augmented frames in pixels.
    """
    fps = min(dataset.fps.values()) if isinstance(dataset, Mixture) else dataset.fps
    return {
        # In a mixture, the rates must be multiples of the lowest one, or the mixture must be `nearest`.
        "delta_timestamps": {ACTION: [step / fps for step in range(chunk)]},
        "dali_graph": functools.partial(augmented, cameras=colour_cameras(dataset), size=size),
        "normalize": {key: "mean_std" for key in (ACTION, STATE) if key in dataset.features},
        "image_size": size if isinstance(dataset, Mixture) else None,
    }


def augmented(nodes: dict[str, Any], cameras: Sequence[str], size: Sequence[int]) -> dict[str, Any]:
    """Crop and rotate the frames of each camera, and change their colours, independently. Other keys are not changed."""
    draw = augment.Draw(nodes["sample"])
    for key in cameras:
        frame = augment.random_resized_crop(nodes[key], draw, size=size, scale=(0.8, 1.0))
        frame = augment.random_rotation(frame, draw, degrees=3)
        frame = augment.color_jitter(frame, draw, brightness=0.2, contrast=0.2, saturation=0.3, hue=0.03)
        nodes[key] = dali_math.clamp(frame, 0.0, 1.0)
    return nodes


def colour_cameras(dataset: Dataset | Mixture) -> list[str]:
    """Return the cameras without depth cameras, whose distances are not colours in [0, 1]."""
    return [key for key in dataset.cameras if not dataset.features[key].is_depth]


class Policy(nn.Module):
    """Small convolutional policy that predicts a chunk of actions from frames, state and task.

    Args:
        dataset: Dataset or mixture whose batches the policy gets. Frames have values in [0, 1] and the shape (B, 3, H, W).
        chunk: Number of actions per prediction.
        width: Number of channels of the last layers. Default: 128.
    """

    def __init__(self, dataset: Dataset | Mixture, chunk: int, width: int = 128) -> None:
        super().__init__()
        parts = list(dataset.datasets.values()) if isinstance(dataset, Mixture) else [dataset]
        self.cameras, layers = colour_cameras(dataset), list[nn.Module]()
        self.state, action = (math.prod(dataset.features.get(key, {"shape": [0]})["shape"]) for key in (STATE, ACTION))
        for inside, outside in pairwise((3, 32, 64, width)):
            layers += [nn.Conv2d(inside, outside, 3, stride=2, padding=1), nn.GroupNorm(8, outside), nn.ReLU()]
        self.backbone = nn.Sequential(*layers, nn.Conv2d(width, width, 3, padding=1))  # all cameras share it
        self.task = nn.Embedding(max(max(part.tasks, default=0) for part in parts) + 1, width)
        self.dataset = nn.Embedding(len(parts), width)  # each dataset of a mixture counts its tasks from 0
        features = 2 * width * len(self.cameras) + 2 * width + self.state
        self.head = nn.Sequential(nn.Linear(features, 4 * width), nn.ReLU(), nn.Linear(4 * width, chunk * action))
        self.shape = (chunk, action)

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the loss, which is the mean absolute error. Actions that were not recorded have an error of 0.

        The mean includes these, so that the mean over the ranks is the loss of the whole batch.
        """
        return ((self.predict(batch) - actions(batch)).abs() * recorded(batch)).mean()

    def predict(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the actions from the current frame onwards, shape (B, chunk, D)."""
        task = batch["task_index"]
        seen = [self.task(task), self.dataset(batch.get("dataset_index", torch.zeros_like(task)))]
        for key in self.cameras:
            missing = batch.get(f"{key}_is_missing", torch.zeros_like(task, dtype=torch.bool))
            seen.append(places(self.backbone(batch[key])) * ~missing[:, None])
        seen += [batch[STATE].reshape(len(task), -1)] if self.state else []
        return self.head(torch.cat(seen, dim=1)).unflatten(1, self.shape)


def places(features: Tensor) -> Tensor:
    """Return the mean row and column of each channel, weighted by its softmax (Levine et al. 2016), shape (B, 2 × channels)."""
    weights = features.flatten(2).softmax(dim=-1).view_as(features)
    means = [weights.sum(5 - axis) @ torch.linspace(-1, 1, features.shape[axis], device=features.device) for axis in (2, 3)]
    return torch.cat(means, dim=1)


def actions(batch: Mapping[str, Tensor]) -> Tensor:
    """Return the actions of a batch, shape (B, chunk, D). An action may be one number, or have several dimensions."""
    return batch[ACTION].reshape(*batch[f"{ACTION}_is_pad"].shape, -1)


def recorded(batch: Mapping[str, Tensor]) -> Tensor:
    """Return a mask of the actions that were recorded, bool, shape (B, chunk, D).

    Actions after the end of the episode were not, nor were those that a sample's dataset lacks in a mixture.
    """
    mask = ~batch[f"{ACTION}_is_pad"][..., None].expand_as(actions(batch))
    for key, dimensions in ((f"{ACTION}_dim_is_pad", (1, -1)), (f"{ACTION}_is_missing", (1, 1))):
        if key in batch:
            mask = mask & ~batch[key].reshape(len(mask), *dimensions)
    return mask


def train(loader: dali_stream.Loader, policy: nn.Module, file: Path, max_steps: int, save_every: int) -> None:
    """Train up to `max_steps` steps. Continue from the checkpoint `file` if it exists."""
    model = nn.parallel.DistributedDataParallel(policy) if RANKS > 1 else policy
    optimizer, step = torch.optim.AdamW(policy.parameters(), 3e-4), 0
    parts: dict[str, Any] = {"model": policy, "optimizer": optimizer, "loader": loader}
    if file.exists():
        saved = torch.load(file, map_location="cpu", weights_only=True)
        step = saved["step"]
        for name, part in parts.items():
            part.load_state_dict(saved[name])
    while step < max_steps:
        for batch in islice(loader, max_steps - step):  # one epoch, or the rest of an epoch after a resume
            loss = model(batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step % LOG_EVERY == 0:
                if RANKS > 1:
                    distributed.all_reduce(loss.detach_())
                if RANK == 0:
                    print(f"step {step}: loss {loss.item() / RANKS:.6g}", flush=True)
            if RANK == 0 and (step % save_every == 0 or step == max_steps):  # the loader's state is the same on each rank
                saved = {name: part.state_dict() for name, part in parts.items()} | {"step": step}
                torch.save(saved, partial := file.with_suffix(".partial"))
                os.replace(partial, file)  # atomic, so that a killed run keeps the previous checkpoint


def positive(text: str) -> int:
    """Return an integer of a command line that must be positive."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, got {text}")
    return int(text)


def folder(text: str) -> Path:
    """Return the path of a folder, which may not exist yet."""
    if Path(text).is_file():
        raise argparse.ArgumentTypeError(f"must be a folder, got the file {text}")
    return Path(text)


def training_parser(description: str, devices: Sequence[str] = ("auto", "cpu")) -> argparse.ArgumentParser:
    """Return a parser with the options of a program that trains. The other programs of this folder add their own."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("uri", help="address of a LeRobot dataset")
    parser.add_argument(
        "--out", type=folder, required=True, default=argparse.SUPPRESS, help="folder of checkpoints, the same for all processes"
    )
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint in --out, or start if it has none")
    parser.add_argument("--max-steps", type=positive, default=1000, help="steps of the optimizer, over all epochs")
    parser.add_argument("--save-every", type=positive, default=500, help="steps between checkpoints")
    parser.add_argument("--batch-size", type=positive, default=32, help="samples per step of all processes together")
    parser.add_argument("--chunk", type=positive, default=50, help="actions per chunk, one per frame")
    parser.add_argument("--image-size", type=frame_size, default="224x224", metavar="HxW", help="size of the frames in pixels")
    parser.add_argument("--device", choices=devices, default="auto", help="auto: the GPU if one exists")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Create the loader and a policy, and train."""
    parser = training_parser("Behaviour cloning in a plain PyTorch loop")
    arguments = parser.parse_args(join_sizes(argv))
    arguments.out.mkdir(parents=True, exist_ok=True)
    if (file := arguments.out / "checkpoint.pt").exists() and not arguments.resume:
        parser.error(f"{file} already exists. Continue from it with --resume, or name another --out")
    if arguments.batch_size % RANKS:
        parser.error(f"--batch-size must be a multiple of the {RANKS} processes, which share it, got {arguments.batch_size}")
    gpu = arguments.device == "auto" and torch.cuda.is_available()
    device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if gpu else "cpu"
    if RANKS > 1:
        distributed.init_process_group("nccl" if gpu else "gloo")
    dataset = dali_stream.Dataset(arguments.uri)
    torch.manual_seed(0)
    policy = Policy(dataset, arguments.chunk).to(device)
    options = loader_arguments(dataset, arguments.chunk, arguments.image_size)
    size = arguments.batch_size // RANKS
    with dali_stream.Loader(dataset, batch_size=size, device=device, **options) as loader:  # its rank is torch.distributed's
        train(loader, policy, file, arguments.max_steps, arguments.save_every)
    if RANKS > 1:
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
