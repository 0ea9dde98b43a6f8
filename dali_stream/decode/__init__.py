"""From encoded video and images to frames: decoders, what NVDEC can do, which decoder a camera gets, and resizing."""
