"""Decoding of video and images: the decoders, the capabilities of NVDEC, the choice of a decoder per camera, and resizing."""
