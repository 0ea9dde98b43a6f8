"""Report of `doctor`: findings, the facts on which they are based, and the type of a check."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args

Area = Literal["gpu", "software", "machine", "dataset"]
"""Subject of a finding."""
Status = Literal["ok", "warning", "problem"]
"""Status of a finding. The status of a report is the worst one of its findings."""
OK: Status = "ok"
WARNING: Status = "warning"
PROBLEM: Status = "problem"
STATUSES = get_args(Status)
Result = tuple[Status, str, str]
"""Status, text and remedy of a finding."""
T = TypeVar("T")
Check = Callable[[T], "Result | Mapping[str, Result] | None"]
"""Function that checks a subject. It returns a result, several results by name, or None if it does not apply."""


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        area: "gpu", "software", "machine" or "dataset".
        name: Name of the check, such as "torchcodec" or "GPU 0 AV1". It is unique within its area.
        status: "ok", "warning" or "problem".
        text: Result of the check.
        remedy: Advice to the user. Empty for "ok".
    """

    area: Area
    name: str
    status: Status
    text: str
    remedy: str = ""


@dataclass(frozen=True)
class DoctorReport:
    """Report of `doctor`.

    Attributes:
        findings: Findings in the order in which the report lists them.
        gpus: Index, name, memory in bytes, compute capability, NVDEC engines and supported formats of each GPU.
        software: Versions by name. Unknown versions are None.
        machine: Cores, memory and disk. See `machine.ProcessLimits`.
        dataset: Address, size and cameras of the dataset. None without a dataset, or if it cannot be opened.
    """

    findings: tuple[Finding, ...]
    gpus: tuple[dict[str, Any], ...]
    software: dict[str, Any]
    machine: dict[str, Any]
    dataset: dict[str, Any] | None

    @property
    def status(self) -> str:
        """Worst status of all findings."""
        return max((finding.status for finding in self.findings), key=STATUSES.index, default=OK)

    def as_dict(self) -> dict[str, Any]:
        """Return the report as dicts and lists for JSON."""
        return {**dataclasses.asdict(self), "status": self.status}


def run_checks(checks: Mapping[str, Check[T]], subject: T) -> Iterator[tuple[str, Result]]:
    """Yield (name, result) of each check that applies to the subject, in the order of the table."""
    for name, check in checks.items():
        outcome = check(subject)
        if isinstance(outcome, Mapping):
            yield from outcome.items()
        elif outcome is not None:
            yield name, outcome


def as_findings(area: Area, results: Iterable[tuple[str, Result]]) -> list[Finding]:
    """Return results as findings of an area."""
    return [Finding(area, name, *result) for name, result in results]
