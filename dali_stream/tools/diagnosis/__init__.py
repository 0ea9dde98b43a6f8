"""`doctor`: finds what a machine can decode, whether its software is compatible, and what is wrong with a dataset.

report      a finding, and the report
run         the list of all checks of datasets and cameras, and the functions that run them; the check of a mixture
answers     questions to libraries and the driver, answered in separate processes
machine     context `Machine`: the answers of the libraries and of the driver; its checks
rows        context `Rows`: the rows of a dataset; checks of statistics, files, rows and tasks
camera      context `Camera`: the files of a video camera and a decoded frame; its checks
frames      checks of a camera whose frames are images, and of all frames
"""

from __future__ import annotations

from dali_stream.tools.diagnosis.report import DoctorReport, Finding
from dali_stream.tools.diagnosis.run import doctor

__all__ = ["DoctorReport", "Finding", "doctor"]
