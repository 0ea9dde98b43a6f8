"""LeRobotDataset in PyTorch's DataLoader, with a sampler that follows the recorded order."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from lerobot.datasets.lerobot_dataset import LeRobotDataset
from serve import Batch, Spec, as_float, serve, transforms
from torch.utils.data import DataLoader


def batches(spec: Spec) -> Iterator[Batch]:
    chosen = {"return_uint8": True} if spec["uint8"] else {}  # older releases do not have this argument
    dataset = LeRobotDataset(
        "local/dataset",
        root=spec["root"],
        delta_timestamps=spec["delta_timestamps"] or None,
        image_transforms=transforms(spec),
        **chosen,
    )
    with np.load(spec["order"]) as order:
        indices = order["index"].tolist()
    loader = DataLoader(
        dataset,
        batch_size=spec["batch_size"],
        sampler=indices,
        num_workers=spec["workers"],
        pin_memory=spec["device"].startswith("cuda"),
    )
    for batch in loader:
        yield as_float(batch, spec)


if __name__ == "__main__":
    serve(batches, ["lerobot", "torchcodec", "torchvision"], ["torchcodec.decoders", "torchvision.transforms.v2"])
