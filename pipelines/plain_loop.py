"""Plain PyTorch training loop with the Loader. It is an example of behaviour cloning in a single file that you can copy.

python pipelines/plain_loop.py URI --out DIR [--resume] [--max-steps 1000] [--batch-size 32] [--chunk 50] [--image-size 224 224]
torchrun --nproc_per_node 8 pipelines/plain_loop.py URI --out DIR ...

It differs from a loop with a `torch.utils.data.DataLoader` only in the loader. It needs no DistributedSampler, because each
process gets its own share; no set_epoch, because each `for` loop is the next epoch; no worker_init_fn, because augmentation is
a function of seed and position; and neither pin_memory nor `.to(device)`, because batches are already on the device.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Sequence
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import torch
from nvidia.dali import math as dali_math
from torch import distributed, nn

import dali_stream
from dali_stream import augment
from dali_stream.checks.frame_size import frame_size, join_sizes

STATE, ACTION = "observation.state", "action"
LOG_EVERY, SAVE_EVERY = 10, 500  # steps
RANK, RANKS = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))  # set by torchrun


def colour_cameras(dataset: dali_stream.Dataset) -> list[str]:
    """Return the cameras without depth cameras, whose distances are not colours in [0, 1]."""
    return [key for key in dataset.cameras if not dataset.features[key].is_depth]


def augmented(cameras: Sequence[str], size: tuple[int, int]) -> Any:
    """Return a graph function that augments the frames of each camera independently. Other keys are not changed."""

    def graph(nodes: dict[str, Any]) -> dict[str, Any]:
        draw = augment.Draw(nodes["sample"])
        for key in cameras:
            frame = augment.random_resized_crop(nodes[key], draw, size=size, scale=(0.8, 1.0))
            frame = augment.color_jitter(frame, draw, brightness=0.2, contrast=0.2, saturation=0.3, hue=0.03)
            nodes[key] = dali_math.clamp(frame, 0.0, 1.0)
        return nodes

    return graph


class Policy(nn.Module):
    """Small convolutional policy that predicts a chunk of actions from frames, state and task. Replace it with your own.

    Args:
        cameras: Keys of the frames in batches, with values in [0, 1] and shape (B, 3, H, W). All cameras share one backbone.
        state: Width of the state, or 0 without a state.
        action: Width of an action.
        chunk: Number of actions per prediction.
        tasks: Number of tasks. Batches have `task_index` of shape (B,).
        width: Number of channels of the last layers. Default: 128.
    """

    def __init__(self, cameras: Sequence[str], state: int, action: int, chunk: int, tasks: int, width: int = 128) -> None:
        super().__init__()
        self.cameras, self.state, self.shape = list(cameras), state, (chunk, action)
        sizes, layers = (3, 32, 64, width, width), list[nn.Module]()
        for inside, outside in pairwise(sizes):
            layers += [nn.Conv2d(inside, outside, 3, stride=2, padding=1), nn.GroupNorm(8, outside), nn.ReLU()]
        self.backbone = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten())
        self.task = nn.Embedding(tasks, width)
        features = 4 * width * len(self.cameras) + width + state
        self.head = nn.Sequential(nn.Linear(features, 4 * width), nn.ReLU(), nn.Linear(4 * width, chunk * action))

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the loss, which is the mean absolute error. Actions after the end of the episode have an error of 0."""
        seen = [self.backbone(batch[key]) for key in self.cameras] + [self.task(batch["task_index"])]
        seen += [batch[STATE].reshape(len(seen[0]), -1)] if self.state else []
        predicted = self.head(torch.cat(seen, dim=1)).unflatten(1, self.shape)
        wrong = (predicted - batch[ACTION].reshape(predicted.shape)).abs()
        return (wrong * ~batch[f"{ACTION}_is_pad"][..., None]).mean()


def train(loader: dali_stream.Loader, policy: nn.Module, file: Path, max_steps: int) -> None:
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
            if RANK == 0 and (step % SAVE_EVERY == 0 or step == max_steps):  # the loader's state is the same on each rank
                saved = {name: part.state_dict() for name, part in parts.items()} | {"step": step}
                torch.save(saved, partial := file.with_suffix(".partial"))
                os.replace(partial, file)  # atomic, so that a killed run keeps the previous checkpoint


def main(argv: Sequence[str] | None = None) -> None:
    """Create the loader and a policy, and train."""
    parser = argparse.ArgumentParser(description="Behaviour cloning in a plain PyTorch loop")
    parser.add_argument("uri", help="a LeRobot v3 dataset")
    parser.add_argument("--out", type=Path, required=True, help="folder of checkpoint.pt, the same for all processes")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint in --out, or start if it has none")
    parser.add_argument("--max-steps", type=int, default=1000)
    parser.add_argument("--batch-size", type=int, default=32, help="samples per step of all processes together")
    parser.add_argument("--chunk", type=int, default=50, help="actions per chunk, one per frame")
    parser.add_argument("--image-size", type=frame_size, default=(224, 224), metavar="HxW")
    parser.add_argument("--device", choices=("auto", "cpu"), default="auto")
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
    state, action = (math.prod(dataset.features.get(key, {"shape": [0]})["shape"]) for key in (STATE, ACTION))
    torch.manual_seed(0)
    policy = Policy(colour_cameras(dataset), state, action, arguments.chunk, max(dataset.tasks, default=0) + 1).to(device)
    with dali_stream.Loader(  # gets its rank from torch.distributed
        dataset,
        batch_size=arguments.batch_size // RANKS,
        delta_timestamps={ACTION: [step / dataset.fps for step in range(arguments.chunk)]},
        dali_graph=augmented(policy.cameras, arguments.image_size),
        normalize={key: "mean_std" for key in (ACTION, STATE) if key in dataset.features},
        device=device,
    ) as loader:
        train(loader, policy, file, arguments.max_steps)
    if RANKS > 1:
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
