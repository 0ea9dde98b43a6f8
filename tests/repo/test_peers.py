"""benchmarks/peers.py compares loaders side by side and reports the errors of each."""

from __future__ import annotations

import contextlib
import importlib
import io
import itertools
import json
import shutil
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from matplotlib.container import BarContainer

from dali_stream.system.gpu import gpu_index

ROOT = Path(__file__).parents[2]
PROGRAMS = ROOT / "benchmarks/peer_programs"
SHORT = ["--batch-size", "8", "--batches", "3", "--rounds", "1", "--warmup", "1", "--check", "3", "--device", "cpu"]

# Replaces the Python of an environment with LeRobot. Instead of the requested program, it runs the plain loop with another
# order, which delivers the previous frame. For lerobot_stream.py, it fails at once.
FAKE = """#!{python}
import json, runpy, sys
from pathlib import Path

program, path = sys.argv[1], Path(sys.argv[2])
if program.endswith("lerobot_stream.py"):
    sys.exit("ShardError: no shard left")
import numpy as np
spec = json.loads(path.read_text())
with np.load(spec["order"]) as file:
    order = dict(file)
order["numbers_1"] = np.maximum(order["numbers_1"] - 1, 0)
spec["order"] = str(path.with_name("other.npz"))
np.savez(spec["order"], **order)
path.write_text(json.dumps(spec))
sys.path[0] = {programs!r}
sys.argv[1:] = [str(path)]
runpy.run_path({programs!r} + "/torchcodec_loop.py", run_name="__main__")
"""


@pytest.fixture(scope="module")
def run(small: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, dict[str, Any]], str, Path]:
    """The report by side, the table and the folder of a run with two sides that are right, and others that are not."""
    folder = tmp_path_factory.mktemp("peers")
    fake = folder / "python"
    fake.write_text(FAKE.format(python=sys.executable, programs=str(PROGRAMS)))
    fake.chmod(0o755)
    # Without a seed, this loader would have the order of the seed 0.
    line = ["peers.py", str(small), *SHORT, "--image-size", "96", "128", "--seed", "1"]
    line += ["--workers", "0", "--lerobot-python", str(fake), "--json", "--out", str(folder / "report.json")]
    line += ["--only", "torchcodec", "lerobot, 0 workers", "lerobot-streaming"]
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        patch.setattr(tempfile, "tempdir", str(folder))
        patch.setattr(sys, "argv", line)
        assert importlib.import_module("peers").main() == 0  # the others' faults are theirs
    *table, result = printed.getvalue().splitlines()
    return {side["name"]: side for side in json.loads(result)["peers"]}, "\n".join(table), folder


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The program as a module, so that a part of it can be another."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("peers")


@pytest.mark.slow
def test_this_loader_and_the_plain_loop_deliver_the_same_frames(run: Any) -> None:
    sides, table, folder = run
    report = (folder / "report.json").read_text()
    assert json.loads(report)["frames_per_batch"] == 8 * 2
    per_epoch = json.loads(report)["batches_per_epoch"]
    for name, batches in (("dali_stream", 2 * per_epoch), ("torchcodec", 1 + 1 + 3)):
        side = sides[name]
        assert side["error"] is None
        assert side["frames"] == {
            "equal": True,
            "samples": 8 * batches,
            "pictures": 3 * 2 * 3,  # of both cameras, in each of the three parts
            "worst_difference": pytest.approx(0, abs=0.01),
            "differences": [],
        }
        assert side["rounds"] == [side["frames_per_s"]]
        assert side["first_batch_rounds"] == [side["first_batch_s"]]
        assert min(side["frames_per_s"], side["first_batch_s"]) > 0
        assert side["peak_bytes"] > 50e6
        assert side["versions"]["torchcodec"]
        assert f"\n{name} " in table
    own, loop = sides["dali_stream"], sides["torchcodec"]
    assert (own["speedup"], own["second_epoch_speedup"], loop["second_epoch_rounds"]) == (None, None, [])
    for key, rate in (("speedup", "frames_per_s"), ("second_epoch_speedup", "second_epoch_frames_per_s")):
        assert loop[key] == pytest.approx(own[rate] / loop["frames_per_s"])
    assert str(folder) not in report
    assert sys.prefix not in report


@pytest.mark.slow
def test_a_frame_of_a_neighbour_is_found(run: Any) -> None:
    side = run[0]["lerobot, 0 workers"]
    assert side["error"] is None
    assert side["frames"]["equal"] is False
    assert all("observation.images.side of episode" in said for said in side["frames"]["differences"][:5])
    assert "it is nearer to frame" in side["frames"]["differences"][0]
    assert "NO: sample" in run[1]


