"""Plain loop around torchcodec, as a user would write it, without rows and without prefetching.

It decodes on a CPU or, with spec["gpu_decode"], on NVDEC. The recorded order contains the file of each frame and its number in
that file. The loop therefore looks nothing up, and reads no metadata for its first batch. Each thread keeps a decoder for each
file that it has opened.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from serve import ROWS, Batch, Spec, serve
from torchcodec.decoders import VideoDecoder


def batches(spec: Spec) -> Iterator[Batch]:
    """Yield batches of float frames in [0, 1] in the recorded order, each batch split evenly between threads.

    The channels of a frame are last in memory, as in the decoder's output and in the batches of this package's Loader.
    """
    thread_data, threads = threading.local(), spec["threads"]
    device = spec["device"] if spec["gpu_decode"] else "cpu"

    def decoded(files: np.ndarray, numbers: np.ndarray) -> torch.Tensor:
        decoders = thread_data.__dict__.setdefault("decoders", {})
        frames = torch.empty(0)
        for file in np.unique(files):
            if file not in decoders:
                # As in LeRobot, opening does not scan the file. The decoder computes the time of a frame from its number and
                # the rate.
                decoders[file] = VideoDecoder(
                    spec["files"][file], seek_mode="approximate", dimension_order="NHWC", device=device
                )
            at = np.flatnonzero(files == file)
            pictures = resized(decoders[file].get_frames_at(numbers[at].ravel().tolist()).data, spec["image_size"])
            if not len(frames):
                frames = pictures.new_empty((*numbers.shape, *pictures.shape[1:]))
            frames[torch.from_numpy(at)] = pictures.unflatten(0, (len(at), -1))
        return frames

    with np.load(spec["order"]) as file, ThreadPoolExecutor(threads) as pool:
        order = dict(file)
        for start in range(0, len(order["index"]), spec["batch_size"]):
            part = {key: values[start : start + spec["batch_size"]] for key, values in order.items()}
            batch: Batch = {key: torch.from_numpy(part[key]) for key in ROWS}
            for n, camera in enumerate(spec["cameras"]):
                split = (np.array_split(part[f"{name}_{n}"], threads) for name in ("files", "numbers"))
                work = [(files, numbers) for files, numbers in zip(*split, strict=True) if len(files)]
                decoded_frames = torch.cat(list(pool.map(lambda chunk: decoded(*chunk), work)))
                batch[camera] = decoded_frames.movedim(-1, -3).div(255).squeeze(1)
            yield batch


def resized(pictures: torch.Tensor, size: list[int] | None) -> torch.Tensor:
    """Return frames, uint8, shape (n, H, W, C), resized to (height, width). If `size` is None, return them unchanged."""
    if size is None:
        return pictures
    channels_first = pictures.movedim(-1, 1)
    if pictures.is_cuda:  # on a GPU, torch resizes only floats
        channels_first = channels_first.float()
    scaled = torch.nn.functional.interpolate(channels_first, size=size, mode="bilinear", antialias=True)
    return (scaled.round().to(torch.uint8) if pictures.is_cuda else scaled).movedim(1, -1)


if __name__ == "__main__":
    serve(batches, ["torchcodec"])
