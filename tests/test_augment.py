"""Augmentation: what the operators do to a frame, and that a position gets the same pixels whatever run it is in."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from nvidia.dali import fn
from PIL import Image
from support.batches import equal
from support.datasets import SIDE, TOP, Column, build, image_file
from support.slow import examples, slow

from dali_stream import DaliStreamError, Dataset, Loader, augment
from dali_stream.order.uniforms import COUNT, uniforms

Nodes = dict[str, Any]


def everything(nodes: Nodes) -> Nodes:
    """Each operator once, on both cameras, one of which has a window."""
    draw = augment.Draw(nodes["sample"])
    for key in (TOP, SIDE):
        frame = augment.random_resized_crop(nodes[key], draw, size=(96, 112), scale=(0.3, 0.9))
        frame = augment.random_shift(frame, draw, pixels=(4, 6))
        frame = augment.color_jitter(frame, draw, brightness=0.3, contrast=0.3, saturation=0.5, hue=0.1)
        frame = augment.random_rotation(frame, draw, degrees=10)
        frame = augment.gaussian_blur(frame, draw)
        nodes[key] = augment.random_erasing(frame, draw)
    return nodes


def batches(
    dataset: Dataset | Path, pipeline: Callable[[Nodes], Nodes] | None = everything, count: int | None = None, **arguments: Any
) -> list[Any]:
    """Batches of an epoch, or the first `count` of them."""
    options: dict[str, Any] = {"batch_size": 8, "consumers": 4, "device": "cpu", "last_batch": "partial"}
    with Loader(dataset, dali_graph=pipeline, **(options | arguments)) as loader:
        return list(itertools.islice(loader, count))


@pytest.fixture(scope="module")
def dataset(demo: Path) -> Dataset:
    return Dataset(demo, episodes=[1])


# ---- the numbers


@given(seed=st.integers(0, 2**40), epoch=st.integers(0, 10**6), start=st.integers(0, 2**40))
@examples(50)
def test_numbers_are_a_function_of_seed_epoch_and_position(seed: int, epoch: int, start: int) -> None:
    positions = start + np.arange(8)
    numbers = uniforms(seed, epoch, positions)
    assert numbers.shape == (8, COUNT)
    assert numbers.dtype == np.float32
    assert ((numbers >= 0) & (numbers < 1)).all()
    for order in (positions[::-1], positions[3:4], np.resize(positions, 13)):
        assert np.array_equal(uniforms(seed, epoch, order), numbers[order - start])
    for other in (uniforms(seed + 1, epoch, positions), uniforms(seed, epoch + 1, positions)):
        assert (other != numbers).mean() > 0.99


def test_numbers_are_uniform_and_independent() -> None:
    numbers = uniforms(0, 0, np.arange(20_000)).astype(np.float64)
    assert abs(numbers.mean() - 0.5) < 0.001
    counts = np.histogram(numbers, 64, (0, 1))[0] / numbers.size * 64
    assert np.abs(counts - 1).max() < 0.03
    centred = (numbers - 0.5) / np.sqrt(1 / 12)
    between_numbers = centred.T @ centred / len(centred) - np.eye(COUNT)
    between_positions = (centred[:-1] * centred[1:]).mean(0)
    assert np.abs(between_numbers).max() < 0.04  # 5 of the standard errors of 2016 pairs
    assert np.abs(between_positions).max() < 0.04


def test_the_same_numbers_in_every_version() -> None:
    """A run that is resumed with a later version continues with the same frames."""
    assert uniforms(7, 3, np.array([0, 123_456_789]))[:, :3].tolist() == PINNED


PINNED = [
    [0.24605906009674072, 0.6959012150764465, 0.7310820817947388],
    [0.9681759476661682, 0.4261966943740845, 0.013044774532318115],
]


# ---- the same position, the same pixels


@pytest.mark.slow
def test_a_position_gets_the_same_pixels_in_every_run(dataset: Dataset) -> None:
    arguments: dict[str, Any] = {"delta_timestamps": {TOP: [-0.05, 0.0]}}
    whole = batches(dataset, count=6, **arguments)
    [plain] = batches(dataset, None, count=1, **arguments)
    assert whole[0].keys() == plain.keys()  # the numbers themselves are not delivered
    assert not torch.equal(whole[0][SIDE], batches(dataset, count=1, seed=1, **arguments)[0][SIDE])
    again = batches(dataset, count=6, num_threads=1, prefetch=1, **arguments)
    assert all(equal(a, b) for a, b in zip(whole, again, strict=True))

    with Loader(dataset, dali_graph=everything, batch_size=8, consumers=4, last_batch="partial", **arguments) as loader:
        for _ in itertools.islice(loader, 3):
            pass
        state = loader.state_dict()
    with Loader(dataset, dali_graph=everything, batch_size=8, consumers=4, last_batch="partial", **arguments) as loader:
        loader.load_state_dict(state)
        assert all(equal(a, b) for a, b in zip(whole[3:], itertools.islice(loader, 3), strict=True))


@pytest.mark.slow
def test_another_number_of_ranks_changes_no_pixel(dataset: Dataset) -> None:
    def by_index(found: list[Any]) -> dict[int, torch.Tensor]:
        return {int(i): frame for batch in found for i, frame in zip(batch["index"], batch[TOP], strict=True)}

    alone = by_index(batches(dataset))
    shared = [by_index(batches(dataset, batch_size=4, rank=rank, world_size=2)) for rank in range(2)]
    assert not shared[0].keys() & shared[1].keys()
    assert alone.keys() == shared[0].keys() | shared[1].keys()
    assert all(torch.equal(alone[i], frame) for each in shared for i, frame in each.items())


def test_epochs_differ(dataset: Dataset) -> None:
    with Loader(dataset, dali_graph=everything, batch_size=8, shuffle=False) as loader:
        first, second = next(iter(loader)), next(iter(loader))
    assert torch.equal(first["index"], second["index"])
    assert not torch.equal(first[TOP], second[TOP])


def test_a_state_of_another_seed_is_refused_where_only_augmentation_has_one(dataset: Dataset) -> None:
    with Loader(dataset, dali_graph=everything, batch_size=8, shuffle=False, seed=1) as loader:
        state = loader.state_dict()
    with (
        Loader(dataset, dali_graph=everything, batch_size=8, shuffle=False, seed=2) as loader,
        pytest.raises(Exception, match="seed"),
    ):
        loader.load_state_dict(state)


@pytest.mark.parametrize("graphs", [(everything, None), (None, everything)])
def test_a_run_in_recorded_order_resumes_with_or_without_a_graph(dataset: Dataset, graphs: tuple[Any, Any]) -> None:
    before, after = graphs
    with Loader(dataset, dali_graph=before, batch_size=8, shuffle=False, seed=1) as loader:
        iterator = iter(loader)
        next(iterator)
        state, expected = loader.state_dict(), next(iterator)
    with Loader(dataset, dali_graph=after, batch_size=8, shuffle=False, seed=1) as loader:
        loader.load_state_dict(state)
        assert torch.equal(next(iter(loader))["index"], expected["index"])


@pytest.mark.slow
def test_rows_and_the_frames_of_a_window_are_treated_alike(dataset: Dataset) -> None:
    steps = {TOP: [0.0, 0.0, 0.0], "action": [0.0, 0.05]}
    for batch, plain in zip(
        batches(dataset, delta_timestamps=steps), batches(dataset, None, delta_timestamps=steps), strict=True
    ):
        assert torch.equal(batch[TOP][:, 0], batch[TOP][:, 1])
        assert torch.equal(batch[TOP][:, 0], batch[TOP][:, 2])
        assert torch.equal(batch["action"], plain["action"])
        assert not torch.equal(batch[TOP][0, 0], batch[TOP][1, 0])


# ---- the operators, one by one, with numbers that are known


def frames_of(dataset: Dataset, change: Callable[[Any, augment.Draw], Any], **arguments: Any) -> tuple[Any, Any, Any]:
    """(augmented, plain, numbers) of the first batch of the top camera: (B, H, W, 3) twice and (B, COUNT)."""

    def graph(nodes: Nodes) -> Nodes:
        draw = augment.Draw(nodes["sample"])
        return {"plain": nodes[TOP], "numbers": nodes["sample"] * 1.0, TOP: change(nodes[TOP], draw)}

    [batch] = batches(dataset, graph, count=1, **arguments)
    shown = [batch[key].movedim(1, -1).numpy() for key in (TOP, "plain")]
    return shown[0], shown[1], batch["numbers"].numpy()


def test_shift(dataset: Dataset) -> None:
    moved, plain, numbers = frames_of(dataset, lambda frame, draw: augment.random_shift(frame, draw, pixels=(5, 3)))
    offsets = set()
    for frame, original, number in zip(moved, plain, numbers, strict=True):
        down, right = int(number[0] * 11) - 5, int(number[1] * 7) - 3
        around = np.pad(original, ((5, 5), (3, 3), (0, 0)), mode="edge")
        height, width = original.shape[:2]
        np.testing.assert_array_equal(frame, around[5 + down : 5 + down + height, 3 + right : 3 + right + width])
        offsets.add((down, right))
    assert len(offsets) > 4


@pytest.mark.parametrize("image_dtype", ["float32", "uint8"])
def test_crop(dataset: Dataset, image_dtype: str) -> None:
    """A crop with a quarter of the area and the frame's own shape equals bilinear scaling of the same part, as in Pillow."""

    def crop(frame: Any, draw: augment.Draw) -> Any:
        return augment.random_resized_crop(frame, draw, size=(128, 160), scale=(0.25, 0.25), ratio=(1, 1))

    cropped, plain, numbers = frames_of(dataset, crop, image_dtype=image_dtype)
    assert cropped.dtype == plain.dtype
    for frame, original, number in zip(cropped, plain, numbers, strict=True):
        top, left = number[2] * 0.5 * 128, number[3] * 0.5 * 160
        y, x = (np.arange(n) / 2 + start - 0.25 for n, start in ((128, top), (160, left)))
        expected = bilinear(original.astype(np.float64), y, x)
        unit = 1 if image_dtype == "float32" else 255
        assert np.abs(frame - expected).mean() < 0.01 * unit


