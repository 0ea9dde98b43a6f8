"""The example of a plan in `dali_stream.schedule.example`, and what planning does not import."""

from __future__ import annotations

import ast
import doctest
from pathlib import Path

import dali_stream
from dali_stream.schedule import example


def test_the_example_returns_what_it_says() -> None:
    failed, tried = doctest.testmod(example)
    assert not failed
    assert tried > 10


def test_planning_imports_neither_storage_nor_what_reads_from_it() -> None:
    """Imports for type checking do not count."""
    for path in (Path(dali_stream.__file__).parent / "schedule").glob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("dali_stream."):
                assert (node.module or "").split(".")[1] in ("arguments", "errors", "order", "schedule"), (path, node.module)
