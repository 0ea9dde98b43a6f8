"""Plain loop around PyNvVideoCodec's SimpleDecoder. It needs a GPU, and has not been run yet."""

from __future__ import annotations

from collections.abc import Iterator

import loop
import PyNvVideoCodec as nvc
import torch
from serve import Batch, Spec, serve


def batches(spec: Spec) -> Iterator[Batch]:
    gpu = torch.device(spec["device"]).index or 0

    def open_file(path: str) -> loop.Decode:
        decoder = nvc.SimpleDecoder(path, gpu_id=gpu, use_device_memory=True, output_color_type=nvc.OutputColorType.RGB)

        def decode(numbers: list[int]) -> torch.Tensor:
            wanted = sorted(set(numbers))
            # The decoder overwrites these frames with the next ones, so `stack` copies them.
            frames = torch.stack([torch.from_dlpack(frame) for frame in decoder.get_batch_frames_by_index(wanted)])
            return frames[[wanted.index(number) for number in numbers]]

        return decode

    return loop.batches(spec, open_file, 1)


if __name__ == "__main__":
    serve(batches, ["PyNvVideoCodec"])
