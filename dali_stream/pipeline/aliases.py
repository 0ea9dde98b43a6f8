"""Types of a batch, and of the user's function for the DALI graph. They are importable without torch and DALI."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nvidia.dali.data_node import DataNode

Batch = dict[str, Any]
"""{key: tensor, or list of str for text}, with the batch as first dimension."""
Graph = Callable[[dict[str, "DataNode"]], dict[str, "DataNode"]]
"""Function from a dict of DALI nodes to another dict. Its argument has a node for each key of a batch except text. The
function may change, add and drop nodes. The node "sample" contains the random numbers for `dali_stream.augment`, and is not
part of a batch. The function is called once. Python functions of its operators run in a thread of the Loader."""
