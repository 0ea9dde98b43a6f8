"""Fixtures that several test files share."""

from __future__ import annotations

import gc
import os

# Before torch is loaded, for programs that a test starts too. Otherwise torch's threads wait for each other by spinning, and
# where the test processes share the cores, stacking a few frames takes a second instead of milliseconds.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Thousands of Loaders are made, and a process for each of them would take minutes. `own_process` asks for one.
os.environ.setdefault("DALI_STREAM_IN_PROCESS", "1")

import re
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from support import decode_processes
from support.datasets import copied, write_odd
from support.videos import h264, recorded

from dali_stream.demo import write_demo

# Their fixtures are for all tests.
pytest_plugins = [
    "support.doctor",
    "support.driver",
    "support.gpu_machine",
    "support.stores",
    "support.traces",
    "support.train",
]

SHARED = Path(__file__).parents[2] / "shared"

# Files that take longest begin first: pytest-xdist hands out whole files, and one that comes last keeps a single core busy.
FIRST = (
    "ray",  # waits for most of its time
    "drill",
    "prepare_faults",
    "programs",
    "process_ends",
    "decode_processes",
    "selftest",
    "hostile",
    "process_start",
    "elastic",
    "examples",
    "recommended",
    "prepare_encoding",
    "doctor",
    "cli",
    "order",
    "transformed",
    "train",
    "doctor_dataset",
    "doctor_video",
    "mixture",
    "streaming",
    "prepare",
    "torchrun",
    "loader",
    "v2",
    "memory",
    "frame_cache",
    "install",
)


def pytest_configure() -> None:
    """Handle SIGINT. A shell that starts the tests with `&` ignores it, and programs that they start would, too."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Return the number of cores plus one, since many tests wait for servers and for programs that they start."""
    return len(os.sched_getaffinity(0)) + 1


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sorts by file; the order within a file stays."""
    places = {f"test_{name}": place for place, name in enumerate(FIRST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))


def pytest_collection_finish() -> None:
    """Freeze all objects imported so far, so that a garbage collection in a test does not traverse all of torch."""
    gc.freeze()


@pytest.fixture(autouse=True)
def _one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher around the test run must not make its tests one rank of several, nor pytest-xdist their tables narrow."""
    local = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "SLURM_STEP_ID")
    for name in ("RANK", "WORLD_SIZE", *local, "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    if accelerate := sys.modules.get("accelerate.state"):  # an Accelerator of an earlier test says that it is the only process
        accelerate.AcceleratorState._reset_state()
        accelerate.PartialState._reset_state()


@pytest.fixture(scope="session", autouse=True)
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Folder that all processes of this run share. `support.videos.encode` finds its path in the environment."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "written"
    folder.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WRITTEN_BY_TESTS", str(folder))
        yield folder


@pytest.fixture(scope="session")
def written(shared_folder: Path) -> Callable[..., Path]:
    """Write a demo dataset, or return the one with these settings if a process of this run has written it. Read only."""

    def write(**settings: Any) -> Path:
        root = shared_folder / re.sub(r"\W+", "-", str(settings)).strip("-")
        with FileLock(f"{root}.lock"):
            if not root.exists():
                shutil.rmtree(unfinished := root.with_name(f"unfinished-{root.name}"), ignore_errors=True)
                write_demo(unfinished, **settings).rename(root)
        return root

    return write


@pytest.fixture(scope="session")
def demo(written: Callable[..., Path]) -> Path:
    """Six episodes of AV1 with GOP 2, 128x160, two cameras. Read only: take `demo_copy` to change it."""
    return written(episodes=6, size=(128, 160))


@pytest.fixture
def demo_copy(demo: Path, tmp_path: Path) -> Path:
    """The demo in a folder of the test's own."""
    return copied(demo, tmp_path)


@pytest.fixture(scope="session")
def vp9_demo(written: Callable[..., Path]) -> Path:
    """Two episodes of VP9 with GOP 12, which DALI decodes on a CPU. Read only."""
    return written(episodes=2, size=(128, 160), codec="vp9", gop=12)


@pytest.fixture(scope="session")
def h264_demo(written: Callable[..., Path]) -> Path:
    """Four episodes of H.264 with GOP 12 and B-frames; the first two are those of `vp9_demo`. Read only."""
    return written(episodes=4, size=(128, 160), codec="h264", gop=12)


@pytest.fixture(scope="session")
def small(written: Callable[..., Path]) -> Path:
    """Two episodes of AV1, two cameras: of one in one file, of the other in two. Read only."""
    return written(episodes=2, size=(120, 128))


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two episodes of H.264 with GOP 12 in one file, as LeRobot writes them. Read only: take `root` to change it."""
    return recorded(tmp_path_factory.mktemp("plain"), h264(12))


@pytest.fixture
def root(plain: Path, tmp_path: Path) -> Path:
    """`plain` in a folder of the test's own."""
    return copied(plain, tmp_path)


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


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    """Restore the handlers of signals, which programs that run in this process replace."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def remote(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of frames that decode processes have sent to Loaders of this process. They decode all clips."""
    return decode_processes.use(monkeypatch)
