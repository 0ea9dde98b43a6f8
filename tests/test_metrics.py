"""`Loader.metrics`: what happened since the last call, as TensorBoard and the like take it."""

from __future__ import annotations

import itertools
import logging
import re
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from support import faults
from support.broken import cut_in_media
from support.datasets import copied, videos
from support.faults import Fault
from support.servers import Server
from support.stores import Clock, quick
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from dali_stream import Dataset, FrameSampler, Loader

MEMORY = ("row_bytes", "index_bytes", "encoded_bytes", "decoded_bytes")


def test_metrics_are_of_what_happened_since_the_last_call(small: Path, tmp_path: Path) -> None:
    """An epoch that decodes all frames, nothing, and an epoch that decodes none; all of it in TensorBoard."""
    options = {"batch_size": 20, "decode": "torchcodec", "last_batch": "partial", "prefetch": 1}
    with Loader(small, device="cpu", num_threads=1, **options) as loader:
        found = []
        for epochs in (1, 0, 1):
            before = loader.stats()
            for _ in itertools.chain.from_iterable(itertools.repeat(loader, epochs)):
                pass
            now = loader.stats()
            found.append(loader.metrics())
            seconds = sum(now[name] - before[name] for name in ("wait_s", "training_s"))
            rate = found[-1]["samples_per_s"] * seconds if epochs else found[-1]["samples_per_s"]
            assert rate == pytest.approx(epochs * Dataset(small).num_frames)
            assert {name: found[-1][name] for name in MEMORY} == {name: now[name] for name in MEMORY}
    first, idle, second = found
    assert all(type(value) is float for value in (*first.values(), *idle.values(), *second.values()))
    assert first["decodes_per_frame"] >= 1
    assert 0 < first["wait_share"] <= 1
    # Hits and decodes of the batches made ahead are counted before these batches.
    assert first["memory_hit_share"] < 0.8 < second["memory_hit_share"] <= 1
    assert second["decodes_per_frame"] == 0
    assert {name for name, value in idle.items() if value} == {
        "row_bytes",
        "index_bytes",
        "decoded_bytes",
        "resident_bytes",
    }
    with SummaryWriter(str(tmp_path)) as board:
        for step, metrics in enumerate(found):
            for name, value in metrics.items():
                board.add_scalar(f"loader/{name}", value, step)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    for name in first:
        values = [event.value for event in events.Scalars(f"loader/{name}")]
        assert values == pytest.approx([metrics[name] for metrics in found], rel=1e-6)


def test_bytes_come_from_the_network_once_and_then_from_the_disk(small: Path, tmp_path: Path) -> None:
    found = []
    with Server(small) as server:
        for _ in range(2):
            dataset = Dataset(server.url, cache_dir=tmp_path)
            with Loader(dataset, batch_size=20, device="cpu", num_threads=1, shuffle=False) as loader:
                for _ in loader:  # all of it, since how far a loader fetches ahead depends on the network
                    pass
                found.append(loader.metrics())
    assert found[0]["network_bytes"] > 10_000
    assert found[1]["network_bytes"] < found[0]["network_bytes"] / 10
    assert found[1]["disk_cache_bytes"] > 10_000


# ------------------------------------------------------------------------------------------------------------- what goes wrong


def retry_warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "is repeated" in record.getMessage()]


