"""Plain loop around a decoder of whole files, as a user would write it, without rows and without prefetching.

The recorded order contains the file of each frame and its number in that file. The loop therefore looks nothing up, and reads
no metadata for its first batch. Each thread keeps a decoder for each file that it has opened.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from serve import ROWS, Batch, Spec

Decode = Callable[[list[int]], torch.Tensor]  # numbers of frames in a file -> uint8 (n, H, W, C)


def batches(spec: Spec, open_file: Callable[[str], Decode], threads: int) -> Iterator[Batch]:
    """Yield batches of float frames in [0, 1] in the recorded order, each batch split evenly between threads.

    The channels of a frame are last in memory, as in the decoder's output and in the batches of this package's Loader.
    """
    thread_data = threading.local()

    def decoded(files: np.ndarray, numbers: np.ndarray) -> torch.Tensor:
        decoders = thread_data.__dict__.setdefault("decoders", {})
        frames = torch.empty(0)
        for file in np.unique(files):
            if file not in decoders:
                decoders[file] = open_file(spec["files"][file])
            at = np.flatnonzero(files == file)
            pictures = resized(decoders[file](numbers[at].ravel().tolist()), spec["image_size"])
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
