"""Construction of a Loader for a `LeRobotDataset`."""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from dali_stream.dataset import Dataset
from dali_stream.loader import Loader
from dali_stream.system import cpu
from dali_stream.system.log_records import DATASET_LOG
from dali_stream.transformed import Transformed

_TOLERANCE_S = 1e-4  # LeRobot's default, in seconds
# Transforms of LeRobot 0.6.1 that return other frames than those of floats unchanged (lerobot/transforms/transforms.py).
_FOR_FLOATS = frozenset(
    {
        *("CoarseDropout", "GammaCorrection", "GaussianNoise", "GaussianPatchBrightness", "JPEGCompression", "MotionBlur"),
        *("PlanckianJitter", "RandomShadow"),
    }
)
_SLACK = 0.5  # more than transforms of colours exceed the range of 0 to 1, and less than a normalization does
_log = logging.getLogger(DATASET_LOG)


def make_loader(
    dataset: Any,
    policy_config: Any = None,
    *,
    batch_size: int,
    seed: int = 0,
    frames: Mapping[int, Sequence[tuple[int, int]]] | None = None,
    num_workers: int = 0,
    **loader_arguments: Any,
) -> Loader | Transformed:
    """Make a Loader that delivers the samples of a LeRobotDataset.

    The Loader reads the same files, revision and episodes, with the same windows and tolerance. By default, it does the same as
    LeRobot's training script: frames are contiguous, and the last batch of an epoch is partial. Frames of video are uint8 if
    the dataset returns uint8, and float32 in [0, 1] otherwise. Frames that are stored as images are float32 in both cases, as
    in LeRobot up to its main of 2026-08-23. `image_dtype` sets one type for all cameras.

    Image transforms are applied to the frames of each sample after they are resized to `image_size`, with random numbers that a
    resumed run repeats, see `Transformed`. They get the type above. As in LeRobot, depth is not transformed. If frames of video
    are uint8 and some transforms of LeRobot have an effect on floats only, all transforms get frames of float32 in [0, 1], and
    the results for video are rounded to uint8.

    Args:
        dataset: LeRobotDataset, StreamingLeRobotDataset or LeRobotDatasetMetadata. A StreamingLeRobotDataset that streams from
            the Hub is read from the Hub, without a download. If it has a `data_root`, `data/` and `videos/` are read from this
            address. A LeRobotDatasetMetadata is read from its folder, or from the Hub if its folder has no `data`.
        policy_config: Configuration of a policy. The last `drop_n_last_frames` frames of each episode are not sampled. If the
            dataset has no `delta_timestamps`, those of the policy are used. Default: none.
        batch_size: Number of samples per batch and rank.
        seed: Seed of the order and of the transforms. Default: 0.
        frames: Frames to sample, {episode index: [(start, stop), ...]}. See `Dataset`. Default: all.
        num_workers: Number of processes that apply image transforms, see `Transformed`. If it is not 0 and the dataset has
            transforms, frames are decoded on the CPU, and the default of `num_threads` is the number of cores that the workers
            leave. With 0, transforms are applied in the iterating thread, on `device`. Default: 0.
        loader_arguments: Other arguments of `Loader`.

    Returns:
        Loader, or a `Transformed` Loader if the dataset has transforms, or cameras of both types. Its `dataset` is a `Dataset`
        of the same files.

    Raises:
        ValueError: If the dataset has a feature that a Loader does not deliver, or if a transform is not picklable and
            `num_workers` is not 0.
        DatasetError: See `Dataset`.
    """
    meta = getattr(dataset, "meta", dataset)
    deltas = getattr(dataset, "delta_timestamps", None)
    if deltas is None and policy_config is not None:
        deltas = importlib.import_module("lerobot.datasets.factory").resolve_delta_timestamps(policy_config, meta)
    uri, revision = _address(dataset, meta)
    own = Dataset(
        uri,
        revision=revision,
        episodes=getattr(dataset, "episodes", None) if dataset is not meta else None,
        data_files_root=getattr(dataset, "_data_root", None),
        frames=None if frames is None else dict(frames),
        drop_n_last_frames=getattr(policy_config, "drop_n_last_frames", 0),
        tolerance_s=getattr(dataset, "tolerance_s", _TOLERANCE_S),
    )
    if left_out := [key for key in meta.features if key not in own.features]:
        own.close()
        raise ValueError(
            f"the dataset must have no features but those that a Loader delivers, got {', '.join(left_out)}. Train with "
            "LeRobot's own DataLoader, or remove them from a copy of the dataset"
        )
    coloured = [key for key in own.cameras if not own.features[key].is_depth]  # LeRobot does not transform depth
    videos = [key for key in coloured if own.features[key].is_video]
    is_uint8 = bool(videos) and getattr(dataset, "_return_uint8", False)
    arguments = {
        "delta_timestamps": deltas,
        "image_dtype": "uint8" if is_uint8 else "float32",
        "depth_unit": getattr(dataset, "depth_output_unit", "mm"),
        "memory_format": "contiguous",
        "last_batch": "partial",
        **loader_arguments,
    }
    transform = getattr(dataset, "image_transforms", None)
    images: list[str] = []  # cameras whose frames are float32 beside video of uint8
    if is_uint8 and not loader_arguments.keys() & {"image_dtype", "dali_graph"}:
        images = [key for key in coloured if key not in videos]
    if not images and (transform is None or not coloured):
        return Loader(own, batch_size=batch_size, seed=seed, **arguments)
    num_workers = 0 if transform is None else num_workers
    device, are_floats = arguments.pop("device", "auto"), arguments["image_dtype"] in ("float32", torch.float32)
    if num_workers:
        if (decode := arguments.get("decode", "auto")) not in ("auto", "torchcodec"):
            own.close()
            raise ValueError(
                f'decode must be "auto" or "torchcodec" if worker processes apply image transforms, got {decode!r}. With '
                "num_workers=0, they are applied in the training process, and NVDEC can decode"
            )
        arguments = {"num_threads": max(cpu.cores() - num_workers, 1), **arguments}
        if are_floats and not arguments.keys() & {"normalize", "dali_graph"}:
            arguments["image_dtype"] = "uint8"  # a quarter of the size; workers divide the frames as a Loader would
    loader = Loader(own, batch_size=batch_size, seed=seed, device="cpu" if num_workers else device, **arguments)
    try:
        divided = functools.partial(_divided, transform)
        keys: list[str] | None = coloured  # None: the function gets whole samples
        if transform is None:
            transform, keys = divided, images
        elif loader._config.image_dtype == "uint8" and are_floats:
            transform = divided
        elif loader._config.image_dtype == "uint8":
            if names := dict.fromkeys(_for_floats(transform)):
                _log.warning(
                    "Transforms get frames of float32, since these have no effect on uint8 frames: %s", ", ".join(names)
                )
                transform = functools.partial(_on_floats, transform)
            if images:
                functions = dict.fromkeys(coloured, transform) | dict.fromkeys(images, divided)
                transform, keys = functools.partial(_by_camera, functions), None
        return Transformed(loader, transform, keys=keys, num_workers=num_workers, device=device)
    except BaseException:
        loader.close()
        raise