def bilinear(frame: Any, y: Any, x: Any) -> Any:
    y, x = np.clip(y, 0, frame.shape[0] - 1), np.clip(x, 0, frame.shape[1] - 1)
    y0, x0 = np.minimum(y.astype(int), frame.shape[0] - 2), np.minimum(x.astype(int), frame.shape[1] - 2)
    v, u = (y - y0)[:, None, None], (x - x0)[None, :, None]
    corner = [[frame[y0 + i][:, x0 + j] for j in (0, 1)] for i in (0, 1)]
    return (1 - v) * ((1 - u) * corner[0][0] + u * corner[0][1]) + v * ((1 - u) * corner[1][0] + u * corner[1][1])


def test_crops_stay_inside_and_cover_the_range(dataset: Dataset) -> None:
    """By the part that a frame of its own coordinates shows."""
    shares = []

    def crop(frame: Any, draw: augment.Draw) -> Any:
        return augment.random_resized_crop(frame, draw, size=(64, 64), scale=(0.2, 1.0), ratio=(0.5, 2.0))

    cropped, plain, numbers = frames_of(dataset, crop, batch_size=32)
    for number in numbers:
        area, ratio = 0.2 + 0.8 * number[0], np.exp(np.log(0.5) + np.log(4) * number[1])
        height, width = min(np.sqrt(area / ratio), 1), min(np.sqrt(area * ratio), 1)
        shares.append(height * width)
        assert 0 <= number[2] * (1 - height) <= 1 - height
    assert min(shares) < 0.4
    assert max(shares) > 0.8
    low, high = plain.min((1, 2, 3)), plain.max((1, 2, 3))
    assert (cropped.min((1, 2, 3)) >= low - 1e-3).all()  # nothing from outside
    assert (cropped.max((1, 2, 3)) <= high + 1e-3).all()