@pytest.mark.slow
def test_a_crash_is_told_with_its_error(run: Any) -> None:
    side = run[0]["lerobot-streaming"]
    assert side["error"].startswith("it ended with exit code 1. Its output ends:")
    assert "ShardError: no shard left" in side["error"]
    assert side["frames"] is side["frames_per_s"] is None
    assert "failed: ShardError: no shard left" in run[1]


@pytest.mark.slow
@pytest.mark.skipif(gpu_index("auto") is not None, reason="there is a GPU")
def test_a_side_that_needs_a_gpu_says_so(run: Any) -> None:
    assert run[0]["torchcodec-cuda"]["error"] == "no GPU"


@pytest.mark.slow
def test_nothing_is_left_behind(run: Any) -> None:
    folder = run[2]
    assert sorted(path.name for path in folder.iterdir()) == ["python", "report.json"]
    for other in psutil.process_iter(["cmdline"]):
        assert not any(str(folder) in argument for argument in other.info["cmdline"] or []), other


# Takes the place of this loader. Its rows come in the reverse of the recorded order, and it has no frames.
REVERSED = """
import json, sys
from pathlib import Path
import numpy as np

spec = json.loads(Path(sys.argv[1]).read_text())
count = sum(spec["takes"]) * spec["batch_size"]
with np.load(spec["order"]) as file:
    rows = {key: file[key][:count][::-1] for key in ("index", "episode_index", "frame_index")}
pictures = {f"pictures_{n}": np.zeros(0) for n in range(len(spec["cameras"]))}
np.savez(spec["results"], checked=np.zeros(0), **rows, **pictures)
Path(spec["answer"]).write_text(json.dumps({"versions": {}, "seconds": [1] * len(spec["takes"])}))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("own", "said"),
    [
        (REVERSED, "NO: sample 0: expected (index, episode, frame)"),
        ("serve()", "failed: NameError: name 'serve' is not defined"),
    ],
)
def test_what_is_wrong_with_this_loader_is_the_exit_code(
    peers: Any,
    small: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    own: str,
    said: str,
) -> None:
    """Another program runs in its place."""
    (tmp_path / "ours.py").write_text(own)
    monkeypatch.setattr(peers, "PROGRAMS", tmp_path)
    arguments = ["--only", "lerobot,", "--workers", "0", "--lerobot-python", str(tmp_path / "none")]
    monkeypatch.setattr(sys, "argv", ["peers.py", str(small), *SHORT, *arguments])
    assert peers.main() == 1
    out = capsys.readouterr().out
    assert said in out
    assert "failed: it does not start: [Errno 2] No such file or directory" in out


# Begins a line that it does not end, starts another process, and does not stop.
STUCK = """
import signal, subprocess, sys
subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()", sys.argv[0]])
print("Loading... ", end="", flush=True)
signal.pause()
"""


@pytest.mark.slow
def test_a_side_that_is_given_up_runs_no_more(peers: Any, tmp_path: Path) -> None:
    (tmp_path / "stuck.py").write_text(STUCK)
    side = peers.Side("stuck", str(tmp_path / "stuck.py"))
    peers.attempt(side, *small_turn(tmp_path / "turn", turn_s=2))
    assert side.error == "it did not end within 2 s. Its output ends:\nLoading..."
    its = [each for each in psutil.process_iter(["cmdline"]) if str(tmp_path) in " ".join(each.info["cmdline"] or [])]
    assert psutil.wait_procs(its, timeout=10)[1] == []
    assert side.report(side)["frames_per_s"] is None


# Records its process id, and whether a process that recorded its own before is still running. It says that each take lasts as
# many seconds as processes have recorded themselves.
ALONE = """
import json, os, sys
from pathlib import Path
noted = Path(sys.argv[0]).with_name("noted")
before = noted.read_text().split() if noted.exists() else []
alive = [number for number in before if Path("/proc", number).exists()]
noted.write_text(" ".join([*before, *(["alive"] if alive else []), str(os.getpid())]))
spec = json.loads(Path(sys.argv[1]).read_text())
Path(spec["answer"]).write_text(json.dumps({"versions": {}, "seconds": [len(before) + 1] * len(spec["takes"])}))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_every_turn_is_a_new_process_that_runs_alone(peers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new process has nothing of an earlier turn in memory, whatever the loader keeps. The report has all turns."""
    (tmp_path / "alone.py").write_text(ALONE)
    checks = (check(number) for number in itertools.count())
    monkeypatch.setattr(peers.frames, "check", lambda *_: next(checks))
    own, other = (peers.Side(name, str(tmp_path / "alone.py"), keeps=name == "own") for name in ("own", "other"))
    recorded, common, _, arguments = small_turn(tmp_path, turn_s=60)
    peers.run([own, other], recorded, common, arguments)
    numbers = (tmp_path / "noted").read_text().split()
    assert len(set(numbers)) == 2 * arguments.rounds
    assert "alive" not in numbers
    # An epoch of 5 batches of 3 frames: the 4 after the first one, and then 2 epochs, which have the 7 batches asked for.
    # Both sides take turns, of 1, 3 and 5 s and of 2, 4 and 6 s.
    assert (own.rounds, own.second_epoch_rounds) == ([4 * 3 / s for s in (1, 3, 5)], [10 * 3 / s for s in (1, 3, 5)])
    assert (other.rounds, other.second_epoch_rounds) == ([7 * 3 / s for s in (2, 4, 6)], [])
    assert own.report(own)["frames"] == check(0) | {"samples": 2 + 4, "pictures": 4 + 8, "worst_difference": 0.4}
    report = other.report(own)
    assert (report["frames_per_s"], report["first_batch_s"]) == (7 * 3 / 4, 4)
    assert report["speedup"] == pytest.approx(4 / 7 * 4 / 3)  # of the turns of 3 and 4 s, the median
    assert report["second_epoch_speedup"] == pytest.approx(10 / 7 * 4 / 3)
    assert report["frames"] == check(5) | {"samples": 1 + 3 + 5, "pictures": 2 + 6 + 10, "worst_difference": 0.5}


def check(turn: int) -> dict[str, Any]:
    """The result of the comparison of a turn's frames. The last of six turns has wrong ones."""
    wrong = ["sample 7"] if turn == 5 else []
    return {
        "equal": not wrong,
        "samples": turn,
        "pictures": 2 * turn,
        "worst_difference": turn / 10,
        "differences": wrong,
    }


def small_turn(folder: Path, turn_s: float) -> tuple[Any, ...]:
    """Arguments of `peers.attempt` after the side, for programs that read none of them."""
    recorded = SimpleNamespace(epoch=15, steps={"camera": [0]})
    arguments = SimpleNamespace(rounds=3, batches=7, warmup=1, batch_size=3, turn_s=turn_s)
    return recorded, {"folder": str(folder), "device": "cpu"}, folder, arguments


@pytest.mark.parametrize("given", [["--rounds", "0"], ["--warmup", "-1"], ["--check", "0"], ["--out", "."]])
def test_arguments_that_measure_nothing_are_refused(peers: Any, monkeypatch: pytest.MonkeyPatch, given: list[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["peers.py", "nowhere", *given])
    with pytest.raises(SystemExit, match="2"):
        peers.main()


def test_what_cannot_be_compared_is_one_line(
    peers: Any, demo: Path, odd: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = [
        (odd, [], "must have a camera with video"),
        (tmp_path / "none", [], "root must be a folder"),
        (
            demo,
            ["--only", "torch", "lerobut"],
            "--only must name a peer, got 'lerobut'. Available: dali_stream, torchcodec, lerobot, 0 workers",
        ),
        (demo, [], "so that an epoch has two batches, got 9999"),
    ]
    for root, given, said in wrong:
        monkeypatch.setattr(sys, "argv", ["peers.py", str(root), "--batch-size", "9999", *given])
        assert peers.main() == 1
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert said in error


# ----------------------------------------------------------------------- the chart of reports


@pytest.fixture
def chart(monkeypatch: pytest.MonkeyPatch) -> Any:
    """benchmarks/peers_chart.py as a module."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("peers_chart")


def drawn(chart: Any, folder: Path, on_disk: Path | None = None) -> tuple[dict[str, tuple[float, str]], str]:
    """{loader: (length of its bar, the figure beside it)} of the chart of report.json, and its text."""
    given = [] if on_disk is None else ["--frame-cache", str(on_disk)]
    chart.main([str(folder / "report.json"), *given, "--out", str(folder / "chart.svg")])
    picture = chart.chart([json.loads((folder / "report.json").read_text())], on_disk and json.loads(on_disk.read_text()))
    assert (folder / "chart.svg").read_text() == picture.svg
    bars = {}
    for axes in picture.figure.axes:
        [drawn] = [each for each in axes.containers if isinstance(each, BarContainer)]
        for label, bar, figure in zip(axes.get_yticklabels(), drawn, axes.texts[1:], strict=True):  # the first is the title
            bars[label.get_text()] = bar.get_width(), figure.get_text()
    return bars, " ".join([picture.text, *picture.notes])


def test_the_chart_shows_every_loader_of_a_report(chart: Any, tmp_path: Path) -> None:
    def side(name: str, rate: float | None, error: str | None = None, equal: bool = True) -> dict[str, Any]:
        rounds = [rate * 0.9, rate, rate * 1.2] if rate else []
        return {
            "name": name,
            "frames_per_s": rate,
            "rounds": rounds,
            "frames": {"equal": equal},
            "error": error,
            "versions": {},
        }

    report = json.loads((ROOT / "benchmarks/results/peers_g1_2cores.json").read_text())
    report["peers"] = [
        side("dali_stream", 400.0),
        side("lerobot, 16 workers", 100.0),
        side("another <one> & more", 200.0, equal=False),
        side("lerobot-streaming", None, "IndexError: 7"),
        side("torchcodec-cuda", None, "no GPU"),
    ]
    (tmp_path / "report.json").write_text(json.dumps(report))
    bars, said = drawn(chart, tmp_path)
    assert list(bars) == ["dali_stream", "another <one> & more", "LeRobotDataset, 16 workers"]  # the fastest first
    widest = bars["dali_stream"][0]
    assert [width / widest for width, _ in bars.values()] == pytest.approx([1, 0.5, 0.25], abs=1e-3)
    assert [figure for _, figure in bars.values()] == ["400", "200, WRONG FRAMES", "100"]
    assert "Failed: StreamingLeRobotDataset (single frames)." in said
    assert "NVDEC" not in said  # what nobody could try is no failure
    assert f"{report['machine']['processor']}, {report['machine']['cores']} cores, no GPU" in said
    assert report["date"] in said


def test_the_chart_shows_the_fastest_setting_of_the_new_streaming(chart: Any, tmp_path: Path) -> None:
    report = json.loads((ROOT / "benchmarks/results/peers_g1_2cores.json").read_text())
    common = {"second_epoch_rounds": [], "frames": {"equal": True}, "error": None, "versions": {}}
    report["peers"] = [
        {"name": name, "frames_per_s": rate, "rounds": [rate], **common}
        for name, rate in {
            "dali_stream": 400.0,
            "lerobot-new-streaming, 0 workers, 2 threads": 100.0,
            "lerobot-new-streaming-uint8, 1 workers, 4 threads": 200.0,
        }.items()
    ]
    (tmp_path / "report.json").write_text(json.dumps(report))
    bars, said = drawn(chart, tmp_path)
    assert list(bars) == ["dali_stream", "New streaming, uint8"]
    assert "StreamingLeRobotDataset after LeRobot 0.6.1" in said


def test_the_chart_shows_both_epochs(chart: Any, tmp_path: Path) -> None:
    report = json.loads((ROOT / "benchmarks/results/peers_g1_2cores.json").read_text())
    report["arguments"] |= {"image_size": "[224, 200]"}
    common = {"frames": {"equal": True}, "error": None, "versions": {}}
    report["peers"] = [
        {
            "name": "dali_stream",
            "frames_per_s": 200.0,
            "rounds": [150.0, 200.0, 220.0],
            "second_epoch_frames_per_s": 800.0,
            "second_epoch_rounds": [700.0, 800.0, 1000.0],
            **common,
        },
        {"name": "lerobot-uint8, 2 workers", "frames_per_s": 100.0, "rounds": [100.0], "second_epoch_rounds": [], **common},
    ]
    (tmp_path / "report.json").write_text(json.dumps(report))
    bars, said = drawn(chart, tmp_path)
    assert [figure for _, figure in bars.values()] == ["200", "800", "100"]
    assert list(bars) == ["dali_stream, first epoch", "dali_stream, second epoch", "LeRobotDataset, uint8, 2 workers"]
    widths = [width / bars["dali_stream, second epoch"][0] for width, _ in bars.values()]
    assert widths == pytest.approx([0.25, 1, 0.125], abs=1e-3)
    assert "float32 frames/s of 224×200, batch 64" in said


def test_the_chart_shows_epochs_with_a_frame_cache(chart: Any, tmp_path: Path) -> None:
    shutil.copy(ROOT / "benchmarks/results/peers_g1_2cores.json", tmp_path / "report.json")
    report = json.loads((ROOT / "benchmarks/results/disk_frames_2cores.json").read_text())
    for place in report["datasets"][0]["folders"]:
        rate = 100.0 if place["folder"] == "disk" else 7.0
        place["frames_per_s"] = {"without": rate, "filling": rate, "warm": 4 * rate, "cold": 2 * rate}
        place["rounds"] = {name: [value] for name, value in place["frames_per_s"].items()}
    (on_disk := tmp_path / "on_disk.json").write_text(json.dumps(report))
    bars, said = drawn(chart, tmp_path, on_disk)
    last = [*bars.values()][-4:]
    assert [figure for _, figure in last] == ["100", "100", "400", "200"]
    assert [width / last[2][0] for width, _ in last] == pytest.approx([0.25, 0.25, 1, 0.5], abs=1e-2)
    assert "memory_budget=256MiB" in said
    assert f"Last panel: Dataset g1; {report['machine']['processor']}" in said
