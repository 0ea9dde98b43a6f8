"""Division of the positions of an epoch into batches, with the same number of batches on each rank."""

from __future__ import annotations

from dataclasses import dataclass

from dali_stream.errors import counted

LAST_BATCH = ("drop", "partial", "pad")


@dataclass(frozen=True)
class Batches:
    """Global batches of an epoch. A global batch consists of one batch for each rank.

    All ranks need the same number of batches. With `last_batch="partial"`, fewer positions than ranks may remain at the end.
    The previous batch takes them, and then has one more sample on some ranks. A run that is resumed at such a position has
    no previous batch, so it leaves these positions out.

    Attributes:
        frames: Number of positions of the epoch.
        batch_size: Number of samples per batch and rank.
        world_size: Number of ranks.
        last_batch: Treatment of the positions at the end that do not fill a global batch: "drop" leaves them out, "partial"
            distributes them over the ranks as a smaller batch, "pad" completes the batch with samples from the beginning of
            the epoch.
    """

    frames: int
    batch_size: int
    world_size: int
    last_batch: str

    def checked(self) -> Batches:
        """Return this object.

        Raises:
            ValueError: If an epoch has no batch.
        """
        if not self.count(0):
            raise ValueError(
                f"batch_size={self.batch_size} on {counted(self.world_size, 'rank')} needs {counted(self.stride, 'frame')}, "
                f"but the selection has {self.frames}, so an epoch has no batch. Use a smaller batch_size, or "
                'last_batch="pad"'
            )
        return self

    @property
    def stride(self) -> int:
        """Number of positions of a full global batch."""
        return self.batch_size * self.world_size

    @property
    def largest(self) -> int:
        """Maximum number of samples in a batch of one rank."""
        return self.batch_size + (self.last_batch == "partial" and self.world_size > 1)

    def count(self, position: int) -> int:
        """Return the number of batches from `position` to the end of the epoch."""
        whole, rest = divmod(max(self.frames - position, 0), self.stride)
        if self.last_batch == "drop" or (self.last_batch == "partial" and rest < self.world_size):
            return whole
        return whole + (rest > 0)

    def start_of(self, batch: int) -> int:
        """Return the position at which a global batch begins.

        Args:
            batch: Number of the batch, from 0. The number of batches is also valid, for the end of the epoch.

        Raises:
            ValueError: If the epoch has fewer batches.
        """
        if batch > self.count(0):
            raise ValueError(
                f"batch must be at most {self.count(0)}, the number of batches of an epoch, got {batch}. For a count from the "
                "start of training, divmod(count, len(loader)) is (epoch, batch)"
            )
        return self.frames if batch == self.count(0) else batch * self.stride

    def span(self, position: int) -> tuple[int, int]:
        """Return the positions [start, stop) of the global batch that begins at `position`."""
        # The last partial batch may have more positions than the stride, see the class.
        if self.last_batch == "partial" and self.count(position) == 1:
            return position, self.frames
        return position, min(position + self.stride, self.frames)

    def first(self, position: int, rank: int) -> int:
        """Return the first position at or after `position` that a rank serves. Rank r serves p if p % world_size == r."""
        return position + (rank - position) % self.world_size
