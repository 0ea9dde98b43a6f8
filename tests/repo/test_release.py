"""The workflows that test and publish a release."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


def release_job(name: str) -> dict[str, Any]:
    return yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())["jobs"][name]


def commands(job: dict[str, Any]) -> str:
    return "\n".join(step["run"] for step in job["steps"] if "run" in step)


def test_actions_are_pinned_by_commit_and_say_their_version() -> None:
    used = [line.strip(" -") for path in WORKFLOWS for line in path.read_text().splitlines() if re.match(r"[ -]*uses:", line)]
    assert len(used) > 10
    commits: dict[str, set[str]] = {}
    for line in used:
        pinned = re.fullmatch(r"uses: ([\w.-]+/[\w.-]+)@([0-9a-f]{40} # v\d+\.\d+\.\d+)", line)
        assert pinned is not None, line
        commits.setdefault(pinned[1], set()).add(pinned[2])
    assert all(len(found) == 1 for found in commits.values()), commits


def test_programs_of_a_release_come_from_its_lock() -> None:
    """The job that builds installs nothing by itself, and the job that signs runs no program but gh."""
    assert "make release-files" in commands(release_job("build"))
    assert "pip install" not in commands(release_job("build"))
    assert {line.split()[0] for line in commands(release_job("publish")).splitlines()} == {"gh"}
    recipes = re.findall(r"RELEASE\).*pip install (.*)", (ROOT / "Makefile").read_text())
    assert len(recipes) == 2
    assert all("--require-hashes" in recipe for recipe in recipes)


def test_only_the_job_that_publishes_can_sign() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())
    assert workflow["permissions"] == {"contents": "read"}
    assert "permissions" not in release_job("build")
    assert release_job("publish")["permissions"] == {"attestations": "write", "contents": "write", "id-token": "write"}
