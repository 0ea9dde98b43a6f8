"""`Transformed`: a function of each sample in worker processes, with random numbers that a resumed run repeats."""

from __future__ import annotations

import copy
import functools
import itertools
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.batches import equal
from support.datasets import SIDE, TOP
from support.slow import slow

from dali_stream import DaliStreamError, Dataset, Loader, Transformed

CAMERAS = (TOP, SIDE)
SMALL: dict[str, Any] = {"batch_size": 8, "image_size": (16, 24), "device": "cpu", "num_threads": 1, "prefetch": 2}


def noisy(frames: torch.Tensor) -> torch.Tensor:
    """Noise of all three generators."""
    return frames + torch.rand(frames.shape) + random.random() + float(np.random.random())


def sample_of(sample: dict[str, Any]) -> dict[str, Any]:
    """Another size, another dtype, an array, a number and a text."""
    frames = (sample[TOP][:, :8, :8] * 255).to(torch.uint8)
    return {
        "frames": frames,
        "state": sample["observation.state"].numpy() * 2,
        "index": sample["index"],
        "number": int(sample["index"]),
        "task": sample["task"].upper(),
        "noise": torch.rand(3),
    }


def fails_at(frame: int, sample: dict[str, Any], always: bool = False) -> dict[str, Any]:
    if always or sample["index"] == frame:
        raise KeyError("no such thing")
    return sample


class NotToQueue:
    """Value that ends a worker if it reaches the queue of results, which pickles in a thread.

    The queue drops a result that it cannot pickle, and the training process would wait for it forever.
    """

    def __reduce__(self) -> Any:
        if threading.current_thread() is not threading.main_thread():
            os._exit(1)
        return NotToQueue, ()


def locked(sample: dict[str, Any]) -> dict[str, Any]:
    return {"values": [NotToQueue(), threading.Lock()]}


def with_gradient(sample: dict[str, Any]) -> dict[str, Any]:
    with torch.enable_grad():
        return {"values": [NotToQueue(), torch.nn.Linear(1, 1)(torch.ones(1))]}


def learned(sample: dict[str, Any]) -> dict[str, Any]:
    return {"x": torch.nn.Linear(1, 1)(torch.ones(1))}


def killed_at(frame: int, sample: dict[str, Any]) -> dict[str, Any]:
    if sample["index"] == frame:
        os.kill(os.getpid(), signal.SIGKILL)
    return sample


class TextError(Exception):
    """Error without a text."""

    def __str__(self) -> str:
        raise KeyError("no text")


def without_text(sample: dict[str, Any]) -> dict[str, Any]:
    raise TextError


class Interrupted(torch.Tensor):
    """Tensor whose move to another device Ctrl-C interrupts."""

    is_moved = True

    def to(self, *arguments: Any, **options: Any) -> Any:
        if not self.is_moved:
            raise KeyboardInterrupt
        return super().to(*arguments, **options)


def interrupted(frame: torch.Tensor) -> torch.Tensor:
    return frame.as_subclass(Interrupted)  # type: ignore[arg-type]  # any subclass is allowed


def make(
    demo: Path,
    transform: Any = noisy,
    workers: int = 0,
    keys: Sequence[str] | None = CAMERAS,
    ahead: int = 2,
    **options: Any,
) -> Transformed:
    loader = Loader(Dataset(demo, episodes=[0, 1]), **(SMALL | options))
    return Transformed(loader, transform, keys=keys, num_workers=workers, prefetch=ahead, device="cpu")


def epochs(batches: Transformed, count: int = 1) -> list[dict[str, Any]]:
    return list(itertools.chain.from_iterable(itertools.repeat(batches, count)))


