"""A short drill of two nodes, and a drill that is killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.slow
DRILL = Path(__file__).parents[1] / "benchmarks/drill.py"
KINDS = ["kill_node", "return_node", "kill_loader", "reset", "change_clock", "fill_caches"]


def test_training_survives_the_faults_of_a_drill(tmp_path: Path) -> None:
    """In namespaces where the kernel allows them, and otherwise in folders, without the full disk."""
    command = [
        sys.executable,
        DRILL,
        "--faults",
        "1",
        "--ranks",
        "1",
        "--seed",
        "3",
        "--report",
        tmp_path / "report.json",
        "--kinds",
        *KINDS,
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["failures"] == []
    assert {event["kind"] for event in report["events"]} >= set(KINDS) - {"fill_caches"}
    assert report["starts"] == 3
    assert report["steps"] >= 100


def test_nothing_remains_of_a_drill_that_is_killed(tmp_path: Path) -> None:
    """In namespaces where the kernel allows them."""
    mark = uuid.uuid4().hex
    environment = os.environ | {"TMPDIR": str(tmp_path), "MARK": mark}
    with subprocess.Popen([sys.executable, DRILL], env=environment, stdout=subprocess.PIPE, text=True) as drill:
        assert any(line.startswith("start 0") for line in drill.stdout)
        processes = marked(mark)
        assert len(processes) >= 3
        drill.kill()
    _, remaining = psutil.wait_procs(processes, timeout=60)
    assert remaining == marked(mark) == []
    assert list(tmp_path.iterdir()) == []


def marked(mark: str) -> list[psutil.Process]:
    """Return the processes that have inherited a mark."""
    return [each for each in psutil.process_iter(["environ"]) if (each.info["environ"] or {}).get("MARK") == mark]
