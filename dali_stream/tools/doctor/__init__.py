"""Diagnoses a machine and a dataset: what it can decode, whether its software fits together, what is wrong with a dataset.

answers    what libraries and the driver report, each asked in a process of its own
gpu, software, machine           findings from these answers, and on this process's limits
dataset, camera, frames, timing, looks   findings on a dataset: its cameras, a decoded frame of each, its times, broken files
run        `doctor`
"""

from __future__ import annotations

from dali_stream.tools.doctor.report import Finding, Report
from dali_stream.tools.doctor.run import doctor

__all__ = ["Finding", "Report", "doctor"]