def same(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> bool:
    return len(found) == len(expected) and all(map(equal, found, expected))


def test_workers_deliver_the_batches_of_the_iterating_thread(demo: Path) -> None:
    with make(demo) as here, make(demo, workers=2) as there:
        expected, found = epochs(here, 2), epochs(there, 2)
    assert same(found, expected)
    with Loader(Dataset(demo, episodes=[0, 1]), **SMALL) as loader:
        plain = [batch for _ in range(2) for batch in loader]
    for batch, untouched in zip(expected, plain, strict=True):
        assert list(batch) == list(untouched)
        rest = {key: value for key, value in untouched.items() if key not in CAMERAS}
        assert equal({key: batch[key] for key in rest}, rest)
        noise = batch[TOP] - untouched[TOP]
        assert noise.min() >= 0
        assert noise.std() > 0.1
    assert not equal({TOP: expected[0][TOP]}, {TOP: expected[len(expected) // 2][TOP]})


@pytest.mark.parametrize("workers", [0, slow(2)])
def test_whole_samples_become_what_the_function_returns(demo: Path, workers: int) -> None:
    with make(demo, sample_of, workers, keys=None) as batches, Loader(Dataset(demo, episodes=[0, 1]), **SMALL) as loader:
        assert len(batches) == len(loader)
        for batch, plain in zip(batches, loader, strict=True):
            assert batch["frames"].shape == (8, 3, 8, 8)
            assert torch.equal(batch["frames"], (plain[TOP][..., :8, :8] * 255).to(torch.uint8))
            assert torch.equal(batch["state"], plain["observation.state"] * 2)
            assert batch["number"] == plain["index"].tolist()
            assert batch["task"] == [task.upper() for task in plain["task"]]
            assert len(batch["noise"].unique()) == 24


@pytest.mark.parametrize("workers", [0, slow(2)])
def test_a_resumed_run_repeats_the_random_numbers(demo: Path, workers: int) -> None:
    """On another number of ranks, and after a batch that the Loader had already passed."""
    options = {"consumers": 4, "batch_size": 4}
    with make(demo, world_size=1, rank=0, **options) as whole:
        expected = {int(i): frame for batch in whole for i, frame in zip(batch["index"], batch[TOP], strict=True)}
    with make(demo, workers=workers, world_size=1, rank=0, **options) as begun:
        assert begun.epoch == begun.batch_index == 0
        found = {}
        for batch in itertools.islice(begun, 4):
            found |= {int(i): frame for i, frame in zip(batch["index"], batch[TOP], strict=True)}
        state = begun.state_dict()
        assert (state["epoch"], state["position"]) == (begun.epoch, 16) == (0, 16)
        assert begun.batch_index == 4
    for rank in range(2):
        with make(demo, workers=workers if rank else 0, world_size=2, rank=rank, **(options | {"batch_size": 2})) as rest:
            rest.load_state_dict(state)
            for batch in rest:
                found |= {int(i): frame for i, frame in zip(batch["index"], batch[TOP], strict=True)}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[index], frame) for index, frame in expected.items())


@pytest.mark.slow
def test_epochs_go_on_as_those_of_a_loader(demo: Path, caplog: pytest.LogCaptureFixture) -> None:
    with make(demo) as whole:
        second = [epochs(whole), epochs(whole)][1]
        assert (whole.epoch, whole.batch_index) == (2, 0)
        assert whole.state_dict() == whole.loader.state_dict()
    with make(demo, workers=1) as left:
        for _ in itertools.islice(left, 3):
            pass
        assert (left.epoch, left.batch_index) == (0, 3)
        assert same(epochs(left), second)
        assert (left.epoch, left.batch_index) == (2, 0)


@pytest.mark.parametrize("workers", [0, slow(1)])
def test_random_numbers_of_training_stay(demo: Path, workers: int) -> None:
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    expected = torch.rand(1), random.random(), np.random.random()
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    with make(demo, workers=workers) as batches:
        epochs(batches)
    assert (torch.rand(1), random.random(), np.random.random()) == expected


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_names_the_sample(demo: Path, workers: int) -> None:
    message = r"^transform failed for the sample episode_index 0, frame_index 20, index 20: KeyError: 'no such thing'$"
    with make(demo, functools.partial(fails_at, 20), workers, keys=None, shuffle=False) as batches:
        given = []
        with pytest.raises(DaliStreamError, match=message) as raised:
            given.extend(batches)
        assert len(given) == 2
        assert "fails_at" in str(raised.value.__cause__) if workers else isinstance(raised.value.__cause__, KeyError)
        assert batches.state_dict()["position"] == 16


@pytest.mark.parametrize("workers", [0, slow(2)])
@pytest.mark.parametrize("epoch", [0, 1])
def test_a_failure_before_the_first_batch_leaves_the_state_at_the_beginning(demo: Path, workers: int, epoch: int) -> None:
    """Though the Loader is ahead."""
    with make(demo, workers=workers) as batches:
        for _ in range(epoch):
            epochs(batches)
        batches._end_workers()
        batches._function.transform, batches._function.keys = functools.partial(fails_at, -1, always=True), None
        with pytest.raises(DaliStreamError, match="no such thing"):
            next(iter(batches))
        assert (batches.epoch, batches.batch_index) == (epoch, 0)
        assert (batches.state_dict()["epoch"], batches.state_dict()["position"]) == (epoch, 0)


@pytest.mark.slow
def test_batches_before_an_error_of_the_loader_are_delivered(demo: Path, demo_copy: Path) -> None:
    video = demo_copy / f"videos/{SIDE}/chunk-000/file-001.mp4"  # it begins with episode 1
    data = bytearray(video.read_bytes())
    start = data.index(b"mdat") + 4
    data[start : start + len(data) // 2] = bytes(len(data) // 2)
    video.write_bytes(data[: video.stat().st_size])
    whole = Dataset(demo).lengths[0] // 8
    with make(demo, shuffle=False) as batches:
        expected = list(itertools.islice(batches, whole))
    with make(demo_copy, workers=2, shuffle=False) as batches:
        given = []
        with pytest.raises(DaliStreamError, match=f"{SIDE}: episode 1, frame 0: "):
            given.extend(batches)
        assert len(given) == whole
        assert batches.state_dict()["position"] == 8 * whole
    assert same(given, expected)


@pytest.mark.slow
def test_values_that_cannot_leave_a_worker_are_an_error(demo: Path) -> None:
    with make(demo, locked, 1, keys=None) as batches:
        with pytest.raises(DaliStreamError, match=r"^transform must return picklable values, got: .*lock"):
            next(iter(batches))
        batches._function.transform = with_gradient
        with pytest.raises(DaliStreamError, match=r"^transform must return picklable values, got: .*gradient.* Detach it$"):
            next(iter(batches))
        batches._function.transform = learned
        assert not next(iter(batches))["x"].requires_grad


@pytest.mark.parametrize("workers", [0, slow(1)])
def test_an_error_without_a_text_names_the_sample(demo: Path, workers: int) -> None:
    message = r"^transform failed for the sample episode_index 0, frame_index 0, index 0: TextError: its text cannot be made"
    with (
        make(demo, without_text, workers, keys=None, shuffle=False) as batches,
        pytest.raises(DaliStreamError, match=message),
    ):
        next(iter(batches))


def test_ctrl_c_while_a_batch_is_moved_does_not_lose_the_batch(demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with make(demo, noisy) as whole:
        expected = epochs(whole)
    with make(demo, interrupted, keys=[TOP]) as batches:
        iterator = iter(batches)
        next(iterator)
        monkeypatch.setattr(Interrupted, "is_moved", False)
        with pytest.raises(KeyboardInterrupt):
            next(iterator)
        state = batches.state_dict()
        assert (state["position"], batches.batch_index) == (8, 1)
    with make(demo, noisy) as rest:
        rest.load_state_dict(state)
        assert same(epochs(rest), expected[1:])


@pytest.mark.slow
def test_the_workers_are_those_of_the_process_that_started_them(demo: Path) -> None:
    """A forked process that closes or drops the batches does not end them."""
    with make(demo) as whole:
        expected = epochs(whole)
    with make(demo, workers=1) as batches:
        iterator = iter(batches)
        found = [next(iterator)]
        child = os.fork()
        if child == 0:
            try:
                signal.alarm(60)  # ends a child that hangs
                batches.close()
                del iterator  # the last reference to torch's iterator
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        told_to_end = batches._workers._iterator._workers_done_event  # type: ignore[union-attr]
        assert not told_to_end.is_set()  # otherwise, they would answer nothing, and this process would wait for them
        found += iterator
    assert same(found, expected)


@pytest.mark.slow
def test_more_batches_ahead_than_an_epoch_has(demo: Path) -> None:
    with make(demo) as here, make(demo, workers=1, ahead=10**9) as there:
        assert same(epochs(there, 2), epochs(here, 2))


@pytest.mark.slow
def test_closing_ends_the_workers_within_a_loop(demo: Path) -> None:
    others = multiprocessing.active_children()
    with make(demo, workers=1) as batches:
        iterator = iter(batches)
        next(iterator)
        [worker] = (child for child in multiprocessing.active_children() if child not in others)
        assert worker.is_alive()
    worker.join()
    with pytest.raises(DaliStreamError, match="closed"):
        next(iterator)


@pytest.mark.parametrize("workers", [0, slow(1)])
def test_one_iteration_at_a_time(demo: Path, workers: int) -> None:
    with make(demo, workers=workers) as batches:
        first = iter(batches)
        next(first)
        second = iter(batches)
        next(second)
        with pytest.raises(DaliStreamError, match=r"^Another iteration of this Loader has begun"):
            next(first)
        assert len(list(second)) == len(batches) - 1
    with pytest.raises(TypeError, match="cannot be copied or pickled"):
        copy.copy(batches)
    with pytest.raises(TypeError, match="has no items"):
        batches[0]


@pytest.mark.slow
def test_a_killed_worker_is_an_error_and_the_next_epoch_has_new_ones(demo: Path) -> None:
    with make(demo, functools.partial(killed_at, 20), 1, keys=None, shuffle=False) as batches:
        with pytest.raises(
            RuntimeError, match=r"DataLoader worker .* exited unexpectedly|^a worker process exited unexpectedly, so that"
        ):
            epochs(batches)
        batches._function.transform = functools.partial(killed_at, -1)
        assert len(epochs(batches)) == len(batches)


def ended() -> None:
    raise EOFError


class _OfAnEndedWorker:
    """A value that the training process cannot read, as if the worker with its memory ended at that moment."""

    def __reduce__(self) -> Any:
        return ended, ()


def result_of_an_ended_worker(sample: dict[str, Any]) -> dict[str, Any]:
    return {"x": _OfAnEndedWorker()}


@pytest.mark.slow
def test_a_worker_that_ends_while_its_result_is_read_is_an_error(demo: Path) -> None:
    with (
        make(demo, result_of_an_ended_worker, 1, keys=None) as batches,
        pytest.raises(RuntimeError, match=r"worker process exited unexpectedly, .* EOFError"),
    ):
        next(iter(batches))


def of_two_kinds(sample: dict[str, Any]) -> dict[str, Any]:
    return {"x": np.zeros(1, np.float32 if sample["index"] % 2 else np.float64)}


def of_two_keys(sample: dict[str, Any]) -> dict[str, Any]:
    return {f"x{int(sample['index']) % 2}": 1}


def sparse(sample: dict[str, Any]) -> dict[str, Any]:
    return {"x": torch.eye(2).to_sparse()}


def of_two_devices(sample: dict[str, Any]) -> dict[str, Any]:
    return {"x": torch.ones(2, device="meta" if sample["index"] % 2 else "cpu")}


ZERO, ONE, SEVEN = (f"episode_index 0, frame_index {n}, index {n}" for n in (0, 1, 7))
MISFITS = {
    of_two_kinds: rf"'x' in one shape and dtype for all samples, got \(1,\) .*64 for the sample {ZERO} and .*32 for .* {ONE}$",
    of_two_keys: rf"the same keys for all samples, got x0 for the sample {ZERO} and x1 for the sample {ONE}$",
    sparse: rf"values that can be stacked, got an error for 'x' of the samples {ZERO} to {SEVEN}: \w+: .*sparse",
    of_two_devices: rf"values that can be stacked, got an error for 'x' of the samples {ZERO} to {SEVEN}: \w+: .*meta",
}


@pytest.mark.parametrize(("transform", "workers"), [*((each, 0) for each in MISFITS), slow(sparse, 1), slow(of_two_keys, 1)])
def test_results_that_do_not_fit_together_name_samples(demo: Path, transform: Any, workers: int) -> None:
    with (
        make(demo, transform, workers, keys=None, shuffle=False) as batches,
        pytest.raises(DaliStreamError, match=f"^transform must return {MISFITS[transform]}"),
    ):
        next(iter(batches))


def test_results_must_fit_together(demo: Path) -> None:
    with make(demo, lambda frame: frame.numpy()[..., ::-1], keys=[TOP]) as batches:
        assert next(iter(batches))[TOP].shape == (8, 3, 16, 24)
    with (
        make(demo, lambda sample: {"x": torch.zeros(int(sample["index"]) % 3 + 1)}, keys=None) as batches,
        pytest.raises(DaliStreamError, match="transform must return 'x' in one shape and dtype for all samples, got"),
    ):
        next(iter(batches))
    with (
        make(demo, list, keys=None) as batches,
        pytest.raises(DaliStreamError, match=r"For a function of tensors, give"),
    ):
        next(iter(batches))
    with (
        make(demo, keys=["nothing"]) as batches,
        pytest.raises(ValueError, match=r"^keys must be keys of the batches, .*'nothing'$"),
    ):
        next(iter(batches))


def test_shared_memory_that_is_too_small_is_an_error(demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Docker gives a container 64 MB, and a process that uses more of it gets SIGBUS."""
    status = os.statvfs_result((4096, 4096, 10, 1, 1, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda _: status)
    with (
        make(demo, workers=1) as batches,
        pytest.raises(DaliStreamError, match=r"^/dev/shm must have .* MiB free for 3 batches .*move a frame_cache"),
    ):
        epochs(batches)


def test_arguments(demo: Path) -> None:
    with Loader(demo, **SMALL) as loader:
        with pytest.raises(ValueError, match=r"^transform must be picklable .*functools\.partial or a class"):
            Transformed(loader, lambda sample: sample, num_workers=1)
        with pytest.raises(ValueError, match=r"^keys must be a list of keys of a batch, got the text 'action'$"):
            Transformed(loader, noisy, keys="action")
        with pytest.raises(ValueError, match=r"^num_workers must be a nonnegative integer, got -1$"):
            Transformed(loader, noisy, num_workers=-1)
        with pytest.raises(ValueError, match=r"^prefetch must be a positive integer, got 0$"):
            Transformed(loader, noisy, prefetch=0)
        assert Transformed(loader, noisy).dataset is loader.dataset


PROGRAM = """
import sys, torch
from dali_stream import Loader, Transformed

def transform(frames):
    return frames * 2

loader = Loader(sys.argv[1], batch_size=8, device="cpu", num_threads=1)
batches = Transformed(loader, transform, keys=loader.dataset.cameras, num_workers=1)
for number, batch in enumerate(batches):
    print(number, flush=True)
"""


@pytest.mark.slow
def test_a_program_without_main_guard_is_told_so(small: Path, tmp_path: Path) -> None:
    (program := tmp_path / "program.py").write_text(PROGRAM)
    done = subprocess.run([sys.executable, program, small], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert 'must start under `if __name__ == "__main__":`' in done.stderr


def start_guarded(small: Path, folder: Path, end: str) -> subprocess.Popen[str]:
    """Start the program with a main guard. It ends with the line `end`."""
    head, body = PROGRAM.split("loader = ", 1)
    body = "\n".join(f"    {line}" for line in f"loader = {body}{end}".splitlines())
    (program := folder / "program.py").write_text(f'{head}\nif __name__ == "__main__":\n{body}\n')
    return subprocess.Popen([sys.executable, program, small], stdin=-1, stdout=-1, stderr=-1, text=True)


@pytest.mark.slow
def test_control_c_ends_program_and_workers(small: Path, tmp_path: Path) -> None:
    with start_guarded(small, tmp_path, "input()") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "0\n"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)  # ends when the workers have closed the pipes, too
    assert process.returncode in (1, -signal.SIGINT)
    assert errors.rstrip().endswith("KeyboardInterrupt")


@pytest.mark.slow
def test_idle_workers_end_with_a_killed_program(small: Path, tmp_path: Path) -> None:
    with start_guarded(small, tmp_path, "input('all')") as process:
        assert process.stdout is not None
        while process.stdout.read(1) != "a":
            pass
        process.kill()
        process.communicate(timeout=60)  # ends when the workers have closed the pipes, too
    assert process.returncode == -signal.SIGKILL


CACHED = """
import hashlib, json, shutil, sys
from dali_stream import DaliStreamError, Loader, Transformed

def doubled(frames):
    return frames * 2

def epochs(**arguments):
    loader = Loader(sys.argv[1], batch_size=4, image_size=(128, 160), device="cpu", num_threads=1, **arguments)
    with Transformed(loader, doubled, keys=loader.dataset.cameras, num_workers=1) as batches:
        for _ in range(2):
            for batch in batches:
                yield batch["index"].tolist(), *(hashlib.md5(batch[key].numpy()).hexdigest() for key in loader.dataset.cameras)

if __name__ == "__main__":
    for arguments in json.loads(sys.argv[2]):
        try:
            print(json.dumps(list(epochs(**arguments))))
        except DaliStreamError as error:
            print(json.dumps(str(error)))
        shutil.rmtree("/dev/shm/frames", ignore_errors=True)
"""


@pytest.mark.slow
def test_a_frame_cache_leaves_room_for_the_workers_in_a_small_shared_memory(small: Path, tmp_path: Path) -> None:
    """20 MB, which all frames together exceed. With a larger limit, the error names a way on."""
    (program := tmp_path / "program.py").write_text(CACHED)
    mounted = 'mount -t tmpfs -o size=20m tmpfs /dev/shm && exec "$@"'
    if not shutil.which("unshare") or subprocess.run(["unshare", "--mount", "true"], check=False).returncode:
        pytest.skip("mounting a small /dev/shm needs root")
    there = {"frame_cache": "/dev/shm/frames"}
    ways = [{"frame_cache": str(tmp_path / "frames")}, there | {"frame_cache_bytes": "6MiB"}]
    runs = json.dumps([{}, there, *ways, there | {"frame_cache_bytes": "1GiB"}])
    command = ["unshare", "--mount", "sh", "-c", mounted, "sh", sys.executable, program, small, runs]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    expected, *found, error = map(json.loads, done.stdout.splitlines())
    assert Dataset(small).num_frames * 2 * 128 * 160 * 3 > 20 * 2**20
    assert len(expected) == 2 * (Dataset(small).num_frames // 4)
    assert found == [expected] * 3
    assert "/dev/shm must have" in error
    assert "move a frame_cache from it to a disk or limit it with frame_cache_bytes" in error
