"""What a loader has done so far."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field


@dataclass
class Counters:
    """What has been done. Times are seconds of work, added up over the threads."""

    samples: int = 0
    frames: int = 0
    clips: int = 0
    decoded_frames: int = 0
    frame_cache_hits: int = 0
    decode_s: float = 0.0
    plan_s: float = 0.0
    starved_s: float = 0.0
    padded: int = 0
    substituted: int = 0
    needed_bytes: int = 0
    evicted_early: int = 0
    indices_read_again: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def decoded(self, started: float, frames: int) -> None:
        """Counts one task of the decode pool."""
        with self.lock:
            self.clips += 1
            self.decoded_frames += frames
            self.decode_s += time.perf_counter() - started

    def add(self, *, needed_bytes: int = 0, evicted_early: int = 0) -> None:
        """Counts what several threads do."""
        with self.lock:
            self.needed_bytes += needed_bytes
            self.evicted_early += evicted_early
