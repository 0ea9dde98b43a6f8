"""`dali-stream info URI --index`, on a server that says what it was asked for."""

from __future__ import annotations

import json
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.faults import hang
from support.programs import failed
from support.servers import Request, Server

import dali_stream
from dali_stream import Dataset, Loader, StorageError
from dali_stream.cli import main
from dali_stream.tools.work import in_threads

HANG = 120  # seconds; only a hang takes so long


@pytest.fixture
def server(demo_copy: Path) -> Iterator[Server]:
    with Server(demo_copy) as running:
        yield running


def index(capsys: pytest.CaptureFixture[str], server: Server, cache: Path, *more: str, code: int = 0) -> dict[str, Any]:
    """Runs the command with `--json`."""
    assert main(["info", server.url, "--index", "--cache-dir", str(cache), "--json", *more]) == code
    return json.loads(capsys.readouterr().out)


def files(root: Path, kind: str) -> list[str]:
    return sorted(path.relative_to(root).as_posix() for path in root.rglob(kind) if "meta" not in path.parts)


def index_range(root: Path, path: str) -> range:
    """Byte range of a file's `moov` box, or of its Parquet footer up to the end of the file."""
    data, at = (root / path).read_bytes(), 0
    if path.endswith(".parquet"):
        (length,) = struct.unpack("<I", data[-8:-4])
        return range(len(data) - 8 - length, len(data))
    while True:
        length, kind = struct.unpack(">I4s", data[at : at + 8])
        if kind == b"moov":
            return range(at, at + length)
        at += length


def asked_for_index(requests: list[Request], root: Path) -> list[Request]:
    """Requests whose answer had bytes of an index in it."""

    def hit(request: Request) -> bool:
        path = request.path.lstrip("/")
        if request.method != "GET" or path not in [*files(root, "*.mp4"), *files(root, "*.parquet")]:
            return False
        assert request.range, f"all of {path} was asked for"
        first, last = map(int, request.range.removeprefix("bytes=").split("-"))
        index = index_range(root, path)
        return first < index.stop and last >= index.start

    return [request for request in requests if hit(request)]


