"""`dali-stream prepare` while workers and commands are killed, disks are full and uploads break: nothing but time is lost."""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import numpy as np
import obstore
import psutil
import pyarrow.parquet as pq
import pytest
from support import videos as video_data
from support.clouds import S3
from support.datasets import Camera, Column, build, tree
from support.slurm import write_slurm
from support.tools import prepared

from dali_stream import DaliStreamError, Dataset
from dali_stream.cli import main
from dali_stream.tools import prepare
from dali_stream.tools.preparation import rows

EPISODES, FRAMES = 48, 4
KILLS = int(os.environ.get("PREPARE_KILLS", "2"))
HANGS_S = 240.0  # a command that has run for so long since the last kill hangs
FILE_MB = 0.006  # about 24 files
LARGER_MB = 0.02  # of the tests that start processes: about 8 files
ENCODED = ("--codec", "h264", "--size", "64x80", "--file-mb", LARGER_MB)


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """48 short episodes in one file."""
    folder = tmp_path_factory.mktemp("many")
    lengths = [FRAMES] * EPISODES
    path = video_data.encode(video_data.draw(lengths), folder / "a.mp4", video_data.h264(4))
    camera = Camera([path], [lengths], video_data.SIZE)
    actions = Column("float32", [2], np.arange(2 * sum(lengths)).reshape(-1, 2))
    return build(folder / "data", lengths, {"action": actions}, cameras={video_data.CAMERA: camera}, fps=video_data.FPS)


