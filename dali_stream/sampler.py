"""FrameSampler, the order of a Loader as a sampler for a map-style dataset and PyTorch's DataLoader."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import Sampler

from dali_stream.checks.arguments import epoch_number, from_zero, known_arguments, positive
from dali_stream.dataset import Dataset
from dali_stream.errors import ResumeError, counted
from dali_stream.lerobot.frame_ranges import FrameRanges, whole
from dali_stream.mixture import Mixture
from dali_stream.order import Shuffle, check_world, checked_lengths, default_pools
from dali_stream.order.orders import DatasetOrders, Orders
from dali_stream.order.state import STATE_VERSION, OrderArguments, check_state, check_version, noted
from dali_stream.system.log_records import note_given
from dali_stream.system.ranks import current_ranks

_log = logging.getLogger("dali_stream")
_BLOCK = 4096  # number of indices that are computed together
_WITHOUT_BATCH_SIZE = {"consumers": 32, "episode_pool_size": 8}  # defaults of `Order`


@dataclass
class _Passage:
    """One iteration over an epoch.

    Attributes:
        epoch: Number of the epoch.
        start: Position at which the iteration begins.
        begun: Whether the iteration has begun.
        yielded: Number of indices that this rank has yielded.
    """

    epoch: int
    start: int = 0
    begun: bool = False
    yielded: int = 0


class FrameSampler(Sampler[int]):
    """Sampler of indices into a map-style dataset such as LeRobotDataset, in the order of a `Loader` with the same arguments.

        sampler = FrameSampler(lengths, seed=1, batch_size=64)
        loader = DataLoader(lerobot_dataset, batch_size=64, sampler=sampler, num_workers=8, drop_last=True)
        for batch in loader: ...    # one epoch; the next loop is the next epoch

    Each process yields its own share of the epoch's positions, so the DataLoader must not be split by rank again: do not pass
    it to `accelerator.prepare`, and pass `use_distributed_sampler=False` to Lightning's Trainer. Every rank has the same number
    of samples. If world_size does not divide the number of positions, the remaining positions at the end of the epoch are left
    out. With `drop_last=True`, the batches are those of a Loader with `last_batch="drop"`.

    The sampler keeps only the boundaries of the episodes in memory, and computes a few thousand indices at a time.

    Args:
        episode_lengths: Number of frames of each episode, in the order of the map-style dataset. A `Dataset` is also accepted,
            if the map-style dataset has the same episodes in increasing order of their index. Its `frames`,
            `drop_n_first_frames` and `drop_n_last_frames` then apply, too. For a `torch.utils.data.ConcatDataset` of several
            map-style datasets, pass a `Mixture` with the datasets in the same order.
        shuffle: See `Loader`. Default: True if `batch_size`, `consumers` or `episode_pool_size` is passed, otherwise "global",
            since a map-style dataset is local. A resumed run keeps the value of its state.
        seed: See `Loader`. Default: 0.
        batch_size: Batch size of the DataLoader per rank. It determines the defaults of `consumers` and `episode_pool_size`.
            Default: unknown.
        consumers, episode_pool_size: See `Loader`. Default: chosen as in `Loader` if `batch_size` is passed. Otherwise they are
            32 and 8, which mix well only if 32 divides the global batch.
        drop_n_first_frames, drop_n_last_frames: Number of frames at the beginning and at the end of each episode that are never
            sampled. An episode that has no other frames yields no samples. For a mixture, pass these arguments to its datasets
            instead. Default: 0.
        rank, world_size: See `Loader`.

    Raises:
        ValueError: If an argument is invalid, or if an epoch has fewer frames than ranks.
    """

    @known_arguments
    def __init__(
        self,
        episode_lengths: Dataset | Mixture | Sequence[int] | npt.NDArray[np.integer[Any]],
        *,
        shuffle: Shuffle | None = None,
        seed: int = 0,
        batch_size: int | None = None,
        consumers: int | None = None,
        episode_pool_size: int | None = None,
        drop_n_first_frames: int = 0,
        drop_n_last_frames: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        self._ranks = current_ranks(rank, world_size)
        note_given(self._ranks)
        self._rank, self._world = self._ranks.rank, self._ranks.world_size
        check_world(self._rank, self._world, None)
        self._batch_size = None if batch_size is None else positive("batch_size", batch_size)
        if shuffle is None and (consumers is not None or episode_pool_size is not None):
            shuffle = True
        self._shuffle_given = shuffle
        self._pools_given = {"consumers": consumers, "episode_pool_size": episode_pool_size}
        if shuffle is None:
            shuffle = "global" if batch_size is None else True
        consumers, episode_pool_size = self._pools(self._batch_size, self._world)
        self._arguments = OrderArguments(shuffle, seed, consumers, episode_pool_size).checked(self._rank, self._world)
        self._drops = {
            "drop_n_first_frames": from_zero("drop_n_first_frames", drop_n_first_frames),
            "drop_n_last_frames": from_zero("drop_n_last_frames", drop_n_last_frames),
        }
        dropped = " and ".join(f"{name}={count}" for name, count in self._drops.items())
        all_lengths = episode_lengths.lengths if isinstance(episode_lengths, (Dataset, Mixture)) else episode_lengths
        lengths = checked_lengths(all_lengths)
        self._first = np.cumsum(lengths) - lengths
        if isinstance(episode_lengths, Mixture):
            if any(self._drops.values()):
                raise ValueError(
                    f"drop_n_first_frames and drop_n_last_frames must be 0 for a mixture, got {dropped}. Pass them to each "
                    "Dataset of the mixture, such as Dataset(uri, drop_n_last_frames=10)"
                )
            parts = [_fingerprint(part.lengths, part.frame_ranges) for part in episode_lengths.datasets.values()]
            self._fingerprint = hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()
            self._orders: Orders = episode_lengths.orders()
        else:
            ranges = episode_lengths.frame_ranges if isinstance(episode_lengths, Dataset) else None
            self._fingerprint = _fingerprint(lengths, ranges)
            kept = (whole(lengths) if ranges is None else ranges).dropping(lengths, *self._drops.values())
            self._orders = DatasetOrders(lengths, kept)
        self._frames = self._orders.positions
        if self._frames < self._world:
            if isinstance(episode_lengths, Mixture):
                raise ValueError(
                    f"an epoch of {episode_lengths.uri} must have a sample for each of world_size={self._world} ranks, got "
                    f"{counted(self._frames, 'sample')}. Use a larger epoch_samples"
                )
            raise ValueError(
                f"{counted(len(lengths), 'episode')} with {counted(int(lengths.sum()), 'frame')}, {dropped} must leave a frame "
                f"for each of world_size={self._world} ranks, got {counted(self._frames, 'frame')}. Drop fewer frames, or use "
                "more episodes"
            )
        self._warn_if_uneven()
        self._now = _Passage(0)

    def __len__(self) -> int:
        """Number of indices of a whole epoch, the same on each rank. The rest of a resumed epoch has fewer indices."""
        return self._share(0)

    def __iter__(self) -> Iterator[int]:
        """Iterate over one epoch.

        The first iteration yields the first epoch, or the epoch of `set_epoch` or of a loaded state. Each later iteration
        yields the epoch after the previous one, so that a loop without `set_epoch` does not repeat the same order.

        Raises:
            DaliStreamError: If torch.distributed has another rank or world size than the sampler.
        """
        self._ranks.check("FrameSampler")
        if self._now.begun:
            self._now = _Passage(self._now.epoch + 1)
        now = self._now
        now.begun = True
        order = self._orders.of(now.epoch, self._arguments)
        left, position = self._share(now.start), now.start
        while left:
            count = min(left, _BLOCK)
            episode, frame = order.read(position, count, self._rank, self._world)
            for index in (self._first[episode] + frame).tolist():
                now.yielded += 1
                yield index
            left, position = left - count, position + count * self._world

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration yield an epoch from its beginning, or from the loaded position if that is in this epoch.

        Args:
            epoch: Number of the epoch, from 0.

        Raises:
            ValueError: If `epoch` is not a nonnegative integer.
        """
        epoch, now = epoch_number(epoch), self._now
        if epoch == now.epoch and not now.begun:
            return
        if not now.begun and now.start and self._share(now.start):
            _log.warning(
                "set_epoch(%d) discards the resumed position %d of epoch %d. Begin with that epoch to continue",
                *(epoch, now.start, now.epoch),
            )
        self._now = _Passage(epoch)

    def state_dict(self, *, step: int | None = None, batch_size: int | None = None) -> dict[str, Any]:
        """Return the state of the run, a small dict that is the same on each rank.

        It holds text, integers, booleans, lists and dicts. `torch.load(weights_only=True)` and JSON read it.

        With PyTorch's DataLoader, pass both arguments, since it requests the indices of batches before it delivers them.
        Without arguments, the state is that after the last yielded index. torchdata's StatefulDataLoader calls this method
        without arguments when it requests the indices of a batch, and returns the state of the batch that it delivered.

        Args:
            step: Number of batches, not of optimizer steps, that the current loop over the DataLoader has delivered. It is 0
                before the first batch of each loop, even after a resume. `enumerate(loader, 1)` counts it.
            batch_size: Batch size of the DataLoader per rank.

        Raises:
            ValueError: If this iteration has yielded fewer indices than `step` batches contain, or if only one argument is
                passed.
        """
        if step is None and batch_size is None:
            return self._state(self._now.yielded)
        if step is None or batch_size is None:
            raise ValueError(
                f"step and batch_size must both be passed (DataLoader) or both be None (torchdata's StatefulDataLoader), got "
                f"{step} and {batch_size}"
            )
        step, batch_size, now = from_zero("step", step), positive("batch_size", batch_size), self._now
        share = self._share(now.start)
        delivered = min(step * batch_size, share)
        if delivered > now.yielded or step > -(-share // batch_size):
            raise ValueError(
                f"step must be within the {now.yielded} indices that this sampler has yielded in its iteration of epoch "
                f"{now.epoch}, got step={step} with batch_size={batch_size}. It counts the batches that the current loop over "
                "the DataLoader has delivered to this rank, from 0 in each loop, also in the first one after a resume"
            )
        return self._state(delivered)

    def _state(self, delivered: int) -> dict[str, Any]:
        """Return the state after this rank has delivered a number of indices of the current iteration."""
        return {
            "version": STATE_VERSION,
            "epoch": self._now.epoch,
            "position": self._now.start + delivered * self._world,
            "episode_lengths": self._fingerprint,
            "episodes": len(self._first),
            "frames": self._frames,
            "order": self._order_state(self._arguments),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue a run at the position of its state. Call this method before the DataLoader is iterated.

        The batch size may differ from that of the run. The world size may also differ if it divides `consumers`. If the state
        is from the end of an epoch, the first iteration yields no indices, and the second one yields the next epoch. If
        `shuffle`, `consumers` or `episode_pool_size` was not passed to this sampler, it uses the value of the state.

        Args:
            state: Result of `state_dict`.

        Raises:
            ResumeError: If iteration has begun, if the state belongs to other episodes or another order, or if this world size
                does not divide the `consumers` of the state.
        """
        self._check_not_begun("load_state_dict")
        check_version(state, "FrameSampler", "episode_lengths")
        if state["episode_lengths"] != self._fingerprint:
            now = f"{counted(len(self._first), 'episode')} with {counted(self._frames, 'frame')} to sample"
            saved_counts = [state.get(name) for name in ("episodes", "frames")]
            if saved_counts == [len(self._first), self._frames]:
                difference = f"of as many episodes and frames ({now}), but of other lengths or ranges of frames"
            elif all(type(count) is int for count in saved_counts):
                difference = f"of {saved_counts[0]} episodes with {saved_counts[1]} frames to sample, and the sampler has {now}"
            else:
                difference = f"of other episodes than those of the sampler, which has {now}"
            raise ResumeError(f"The state is {difference}. Resume with the dataset and the episodes of that run")
        saved = noted(state, self._shuffle_given, self._pools_given)
        arguments = self._arguments._replace(**saved)
        place = check_state(state, "sampler", self._order_state(arguments), self._frames)
        arguments.check_resumable(self._world)
        self._arguments, self._now = arguments, _Passage(*place)
        if "consumers" in saved:
            self._warn_if_uneven()

    def resume(self, *, epoch: int, batch: int, batch_size: int, world_size: int | None = None) -> None:
        """Continue without a saved state, from the number of steps of a checkpoint. See `Loader.resume`.

        Args:
            epoch: Epoch of the checkpoint, from 0.
            batch: Number of batches that were delivered to each rank since the beginning of the epoch.
            batch_size: Batch size per rank of the run that saved the checkpoint, the same for the whole epoch.
            world_size: Number of ranks of that run. Default: that of the sampler.

        Raises:
            ResumeError: If iteration has begun.
            ValueError: If an argument is invalid, if an epoch has fewer batches, or if the order cannot be divided among this
                number of ranks.
        """
        self._check_not_begun("resume")
        epoch, batch = epoch_number(epoch), from_zero("batch", batch)
        batch_size = positive("batch_size", batch_size)
        world_size = self._world if world_size is None else positive("world_size", world_size)
        arguments = self._arguments
        if self._batch_size is not None:  # the order of that run had the defaults for its own batch size and world size
            consumers, pool = self._pools(batch_size, world_size)
            arguments = arguments._replace(consumers=consumers, episode_pool_size=pool)
        for ranks in (world_size, self._world):
            arguments.checked(0, ranks)
        share = self._frames // world_size
        batches = -(-share // batch_size)
        if batch > batches:
            raise ValueError(
                f"batch must be at most {batches}, the number of batches of an epoch with batch_size={batch_size} on "
                f"{counted(world_size, 'rank')}, got {batch}. For a count from the start of training, divmod(count, "
                "len(dataloader)) with that run's DataLoader is (epoch, batch)"
            )
        position = min(batch * batch_size, share) * world_size
        self._arguments = arguments
        self._now = _Passage(epoch, position)
        _log.warning(
            "resumed at position %d of epoch %d, from batch=%d, batch_size=%d, world_size=%d alone. The sampler "
            "assumes that the episodes, %s are those of that run, which these numbers do not contain. Each frame then still "
            "occurs at most once in this epoch, and only last frames that do not fill all ranks are left out. The global "
            "batches are those of the uninterrupted run only while batch_size * world_size stays %d",
            *(position, epoch, batch, batch_size, world_size, ", ".join(self._order_state(arguments)), batch_size * world_size),
        )

    def _share(self, start: int) -> int:
        """Return the number of samples of each rank from a position to the end of the epoch."""
        return (self._frames - start) // self._world

    def _pools(self, batch_size: int | None, world_size: int) -> tuple[int, int]:
        """Return (consumers, episode_pool_size) of a run.

        Args:
            batch_size: Batch size of the run per rank, or None if it is unknown.
            world_size: Number of ranks of the run.
        """
        pools = self._pools_given
        if batch_size is None:
            pools = {name: _WITHOUT_BATCH_SIZE[name] if value is None else value for name, value in pools.items()}
        return default_pools(batch_size or 1, world_size, **pools)

    def _warn_if_uneven(self) -> None:
        warning = self._batch_size and self._arguments.uneven(self._batch_size, self._world)
        if warning and self._rank == 0:
            _log.warning("%s", warning)

    def _check_not_begun(self, method: str) -> None:
        if self._now.begun:
            raise ResumeError(f"{method} must be called before iteration begins. Call it on a new FrameSampler")

    def _order_state(self, arguments: OrderArguments) -> dict[str, Any]:
        """Return the parameters of the order that are part of the state, without episode lengths and epoch."""
        return arguments.state() | self._drops | self._orders.state


def _fingerprint(lengths: npt.NDArray[np.int64], ranges: FrameRanges | None) -> str:
    """Return a hash of the lengths of a dataset's episodes and of their sampled frames, 32 hexadecimal digits."""
    digest = hashlib.blake2b(lengths.astype("<i8").tobytes(), digest_size=16)
    if ranges is not None:
        digest.update(ranges.to_bytes())
    return digest.hexdigest()
