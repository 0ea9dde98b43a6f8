"""Parameters of tests, and examples of property tests, that `make test` leaves to `make test-slow`."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import settings


def slow(*values: Any, id: str | None = None) -> Any:
    """Parameters with which a test is slow, beside others that run the same code."""
    return pytest.param(*values, id=id, marks=pytest.mark.slow)


def slow_after(count: int, values: Iterable[Any]) -> list[Any]:
    """The values, or tuples of values, of a parametrized test. The test is slow with each value after the first `count`."""
    every = list(values)
    return every[:count] + [slow(*value) if isinstance(value, tuple) else slow(value) for value in every[count:]]


def examples(count: int, **options: Any) -> settings:
    """Settings of a property test: `count` examples in `make test-slow`, otherwise a quarter; the same ones in every run."""
    tried = count if "ALL_EXAMPLES" in os.environ else -(-count // 4)
    return settings(**{"max_examples": tried, "deadline": None, "derandomize": True, **options})
