"""What is trained on and what is validated on: two loaders of one dataset, each episode in one of them."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from accelerate import Accelerator
from action_chunks import augmented

import dali_stream
from training.policy import ACTION, STATE


@dataclass
class Data:
    """The loaders, and what a policy has to know of their batches.

    Neither loader goes through `accelerator.prepare`: they are split by rank already, and bring batches to the device.
    """

    train: dali_stream.Loader
    val: dali_stream.Loader | None
    shown: dict[str, Any]
    """Arguments of a loader of what the charts show: a few frames of what is validated on, or else trained on."""
    cameras: list[str]
    state: int
    """Width of the state, 0 where there is none."""
    action_names: list[str]
    tasks: int

    def close(self) -> None:
        """Stops both loaders."""
        self.train.close()
        if self.val is not None:
            self.val.close()


def open_data(arguments: Namespace, accelerator: Accelerator) -> Data:
    """The data of `train.py`'s arguments.

    Raises:
        ValueError: arguments and dataset do not go together.
        DaliStreamError: the dataset cannot be read.
    """
    ranks, size = accelerator.num_processes, tuple(arguments.image_size)
    if arguments.batch_size % ranks:
        raise ValueError(
            f"--batch-size is {arguments.batch_size}, for all {ranks} processes together; give a multiple of {ranks}"
        )
    where = {name: getattr(arguments, name) for name in ("data_files_root", "cache_dir")}
    whole = dali_stream.Dataset(arguments.uri, revision=arguments.revision, **where)
    if ACTION not in whole.features or not whole.cameras:
        raise ValueError(f"{whole.uri} has the keys {', '.join(whole.features)}; a camera and {ACTION!r} are needed")
    # The commit that was resolved, so that both are of the same.
    where["revision"] = whole.revision
    shares = held_out(whole.episodes.tolist(), arguments.val_episodes)
    if shares[1]:
        # Those of the dataset are of all episodes; what is validated on must have no part in them.
        rows = [key for key in (ACTION, STATE) if key in whole.features]
        where["stats"] = dali_stream.Dataset(arguments.uri, episodes=shares[0], **where).compute_stats(rows)
    train, val = (dali_stream.Dataset(arguments.uri, episodes=episodes, **where) if episodes else None for episodes in shares)
    common: dict[str, Any] = {
        "batch_size": arguments.batch_size // ranks,
        "delta_timestamps": {ACTION: [step / whole.fps for step in range(arguments.chunk)]},
        "normalize": {key: "mean_std" for key in (ACTION, STATE) if key in whole.features},
        "device": str(accelerator.device),
        "threads": arguments.threads,
    }
    plain = common | {"image_size": size}
    own = common | {"seed": arguments.seed, "consumers": arguments.consumers, "pipeline": augmented(whole.cameras, size)}
    # Each consumer has a part of the episodes of its own, so the 4 frames are of different places.
    one_rank = {"batch_size": 4, "consumers": 4, "last_batch": "pad", "rank": 0, "world_size": 1}
    return Data(
        train=dali_stream.Loader(train, **own),
        val=dali_stream.Loader(val, **plain, shuffle=False, last_batch="partial") if val else None,
        shown=plain | {"dataset": val or train} | one_rank,
        cameras=whole.cameras,
        state=math.prod(whole.features[STATE]["shape"]) if STATE in whole.features else 0,
        action_names=_names(whole.features[ACTION]),
        tasks=max(whole.tasks, default=0) + 1,
    )


def held_out(episodes: Sequence[int], count: int) -> tuple[list[int], list[int]]:
    """The episodes to train on, and `count` of them to validate on, evenly spread.

    Raises:
        ValueError: nothing is left to train on.
    """
    if not 0 <= count < len(episodes):
        raise ValueError(f"--val-episodes is {count}, and the dataset has {len(episodes)} episodes; leave one to train on")
    out = {(2 * number + 1) * len(episodes) // (2 * count) for number in range(count)}
    return [e for n, e in enumerate(episodes) if n not in out], [e for n, e in enumerate(episodes) if n in out]


def _names(feature: dict[str, Any]) -> list[str]:
    """A name per action. LeRobot's datasets have them as a list, as a list in a dict, or not at all."""
    names = feature.get("names")
    if isinstance(names, dict):
        names = next(iter(names.values()), None)
    width = math.prod(feature["shape"])
    return list(map(str, names)) if isinstance(names, list) and len(names) == width else [f"action {n}" for n in range(width)]
