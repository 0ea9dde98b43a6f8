"""Bottlenecks of a loader: the stage that its times point to, and what may help it."""

from __future__ import annotations

import itertools
import logging
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.servers import Server
from torchcodec.decoders import VideoDecoder  # type: ignore[attr-defined]  # exported, but not by __all__

from dali_stream import Dataset, Loader
from dali_stream.observe.counters import Counters
from dali_stream.run.bottleneck import STAGES, Bottleneck, Setup, find
from dali_stream.schedule.plan import Schedule


def times(**given: float) -> dict[str, float]:
    """Counters of a loader that waited 10 s for batches. The arguments override single counters."""
    zero = dict.fromkeys((key for stages in STAGES.values() for key in stages), 0.0)
    return zero | {"frames": 100, "decoded_frames": 150, "wait_s": 10.0} | given


def setup(**given: Any) -> Setup:
    """With a DALI graph wherever a loader with these settings has one."""
    settings = {"num_threads": 4, "cores": 4, "decoders": {"torchcodec"}} | given
    return Setup(**{"uses_dali": bool(given.get("gpu")) or "dali" in settings["decoders"]} | settings)


STARVED = {"starved_s": 9.0, "graph_s": 0.5}


@pytest.mark.parametrize(
    ("spent", "stage", "share"),
    [
        ({"wait_s": 0.5, "training_s": 9.5, "decode_s": 38.0, "starved_s": 0.5}, "training", 0.95),
        ({**STARVED, "decode_s": 32.0, "pack_s": 4.0}, "decode", 0.8),
        ({**STARVED, "decode_s": 10.0, "resize_s": 24.0}, "resize", 0.6),
        ({**STARVED, "decode_s": 1.0, "read_s": 36.0}, "read", 0.9),
        ({**STARVED, "decode_s": 8.0, "pack_s": 20.0}, "pack", 0.5),
        # 8 s of four decode threads are a fifth of their time, 8 s of the one planner nearly all of it.
        ({**STARVED, "decode_s": 8.0, "rows_s": 8.0}, "rows", 0.8),
        ({**STARVED, "gather_s": 6.0, "plan_s": 3.0}, "gather", 0.6),
        ({**STARVED, "gather_s": 3.0, "plan_s": 6.0}, "plan", 0.6),
        ({**STARVED, "decode_s": 8.0, "plan_s": 4.0}, "prefetch", 1.0),
        ({"graph_s": 7.1, "starved_s": 2.0, "decode_s": 36.0}, "graph", 0.71),
        ({"graph_s": 2.0, "starved_s": 2.0}, "handover", 0.6),
        # Training takes half of the time, and waits for the other half.
        ({"wait_s": 5.0, "training_s": 5.0, "starved_s": 5.0, "decode_s": 36.0}, "decode", 0.9),
    ],
)
def test_the_stage_that_limits_is_named_with_its_share(spent: dict[str, float], stage: str, share: float) -> None:
    found = find(times(**spent), setup())
    assert found is not None
    assert (found.stage, found.share) == (stage, pytest.approx(share))
    if stage != "prefetch":
        assert found.shares[stage] == pytest.approx(share)
    percent = f"{share * 100:.0f} %" if stage != "training" else "waits for batches 5 %"
    assert percent in found.text
    assert str(found) == found.text
    assert len(re.findall(r"\. [A-Z]", found.text)) <= 1, "two sentences"


DECODE, READ, ROWS = ({**STARVED, **spent} for spent in ({"decode_s": 36.0}, {"read_s": 36.0}, {"rows_s": 9.0}))
GRAPH = {"graph_s": 9.5}
LONG_GOP = {"decoded_frames": 650}
CODED = {"decoders": {"dali"}}


