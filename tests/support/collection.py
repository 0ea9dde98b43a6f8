"""The garbage collector of Python in tests."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collection() -> Iterator[None]:
    """Collect garbage, and then none in the `with` block.

    Python drops a Ctrl-C that arrives in a destructor, such as that of another test's pipeline.
    """
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
