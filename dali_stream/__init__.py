"""Stream LeRobot datasets into PyTorch training: random frames, decoded with torchcodec on CPUs and NVDEC, or with DALI.

`Loader` is the iterator over batches of a `Dataset` or a `Mixture`. `Transformed` applies a function of yours to its batches,
and `FrameSampler` gives its order to a PyTorch DataLoader. The docstring of `dali_stream.pipeline` follows a frame through the
code.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from dali_stream.dataset import Dataset
from dali_stream.errors import DaliStreamError, DatasetError, DecodeError, MemoryBudgetError, ResumeError, StorageError
from dali_stream.mixture import Mixture
from dali_stream.normalize import Normalizer
from dali_stream.observe.tracing import trace
from dali_stream.order import Order
from dali_stream.order.mixture import MixtureOrder
from dali_stream.system import log_records

if TYPE_CHECKING:
    from dali_stream import augment, tools, types
    from dali_stream.decode.resize import resize
    from dali_stream.loader import Loader
    from dali_stream.sampler import FrameSampler
    from dali_stream.transformed import Transformed

__version__ = "0.1.0"
__all__ = [
    "DaliStreamError",
    "Dataset",
    "DatasetError",
    "DecodeError",
    "FrameSampler",
    "Loader",
    "MemoryBudgetError",
    "Mixture",
    "MixtureOrder",
    "Normalizer",
    "Order",
    "ResumeError",
    "StorageError",
    "Transformed",
    "augment",
    "resize",
    "tools",
    "trace",
    "types",
]

log_records.install()

# These are imported on first use, since importing torch and DALI takes a second, and orders and metadata do not need them.
_LAZY = {
    "FrameSampler": "dali_stream.sampler",
    "Loader": "dali_stream.loader",
    "Transformed": "dali_stream.transformed",
    "resize": "dali_stream.decode.resize",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    if name in ("augment", "tools", "types"):
        return importlib.import_module(f"dali_stream.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}. Available: {', '.join(__all__)}")


def __dir__() -> list[str]:
    return [name for name in globals() if name.startswith("__")] + __all__
