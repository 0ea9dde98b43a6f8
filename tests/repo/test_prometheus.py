"""The example for Prometheus in docs/tracing.md, and the liveness probe of the pod, which reads what it serves."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import prometheus_client
import pytest
import yaml
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from support.faults import hang
from support.servers import Handler, Server

from dali_stream import DaliStreamError, Loader

ROOT = Path(__file__).parents[2]
OPENMETRICS = "application/openmetrics-text; version=1.0.0"


@contextmanager
def served(loader: Loader) -> Iterator[int]:
    """Serve the metrics of a Loader with the class of the page. Yield the port."""
    page = (ROOT / "docs/tracing.md").read_text()
    example = re.search(r"^import prometheus_client\n.*?(?=^with )", page, re.MULTILINE | re.DOTALL)
    assert example
    namespace: dict[str, Any] = {}
    exec(example[0], namespace)
    registry = prometheus_client.CollectorRegistry()
    registry.register(namespace["LoaderCollector"](loader))
    server, thread = prometheus_client.start_http_server(0, addr="127.0.0.1", registry=registry)
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def scraped(port: int) -> dict[str, float]:
    """The metrics in OpenMetrics text."""
    with urlopen(Request(f"http://127.0.0.1:{port}/metrics", headers={"Accept": OPENMETRICS})) as answer:
        assert answer.headers["Content-Type"].startswith("application/openmetrics-text")
        text = answer.read().decode()
    return {family.name: family.samples[0].value for family in text_string_to_metric_families(text)}


def alive(port: int, limit_s: float) -> bool:
    """What the liveness probe of the pod says, with another port and another limit."""
    [container] = yaml.safe_load((ROOT / "docker/k8s/pod.yaml").read_text())["spec"]["containers"]
    python, option, code = container["livenessProbe"]["exec"]["command"]
    assert (python, option, code.count("9464"), code.count("1800")) == ("python", "-c", 1, 1)
    code = code.replace("9464", str(port)).replace("1800", str(limit_s))
    done = subprocess.run([sys.executable, option, code], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("", "")
    return done.returncode == 0


def test_each_counter_is_a_metric(small: Path) -> None:
    with Loader(small, batch_size=8, device="cpu", in_process=True) as loader, served(loader) as port:
        before = scraped(port)
        assert set(before) == {f"dali_stream_{name}" for name in loader.stats()}
        assert (before["dali_stream_batches"], before["dali_stream_first_batch_s"]) == (0, 0)
        batches = iter(loader)
        next(batches)
        next(batches)
        after = scraped(port)
        assert (after["dali_stream_batches"], after["dali_stream_samples"]) == (2, 16)
        assert after["dali_stream_waiting_s"] == 0  # the loop has its batch
        assert 0 < after["dali_stream_since_batch_s"] < scraped(port)["dali_stream_since_batch_s"]
        assert alive(port, 0.0)


@pytest.mark.parametrize("in_process", [True, False])
def test_a_stalled_loader_is_seen(in_process: bool, small: Path) -> None:
    """A server stops answering in the middle of a run."""
    asked = threading.Event()

    def hang_and_tell(handler: Handler, data: bytes, fields: dict[str, str]) -> None:
        asked.set()
        hang(handler, data, fields)

    def train(loader: Loader) -> None:
        try:
            next(iter(loader))
        except DaliStreamError as error:
            ended.append(error)

    ended: list[DaliStreamError] = []
    with Server(small) as server:
        with Loader(server.url, batch_size=8, device="cpu", in_process=in_process) as loader, served(loader) as port:
            server.set_faults(itertools.repeat(hang_and_tell))
            training = threading.Thread(target=train, args=(loader,))
            training.start()
            assert asked.wait(300)
            first, second = scraped(port), scraped(port)
            assert 0 < first["dali_stream_waiting_s"] < second["dali_stream_waiting_s"] < second["dali_stream_since_batch_s"]
            assert alive(port, 1800)
            assert not alive(port, first["dali_stream_waiting_s"])
        training.join()
    assert len(ended) == 1
    assert loader.stats()["waiting_s"] == 0


def test_the_probe_passes_while_nothing_is_served(small: Path) -> None:
    with Loader(small, batch_size=8, device="cpu", in_process=True) as loader, served(loader) as port:
        pass
    assert alive(port, 0.0)
