"""`dali_stream.resize`: camera frames at deployment, resized as a Loader resizes frames for training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.datasets import SIDE, TOP

import dali_stream
from dali_stream import Loader

WINDOWS = {SIDE: [-0.1, 0.0]}


def batches(demo: Path, size: tuple[int, int] | None) -> list[dict[str, Any]]:
    options = {"shuffle": False, "image_dtype": "uint8", "device": "cpu", "delta_timestamps": WINDOWS}
    with Loader(demo, batch_size=16, image_size=size, **options) as loader:
        return list(loader)[:3]


@pytest.mark.parametrize("size", [(24, 32), (96, 96), (200, 230)])
def test_a_camera_frame_becomes_what_a_loader_delivered(demo: Path, size: tuple[int, int]) -> None:
    for as_recorded, delivered in zip(batches(demo, None), batches(demo, size), strict=True):
        for key in (TOP, SIDE):  # a frame per sample, and a window of two
            frames, wanted = as_recorded[key], delivered[key]
            assert torch.equal(dali_stream.resize(frames, size), wanted)
            assert torch.equal(dali_stream.resize(frames.contiguous(), size), wanted)
            assert torch.equal(dali_stream.resize(frames[0], size), wanted[0])
        arrays = as_recorded[TOP].permute(0, 2, 3, 1).numpy()
        wanted = delivered[TOP].permute(0, 2, 3, 1).numpy()
        np.testing.assert_array_equal(dali_stream.resize(arrays, size), wanted)
        one = dali_stream.resize(arrays[0][..., ::-1], size)  # such as an image of OpenCV, whose channels are reversed
        np.testing.assert_array_equal(one, wanted[0][..., ::-1])


def test_images_of_that_size_are_returned_as_they_are() -> None:
    image = np.zeros((4, 6, 3), np.uint8)
    assert dali_stream.resize(image, (4, 6)) is image
    assert dali_stream.resize(image, None) is image
    tensor = torch.zeros((2, 3, 4, 6), dtype=torch.uint8)
    assert dali_stream.resize(tensor, (4, 6)) is tensor
    assert dali_stream.resize(tensor, None) is tensor


@pytest.mark.parametrize("size", [(4, 6), (2, 3)])
def test_results_are_for_torch_also_for_views_that_torch_refuses(size: tuple[int, int]) -> None:
    image = np.arange(72, dtype=np.uint8).reshape(4, 6, 3)
    wanted = dali_stream.resize(image, size)
    read_only = image.copy()
    read_only.flags.writeable = False
    for view, expected in ((image[..., ::-1], wanted[..., ::-1]), (read_only, wanted)):
        np.testing.assert_array_equal(torch.from_numpy(dali_stream.resize(view, size)).numpy(), expected)


@pytest.mark.parametrize(
    "images",
    [
        np.zeros((4, 6, 3), np.float32), np.zeros((4, 6), np.uint8), np.zeros((1, 1, 4, 6, 3), np.uint8), [[[0, 0, 0]]],
        np.zeros((3, 4, 6), np.uint8), torch.zeros((8, 6, 3), dtype=torch.uint8), None,
        torch.zeros((3, 4, 6)), torch.zeros((4, 6), dtype=torch.uint8),
        torch.zeros((3, 4, 6), dtype=torch.uint8, device="meta"),
    ],
)  # fmt: skip
def test_other_images_are_an_error(images: Any) -> None:
    with pytest.raises(ValueError, match=r"^images must be uint8 on the CPU, .* got .* of shape \("):
        dali_stream.resize(images, (2, 2))


@pytest.mark.parametrize("size", [(0, 4), (4, -1), (2.5, 4), 224, (4,), (1, 2, 3)])
def test_a_size_is_two_positive_integers(size: Any) -> None:
    with pytest.raises(ValueError, match=r"image_size must be (a positive integer|\(height, width\) or None), got "):
        dali_stream.resize(np.zeros((4, 6, 3), np.uint8), size)
