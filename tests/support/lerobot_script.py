"""A replacement for LeRobot's training script, with the functions that `dali_stream.integrations.lerobot` wraps.

It has the calls of LeRobot 0.6.1 in their order. `make test-lerobot` runs the real ones.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import torch
from accelerate import Accelerator

import dali_stream


class MapDataset(torch.utils.data.Dataset[Any]):
    """The attributes of a LeRobotDataset. It has no items, so a DataLoader fails."""

    def __init__(self, root: Path, episodes: list[int] | None = None, **attributes: Any) -> None:
        own = dali_stream.Dataset(root)
        features = {key: dict(feature) for key, feature in own.features.items()}
        self.meta = SimpleNamespace(
            repo_id="owner/robot", root=root, revision="main", features=features, camera_keys=list(own.cameras)
        )
        self.root, self.episodes, self.tolerance_s = root, episodes, 1e-4
        self.delta_timestamps = {"action": [0.0, 1 / own.fps]}
        self.image_transforms = None
        table = pq.read_table(root / "data", columns=["episode_index", "frame_index"])
        kept = [episodes is None or index in episodes for index in table["episode_index"].to_pylist()]
        self.hf_dataset = SimpleNamespace(data=table.filter(kept))
        vars(self).update(attributes)

    def __len__(self) -> int:
        return int(self.hf_dataset.data.num_rows)

    def __getitem__(self, index: object) -> Any:
        raise AssertionError("a DataLoader was used")


def config(root: Path, output: Path, **values: Any) -> SimpleNamespace:
    """A TrainPipelineConfig with what the script reads."""
    policy = SimpleNamespace(device="cpu", drop_n_last_frames=0)
    defaults: dict[str, Any] = {"resume": False, "checkpoint_path": None, "seed": 3, "batch_size": 8, "steps": 4, "save_at": ()}
    given = {"episodes": None, "eval_episodes": None, "max_eval_samples": 0, "policy": policy} | defaults | values
    return SimpleNamespace(root=root, output=output, trainable_config=given["policy"], **given)


def script() -> ModuleType:
    """The module `lerobot.scripts.lerobot_train`. Its `train` returns the frames of each step, and of the evaluation."""
    module: Any = ModuleType("lerobot.scripts.lerobot_train")

    def make_train_eval_datasets(cfg: Any) -> tuple[MapDataset, MapDataset | None]:
        return MapDataset(cfg.root, cfg.episodes), MapDataset(cfg.root, cfg.eval_episodes) if cfg.eval_episodes else None

    def save_checkpoint(checkpoint_dir: Path, step: int, cfg: Any) -> None:
        for folder in ("training_state", "pretrained_model"):
            (checkpoint_dir / folder).mkdir(parents=True)
        (checkpoint_dir / "training_state/training_step.json").write_text(json.dumps({"step": step}))
        (checkpoint_dir / "pretrained_model/train_config.json").write_text(json.dumps({"batch_size": cfg.batch_size}))

    def load_training_state(checkpoint_dir: Path, optimizer: Any, scheduler: Any) -> tuple[int, Any, Any]:
        return json.loads((checkpoint_dir / "training_state/training_step.json").read_text())["step"], optimizer, scheduler

    def sampler(count: int) -> list[int]:
        return list(range(count))

    def cycle(loader: Any) -> Iterator[Any]:
        while True:
            yield from loader

    def train(cfg: Any) -> SimpleNamespace:
        accelerator = Accelerator(cpu=True)
        dataset, eval_dataset = module.make_train_eval_datasets(cfg)
        shapes = {key: tuple(dataset.meta.features[key]["shape"]) for key in dataset.meta.camera_keys}
        step = module.load_training_state(cfg.checkpoint_path, None, None)[0] if cfg.resume else 0
        order = module.EpisodeAwareSampler(len(dataset))
        loader: Any = torch.utils.data.DataLoader(dataset, batch_size=cfg.batch_size, sampler=order)
        eval_loader: Any = None
        if eval_dataset is not None:
            part = range(cfg.max_eval_samples or len(eval_dataset))
            subset = torch.utils.data.Subset(eval_dataset, part) if cfg.max_eval_samples else eval_dataset
            eval_loader = torch.utils.data.DataLoader(subset, batch_size=cfg.batch_size)
        prepared = accelerator.prepare(*(each for each in (loader, eval_loader) if each is not None))
        loader, eval_loader = prepared if eval_loader is not None else (prepared, None)
        batches, steps = cycle(loader), []
        for done in range(step + 1, cfg.steps + 1):
            batch = next(batches)
            steps.append(batch["index"].tolist())
            if done in cfg.save_at:
                module.save_checkpoint(checkpoint_dir=cfg.output / str(done), step=done, cfg=cfg)
        evaluated = [each["index"].tolist() for each in eval_loader] if eval_loader is not None else []
        return SimpleNamespace(steps=steps, evaluated=evaluated, shapes=shapes, batch=batch, loader=loader)

    vars(module).update(
        make_train_eval_datasets=make_train_eval_datasets, save_checkpoint=save_checkpoint, train=train,
        load_training_state=load_training_state, EpisodeAwareSampler=sampler,
    )  # fmt: skip
    return module
