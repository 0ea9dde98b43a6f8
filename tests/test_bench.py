"""`dali-stream bench`: figures that add up, of what was asked for."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from accelerate import PartialState
from support import forked
from support.datasets import TOP
from support.servers import Server
from support.slow import slow_after

from dali_stream import Dataset, Loader
from dali_stream.cli import main
from dali_stream.tools.bench.node import Node, needs

ROOT = Path(__file__).parents[1]
SHORT = ["--batch-size", "8", "--num-batches", "6", "--warmup", "2", "--device", "cpu"]


@pytest.fixture(autouse=True)
def _one_rank() -> Iterator[None]:
    """Reset the ranks that Accelerate stores during a measurement, since later tests set their own."""
    yield
    PartialState._reset_state()


def bench(capsys: pytest.CaptureFixture[str], uri: object, *arguments: str) -> dict[str, Any]:
    """The report of a measurement that ended well."""
    assert main(["bench", str(uri), *SHORT, *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(("mode", "frames"), slow_after(1, [("single", 2), ("sarm", 16), ("action_chunk", 2)]))
def test_rates_are_what_came_over_the_time_that_it_took(
    capsys: pytest.CaptureFixture[str], demo: Path, mode: str, frames: int
) -> None:
    # More batches than are in progress, so that not all of them are decoded before the first one that is timed.
    found = bench(capsys, demo, "--mode", mode, "--num-batches", "24", "--num-threads", "2")
    assert (found["samples"], found["frames"]) == (192, 192 * frames)  # of both cameras
    assert found["frames_per_s_node"] == pytest.approx(found["frames"] / found["wallclock_s"])
    assert found["samples_per_s"] == pytest.approx(found["samples"] / found["wallclock_s"])
    assert 0 < found["p50_sample_latency_ms"] <= found["p95_sample_latency_ms"] <= found["p99_sample_latency_ms"]
    assert found["wait_s_total"] <= found["wallclock_s"]
    assert found["decode_s_total"] == found["stage_s_total"]["decode_s"] > 0
    assert found["stage_s_total"]["graph_s"] + found["stage_s_total"]["starved_s"] <= found["wait_s_total"]
    assert found["bottleneck"]["stage"] != "training", "there is no model"
    assert re.match("Decoding|Copying|The DALI graph|Packing|Reading|Resizing|The decode", found["bottleneck"]["text"])
    assert found["cpu_s_per_sample"] > 0
    assert all(0 < found["cpu_ms"][work] < 1000 for work in ("decoded_frame", "delivered_frame", "sample"))
    # A GOP has two frames, and a window clamps and repeats some; what was under way at either end counts on one side only.
    assert 0.2 < found["decoded_per_delivered_frame"] < 5
    assert 1 <= found["unique_episodes_per_batch"] <= 6
    assert found["peak_rss_bytes"] > 100e6
    assert [point["s"] for point in found["timeline"]] == sorted(point["s"] for point in found["timeline"])
    assert found["timeline"][-1]["s"] <= found["wallclock_s"]


def test_cpu_and_memory_of_the_process_of_a_loader_count(
    capsys: pytest.CaptureFixture[str], demo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DALI_STREAM_IN_PROCESS")
    found = bench(capsys, demo)
    decoded = found["decoded_per_delivered_frame"] * found["frames"]
    assert found["cpu_s_per_sample"] * found["samples"] > found["cpu_ms"]["decoded_frame"] / 1000 * decoded / 2
    status = Path("/proc/self/status").read_text()
    assert found["peak_rss_bytes"] > int(re.search(r"VmHWM:\s*(\d+)", status)[1]) * 1024 + 50e6  # torch, twice


def test_reads_of_a_frame_cache_are_not_the_time_of_a_decoded_frame(
    capsys: pytest.CaptureFixture[str], small: Path, tmp_path: Path
) -> None:
    assert bench(capsys, small, "--frame-cache", str(tmp_path))["cpu_ms"]["decoded_frame"] is None
    assert main(["bench", str(small), *SHORT, "--frame-cache", str(tmp_path)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "ms to copy a frame" in text
    assert "to decode a frame" not in text


@pytest.mark.slow
def test_later_epochs_are_timed_apart_if_all_frames_fit_in_memory(
    capsys: pytest.CaptureFixture[str], small: Path, seen: list[Any]
) -> None:
    first = bench(capsys, small, "--batch-size", "4")
    later = first["later_epochs"]
    assert [batch["index"].shape[0] for batch in seen] == [4] * len(seen)
    epoch = Dataset(small).num_frames // 4
    assert len(seen) == epoch + 2 + 6, "the whole first epoch, and warm-up and timed batches of the second"
    assert (first["samples"], later["samples"], later["frames"]) == (24, 24, 48)
    assert later["decoded_per_delivered_frame"] == 0
    assert later["frames_per_s_node"] == pytest.approx(later["frames"] / later["wallclock_s"])
    assert not re.search("Decoding|GPU|memory_budget", later["bottleneck"]["text"])
    assert main(["bench", str(small), *SHORT]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert re.search(r"first epoch \d+ frames/s", text)
    assert re.search(r"ms a sample; [\d.]+ ms to decode a frame, [\d.]+ ms to copy a frame, [\d.]+ ms to plan a sample", text)
    assert re.search(r"later epochs \d+ frames/s.* decode nothing, because all frames fit in memory_budget", text)


def test_all_epochs_are_alike_if_frames_do_not_fit_in_memory(capsys: pytest.CaptureFixture[str], demo: Path) -> None:
    assert bench(capsys, demo, "--memory-budget", "4MiB")["later_epochs"] is None
    assert main(["bench", str(demo), *SHORT, "--memory-budget", "4MiB"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert re.search(r"speed \d+ frames/s", text)
    assert "epoch" not in text.partition("bottleneck")[0]


def test_a_short_first_epoch_is_not_timed_together_with_later_ones(capsys: pytest.CaptureFixture[str], small: Path) -> None:
    found = bench(capsys, small, "--batch-size", "64", "--num-batches", "9")
    frames = Dataset(small).num_frames
    assert 1 < frames // 64 < 9, "an epoch is shorter than the batches to time"
    assert found["samples"] == 64 * (frames // 64 - warmup_of(frames // 64))
    assert found["later_epochs"]["samples"] == 9 * 64


def warmup_of(epoch: int) -> int:
    """Batches of a short epoch that warm up: those of SHORT, as long as one is left to time."""
    return min(2, epoch - 1)


@pytest.mark.slow
def test_bytes_of_the_network_and_of_the_cache_are_told_apart(
    capsys: pytest.CaptureFixture[str], demo: Path, tmp_path: Path
) -> None:
    videos = sum(path.stat().st_size for path in demo.rglob("*.mp4"))
    local = bench(capsys, demo)
    assert local["source"] == "local"
    assert local["fetched_bytes"] == local["cached_bytes"] == local["fetch_s_total"] == 0
    with Server(demo) as server:
        # The videos exceed the budget, and the run is longer than an epoch: every byte is read after the warm-up as well.
        little, cached = ["--memory-budget", "600kB", "--num-batches", "66"], ["--cache-dir", str(tmp_path)]
        uncached, _, warm = (bench(capsys, server.url, *little, *cache) for cache in ([], cached, cached))
    assert (uncached["source"], warm["source"]) == ("http", "http")
    assert uncached["fetched_bytes"] > 0 < uncached["requests"]
    assert uncached["fetch_s_total"] > 0 == uncached["cached_bytes"]
    assert warm["fetched_bytes"] < 0.05 * videos < warm["cached_bytes"]


@pytest.mark.slow
def test_reports_are_written_as_json(capsys: pytest.CaptureFixture[str], demo: Path, tmp_path: Path) -> None:
    found = bench(capsys, demo, "--source", "bucket", "--mode", "sarm", "--out-dir", str(tmp_path / "results"))
    path = tmp_path / "results/bucket-sarm-auto.json"
    assert found.pop("written") == str(path)
    assert [each.name for each in path.parent.iterdir()] == [path.name]
    assert json.loads(path.read_text()) == found
    assert found["dataset"] == demo.name  # a report holds no folder of the machine it was made on
    assert str(demo.parent) not in path.read_text()


@pytest.mark.slow
@pytest.mark.parametrize(("given", "size"), [((), [224, 224]), (("--image-size", "64x80"), [64, 80])])
def test_frames_are_resized_as_in_the_example_of_the_readme(
    capsys: pytest.CaptureFixture[str], demo: Path, given: tuple[str, ...], size: list[int], seen: list[Any]
) -> None:
    assert bench(capsys, demo, *given)["image_size"] == size
    assert {tuple(batch[TOP].shape[-2:]) for batch in seen} == {tuple(size)}


def test_a_report_has_the_selected_episodes(capsys: pytest.CaptureFixture[str], small: Path) -> None:
    found = bench(capsys, small, "--episodes", "1", "--num-batches", "1")
    assert (found["selected_episodes"], found["episodes"]) == ([1], 1)


def test_the_recorded_size_can_be_measured(capsys: pytest.CaptureFixture[str], demo: Path, seen: list[Any]) -> None:
    found = bench(capsys, demo, "--image-size", "recorded")
    assert (found["image_size"], found["cameras"][TOP]) == (None, [128, 160])
    assert {tuple(batch[TOP].shape[-2:]) for batch in seen} == {(128, 160)}


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return a list that receives the batches of a measurement."""
    found: list[Any] = []
    whole = Loader.__iter__

    def noted(loader: Loader) -> Iterator[Any]:
        for batch in whole(loader):
            found.append(batch)
            yield batch

    monkeypatch.setattr(Loader, "__iter__", noted)
    return found


