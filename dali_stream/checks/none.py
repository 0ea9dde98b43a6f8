"""Sentinel in arrays of integers."""

NONE = -1  # no packet, no file, no row, no slot, no block
