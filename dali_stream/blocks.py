"""A remote video file as blocks: whole GOPs, of a size that is worth a request."""

from __future__ import annotations

from concurrent.futures import Future

import numpy as np
import numpy.typing as npt

from dali_stream.video.table import SampleTable

Int64 = npt.NDArray[np.int64]
BLOCK = 64 << 10  # bytes of a block, or a GOP if that is more: what a round trip of 50 ms carries at some MB/s


class BlockedFile:
    """One file as blocks. `held` has the bytes of those that are there, and the future of those on their way.

    Attributes:
        first: (n,) the first sample of each block.
        start, stop: (n,) its bytes in the file.
        joined: (n,) whether it begins where the block before ends.
        left: per epoch, (n,) how often samples of it are still to be asked for.
        used: per epoch, (n,) whether a batch has asked for any.
        pins: (n,) batches under way that need it.
    """

    def __init__(self, table: SampleTable, cuts: Int64, block: int) -> None:
        self.path = table.path
        # Blocks begin at sync samples: where an episode begins, and where the block before is large enough.
        ends = np.cumsum(table.size[: table.sync[-1]])
        begin = np.append(0, ends)[table.sync]
        full = np.append(True, np.diff(begin // block) > 0)
        self.first = table.sync[full | np.isin(table.sync, cuts)]
        self.start = np.minimum.reduceat(table.offset, self.first)
        self.stop = np.maximum.reduceat(table.offset + table.size, self.first)
        self.joined = np.append(False, self.start[1:] == self.stop[:-1])
        self.left: dict[int, Int64] = {}
        self.used: dict[int, npt.NDArray[np.bool_]] = {}
        self.pins = np.zeros(len(self.first), np.int32)
        self.held: dict[int, bytes | Future[None]] = {}

    def blocks(self, samples: Int64) -> Int64:
        """The block of each sample."""
        return np.searchsorted(self.first, samples, side="right") - 1

    def size(self, block: int) -> int:
        return int(self.stop[block] - self.start[block])

    def end_to_end(self, first: int, last: int) -> range:
        """The blocks from `first` to `last`, as far as each begins where the one before ends."""
        apart = np.flatnonzero(~self.joined[first + 1 : last + 1])
        return range(first, first + 1 + int(apart[0]) if len(apart) else last + 1)

    def wanted(self, block: int) -> bool:
        """Whether a later batch asks for it."""
        return any(left[block] > 0 for left in self.left.values())

    def ranges(self, blocks: list[int], most: int) -> list[list[int]]:
        """Blocks that lie end to end, in groups of up to `most` bytes."""
        groups: list[list[int]] = []
        for block in blocks:
            end_to_end = groups and groups[-1][-1] == block - 1 and self.joined[block]
            if not end_to_end or self.stop[block] - self.start[groups[-1][0]] > most:
                groups.append([])
            groups[-1].append(block)
        return groups

    def grown(self, group: list[int], most: int) -> list[int]:
        """The group, and the blocks behind it that are wanted too, as far as they lie end to end in up to `most` bytes."""
        group = list(group)
        for block in range(group[-1] + 1, len(self.first)):
            apart = not self.joined[block] or self.stop[block] - self.start[group[0]] > most
            if apart or block in self.held or not self.wanted(block):
                break
            group.append(block)
        return group


def decoded(table: SampleTable, samples: Int64) -> Int64:
    """Samples whose blocks hold what decoding these needs: themselves, and after an open GOP's start the GOP before."""
    if not table.open_gops:
        return samples
    head = table.head[samples].astype(np.int64)
    return np.concatenate([samples, head, table.head[np.maximum(head - 1, 0)].astype(np.int64)])
