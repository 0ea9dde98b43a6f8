"""Throughput without a model, as measured by `dali-stream bench`.

measure  the measurement of one rank
run      the measurement on all ranks, and their combined report
node     what a node needs for a training run, computed from the measured work
"""

from __future__ import annotations

from dali_stream.tools.bench.node import Node
from dali_stream.tools.bench.run import run, stage_seconds, write

__all__ = ["Node", "run", "stage_seconds", "write"]