def test_colours(dataset: Dataset) -> None:
    only = {"brightness": (1.5, 1.5)}
    brighter, plain, _ = frames_of(dataset, lambda frame, draw: augment.color_jitter(frame, draw, **only))
    np.testing.assert_allclose(brighter, np.clip(plain * 1.5, 0, 1), atol=0.01)
    gray, plain, _ = frames_of(dataset, lambda frame, draw: augment.color_jitter(frame, draw, saturation=(0.0, 0.0)))
    assert np.abs(gray.max(-1) - gray.min(-1)).max() < 0.02
    flat, plain, _ = frames_of(dataset, lambda frame, draw: augment.color_jitter(frame, draw, contrast=(0.0, 0.0)))
    assert flat.max() - flat.min() < 0.02
    same, plain, _ = frames_of(dataset, augment.color_jitter)
    np.testing.assert_allclose(same, plain, atol=0.01)
    turned, plain, _ = frames_of(dataset, lambda frame, draw: augment.color_jitter(frame, draw, hue=(1 / 3, 1 / 3)))
    assert np.abs(turned - plain).mean() > 0.02
    back, _, _ = frames_of(dataset, lambda frame, draw: augment.color_jitter(frame, draw, hue=(1.0, 1.0)))
    np.testing.assert_allclose(back, plain, atol=0.01)  # once round the circle


