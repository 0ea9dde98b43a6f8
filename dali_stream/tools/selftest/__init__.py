"""`selftest`: checks that frames are right, that they stay right under load, and how fast they are decoded on this machine.

videos    demo datasets of every codec and GOP, whose frames contain their identity
identity  frames right: identity and colour of the frames of decoders on packed clips
load      right under load: Loaders against one with torchcodec while batches are held, with many threads, and over epochs
speed     speed of DALI's decoder, and of torchcodec on all cores
run       runs the three parts in separate processes, checks the results, and makes the report
"""

from __future__ import annotations

from dali_stream.tools.selftest.run import selftest

__all__ = ["selftest"]