@pytest.fixture(scope="module")
def whole(many: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """All files of a run that nothing interrupted."""
    out = tmp_path_factory.mktemp("whole") / "out"
    prepared(many, out, file_mb=FILE_MB)
    assert len([name for name in tree(out) if not name.startswith("meta/")]) >= 24
    return tree(out)


@pytest.fixture(scope="module")
def encoded(many: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """All files of a run that encodes, and that nothing interrupted."""
    out = tmp_path_factory.mktemp("encoded") / "out"
    prepared(many, out, file_mb=LARGER_MB, codec="h264", size=(64, 80))
    assert len([name for name in tree(out) if not name.startswith("meta/")]) >= 6
    return tree(out)


def command(source: Path, out: Path, *options: object) -> list[str]:
    return [sys.executable, "-m", "dali_stream", "prepare", *map(str, (source, out, *options))]


def run_with_kills(
    arguments: list[str], done: int, workers: Callable[[psutil.Process], list[psutil.Process]], within: float
) -> int:
    """Runs a command until it succeeds. While it has workers, sends SIGKILL at random times: in turns to one of them and to it.

    Args:
        arguments: The command.
        done: Number of earlier kills, of `KILLS` in total.
        workers: Function that returns the workers of the command.
        within: Longest time in seconds between finding a worker and a kill.

    Returns:
        How many were killed, with the earlier ones.
    """
    rng = random.Random(0)
    # The output of the command goes to a file: a process of Ray that outlives it would keep a pipe open.
    with tempfile.TemporaryFile("w+") as output:
        while True:
            before, since = done, time.monotonic()
            with subprocess.Popen(arguments, stdout=output, stderr=subprocess.STDOUT) as process:
                running = psutil.Process(process.pid)
                while not ended(process, 0.2 if done < KILLS else HANGS_S):
                    if time.monotonic() - since > HANGS_S:
                        names = [(child.name(), child.status()) for child in running.children(recursive=True)]
                        process.kill()
                        raise AssertionError(f"the command hangs, with the processes {names}: {written(output)}")
                    if done == KILLS or not workers(running) or ended(process, rng.uniform(0, within)):
                        continue
                    if found := workers(running):
                        (running if done % 2 else rng.choice(found)).kill()
                        done, since = done + 1, time.monotonic()
            if process.returncode == 0:
                return done
            assert done > before, written(output)  # it fails only if something was killed
            assert process.returncode in (1, -signal.SIGKILL), written(output)


def ended(process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Whether the process ends within a time."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
    return process.returncode is not None


def name_of(process: psutil.Process) -> str:
    """Name of a process. It is empty if the process has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.name()
    return ""


def written(output: IO[str]) -> str:
    output.seek(0)
    return output.read()


@pytest.mark.slow
def test_random_kills_of_workers_and_command_change_nothing(many: Path, encoded: dict[str, bytes], tmp_path: Path) -> None:
    arguments = command(many, tmp_path / "out", "--jobs", 2, *ENCODED)
    # Those of a pool, and their ffmpeg.
    assert run_with_kills(arguments, 0, lambda process: process.children(recursive=True), within=2.5)
    assert tree(tmp_path / "out") == encoded


@pytest.mark.slow
def test_workers_of_ray_and_the_command_may_die(
    many: Path, encoded: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    # Ray's default is 15, with which its workers get next to no time beside other tests.
    monkeypatch.setenv("RAY_worker_niceness", "0")
    pytest.importorskip("ray")
    done = 0
    while done < KILLS:
        out = tmp_path / f"out-{done}"

        def workers(process: psutil.Process, plan: Path = out / "meta/prepare.json") -> list[psutil.Process]:
            """Those of Ray, without the node's agents; none before the plan is stored."""
            children = process.children(recursive=True) if plan.exists() else []
            return [child for child in children if (name := name_of(child)).startswith("ray::") and "Agent" not in name]

        arguments = command(many, out, "--executor", "ray", "--jobs", 2, *ENCODED)
        before, done = done, run_with_kills(arguments, done, workers, within=0.5)
        assert done > before
        assert tree(out) == encoded


@pytest.mark.slow
def test_jobs_of_slurm_may_die(many: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tasks of the job that dies get a job each."""
    from submitit.slurm.slurm import SlurmJob

    monkeypatch.setattr(SlurmJob.watcher, "_delay_s", 1)
    programs = write_slurm(tmp_path / "slurm")
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    (tmp_path / "slurm/kill").touch()  # the first job dies
    prepared(many, tmp_path / "whole", file_mb=LARGER_MB)
    options = ["--executor", "slurm", "--files-per-job", "2", "--slurm-partition", "cpu", "--slurm-time", "60"]
    options += ["--slurm-folder", str(tmp_path / "jobs")]
    assert main(["prepare", str(many), str(tmp_path / "out"), "--file-mb", str(LARGER_MB), *options]) == 0
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")
    submitted = (tmp_path / "slurm/submitted").read_text()
    for said in ("--array=0-", "--partition=cpu", "--time=60"):
        assert said in submitted
    assert not (tmp_path / "slurm/kill").exists()


@pytest.mark.slow
def test_a_disk_that_is_full_costs_the_files_that_do_not_fit(many: Path, tmp_path: Path) -> None:
    """A limit of the size of files acts as a full disk does: writes raise OSError. The state is smaller than these files."""
    size = {"file_mb": 0.04}
    prepared(many, tmp_path / "whole", **size)
    whole = tree(tmp_path / "whole")
    sizes = sorted(len(data) for name, data in whole.items() if name.startswith(("data/", "videos/")))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with pytest.raises(KeyboardInterrupt):  # after the plan was stored
        prepared(many, tmp_path / "out", progress=_interrupt, **size)
    resource.setrlimit(resource.RLIMIT_FSIZE, (sizes[len(sizes) // 2], limits[1]))
    try:
        report = prepare(many, tmp_path / "out", jobs=1, **size)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert 0 < len(report.failed) < len(sizes)
    assert not (tmp_path / "out/meta/info.json").exists()
    assert prepared(many, tmp_path / "out", **size).written == len(report.failed)
    assert tree(tmp_path / "out") == whole


def test_rows_that_the_disk_has_changed_are_refused(many: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = rows.write

    def changing(path: Path, *arguments: Any) -> None:
        write(path, *arguments)
        chunk = pq.ParquetFile(path).metadata.row_group(0).column(0)
        data = bytearray(path.read_bytes())
        data[chunk.data_page_offset + chunk.total_compressed_size // 2] ^= 1
        path.write_bytes(data)

    monkeypatch.setattr(rows, "write", changing)
    with pytest.raises(DaliStreamError, match="its rows are not as they were written"):
        prepared(many, tmp_path / "out")
    assert not (tmp_path / "out/meta/info.json").exists()
    assert not list((tmp_path / "out/data").rglob("*.parquet"))


def _interrupt(status: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.slow
def test_s3_to_s3_with_uploads_that_break(
    many: Path, tmp_path: Path, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every fourth upload breaks, some after half of the file has arrived. The command is interrupted once."""
    put, calls = obstore.put, []

    def breaking(store: Any, path: str, file: Any, **options: Any) -> Any:
        calls.append(path)
        if len(calls) % 4 == 0:
            if len(calls) % 8 == 0:
                put(store, path, Path(file).read_bytes()[: Path(file).stat().st_size // 2])
            raise OSError("the connection broke")
        return put(store, path, file, **options)

    monkeypatch.setattr(obstore, "put", breaking)
    monkeypatch.setattr(random, "random", lambda: 0.0)  # no pauses between attempts
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with S3(many) as bucket:
        source, out = f"s3://{bucket.bucket}", f"s3://{bucket.bucket}/new/out"
        options = {"storage_options": bucket.options, "out_storage_options": bucket.options, "file_mb": FILE_MB}
        # The source is the root of the bucket, and OUT a folder in it: prepare writes nothing else.
        seen: list[int] = []

        def interrupt(status: Any) -> None:
            seen.append(status.done)
            if status.done == 5 and seen.count(5) == 1:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            prepared(source, out, progress=interrupt, **options)
        report = prepared(source, out, **options)
        assert len(whole) > report.written > 0
        with contextlib.closing(Dataset(out, storage_options=bucket.options)) as new:
            assert (new.num_episodes, new.num_frames) == (EPISODES, EPISODES * FRAMES)
            names = {name for folder in ("meta", "data", "videos") for name in new.store.files(folder)}
            found = {name: new.store.read_all(name) for name in names}
    expected = {name: data for name, data in whole.items() if name.startswith(("meta/", "data/", "videos/"))}
    assert found == expected
    assert json.loads(found["meta/prepare.json"])["plan"]["options"]["file_mb"] == FILE_MB
