"""Report of `doctor`: findings, the facts on which they are based, and the type of a check."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal, get_args

Area = Literal["gpu", "software", "machine", "dataset"]
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
        area: "gpu", "software", "machine" or "dataset".
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
        software: Versions by name. Unknown versions are None.
        machine: Cores, memory and disk. See `machine.Machine.limits`.
        dataset: Address, size and cameras of the dataset. None without a dataset, or if it cannot be opened. For a mixture
            file, its address as `uri`, and these facts of each dataset by name as `datasets`.
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
