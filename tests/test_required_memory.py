"""Batches that cannot fit in memory are refused at once, and what is refused would have needed that memory."""

from __future__ import annotations

import re
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from support.datasets import TOP
from support.killing import start
from support.slow import slow

from dali_stream import Dataset, Loader, MemoryBudgetError
from dali_stream.pipeline.layout import Layout
from dali_stream.run.required_memory import required_memory
from dali_stream.system.memory_limit import memory_limit
from dali_stream.tools.environment import memory_bytes

# ---------------------------------------------------------------------------------------------------------- the estimate


def test_a_batch_larger_than_the_memory_is_refused_with_the_numbers(demo: Path) -> None:
    """Frames of 128x160, float32: 0.98 MB for a sample of four."""
    arguments: dict[str, Any] = {"last_batch": "pad", "prefetch": 1, "device": "cpu"}
    dataset = Dataset(demo, cameras=[TOP], episodes=[0])
    size, frame = 10_000_000, 128 * 160 * 3
    windows = {TOP: [-0.05, 0.0, 0.05, 0.1]}
    with pytest.raises(MemoryBudgetError) as raised:
        Loader(dataset, batch_size=size, delta_timestamps=windows, **arguments)
    batch, decoded = size * 4 * 4 * frame, dataset.num_frames * frame + size * 4 * 32  # with 32 bytes that locate each frame
    total, one, other, limit = map(float, re.findall(r"([\d.]+) GiB", str(raised.value)))
    assert [total, one, other] == pytest.approx([(batch + decoded) / 2**30, batch / 2**30, decoded / 2**30], abs=0.01)
    actual = memory_limit()
    assert limit == pytest.approx(actual.size / 2**30, abs=0.01)
    assert f"batch_size={size} needs at least" in str(raised.value)
    assert 'image_dtype="uint8"' in str(raised.value)
    with pytest.raises(MemoryBudgetError) as as_uint8:
        Loader(dataset, batch_size=size, delta_timestamps=windows, image_dtype="uint8", **arguments)
    assert float(re.findall(r"([\d.]+) GiB", str(as_uint8.value))[1]) == pytest.approx(one / 4, abs=0.01)
    assert "image_dtype" not in str(as_uint8.value)


def test_a_batch_size_that_no_batch_reaches_is_not_refused(demo: Path) -> None:
    """With last_batch="partial", a batch has at most the frames of the epoch."""
    dataset, limit = Dataset(demo, cameras=[TOP], episodes=[0]), memory_limit()
    size = limit.size // (128 * 160 * 3) // 2  # samples that take twice the memory as float32
    with Loader(dataset, batch_size=size, last_batch="partial", prefetch=1, device="cpu", shuffle=False) as loader:
        assert len(next(iter(loader))["index"]) == dataset.num_frames


def test_frames_count_at_the_size_to_which_they_are_resized(demo: Path) -> None:
    arguments: dict[str, Any] = {"batch_size": 10_000_000, "last_batch": "pad", "device": "cpu"}
    dataset = Dataset(demo, cameras=[TOP], episodes=[0])
    with pytest.raises(MemoryBudgetError):
        Loader(dataset, **arguments)
    Loader(dataset, image_size=(1, 1), **arguments).close()


def _unchanged(nodes: dict[str, Any]) -> dict[str, Any]:
    return nodes


