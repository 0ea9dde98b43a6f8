"""Tests whether this machine's decoder delivers the correct frames through DALI, and how fast, with generated videos.

videos     demo datasets of every codec and GOP, whose frames contain their identity
identity   DALI's decoder on packed clips: identity and colour
cases      the same for videos that the Loader keeps from NVDEC, and with torchcodec's NVDEC decoder
speed      DALI's decoder compared with torchcodec on all cores
lockstep   the Loader with DALI compared with the Loader with torchcodec, while batches are held
soak       the Loader over a longer time
run        all of them, each in processes of their own, and the report
"""

from __future__ import annotations

from dali_stream.tools.selftest.run import selftest

__all__ = ["selftest"]
