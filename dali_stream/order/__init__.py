"""Which frame comes when: order, batches, windows, resume state and random numbers. Pure: no I/O, no threads, no clock."""

from dali_stream.order.order import (
    Order,
    Shuffle,
    allowed_worlds,
    check_order_arguments,
    check_world,
    checked_lengths,
    default_pools,
    uneven,
)

__all__ = [
    "Order",
    "Shuffle",
    "allowed_worlds",
    "check_order_arguments",
    "check_world",
    "checked_lengths",
    "default_pools",
    "uneven",
]
