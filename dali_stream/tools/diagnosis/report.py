"""Report of `doctor`: its findings, and what the GPUs decode."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal, get_args

Area = Literal["gpu", "software", "dataset"]
"""Subject of a finding."""
Status = Literal["ok", "warning", "problem"]
"""Status of a finding. The status of a report is the worst one of its findings."""
OK: Status = "ok"
WARNING: Status = "warning"
PROBLEM: Status = "problem"
STATUSES = get_args(Status)


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        area: "gpu", "software" or "dataset".
        name: Subject within the area, such as "torchcodec" or "GPU 0 AV1". It is unique within its area. For a mixture, it
            begins with the name of the dataset, as in "pick: rows".
        status: "ok", "warning" or "problem".
        text: Result of the check.
        remedy: Advice to the user. Empty for "ok", and for an error message, which has its advice in `text`.
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
    """

    findings: tuple[Finding, ...]
    gpus: tuple[dict[str, Any], ...]

    @property
    def status(self) -> str:
        """Worst status of all findings."""
        return max((finding.status for finding in self.findings), key=STATUSES.index, default=OK)

    def as_dict(self) -> dict[str, Any]:
        """Return the report as dicts and lists for JSON."""
        return {**dataclasses.asdict(self), "status": self.status}
