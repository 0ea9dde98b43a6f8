"""Types in the signatures of public classes."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dali_stream.decode.route import Route
    from dali_stream.lerobot.features import Feature
    from dali_stream.lerobot.frame_ranges import Frames
    from dali_stream.lerobot.selection import EpisodeFilter
    from dali_stream.lerobot.stats import Stats
    from dali_stream.normalize import Modes
    from dali_stream.order import Shuffle
    from dali_stream.order.selected import Ranges
    from dali_stream.order.shares import Shares
    from dali_stream.pipeline.graph import Graph
    from dali_stream.pipeline.stream import Batch
    from dali_stream.run.bottleneck import Bottleneck

__all__ = [
    "Batch",
    "Bottleneck",
    "EpisodeFilter",
    "Feature",
    "Frames",
    "Graph",
    "Modes",
    "Ranges",
    "Route",
    "Shares",
    "Shuffle",
    "Stats",
]

_MODULE_OF = {
    "Batch": "pipeline.stream",
    "Bottleneck": "run.bottleneck",
    "EpisodeFilter": "lerobot.selection",
    "Feature": "lerobot.features",
    "Frames": "lerobot.frame_ranges",
    "Graph": "pipeline.graph",
    "Modes": "normalize",
    "Ranges": "order.selected",
    "Route": "decode.route",
    "Shares": "order.shares",
    "Shuffle": "order",
    "Stats": "lerobot.stats",
}


def __getattr__(name: str) -> Any:
    # Modules are imported on first use, since some of them import torch and DALI, which is slow.
    if name in _MODULE_OF:
        return getattr(importlib.import_module(f"dali_stream.{_MODULE_OF[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}. Available: {', '.join(__all__)}")


def __dir__() -> list[str]:
    return [name for name in globals() if name.startswith("__")] + __all__
