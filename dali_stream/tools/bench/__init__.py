"""Throughput without a model: what `dali-stream bench` and benchmarks/streaming.py measure.

measure  one rank's measurement
report   the ranks' results combined, per node
run      all ranks
"""

from __future__ import annotations

from dali_stream.tools.bench.report import stage_seconds, write
from dali_stream.tools.bench.run import run

__all__ = ["run", "stage_seconds", "write"]
