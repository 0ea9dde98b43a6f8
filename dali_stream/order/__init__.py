"""Order of the samples: permutations, batches, windows, resume state and random numbers.

Every result depends only on the arguments. This package does no I/O, starts no threads and reads no clock.
"""

from dali_stream.order.order import (
    Order,
    Shuffle,
    check_world,
    checked_lengths,
    default_pools,
    has_consumers,
)

__all__ = [
    "Order",
    "Shuffle",
    "check_world",
    "checked_lengths",
    "default_pools",
    "has_consumers",
]
