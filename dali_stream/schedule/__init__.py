"""Schedule of a loader: which frames to decode, cache and evict for each batch.

A batch is planned from the order before any of it is carried out, with few observations: which episodes are open, which frames
could not be read, and which frames are on disk. Planning does no I/O, starts no threads and reads no clock, so the same order
and observations always give the same plans. `EpisodeTable` also holds the rows of the open episodes and their encoded video,
which `dali_stream.cache` reads.
"""
