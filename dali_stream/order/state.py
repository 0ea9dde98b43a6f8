"""The order's arguments in the Loader and in FrameSampler, and in the state of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from dali_stream.errors import ResumeError
from dali_stream.order.order import Shuffle, allowed_worlds, check_order_arguments, check_world, uneven

STATE_VERSION = 2
"""Version of the orders, which a state names. A position of another version is of another sample."""


class OrderArguments(NamedTuple):
    """What an order is a function of, beside episodes and epoch. See `Order`."""

    shuffle: Shuffle
    seed: int
    consumers: int
    episode_pool_size: int

    def checked(self, rank: int, world_size: int) -> OrderArguments:
        """These arguments. Raises ValueError for what no order can be made of, and where these ranks cannot share it."""
        check_order_arguments(*self)
        check_world(rank, world_size, self.consumers if self.shuffle is True else None)
        return self._replace(seed=int(self.seed))

    def check_resumable(self, world_size: int) -> None:
        """Raises ResumeError if this number of ranks cannot share the order of a state."""
        if self.shuffle is True and self.consumers % world_size:
            raise ResumeError(
                f"the state is of a run with consumers={self.consumers}, which world_size={world_size} does not divide; a run "
                f"keeps its consumers, so resume it on {allowed_worlds(self.consumers)} ranks"
            )

    def uneven(self, batch_size: int, world_size: int) -> str | None:
        """What happens where `consumers` does not divide the global batch, for a warning; None where it does."""
        return uneven(self.consumers, batch_size, world_size) if self.shuffle is True else None

    def state(self) -> dict[str, Any]:
        """What the state of a run notes of them: those that the order depends on."""
        state: dict[str, Any] = {"shuffle": self.shuffle}
        if self.shuffle:
            state["seed"] = self.seed
        if self.shuffle is True:
            state |= {"consumers": self.consumers, "episode_pool_size": self.episode_pool_size}
        return state


def noted(state: Mapping[str, Any], shuffle: Shuffle | None, pools: Mapping[str, int | None]) -> dict[str, Any]:
    """Of the arguments `shuffle`, `consumers` and `episode_pool_size` those that are None: as the state of a run notes them.

    What a state does not note, or not as something that can be an argument, is left out: `check_state` refuses it.
    """
    order = state.get("order")
    saved = order.get("shuffle") if isinstance(order, Mapping) else None
    taken: dict[str, Any] = {}
    if shuffle is None and (saved == "global" or isinstance(saved, bool)):
        taken = {"shuffle": saved}
    if isinstance(order, Mapping) and saved is True and shuffle in (None, True):
        left = {name: order.get(name) for name, given in pools.items() if given is None}
        taken |= {name: value for name, value in left.items() if type(value) is int and value >= 1}
    return taken


def check_version(state: object, whose: str, key: str) -> None:
    """Raise ResumeError if this is no state of the present version, or has no such key."""
    version = state.get("version") if isinstance(state, Mapping) else None
    if type(version) is int and version != STATE_VERSION:
        raise ResumeError(
            f"version of the state must be {STATE_VERSION}, got {version}: a dali_stream with another order wrote it. "
            "Continue the run with that version, or begin a new epoch with this one"
        )
    if not isinstance(state, Mapping) or version != STATE_VERSION or key not in state:
        raise ResumeError(f"this is no state of a {whose} (version {STATE_VERSION}): {str(state)[:200]}")


def check_state(state: Mapping[str, Any], whose: str, order: Mapping[str, Any], frames: int) -> tuple[int, int]:
    """(epoch, position) of a state. Raises ResumeError where it is of another order than its reader's, or of no place in it."""
    saved, epoch, position = (state.get(key) for key in ("order", "epoch", "position"))
    if saved != order:
        raise ResumeError(f"the state is of the order {saved}, and this {whose} has {order}; resume with the same arguments")
    if type(epoch) is not int or type(position) is not int or epoch < 0 or not 0 <= position <= frames:
        raise ResumeError(
            f"the state is at epoch {epoch}, position {position}; an epoch counts from 0 and has {frames} positions"
        )
    return epoch, position
