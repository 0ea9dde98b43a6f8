"""Thousands of broken headers: each gives an error of this package or the right frames, without crash, hang or gigabytes.

Child processes do the work and report each case that they begin. The tests detect that a case kills a child or makes it grow.
"""

from __future__ import annotations

import json
import random
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from support import videos as data
from support.datasets import Column, build

import dali_stream
from dali_stream.decode import torchcodec as decode
from dali_stream.lerobot.rows import RowReader
from dali_stream.mp4.format import describe
from dali_stream.mp4.index import read_index
from dali_stream.storage import LocalStore

MB = 1 << 20
MOST_MEMORY = 500 * MB
VIDEOS = {"av1": data.av1(2), "h264": (*data.h264(12), "-movflags", "+faststart"), "hevc": data.hevc(12, open_gop=True)}
NUMBERS = (0, 1, 2, 7, 8, 127, 255, 65535, 1 << 24, (1 << 31) - 1, 1 << 31, (1 << 32) - 1)


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a dataset, and videos by codec beside it."""
    folder = tmp_path_factory.mktemp("healthy")
    for name, arguments in VIDEOS.items():
        data.encode(data.draw(), folder / f"{name}.mp4", arguments)
    data.write_dataset(folder / "set", [folder / "av1.mp4"])
    actions = Column("float32", [2], np.arange(30).reshape(-1, 2))
    cameras = data.one_file_each(folder / "v2 videos", [data.CAMERA], (7, 8), fps=10)
    build(folder / "v2", (7, 8), {"action": actions}, cameras=cameras, version="v2.1", stats=True)
    return folder


FIRST = 100_000  # the first seed of each kind
CASES = {
    "index": 2600,  # headers of videos, the index read
    "frames": 1200,  # headers of videos, frames decoded
    "parquet": 900,
    "json": 1200,
    "lines": 1300,  # all metadata of v2.1
}
# Later cases that come to errors of this package to which no case before them comes. With them, all errors are tested to which
# 5000 (index), 3400, 2000, 2800 and 3200 cases come.
RARE = {
    "frames": (1401, 1477, 2109, 2849),
    "parquet": (1027, 1448, 1527, 1764),
    "json": (1461, 1525, 2488),
    "lines": (1539, 1693, 1977, 2191, 2306, 2643, 2915, 3013),
}


def seeds(kind: str) -> list[int]:
    """Seeds of the cases of a kind."""
    return [FIRST + number for number in (*range(CASES[kind]), *RARE.get(kind, ()))]


@pytest.mark.slow
def test_broken_headers(healthy: Path) -> None:
    """The child must reach its last case, and may not say that a case went wrong, nor take far longer than it should."""
    command, count = [sys.executable, __file__, str(healthy)], sum(len(seeds(kind)) for kind in CASES)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60 + count * 0.2, check=False)
    except subprocess.TimeoutExpired as error:
        pytest.fail(f"hangs at case {(error.stdout or b'')[-200:]!r}")
    lines = done.stdout.splitlines()
    assert done.returncode == 0, f"exit code {done.returncode} after {lines[-1:]}: {done.stderr[-3000:]}"
    found = json.loads(lines[-1])
    assert set(found) == set(CASES)
    for kind, outcomes in found.items():
        assert sum(outcomes.values()) == len(seeds(kind))
        # Mutations that all pass, or of which none does, test nothing.
        assert outcomes.get("right", 0) > 0, kind
        assert sum(outcomes.values()) - outcomes.get("right", 0) > sum(outcomes.values()) // 20, kind


# ------------------------------------------------------------------------------------------------- in the child


def child(healthy: Path) -> None:
    """Works through the cases of each kind."""
    kinds = {"index": IndexCase, "frames": FramesCase, "parquet": ParquetCase, "json": JsonCase, "lines": LinesCase}
    outcomes: dict[str, Counter[str]] = {kind: Counter() for kind in CASES}
    with tempfile.TemporaryDirectory() as folder:
        cases: dict[str, Any] = {}
        for kind in CASES:
            (own := Path(folder, kind)).mkdir()
            cases[kind] = kinds[kind](healthy, own)
            cases[kind].run(random.Random(0), lambda value: value)  # imports and caches, before memory is measured
        limit = _status("VmSize") + 4096 * MB
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        todo = [(kind, seed) for kind in CASES for seed in seeds(kind)]
        for kind, seed in todo:
            sys.stdout.write(f"{kind} {seed}\n")
            sys.stdout.flush()
            Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here on
            before, started = _status("VmRSS"), time.perf_counter()
            rng = random.Random(seed)
            try:
                cases[kind].run(rng, lambda value, rng=rng: mutated(value, rng))
                outcomes[kind]["right"] += 1
            except dali_stream.DaliStreamError as error:
                outcomes[kind][type(error).__name__] += 1
            grown, took = _status("VmHWM") - before, time.perf_counter() - started
            assert grown < MOST_MEMORY, f"{kind} {seed} took {grown / MB:.0f} MB"
            assert took < 30, f"{kind} {seed} took {took:.0f} s"
    sys.stdout.write(json.dumps(outcomes) + "\n")


def _status(key: str) -> int:
    text = Path("/proc/self/status").read_text()
    return int(re.search(rf"{key}:\s+(\d+) kB", text)[1]) * 1024  # type: ignore[index]


class IndexCase:
    """The index of a video is read, and what it says of itself."""

    def __init__(self, healthy: Path, folder: Path) -> None:
        self.folder = folder
        self.store = LocalStore(str(folder))
        self.videos = {name: (healthy / f"{name}.mp4").read_bytes() for name in VIDEOS}

    def run(self, rng: random.Random, change: Callable[[bytes], bytes]) -> None:
        self.table(rng, change)

    def table(self, rng: random.Random, change: Callable[[bytes], bytes]) -> tuple[str, Any]:
        name = rng.choice(list(VIDEOS))
        video = self.videos[name]
        start, stop = top_box(video, b"moov")
        media, _ = top_box(video, b"mdat")
        if rng.random() < 0.85:
            video = video[:start] + change(video[start:stop]) + video[stop:]
        else:  # the boxes at the top
            at, size = rng.choice([(0, 36), (media, 8)])
            video = video[:at] + change(video[at : at + size]) + video[at + size :]
        self.store.close()
        (self.folder / "v.mp4").write_bytes(video)
        table = read_index(self.store, "v.mp4")
        assert len(table) <= 70_000
        for config in table.configs:
            describe(config)
        return name, table


class FramesCase(IndexCase):
    """Samples are decoded too. A sample with the byte range of a healthy file's sample must decode to the same frame."""

    def __init__(self, healthy: Path, folder: Path) -> None:
        super().__init__(healthy, folder)
        self.pictures = {}
        self.headers = {}
        for name in VIDEOS:
            table = read_index(LocalStore(str(healthy)), f"{name}.mp4")
            shown = data.whole_file(healthy / f"{name}.mp4").movedim(1, -1).numpy()
            order = np.argsort(table.display_order)
            self.headers[name] = table.configs, table.track_header
            places = zip(table.offset[:].tolist(), table.size().tolist(), strict=True)
            self.pictures[name] = {place: shown[order[i]] for i, place in enumerate(places)}

    def run(self, rng: random.Random, change: Callable[[bytes], bytes]) -> None:
        name, table = self.table(rng, change)
        if len(table) != data.FRAMES:
            raise dali_stream.DecodeError("another number of frames")
        samples = [rng.randrange(len(table)) for _ in range(5)]
        config = table.configs[table.config[samples[0]]]
        video = describe(config)
        if (video.height, video.width) != data.SIZE:  # as `cameras` checks before it decodes
            raise dali_stream.DecodeError("another size")
        frames, _ = decode.decode(self.store, [table] * len(samples), samples, video)
        if (table.configs, table.track_header) != self.headers[name]:
            return  # turned, or of other colours: decoders honour these headers
        for sample, frame in zip(samples, frames, strict=True):
            place = int(table.offset[sample]), int(table.size(sample))
            assert place in self.pictures[name], f"{name}: sample {sample} at {place} is none, and was decoded"
            assert np.array_equal(frame, self.pictures[name][place]), f"{name}: sample {sample} is wrong"


