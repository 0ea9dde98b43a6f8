"""A plan by hand: three episodes, two batches, and what the planner decides for them.

The dataset has three episodes of 4, 6 and 4 frames, one camera, and GOPs of 2 frames. A batch shows two frames. The order is:

>>> from dali_stream.schedule.example import Walk
>>> walk = Walk(lengths=[4, 6, 4], gop=2, batches=[[(0, 1), (2, 2)], [(0, 0), (1, 4)], [(2, 3), (1, 5)]])

An episode is opened before the first batch that uses it is planned: its rows are read, and its frames are located.

>>> print(walk.plan(kept=3, in_flight=1))
batch 0 shows episode 0 frame 1, episode 2 frame 2
  open    episodes 0, 2
  decode  episode 0 GOP of frames 0, 1: 0 -> slot 2, 1 -> slot 0
  decode  episode 2 GOP of frames 2, 3: 2 -> slot 1, 3 -> slot 3
  show    slots 0, 1
  keep    episode 0 frame 0 for batch 1, episode 2 frame 3 for batch 2
batch 1 shows episode 0 frame 0, episode 1 frame 4
  open    episode 1
  decode  episode 1 GOP of frames 4, 5: 4 -> slot 1, 5 -> slot 0
  show    slots 2, 1
  keep    episode 2 frame 3 for batch 2, episode 1 frame 5 for batch 2

Both frames of each GOP are decoded together, since decoding begins at the keyframe. Frame 0 of episode 0 comes out on the
way to frame 1. Batch 1 shows it, so it stays in slot 2 and is not decoded again. After batch 1 no batch is known to show it,
and its slot is free. Frames 3 and 5 wait for batch 2, which decodes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dali_stream.schedule.episodes import EpisodeTable, Located, OpenEpisode
from dali_stream.schedule.look_ahead import NEVER
from dali_stream.schedule.plan import BatchPlan, BatchPlanner, Limits
from dali_stream.schedule.samples import Samples

_CAMERA = "camera"


class Walk:
    """A made-up dataset of one camera, and the frames that its batches show.

    Args:
        lengths: Number of frames of each episode.
        gop: Number of frames of a GOP.
        batches: (episode, frame) of each sample of each batch.
    """

    def __init__(self, lengths: Sequence[int], gop: int, batches: Sequence[Sequence[tuple[int, int]]]) -> None:
        self._lengths, self._gop, self._batches = np.array(lengths), gop, batches

    def plan(self, kept: int, in_flight: int) -> str:
        """Return the plans of all batches but the last, which is only seen ahead."""
        order: Any = None
        samples = [
            Samples(number, 0, order, np.arange(len(shown)), np.array(shown)[:, 0], np.array(shown)[:, 1], 0)
            for number, shown in enumerate(self._batches)
        ]
        size, ahead = max(map(len, self._batches)), len(samples) * max(map(len, self._batches))
        window = {_CAMERA: np.zeros(1, np.int64)}
        planner = BatchPlanner(
            EpisodeTable(self._lengths, window), iter([*samples, *samples]), size, window, Limits(kept, in_flight, ahead)
        )
        planner.ahead(len(samples))
        lines: list[str] = []
        for batch in samples[:-1]:
            closed = planner.closed(batch)
            planner.observe([self._open(episode) for episode in closed])
            lines += self._lines(planner, planner.plan(), closed)
        return "\n".join(lines)

    def _open(self, episode: int) -> OpenEpisode:
        frames = np.arange(self._lengths[episode])
        return OpenEpisode(episode, {_CAMERA: Located(packet=frames, keyframe=frames // self._gop * self._gop)})

    def _lines(self, planner: BatchPlanner, plan: BatchPlan, opened: list[int]) -> list[str]:
        frames, samples = plan.frames[_CAMERA], plan.samples
        shown = zip(samples.episode.tolist(), samples.frame.tolist(), strict=True)
        lines = [f"batch {samples.number} shows {', '.join(f'episode {e} frame {f}' for e, f in shown)}"]
        lines.append(f"  open    episode{'s' * (len(opened) > 1)} {', '.join(map(str, opened))}")
        for gop in np.unique(frames.gop):
            own = frames.gop == gop
            members = ", ".join(map(str, frames.frame[own].tolist()))
            slots = ", ".join(
                f"{f} -> slot {s}" for f, s in zip(frames.frame[own].tolist(), frames.slot[own].tolist(), strict=True)
            )
            lines.append(f"  decode  episode {frames.episode[own][0]} GOP of frames {members}: {slots}")
        lines.append(f"  show    slots {', '.join(map(str, frames.show[:, 0].tolist()))}")
        kept = [(*self._place(planner, frame), batch) for frame, batch in planner.frames[_CAMERA].kept()]
        lines.append(f"  keep    {', '.join(f'episode {e} frame {f} for batch {b}' for e, f, b in kept if b != NEVER)}")
        return lines

    @staticmethod
    def _place(planner: BatchPlanner, frame: int) -> tuple[int, int]:
        episode = int(np.searchsorted(planner.table.first_frame, frame, side="right")) - 1
        return episode, frame - int(planner.table.first_frame[episode])
