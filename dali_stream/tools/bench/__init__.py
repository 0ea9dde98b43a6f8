"""Throughput without a model: what `dali-stream bench` and benchmarks/streaming.py measure.

measure  one rank's measurement
run      all ranks, and their results combined, per node
"""

from __future__ import annotations

from dali_stream.tools.bench.run import run, stage_seconds, write

__all__ = ["run", "stage_seconds", "write"]
