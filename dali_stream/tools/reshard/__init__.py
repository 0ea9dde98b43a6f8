"""A dataset laid out again for streaming: larger row groups, MP4s with their index in front, files of a chosen size.

rows     which episodes go into which Parquet file, and writing them
video    which encoded frames go into which MP4; mp4 writes what stands before them
meta     the files below meta/
verify   reading all of it back
job      one after the other

What `transcode` does in the same way is in `dali_stream.tools.output`.
"""

from __future__ import annotations

from dali_stream.tools.reshard.job import reshard
from dali_stream.tools.reshard.report import Report, Side

__all__ = ["Report", "Side", "reshard"]
