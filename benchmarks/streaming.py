"""Measure data loading without a model: `dali-stream bench` as a file that a launcher can start on several ranks.

python benchmarks/streaming.py URI [--mode single|sarm|action_chunk] [--out-dir DIR] ...
accelerate launch --num_processes 8 benchmarks/streaming.py URI ...
"""

from __future__ import annotations

import sys

from dali_stream.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", *sys.argv[1:]]))
