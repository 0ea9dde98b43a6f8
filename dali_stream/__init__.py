"""Streams LeRobot v3 datasets into PyTorch training through NVIDIA DALI."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dali_stream.dataset import Dataset
from dali_stream.errors import DaliStreamError, DatasetError, DecodeError, MemoryBudgetError, ResumeError, StorageError
from dali_stream.order import Order

if TYPE_CHECKING:
    from dali_stream.loader import Loader
    from dali_stream.sampler import FrameSampler
    from dali_stream.video.route import Route

__version__ = "0.1.0"
__all__ = [
    "DaliStreamError",
    "Dataset",
    "DatasetError",
    "DecodeError",
    "FrameSampler",
    "Loader",
    "MemoryBudgetError",
    "Order",
    "ResumeError",
    "Route",
    "StorageError",
]


def __getattr__(name: str) -> Any:
    # The loader imports torch and DALI, which take a second; orders and metadata are had without them.
    if name == "Loader":
        from dali_stream.loader import Loader

        return Loader
    if name == "FrameSampler":
        from dali_stream.sampler import FrameSampler

        return FrameSampler
    if name == "Route":
        from dali_stream.video.route import Route

        return Route
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
