"""Diagnoses a machine and a dataset: what it can decode, whether its software fits together, what is wrong with a dataset.

answers                   what libraries and the driver report, each asked in a process of its own
gpu, software, machine    findings from these answers, and on this process's limits
dataset, rows             findings on a dataset: its metadata, which files exist, its rows, their tasks and their frames
camera                    its cameras: video formats and decoders, and what long GOPs cost
frames                    one decoded frame, and all of them
looks                     what broken files are
run                       `doctor`
"""

from __future__ import annotations

from dali_stream.tools.diagnosis.report import DoctorReport, Finding
from dali_stream.tools.diagnosis.run import doctor

__all__ = ["DoctorReport", "Finding", "doctor"]
