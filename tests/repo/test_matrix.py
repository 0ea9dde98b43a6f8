"""benchmarks/slurm/matrix.sh and benchmarks/summarize.py: each measurement by itself, and all in one table."""

from __future__ import annotations

import csv
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
MATRIX = ROOT / "benchmarks/slurm/matrix.sh"
SHORT = {"BATCH_SIZE": "4", "NUM_BATCHES": "2", "WARMUP": "1", "DEVICE": "cpu"}

# Plays sbatch and dali-stream: notes how it was called.
STUB = f"""#!{sys.executable}
import json, os, sys
with open(os.environ["CALLS"], "a") as file:
    print(json.dumps([os.path.basename(sys.argv[0]), sys.argv[1:]]), file=file)
print(4711)
sys.exit(int(os.environ.get("CODE", "0")))
"""


def matrix(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs the script in a folder."""
    given = {name: value for name, value in os.environ.items() if name not in ("VENV", "OUT_DIR")} | environment
    return subprocess.run(["bash", str(MATRIX), *arguments], cwd=folder, env=given, capture_output=True, text=True, timeout=300)


@pytest.fixture
def stubs(tmp_path: Path) -> dict[str, str]:
    """The environment in which sbatch and the environment's programs are played."""
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    for name in ("sbatch", "dali-stream", "python"):
        (venv / "bin" / name).write_text(STUB)
        (venv / "bin" / name).chmod(0o755)
    (tmp_path / "calls").touch()
    return {"VENV": str(venv), "PATH": f"{venv}/bin:/usr/bin:/bin", "CALLS": str(tmp_path / "calls")}


Summarize = Callable[[Path], tuple[int, str, str]]


@pytest.fixture
def summarize(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Summarize:
    """Runs benchmarks/summarize.py on a folder, in this process: its exit code, what it prints, and its errors."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    program = importlib.import_module("summarize")

    def run(folder: Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["summarize.py", str(folder)])
        return (program.main(), *capsys.readouterr())

    return run


def calls(tmp_path: Path) -> list[tuple[str, list[str]]]:
    return [tuple(json.loads(line)) for line in (tmp_path / "calls").read_text().splitlines()]


@pytest.mark.slow
def test_a_measurement_that_fails_takes_no_other_with_it(small: Path, tmp_path: Path) -> None:
    """The run replaces what an earlier one left: a report of the source that has gone since, and a failure of the other one."""
    (found := tmp_path / "bench").mkdir()
    (found / "none-single-auto.json").write_text(json.dumps(report(source="none")))
    (found / "local-single-auto.failed").write_text("failed with exit code 1\n")
    sources = f"none={tmp_path / 'nothing'} local={small}"
    options = {"RUN": "here", "SOURCES": sources, "MODES": "single", "DECODES": "auto", "VENV": sys.prefix, **SHORT}
    done = matrix(tmp_path, **options)
    assert done.returncode == 1, done.stderr
    rows = {row["source"]: row for row in csv.DictReader((found / "summary.csv").open())}
    assert {source: row["status"] for source, row in rows.items()} == {"none": "failed with exit code 1", "local": "ok"}
    measured = json.loads((found / "local-single-auto.json").read_text())
    assert float(rows["local"]["frames_per_s_node"]) == measured["frames_per_s_node"] > 0
    assert rows["none"]["mode"] == "single"
    assert any(line.split()[:2] == ["none", "single"] for line in done.stdout.splitlines())
    left = {"local-single-auto.json", "none-single-auto.failed", "summary.csv"}
    assert {path.name for path in found.iterdir()} == left


def test_each_measurement_is_a_job_of_one_gpu(stubs: dict[str, str], tmp_path: Path) -> None:
    environment = {"SOURCES": "a=/data/a b=s3://b/c", "MODES": "single sarm", "DECODES": "auto", "TIME": "7", "ACCOUNT": "us"}
    done = matrix(tmp_path, **stubs, **environment)
    assert done.returncode == 0, done.stderr
    *jobs, (_, summary) = calls(tmp_path)
    own = [arguments[arguments.index(str(MATRIX)) + 1 :] for _, arguments in jobs]
    sources = (["a", "/data/a"], ["b", "s3://b/c"])
    assert own == [["measure", *each, mode, "auto"] for each in sources for mode in ("single", "sarm")]
    for name, arguments in jobs:
        assert name == "sbatch"
        assert {"--gpus=1", "--ntasks=1", "--time=7", "--account=us", "--export=ALL"} <= set(arguments)
    assert "--dependency=afterany:4711:4711:4711:4711" in summary


def test_a_job_measures_what_the_environment_says(stubs: dict[str, str], tmp_path: Path) -> None:
    settings = {"BATCH_SIZE": "16", "IMAGE_SIZE": "64x80", "CACHE_DIR": "/a b", "OUT_DIR": str(tmp_path)}
    done = matrix(tmp_path, "measure", "a", "/data/a", "sarm", "dali", **stubs, **settings, CODE="137")
    assert done.returncode == 137
    assert (tmp_path / "a-sarm-dali.failed").read_text() == "failed with exit code 137\n"
    [(name, arguments)] = calls(tmp_path)
    head = ["bench", "/data/a", "--source", "a", "--mode", "sarm", "--decode", "dali", "--out-dir", str(tmp_path)]
    assert (name, arguments) == ("dali-stream", [*head, "--batch-size", "16", "--image-size", "64x80", "--cache-dir", "/a b"])


def test_a_job_that_says_nothing_any_more_is_told(stubs: dict[str, str], tmp_path: Path, summarize: Summarize) -> None:
    """One that is killed with its shell, one that sbatch does not take, and a report of before that is neither's."""
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench/a-single-auto.json").write_text("{}")
    environment = {"SOURCES": "a=/data/a", "MODES": "single", "DECODES": "auto"}
    assert matrix(tmp_path, **stubs, **environment).returncode == 0
    assert [path.name for path in (tmp_path / "bench").iterdir()] == ["a-single-auto.failed"]
    summarize(tmp_path / "bench")
    assert summary(tmp_path / "bench") == [("a", "single", "auto", "did not end: killed, out of time, or still waiting")]
    done = matrix(tmp_path, **stubs, **environment, CODE="1")
    assert (done.returncode, done.stdout) == (2, "")
    summarize(tmp_path / "bench")
    assert summary(tmp_path / "bench") == [("a", "single", "auto", "was not accepted by sbatch")]


def test_an_interrupted_measurement_ends_the_others(stubs: dict[str, str], tmp_path: Path) -> None:
    done = matrix(tmp_path, **stubs, RUN="here", SOURCES="a=/data/a b=/data/b", CODE="130")
    assert done.returncode == 130
    assert len(calls(tmp_path)) == 1


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({}, "SOURCES must be LABEL=URI ..., got none"),
        ({"SOURCES": "/data/a"}, "SOURCES must be LABEL=URI ..., with labels of letters, digits, _ and ., got '/data/a'"),
        ({"SOURCES": "a=/b a=/c"}, "labels in SOURCES must be different, got 'a' twice"),
        ({"SOURCES": "a=/b", "RUN": "there"}, "RUN must be sbatch or here, got 'there'"),
        ({"SOURCES": "a=/b", "VENV": "/nowhere"}, "environment with dali_stream, got /nowhere without bin/dali-stream"),
    ],
)
def test_what_is_missing_is_said(stubs: dict[str, str], tmp_path: Path, environment: dict[str, str], said: str) -> None:
    done = matrix(tmp_path, **(stubs | environment))
    assert done.returncode == 2
    assert said in done.stderr
    assert calls(tmp_path) == []


