"""What the state of a run says of its order, for the Loader and for FrameSampler."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dali_stream.errors import ResumeError
from dali_stream.order import Shuffle


def order_state(shuffle: Shuffle, seed: int, consumers: int, episode_pool_size: int) -> dict[str, Any]:
    """What an order is a function of, beside episodes and epoch, for the state of a run."""
    state: dict[str, Any] = {"shuffle": shuffle}
    if shuffle:
        state["seed"] = seed
    if shuffle is True:
        state |= {"consumers": consumers, "episode_pool_size": episode_pool_size}
    return state


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
