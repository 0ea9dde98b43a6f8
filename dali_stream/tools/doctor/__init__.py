"""What this machine can decode, whether its software fits together, and what is wrong with a dataset."""

from __future__ import annotations

from dali_stream.tools.doctor.examination import examine
from dali_stream.tools.doctor.report import Finding, Report

__all__ = ["Finding", "Report", "examine"]
