"""Diagnoses a machine and a dataset: what it can decode, whether its software fits together, what is wrong with a dataset.

answers                   questions to libraries and the driver, each answered in a process of its own
checks                    the table of all checks
gpu, software, machine    checks of these answers, and of the limits of this process
rows                      checks of a dataset: its metadata, its files, its rows, their tasks and their frames
camera                    checks of a camera: video formats and decoders, and what long GOPs cost
frames                    one decoded frame, the speed of decoders, and all frames
looks                     what broken files are
dataset                   runs the checks of a dataset and of its cameras
run                       `doctor`
"""

from __future__ import annotations

from dali_stream.tools.diagnosis.report import DoctorReport, Finding
from dali_stream.tools.diagnosis.run import doctor

__all__ = ["DoctorReport", "Finding", "doctor"]
