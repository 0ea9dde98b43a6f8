"""StreamingLeRobotDataset in PyTorch's DataLoader.

LeRobot 0.6.1 and earlier have another class than LeRobot after pull request 3917, whose class has an argument `decode_threads`.
The older one runs without workers, each of which would deliver all data in LeRobot 0.4.4.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lerobot.datasets.streaming_dataset import StreamingLeRobotDataset
from serve import Batch, Spec, as_float, serve, transforms
from torch.utils.data import DataLoader


def batches(spec: Spec) -> Iterator[Batch]:
    chosen: dict[str, Any] = {}
    if spec["decode_threads"]:
        # LeRobot's training script passes `repeat` too. The stream then has no end, and no short batch.
        chosen = {"decode_threads": spec["decode_threads"], "return_uint8": spec["uint8"], "repeat": True}
    dataset = StreamingLeRobotDataset(
        "local/dataset",
        root=spec["root"],
        delta_timestamps=spec["delta_timestamps"] or None,
        image_transforms=transforms(spec),
        **chosen,
    )
    # With drop_last, an epoch ends with a whole batch, like the epochs of the other peers.
    epoch = DataLoader(
        dataset,
        batch_size=spec["batch_size"],
        drop_last=True,
        num_workers=spec["workers"],
        pin_memory=spec["device"].startswith("cuda"),
    )
    delivered = True
    while delivered:
        delivered = False
        for batch in epoch:
            delivered = True
            yield as_float(batch, spec)


if __name__ == "__main__":
    serve(batches, ["lerobot", "torchcodec", "torchvision"], ["torchcodec.decoders", "torchvision.transforms.v2"])
