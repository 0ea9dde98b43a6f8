"""What the state of a run says of its order, for the Loader and for FrameSampler."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dali_stream.errors import ResumeError
from dali_stream.order import Shuffle, allowed_worlds


def order_state(shuffle: Shuffle, seed: int, consumers: int, episode_pool_size: int) -> dict[str, Any]:
    """What an order is a function of, beside episodes and epoch, for the state of a run."""
    state: dict[str, Any] = {"shuffle": shuffle}
    if shuffle:
        state["seed"] = seed
    if shuffle is True:
        state |= {"consumers": consumers, "episode_pool_size": episode_pool_size}
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


def check_resumable(world_size: int, consumers: int) -> None:
    """Raises ResumeError where so many ranks cannot share the order of a state."""
    if consumers % world_size:
        raise ResumeError(
            f"the state is of a run with consumers={consumers}, which world_size={world_size} does not divide; a run keeps its "
            f"consumers, so resume it on {allowed_worlds(consumers)} ranks"
        )


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
