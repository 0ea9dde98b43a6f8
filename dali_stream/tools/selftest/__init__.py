"""`selftest`: checks that DALI decodes the correct frames of generated videos on this machine, and measures its speed.

videos     demo datasets of every codec and GOP, whose frames contain their identity
identity   tests of DALI's decoder on packed clips: identity and colour of frames
cases      the same tests for videos that the Loader does not decode with NVDEC, and for torchcodec's NVDEC decoder
speed      speed of DALI's decoder, and of torchcodec on all cores
lockstep   comparison of the Loader with DALI and with torchcodec, while batches are held
soak       the Loader over a longer time
run        runs all of them in separate processes, and makes the report
"""

from __future__ import annotations

from dali_stream.tools.selftest.run import selftest

__all__ = ["selftest"]
