"""StreamingLeRobotDataset in PyTorch's DataLoader without workers, each of which would deliver all data in LeRobot 0.4.4."""

from __future__ import annotations

from collections.abc import Iterator

from lerobot.datasets.streaming_dataset import StreamingLeRobotDataset
from resize import transforms
from serve import Batch, Spec, serve
from torch.utils.data import DataLoader


def batches(spec: Spec) -> Iterator[Batch]:
    dataset = StreamingLeRobotDataset(
        "local/dataset",
        root=spec["root"],
        delta_timestamps=spec["delta_timestamps"] or None,
        image_transforms=transforms(spec),
    )
    # With drop_last, an epoch ends with a whole batch, like the epochs of the other peers.
    epoch = DataLoader(dataset, batch_size=spec["batch_size"], drop_last=True, pin_memory=spec["device"].startswith("cuda"))
    delivered = True
    while delivered:
        delivered = False
        for batch in epoch:
            delivered = True
            yield batch


if __name__ == "__main__":
    serve(batches, ["lerobot", "torchcodec", "torchvision"], ["torchcodec.decoders", "torchvision.transforms.v2"])