def test_a_second_run_fetches_nothing(
    server: Server, demo_copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = index(capsys, server, tmp_path / "cache")
    every = files(demo_copy, "*.mp4") + files(demo_copy, "*.parquet")
    assert first["files"] == len(every)
    assert first["broken"] == {}
    assert {request.path.lstrip("/") for request in asked_for_index(server.requests, demo_copy)} == set(every)
    server.requests.clear()
    second = index(capsys, server, tmp_path / "cache")
    assert asked_for_index(server.requests, demo_copy) == []
    # All that is fetched is the byte whose answer tells whether the file has changed.
    assert second["fetched_bytes"] <= len(every)
    assert second["cached_bytes"] > first["cached_bytes"]


@pytest.mark.slow
def test_a_loader_finds_the_index_in_the_cache(
    server: Server, demo_copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    index(capsys, server, tmp_path / "cache")
    server.requests.clear()
    dataset = Dataset(server.url, cache_dir=tmp_path / "cache")
    with Loader(dataset, batch_size=64, device="cpu", rank=0, world_size=1) as loader:
        seen = sum(len(batch["index"]) for batch in loader)
    assert seen > 64
    assert server.requests  # frames and rows
    assert asked_for_index(server.requests, demo_copy) == []


def test_only_the_selected_cameras_are_read(
    server: Server, demo_copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    camera, other = Dataset(demo_copy).cameras
    report = index(capsys, server, tmp_path / "cache", "--cameras", camera)
    assert report["files"] < len(files(demo_copy, "*.mp4") + files(demo_copy, "*.parquet"))
    assert any(camera in request.path for request in server.requests)
    assert not any(other in request.path for request in server.requests)


def test_broken_files_are_named_and_the_others_read(
    server: Server, demo_copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    videos, rows = files(demo_copy, "*.mp4"), files(demo_copy, "*.parquet")
    (demo_copy / videos[0]).write_bytes((demo_copy / videos[0]).read_bytes()[:1000])
    (demo_copy / rows[0]).write_bytes(b"PAR1 this is none")
    (demo_copy / videos[-1]).unlink()
    report = index(capsys, server, tmp_path / "cache", code=1)
    assert {request.path.lstrip("/") for request in server.requests} >= {*videos, *rows}
    assert list(report["broken"]) == sorted([videos[0], videos[-1], rows[0]])
    assert "Invalid Parquet file" in report["broken"][rows[0]]
    assert "no such file" in report["broken"][videos[-1]]
    assert main(["info", server.url, "--index", "--cache-dir", str(tmp_path / "cache")]) == 1
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith(f"{report['files']} files: ")
    assert sum(line.startswith("broken: ") and f"{server.url}/" in line for line in said) == 3


@pytest.mark.parametrize("threads", [1, 16])
def test_an_interrupted_run_goes_on_where_it_was(
    threads: int, server: Server, demo_copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one thread, most files have not been begun when it is interrupted, as in a large dataset."""
    monkeypatch.setattr("dali_stream.tools.indexing.THREADS", threads)

    def stop(done: int, total: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        dali_stream.tools.index(Dataset(server.url, cache_dir=tmp_path), stop)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("dali_stream index")]
    seen: list[tuple[int, int]] = []
    report = dali_stream.tools.index(Dataset(server.url, cache_dir=tmp_path), lambda done, total: seen.append((done, total)))
    assert report.cached_bytes > 0
    assert seen == [(done, report.files) for done in range(report.files + 1)]


@pytest.mark.slow
def test_ctrl_c_ends_it_while_the_server_says_nothing(server: Server, demo_copy: Path, tmp_path: Path) -> None:
    arrived = threading.Event()

    def stall(*answer: Any) -> None:
        arrived.set()
        hang(*answer)

    server.set_faults({path: [stall] * 9 for path in files(demo_copy, "*.mp4")})
    command = [sys.executable, "-m", "dali_stream", "info", server.url, "--index", "--cache-dir", str(tmp_path / "cache")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as running:
        assert arrived.wait(HANG)
        running.send_signal(signal.SIGINT)
        _, said = running.communicate(timeout=40)  # a read gives up by itself after 60 s
    assert (running.returncode, said) == (130, "dali-stream: interrupted\n")


class Reads:
    """Reads that end when they are interrupted. Those that begin afterwards wait for the next interruption."""

    def __init__(self) -> None:
        self._interrupted, self._stop = threading.Event(), threading.Event()

    def read(self) -> None:
        self._interrupted.wait()
        self._stop.wait()

    def interrupt(self) -> None:
        before, self._stop = self._stop, threading.Event()
        self._interrupted.set()
        before.set()


@pytest.mark.parametrize("number", [0, 2])
def test_ctrl_c_while_a_thread_starts_leaves_no_thread(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """`Thread.start` waits until the thread runs. If that is interrupted, the thread runs all the same."""
    start, reads, started = threading.Thread.start, Reads(), list[threading.Thread]()

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        started.append(thread)
        if len(started) == number + 1:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            list(in_threads({str(job): reads.read for job in range(9)}, 4, reads.interrupt))
    assert not any(thread.is_alive() for thread in started)


def test_a_server_that_is_gone_ends_it(server: Server, demo_copy: Path, tmp_path: Path) -> None:
    dataset = Dataset(server.url, cache_dir=tmp_path / "cache", give_up_after_s=1)
    server.set_faults({path: [hang] * 99 for path in files(demo_copy, "*.mp4")})
    with pytest.raises(StorageError, match=r"\.mp4"):
        dali_stream.tools.index(dataset)


def test_a_local_dataset_needs_none(demo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["info", demo, "--index", "--cache-dir", tmp_path / "cache"]
    assert "is local. Only remote datasets have a cache" in failed(capsys, line, 2)
    assert "--cache-dir" in failed(capsys, ["info", demo, "--index"], 2)
    assert "--image-size" in failed(capsys, [*line, "--image-size", "48x64"], 2)
    assert "--index" in failed(capsys, [*line, tmp_path], 2)
    assert not (tmp_path / "cache").exists()
