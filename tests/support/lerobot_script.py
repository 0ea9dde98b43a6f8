"""A replacement for LeRobot's training script, with the parts that `dali_stream.integrations.lerobot` uses.

It has the calls of LeRobot 0.6.1 in their order or, with `newer`, those of LeRobot's main of 2026-08-23, and the transforms of
batches that LeRobot has since then. `make test-lerobot` runs the real ones.
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

    def __init__(self, root: Path, episodes: list[int] | None = None, *, files: Path | None = None, **attributes: Any) -> None:
        own = dali_stream.Dataset(root, data_files_root=files)
        features = {key: dict(feature) for key, feature in own.features.items()}
        self.meta = SimpleNamespace(
            repo_id="owner/robot", root=root, revision="main", features=features, camera_keys=list(own.cameras)
        )
        self.root, self.episodes, self.tolerance_s = root, episodes, 1e-4
        self.delta_timestamps = {"action": [0.0, 1 / own.fps]}
        self.image_transforms = None
        table = pq.read_table((files or root) / "data", columns=["episode_index", "frame_index"])
        kept = [episodes is None or index in episodes for index in table["episode_index"].to_pylist()]
        self.hf_dataset = SimpleNamespace(data=table.filter(kept))
        vars(self).update(attributes)

    def __len__(self) -> int:
        return int(self.hf_dataset.data.num_rows)

    def __getitem__(self, index: object) -> Any:
        raise AssertionError("a DataLoader was used")


class Config(SimpleNamespace):
    """A TrainPipelineConfig. Settings with a default are also attributes of the class, as in a dataclass."""

    num_workers = prefetch_factor = 4
    persistent_workers, dataloader_multiprocessing_context = True, "spawn"


def config(root: Path, output: Path, **values: Any) -> Config:
    """A TrainPipelineConfig with what the script reads."""
    of_dataset = {"episodes": None, "video_backend": "torchcodec", "image_transforms": None, "streaming_data_root": None}
    dataset = SimpleNamespace(**{name: values.pop(name, default) for name, default in of_dataset.items()})
    defaults: dict[str, Any] = {"resume": False, "checkpoint_path": None, "seed": 3, "batch_size": 8, "steps": 4, "save_at": ()}
    given = {"eval_episodes": None, "max_eval_samples": 0, "policy": policy(), "attributes": {}} | defaults | values
    return Config(root=root, output=output, dataset=dataset, trainable_config=given["policy"], **given)


def policy(pretrained_path: Path | None = None, **values: Any) -> SimpleNamespace:
    """A PreTrainedConfig. With `pretrained_path`, it has the input features of that checkpoint."""
    saved = json.loads((pretrained_path / "config.json").read_text()) if pretrained_path else {}
    inputs = {key: SimpleNamespace(shape=tuple(shape)) for key, shape in saved.items()}
    defaults = {"device": "cpu", "drop_n_last_frames": 0, "pretrained_path": pretrained_path, "input_features": inputs}
    return SimpleNamespace(**(defaults | values))


class StreamedDataset(MapDataset, torch.utils.data.IterableDataset[Any]):
    """The attributes of a StreamingLeRobotDataset that has `data_root`, as in LeRobot's branch of 2026-07-28."""

    def __init__(self, root: Path, episodes: list[int] | None, data_root: str) -> None:
        super().__init__(root, episodes, files=Path(data_root))
        self._data_root, self.streaming_from_local = data_root, True

    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("a DataLoader was used")


class RenameProcessorStep:
    """LeRobot's step that is the first one of a preprocessor."""

    _registry_name = "rename_observations_processor"

    def __init__(self, **values: Any) -> None:
        vars(self).update(values)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        return batch

    def get_config(self) -> dict[str, Any]:
        return {}


class ImageCropResizeProcessorStep:
    """LeRobot's step of this name, with torch's operators in place of torchvision's."""

    _registry_name = "image_crop_resize_processor"

    def __init__(self, crop_params_dict: dict[str, Any] | None = None, resize_size: list[int] | None = None) -> None:
        self.crop_params_dict, self.resize_size = crop_params_dict, resize_size

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        observation = {key: value for key, value in batch.items() if key.startswith("observation.")}
        return batch | self.observation(observation)

    def observation(self, observation: dict[str, Any]) -> dict[str, Any]:
        return observation | {key: self._resized(value) for key, value in observation.items() if "image" in key}

    def _resized(self, frames: torch.Tensor) -> torch.Tensor:
        if list(frames.shape[-2:]) == self.resize_size:
            return frames
        if frames.ndim != 4 or not frames.is_floating_point():
            raise AssertionError(f"LeRobot's step cannot resize {frames.dtype} of shape {tuple(frames.shape)}")
        return torch.nn.functional.interpolate(frames, size=self.resize_size, mode="bilinear", antialias=True).clamp(0, 1)

    def get_config(self) -> dict[str, Any]:
        return {"crop_params_dict": self.crop_params_dict, "resize_size": self.resize_size}