def required_and_taken(root: Path, arguments: dict[str, Any], has_graph: bool, pipe: Connection) -> None:
    """Send the estimate of a Loader, and how much the memory of this process grows until its batches are made."""
    options: dict[str, Any] = {"device": "cpu", "dali_graph": _unchanged if has_graph else None}
    with Loader(root, batch_size=1, image_size=(8, 8), **options) as warm:  # loads libraries
        next(iter(warm))
    with Loader(root, image_size=(256, 320), **options, **arguments) as loader:
        required = sum(required_memory(Layout(loader._config, loader.routes)))
        before = memory_bytes("VmRSS")
        batch = next(batches := iter(loader))
        frames = len(batch["index"]) * loader._config.in_progress * len(loader.dataset.cameras)
        while loader.stats()["decoded_frames"] < frames:  # a training step that lasts until the batches in progress are made
            pass
        pipe.send((required, memory_bytes("VmRSS") - before))
        batches.close()


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
@pytest.mark.parametrize(
    ("arguments", "has_graph"),
    [
        slow({"batch_size": 64, "prefetch": 2}, False),
        slow({"batch_size": 64, "prefetch": 2, "image_dtype": "uint8"}, False),
        slow({"batch_size": 32, "prefetch": 3, "delta_timestamps": {TOP: [-0.1, -0.05, 0.0]}}, False),
        slow({"batch_size": 64, "prefetch": 2}, True),
    ],
)
def test_the_estimate_does_not_exceed_what_a_loader_takes(demo: Path, arguments: dict[str, Any], has_graph: bool) -> None:
    process, pipe = start(required_and_taken, demo, arguments, has_graph)
    required, taken = pipe.recv()
    process.join()
    assert 40 << 20 < required <= taken


# ------------------------------------------------------------------------------------------------- the limit, from cgroups


def written(root: Path, groups: str, files: dict[str, str]) -> Path:
    """A file system with the cgroups of this process, and the files of their limits."""
    for name, text in {"proc/self/cgroup": groups, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


V2, V1 = "sys/fs/cgroup", "sys/fs/cgroup/memory"


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        # Version 2: the limit of the process's own cgroup, or of one that contains it.
        ("0::/job/step\n", {f"{V2}/job/step/memory.max": "1000\n", f"{V2}/job/memory.max": "max\n"}, 1000),
        ("0::/job/step\n", {f"{V2}/job/step/memory.max": "2000\n", f"{V2}/job/memory.max": "1500\n"}, 1500),
        # In a container with a namespace of its own, and in one that sees the path of the host.
        ("0::/\n", {f"{V2}/memory.max": "3000\n"}, 3000),
        ("0::/docker/abc\n", {f"{V2}/memory.max": "3000\n"}, 3000),
        # Version 1, beside an empty hierarchy of version 2.
        ("5:cpu,cpuacct:/a\n4:memory:/a/b\n0::/\n", {f"{V1}/a/b/memory.limit_in_bytes": "4000\n"}, 4000),
        ("4:memory:/docker/abc\n", {f"{V1}/memory.limit_in_bytes": "5000\n"}, 5000),
        ("4:cpu,memory:/a\n", {f"{V1}/a/memory.limit_in_bytes": "6000\n"}, 6000),
    ],
)
def test_the_limit_is_that_of_the_cgroup(tmp_path: Path, groups: str, files: dict[str, str], expected: int) -> None:
    limit = memory_limit(written(tmp_path, groups, files))
    assert (limit.size, limit.owner) == (expected, "the cgroup of this process")


@pytest.mark.parametrize(
    ("groups", "files"),
    [
        ("0::/\n", {f"{V2}/memory.max": "max\n"}),
        ("0::/\n", {}),
        ("0::/gone\n", {f"{V2}/memory.max": ""}),
        ("4:memory:/\n", {f"{V1}/memory.limit_in_bytes": "9223372036854771712\n"}),  # none is set
        ("4:cpu:/a\n", {f"{V1}/memory.limit_in_bytes": "1000\n", f"{V2}/memory.max": "1000\n"}),  # not of this process
    ],
)
def test_without_a_limit_the_machine_has_one(tmp_path: Path, groups: str, files: dict[str, str]) -> None:
    psutil = pytest.importorskip("psutil")
    limit = memory_limit(written(tmp_path, groups, files))
    assert (limit.size, limit.owner) == (psutil.virtual_memory().total, "this machine")


def test_the_machine_alone_where_there_are_no_cgroups(tmp_path: Path) -> None:
    limit = memory_limit(tmp_path)
    assert limit.owner == "this machine"
