"""One step of the self-test in a process of its own: a driver that crashes or hangs is a result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dali_stream.tools.isolated import call

EXIT_S = 15.0  # for a process to end after its step has returned
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
        and `out_of_time`, if it did not return within its time limit.
    """
    module, function = _STEPS[name]
    step = str(Path(__file__).with_name(f"{module}.py")), function, arguments
    [answer], ended, stderr = call([step], time_limit_s, EXIT_S)
    if answer.kind == "hang":
        return {"failed": answer.error, "out_of_time": True}
    if answer.kind == "crash":
        return {"failed": f"{answer.error}: {stderr[-300:]}"}
    result = {"failed": f"{answer.kind}: {answer.error}"} if answer.error else dict(answer.value)
    return result | ({"exit": f"after the step had returned, {ended}: {stderr[-300:]}"} if ended else {})