def test_a_failing_network_is_in_the_metrics_and_the_log(small: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Server(small) as server:
        with Loader(server.url, batch_size=8, device="cpu", num_threads=1) as loader:
            server.set_faults(itertools.cycle([faults.status(503), None]))  # every second request fails
            for _ in loader:
                pass
            metrics, stats = loader.metrics(), loader.stats()
            assert metrics["retries"] == stats["retries"] > 3
            assert metrics["retries"] > 0.5 * metrics["requests"], "as many as the requests that succeeded, or nearly"
            idle = loader.metrics()
            assert idle["retries"] < metrics["retries"], "since the last call"
        host = server.url.removeprefix("http://")
        [warning] = retry_warnings(caplog)
    assert f"a request to {host} failed (HTTP 503), and is repeated" in warning


def test_the_first_retry_of_each_minute_and_host_is_a_warning(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    def fails(server: Server, reason: Fault, times: int) -> None:
        server.set_faults([reason] * times)
        assert quick(server.url).read("file", 0, 3) == b"abc"

    clock.pass_by(1e6)  # after the warnings of other tests, if a server has the port of one of theirs
    with Server({"file": b"abc"}) as one, Server({"file": b"abc"}) as other:
        fails(one, faults.status(429, "0"), 3)
        fails(other, faults.reset, 1)
        fails(one, faults.status(500), 1)
        warnings = retry_warnings(caplog)
        assert [re.search(r"127[.:\d]+ failed \(([^)]*)", text)[1] for text in warnings[:1]] == ["HTTP 429"]  # type: ignore[index]
        assert len(warnings) == 2, "one for each host"
        assert other.url in warnings[1]
        clock.pass_by(60)
        fails(one, faults.status(500), 1)
        assert "failed (HTTP 500), and is repeated. 3 more requests to it" in retry_warnings(caplog)[2]


def test_failed_checksums_of_the_cache_on_disk_are_counted(small: Path, tmp_path: Path) -> None:
    with Server(small) as server:
        found = []
        for _ in range(2):
            dataset = Dataset(server.url, cache_dir=tmp_path)
            with Loader(dataset, batch_size=20, device="cpu", num_threads=1, shuffle=False) as loader:
                for _ in loader:
                    pass
                found.append(loader.metrics()["failed_checksums"])
            for segment in tmp_path.glob("blocks/*/*"):
                content = bytearray(segment.read_bytes())
                content[-1] ^= 1  # of the last block
                segment.write_bytes(content)
    assert found[0] == 0 < found[1]


def test_substitutes_and_evictions_are_counted(small: Path, tmp_path: Path) -> None:
    root = copied(small, tmp_path)
    path = videos(root)[0]
    path.write_bytes(cut_in_media(path.read_bytes()))
    with Loader(root, batch_size=8, device="cpu", num_threads=1, on_error="substitute") as loader:
        for _ in loader:
            pass
        metrics, stats = loader.metrics(), loader.stats()
        assert metrics["substituted"] == stats["substituted"] > 0
        for name in ("route_changes", "evicted_early", "indices_read_again", "frames_evicted_before_use"):
            assert metrics[name] == stats[name]


# --------------------------------------------------------------------------------------------------------------- log records


@pytest.fixture
def noted(caplog: pytest.LogCaptureFixture) -> Callable[[], str]:
    """Returns what was logged, in a format with rank and host."""
    form = logging.Formatter("%(rank)s %(host)s %(message)s")
    return lambda: "\n".join(form.format(record) for record in caplog.records if record.name.startswith("dali_stream"))


def test_each_record_has_rank_and_host(
    odd: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, noted: Callable[[], str]
) -> None:
    def resumed(**arguments: int) -> str:
        caplog.clear()
        Loader(odd, batch_size=2, device="cpu", **arguments).resume(epoch=0, batch=1)  # logs a warning
        FrameSampler(Dataset(odd), **arguments).resume(epoch=0, batch=1, batch_size=2)
        return noted()

    host = socket.gethostname()
    for rank, text in enumerate([resumed(rank=0, world_size=1), resumed(rank=1, world_size=2)]):
        assert [line.split()[:2] for line in text.splitlines()] == [[str(rank), host]] * 2
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert [line.split()[:2] for line in resumed().splitlines()] == [["3", host]] * 2
    monkeypatch.setenv("RANK", "three")
    logging.getLogger("dali_stream").warning("a record never fails")
    assert noted().splitlines()[-1] == f"three {host} a record never fails"


@pytest.mark.parametrize(
    ("environment", "warns"),
    [
        ({}, True),
        ({"LOCAL_RANK": "0"}, True),
        ({"LOCAL_RANK": "1"}, False),
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "1"}, False),
        ({"SLURM_STEP_ID": "0", "SLURM_PROCID": "9", "SLURM_LOCALID": "1"}, False),
        ({"SLURM_LOCALID": "1"}, True),
    ],
)
def test_warnings_about_the_dataset_come_from_local_rank_0(
    tmp_path: Path,
    odd: Path,
    monkeypatch: pytest.MonkeyPatch,
    noted: Callable[[], str],
    environment: dict[str, str],
    warns: bool,
) -> None:
    root = copied(odd, tmp_path)
    info = root / "meta/info.json"
    info.write_text(info.read_text().replace('"features": {', '"features": {"sound": {"dtype": "audio", "shape": [1]}, '))
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    Loader(Dataset(root), batch_size=2, device="cpu").resume(epoch=0, batch=1)
    text = noted()
    assert "resumed at batch 1" in text, "this concerns the rank"
    assert ("sound" in text) == warns
