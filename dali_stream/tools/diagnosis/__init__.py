"""`doctor`: finds what a machine can decode, whether its software is compatible, and what is wrong with a dataset.

answers                   questions to libraries and the driver, answered in separate processes
gpu, software, machine    checks of these answers, and of the limits of this process
rows                      checks of a dataset: metadata, files, rows, tasks and timestamps
camera                    checks of a camera: video formats, decoders, and the cost of long GOPs
frames                    checks that decode: one frame with each decoder, the speed of decoders, and all frames
looks                     recognizes what a broken file contains
run                       table of all checks, and the functions that run them
"""

from __future__ import annotations

from dali_stream.tools.diagnosis.report import DoctorReport, Finding
from dali_stream.tools.diagnosis.run import doctor

__all__ = ["DoctorReport", "Finding", "doctor"]
