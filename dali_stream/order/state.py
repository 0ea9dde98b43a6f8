"""Arguments of the order in `Loader`, in `FrameSampler` and in the state of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from dali_stream.checks.arguments import MOST_EPOCHS
from dali_stream.errors import ResumeError, counted
from dali_stream.order.order import (
    Shuffle,
    allowed_worlds,
    check_order_arguments,
    check_world,
    default_pools,
    has_consumers,
    is_shuffle,
)

MOST_CONSUMERS, MOST_SEGMENTS = 1 << 20, 1 << 31  # limits of what a state may set
STATE_VERSION = 2
"""Version of the orders. Each state contains it, because a position may have another sample in another version."""


class OrderArguments(NamedTuple):
    """Arguments that determine an order, together with the episodes and the epoch. See `Order`."""

    shuffle: Shuffle
    seed: int
    consumers: int
    episode_pool_size: int

    def checked(self, rank: int, world_size: int) -> OrderArguments:
        """Return the arguments, with `seed` as int.

        Raises:
            ValueError: If an argument is out of range, or if `world_size` does not divide the consumers.
        """
        check_order_arguments(*self)
        check_world(rank, world_size, self.consumers if has_consumers(self.shuffle) else None)
        return self._replace(seed=int(self.seed))

    def check_resumable(self, world_size: int) -> None:
        """Raise ResumeError if `world_size` does not divide the consumers of a saved state."""
        if has_consumers(self.shuffle) and self.consumers % world_size:
            raise ResumeError(
                f"world_size must divide consumers={self.consumers} of the state, got {world_size}. A run keeps its consumers, "
                f"so resume it on {allowed_worlds(self.consumers)} ranks"
            )

    def uneven(self, batch_size: int, world_size: int) -> str | None:
        """Return a warning if `consumers` does not divide the global batch, or None if it does."""
        stride = batch_size * world_size
        if not has_consumers(self.shuffle) or stride % self.consumers == 0:
            return None
        default, _ = default_pools(batch_size, world_size)
        return (
            f"consumers={self.consumers} does not divide the global batch of {counted(stride, 'sample')} (batch_size "
            f"{batch_size}, {counted(world_size, 'rank')}): consecutive batches draw from different groups of episodes, and "
            f"the training loss can alternate with the batch number. Choose a batch size whose global batch is a multiple of "
            f"{self.consumers}. A new run can also leave consumers out, which makes it {default}"
        )

    def state(self) -> dict[str, Any]:
        """Return the arguments that affect the order, as entries of the state of a run."""
        state: dict[str, Any] = {"shuffle": self.shuffle}
        if self.shuffle:
            state["seed"] = self.seed
        if has_consumers(self.shuffle):
            state |= {"consumers": self.consumers, "episode_pool_size": self.episode_pool_size}
        return state


def noted(state: Mapping[str, Any], shuffle: Shuffle | None, pools: Mapping[str, int | None]) -> dict[str, Any]:
    """Return the values from the state of a run for those arguments that the user did not pass.

    Missing or invalid values are left out. `check_state` then rejects the state.

    Args:
        state: State of a run.
        shuffle: Argument of the user, or None if it was not passed.
        pools: Arguments {"consumers": ..., "episode_pool_size": ...} of the user, each None if it was not passed.
    """
    order = state.get("order")
    if not isinstance(order, Mapping) or not is_shuffle(saved := order.get("shuffle")):
        return {}
    values: dict[str, Any] = {"shuffle": saved} if shuffle is None else {}
    if has_consumers(saved) and shuffle in (None, saved):
        most = {"consumers": MOST_CONSUMERS, "episode_pool_size": MOST_SEGMENTS}
        left = {name: order.get(name) for name, user_value in pools.items() if user_value is None}
        values |= {name: value for name, value in left.items() if type(value) is int and 1 <= value <= most[name]}
    return values


def check_version(state: object, whose: str, key: str) -> None:
    """Check the version and the form of a state.

    Args:
        state: State of a run.
        whose: Name of the class that reads it, for the message.
        key: Key that the state must have.

    Raises:
        ResumeError: If `state` is not a state, has another version or lacks the key.
    """
    version = state.get("version") if isinstance(state, Mapping) else None
    if type(version) is int and version != STATE_VERSION:
        raise ResumeError(
            f"version of the state must be {STATE_VERSION}, got {version} of a dali_stream with another order. "
            "Continue the run with that version, or begin a new epoch with this one"
        )
    if not isinstance(state, Mapping) or version != STATE_VERSION or key not in state:
        raise ResumeError(f"state must be that of a {whose} (version {STATE_VERSION}), got {str(state)[:200]}")


def check_state(state: Mapping[str, Any], whose: str, order: Mapping[str, Any], frames: int) -> tuple[int, int]:
    """Return (epoch, position) of a state.

    Args:
        state: State of a run.
        whose: Name of the class that reads it, for the message.
        order: Entry "order" that the state must have.
        frames: Number of positions of an epoch.

    Raises:
        ResumeError: If the state has another order, or an invalid epoch or position.
    """
    saved, epoch, position = (state.get(key) for key in ("order", "epoch", "position"))
    if isinstance(saved, Mapping) and saved.get("shuffle") is False and ("seed" in saved) != ("seed" in order):
        # Without shuffling, the seed is that of dali_graph alone, which a resumed run may add or leave out.
        saved, order = ({key: value for key, value in each.items() if key != "seed"} for each in (saved, order))
    if saved != order:
        differences = _differences(saved, order) if isinstance(saved, Mapping) else f"it was {str(saved)[:80]} in the run"
        raise ResumeError(f"order of the state must be that of this {whose}: {differences}. Resume with the same arguments")
    at_place = type(epoch) is int and type(position) is int and 0 <= epoch < MOST_EPOCHS and 0 <= position <= frames
    if not at_place:
        raise ResumeError(
            f"the state must be at an epoch from 0 to {MOST_EPOCHS - 1} and a position from 0 to {frames}, got epoch "
            f"{str(epoch)[:40]}, position {str(position)[:40]}"
        )
    assert isinstance(epoch, int)
    assert isinstance(position, int)
    return epoch, position


def _differences(saved: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """Return the entries in which two orders differ, such as "seed was 1 in the run and is 2 here"."""
    found = []
    for key in dict.fromkeys([*here, *saved]):
        before, now = saved.get(key), here.get(key)
        if isinstance(before, Mapping) and isinstance(now, Mapping):
            found += [f"{key}: {_differences(before, now)}"] if before != now else []
        elif before != now or (key in saved) != (key in here):
            old, new = (str(values[key])[:80] if key in values else "absent" for values in (saved, here))
            found.append(f"{key} was {old} in the run and is {new} here")
    return ", ".join(found)
