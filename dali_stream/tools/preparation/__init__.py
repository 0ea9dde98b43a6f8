"""`prepare`: rewrites a dataset for training, on one machine, SLURM or Ray.

options    what can be changed
plan       which episodes go into which output file
task       the unit of work: one output file, as an idempotent function of JSON arguments
task_input the episodes of one output file, as the source has them
source     the dataset that is read
rows, packets, video    how a file is made and verified
encoders, ffmpeg, quality    how frames are encoded and compared
place      OUT: a local folder or a remote one
executors  tasks on any `concurrent.futures.Executor`
progress   how far a run is
metadata   the files below meta/, from the plan and what the tasks left
run        `prepare`, which calls all of these
"""

from __future__ import annotations

from dali_stream.tools.preparation.progress import PrepareStatus
from dali_stream.tools.preparation.run import PreparedCamera, PrepareReport, prepare, status

__all__ = ["PrepareReport", "PrepareStatus", "PreparedCamera", "prepare", "status"]
