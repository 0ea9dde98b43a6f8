"""Encoded video: sample tables, packed clips, decoders, and what NVDEC can do."""
