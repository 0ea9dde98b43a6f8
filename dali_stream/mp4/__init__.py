"""MP4 files: boxes, indices, GOPs, damage checks, and the muxer of clips.

This package starts no threads, and reads files only through a `Store`.
"""
