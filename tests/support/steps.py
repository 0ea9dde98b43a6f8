"""A step of the self-test for which its process imports nothing heavy."""

from __future__ import annotations


def execute(code: str) -> None:
    """Execute code."""
    exec(code, {})
