"""Rows, indices and encoded video, which are read ahead of the batches that need them, and the memory of decoded frames."""