class ParquetCase:
    """All metadata and all rows of a dataset are read, one Parquet file of it being broken."""

    def __init__(self, healthy: Path, folder: Path) -> None:
        self.root = folder / "set"
        shutil.copytree(healthy / "set", self.root)
        for path in self.root.glob("data/**/*.parquet"):  # enough row groups that their metadata is cut, see `RowGroups`
            table = pq.read_table(path)
            pq.write_table(table, path, row_group_size=-(-len(table) // 12))
        self.files = sorted(self.root.rglob("*.parquet"))
        self.bytes = {path: path.read_bytes() for path in self.files}

    def run(self, rng: random.Random, change: Callable[[bytes], bytes]) -> None:
        path = rng.choice(self.files)
        good = self.bytes[path]
        footer = len(good) - 8 - int.from_bytes(good[-8:-4], "little")
        start, stop = rng.choice([(footer, len(good)), (footer, len(good) - 8), (len(good) - 8, len(good)), (0, footer)])
        try:
            path.write_bytes(good[:start] + change(good[start:stop]) + good[stop:])
            read_all(self.root)
        finally:
            path.write_bytes(good)


class JsonCase:
    """All metadata and all rows of a dataset are read, info.json being broken."""

    name = "set"
    files: tuple[str, ...] = ("info.json",)

    def __init__(self, healthy: Path, folder: Path) -> None:
        self.root = folder / self.name
        shutil.copytree(healthy / self.name, self.root)
        self.good = {self.root / "meta" / name: (self.root / "meta" / name).read_text() for name in self.files}

    def run(self, rng: random.Random, change: Callable[[bytes], bytes]) -> None:
        path = rng.choice(list(self.good))
        good = self.good[path]
        text = good.encode()
        if rng.random() < 0.3:
            text = change(text)
        elif change(b"healthy?") != b"healthy?":  # not for the run that only warms up
            lines = good.splitlines() if path.suffix == ".jsonl" else [good]
            place = rng.randrange(len(lines))
            tree = json.loads(lines[place])
            for _ in range(rng.randint(1, 3)):
                replace_somewhere(tree, rng)
            lines[place] = json.dumps(tree)
            text = "\n".join(lines).encode()
        try:
            path.write_bytes(text)
            read_all(self.root)
        finally:
            path.write_text(good)


class LinesCase(JsonCase):
    """The same for v2.1, whose other metadata are JSON Lines."""

    name = "v2"
    files = ("info.json", "episodes.jsonl", "tasks.jsonl", "episodes_stats.jsonl")


def read_all(root: Path) -> None:
    """Everything of a dataset but its frames. Shapes must be those that info.json promises."""
    dataset = dali_stream.Dataset(root)
    try:
        assert dataset.fingerprint
        assert dataset.num_frames < 1 << 50
        reader = RowReader(dataset)
        for episode in range(min(dataset.num_episodes, 4)):
            for key, values in reader.read(episode).items():
                shape = tuple(dataset.features[key]["shape"])
                assert values.shape == (dataset.lengths[episode], *(() if shape == (1,) else shape)), key
        assert isinstance(dataset.stats, dict)
        for camera in dataset.cameras:
            _ = dataset.features[camera].frame_size
    finally:
        dataset.close()


# ----------------------------------------------------------------------------------------------------- mutations


def top_box(video: bytes, kind: bytes) -> tuple[int, int]:
    at = 0
    while video[at + 4 : at + 8] != kind:
        at += int.from_bytes(video[at : at + 4], "big")
    return at, at + int.from_bytes(video[at : at + 4], "big")


def mutated(value: bytes, rng: random.Random) -> bytes:
    """One to four changes of the kinds that break parsers."""
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        value = rng.choice(MUTATIONS)(value, rng)
    return value


def flip(value: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(value)) if value else 0
    return value[:at] + bytes([value[at] ^ 1 << rng.randrange(8)]) + value[at + 1 :] if value else value


def number(value: bytes, rng: random.Random) -> bytes:
    """A 32-bit field with a number that is at the edge of something."""
    at = rng.randrange(max(len(value) - 4, 1))
    return value[:at] + rng.choice(NUMBERS).to_bytes(4, rng.choice(["big", "little"])) + value[at + 4 :]


def nudge(value: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(max(len(value) - 4, 1))
    old = int.from_bytes(value[at : at + 4], "big")
    return value[:at] + ((old + rng.choice([-8, -1, 1, 8, 256])) % (1 << 32)).to_bytes(4, "big") + value[at + 4 :]


def noise(value: bytes, rng: random.Random) -> bytes:
    at, n = rng.randrange(max(len(value), 1)), rng.randint(1, 24)
    return value[:at] + rng.randbytes(min(n, len(value) - at)) + value[at + n :]


def cut(value: bytes, rng: random.Random) -> bytes:
    a, b = sorted(rng.randrange(len(value) + 1) for _ in range(2))
    return value[:a] if rng.random() < 0.5 else value[:a] + value[min(b, a + 64) :]


def repeated(value: bytes, rng: random.Random) -> bytes:
    at, n = rng.randrange(max(len(value), 1)), rng.choice([1, 4, 8, 100])
    return value[:at] + value[at : at + n] * rng.choice([2, 3, 50]) + value[at + n :]


def box_size(value: bytes, rng: random.Random) -> bytes:
    """The size in front of a four-letter name: 0, 1 with 64 bits after it, or too large."""
    names = [m.start() for m in re.finditer(rb"[a-z]{4}", value) if m.start() >= 4]
    if not names:
        return flip(value, rng)
    at = rng.choice(names)
    size = rng.choice([0, 1, 4, 7, 8, 9, len(value), (1 << 31) + 8, (1 << 32) - 1])
    after = rng.choice([1 << 63, (1 << 64) - 1, 15, 16, 0]).to_bytes(8, "big") if size == 1 else b""
    return value[: at - 4] + size.to_bytes(4, "big") + value[at : at + 4] + after + value[at + 4 + len(after) :]


def nested(value: bytes, rng: random.Random) -> bytes:
    """Boxes in boxes, deeper than any stack."""
    kind = rng.choice([b"moov", b"trak", b"stsd", b"meta"])
    depth = rng.choice([3, 200, 20_000])
    boxes = np.empty((depth, 2), ">u4")
    boxes[:, 0] = len(value) + 8 * np.arange(depth, 0, -1)
    boxes[:, 1] = int.from_bytes(kind, "big")
    return boxes.tobytes() + value


MUTATIONS = (flip, flip, number, number, nudge, noise, cut, repeated, box_size, nested)
VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 1, 2, 1.5, 1e308, 10**400, 1 << 40, (1 << 63) - 1, "", "x", "../../etc/passwd", "/etc/passwd", "{}",
    "{chunk_index:09999999999d}", "{video_key.__class__}", "video", "image", "string", "float32", "int64", "bool",
    [], [1], [1] * 7, [0, 0, 3], [1 << 40, 1 << 40, 3], [-1], [[1]], {}, {"dtype": "video"}, "a" * 100_000, "\0", "\ud800",
)  # fmt: skip


def replace_somewhere(tree: Any, rng: random.Random) -> None:
    """Replaces, removes or renames one entry at any depth."""
    nodes: list[Any] = []

    def collect(node: Any) -> None:
        if isinstance(node, (dict, list)) and node:
            nodes.append(node)
            for value in node.values() if isinstance(node, dict) else node:
                collect(value)

    collect(tree)
    if not nodes:
        return
    node = rng.choice(nodes)
    key = rng.choice(list(node) if isinstance(node, dict) else range(len(node)))
    action = rng.random()
    if action < 0.7:
        node[key] = json.loads(json.dumps(rng.choice(VALUES)))
    elif action < 0.85 or isinstance(node, list):
        del node[key]
    else:
        node[rng.choice(["x", "timestamp", "index", "a/b", "../x", ""])] = node.pop(key)


if __name__ == "__main__":
    child(Path(sys.argv[1]))
