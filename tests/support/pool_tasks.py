"""Tasks for the processes of a pool. This module imports little, since each process imports it."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from pathlib import Path
from typing import Any


def run(task: dict[str, Any]) -> dict[str, Any]:
    """Do what the task's `does` says.

    - "ends once", "ends always": It ends its process with SIGKILL, the first time, which leaves a file at `mark`, or each time.
    - "fails": It raises an error with a long text.
    - "imports": It imports the tasks of `prepare`, and returns the number of its process and the names of all of its modules.
    """
    does = task["does"]
    if does == "ends always" or (does == "ends once" and not os.path.exists(task["mark"])):
        Path(task["mark"]).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if does == "fails":
        raise RuntimeError(f"{'text ' * 200}and the cause")
    if does == "imports":
        importlib.import_module("dali_stream.tools.preparation.task")
        return {"path": task["path"], "process": os.getpid(), "modules": list(sys.modules)}
    return {"path": task["path"]}
