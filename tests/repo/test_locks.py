"""The files in locks/: each extra with all that it needs, in versions that agree with constraints.txt, with hashes."""

from __future__ import annotations

import functools
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


@functools.cache
def lines(lock: str) -> list[Requirement]:
    """Pins of a lock for all platforms. Each has a hash."""
    text = (ROOT / f"locks/{lock}.txt").read_text().replace("\\\n", " ")
    found = []
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        requirement, *hashes = re.split(r"\s+--hash=", line.strip())
        assert hashes, f"{requirement} has no hash"
        assert all(re.fullmatch(r"sha256:[0-9a-f]{64}", each) for each in hashes), requirement
        found.append(Requirement(requirement))
        assert [each.operator for each in found[-1].specifier] == ["=="], requirement
    return found


@functools.cache
def pins(lock: str, version: str, machine: str) -> dict[str, str]:
    """Versions that a lock installs."""
    values = environment(version, machine)
    here = [each for each in lines(lock) if each.marker is None or each.marker.evaluate(values)]
    versions = {canonicalize_name(each.name): specifier.version for each in here for specifier in each.specifier}
    assert len(versions) == len(here), f"a package appears twice in {lock}.txt"
    return versions


def required(lock: str) -> list[str]:
    """Requirements that a lock is made for."""
    project = [*PROJECT["project"]["dependencies"], *EXTRAS.get(lock, [])]
    if lock in EXTRAS:
        return project
    listed = (ROOT / f"locks/{lock}.in").read_text().splitlines()
    named = [line for line in listed if line[0] not in "#-"]
    return named + [each for line in listed if line.startswith("-r ") for each in required(Path(line[3:]).stem)]


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
    listed = [line.partition("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines()]
    tested = [line for line in listed if line]
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
