"""Every option of the Loader has the effect that it states, and refuses what it cannot take."""

from __future__ import annotations

import inspect
import json
import re
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.batches import as_bytes, check_identities, equal, samples
from support.datasets import CAMERAS, SIDE, TOP, read_lengths

import dali_stream
from dali_stream import Dataset, Loader, MemoryBudgetError, Mixture, Normalizer, Order
from dali_stream.system.memory_limit import MemoryLimit

needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")


@pytest.fixture(scope="module")
def rows_only(demo: Path) -> Dataset:
    """The demo without cameras: quick to stream."""
    return Dataset(demo, cameras=[])


def batches_of(dataset: Dataset | Path, **arguments: Any) -> list[dict[str, Any]]:
    with Loader(dataset, **({"batch_size": 32} | arguments)) as loader:
        return list(loader)


# -------------------------------------------------------------------------------------------------------------- frames


@pytest.mark.parametrize("size", [(120, 128), (240, 200), (128, 160)])
def test_image_size_resizes(demo: Path, size: tuple[int, int]) -> None:
    dataset, lengths = Dataset(demo, episodes=[0]), read_lengths(demo)
    for image_dtype in ("uint8", "float32"):
        arguments: dict[str, Any] = {"image_dtype": image_dtype, "delta_timestamps": {SIDE: [0.0, 0.05]}, "batch_size": 16}
        recorded = batches_of(dataset, **arguments)
        for batch, plain in zip(batches_of(dataset, image_size=size, **arguments), recorded, strict=True):
            assert batch[TOP].shape == (16, 3, *size)
            assert batch[SIDE].shape == (16, 2, 3, *size)
            check_identities(batch, TOP, None, lengths)
            check_identities(batch, SIDE, [0, 1], lengths)
            assert batch[TOP].is_floating_point() == (image_dtype == "float32")
            change = as_bytes(batch[TOP]).mean((1, 2, 3)) - as_bytes(plain[TOP]).mean((1, 2, 3))
            assert np.abs(change).max() < 2, "a resize keeps the brightness"


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_image_dtype_may_be_torchs(demo: Path, dtype: torch.dtype) -> None:
    dataset = Dataset(demo, episodes=[0])
    [first, *_], [second, *_] = (batches_of(dataset, image_dtype=each) for each in (dtype, str(dtype).rpartition(".")[2]))
    assert first[TOP].dtype == dtype
    assert torch.equal(first[TOP], second[TOP])


def test_image_dtypes_are_the_same_frames(demo: Path) -> None:
    dataset = Dataset(demo, episodes=[0])
    for as_float, as_uint8 in zip(batches_of(dataset), batches_of(dataset, image_dtype="uint8"), strict=True):
        for camera in CAMERAS:
            assert as_float[camera].dtype == torch.float32
            assert as_uint8[camera].dtype == torch.uint8
            assert torch.equal(as_float[camera], as_uint8[camera] / 255)


def test_frames_are_channels_last_in_memory(demo: Path) -> None:
    batch = batches_of(Dataset(demo, episodes=[0]), batch_size=8)[0]
    assert batch[TOP].is_contiguous(memory_format=torch.channels_last)


# ------------------------------------------------------------------------------------------------------------ the order