class BatchedImageTransforms:
    """LeRobot's class of this name. The only transform adds a random number to the frames of each sample."""

    def __init__(self, cfg: Any, chunk_size: int | None = None, compile_model: bool = False) -> None:
        assert (cfg.enable, chunk_size, compile_model) == (True, 32, False)

    def __call__(self, images: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        return images + torch.rand(len(images), generator=generator).reshape(-1, *[1] * (images.ndim - 1))


class Pipeline:
    """A PolicyProcessorPipeline."""

    def __init__(self, steps: list[Any]) -> None:
        self.steps = steps

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        for step in self.steps:
            batch = step(batch)
        return batch

    def save_pretrained(self, folder: Path) -> None:
        steps = [{"registry_name": step._registry_name, "config": step.get_config()} for step in self.steps]
        (folder / "policy_preprocessor.json").write_text(json.dumps({"steps": steps}))

    @classmethod
    def from_pretrained(cls, folder: Path) -> Pipeline:
        classes = {each._registry_name: each for each in (RenameProcessorStep, ImageCropResizeProcessorStep)}
        entries = json.loads((folder / "policy_preprocessor.json").read_text())["steps"]
        return cls([classes[entry["registry_name"]](**entry["config"]) for entry in entries])


def modules(newer: bool = False) -> dict[str, ModuleType]:
    """The modules of LeRobot that are imported, by name."""
    processor: Any = ModuleType("lerobot.processor")
    processor.ImageCropResizeProcessorStep = ImageCropResizeProcessorStep
    factory: Any = ModuleType("lerobot.datasets.factory")
    factory.resolve_delta_timestamps = lambda cfg, ds_meta, rename_map=None: None
    transforms: Any = ModuleType("lerobot.transforms")
    transforms.BatchedImageTransforms = BatchedImageTransforms
    packages = {name: ModuleType(name) for name in ("lerobot", "lerobot.scripts", "lerobot.datasets")}
    return packages | {each.__name__: each for each in (script(newer), processor, factory, transforms)}


def script(newer: bool = False) -> ModuleType:
    """The module `lerobot.scripts.lerobot_train`. Its `train` returns the frames of each step, and of the evaluation."""
    module: Any = ModuleType("lerobot.scripts.lerobot_train")

    def make_train_eval_datasets(cfg: Any) -> tuple[MapDataset, MapDataset | None]:
        eval_dataset = MapDataset(cfg.root, cfg.eval_episodes) if cfg.eval_episodes else None
        if cfg.dataset.streaming_data_root is not None:
            return StreamedDataset(cfg.root, cfg.dataset.episodes, cfg.dataset.streaming_data_root), eval_dataset
        return MapDataset(cfg.root, cfg.dataset.episodes, **cfg.attributes), eval_dataset

    def make_policy(cfg: Any, ds_meta: Any) -> None:
        for key in [] if cfg.input_features else ds_meta.camera_keys:
            height, width, channels = ds_meta.features[key]["shape"]
            cfg.input_features[key] = SimpleNamespace(shape=(channels, height, width))

    def make_pre_post_processors(policy_cfg: Any, pretrained_path: Path | None) -> tuple[Pipeline, Pipeline]:
        new = Pipeline([RenameProcessorStep()])
        return Pipeline.from_pretrained(pretrained_path) if pretrained_path else new, Pipeline([])

    def save_checkpoint(checkpoint_dir: Path, step: int, cfg: Any, preprocessor: Pipeline) -> None:
        for folder in ("training_state", "pretrained_model"):
            (checkpoint_dir / folder).mkdir(parents=True, exist_ok=newer)
        saved = {"step": step} | ({"dp_world_size": 1, "batch_size": cfg.batch_size} if newer else {})
        (checkpoint_dir / "training_state/training_step.json").write_text(json.dumps(saved))
        train_config = {"batch_size": cfg.batch_size, "seed": cfg.seed, "dataset": vars(cfg.dataset)}
        train_config["policy"] = {"drop_n_last_frames": cfg.policy.drop_n_last_frames}
        (checkpoint_dir / "pretrained_model/train_config.json").write_text(json.dumps(train_config, default=vars))
        inputs = {key: list(feature.shape) for key, feature in cfg.policy.input_features.items()}
        (checkpoint_dir / "pretrained_model/config.json").write_text(json.dumps(inputs))
        preprocessor.save_pretrained(checkpoint_dir / "pretrained_model")

    def load_training_state(checkpoint_dir: Path, optimizer: Any, scheduler: Any) -> tuple[int, Any, Any]:
        return json.loads((checkpoint_dir / "training_state/training_step.json").read_text())["step"], optimizer, scheduler

    def resume_before_prepare(cfg: Any) -> int:
        step: int = json.loads((cfg.checkpoint_path / "training_state/training_step.json").read_text())["step"]
        return step

    def make_image_augmentation(cfg: Any, dataset: Any) -> SimpleNamespace | None:
        transforms = cfg.dataset.image_transforms
        if transforms is None:
            return None
        values = {"device": "cpu", "chunk_size": 32, "compile_model": False}
        return SimpleNamespace(config=transforms, image_keys=dataset.meta.camera_keys, **values)

    def sampler(count: int) -> list[int]:
        return list(range(count))

    def cycle(loader: Any) -> Iterator[Any]:
        while True:
            yield from loader

    def train(cfg: Any) -> SimpleNamespace:
        accelerator = Accelerator(cpu=True)
        dataset, eval_dataset = module.make_train_eval_datasets(cfg)
        make_policy(cfg.policy, dataset.meta)
        pretrained = cfg.checkpoint_path / "pretrained_model" if cfg.resume else cfg.policy.pretrained_path
        preprocessor, _ = module.make_pre_post_processors(policy_cfg=cfg.policy, pretrained_path=pretrained)
        step = 0
        if cfg.resume and newer:
            step = module.resume_before_prepare(cfg)
        elif cfg.resume:
            step = module.load_training_state(cfg.checkpoint_path, None, None)[0]
        augmentation = module._make_image_augmentation(cfg, dataset) if newer else None
        order = module.EpisodeAwareSampler(len(dataset))
        loader: Any = torch.utils.data.DataLoader(dataset, batch_size=cfg.batch_size, sampler=order)
        eval_loader: Any = None
        if eval_dataset is not None:
            part = range(cfg.max_eval_samples or len(eval_dataset))
            subset = torch.utils.data.Subset(eval_dataset, part) if cfg.max_eval_samples else eval_dataset
            eval_loader = torch.utils.data.DataLoader(subset, batch_size=cfg.batch_size)
        prepared = accelerator.prepare(*(each for each in (loader, eval_loader) if each is not None))
        loader, eval_loader = prepared if eval_loader is not None else (prepared, None)
        batches, steps, frames = cycle(loader), [], []
        for done in range(step + 1, cfg.steps + 1):
            batch = next(batches)
            steps.append(batch["index"].tolist())
            batch = augmentation.observation(batch) if augmentation is not None else batch
            frames.append({key: batch[key] for key in dataset.meta.camera_keys})
            processed = preprocessor(batch)
            if done in cfg.save_at:
                module.save_checkpoint(checkpoint_dir=cfg.output / str(done), step=done, cfg=cfg, preprocessor=preprocessor)
        evaluated = [each["index"].tolist() for each in eval_loader] if eval_loader is not None else []
        shapes = {key: feature.shape for key, feature in cfg.policy.input_features.items()}
        return SimpleNamespace(
            steps=steps, frames=frames, evaluated=evaluated, shapes=shapes, batch=batch, processed=processed, loader=loader
        )  # fmt: skip

    vars(module).update(
        make_train_eval_datasets=make_train_eval_datasets, save_checkpoint=save_checkpoint, train=train,
        make_pre_post_processors=make_pre_post_processors, EpisodeAwareSampler=sampler,
        **(
            {"resume_before_prepare": resume_before_prepare, "_make_image_augmentation": make_image_augmentation}
            if newer
            else {"load_training_state": load_training_state}
        ),
    )  # fmt: skip
    return module
