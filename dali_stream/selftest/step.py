"""One step of the self-test in a process of its own: a driver that crashes or hangs is a result, and not the end.

python -m dali_stream.selftest.step IN.json OUT.json
"""

from __future__ import annotations

import importlib
import json
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from dali_stream.process import same_python

_STEPS = {  # name: (module, function)
    "write": ("videos", "write"),
    "mix": ("videos", "mix"),
    "identity": ("identity", "measure"),
    "speed": ("speed", "measure"),
    "torchcodec": ("speed", "measure_torchcodec"),
    "lockstep": ("lockstep", "measure"),
    "soak": ("soak", "measure"),
}


def run(name: str, *, time_limit_s: float, **arguments: Any) -> dict[str, Any]:
    """Calls a step with keyword arguments that JSON can hold.

    Returns:
        What the step returns, or {"failed": reason}. Also `exit`, if the step returned and its process then crashed or hung,
        and `out_of_time`, if it was ended for its time limit before it returned.
    """
    with tempfile.TemporaryDirectory() as folder:
        given, made = Path(folder, "in.json"), Path(folder, "out.json")
        given.write_text(json.dumps([name, arguments]))
        command = [*same_python(__file__), str(given), str(made)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=time_limit_s, check=False)
            ended = _ended(done)
            late = {}
        except subprocess.TimeoutExpired:
            ended, late = f"it did not end within {time_limit_s:.3g} s and was ended", {"out_of_time": True}
        if not made.exists():
            return {"failed": ended or "it ended without a result", **late}
        result: dict[str, Any] = json.loads(made.read_text())
        return result | ({"exit": f"after the step had returned, {ended}"} if ended else {})


def _ended(done: subprocess.CompletedProcess[str]) -> str:
    """How a process ended; empty if as it should."""
    if done.returncode == 0:
        return ""
    how = f"was ended by {signal.Signals(-done.returncode).name}" if done.returncode < 0 else f"ended with {done.returncode}"
    return f"the process {how}: {done.stderr.strip()[-300:]}"


def _main(given: str, made: str) -> None:
    name, arguments = json.loads(Path(given).read_text())
    try:
        module, function = _STEPS[name]
        result = getattr(importlib.import_module(f"dali_stream.selftest.{module}"), function)(**arguments)
    except Exception as error:  # whatever it is, it is what the step has to say
        result = {"failed": f"{type(error).__name__}: {error}"}
    Path(f"{made}.part").write_text(json.dumps(result or {}))
    Path(f"{made}.part").rename(made)


if __name__ == "__main__":
    _main(*sys.argv[1:])
