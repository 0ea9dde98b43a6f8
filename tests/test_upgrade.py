"""States and caches of the version before: they are read, or refused by name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from support.batches import equal
from support.servers import Server

import dali_stream
from dali_stream.cache.frame_folder import LAYOUT
from dali_stream.order.state import STATE_VERSION

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[1]

# Runs with the package of a commit. It stores one epoch in both caches, and saves states with the samples that follow them.
PROGRAM = """
import itertools
import sys

import dali_stream
import torch

package, url, root, folder = sys.argv[1:]
assert dali_stream.__file__.startswith(package), dali_stream.__file__
arguments = {"batch_size": 16, "seed": 5}
shown = {"image_size": (64, 80), "device": "cpu"}
saved = {}

dataset = dali_stream.Dataset(url, cache_dir=f"{folder}/bytes")
with dali_stream.Loader(dataset, frame_cache=f"{folder}/frames", **arguments, **shown) as loader:
    list(loader)
    batches = iter(loader)
    list(itertools.islice(batches, 3))
    saved["loader"] = loader.state_dict(), next(batches)

mixture = dali_stream.Mixture({"a": root, "b": root}, weights={"a": 2, "b": 1})
with dali_stream.Loader(mixture, **arguments, **shown) as loader:
    batches = iter(loader)
    list(itertools.islice(batches, 3))
    saved["mixture"] = loader.state_dict(), next(batches)

sampler = dali_stream.FrameSampler(dali_stream.Dataset(root), **arguments)
samples = iter(sampler)
list(itertools.islice(samples, 48))
saved["sampler"] = sampler.state_dict(step=3, batch_size=16), list(itertools.islice(samples, 16))
torch.save(saved, f"{folder}/saved.pt")
"""


def git(*arguments: str) -> bytes:
    """Output of git in the checkout. The test is skipped if git fails, as outside of a clone or in a shallow one."""
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, check=False)
    if done.returncode:
        pytest.skip(f"git {arguments[0]} found no earlier version: {done.stderr.decode().strip()}")
    return done.stdout


class Earlier(NamedTuple):
    """What the version before has written."""

    server: Server
    folder: Path
    saved: dict[str, tuple[Any, Any]]  # state and the samples that follow it


@pytest.fixture(scope="module")
def earlier(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Earlier]:
    """Run the newest version with a tag or, if none has one, the commit before this one; or the commit in UPGRADE_FROM."""
    versions = git("tag", "--merged", "HEAD~1", "--sort=-version:refname", "--list", "v*").decode().split()
    commit = os.environ.get("UPGRADE_FROM") or [*versions, "HEAD~1"][0]
    package, folder = tmp_path_factory.mktemp("package"), tmp_path_factory.mktemp("written")
    with tarfile.open(fileobj=BytesIO(git("archive", commit, "dali_stream"))) as archive:
        archive.extractall(package)
    with Server(small) as server:
        command = [sys.executable, "-c", PROGRAM, str(package), server.url, str(small), str(folder)]
        done = subprocess.run(
            command, env=os.environ | {"PYTHONPATH": str(package)}, cwd=folder, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{commit} cannot run the program of this test: {done.stderr}"
        yield Earlier(server, folder, torch.load(folder / "saved.pt", weights_only=True))


def resumed(source: Any, state: dict[str, Any]) -> bool:
    """Whether a state is accepted. An earlier version of states must be named."""
    if state["version"] == STATE_VERSION:
        source.load_state_dict(state)
        return True
    with pytest.raises(dali_stream.ResumeError, match=f"version of the state must be {STATE_VERSION}, got {state['version']}"):
        source.load_state_dict(state)
    return False


@pytest.mark.parametrize("kind", ["loader", "mixture"])
def test_a_run_continues_at_the_next_sample(kind: str, earlier: Earlier, small: Path) -> None:
    state, expected = earlier.saved[kind]
    mixture = dali_stream.Mixture({"a": small, "b": small}, weights={"a": 2, "b": 1})
    source = mixture if kind == "mixture" else dali_stream.Dataset(earlier.server.url)
    with dali_stream.Loader(source, batch_size=16, seed=5, image_size=(64, 80), device="cpu") as loader:
        if resumed(loader, state):
            assert equal(next(iter(loader)), expected)


def test_a_sampler_continues_at_the_next_sample(earlier: Earlier, small: Path) -> None:
    state, expected = earlier.saved["sampler"]
    sampler = dali_stream.FrameSampler(dali_stream.Dataset(small), batch_size=16, seed=5)
    if resumed(sampler, state):
        samples = iter(sampler)
        assert [next(samples) for _ in expected] == expected


def test_caches_are_used(earlier: Earlier, caplog: pytest.LogCaptureFixture) -> None:
    """No byte is fetched but one per file, which tells its version. No frame is decoded, or the log says why."""
    layouts = {json.loads(key.read_text())["layout"] for key in earlier.folder.glob("frames/*/key.json")}
    requests, sent = len(earlier.server.requests), earlier.server.sent
    dataset = dali_stream.Dataset(earlier.server.url, cache_dir=earlier.folder / "bytes")
    arguments: dict[str, Any] = {"batch_size": 16, "seed": 5, "image_size": (64, 80), "device": "cpu"}
    with dali_stream.Loader(dataset, frame_cache=earlier.folder / "frames", **arguments) as loader:
        delivered = sum(len(batch["index"]) for batch in loader)
        decoded = loader.stats()["decoded_frames"]
    assert delivered > 0
    assert earlier.server.sent - sent <= len(earlier.server.requests) - requests
    if layouts == {LAYOUT}:
        assert decoded == 0
    else:
        assert "frames that an earlier version of dali_stream has stored" in caplog.text