def _for_floats(transform: Any) -> Iterator[str]:
    """Yield the names of those of LeRobot's transforms that have no effect on uint8 frames."""
    kind = type(transform)
    if kind.__name__ in _FOR_FLOATS and kind.__module__.startswith("lerobot."):
        yield kind.__name__
    parts = getattr(transform, "transforms", ())  # of an ImageTransforms {name: transform}, of a Compose a list
    for part in parts.values() if isinstance(parts, Mapping) else parts:
        yield from _for_floats(part)


def _by_camera(functions: Mapping[str, Callable[[torch.Tensor], torch.Tensor]], sample: dict[str, Any]) -> dict[str, Any]:
    """Apply a function to the frame of each camera of a sample."""
    return sample | {key: function(sample[key]) for key, function in functions.items()}


def _divided(transform: Callable[[torch.Tensor], torch.Tensor] | None, frame: torch.Tensor) -> torch.Tensor:
    """Convert a uint8 frame to float32 in [0, 1], and apply a transform, if any."""
    return frame / 255 if transform is None else transform(frame / 255)


def _on_floats(transform: Callable[[torch.Tensor], torch.Tensor], frame: torch.Tensor) -> torch.Tensor:
    """Apply a transform of float32 values in [0, 1] to a uint8 frame. Return uint8."""
    result = _divided(transform, frame)
    if result.dtype == torch.uint8:
        return result
    if not result.is_floating_point() or result.min() < -_SLACK or result.max() > 1 + _SLACK:
        raise ValueError(
            f"image_transforms must return values from 0 to 1, got {result.dtype} from {result.min():g} to {result.max():g}. "
            "Normalize in the policy, and not in image_transforms"
        )
    return (result.clamp(0, 1) * 255).round().to(torch.uint8)


def _address(dataset: Any, meta: Any) -> tuple[str, str | None]:
    """Return the address of the files of a `LeRobotDataset`, and the revision if the address is a dataset on the Hub."""
    downloaded = Path(meta.root, "data").is_dir() if dataset is meta else getattr(dataset, "streaming_from_local", True)
    if downloaded:
        return str(meta.root), None
    if getattr(meta, "repo_type", "dataset") == "bucket":
        return f"hf://buckets/{meta.repo_id}", None
    return f"hf://datasets/{meta.repo_id}", meta.revision