@pytest.mark.parametrize(
    ("spent", "given", "said"),
    [
        (DECODE, {}, "more CPU cores than the 4 of this process, or a GPU that decodes the videos (see Loader.routes)"),
        (DECODE, {"cores": 16}, "help: num_threads=16, as many"),
        (DECODE | LONG_GOP, {"cores": 16}, "--codec h264 --gop 2`), or num_threads=16"),
        (DECODE, {"frames_budget": 9 << 30}, 'memory_budget="9.0GiB", which holds all decoded frames'),
        (DECODE, {"frames_budget": 9 << 30, "sharded": True}, '"9.0GiB", which holds all decoded frames of this rank'),
        (DECODE, {"keeps_all": True, "sharded": True}, "since memory_budget holds all decoded frames of this rank."),
        (DECODE, {"keeps_all": True}, "Later epochs decode only frames that no earlier one has shown, since memory_budget"),
        (DECODE | LONG_GOP, {"decoders": set()}, "help: more CPU cores than the 4 of this process."),  # its frames are images
        (
            DECODE,
            {"gpu": True},
            "more CPU cores than the 4 of this process, or a GPU that decodes the videos (see Loader.routes)",
        ),
        (DECODE, {"gpu": True, "decoders": {"torchcodec-cuda"}}, "help: a GPU with more decode engines"),
        (DECODE, {"gpu": True, "decoders": set()}, "help: more CPU cores than the 4 of this process."),
        (READ, {}, "help: a faster disk"),
        (READ, {"remote": True}, "help: cache_dir on a local disk"),
        (READ, {"remote": True, "cached": True}, "help: faster or nearer storage, or a larger memory_budget if"),
        (ROWS, {"remote": True}, "help: cache_dir"),
        (ROWS, {}, "help: a faster disk, or a larger memory_budget, which keeps more rows"),
        ({**STARVED, "pack_s": 36.0}, {}, "help: fewer cameras"),
        ({**STARVED, "pack_s": 36.0} | LONG_GOP, CODED | {"gpu": True}, "--codec hevc --gop 2`), or fewer cameras"),
        ({**STARVED, "resize_s": 36.0}, {"cores": 8}, "help: num_threads=8"),
        ({**STARVED, "gather_s": 9.0}, {}, "help: fewer features or shorter windows"),
        ({**STARVED, "plan_s": 9.0}, {}, "help: fewer cameras or shorter windows"),
        (STARVED, {}, "help: a larger prefetch"),
        (GRAPH, {}, "Copying frames into batches takes 95 %"),
        (GRAPH, {}, 'help: a smaller image_size, image_dtype="uint8", or fewer'),
        (GRAPH, {"uses_dali": True}, "The DALI graph takes 95 %"),
        (GRAPH, {"uses_dali": True}, "or fewer operators in dali_graph"),
        (GRAPH, CODED, 'help: decode="torchcodec", since DALI decodes on the CPU here'),
        (GRAPH, CODED | {"gpu": True}, "The DALI graph, which decodes the videos, takes 95 %"),
        (GRAPH, CODED | {"gpu": True}, "help: a GPU with more decode engines"),
        (GRAPH | LONG_GOP, CODED | {"gpu": True}, "--codec hevc --gop 2`), or a GPU with more"),
        ({}, {}, "help: normalization in the model instead of normalize=, or whole epochs"),
    ],
)
def test_what_may_help_fits_the_stage_and_the_settings(spent: dict[str, float], given: dict[str, Any], said: str) -> None:
    assert said in str(find(times(**spent), setup(**given)))


def test_everything_that_may_help_is_named() -> None:
    assert str(find(times(**DECODE | LONG_GOP), setup(cores=16, frames_budget=9 << 30))) == (
        "Decoding takes 90 % of the time of the 4 decode threads, and training waits for batches 100 % of the time. "
        'What may help: memory_budget="9.0GiB", which holds all decoded frames, or shorter GOPs (`dali-stream prepare URI OUT '
        "--codec h264 --gop 2`), or num_threads=16, as many as this process has cores."
    )


def test_nothing_is_said_of_no_time() -> None:
    assert find(times(wait_s=0), setup()) is None


def test_a_stage_inside_another_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = {"s": 100.0}  # of the wall and of the thread's CPU
    monkeypatch.setattr("time.perf_counter", lambda: clock["s"])
    monkeypatch.setattr("time.thread_time", lambda: clock["s"] / 2)
    counters = Counters()
    with counters.timed("plan_s"):
        clock["s"] += 1
        with counters.timed("rows_s"):
            clock["s"] += 10
        with counters.timed("gather_s"), counters.timed("pack_s"):
            clock["s"] += 100
    assert (counters.plan_s, counters.rows_s, counters.gather_s, counters.pack_s) == (1, 10, 0, 100)
    assert (counters.plan_cpu_s, counters.decode_cpu_s) == (5.5, 50)


