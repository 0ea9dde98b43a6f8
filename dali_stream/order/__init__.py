"""Which frame comes when: order, batches, windows, resume state and random numbers. Pure: no I/O, no threads, no clock."""

from dali_stream.order.order import (
    Order,
    Shuffle,
    check_world,
    checked_lengths,
    default_pools,
)

__all__ = [
    "Order",
    "Shuffle",
    "check_world",
    "checked_lengths",
    "default_pools",
]
