"""Example of a plan: three episodes, two batches, and the schedule's decisions for them.

The dataset has three episodes of 4, 6 and 4 frames, one camera, and GOPs of 2 frames. A batch shows two frames, each given as
(episode, frame). The order is:

>>> import numpy as np
>>> from dali_stream.schedule.episodes import EpisodeTable, Located, OpenEpisode
>>> from dali_stream.schedule.plan import Schedule, Limits
>>> from dali_stream.schedule.samples import Samples
>>> lengths = np.array([4, 6, 4])
>>> order = [[(0, 1), (2, 2)], [(0, 0), (1, 4)], [(2, 3), (1, 5)], [(1, 0), (1, 1)]]
>>> batches = [Samples(n, 0, np.arange(2), *np.array(shown).T, 0) for n, shown in enumerate(order)]

The cache may keep 3 decoded frames, one batch is in progress at a time, and the order is read 4 samples ahead.

>>> table, windows = EpisodeTable(lengths, ["top"]), {"top": np.array([0])}
>>> schedule = Schedule(table, iter(batches), 2, windows, Limits(kept=3, in_progress=1, horizon=4))

An episode is opened before the first batch that uses it is planned: its rows are read, and its frames are located.

>>> def opened(episode):
...     frame = np.arange(lengths[episode])
...     return OpenEpisode(episode, {"top": Located(packet=frame, keyframe=frame // 2 * 2)})
>>> schedule.table.open(opened(0))
>>> schedule.table.open(opened(2))
>>> print(schedule.plan())
batch 0 shows episode 0 frame 1, episode 2 frame 2
  top: decode episode 0 frames 0, 1 into slots 2, 0
  top: decode episode 2 frames 2, 3 into slots 1, 3
  top: show slots 0, 1

Both frames of each GOP are decoded together, since decoding begins at the keyframe. Frame 0 of episode 0 must be decoded to
reach frame 1. Batch 1 shows frame 0, so this frame stays in slot 2 and is not decoded again.

>>> schedule.table.open(opened(1))
>>> print(schedule.plan())
batch 1 shows episode 0 frame 0, episode 1 frame 4
  top: decode episode 1 frames 4, 5 into slots 1, 0
  top: show slots 2, 1

After batch 1, no batch is known to show frame 0 of episode 0, so slot 2 is free. Two frames are cached for batch 2, which will
decode nothing. Frames are numbered over all episodes: 13 is frame 3 of episode 2, and 9 is frame 5 of episode 1.

>>> schedule.frames["top"].next_uses()
[(13, 2), (9, 2)]
"""