def jittered(dataset: Dataset, image_dtype: str = "float32", **ranges: Any) -> tuple[Any, Any]:
    """(augmented, plain) frames of a batch, both in [0, 1] if colours are clamped."""
    frames, plain, _ = frames_of(
        dataset, lambda frame, draw: augment.color_jitter(frame, draw, **ranges), batch_size=32, image_dtype=image_dtype
    )
    assert frames.dtype == plain.dtype == np.dtype(image_dtype)
    return (frames, plain) if image_dtype == "float32" else (frames / 255, plain / 255)


@pytest.mark.parametrize("image_dtype", ["float32", slow("uint8")])
def test_colours_stay_between_0_and_1(dataset: Dataset, image_dtype: str) -> None:
    for name in ("brightness", "contrast", "saturation", "hue"):
        frames, _ = jittered(dataset, image_dtype, **{name: 0.9})
        assert frames.min() >= 0, name
        assert frames.max() <= 1, name
    frames, plain = jittered(dataset, image_dtype, brightness=(0.5, 3.0), contrast=1.0, saturation=(0.0, 4.0), hue=0.5)
    assert (frames.min(), frames.max()) == (0, 1)  # some values were clamped
    assert np.abs(frames - plain).mean() > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("image_dtype", ["float32", "uint8"])
def test_each_change_of_colours_is_clamped_as_torchvision_does(dataset: Dataset, image_dtype: str) -> None:
    """Its definition: a blend with black, with the frame in grey, or (here) with the middle, clamped to [0, 1]."""

    def blend(frame: Any, other: Any, factor: float) -> Any:
        return np.clip(factor * frame + (1 - factor) * other, 0, 1)

    def grey(frame: Any) -> Any:
        return frame @ np.array([[0.2989], [0.587], [0.114]])

    # DALI rounds the matrix of its colour space. Each step rounds uint8, and a later one multiplies that.
    tolerance = 0.01 if image_dtype == "float32" else 0.02
    for factor in (0.3, 3.0):
        expected: dict[str, Callable[[Any], Any]] = {
            "brightness": lambda frame, factor=factor: blend(frame, 0.0, factor),
            "contrast": lambda frame, factor=factor: blend(frame, 0.5, factor),
            "saturation": lambda frame, factor=factor: blend(frame, grey(frame), factor),
        }
        for name, changed in expected.items():
            frames, plain = jittered(dataset, image_dtype, **{name: (factor, factor)})
            np.testing.assert_allclose(frames, changed(plain), atol=tolerance, err_msg=name)
    frames, plain = jittered(dataset, image_dtype, contrast=(3.0, 3.0), brightness=(0.4, 0.4), saturation=(2.0, 2.0))
    dimmed = blend(blend(plain, 0.5, 3.0), 0.0, 0.4)  # what contrast clamps stays clamped
    np.testing.assert_allclose(frames, blend(dimmed, grey(dimmed), 2.0), atol=tolerance)


def test_rotation(dataset: Dataset) -> None:
    half, plain, _ = frames_of(dataset, lambda frame, draw: augment.random_rotation(frame, draw, degrees=(180, 180)))
    np.testing.assert_allclose(half, plain[:, ::-1, ::-1], atol=0.02)
    none, plain, _ = frames_of(dataset, lambda frame, draw: augment.random_rotation(frame, draw, degrees=0))
    np.testing.assert_allclose(none, plain, atol=1e-5)


