"""Re-encodes a dataset's videos, for example for a GPU's decoder.

encoders   settings of FFmpeg's encoders: every frame once, in order, in closed GOPs
ffmpeg     the program ffmpeg: its abilities, the pixels of a file, encoding a file
check      compares a file with the request and with its source
video      one file: fetched, encoded, checked
report     what changed
job        `transcode`

`dali_stream.tools.output` holds what `reshard` does the same way.
"""

from __future__ import annotations

from dali_stream.tools.transcoding.encoders import CODECS, ENCODERS
from dali_stream.tools.transcoding.job import transcode
from dali_stream.tools.transcoding.report import TranscodedCamera, TranscodeReport

__all__ = ["CODECS", "ENCODERS", "TranscodeReport", "TranscodedCamera", "transcode"]