def test_it_is_said_once_after_200_batches(odd: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "dali_stream")
    with Loader(odd, batch_size=1) as loader:
        batches = iter(())
        for number in range(1, 421):  # 20 epochs of 21 batches
            batch = next(batches, None) or next(batches := iter(loader))
            assert batch["index"].shape == (1,)
            said = [record for record in caplog.records if "200 batches" in record.message]
            assert len(said) == (number >= 200)
        found = loader.bottleneck()
        assert found is not None
        assert loader.bottleneck(loader.stats()) is None, "no time has passed since"
    assert said[0].levelno == (logging.INFO if "keeps up" in said[0].message else logging.WARNING)
    assert "Loader, after 200 batches: " in said[0].message


@pytest.mark.parametrize(("slow", "rank", "level"), [(True, 0, "INFO"), (False, 0, "WARNING"), (False, 1, "INFO")])
def test_only_what_holds_training_up_is_a_warning_and_of_one_rank(
    odd: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, slow: bool, rank: int, level: str
) -> None:
    caplog.set_level(logging.INFO, "dali_stream")
    clock = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: clock.__setitem__(0, clock[0] + 1e-6) or clock[0])
    with Loader(odd, batch_size=1, rank=rank, world_size=2) as loader:
        for _ in range(21):
            for _ in loader:
                clock[0] += 1.0 if slow else 0.0
    [record] = [record for record in caplog.records if "200 batches" in record.message]
    assert record.levelname == level
    assert ("keeps up" in record.message) == slow


@pytest.mark.slow
def test_an_epoch_that_decodes_nothing_is_not_limited_by_decoding(demo: Path) -> None:
    with Loader(demo, batch_size=4, image_size=(96, 128), num_threads=1) as loader:
        for _ in loader:
            pass
        seen = loader.stats()
        for _ in loader:
            pass
        assert loader.stats()["decoded_frames"] == seen["decoded_frames"]
        limit, asked = loader.bottleneck(), loader.bottleneck(seen)
    for found in (limit, asked):
        assert found is not None
        assert found.stage not in ("decode", "resize", "pack", "read")
        assert not re.search("GPU|memory_budget", found.text), found.text


