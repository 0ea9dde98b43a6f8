"""Decoded frames that are kept: what that saves, and that it changes nothing else."""

from __future__ import annotations

import functools
import itertools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from PIL import Image
from support.batches import as_bytes, equal, samples
from support.slow import examples

from dali_stream import Loader, MemoryBudgetError
from dali_stream.decode.resize import resize

TOP = "observation.images.top"
KINDS = {"av1": 2, "h264": 30, "vp9": 12}  # the codec's GOP
FRAME = 64 * 80 * 3  # bytes of a resized frame
ARGUMENTS: dict[str, Any] = {"batch_size": 16, "image_size": (64, 80), "image_dtype": "uint8", "device": "cpu"}


@pytest.fixture(scope="module")
def datasets(written: Callable[..., Path]) -> dict[str, Path]:
    """Two episodes of each codec: AV1, which are those of `small`, H.264 with B-frames, and VP9."""
    others = {
        codec: written(episodes=2, size=(128, 160), codec=codec, gop=gop) for codec, gop in KINDS.items() if codec != "av1"
    }
    return {"av1": written(episodes=2, size=(120, 128)), **others}


@pytest.fixture(scope="module", params=KINDS)
def dataset(datasets: dict[str, Path], request: pytest.FixtureRequest) -> Path:
    """Dataset of one codec."""
    return datasets[request.param]


def read(loader: Loader, epochs: int = 1) -> list[dict[str, Any]]:
    return list(itertools.chain.from_iterable(itertools.repeat(loader, epochs)))


def test_each_frame_is_decoded_once_and_never_again(dataset: Path) -> None:
    with Loader(dataset, last_batch="partial", **ARGUMENTS) as loader:
        first = read(loader)
        stats = loader.stats()
        # The batches that are made ahead belong to the second epoch, whose frames are all cached. A GOP that continues from
        # one episode into the next is decoded for each of them.
        frames, across = 2 * loader.dataset.num_frames, 2 * (loader.dataset.num_episodes - 1)
        assert frames <= stats["decoded_frames"] <= frames + across * max(KINDS.values())
        assert stats["decoded_bytes"] == frames * FRAME
        second = read(loader)
        later = loader.stats()
    assert later["decoded_frames"] == stats["decoded_frames"]
    assert later["memory_hits"] >= 2 * len(samples(second))
    assert later["frames_evicted_before_use"] == 0
    by_index = {i: frame for batch in first for i, frame in zip(batch["index"].tolist(), batch[TOP], strict=True)}
    for batch in second:
        for i, frame in zip(batch["index"].tolist(), batch[TOP], strict=True):
            assert frame.equal(by_index[i])


@pytest.mark.slow
@examples(12, derandomize=False, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    codec=st.sampled_from([*KINDS]),
    kept=st.integers(0, 200), num_threads=st.integers(1, 8), start=st.integers(0, 15), prefetch=st.none() | st.integers(1, 4),
    steps=st.sampled_from([(0,), (-20, 0), (-3, -2, -1, 0, 7)]),
)  # fmt: skip
def test_batches_are_the_same_with_any_memory(
    datasets: dict[str, Path],
    codec: str,
    kept: int,
    num_threads: int,
    start: int,
    prefetch: int | None,
    steps: tuple[int, ...],
) -> None:
    """From the least budget that is accepted to one that keeps every frame, on any threads, resumed at any step."""
    dataset = datasets[codec]
    arguments, expected, least = windowed(dataset, steps)
    with Loader(dataset, **arguments) as loader:
        epoch, batch = divmod(start, len(loader))
        loader.resume(epoch=epoch, batch=batch)
        state = loader.state_dict()
    budget = least + kept * 2 * FRAME
    with Loader(dataset, memory_budget=budget, num_threads=num_threads, prefetch=prefetch, **arguments) as loader:
        loader.load_state_dict(state)
        found = read(loader, 2 - (start >= len(loader)))
        stats = loader.stats()
    assert len(found) == len(expected) - start
    assert all(equal(mine, other) for mine, other in zip(found, expected[start:], strict=True))
    assert stats["decoded_bytes"] <= max(budget, 0)


@functools.cache
def windowed(dataset: Path, steps: tuple[int, ...]) -> tuple[dict[str, Any], list[dict[str, Any]], int]:
    """Arguments with a window, the batches of two epochs, and the least memory_budget, which all examples share."""
    arguments = ARGUMENTS | {"delta_timestamps": {TOP: [step / 20 for step in steps]}}
    with Loader(dataset, **arguments) as loader:
        return arguments, read(loader, 2), least_budget(dataset, arguments)