def test_the_table_has_a_row_for_each_report_and_a_line_for_each_failure(tmp_path: Path, summarize: Summarize) -> None:
    (tmp_path / "a.json").write_text(json.dumps(report(source="a[b]")))
    (tmp_path / "b.json").write_text(json.dumps(report(mode="sarm")))
    (tmp_path / "b-sarm-dali.failed").write_text("was not accepted by sbatch")
    (tmp_path / "other.json").write_text("[]")
    code, out, _ = summarize(tmp_path)
    assert code == 0
    assert "frames/s" in out
    assert "GPU" not in out, "no report has a value for GPU memory"
    rows = out.splitlines()
    assert [row.split()[:5] for row in rows if " torchcodec " in row] == [
        ["a[b]", "single", "auto", "torchcodec", "1234"],
        ["a", "sarm", "auto", "torchcodec", "1234"],
    ]
    assert "a[b] single auto: 1234 frames/s. Decoding." in rows
    assert "b sarm dali: was not accepted by sbatch" in rows


def summary(folder: Path) -> list[tuple[str, ...]]:
    """(source, mode, decode, status) of the rows."""
    rows = csv.DictReader((folder / "summary.csv").open())
    return [(row["source"], row["mode"], row["decode"], row["status"]) for row in rows]


def test_a_report_that_cannot_be_read_costs_no_other_its_row(tmp_path: Path, summarize: Summarize) -> None:
    good = report(source="a$b_$c[red]x[/bold]")
    (tmp_path / "good.json").write_text(json.dumps(good))
    for name, text in {
        "cut-single-auto": json.dumps(good)[:-20],
        "binary-single-auto": "\xff\x00",
        "lacks-sarm-auto": json.dumps({"frames_per_s_node": 1.0}),
        "string-sarm-auto": json.dumps(good | {"frames_per_s_node": "fast"}),
        "nan-sarm-auto": json.dumps(good | {"wallclock_s": float("nan")}),
    }.items():
        (tmp_path / f"{name}.json").write_bytes(text.encode("latin-1"))
    code, out, _ = summarize(tmp_path)
    assert code == 1
    assert "a$b_$c[red]x[/bold]" in out
    statuses = {source: status for source, _, _, status in summary(tmp_path)}
    assert statuses.pop(good["source"]) == "ok"
    assert len(statuses) == 5
    assert all(status.startswith("unreadable: ") for status in statuses.values()), statuses
    assert "'routes'" in statuses["lacks"]
    assert statuses["nan"] == "unreadable: wallclock_s must be a number, got nan"


@pytest.mark.parametrize(("name", "said"), [(".", "got one without"), ("nothing", "got no folder")])
def test_a_folder_without_reports_is_an_error(tmp_path: Path, name: str, said: str, summarize: Summarize) -> None:
    code, _, err = summarize(tmp_path / name)
    assert (code, err.count("\n")) == (1, 1)
    assert said in err


def report(**given: Any) -> dict[str, Any]:
    """One as `dali-stream bench` writes it."""
    numbers = ("samples_per_s first_batch_latency_s p50_sample_latency_ms p95_sample_latency_ms p99_sample_latency_ms "
               "decode_s_total fetch_s_total wait_s_total wallclock_s fetched_bytes decoded_per_delivered_frame "
               "unique_episodes_per_batch cpu_s_per_sample peak_rss_bytes")  # fmt: skip
    return {
        **dict.fromkeys(numbers.split(), 1.0), **dict.fromkeys(("ranks", "nodes", "batch_size"), 1),
        "source": "a", "mode": "single", "decode": "auto", "frames_per_s_node": 1234.0, "peak_gpu_bytes": None,
        "routes": {"top": {"decoder": "torchcodec"}}, "bottleneck": {"text": "Decoding."}, "timeline": [],
    } | given  # fmt: skip
