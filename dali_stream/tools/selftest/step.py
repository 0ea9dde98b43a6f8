"""One step of the self-test in a process of its own: a driver that crashes or hangs is a result, and not the end.

python -m dali_stream.tools.selftest.step IN.json OUT.json
"""

from __future__ import annotations

import importlib
import json
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from dali_stream.process import same_python

EXIT_S = 15.0  # for a process to end after its step has returned
_LOOK_S = 0.2  # how often is looked for that
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
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace") as child:
            seconds = time_limit_s
            said = _said(child, seconds, made)
            if said is None and made.exists():
                seconds = EXIT_S
                said = _said(child, seconds)
            child.kill()
        ended = f"it did not end within {seconds:.3g} s and was ended" if said is None else _ended(child.returncode, said)
        if not made.exists():
            return {"failed": ended or "it ended without a result"} | ({"out_of_time": True} if said is None else {})
        result: dict[str, Any] = json.loads(made.read_text())
        return result | ({"exit": f"after the step had returned, {ended}"} if ended else {})


def _said(child: subprocess.Popen[str], seconds: float, made: Path | None = None) -> str | None:
    """What a process wrote to stderr until it ended; None if it has not within so many seconds, or has `made` its result."""
    until = time.monotonic() + seconds
    while True:
        try:
            return child.communicate(timeout=max(0.0, min(_LOOK_S, until - time.monotonic())))[1]
        except subprocess.TimeoutExpired:
            if time.monotonic() >= until or (made is not None and made.exists()):
                return None


def _ended(code: int, said: str) -> str:
    """How a process ended, by its exit code; empty if as it should."""
    if code == 0:
        return ""
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
    return f"the process {how}: {said.strip()[-300:]}"


def _main(given: str, made: str) -> None:
    name, arguments = json.loads(Path(given).read_text())
    try:
        module, function = _STEPS[name]
        result = getattr(importlib.import_module(f"dali_stream.tools.selftest.{module}"), function)(**arguments)
    except Exception as error:  # whatever it is, it is what the step has to say
        result = {"failed": f"{type(error).__name__}: {error}"}
    Path(f"{made}.part").write_text(json.dumps(result or {}))
    Path(f"{made}.part").rename(made)


if __name__ == "__main__":
    _main(*sys.argv[1:])
