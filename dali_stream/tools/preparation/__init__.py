"""`prepare`: rewrites a dataset for training, on one machine, SLURM or Ray.

The way of an output file: `plan` assigns episodes to it. An executor calls `task.write_file` in some process or job. This reads
the episodes with `source`, writes and verifies the file with `rows` or `video`, and puts it into `place`. `run` then adds its
note to the `state`. When all files are finished, `run` writes the `metadata`.

run        `prepare`, which uses all of these
options    options and presets
plan       assignment of episodes to output files
executors  functions like `map`, which run tasks in processes, on SLURM or on Ray
task       unit of work: one output file, as an idempotent function of JSON arguments
source     reads the episodes of one output file from the source
rows       reads and writes files of rows
video      writes and verifies files of video: `packets` copies packets, `encoders` encodes frames, `quality` checks them
place      OUT, the folder of the new dataset, local or remote
state      state of a run, one file in OUT
metadata   the files below meta/, from the plan and the notes of the tasks
"""

from __future__ import annotations

from dali_stream.tools.preparation.executors import MapTasks
from dali_stream.tools.preparation.run import PreparedCamera, PrepareReport, prepare, status
from dali_stream.tools.preparation.state import PrepareStatus

__all__ = ["MapTasks", "PrepareReport", "PrepareStatus", "PreparedCamera", "prepare", "status"]
