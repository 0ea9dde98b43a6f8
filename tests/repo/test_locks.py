"""The files in locks/: each extra with all that it needs, in versions that agree with constraints.txt, with hashes."""

from __future__ import annotations

import importlib.metadata
import re
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

tomllib = pytest.importorskip("tomllib")  # Python 3.11

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PROJECT["project"]["optional-dependencies"]
FOR_DEVELOPERS = {"docs", "dev", "dev-all"}
USED = sorted(set(EXTRAS) - FOR_DEVELOPERS)
LOCKS = [*USED, "build", "release"]
PLATFORMS = [(version, machine) for version in ("3.10", "3.11", "3.12", "3.13") for machine in ("x86_64", "aarch64")]


def environment(version: str, machine: str) -> dict[str, str]:
    """Values of markers on Linux."""
    python = {"python_version": version, "python_full_version": f"{version}.1", "implementation_version": f"{version}.1"}
    system = {"os_name": "posix", "sys_platform": "linux", "platform_system": "Linux", "platform_machine": machine}
    return {"implementation_name": "cpython", "platform_python_implementation": "CPython", "extra": "", **python, **system}


def pins(lock: str, version: str = "3.12", machine: str = "x86_64") -> dict[str, str]:
    """Versions that a lock installs."""
    text = (ROOT / f"locks/{lock}.txt").read_text().replace("\\\n", " ")
    versions: dict[str, str] = {}
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        requirement, *hashes = re.split(r"\s+--hash=", line.strip())
        assert hashes, f"{requirement} has no hash"
        assert all(re.fullmatch(r"sha256:[0-9a-f]{64}", each) for each in hashes), requirement
        parsed = Requirement(requirement)
        [specifier] = parsed.specifier
        assert specifier.operator == "==", requirement
        if parsed.marker is None or parsed.marker.evaluate(environment(version, machine)):
            assert canonicalize_name(parsed.name) not in versions, f"{parsed.name} appears twice"
            versions[canonicalize_name(parsed.name)] = specifier.version
    return versions


def required(lock: str) -> list[str]:
    """Requirements that a lock is made for."""
    project = [*PROJECT["project"]["dependencies"], *EXTRAS.get(lock, [])]
    if lock in EXTRAS:
        return project
    lines = (ROOT / f"locks/{lock}.in").read_text().splitlines()
    named = [line for line in lines if line[0] not in "#-"]
    return named + [each for line in lines if line.startswith("-r ") for each in required(Path(line[3:]).stem)]


def unmet(requirements: list[str], versions: dict[str, str], values: dict[str, str], extras: frozenset[str]) -> list[str]:
    """Requirements that a set of versions does not satisfy."""
    wrong = []
    for line in requirements:
        needed = Requirement(line)
        applies = needed.marker is None or any(needed.marker.evaluate(values | {"extra": extra}) for extra in extras | {""})
        if applies and not needed.specifier.contains(versions.get(canonicalize_name(needed.name), "0"), prereleases=True):
            wrong.append(line)
    return wrong


def test_each_extra_for_users_has_a_lock() -> None:
    assert set(EXTRAS) >= FOR_DEVELOPERS
    assert {path.stem for path in (ROOT / "locks").glob("*.txt")} == set(LOCKS)
    assert re.findall(r"^LOCKED := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE) == [" ".join(USED)]


@pytest.mark.parametrize("lock", LOCKS)
def test_a_lock_meets_what_was_asked_on_every_python_and_machine(lock: str) -> None:
    for version, machine in PLATFORMS:
        assert not unmet(required(lock), pins(lock, version, machine), environment(version, machine), frozenset()), version


@pytest.mark.parametrize("lock", USED)
def test_a_lock_contains_what_its_packages_need(lock: str) -> None:
    """For the packages that are installed here in the version of the lock."""
    version, machine = "{}.{}".format(*sys.version_info), "x86_64"
    versions, values = pins(lock, version, machine), environment(version, machine)
    looked_at = 0
    for name, pinned in versions.items():
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if distribution.version.partition("+")[0] == pinned:
            looked_at += 1
            assert not unmet(distribution.requires or [], versions, values, frozenset()), name
    assert looked_at > 20


@pytest.mark.parametrize("lock", USED)
def test_a_lock_has_the_tested_versions(lock: str) -> None:
    lines = [line.partition("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines()]
    tested = [line for line in lines if line]
    for version, machine in PLATFORMS:
        versions = pins(lock, version, machine)
        here = [line for line in tested if canonicalize_name(Requirement(line).name) in versions]
        assert len(here) > 10
        assert not unmet(here, versions, environment(version, machine), frozenset()), version


def test_locks_can_be_installed_together() -> None:
    for version, machine in PLATFORMS:
        together: dict[str, str] = {}
        for lock in USED:
            for name, pinned in pins(lock, version, machine).items():
                assert together.setdefault(name, pinned) == pinned, (lock, name, version)
