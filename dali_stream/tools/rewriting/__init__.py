"""Rewrites a dataset for streaming: larger row groups, MP4s with their index in front, files of a chosen size, v3.0.

rows     assigns episodes to Parquet files, and writes these
video    assigns packets to MP4 files
meta     the source's metadata, of v2.x too, as v3.0 has it, and those of the new dataset
job      writes all of it
verify   reads all of it back
run      `reshard` and `convert`

`dali_stream.tools.output` holds what `transcode` does the same way.
"""

from __future__ import annotations

from dali_stream.tools.rewriting.report import RewriteReport, Side
from dali_stream.tools.rewriting.run import convert, reshard

__all__ = ["RewriteReport", "Side", "convert", "reshard"]
