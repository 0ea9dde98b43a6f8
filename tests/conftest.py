"""Fixtures that several test files share."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from loader_data import write_odd

from dali_stream.demo import write_demo

SHARED = Path(__file__).parents[2] / "shared"


@pytest.fixture(autouse=True)
def _one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher around the test run must not make its tests one rank of several, nor pytest-xdist their tables narrow."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six episodes of AV1 with GOP 2, 128x160, two cameras. Read only: take `demo_copy` to change it."""
    return write_demo(tmp_path_factory.mktemp("demo") / "av1", episodes=6, size=(128, 160))


@pytest.fixture
def demo_copy(demo: Path, tmp_path: Path) -> Path:
    """The demo in a folder of the test's own."""
    return copied(demo, tmp_path)


@pytest.fixture(scope="session")
def vp9_demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two episodes of VP9 with GOP 12, which DALI decodes on a CPU. Read only."""
    return write_demo(tmp_path_factory.mktemp("demo") / "vp9", episodes=2, size=(128, 160), codec="vp9", gop=12)


@pytest.fixture(scope="session")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """21 frames in 4 episodes without video, with columns of every kind (see `write_odd`). Read only."""
    return write_odd(tmp_path_factory.mktemp("odd") / "data")


@pytest.fixture(scope="session")
def g1() -> Path:
    """A real recording: 12 episodes of a humanoid, AV1. Not part of the repository."""
    root = SHARED / "data/g1"
    if not root.is_dir():
        pytest.skip(f"the recording is not at {root}")
    return root


def copied(root: Path, folder: Path) -> Path:
    """A copy of a dataset below `folder`."""
    return Path(shutil.copytree(root, folder / root.name))
