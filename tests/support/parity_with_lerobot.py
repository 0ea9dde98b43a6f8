"""Compares our batches with items of LeRobot's own reader: `python tests/support/parity_with_lerobot.py ROOT [...]`.

Needs LeRobot with torchcodec in the same environment: 0.3.3 for v2.1, 0.4.x or 0.6.1 for v3.0. If torchvision has no build for
the installed torch, a replacement provides `ToTensor`, the only function of torchvision that reading needs. `test_parity.py`
runs this program if LeRobot is installed.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import os
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from dali_stream import Dataset, Loader

Deltas = dict[str, list[float]]


def stand_in_for_torchvision() -> None:
    """LeRobot imports torchvision for `transforms.ToTensor` and for decoders that are not used here."""
    if importlib.util.find_spec("torchvision"):
        return

    class ToTensor:
        def __call__(self, image: Any) -> torch.Tensor:
            return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous().float().div(255)

    for name in ("torchvision", "torchvision.transforms"):
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__spec__ = importlib.machinery.ModuleSpec(name, None)
    sys.modules["torchvision.transforms"].ToTensor = ToTensor  # type: ignore[attr-defined]
    sys.modules["torchvision"].transforms = sys.modules["torchvision.transforms"]  # type: ignore[attr-defined]


def windows(dataset: Dataset) -> Deltas:
    """A window for every key that LeRobot can give one, several steps over both ends of most episodes."""
    steps = [[0, 1, 2, 40], [-3, 0], [0], [-60, -1, 0, 1]]
    own = ("index", "episode_index", "timestamp", "task_index", "subtask_index")  # the current row's place is read from them
    keys = [key for key, feature in dataset.features.items() if feature["dtype"] != "string" and key not in own]
    return {key: [step / dataset.fps for step in steps[n % len(steps)]] for n, key in enumerate(keys)}


def compare(root: Path, deltas: Deltas | None, episodes: list[int] | None, most: int = 6) -> int:
    """Compares the first batches of an epoch; returns how many samples were the same in all keys. Raises where one is not."""
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    theirs = LeRobotDataset("local/dataset", root=root, delta_timestamps=deltas, episodes=episodes)
    places = {int(index): place for place, index in enumerate(theirs.hf_dataset.with_format(None)["index"])}
    done = 0
    dataset = Dataset(root, episodes=episodes)
    with Loader(dataset, batch_size=4, delta_timestamps=deltas, decode="torchcodec", shuffle="global") as loader:
        for _, batch in zip(range(most), loader, strict=False):
            notes = batch["index"].tolist()
            expected = default_collate([theirs[places[index]] for index in notes])
            later = {"subtask"} - set(expected)  # LeRobot 0.6.1 does not give it any more
            assert set(batch) - later == set(expected), set(batch) ^ set(expected)
            for key, value in expected.items():
                same = batch[key] == value
                if isinstance(value, torch.Tensor):
                    same = batch[key].dtype == value.dtype and torch.equal(batch[key], value)
                    if not same:
                        got = f"{batch[key].dtype} {tuple(batch[key].shape)}"
                        raise AssertionError(f"{key}: {got}, LeRobot {value.dtype} {tuple(value.shape)}, rows {notes}")
                assert same, (key, batch[key], value)
            done += len(notes)
    return done


def main(roots: list[str]) -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    sys.path.remove(str(Path(__file__).resolve().parent))  # its datasets.py is not the library of that name
    stand_in_for_torchvision()
    counts = {}
    for root in map(Path, roots):
        dataset = Dataset(root)
        deltas = windows(dataset)
        # LeRobot 0.3.3, which reads v2.1, takes an episode's index for its place in the selection.
        selected = [0, 1] if dataset.version.startswith("v2.") else [0, 2]
        counts[str(root)] = [
            compare(root, None, None),
            compare(root, deltas, None),
            compare(root, deltas, selected),
        ]
    sys.stdout.write(json.dumps(counts) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
