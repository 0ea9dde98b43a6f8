"""Traces of a Loader's threads."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from support.servers import Server

import dali_stream
from dali_stream import Dataset, Loader
from dali_stream.cli import main
from dali_stream.observe.tracing import FETCHES


@pytest.fixture(scope="module")
def traced(small: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The events of three batches of a dataset on a server."""
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    with Server(small) as server, dali_stream.trace(path), Loader(
        Dataset(server.url), batch_size=16, device="cpu", num_threads=2, image_size=(48, 64)
    ) as loader:  # fmt: skip
        for _, _batch in zip(range(3), loader, strict=False):
            pass
    events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return events


def test_events_have_what_perfetto_needs(traced: list[dict[str, Any]]) -> None:
    assert all({"ph", "ts", "pid", "tid"} <= event.keys() for event in traced)
    assert {event["ph"] for event in traced} == {"M", "X", "s", "f"}
    names = {event["tid"]: event["args"]["name"] for event in traced if event["ph"] == "M"}
    assert {event["tid"] for event in traced} == names.keys()
    kinds = {name.rstrip(" 0123456789") for name in names.values()}
    assert {"MainThread", "dali_stream planner", "dali_stream decode", "dali_stream fetch"} <= kinds


def test_spans_of_a_thread_nest(traced: list[dict[str, Any]]) -> None:
    threads = defaultdict(list)
    for event in traced:
        if event["ph"] == "X":
            threads[event["tid"]].append((event["ts"], -event["dur"], event["ts"] + event["dur"]))
    for spans in threads.values():
        open_until: list[float] = []
        for start, _, stop in sorted(spans):
            while open_until and open_until[-1] <= start:
                open_until.pop()
            assert not open_until or stop <= open_until[-1] + 1e-3
            open_until.append(stop)


def test_each_stage_has_the_number_of_its_batch(traced: list[dict[str, Any]]) -> None:
    batches = defaultdict(set)
    for event in traced:
        if event["ph"] == "X":
            batches[event["name"]].add(event["args"].get("batch"))
    for stage in ("plan", "rows", "gather", "starved", "copy", "graph"):
        assert {0, 1, 2} <= batches[stage], stage
    for stage in ("pack", "decode"):  # a clip may hold frames of later batches, and has the number of its first one
        assert 0 in batches[stage], stage
    for stage in ("plan", "rows", "gather", "pack", "decode", "starved", "copy", "graph"):
        assert None not in batches[stage], stage
    assert batches["training"] == {0, 1}
    assert batches["fetch video"] & {0, 1, 2}


def test_arrows_lead_from_fetches_to_their_batch(traced: list[dict[str, Any]]) -> None:
    spans = [event for event in traced if event["ph"] == "X"]
    arrows = defaultdict(dict)
    for event in traced:
        if event["ph"] in "sf":
            arrows[event["id"]][event["ph"]] = event
    assert arrows
    for ends in arrows.values():
        assert ends.keys() == {"s", "f"}
        assert ends["s"]["ts"] <= ends["f"]["ts"]
        numbers = []
        for event, names in ((ends["s"], FETCHES), (ends["f"], ("graph",))):
            [span] = [
                span
                for span in spans
                if span["name"] in names and span["tid"] == event["tid"]
                and span["ts"] <= event["ts"] <= span["ts"] + span["dur"] + 1e-3
            ]  # fmt: skip
            numbers.append(span["args"]["batch"])
        assert numbers[0] == numbers[1]


def test_nothing_is_recorded_after_the_block(small: Path, tmp_path: Path) -> None:
    with Loader(small, batch_size=8, device="cpu", image_size=(48, 64)) as loader:
        batches = iter(loader)
        next(batches)
        with dali_stream.trace(tmp_path / "a.json"):
            next(batches)
            with pytest.raises(ValueError, match="inside of another trace"), dali_stream.trace(tmp_path / "b.json"):
                pass
        written = (tmp_path / "a.json").read_text()
        next(batches)
    assert (tmp_path / "a.json").read_text() == written
    assert not (tmp_path / "b.json").exists()
    spans = [event for event in json.loads(written)["traceEvents"] if event["ph"] == "X"]
    assert {span["args"]["batch"] for span in spans if span["name"] == "graph"} == {1}
    assert all(span["ts"] >= 0 and "batch" in span["args"] for span in spans)  # also what began before the trace


def test_a_profile_of_torch_names_the_loader(small: Path) -> None:
    with (
        Loader(small, batch_size=8, device="cpu", image_size=(48, 64)) as loader,
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile,
    ):
        next(iter(loader))
    assert "dali_stream: next batch" in {event.key for event in profile.key_averages()}


def test_bench_writes_a_trace(small: Path, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    sizes = ["--batch-size", "8", "--num-batches", "3", "--warmup", "1", "--device", "cpu", "--image-size", "48x64"]
    assert main(["bench", str(small), *sizes, "--trace", str(path)]) == 0
    assert {event["name"] for event in json.loads(path.read_text())["traceEvents"]} > {"plan", "decode", "graph"}