def test_the_last_200_batches_are_judged(odd: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A training loop that was slow for its first 210 batches is not held against the next 200, nor the other way round."""
    clock = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: clock.__setitem__(0, clock[0] + 1e-6) or clock[0])
    stages = []
    with Loader(odd, batch_size=1) as loader:
        delivered = 0
        while delivered < 420:
            for _ in loader:
                clock[0] += 1.0 if delivered < 210 else 0.0
                delivered += 1
                if delivered in (210, 420):
                    stages.append(getattr(loader.bottleneck(), "stage", None))
        whole = loader.stats()
    assert stages[0] == "training"
    assert stages[1] != "training"
    assert whole["training_s"] > whole["wait_s"], "all batches together would still point to the training loop"


@pytest.mark.slow
def test_the_line_waits_for_an_epoch_like_those_to_come(demo: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The first epoch of this dataset decodes everything, and no later one decodes anything."""
    caplog.set_level(logging.INFO, "dali_stream")
    with Loader(demo, batch_size=2, image_size=(32, 32)) as loader:
        batches = len(loader)
        assert batches > 200
        for _ in loader:
            pass
        assert not [record for record in caplog.records if " batches: " in record.message]
        for _ in loader:
            pass
    [record] = [record for record in caplog.records if " batches: " in record.message]
    assert not any(text in record.message for text in ("Decoding", "decodes"))


@pytest.mark.slow
def test_the_end_of_a_resumed_epoch_is_no_whole_epoch(demo: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The epoch after it decodes everything, so the line waits for another one."""
    caplog.set_level(logging.INFO, "dali_stream")
    settings: dict[str, Any] = {"batch_size": 2, "image_size": (32, 32)}
    with Loader(demo, **settings) as loader:
        state = loader.state_dict() | {"position": 2 * (len(loader) - 1)}
    with Loader(demo, **settings) as loader:
        loader.load_state_dict(state)
        assert len(list(loader)) == 1
        for expected in (0, 1):
            for _ in loader:
                pass
            assert len([record for record in caplog.records if " batches: " in record.message]) == expected


@pytest.mark.slow
def test_more_memory_is_recommended_with_the_amount_that_holds_all_frames(h264_demo: Path) -> None:
    """That amount saves all that later epochs decode again."""
    settings: dict[str, Any] = {"batch_size": 4, "image_size": (128, 160), "image_dtype": "uint8", "num_threads": 1}
    with Loader(h264_demo, memory_budget="4MiB", **settings) as loader:
        for epoch in range(6):
            for _ in loader:
                pass
            limit = loader.bottleneck()
            if epoch and limit is not None and limit.stage == "decode":  # beside other programs, it may be another stage
                break
    assert limit is not None
    assert limit.stage == "decode", limit.text
    amount = re.search(r'memory_budget="([\w.]+)", which holds all decoded frames', limit.text)
    assert amount, limit.text
    with Loader(h264_demo, memory_budget=amount[1], **settings) as loader:
        for _ in loader:
            pass
        once = loader.stats()["decoded_frames"]
        for _ in loader:
            pass
        assert loader.stats()["decoded_frames"] == once


def test_the_training_process_plans_only_its_own_batches(demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that trains replays no schedule, neither for the line in the log nor for a call."""
    threads, plan = set(), Schedule.plan

    def counted(schedule: Schedule) -> Any:
        threads.add(threading.get_ident())
        return plan(schedule)

    monkeypatch.setattr(Schedule, "plan", counted)
    with Loader(demo, batch_size=1, image_size=(64, 80), memory_budget=4 << 20, device="cpu") as loader:
        for _ in itertools.islice(loader, 201):
            pass
        assert loader.bottleneck() is not None
    assert threads
    assert threading.get_ident() not in threads


# ----------------------------------------------------------------------- a stage that is slowed down by waiting


@pytest.fixture
def slow_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each frame up to the last one of a clip takes 5 ms more, whatever else the machine does."""
    decode = VideoDecoder.get_frames_at

    def slow(decoder: VideoDecoder, indices: list[int]) -> Any:
        last = getattr(decoder, "last", -1)  # frame of the part before
        decoder.last = max(indices)
        time.sleep(max(decoder.last - last, 0) * 0.005)
        return decode(decoder, indices)

    monkeypatch.setattr(VideoDecoder, "get_frames_at", slow)


def measured(dataset: Any, step_s: float = 0.0, **changed: Any) -> tuple[float, Bottleneck]:
    """The batches per second of an epoch after its first batch, whose time includes the start, and what limits them."""
    settings: dict[str, Any] = {"batch_size": 8, "image_size": (32, 40), "image_dtype": "uint8", "device": "cpu"}
    with Loader(dataset, **settings | changed) as loader:
        seen: dict[str, Any] = {}
        for _ in loader:
            seen = seen or loader.stats()
            time.sleep(step_s)
        limit, now = loader.bottleneck(seen), loader.stats()
    assert limit is not None
    grown = {key: now[key] - seen[key] for key in ("batches", "wait_s", "training_s")}
    return grown["batches"] / (grown["wait_s"] + grown["training_s"]), limit


@pytest.mark.slow
@pytest.mark.usefixtures("slow_decoding")
def test_more_threads_are_recommended_and_help(h264_demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 1})
    before, limit = measured(h264_demo, num_threads=1)
    assert limit.stage == "decode"
    assert "num_threads=2" in limit.text
    after, _ = measured(h264_demo, num_threads=2)
    assert after > 1.2 * before


@pytest.mark.slow
@pytest.mark.usefixtures("slow_decoding")
def test_shorter_gops_are_recommended_and_help(written: Callable[..., Path]) -> None:
    """With little memory, so that most frames of a GOP are decoded again for each frame."""
    options = {"memory_budget": "500kB", "num_threads": 2}
    roots = (written(episodes=4, size=(128, 160), codec="h264", gop=gop) for gop in (12, 2))
    long, short = (Dataset(root, episodes=[0, 1]) for root in roots)
    before, limit = measured(long, **options)
    assert limit.stage == "decode"
    assert "--gop 2" in limit.text
    after, _ = measured(short, **options)
    assert after > 1.2 * before


@pytest.mark.slow
def test_a_cache_of_a_slow_server_is_recommended_and_helps(demo: Path, tmp_path: Path) -> None:
    """A run needs no bytes of the server if an earlier run has left them in cache_dir."""
    with Server(demo, bytes_per_s=200_000.0) as server:
        before, limit = measured(server.url, 0.02)
        assert limit.stage in ("read", "rows")
        assert "cache_dir" in limit.text
        measured(Dataset(server.url, cache_dir=tmp_path))
        after, _ = measured(Dataset(server.url, cache_dir=tmp_path), 0.02)
    assert after > 1.2 * before


def test_a_loader_that_keeps_up_needs_no_change(demo: Path) -> None:
    _, limit = measured(Dataset(demo, episodes=[0, 1]), 0.1)
    assert limit.stage == "training"
    assert "A faster loader would not help" in limit.text