def test_no_frame_is_no_measurement(capsys: pytest.CaptureFixture[str], demo_copy: Path) -> None:
    info = json.loads((demo_copy / "meta/info.json").read_text())
    info["features"] = {key: feature for key, feature in info["features"].items() if feature["dtype"] != "video"}
    (demo_copy / "meta/info.json").write_text(json.dumps(info))
    assert main(["bench", str(demo_copy), *SHORT]) == 1
    assert "no frame was measured" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--mode", "double"], "Unknown mode 'double'. Allowed: single, sarm, action_chunk"),
        (["--num-threads", "0"], "'0'"),
        (["--image-size", "224"], "--image-size must be HEIGHTxWIDTH or HEIGHT WIDTH"),
        (["--ranks", "8"], "--step-ms must be given with --ranks"),
        (["--cores", "96"], "--step-ms must be given with --cores"),
        (["--step-ms", "0"], "--step-ms must be greater than 0, got 0"),
        (["--step-ms", "nan"], "--step-ms must be greater than 0, got nan"),
        (["--step-ms", "5", "--ranks", "0"], "--ranks must be a whole number of 1 or more, got '0'"),
        (["--source", "../a"], "--source must be up to 64 letters, digits, '_', '.' and '-', got '../a'"),
    ],
)
def test_bad_arguments_are_one_line(capsys: pytest.CaptureFixture[str], demo: Path, arguments: list[str], said: str) -> None:
    assert main(["bench", str(demo), *SHORT, *arguments]) == 2
    assert said in capsys.readouterr().err


