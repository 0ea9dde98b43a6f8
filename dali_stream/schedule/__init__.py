"""Schedule of a loader: which frames to decode, cache and evict for each batch.

The schedule is computed from the order alone, before any of it is carried out. It does no I/O, starts no threads and reads no
clock, so the same order always gives the same schedule.
"""
