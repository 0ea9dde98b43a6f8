"""What resharding changed."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

Reads = set[tuple[str, int, int]]


@dataclass(frozen=True)
class Side:
    """One of the two datasets. Requests and bytes are those of the code that a Loader reads with, each range once.

    Attributes:
        address: of the dataset.
        data_files, video_files: number of files.
        bytes: of all files below `meta/`, `data/` and `videos/`.
        index_requests, index_bytes: reading the index of every video file.
        row_requests, row_bytes: reading the rows of an epoch, footers included.
    """

    address: str
    data_files: int
    video_files: int
    bytes: int
    index_requests: int
    index_bytes: int
    row_requests: int
    row_bytes: int


@dataclass(frozen=True)
class RewriteReport:
    """The source and the new dataset."""

    episodes: int
    frames: int
    cameras: tuple[str, ...]
    source: Side
    out: Side

    def as_dict(self) -> dict[str, Any]:
        """The same as dicts and lists for JSON."""
        return dataclasses.asdict(self)


def side(address: str, files: tuple[int, int], nbytes: int, indices: Reads, rows: Reads) -> Side:
    """Counts reads. `files` are those of rows and of video."""
    size = [sum(stop - start for _, start, stop in reads) for reads in (indices, rows)]
    return Side(address, *files, nbytes, len(indices), size[0], len(rows), size[1])
