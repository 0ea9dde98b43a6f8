"""Types in the signatures of public classes."""

from dali_stream.decode.route import Route
from dali_stream.lerobot.features import Feature
from dali_stream.lerobot.frame_ranges import Frames
from dali_stream.lerobot.selection import EpisodeFilter
from dali_stream.lerobot.stats import Stats
from dali_stream.normalize import Modes
from dali_stream.order import Shuffle
from dali_stream.order.selected import Ranges
from dali_stream.order.shard import Pieces
from dali_stream.order.shares import Shares
from dali_stream.pipeline.aliases import Batch, Graph
from dali_stream.run.bottleneck import Bottleneck

__all__ = [
    "Batch",
    "Bottleneck",
    "EpisodeFilter",
    "Feature",
    "Frames",
    "Graph",
    "Modes",
    "Pieces",
    "Ranges",
    "Route",
    "Shares",
    "Shuffle",
    "Stats",
]
