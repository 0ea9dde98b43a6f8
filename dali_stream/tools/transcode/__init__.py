"""A dataset with its videos re-encoded, so that the decoder at hand can decode them.

encoders   what FFmpeg's encoders are told, so that every frame comes out once, in order, in closed GOPs
ffmpeg     the program ffmpeg: what it can do, what it sees in a file, encoding one
check      whether a file is as asked, and shows what its source shows
video      one file: fetched, encoded, checked
meta       info.json
report     what has changed
job        one after the other

What `reshard` does in the same way is in `dali_stream.tools.output`.
"""

from __future__ import annotations

from dali_stream.tools.transcode.encoders import CODECS, ENCODERS
from dali_stream.tools.transcode.job import transcode
from dali_stream.tools.transcode.report import Camera, Report

__all__ = ["CODECS", "ENCODERS", "Camera", "Report", "transcode"]
