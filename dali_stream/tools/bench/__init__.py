"""Throughput without a model, as measured by `dali-stream bench` and benchmarks/streaming.py.

measure  the measurement of one rank
run      the measurement on all ranks, and their combined report
"""

from __future__ import annotations

from dali_stream.tools.bench.run import run, stage_seconds, write

__all__ = ["run", "stage_seconds", "write"]