def least_budget(dataset: Path, arguments: dict[str, Any]) -> int:
    """The least memory_budget, within a tenth, that a Loader accepts."""

    def is_accepted(budget: int) -> bool:
        try:
            Loader(dataset, memory_budget=budget, **arguments).close()
        except MemoryBudgetError:
            return False
        return True

    budget = 1 << 12
    while not is_accepted(budget):
        budget *= 2
    while is_accepted(budget * 10 // 11):
        budget = budget * 10 // 11
    return budget


@pytest.mark.slow
def test_little_memory_changes_no_batch(dataset: Path) -> None:
    arguments = ARGUMENTS | {"batch_size": 4, "shuffle": "global"}
    epochs = 3
    with Loader(dataset, **arguments) as loader:
        expected = read(loader, epochs)
        frames = loader.dataset.num_frames
    budget = least_budget(dataset, arguments) + (frames // 4 + 2 * arguments["batch_size"]) * 2 * FRAME
    with Loader(dataset, memory_budget=budget, prefetch=2, **arguments) as loader:  # two batches of frames in progress
        found = read(loader, epochs)
        stats = loader.stats()
    assert all(equal(mine, other) for mine, other in zip(found, expected, strict=True))
    assert stats["decoded_frames"] > 1.2 * 2 * frames
    assert stats["memory_hits"] > 0


@pytest.mark.slow
def test_a_broken_packet_costs_only_the_batches_that_show_it(written: Callable[..., Path], tmp_path: Path) -> None:
    """Its neighbours are decoded beside it, and with it."""
    root = Path(shutil.copytree(written(episodes=2, size=(128, 160), codec="h264", gop=30), tmp_path / "broken"))
    file = root / f"videos/{TOP}/chunk-000/file-000.mp4"
    data = bytearray(file.read_bytes())
    middle = len(data) // 2
    data[middle : middle + 400] = bytes(400)
    file.write_bytes(data)
    with Loader(root, on_error="substitute", last_batch="partial", **ARGUMENTS) as loader:
        first, lost = read(loader), loader.stats()["substituted"]
        assert 0 < lost <= 30
        again = read(loader)
        assert loader.stats()["substituted"] == 2 * lost, "frames that failed fail in every epoch"
    with Loader(root, on_error="substitute", last_batch="partial", memory_budget=4 << 20, **ARGUMENTS) as loader:
        assert all(equal(mine, other) for mine, other in zip(read(loader, 2), first + again, strict=True))


def test_images_in_rows_are_kept_too(odd: Path) -> None:
    with Loader(odd, batch_size=3, image_size=(6, 8), last_batch="partial", device="cpu") as loader:
        cameras = len(loader.dataset.cameras)
        first = read(loader)
        assert loader.stats()["decoded_frames"] == cameras * loader.dataset.num_frames
        second = read(loader)
        assert loader.stats()["decoded_frames"] == cameras * loader.dataset.num_frames
    key = loader.dataset.cameras[0]
    by_index = {i: frame for batch in first for i, frame in zip(batch["index"].tolist(), batch[key], strict=True)}
    assert all(p.equal(by_index[i]) for batch in second for i, p in zip(batch["index"].tolist(), batch[key], strict=True))


# ---- resizing


@pytest.mark.parametrize("size", [(64, 80), (224, 224), (33, 17), (300, 400)])
def test_frames_are_resized_as_pillow_does_it(size: tuple[int, int], demo: Path) -> None:
    with Loader(demo, batch_size=16, image_dtype="uint8", shuffle=False, device="cpu") as loader:
        recorded = as_bytes(next(iter(loader))[TOP])
    with Loader(demo, batch_size=16, image_dtype="uint8", image_size=size, shuffle=False, device="cpu") as loader:
        resized = as_bytes(next(iter(loader))[TOP])
    assert resized.shape == (16, *size, 3)
    for mine, frame in zip(resized, recorded, strict=True):
        other = np.array(Image.fromarray(frame).resize(size[::-1], Image.Resampling.BILINEAR))
        assert np.abs(mine.astype(int) - other).max() <= 1


def test_a_frame_is_resized_the_same_whatever_comes_with_it() -> None:
    frames = np.random.default_rng(0).integers(0, 256, (9, 48, 64, 3), np.uint8)
    together = resize(frames, (20, 30))
    for i in range(9):
        np.testing.assert_array_equal(resize(frames[i : i + 1], (20, 30))[0], together[i])
    assert resize(frames, (48, 64)) is frames
