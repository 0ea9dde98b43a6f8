"""What the doctor says: findings, and the facts that they were made from."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

OK, WARNING, PROBLEM = STATUSES = ("ok", "warning", "problem")


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        area: "gpu", "software", "machine" or "dataset".
        name: what was looked at, such as "torchcodec" or "gpu 0 av1"; unique within its area.
        status: "ok", "warning" or "problem".
        text: what was found.
        remedy: what to do; empty where it is ok.
    """

    area: str
    name: str
    status: str
    text: str
    remedy: str = ""


@dataclass(frozen=True)
class Report:
    """All that was found.

    Attributes:
        findings: in the order in which they are to be read.
        gpus: per GPU its index, name, memory, compute capability, NVDEC engines and what the driver says of each format.
        software: versions, as far as they could be had.
        machine: cores, memory, disk, container.
        dataset: address and cameras; None without a dataset, or with one that cannot be read.
    """

    findings: tuple[Finding, ...]
    gpus: tuple[dict[str, Any], ...]
    software: dict[str, Any]
    machine: dict[str, Any]
    dataset: dict[str, Any] | None

    @property
    def status(self) -> str:
        """The worst of all findings."""
        return worst(finding.status for finding in self.findings)

    def as_dict(self) -> dict[str, Any]:
        """The same as plain dicts and lists, which JSON can hold."""
        return {**dataclasses.asdict(self), "status": self.status}


def worst(statuses: Iterable[str]) -> str:
    """The worst of some; "ok" of none."""
    return max(statuses, key=STATUSES.index, default=OK)
