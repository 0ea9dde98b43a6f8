"""Plain torchcodec loop, on a CPU or, with spec["gpu_decode"], on NVDEC."""

from __future__ import annotations

from collections.abc import Iterator

import loop
from serve import Batch, Spec, serve
from torchcodec.decoders import VideoDecoder


def batches(spec: Spec) -> Iterator[Batch]:
    device = spec["device"] if spec["gpu_decode"] else "cpu"

    def open_file(path: str) -> loop.Decode:
        # As in LeRobot, opening does not scan the file. The decoder computes the time of a frame from its number and the rate.
        decoder = VideoDecoder(path, seek_mode="approximate", dimension_order="NHWC", device=device)
        return lambda numbers: decoder.get_frames_at(numbers).data

    return loop.batches(spec, open_file, spec["threads"])


if __name__ == "__main__":
    serve(batches, ["torchcodec"])
