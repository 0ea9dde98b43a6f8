"""The report of `doctor`: findings, and the facts they are based on."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal, get_args

Area = Literal["gpu", "software", "machine", "dataset"]
"""Subject of a finding."""
Status = Literal["ok", "warning", "problem"]
"""Status of a finding. A report has the worst one of its findings."""
OK: Status = "ok"
WARNING: Status = "warning"
PROBLEM: Status = "problem"
STATUSES = get_args(Status)
Result = tuple[Status, str, str]  # status, text and remedy of a finding


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        area: "gpu", "software", "machine" or "dataset".
        name: of the check, such as "torchcodec" or "GPU 0 AV1"; unique within its area.
        status: "ok", "warning" or "problem".
        text: what was found.
        remedy: what to do; empty for "ok".
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
        findings: in reading order.
        gpus: per GPU its index, name, memory, compute capability, NVDEC engines and capability for each format.
        software: versions, as far as they are known.
        machine: cores, memory, disk, container.
        dataset: address and cameras; None without a readable dataset.
    """

    findings: tuple[Finding, ...]
    gpus: tuple[dict[str, Any], ...]
    software: dict[str, Any]
    machine: dict[str, Any]
    dataset: dict[str, Any] | None

    @property
    def status(self) -> str:
        """The worst of all findings."""
        return max((finding.status for finding in self.findings), key=STATUSES.index, default=OK)

    def as_dict(self) -> dict[str, Any]:
        """The same as plain dicts and lists, which JSON can hold."""
        return {**dataclasses.asdict(self), "status": self.status}
