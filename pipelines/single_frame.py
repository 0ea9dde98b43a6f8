"""Single frames of all cameras, cropped to their centre on the device of the Loader. This is the smallest example.

python pipelines/single_frame.py URI [--batch-size 32] [--batches 50] [--image-size 224 224]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from examples import Parser, show
from nvidia.dali import fn

import dali_stream


def center_crop(cameras: Sequence[str], share: float = 0.9) -> Any:
    """Return a graph function that crops frames to the central `share` of height and width. Other keys are not changed."""
    start, size = [(1 - share) / 2] * 2, [share] * 2

    def graph(nodes: dict[str, Any]) -> dict[str, Any]:
        cropped = {key: fn.slice(nodes[key], rel_start=start, rel_shape=size, axis_names="HW") for key in cameras}
        return nodes | cropped

    return graph


def main(argv: Sequence[str] | None = None) -> None:
    """Stream some batches, and print their shapes and the rate."""
    parser = Parser("Single frames of every camera, cropped to their centre").streams()
    parser.set_defaults(image_size=None)  # the size of the dataset
    arguments = parser.parse(argv)
    dataset = dali_stream.Dataset(arguments.uri)
    loader = dali_stream.Loader(
        dataset,
        batch_size=arguments.batch_size,
        image_size=arguments.image_size,
        dali_graph=center_crop(dataset.cameras),
    )
    show(loader, arguments.batches)


if __name__ == "__main__":
    main()
