"""Does this machine's decoder deliver the right frames through DALI, and how fast? With videos made on the spot.

videos     demo datasets of every codec and GOP, whose frames say which frame they are
identity   DALI's decoder on packed clips: identity and colour
speed      DALI's decoder beside torchcodec on all cores
lockstep   the Loader on DALI beside the Loader on torchcodec, with batches that are held
soak       the Loader, for a while
step       each of these in a process of its own
run        all of them, one after the other, and what comes of it
"""

from __future__ import annotations

from dali_stream.tools.selftest.run import selftest

__all__ = ["selftest"]
