"""Demo dataset: a small simulated robot dataset in LeRobot's format. Each frame contains its identity."""

from __future__ import annotations

from dali_stream.demo.identity import read_identities, stamp
from dali_stream.demo.write import write_demo

__all__ = ["read_identities", "stamp", "write_demo"]