# ----------------------------------------------------------------------- what a node needs


@pytest.mark.parametrize(("decode_ms", "decoded", "cores"), [(3.26, 1.0, 37), (4.11, 1.0, 44), (0.88, 1.0, 17), (3.26, 0.0, 9)])
def test_the_worked_example_of_the_page(decode_ms: float, decoded: float, cores: int) -> None:
    """8 GPUs, 120 ms a step, batches of 64 samples of two cameras of 480×640, with the rates of the page."""
    samples = 1000
    work = {
        "samples": samples,
        "frames": 2 * samples,
        "decoded_frames": 2 * samples * decoded,
        "decode_cpu_s": 2 * samples * decoded * decode_ms / 1e3,
        "copy_cpu_s": 2 * samples * 0.07e-3,
        "plan_cpu_s": samples * 0.14e-3,
        "needed_bytes": 2 * samples * 9e3,
    }
    setting = {"batch_size": 64, "memory_budget": 4 << 30, "frame_cache_bytes": 10**9, "remote": True}
    found = needs(Node(8, 96, 0.12), work, **setting)
    by_hand = 8 * (64 / 0.12 * (2 * (decoded * decode_ms + 0.07) + 0.14) / 1e3 + 1)
    assert found["cores_needed"] == pytest.approx(by_hand)
    assert round(found["cores_needed"]) == cores
    assert round(found["cores_without_decoding"]) == 9
    assert found["decoded_per_delivered_frame"] == decoded
    assert found["planner_s"] == pytest.approx(64 * 0.14e-3)
    assert found["memory_bytes"] == 8 * (4 * 1024**3 + 10**9)
    assert found["frame_cache_bytes"] == 10**9
    assert found["network_bytes_per_s"] == pytest.approx(8 / 0.12 * 64 * 2 * 9e3)
    assert needs(Node(8, 96, 0.12), work, **setting | {"remote": False})["network_bytes_per_s"] == 0


