"""The LeRobot that is installed has the parts that `patch` wraps, and its script calls them.

`make test-lerobot` runs this file in each of LeRobot's environments. If LeRobot is not installed, it is skipped.
"""

from __future__ import annotations

import ast
import importlib
import inspect

import pytest

from dali_stream.integrations.lerobot import parts

pytest.importorskip("lerobot", reason="LeRobot is not installed here; make test-lerobot installs it")


@pytest.mark.parametrize("part", parts.REQUIRED, ids=lambda part: part.names[0])
def test_the_part_exists_with_its_parameters(part: parts.Part) -> None:
    assert parts.find(part) in part.names


def calls() -> dict[str, ast.Call]:
    """The calls in the source of the script, by the name of the function, or of the method with a dot."""
    tree = ast.parse(inspect.getsource(importlib.import_module(parts.SCRIPT)))
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, (ast.Name, ast.Attribute)):
            found[node.func.id if isinstance(node.func, ast.Name) else f".{node.func.attr}"] = node
    return found


@pytest.mark.parametrize(
    "part", [part for part in parts.REQUIRED if part.module == parts.SCRIPT], ids=lambda part: part.names[0]
)
def test_the_script_calls_the_part(part: parts.Part) -> None:
    """A function that is replaced under a name that the script no longer calls would never run."""
    name = parts.find(part)
    assert name in calls(), f"{parts.SCRIPT} no longer calls {name}"
    given = [keyword.arg for keyword in calls()[name].keywords]
    positional = len(calls()[name].args)
    for parameter in part.parameters[positional:]:
        assert parameter in given, f"{parts.SCRIPT} no longer passes {parameter} to {name}"


def test_the_script_prepares_its_dataloaders() -> None:
    """The Loader takes the place of a DataLoader in `Accelerator.prepare`."""
    assert {".prepare", ".DataLoader"} <= set(calls())
