"""In-memory cache of rows, indices, encoded video and decoded frames. The schedule decides what it holds."""
