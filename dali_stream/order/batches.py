"""How the positions of an epoch are cut into batches, the same number of them for each rank."""

from __future__ import annotations

from dataclasses import dataclass

from dali_stream.errors import counted

LAST_BATCH = ("drop", "partial", "pad")


@dataclass(frozen=True)
class Batches:
    """The global batches of an epoch of `frames` positions, each rank's share being `batch_size`.

    `last_batch` says what becomes of the positions that fill no whole batch: "drop" leaves them out; "partial" serves
    them as a smaller batch, dealt to the ranks in turn; "pad" fills the batch with samples from the epoch's beginning.
    Where fewer positions than ranks are left, "partial" adds them to the batch before, since each rank needs as many
    batches as the others: some ranks' last batch then has one sample more. A run that is resumed with fewer positions left
    than ranks has no batch before them; they are left out.
    """

    frames: int
    batch_size: int
    world_size: int
    last_batch: str

    def checked(self) -> Batches:
        """These batches. Raises ValueError where an epoch has none."""
        if not self.count(0):
            raise ValueError(
                f"batch_size={self.batch_size} on {counted(self.world_size, 'rank')} needs {counted(self.stride, 'frame')}, "
                f"and the selection has {self.frames}, so an epoch has no batch; give a smaller batch_size, or "
                'last_batch="pad"'
            )
        return self

    @property
    def stride(self) -> int:
        """Positions of a whole global batch."""
        return self.batch_size * self.world_size

    @property
    def largest(self) -> int:
        """Samples that one rank's batch may have."""
        return self.batch_size + (self.last_batch == "partial" and self.world_size > 1)

    def count(self, position: int) -> int:
        """Batches from `position` to the end of the epoch."""
        whole, rest = divmod(max(self.frames - position, 0), self.stride)
        if self.last_batch == "drop" or (self.last_batch == "partial" and rest < self.world_size):
            return whole
        return whole + (rest > 0)

    def begin(self, batch: int) -> int:
        """Return the position where a global batch of the epoch begins, or where the epoch ends for the number of its batches.

        Args:
            batch: Number of the batch, from 0.

        Raises:
            ValueError: If the epoch has fewer batches.
        """
        if batch > self.count(0):
            raise ValueError(
                f"batch must be at most {self.count(0)}, the number of batches of an epoch, got {batch}; of a count from the "
                "start of training, divmod(count, len(loader)) is (epoch, batch)"
            )
        return self.frames if batch == self.count(0) else batch * self.stride

    def span(self, position: int) -> tuple[int, int]:
        """(start, stop) of the global batch that begins at `position`."""
        if self.last_batch == "partial" and self.count(position) == 1:
            return position, self.frames
        return position, min(position + self.stride, self.frames)

    def first(self, position: int, rank: int) -> int:
        """Return the first position from `position` on that a rank serves: it has every p with p % world_size == rank."""
        return position + (rank - position) % self.world_size
