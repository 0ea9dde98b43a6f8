"""MP4 files: boxes, indices, GOPs, damage, and the muxer that packs clips. No threads, no network."""