def test_seed_and_shuffle_choose_the_order(rows_only: Dataset) -> None:
    orders = {
        (shuffle, seed, consumers, pool): tuple(
            samples(batches_of(rows_only, shuffle=shuffle, seed=seed, consumers=consumers, episode_pool_size=pool))
        )
        for shuffle, seed, consumers, pool in (
            [(True, 0, 32, 8), (True, 1, 32, 8), (True, 0, 16, 8), (True, 0, 32, 1), ("global", 0, 32, 8), ("global", 1, 32, 8)]
        )
    }
    assert len(set(orders.values())) == len(orders)
    assert samples(batches_of(rows_only, shuffle=False)) == list(range(rows_only.num_frames // 32 * 32))
    assert tuple(samples(batches_of(rows_only))) == orders[True, 0, 32, 8], "the defaults"


@pytest.mark.slow
def test_as_many_batches_are_made_ahead_as_asked_for(small: Path) -> None:
    expected = batches_of(Dataset(small), image_dtype="uint8", batch_size=4)
    for ahead in (1, 7):
        # With this number of threads, batches do not share clips.
        with Loader(small, batch_size=4, prefetch=ahead, image_dtype="uint8", num_threads=8) as loader:
            batches, planned = iter(loader), 0
            got = [next(batches)]
            while planned < 1 + ahead:  # one is delivered, and `ahead` more are made without being asked for
                planned = _planned(loader)
            for batch in batches:
                got.append(batch)
                # Beside those that wait, DALI may hold one and the planner another that has no place yet.
                assert _planned(loader) <= len(got) + ahead + 2
        assert all(equal(first, second) for first, second in zip(got, expected, strict=True))


def test_no_more_batches_are_made_ahead_than_an_epoch_has(small: Path) -> None:
    options: dict[str, Any] = {"batch_size": 8, "image_size": (16, 24), "num_threads": 1, "device": "cpu"}
    with Loader(small, **options) as plain, Loader(small, **options, prefetch=10**9) as loader:
        for _ in range(2):
            assert all(equal(first, second) for first, second in zip(loader, plain, strict=True))


def test_batches_ahead_that_memory_does_not_hold_are_refused(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"batch_size": 8, "image_size": (16, 24), "num_threads": 1, "device": "cpu"}
    long = Mixture({"a": small}, weights={"a": 1}, epoch_samples=1 << 31)
    monkeypatch.setattr("dali_stream.loader.memory_limit", lambda: MemoryLimit(64 << 30, "this machine"))
    with pytest.raises(MemoryBudgetError, match=r"needs at least .* Use a smaller prefetch, batch_size or image_size"):
        Loader(long, **options, prefetch=10**9)
    with Loader(long, **options, prefetch=3) as loader:
        assert len(next(iter(loader))["index"]) == 8
    with Loader(small, **options, prefetch=10**9) as loader:
        monkeypatch.setattr("dali_stream.cache.slots.np.empty", too_large)
        with pytest.raises(MemoryBudgetError, match=r"batches in progress .* Use a smaller prefetch or batch_size"):
            next(iter(loader))


def too_large(*_: object) -> None:
    """As NumPy's functions where the system provides no memory."""
    raise MemoryError("Unable to allocate 1.00 TiB")


def _planned(loader: Loader) -> int:
    """Batches that decoding has begun for, at least: a batch of 4 has a clip per camera."""
    return loader.stats()["clips"] // len(loader.dataset.cameras)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads_change_nothing_but_the_speed(demo: Path, threads: int) -> None:
    dataset = Dataset(demo, episodes=[0, 3], cameras=[TOP])
    expected = batches_of(dataset, num_threads=3, image_dtype="uint8")
    with Loader(dataset, batch_size=32, num_threads=threads, image_dtype="uint8") as loader:
        found, names = [], set()
        for batch in loader:
            found.append(batch)
            names |= {thread.name for thread in threading.enumerate()}
    assert all(equal(a, b) for a, b in zip(found, expected, strict=True))
    assert 1 <= sum("dali_stream decode" in name for name in names) <= threads


def test_a_small_memory_budget_changes_nothing_but_the_traffic(demo: Path) -> None:
    dataset = Dataset(demo, cameras=[TOP])
    arguments: dict[str, Any] = {"image_dtype": "uint8", "consumers": 2, "episode_pool_size": 1, "batch_size": 16}
    expected = batches_of(dataset, **arguments)
    with Loader(dataset, memory_budget=90_000, **arguments) as loader:
        assert all(equal(a, b) for a, b in zip(loader, expected, strict=True))


def test_a_memory_budget_below_one_batch_says_so(demo: Path) -> None:
    with (
        pytest.raises(dali_stream.DaliStreamError, match=r"memory_budget must be at least .*got 4096.*larger memory_budget"),
        Loader(Dataset(demo, cameras=[]), batch_size=16, memory_budget="4KiB") as loader,
    ):
        next(iter(loader))


def test_resident_bytes_stay_within_the_budget(demo: Path) -> None:
    with Loader(demo, batch_size=16, memory_budget=150_000, consumers=2, episode_pool_size=1) as loader:
        assert max(loader.stats()["resident_bytes"] for _ in loader) <= 150_000


# ---------------------------------------------------------------------------------------------------------- batch sizes


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("last_batch", ["drop", "partial", "pad"])
def test_last_batch(rows_only: Dataset, last_batch: str, world: int) -> None:
    """523 frames, 50 a batch: 10 batches and 23 frames over on one rank, 5 and 23 on two."""
    assert rows_only.num_frames == 523
    ranks = []
    for rank in range(world):
        arguments: dict[str, Any] = {"batch_size": 50, "last_batch": last_batch, "rank": rank, "world_size": world}
        with Loader(rows_only, **arguments) as loader:
            ranks.append(list(loader))
            assert (
                len(loader)
                == len(ranks[-1])
                == {"drop": 10, "partial": 11, "pad": 11}[last_batch] // world + (world == 2 and last_batch != "drop")
            )
            assert loader.stats()["padded"] >= (50 - 23 // world - 1 if last_batch == "pad" else 0)
    served = [index for batches in ranks for index in samples(batches)]
    if last_batch == "pad":
        assert {len(batch["index"]) for batches in ranks for batch in batches} == {50}
        assert set(served) == set(range(523))
        assert len(served) == len(ranks[0]) * 50 * world
    else:
        assert len(set(served)) == len(served) == (500 if last_batch == "drop" else 523)


def test_padding_is_the_beginning_of_the_epoch(rows_only: Dataset) -> None:
    served = samples(batches_of(rows_only, batch_size=50, last_batch="pad"))
    assert served[523:] == served[:27]


def test_more_padding_than_frames_repeats_them(demo: Path) -> None:
    dataset = Dataset(demo, cameras=[], episodes=[0])
    [batch] = batches_of(dataset, batch_size=1000, last_batch="pad")
    counts = np.bincount(batch["index"].numpy())
    assert len(counts) == dataset.num_frames
    assert counts.max() - counts.min() <= 1


@pytest.mark.parametrize("shuffle", [True, "sharded", "global", False])
def test_padding_of_a_rank_without_a_sample_is_of_the_selection(demo: Path, shuffle: Any) -> None:
    """Two frames on three ranks."""
    dataset = Dataset(demo, cameras=[], frames={2: [(3, 5)]})
    options: dict[str, Any] = {"batch_size": 3, "last_batch": "pad", "shuffle": shuffle, "world_size": 3}
    served = [batches_of(dataset, rank=rank, **options) for rank in range(3)]
    assert [len(batches) for batches in served] == [1, 1, 1]
    for [batch] in served:
        assert batch["episode_index"].tolist() == [2] * 3
        assert set(batch["frame_index"].tolist()) <= {3, 4}
    assert {frame for [batch] in served for frame in batch["frame_index"].tolist()} == {3, 4}


def test_an_epoch_without_a_batch_is_refused(rows_only: Dataset) -> None:
    with pytest.raises(
        ValueError, match=r"batch_size=300 on 2 ranks needs 600 frames, but the selection has 523.* Use a smaller batch_size"
    ):
        Loader(rows_only, batch_size=300, rank=0, world_size=2)


def test_messages_count_in_singular_and_plural(demo: Path, rows_only: Dataset) -> None:
    one = Dataset(demo, cameras=[], episodes=[0])
    assert f": 1 episode, {one.num_frames} frames at" in repr(one)
    with pytest.raises(ValueError, match=r"on 1 rank needs 1000 frames, but the selection has 523"):
        Loader(rows_only, batch_size=1000, rank=0, world_size=1)


# -------------------------------------------------------------------------------------------------- devices and ranks


@needs_no_gpu
def test_devices_without_a_gpu(rows_only: Dataset) -> None:
    for device in ("auto", "cpu", "cpu:0", torch.device("cpu", 0)):
        assert batches_of(rows_only, device=device)[0]["index"].device.type == "cpu"
    for device in ("cuda", "cuda:1"):
        with pytest.raises(ValueError, match=f'device must be "cpu" or "auto", because torch .* finds no GPU, got .*{device}'):
            Loader(rows_only, device=device)


def test_ranks_come_from_the_environment(rows_only: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = batches_of(rows_only, rank=1, world_size=2)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert samples(batches_of(rows_only)) == samples(expected)
    assert samples(batches_of(rows_only, rank=0, world_size=1)) != samples(expected), "arguments win"
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(ValueError, match=r"must be integers, got .*WORLD_SIZE='two'"):
        Loader(rows_only)


# -------------------------------------------------------------------------------------------------------------- figures


def test_stats_are_plain_and_plausible(demo: Path) -> None:
    with Loader(demo, batch_size=32, delta_timestamps={TOP: [-0.05, 0.0]}) as loader:
        before = loader.stats()
        assert before["batches"] == before["frames"] == 0
        assert before["first_batch_s"] is None
        count = sum(1 for _ in loader)
        stats = loader.stats()
    json.dumps(stats)
    assert set(before) == set(stats) >= {
        "batches", "samples", "frames", "clips", "decoded_frames", "wait_s", "first_batch_s", "decode_s", "plan_s",
        "starved_s", "padded", "substituted", "route_changes", "resident_bytes",
        "read_s", "pack_s", "resize_s", "rows_s", "gather_s", "graph_s", "training_s",
    }  # fmt: skip
    assert stats["batches"] == count == len(loader)
    assert stats["samples"] >= 32 * count
    assert stats["frames"] == 3 * stats["samples"]
    assert stats["decoded_frames"] >= 0.5 * stats["frames"]  # a step and its neighbour may be the same frame
    assert stats["first_batch_s"] > 0
    assert stats["wait_s"] > 0
    for stage in ("read_s", "pack_s", "decode_s", "rows_s", "gather_s", "plan_s", "starved_s", "graph_s", "training_s"):
        assert stats[stage] > 0, stage
    assert stats["starved_s"] + stats["graph_s"] <= stats["wait_s"], "the parts of a thread's time do not overlap"
    assert (stats["substituted"], stats["padded"], stats["route_changes"]) == (0, 0, 0)
    held = stats["row_bytes"] + stats["index_bytes"] + stats["encoded_bytes"]
    assert 0 < held == stats["resident_bytes"] - stats["decoded_bytes"] < 10e6
    assert stats["decoded_bytes"] <= loader.dataset.num_frames * len(loader.dataset.cameras) * 128 * 160 * 3


def test_everything_public_is_listed_and_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(dali_stream, "augment", raising=False)  # another test may have imported it
    public = [name for name in dir(dali_stream) if not name.startswith("_")]
    assert public == dali_stream.__all__ == sorted(dali_stream.__all__)
    for name in public:
        found = getattr(dali_stream, name)
        if inspect.isclass(found):  # a class that a docstring names is one that a reader can have
            text = f"{inspect.getdoc(found)} {inspect.getdoc(found.__init__)}"
            assert set(re.findall(r"`([A-Z][a-z]\w+)`", text)) <= set(public), name
    with pytest.raises(AttributeError, match=r"'dali_stream' has no attribute 'Loaders'\. Available: .*, Loader, "):
        dali_stream.Loaders  # noqa: B018


def test_what_a_loader_is_of(demo: Path) -> None:
    dataset = Dataset(demo)
    with Loader(dataset, batch_size=4) as loader:
        assert loader.dataset is dataset
    with Loader(str(demo), batch_size=4) as loader:
        assert loader.dataset.fingerprint == dataset.fingerprint
        assert isinstance(loader.routes[TOP], dali_stream.types.Route)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, "batch_size must be a positive integer, got 0"),
        ({"batch_size": 2.5}, "batch_size must be a positive integer, got 2.5"),
        ({"batch_size": True}, "batch_size must be a positive integer, got True"),
        ({"image_dtype": "float16"}, "image_dtype must be one of 'float32', 'uint8', got 'float16'"),
        ({"image_size": 224}, r"image_size must be \(height, width\) or None, got 224"),
        ({"image_size": (224,)}, r"image_size must be .*, got \(224,\)"),
        ({"image_size": (224, 0)}, "the width of image_size must be a positive integer, got 0"),
        ({"shuffle": "random"}, "shuffle must be .*, got 'random'"),
        ({"seed": None}, "seed must be .*, got None"),
        ({"consumers": 0}, "consumers must be a positive integer, got 0"),
        ({"episode_pool_size": 0}, "episode_pool_size must be a positive integer, got 0"),
        ({"device": "gpu"}, "device must be .*, got 'gpu'"),
        ({"device": "cpu:1"}, "device must be .*, got 'cpu:1'"),
        ({"decode": "nvdec"}, "decode must be one of 'auto', 'dali', 'torchcodec', 'torchcodec-cuda', got 'nvdec'"),
        ({"num_threads": 0}, "num_threads must be a positive integer, got 0"),
        ({"prefetch": 0}, "prefetch must be a positive integer, got 0"),
        ({"memory_budget": "lots"}, "memory_budget must be .*, got 'lots'"),
        ({"memory_budget": 0}, "memory_budget must be a positive number of bytes, .*, got 0"),
        ({"last_batch": "keep"}, "last_batch must be one of 'drop', 'partial', 'pad', got 'keep'"),
        ({"on_error": "skip"}, "on_error must be one of 'raise', 'substitute', got 'skip'"),
        ({"rank": 1}, "rank and world_size must both be passed or both be None, got 1 and None"),
        ({"rank": 0, "world_size": 0}, "rank must be at least 0 and below world_size, got rank=0 and world_size=0"),
        ({"rank": 2, "world_size": 2}, "rank must be at least 0 and below world_size, got"),
        ({"rank": 0, "world_size": 7, "consumers": 32}, "must divide consumers=32, got 7. Allowed .* 1, 2, 4, 8, 16, 32"),
        ({"delta_timestamps": {"nothing": [0.0]}}, "Unknown key 'nothing' in delta_timestamps"),
        ({"delta_timestamps": {"action": [0.03]}}, "multiples of 1/fps"),
    ],
)
def test_bad_arguments_are_refused(rows_only: Dataset, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Loader(rows_only, **arguments)


OWNERS: tuple[Any, ...] = (Dataset, dali_stream.Mixture, Loader, dali_stream.FrameSampler, dali_stream.Transformed)
ANSWERING: tuple[Any, ...] = (
    *OWNERS,
    Order,
    dali_stream.MixtureOrder,
    Normalizer,
    dali_stream.tools.prepare,
)


def advice_for(called: Any, name: str) -> str:
    """The error for an unknown argument, without the list of the arguments that there are."""
    with pytest.raises(TypeError, match=f"^{called.__name__} has no argument '{name}'") as refused:
        called(**{name: 1})
    return str(refused.value).partition(" Its arguments: ")[0]


@pytest.mark.parametrize("called", ANSWERING, ids=lambda called: called.__name__)
def test_an_argument_of_another_class_is_answered_with_that_class(called: Any) -> None:
    own = inspect.signature(called).parameters
    arguments = {owner.__name__: list(inspect.signature(owner).parameters) for owner in OWNERS}
    for name in {name for names in arguments.values() for name in names} - set(own):
        named = re.findall(rf"(\w+)\((?:\.\.\., )?{name}=", advice_for(called, name))
        assert named == [owner for owner, names in arguments.items() if name in names], name


def test_an_argument_that_resembles_one_of_another_class_is_answered_with_both() -> None:
    assert advice_for(Loader, "episode").endswith(" Did you mean 'episodes'? Pass it to Dataset(..., episodes=...).")


def inverted(frame: torch.Tensor) -> torch.Tensor:
    return 1 - frame


@pytest.mark.parametrize(
    ("called", "name"),
    [
        (Dataset, "delta_timestamps"),
        (Dataset, "image_transforms"),
        (Dataset, "root"),
        (Dataset, "batch_size"),
        (Loader, "episodes"),
        (Loader, "cache_dir"),
        (Loader, "give_up_after_s"),
        (Loader, "storage_options"),
        (Loader, "transform"),
    ],
)
def test_advice_on_an_argument_of_another_class_is_followed(demo: Path, tmp_path: Path, called: Any, name: str) -> None:
    windows = {TOP: [-0.1, 0.0]}
    values = {"delta_timestamps": windows, "image_transforms": inverted, "root": demo, "batch_size": 8, "episodes": [2]}
    values |= {"cache_dir": tmp_path, "give_up_after_s": 5.0, "storage_options": {}, "transform": inverted}
    advised = re.search(r"(\w+)\(([^)]*)\)", advice_for(called, name))
    assert advised
    owner, passed = advised[1], advised[2]
    given = {name: values[name]} if f"{name}=" in passed else {}
    folder = values[name] if name == "root" and passed == "uri" else demo
    dataset = Dataset(folder, **(given if owner == "Dataset" and given else {"episodes": [1]}))
    loader = Loader(dataset, **{"batch_size": 16, "device": "cpu"} | (given if owner == "Loader" else {}))
    with loader:
        batch = next(iter(loader))
        if owner == "Transformed":
            with dali_stream.Transformed(Loader(dataset, batch_size=16), values[name], keys=dataset.cameras) as batches:
                changed = next(iter(batches))
            assert torch.equal(changed[TOP], 1 - batch[TOP])
            batch |= {TOP: 1 - changed[TOP]}
    steps = [round(second * dataset.fps) for second in windows[TOP]] if name == "delta_timestamps" else None
    check_identities(batch, TOP, steps, read_lengths(demo))
    assert len(batch["index"]) == (8 if name == "batch_size" else 16)
    if owner == "Dataset" and name == "episodes":
        assert set(batch["episode_index"].tolist()) == {2}


def test_arguments_of_lerobots_datasets_are_answered() -> None:
    theirs = ["repo_id", "root", "image_transforms", "video_backend", "download_videos", "force_cache_sync", "streaming"]
    for name in (*theirs, "return_uint8", "depth_output_unit", "buffer_size", "max_num_shards", "rng"):
        for called in OWNERS:
            advice = advice_for(called, name)
            assert re.search(r" (Use|Pass|Leave) .*\.$", advice), name
            for owner, argument in re.findall(r"(\w+)\((\w+)=", advice):
                assert argument in inspect.signature(getattr(dali_stream, owner)).parameters, advice


@pytest.mark.parametrize("cls", [Loader, Dataset, dali_stream.FrameSampler, Order, Normalizer])
def test_unknown_arguments_are_named_with_those_that_there_are(cls: type) -> None:
    own = list(inspect.signature(cls).parameters)
    wrong = own[-1] + "s"
    with pytest.raises(TypeError) as refused:
        cls(**{wrong: 1})
    start = f"{cls.__name__} has no argument {wrong!r}. Did you mean {own[-1]!r}?"
    assert str(refused.value) == f"{start} Its arguments: {', '.join(own)}"
    with pytest.raises(TypeError, match=f"{cls.__name__} has no argument 'unheard_of'. Its arguments"):
        cls(unheard_of=4)


@pytest.mark.parametrize("cls", [Dataset, dali_stream.FrameSampler])
def test_drop_first_and_drop_last_are_answered_with_the_numbers_of_frames(cls: type) -> None:
    for name, advice in (
        ("drop_first", r"Use drop_n_first_frames= of a Dataset or a FrameSampler\."),
        ("drop_last", r"Use drop_n_last_frames= of a Dataset or a FrameSampler for frames, .* for batches\. .*\."),
    ):
        with pytest.raises(TypeError, match=f"{cls.__name__} has no argument '{name}'\\. {advice} Its arguments: "):
            cls([3, 4], **{name: True})


def test_arguments_of_a_dataloader_are_answered_with_those_of_a_loader(rows_only: Dataset) -> None:
    """All arguments that PyTorch's DataLoader has and a Loader has not."""
    own, theirs = (list(inspect.signature(cls).parameters) for cls in (Loader, torch.utils.data.DataLoader))
    foreign = set(theirs) - set(own)
    assert {"num_workers", "drop_last", "prefetch_factor", "pin_memory", "sampler", "collate_fn"} <= foreign
    for name in foreign:
        with pytest.raises(TypeError, match=rf"Loader has no argument '{name}'\. (Use|Leave|Change) .*\. Its arguments: "):
            Loader(rows_only, **{name: 1})
    for name, hint in (
        ("num_workers", r"Use Loader\(num_threads=\),"),
        ("drop_last", r"Loader\(last_batch=\)"),
        ("prefetch_factor", r"Loader\(prefetch=\)"),
    ):
        with pytest.raises(TypeError, match=hint):
            Loader(rows_only, **{name: 1})


@pytest.mark.parametrize("several", [list, tuple])
def test_several_datasets_in_a_list_are_answered_with_a_mixture(rows_only: Dataset, several: type) -> None:
    for datasets in (several([rows_only, rows_only]), several(["a", "b"]), several()):
        with pytest.raises(
            ValueError, match=rf"must be one dataset or a Mixture, got a {several.__name__}\. .*Loader\(dali_stream.Mix"
        ):
            Loader(datasets)


# ------------------------------------------------------------------------------------- windows in frames---------------


def warnings_of(
    caplog: pytest.LogCaptureFixture, dataset: Dataset | dali_stream.Mixture, window: Any, **arguments: Any
) -> list[str]:
    caplog.clear()
    Loader(dataset, batch_size=4, delta_timestamps={"action": window}, **arguments).close()
    return [record.getMessage() for record in caplog.records if "delta_timestamps" in record.getMessage()]


def test_a_window_of_frame_numbers_causes_a_warning(rows_only: Dataset, caplog: pytest.LogCaptureFixture) -> None:
    longest = int(rows_only.lengths.max() / rows_only.fps)  # seconds
    assert 3 <= longest <= 6
    beyond = sum(step * rows_only.fps >= rows_only.lengths.max() for step in range(16))
    [message] = warnings_of(caplog, rows_only, range(16))
    assert message.startswith(
        f"delta_timestamps['action'] is in seconds, and {beyond} of its 16 steps lie beyond the end or the beginning of every "
        "episode"
    )
    assert "divide them by dataset.fps" in message
    assert warnings_of(caplog, rows_only, [-3 * longest, -2 * longest, 0])
    assert warnings_of(caplog, dali_stream.Mixture({"a": rows_only}), range(16))
    assert not warnings_of(caplog, rows_only, range(16), rank=1, world_size=2)  # rank 0 logs it


def test_a_window_of_seconds_causes_no_warning(rows_only: Dataset, caplog: pytest.LogCaptureFixture) -> None:
    fps, longest = rows_only.fps, int(rows_only.lengths.max() / rows_only.fps)
    for window in (
        [i / fps for i in range(16)],
        [i / fps for i in range(1000)],  # longer than every episode, but not in whole seconds
        range(longest + 1),  # whole seconds within the longest episode
        range(-longest - 2, 1),  # mostly within it: a past a second apart, as of a reward model
        [-1_000_000],  # the first frame of the episode
        [-1_000_000, 0],
        [-1_000_000, -2, -1, 0],
        [0.0],
    ):
        assert warnings_of(caplog, rows_only, window) == []


# ---------------------------------------------------------------------------------------------------------------- repr


def test_a_loader_is_shown_in_one_line(demo: Path, rows_only: Dataset) -> None:
    with Loader(demo, batch_size=50, rank=1, world_size=2, device="cpu") as loader:
        expected = f"Loader('{demo}': 5 batches of 50; {TOP}, {SIDE} on torchcodec; rank 1 of 2)"
        assert repr(loader) == str(loader) == expected
        next(iter(loader))
        assert repr(loader) == expected
    assert repr(loader) == expected[:-1] + "; closed)"
    with Loader(rows_only, batch_size=523) as loader:
        assert repr(loader) == f"Loader('{demo}': 1 batch of 523; rank 0 of 1)"
    mixture = dali_stream.Mixture({f"dataset {i}": rows_only for i in range(50)})
    with Loader(mixture) as loader:
        assert len(repr(loader)) < 200
        assert "\n" not in repr(loader)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"cameras": ["wrist"]}, f"Unknown camera 'wrist'. Available: {TOP}, {SIDE}"),
        ({"cameras": TOP}, "cameras must be a list of keys, got"),
        ({"episodes": [0, 6]}, "Unknown episode 6. Available: 6 episodes, from 0 to 5"),
        ({"episodes": [-1]}, "Unknown episode -1"),
        ({"episodes": []}, "a list of one or more episode indices"),
        ({"episodes": [1, 1]}, "episodes must have each index once, got 1 more than once"),
        ({"episodes": [1.0]}, "a list of one or more episode indices"),
        ({"revision": "main"}, "revision must be .*, got 'main'"),
    ],
)
def test_bad_selections_are_refused(demo: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Dataset(demo, **arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rank": "0", "world_size": 1}, "rank and world_size must be integers, got '0' and 1"),
        ({"rank": 0.0, "world_size": 1}, "rank and world_size must be integers, got 0.0 and 1"),
        ({"delta_timestamps": [1]}, r"delta_timestamps must be a dict .*, got \[1\]"),
        ({"dali_graph": 3}, "dali_graph must be a function"),
    ],
)
def test_arguments_of_the_wrong_kind(demo: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Loader(demo, batch_size=8, **arguments)
