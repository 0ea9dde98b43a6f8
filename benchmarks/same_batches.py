"""Compare the batches, orders and states of this checkout with those of an earlier commit, bit for bit.

    python benchmarks/same_batches.py COMMIT [--data NAME=ROOT ...] [--case PART ...]

Use it while code below the public API is rewritten. It writes demo datasets once, checks the commit out into a temporary
folder, and lets each side hash the same cases in a process of its own: plain, resized and normalized frames, windows, ranks,
all orders, little memory, partial and padded batches, HTTP, substitutes, mixtures, images in rows, v2.1, and resumed runs.

The exit code is 1 if a case differs or fails on this checkout.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
ROOT = HERE.parents[1]
BATCHES = 6  # per part of an epoch


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("commit", help="a commit of this repository")
    parser.add_argument("--data", action="append", default=[], metavar="NAME=ROOT", help="a local dataset that is kept")
    parser.add_argument("--case", nargs="+", default=[], metavar="PART", help="cases whose names contain one of these texts")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        written = write_datasets(folder / "data") | {
            name: Path(root).resolve() for name, _, root in (entry.partition("=") for entry in arguments.data)
        }
        before = folder / "before"
        run("git", "-C", str(ROOT), "worktree", "add", "--quiet", "--detach", str(before), arguments.commit)
        try:
            hashes = [hashed(checkout, written, folder, arguments.case) for checkout in (before, ROOT)]
        finally:
            run("git", "-C", str(ROOT), "worktree", "remove", "--force", str(before))
    return report(*hashes)


def report(before: dict[str, list[str]], after: dict[str, list[str]]) -> int:
    """Print the cases that differ. Return the exit code."""
    wrong = 0
    for name in before:
        old, new = before[name], after[name]
        if old == new and not new[-1].startswith("raised"):
            print(f"equal      {name}: {len(new)} hashes")
            continue
        wrong += 1
        if old == new:
            print(f"FAILED     {name}: {new[-1]}")
            continue
        first = next((n for n, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
        print(f"DIFFERENT  {name}: from hash {first} of {len(old)}. Before: {old[first:][:1]}, now: {new[first:][:1]}")
    print(f"{len(before) - wrong} of {len(before)} cases are equal")
    return 1 if wrong else 0


def hashed(checkout: Path, data: Mapping[str, Path], folder: Path, parts: list[str]) -> dict[str, list[str]]:
    """Return the hashes of all cases by the code of a checkout, which a new process imports."""
    spec = json.dumps({"data": {name: str(root) for name, root in data.items()}, "parts": parts})
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join((str(checkout), str(ROOT / "tests"))), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(HERE), "--worker", spec, str(checkout)]
    done = subprocess.run(command, env=variables, cwd=folder, stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    return result


def run(*command: str) -> None:
    subprocess.run(command, check=True)


def write_datasets(folder: Path) -> dict[str, Path]:
    """Write the datasets that need not be kept, and return their roots by name."""
    from support.datasets import write_odd

    from dali_stream.demo import write_demo

    folder.mkdir()
    written = {
        "demo": write_demo(folder / "demo", episodes=8, size=(120, 160)),
        "h264": write_demo(folder / "h264", episodes=6, size=(128, 160), codec="h264", gop=12, seed=1),
        "vp9": write_demo(folder / "vp9", episodes=3, size=(120, 160), codec="vp9", gop=30, fps=10, seed=2),
    }
    run("cp", "-r", str(written["h264"]), str(folder / "broken"))
    written["broken"] = folder / "broken"
    damage(sorted((folder / "broken/videos").rglob("*.mp4"))[0])
    odd = write_odd(folder / "odd")
    return written | {"odd": odd if isinstance(odd, Path) else folder / "odd"}


def damage(path: Path) -> None:
    """Overwrite a part of the media data of a video file."""
    data = bytearray(path.read_bytes())
    start = len(data) * 2 // 5
    data[start : start + len(data) // 10] = random.Random(0).randbytes(len(data) // 10)
    path.write_bytes(data)


def worker(spec: dict[str, Any], checkout: str) -> None:
    """Print the hashes of all cases as one line of JSON."""
    import dali_stream

    assert dali_stream.__file__.startswith(f"{checkout}/"), f"{dali_stream.__file__} must be in {checkout}"
    data = {name: Path(root) for name, root in spec["data"].items()}
    result: dict[str, list[str]] = {}
    for name, case in cases(data).items():
        if spec["parts"] and not any(part in name for part in spec["parts"]):
            continue
        found = result[name] = []
        try:
            for value in case():
                found.append(digest(value))
        except Exception as error:
            found.append(f"raised {type(error).__name__}: {error}")
    print(json.dumps(result))


def digest(value: Any) -> str:
    """Return a hash of a batch or of anything that JSON can hold."""
    total = hashlib.sha256()
    if isinstance(value, Mapping):
        for key in sorted(value):
            total.update(f"{key} {digest(value[key])}".encode())
    elif hasattr(value, "numpy"):
        total.update(f"{value.dtype} {tuple(value.shape)} {value.stride()}".encode())
        total.update(value.contiguous().numpy().tobytes())
    else:
        total.update(repr(value).encode())
    return total.hexdigest()[:16]


def cases(data: Mapping[str, Path]) -> dict[str, Callable[[], Iterator[Any]]]:
    """Return the cases by name."""
    from dali_stream import Dataset, FrameSampler, Loader, Mixture

    def opened(name: str, **arguments: Any) -> Any:
        return Dataset(data[name], **arguments)

    def loader(dataset: Any, **options: Any) -> Any:
        return Loader(dataset, **({"batch_size": 8, "device": "cpu", "num_threads": 2, "seed": 3} | options))

    def plain_state(state: Mapping[str, Any]) -> dict[str, Any]:
        """Return a state without its source, which is a path."""
        return {name: value for name, value in state.items() if name != "source"}

    def stream(dataset: Any, **options: Any) -> Iterator[Any]:
        """Yield the first batches of an epoch, the state, and the batches after a resume in the middle and into epoch 1."""
        with loader(dataset, **options) as first:
            batches = iter(first)
            for _, batch in zip(range(BATCHES), batches, strict=False):
                yield batch
            state = first.state_dict()
            yield plain_state(state)
        with loader(dataset, **options) as second:
            state = json.loads(json.dumps(state))
            second.load_state_dict(state)
            yield next(iter(second))
        with loader(dataset, **options) as third:
            third.load_state_dict(state | {"epoch": 1, "position": 0})
            for _, batch in zip(range(2), third, strict=False):
                yield batch

    def whole_epoch(dataset: Any, **options: Any) -> Iterator[Any]:
        with loader(dataset, **options) as batches:
            yield from batches
            yield plain_state(batches.state_dict())

    def remote(**options: Any) -> Iterator[Any]:
        from support.servers import Server

        with Server(data["demo"]) as server:
            yield from stream(Dataset(server.url), **options)

    def sampled(**options: Any) -> Iterator[Any]:
        sampler = FrameSampler([50, 7, 120, 33], **{"seed": 5, "batch_size": 4, **options})
        for _ in range(2):
            yield list(sampler)
        yield plain_state(sampler.state_dict())

    def mixture(**options: Any) -> Any:
        parts = {"demo": opened("demo"), "h264": opened("h264", drop_n_first_frames=2, drop_n_last_frames=3)}
        return Mixture(parts, **options)

    windows = {"delta_timestamps": {"action": [0.0, 0.05, 0.1], "observation.images.top": [-0.5, -0.05, 0.0]}}
    small, mean = {"image_size": (64, 80)}, {"normalize": "mean_std"}
    found: dict[str, Callable[[], Iterator[Any]]] = {}

    def add(name: str, make: Callable[[], Iterator[Any]]) -> None:
        found[name] = make

    for name in data:
        if name not in ("broken", "odd"):
            add(f"{name}: plain", lambda name=name: stream(opened(name)))
            add(f"{name}: resized, uint8", lambda name=name: stream(opened(name), **small, image_dtype="uint8"))
            add(
                f"{name}: 96x96, contiguous",
                lambda name=name: stream(opened(name), image_size=(96, 96), memory_format="contiguous"),
            )
            for rank in range(2):
                add(
                    f"{name}: rank {rank} of 2",
                    lambda name=name, rank=rank: stream(opened(name), **small, rank=rank, world_size=2),
                )
            for shuffle in (False, "global"):
                add(
                    f"{name}: shuffle={shuffle}",
                    lambda name=name, shuffle=shuffle: stream(opened(name), **small, shuffle=shuffle),
                )
    for name in ("demo", "h264"):
        add(f"{name}: windows", lambda name=name: stream(opened(name), **windows, **small))
        add(f"{name}: windows, global", lambda name=name: stream(opened(name), **windows, **small, shuffle="global"))
        add(f"{name}: normalized", lambda name=name: stream(opened(name), **small, **mean))
        for last in ("partial", "pad", "drop"):
            add(
                f"{name}: {last}",
                lambda name=name, last=last: whole_epoch(opened(name), **small, last_batch=last, batch_size=48),
            )
        add(f"{name}: little memory", lambda name=name: whole_epoch(opened(name), memory_budget="12MiB", batch_size=4))
        add(f"{name}: pools", lambda name=name: whole_epoch(opened(name), **small, consumers=4, episode_pool_size=2))
        parts = {"episodes": [5, 0, 2], "drop_n_first_frames": 1, "drop_n_last_frames": 2}
        add(f"{name}: selection", lambda name=name, parts=parts: whole_epoch(opened(name, **parts), **small))
        add(
            f"{name}: frames",
            lambda name=name: whole_epoch(opened(name, frames={0: [(3, 9), (20, 30)], 4: [(0, 11)]}), **small),
        )
    add("odd: images in rows", lambda: whole_epoch(opened("odd"), batch_size=4, image_size=(32, 32)))
    add("broken: substitutes", lambda: whole_epoch(opened("broken"), **small, on_error="substitute"))
    add("broken: error", lambda: told(whole_epoch(opened("broken"), **small)))
    add("demo: HTTP", lambda: remote(**small))
    add("demo: HTTP, windows, little memory", lambda: remote(**windows, memory_budget="24MiB"))
    add("mixture", lambda: stream(mixture(), **small))
    add("mixture: weights", lambda: stream(mixture(weights={"demo": 1, "h264": 3}), **small, **windows))
    add("mixture: repeats, global", lambda: stream(mixture(repeats={"demo": 0.5, "h264": 2}), **small, shuffle="global"))
    add("mixture: temperature, rank 1 of 2", lambda: stream(mixture(temperature=2.0), **small, rank=1, world_size=2))
    add("mixture: whole epoch", lambda: whole_epoch(mixture(), **small, last_batch="pad", normalize="mean_std_per_dataset"))
    for shuffle in (True, False, "global"):
        add(f"sampler: {shuffle}", lambda shuffle=shuffle: sampled(shuffle=shuffle))
    add("sampler: dropped frames", lambda: sampled(drop_n_first_frames=2, drop_n_last_frames=5))
    return found


def told(batches: Iterator[Any]) -> Iterator[Any]:
    """Yield batches and then the text of the error that ends them."""
    import dali_stream

    try:
        yield from batches
    except dali_stream.DaliStreamError as error:
        yield f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(json.loads(sys.argv[2]), sys.argv[3])
    else:
        sys.path.insert(0, str(ROOT / "tests"))
        sys.exit(main())
