"""Measure how often damage in an MP4 file results in a wrong frame without an error.

    python benchmarks/damage.py FILE.mp4 [FILE.mp4 ...] [--trials 60] [--json]

The program damages one packet of a file at a time, decodes its GOP as the Loader does, and compares the frames with those of
the undamaged file. The outcome is an error, right frames, or wrong frames. MP4 has no checksums, so damage is not always
detected: the bitstream may remain valid. The numbers depend on the codec, the encoder and the content.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from argument_types import count

import dali_stream
from dali_stream.decode import torchcodec as decode
from dali_stream.mp4.index import VideoIndex, read_index
from dali_stream.storage import LocalStore
from dali_stream.tools import environment


def all_of_it(packet: bytes, rng: random.Random) -> bytes:
    """Replace all bytes of a packet with random bytes."""
    return rng.randbytes(len(packet))


def a_third(packet: bytes, rng: random.Random) -> bytes:
    """Replace a contiguous third of a packet with random bytes."""
    length = max(len(packet) // 3, 1)
    start = rng.randrange(len(packet) - length + 1)
    return packet[:start] + rng.randbytes(length) + packet[start + length :]


def one_bit(packet: bytes, rng: random.Random) -> bytes:
    """Flip one bit of a packet."""
    position = rng.randrange(len(packet))
    return packet[:position] + bytes([packet[position] ^ 1 << rng.randrange(8)]) + packet[position + 1 :]


KINDS: tuple[Callable[[bytes, random.Random], bytes], ...] = (all_of_it, a_third, one_bit)


class Damaged(LocalStore):
    """A local folder whose files are read with some bytes replaced.

    Attributes:
        patch: Offset in each file, and the bytes that replace the file's bytes from this offset on.
    """

    patch: tuple[int, bytes] = (0, b"")

    def read(self, path: str, start: int, stop: int) -> bytes:
        data = bytearray(super().read(path, start, stop))
        offset, replacement = self.patch
        first, last = max(offset, start), min(offset + len(replacement), start + len(data))
        if first < last:
            data[first - start : last - start] = replacement[first - offset : last - offset]
        return bytes(data)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE.mp4")
    parser.add_argument("--trials", type=count, default=60, help="trials of each kind of damage")
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    arguments = parser.parse_args()
    result: dict[str, Any] = {"trials": arguments.trials, "files": {}, **environment.ran_on("cpu")}
    try:
        for file in arguments.files:
            result["files"][file.name] = report = measure(file, arguments.trials, arguments.seed)
            print(f"{file.name}: {report['codec']}, GOPs of up to {report['longest_gop']}")
            for kind, counts in report["damage"].items():
                print(f"  {kind.replace('_', ' '):10} " + ", ".join(f"{name} {count}" for name, count in counts.items()))
    except dali_stream.DaliStreamError as error:
        print(f"damage: {error}", file=sys.stderr)
        return 1
    if arguments.json:
        print(environment.report_json(result))
    return 0


def measure(file: Path, trials: int, seed: int) -> dict[str, Any]:
    """Count the outcomes of `trials` damages of each kind."""
    store = Damaged(str(file.parent))
    table = read_index(store, file.name)
    video = table.format()
    damage = {}
    for kind in KINDS:
        rng = random.Random(seed)
        counts = {"error": 0, "right": 0, "wrong": 0}
        for _ in range(trials):
            sample = rng.randrange(len(table))
            offset, size = int(table.offset[sample]), int(table.size(sample))
            store.patch = (0, b"")
            good = _gop(store, table, sample, video)
            store.patch = (offset, kind(store.read(file.name, offset, offset + size), rng))
            try:
                counts["right" if np.array_equal(_gop(store, table, sample, video), good) else "wrong"] += 1
            except dali_stream.DecodeError:
                counts["error"] += 1
        damage[kind.__name__] = counts
    store.close()
    return {"codec": video.codec, "longest_gop": table.longest_gop, "samples": len(table), "damage": damage}


def _gop(store: LocalStore, table: VideoIndex, sample: int, video: Any) -> np.ndarray:
    """Return the frames of the GOP that contains a packet."""
    samples = np.flatnonzero(table.gop_start(np.arange(len(table))) == table.gop_start(sample)).tolist()
    frames, _ = decode.decode(store, [table] * len(samples), samples, video)
    return frames.copy()


if __name__ == "__main__":
    sys.exit(main())
