"""`selftest`: checks that DALI decodes the correct frames of generated videos on this machine, and measures its speed.

videos   demo datasets of every codec and GOP, whose frames contain their identity
frames   tests of decoders on packed clips: identity and colour of frames
loaders  tests of the Loader: against one with torchcodec while batches are held, and over a longer time
speed    speed of DALI's decoder, and of torchcodec on all cores
run      runs all of them in separate processes, checks the results, and makes the report
"""

from __future__ import annotations

from dali_stream.tools.selftest.run import selftest

__all__ = ["selftest"]
