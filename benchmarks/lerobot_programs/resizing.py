"""Arguments of LeRobot's training script that resize frames."""

from __future__ import annotations


def resized(side: str, size: tuple[int, int]) -> list[str]:
    """Return the arguments for frames of a size (height, width): of the Loader, or of torchvision's Resize in the workers.

    Args:
        side: "loader", or another side of `run.py`.
        size: Size in pixels.
    """
    height, width = size
    if side == "loader":
        return [f"--loader.image_size={height}x{width}"]
    resize = f"{{resize: {{weight: 1.0, type: Resize, kwargs: {{size: [{height}, {width}]}}}}}}"
    transforms = "--dataset.image_transforms"
    return [f"{transforms}.enable=true", f"{transforms}.max_num_transforms=1", f"{transforms}.tfs={resize}"]
