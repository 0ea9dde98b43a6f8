"""`memory_format`: the same frames with other strides, on every way that a batch is made."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.datasets import TOP
from support.slow import slow
from torch.utils.data import default_collate

from dali_stream import Dataset, Loader

GRAPH = {"without": None, "with": lambda nodes: nodes}


def batches(root: Path, memory_format: str, graph: Any, **arguments: Any) -> list[dict[str, Any]]:
    settings: dict[str, Any] = {"batch_size": 6, "consumers": 2, "device": "cpu"} | arguments
    with Loader(Dataset(root, episodes=[0]), memory_format=memory_format, dali_graph=graph, **settings) as loader:
        return [batch for _ in range(2) for batch in loader]


@pytest.mark.parametrize("graph", GRAPH)
@pytest.mark.parametrize("windows", [None, {TOP: [-0.1, 0.0, 0.1]}], ids=["single", "windows"])
@pytest.mark.parametrize("image_dtype", ["float32", slow("uint8")])
def test_frames_are_the_same_with_the_strides_asked_for(demo: Path, graph: str, windows: Any, image_dtype: str) -> None:
    arguments = {"image_dtype": image_dtype, "image_size": (24, 40), "delta_timestamps": windows}
    plain = batches(demo, "channels_last", GRAPH[graph], **arguments)
    contiguous = batches(demo, "contiguous", GRAPH[graph], **arguments)
    assert len(plain) == len(contiguous) > 2
    for a, b in zip(plain, contiguous, strict=True):
        assert torch.equal(a[TOP], b[TOP])
        assert a[TOP].movedim(-3, -1).is_contiguous()
        assert b[TOP].stride() == default_collate(list(b[TOP])).stride()
        assert b[TOP].is_contiguous()


def test_another_format_is_refused(demo: Path) -> None:
    with pytest.raises(ValueError, match=r"memory_format must be one of .*got 'nhwc'"):
        Loader(demo, memory_format="nhwc")


DDP = """
import sys, torch
import torch.distributed as dist
from dali_stream import Loader
dist.init_process_group("gloo", rank=0, world_size=1, init_method=f"file://{sys.argv[2]}")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Conv2d(3, 8, 1))
with Loader(sys.argv[1], batch_size=4, image_size=(24, 40), device="cpu", memory_format=sys.argv[3]) as loader:
    for _, batch in zip(range(3), loader):
        model(batch["observation.images.top"]).mean().backward()
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize("memory_format", ["channels_last", slow("contiguous")])
def test_ddp_does_not_warn_of_strides_of_gradients(demo: Path, tmp_path: Path, memory_format: str) -> None:
    arguments = [demo, tmp_path / "store", memory_format]
    threads = os.environ | {"OMP_NUM_THREADS": "2"}  # with one, oneDNN computes gradients of another layout
    done = subprocess.run([sys.executable, "-c", DDP, *map(str, arguments)], capture_output=True, text=True, env=threads)
    assert done.returncode == 0, done.stderr
    assert ("Grad strides do not match" in done.stderr) == (memory_format == "channels_last")
