"""`prepare`: rewrites a dataset for training, on one machine, SLURM or Ray.

options    options and presets
plan       assignment of episodes to output files
task       unit of work: one output file, as an idempotent function of JSON arguments
task_input reads the episodes of one output file from the source
source     access to the files of the source
rows, packets, video    write and verify files of rows, of copied packets, and of encoded frames
encoders, ffmpeg, quality    encode frames, and compare them with the source
place      OUT, the folder of the new dataset, local or remote
executors  run tasks on any `concurrent.futures.Executor`
slurm, ray executors for SLURM and Ray
progress   state of a run
metadata   writes the files below meta/, from the plan and the notes of the tasks
run        `prepare`, which uses all of these
"""

from __future__ import annotations

from dali_stream.tools.preparation.progress import PrepareStatus
from dali_stream.tools.preparation.run import PreparedCamera, PrepareReport, prepare, status

__all__ = ["PrepareReport", "PrepareStatus", "PreparedCamera", "prepare", "status"]
