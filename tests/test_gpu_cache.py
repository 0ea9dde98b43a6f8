"""Decoded frames in the GPU's memory (`gpu_cache`), on a machine with GPUs (`support.gpu_machine`)."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from support.batches import check_identities, equal
from support.broken import damage
from support.datasets import CAMERAS, SIDE, TOP, VIDEO, copied, read_lengths
from support.gpu_machine import GpuMachine

import dali_stream
from dali_stream import Dataset, DecodeError, Loader, MemoryBudgetError

OPTIONS: dict[str, Any] = {"batch_size": 8, "last_batch": "partial", "device": "cuda", "num_threads": 2, "prefetch": 2}
FRAME = 128 * 160 * 3  # bytes of a frame of a camera
LITTLE = 2 * 60 * FRAME  # room for few frames beside those of the batches in progress
EVENTS = ("enter", "synchronize")
WINDOW = {TOP: [-0.1, 0.0, 1.5]}


def epochs(root: Path | Dataset | dali_stream.Mixture, count: int = 2, **options: Any) -> tuple[list[Any], dict[str, Any]]:
    """Return the batches of some epochs, which are held meanwhile, and `stats`."""
    with Loader(root, **OPTIONS | options) as loader:
        held = [list(loader) for _ in range(count)]
        return list(itertools.chain(*held)), loader.stats()


@pytest.mark.usefixtures("gpu_machine")
@pytest.mark.parametrize("decode", ["torchcodec-cuda", "torchcodec"])
@pytest.mark.parametrize(
    ("cache", "options"),
    [
        (LITTLE, {"image_dtype": "uint8"}),
        ("1GiB", {"delta_timestamps": WINDOW}),
        ("1GiB", {"image_size": (64, 80), "image_dtype": "uint8", "dali_graph": lambda nodes: nodes}),
    ],
    ids=["little", "windows", "resized"],
)
def test_batches_are_the_same(h264_demo: Path, decode: str, cache: int | str, options: dict[str, Any]) -> None:
    dataset = Dataset(h264_demo, episodes=[0])
    found, _ = epochs(dataset, decode=decode, gpu_cache=cache, **options)
    expected, _ = epochs(dataset, decode=decode, **options)
    assert all(itertools.starmap(equal, zip(found, expected, strict=True)))
    if "image_size" not in options:
        for batch in found:
            check_identities(batch, TOP, [-2, 0, 30] if "delta_timestamps" in options else None, read_lengths(h264_demo))


def test_it_is_the_room_for_decoded_frames(demo: Path, gpu_machine: GpuMachine) -> None:
    """memory_budget would hold all of them, and does not matter."""
    gpu_machine.has("l4")
    dataset = Dataset(demo, episodes=[0, 1])
    frames = len(CAMERAS) * int(dataset.lengths.sum())
    _, all_fit = epochs(dataset, 3, decode="torchcodec-cuda", gpu_cache=len(CAMERAS) * 2 * frames * FRAME)
    assert all_fit["decoded_frames"] == frames
    _, few_fit = epochs(dataset, 3, decode="torchcodec-cuda", gpu_cache=LITTLE)
    assert few_fit["decoded_frames"] > 1.5 * frames
    assert few_fit["memory_hits"] < all_fit["memory_hits"]


def test_frames_of_nvdec_do_not_leave_the_gpu(h264_demo: Path, gpu_machine: GpuMachine) -> None:
    dataset = Dataset(h264_demo, episodes=[0])
    epochs(dataset, decode="torchcodec-cuda", gpu_cache="1GiB")
    assert not gpu_machine.page_locked
    epochs(dataset, decode="torchcodec-cuda")
    assert max(map(math.prod, gpu_machine.page_locked)) >= 8 * FRAME


@pytest.mark.usefixtures("gpu_machine")
def test_damaged_frames_have_the_same_errors_and_substitutes(h264_demo: Path, tmp_path: Path) -> None:
    root = copied(h264_demo, tmp_path)
    damage(root, VIDEO.format(TOP, 0), 24, lambda packet: bytes(4) + packet[4:])
    dataset, errors, found = Dataset(root, episodes=[0, 1]), list[str](), list[list[Any]]()
    for cache in ({}, {"gpu_cache": "1GiB"}):
        with pytest.raises(DecodeError) as error:
            epochs(dataset, shuffle=False, decode="torchcodec-cuda", **cache)
        errors.append(str(error.value))
        found.append(epochs(dataset, on_error="substitute", image_dtype="uint8", decode="torchcodec-cuda", **cache)[0])
    assert errors[0] == errors[1]
    assert all(itertools.starmap(equal, zip(*found, strict=True)))
    assert sum(int(batch["is_substitute"].sum()) for batch in found[0]) >= 24


def test_a_camera_that_moves_to_the_cpu_keeps_its_cache(plain: Path, gpu_machine: GpuMachine) -> None:
    expected, _ = epochs(plain, decode="torchcodec", image_dtype="uint8")

    def fail(frames: list[int]) -> None:
        if gpu_machine.decoded > before:  # not for the first clips of the two threads
            raise RuntimeError("NVDEC has no surface")

    with Loader(plain, **OPTIONS, image_dtype="uint8", gpu_cache="1GiB") as loader:
        before, gpu_machine.before_decoding = gpu_machine.decoded, fail
        found = [batch for _ in range(2) for batch in loader]
        assert loader.stats()["route_changes"] == 1
    assert all(itertools.starmap(equal, zip(found, expected, strict=True)))


@pytest.mark.usefixtures("gpu_machine")
def test_a_camera_that_a_dataset_of_a_mixture_lacks_is_black(h264_demo: Path) -> None:
    one, both = Dataset(h264_demo, cameras=[SIDE], episodes=[0]), Dataset(h264_demo, episodes=[1])
    mixture = dali_stream.Mixture({"both": both, "one": one}, missing="pad")
    options: dict[str, Any] = {"image_dtype": "uint8", "image_size": (128, 160), "decode": "torchcodec-cuda"}
    found, expected = epochs(mixture, gpu_cache="1GiB", **options)[0], epochs(mixture, **options)[0]
    assert all(itertools.starmap(equal, zip(found, expected, strict=True)))
    assert any(bool(batch[f"{TOP}_is_missing"].any()) for batch in found)


def test_streams_are_waited_for(h264_demo: Path, tmp_path: Path, gpu_machine: GpuMachine) -> None:
    """Whatever is written on a stream, a substitute included, is complete before another stream reads it.

    Each stream is used while its GPU is the current device.
    """
    gpu_machine.has("h100", "h100")
    root = copied(h264_demo, tmp_path)
    damage(root, VIDEO.format(TOP, 0), 24, lambda packet: bytes(4) + packet[4:])
    options: dict[str, Any] = {"device": "cuda:1", "gpu_cache": "1GiB", "on_error": "substitute"}
    for decode in ("torchcodec-cuda", "torchcodec"):
        epochs(Dataset(root, episodes=[0, 1]), decode=decode, **options)
    assert gpu_machine.devices == {"cuda:1"}
    numbers = [Counter(number for what, number, _ in gpu_machine.stream_events if what == each) for each in EVENTS]
    assert numbers[0] == numbers[1]


@pytest.mark.parametrize(("call", "says"), [("to", "frames cannot be uploaded"), ("index_select", "a batch cannot be copied")])
def test_too_little_memory_beside_it_is_an_error(
    call: str, says: str, h264_demo: Path, monkeypatch: pytest.MonkeyPatch, gpu_machine: GpuMachine
) -> None:
    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError

    with Loader(h264_demo, decode="torchcodec", gpu_cache="1GiB", **OPTIONS) as loader:
        monkeypatch.setattr(torch.Tensor, call, fail)
        with pytest.raises(MemoryBudgetError, match=rf"^gpu_cache must fit into .* cuda:0 .*, but {says}\. Use a smaller"):
            next(iter(loader))


def test_the_batches_in_progress_take_at_most_half_of_it(h264_demo: Path, gpu_machine: GpuMachine) -> None:
    options = OPTIONS | {"num_threads": 32, "prefetch": None}
    batch = 8 * len(CAMERAS) * FRAME
    for size in (5 * batch, 100 * batch):
        with Loader(h264_demo, gpu_cache=size, **options) as loader:
            next(iter(loader))
    with Loader(h264_demo, gpu_cache="1GiB", **OPTIONS) as loader:
        whole = next(iter(loader))
        allocated = gpu_machine.allocated
        assert equal(loader.batch_at(0, 0), whole)
        assert gpu_machine.allocated == allocated, "no second gpu_cache"
        assert loader.stats()["decoded_bytes"] == 0


def test_wrong_values_are_refused(h264_demo: Path, tmp_path: Path, gpu_machine: GpuMachine) -> None:
    with pytest.raises(ValueError, match=r"^gpu_cache must be None for batches on the CPU, got '1GiB'\. Use memory_budget"):
        Loader(h264_demo, device="cpu", gpu_cache="1GiB")
    with pytest.raises(ValueError, match=r"^gpu_cache must be None with a frame_cache, .*, got 1024$"):
        Loader(h264_demo, device="cuda", gpu_cache=1024, frame_cache=tmp_path)
    with pytest.raises(MemoryBudgetError, match=r"^gpu_cache must be at least \d+ bytes for 2 batches in progress, got 1024"):
        Loader(h264_demo, gpu_cache=1024, **OPTIONS)
    gpu_machine.free_bytes = 1 << 20
    with (
        Loader(h264_demo, gpu_cache="1GiB", **OPTIONS) as loader,
        pytest.raises(
            MemoryBudgetError,
            match=r"^gpu_cache must fit into the free memory of cuda:0 .*, but \d+ bytes of it cannot be allocated",
        ),
    ):
        next(iter(loader))
