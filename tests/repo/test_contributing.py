"""The changes that CONTRIBUTING.md works through: made in a copy of the checkout, they pass their tests."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text()
CHANGES = re.findall(r"^### (Change \d): [^\n]*\n(.*?)(?=^##)", TEXT, re.MULTILINE | re.DOTALL)


def apply(diff: str, root: Path) -> tuple[str, str]:
    """Make a change: replace the old lines of the file that its first line names, append to the file, or make it.

    Returns:
        Path of the file, and the new lines.
    """
    name, *lines = diff.splitlines()
    path = root / name.removeprefix("+++ ")
    old = "".join(f"{line[1:]}\n" for line in lines if line[:1] != "+")
    new = "".join(f"{line[1:]}\n" for line in lines if line[:1] != "-")
    before = path.read_text() if path.exists() else ""
    if old:
        assert before.count(old) == 1, (name, old)
        path.write_text(before.replace(old, new))
    else:
        path.write_text(f"{before}\n\n{new}" if before else new)
    return name.removeprefix("+++ "), new


def changed_copy(text: str, root: Path) -> list[tuple[str, str]]:
    """Copy the code and the tests to a folder, and make a change there. Return the path and the new lines of each file."""
    for folder in ("dali_stream", "tests"):
        shutil.copytree(ROOT / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__"))
    return [apply(diff, root) for diff in re.findall(r"^```diff\n(.*?)^```", text, re.MULTILINE | re.DOTALL)]


@pytest.mark.parametrize(("title", "text"), CHANGES, ids=[title for title, _ in CHANGES])
def test_the_code_still_has_the_lines_that_a_change_replaces(title: str, text: str, tmp_path: Path) -> None:
    assert changed_copy(text, tmp_path)


def test_the_changes_are_short() -> None:
    """At most 32 lines each, with their tests."""
    assert [title for title, _ in CHANGES] == ["Change 1", "Change 2", "Change 3"]
    lines = {title: len(re.findall(r"^\+(?!\+\+)(?=.)", text, re.MULTILINE)) for title, text in CHANGES}
    assert max(lines.values()) <= 32, lines


@pytest.mark.slow
def test_the_changes_pass_their_tests_and_the_linters(tmp_path: Path) -> None:
    """All of them in one copy."""
    changed = changed_copy("".join(text for _, text in CHANGES), tmp_path)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    tests = [(file, new) for file, new in changed if file.startswith("tests/")]
    cases = [f"{file}::{case}" for file, test in tests for case in re.findall(r"^def (test_\w+)", test, re.MULTILINE)]
    assert len(cases) == len(CHANGES)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    for command in (
        ["pytest", "-q", "-p", "no:cacheprovider", *cases],
        ["ruff", "check", "--no-cache", *(file for file, _ in changed)],
        ["ruff", "format", "--no-cache", "--check", *(file for file, _ in changed)],
    ):
        done = subprocess.run([sys.executable, "-m", *command], cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
