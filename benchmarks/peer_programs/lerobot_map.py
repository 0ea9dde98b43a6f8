"""LeRobotDataset in PyTorch's DataLoader, which a sampler gives the recorded order."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from lerobot.datasets.lerobot_dataset import LeRobotDataset
from serve import Batch, Spec, serve
from torch.utils.data import DataLoader


def batches(spec: Spec) -> Iterator[Batch]:
    dataset = LeRobotDataset("local/dataset", root=spec["root"], delta_timestamps=spec["delta_timestamps"] or None)
    with np.load(spec["order"]) as order:
        indices = order["index"].tolist()
    return iter(
        DataLoader(
            dataset,
            batch_size=spec["batch_size"],
            sampler=indices,
            num_workers=spec["workers"],
            pin_memory=spec["device"].startswith("cuda"),
        )
    )


if __name__ == "__main__":
    serve(batches, ["lerobot", "torchcodec"], ["torchcodec.decoders"])