def test_blur_and_erasing_happen_as_often_as_asked_for(dataset: Dataset) -> None:
    def blur(frame: Any, draw: augment.Draw) -> Any:
        return augment.gaussian_blur(frame, draw, sigma=(1.0, 3.0), probability=0.4)

    def erase(frame: Any, draw: augment.Draw) -> Any:
        return augment.random_erasing(frame, draw, probability=0.4, scale=(0.1, 0.1), ratio=(1, 1), value=0.25)

    blurred, plain, numbers = frames_of(dataset, blur, batch_size=64)
    changed = np.array([not np.array_equal(a, b) for a, b in zip(blurred, plain, strict=True)])
    np.testing.assert_array_equal(changed, numbers[:, 1] < 0.4)
    erased, plain, numbers = frames_of(dataset, erase, batch_size=64)
    for frame, original, number in zip(erased, plain, numbers, strict=True):
        gone = (frame != original).any(-1)
        if number[4] >= 0.4:
            assert not gone.any()
            continue
        assert (frame[gone] == 0.25).all()
        rows, columns = np.flatnonzero(gone.any(1)), np.flatnonzero(gone.any(0))
        side = np.sqrt(0.1)
        assert abs(np.ptp(rows) + 1 - side * 128) <= 2
        assert abs(rows[0] - number[2] * (1 - side) * 128) <= 2
        assert abs(columns[0] - number[3] * (1 - side) * 160) <= 2


# ---- what is refused


@pytest.mark.parametrize("channels", [1, 4])
@pytest.mark.parametrize("name", ["saturation", "hue"])
def test_saturation_and_hue_need_three_channels(name: str, channels: int, tmp_path: Path) -> None:
    """DALI's color_twist writes beyond the memory of frames with fewer channels."""
    image = image_file(Image.fromarray(np.full((48, 64, channels), 90, np.uint8).squeeze()))
    files = [{"bytes": image, "path": None}] * 20
    root = build(tmp_path / "set", (12, 8), {TOP: Column("image", [48, 64, channels], files)})

    def brighter(nodes: Nodes) -> Nodes:
        return nodes | {TOP: augment.color_jitter(nodes[TOP], augment.Draw(nodes["sample"]), brightness=(2.0, 2.0))}

    def changed(nodes: Nodes) -> Nodes:
        return nodes | {TOP: augment.color_jitter(nodes[TOP], augment.Draw(nodes["sample"]), **{name: (0.3, 0.3)})}

    assert batches(root, brighter, 1)[0][TOP].shape == (8, channels, 48, 64)
    with pytest.raises(DaliStreamError):
        batches(root, changed, 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p, d: augment.random_resized_crop(p, d, size=(8, 8), scale=(0.5, 1.5)), r"scale must be .*, got \(0.5, 1.5\)"),
        (lambda p, d: augment.random_resized_crop(p, d, size=(8, 8), ratio=(0, 1)), r"ratio must be .*, got \(0, 1\)"),
        (lambda p, d: augment.color_jitter(p, d, brightness=(-0.5, 1.0)), r"brightness must be .*, got \(-0.5, 1.0\)"),
        (lambda p, d: augment.color_jitter(p, d, contrast=-1), "contrast must be .*, got -1"),
        (lambda p, d: augment.gaussian_blur(p, d, probability=2), "probability must be from 0 to 1, got 2"),
        (lambda p, d: [d.uniform() for _ in range(COUNT + 1)], f"must draw at most {COUNT} random numbers"),
    ],
)
def test_bad_arguments(change: Callable[[Any, augment.Draw], Any], message: str, dataset: Dataset) -> None:
    with pytest.raises(ValueError, match=message):
        frames_of(dataset, change)


def test_the_numbers_may_be_used_for_anything(dataset: Dataset) -> None:
    def graph(nodes: Nodes) -> Nodes:
        flipped = fn.flip(nodes[TOP], horizontal=fn.cast(nodes["sample"][0] < 0.5, dtype=augment.types.INT32))
        return nodes | {TOP: flipped, "first": nodes["sample"][0] * 1.0}

    for batch, plain in zip(batches(dataset, graph), batches(dataset, None), strict=True):
        for frame, original, first in zip(batch[TOP], plain[TOP], batch["first"], strict=True):
            assert torch.equal(frame, original.flip(-1) if first < 0.5 else original)
