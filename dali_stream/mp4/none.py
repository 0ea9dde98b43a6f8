"""The number that arrays of numbers have for nothing."""

NONE = -1  # no packet, no file, no row, no slot, no block
