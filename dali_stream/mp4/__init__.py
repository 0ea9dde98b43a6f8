"""MP4 files: boxes, indices, GOPs, damage checks, and the muxer of clips. This package uses no threads and no network."""