def test_rows_without_frames_are_sized_as_well() -> None:
    work = dict.fromkeys(("frames", "decoded_frames", "decode_cpu_s", "copy_cpu_s", "needed_bytes"), 0.0)
    setting = {"batch_size": 10, "memory_budget": 1 << 20, "frame_cache_bytes": 0, "remote": False}
    found = needs(Node(2, 1, 0.5), work | {"samples": 5, "plan_cpu_s": 0.5}, **setting)
    assert (found["decoded_per_delivered_frame"], found["planner_s"], found["cores_needed"]) == (None, 1.0, 6.0)


def test_a_node_is_sized_by_the_measured_work(capsys: pytest.CaptureFixture[str], small: Path) -> None:
    """All frames fit in memory, so the first epoch decodes each of them once. The first batches decode more than that."""
    size = ["--image-size", "64x80", "--memory-budget", "64MiB"]
    found = bench(capsys, small, *size, "--ranks", "4", "--cores", "32", "--step-ms", "50")
    node, dataset = found["node"], Dataset(small)
    assert (node["ranks"], node["cores"], node["step_s"]) == (4, 32, 0.05)
    assert 4 < node["cores_without_decoding"] < node["cores_needed"]
    assert 1 <= node["decoded_per_delivered_frame"] < 1.1, "of the whole first epoch"
    assert node["memory_bytes"] == 4 * ((64 << 20) + 10**9)
    assert node["frame_cache_bytes"] == dataset.num_frames * 2 * 64 * 80 * 3
    assert node["network_bytes_per_s"] == 0
    assert bench(capsys, small, *size)["node"] is None
    assert main(["bench", str(small), *SHORT, *size, "--cores", "1", "--ranks", "4", "--step-ms", "0.01"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert re.search(
        r"node \d+\.\d cores for 4 ranks and a step of 0.01 ms, with 1\.\d\d frames decoded per delivered frame", text
    )
    assert "1 core: not enough the planner of a rank takes" in text
    assert "4.3 GB of memory: for each rank, a memory_budget of 64MiB and 1 GB" in text
    assert "of local disk for a frame_cache of all frames" in text
    assert "over the network" not in text


@pytest.mark.slow
def test_a_node_reads_a_remote_dataset_once_per_epoch(capsys: pytest.CaptureFixture[str], small: Path) -> None:
    videos = sum(path.stat().st_size for path in small.rglob("*.mp4"))
    step = ["--ranks", "2", "--step-ms", "250"]
    with Server(small) as server:
        found = bench(capsys, server.url, *step)
        assert main(["bench", server.url, *SHORT, *step]) == 0
    per_sample = found["node"]["network_bytes_per_s"] / (2 * 8 / 0.25)
    assert 0.9 * videos < per_sample * Dataset(small).num_frames < 1.5 * videos
    assert "/s over the network, until a cache_dir has the dataset" in " ".join(capsys.readouterr().out.split())


@pytest.mark.slow
def test_ranks_are_measured_together(small: Path, tmp_path: Path) -> None:
    command = forked.command(2, "dali_stream.cli", "bench", small, *SHORT, "--out-dir", tmp_path)
    done = subprocess.run(command, env=forked.environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "local-single-auto.json").read_text())
    assert (found["nodes"], found["ranks"], found["samples"]) == (1, 2, 2 * 48)
    assert found["samples_per_s"] == pytest.approx(found["samples"] / found["wallclock_s"])
    assert Dataset(small).num_frames > found["samples"]
