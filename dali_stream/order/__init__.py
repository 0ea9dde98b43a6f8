"""Order of the samples: permutations, batches, windows, resume state and random numbers.

The modules of this package are pure functions of their arguments. They do no I/O, start no threads and read no clock.
"""

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
