"""The report of `doctor`: findings, the facts they are based on, and the form of a check."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args

Area = Literal["gpu", "software", "machine", "dataset"]
"""Subject of a finding."""
Status = Literal["ok", "warning", "problem"]
"""Status of a finding. A report has the worst one of its findings."""
OK: Status = "ok"
WARNING: Status = "warning"
PROBLEM: Status = "problem"
STATUSES = get_args(Status)
Result = tuple[Status, str, str]
"""Status, text and remedy of a finding."""
T = TypeVar("T")
Check = Callable[[T], "Result | Mapping[str, Result] | None"]
"""Check of a subject. It returns one result, several by their names, or None if it does not apply."""


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        area: "gpu", "software", "machine" or "dataset".
        name: Name of the check, such as "torchcodec" or "GPU 0 AV1". It is unique within its area.
        status: "ok", "warning" or "problem".
        text: Result of the check.
        remedy: Instructions that solve it. Empty for "ok".
    """

    area: Area
    name: str
    status: Status
    text: str
    remedy: str = ""


@dataclass(frozen=True)
class DoctorReport:
    """All findings.

    Attributes:
        findings: Findings in reading order.
        gpus: Index, name, memory, compute capability, NVDEC engines and capability for each format, per GPU.
        software: Versions. None for those that are unknown.
        machine: Cores, memory, disk and container.
        dataset: Address and cameras. None without a readable dataset.
    """

    findings: tuple[Finding, ...]
    gpus: tuple[dict[str, Any], ...]
    software: dict[str, Any]
    machine: dict[str, Any]
    dataset: dict[str, Any] | None

    @property
    def status(self) -> str:
        """The worst status of all findings."""
        return max((finding.status for finding in self.findings), key=STATUSES.index, default=OK)

    def as_dict(self) -> dict[str, Any]:
        """Return the report as dicts and lists for JSON."""
        return {**dataclasses.asdict(self), "status": self.status}


def run_checks(checks: Mapping[str, Check[T]], subject: T) -> Iterator[tuple[str, Result]]:
    """Yield (name, result) of each check that applies, in the order of the table."""
    for name, check in checks.items():
        outcome = check(subject)
        if isinstance(outcome, Mapping):
            yield from outcome.items()
        elif outcome is not None:
            yield name, outcome


def as_findings(area: Area, results: Iterable[tuple[str, Result]]) -> list[Finding]:
    """Return the findings of an area."""
    return [Finding(area, name, *result) for name, result in results]
