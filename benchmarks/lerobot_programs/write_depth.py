"""Writes datasets with depth cameras with LeRobot's own writer: `python write_depth.py FOLDER`.

`benchmarks/lerobot_train.py` calls it. Each dataset has two depth cameras, one recorded in millimetres with 16 bits, and one in
metres as float32. They are video (`video`) or TIFF images in rows (`images`).
"""

import sys
from pathlib import Path

import numpy as np
from lerobot.configs import DepthEncoderConfig
from lerobot.datasets.lerobot_dataset import LeRobotDataset

HEIGHT, WIDTH, FPS, LENGTHS = 96, 128, 10, (57, 40, 71, 64)


def depth(episode: int, frame: int) -> np.ndarray:
    """Return distances in metres, float32 of shape (H, W, 1), from below the nearest to above the farthest of the cameras."""
    y, x = np.mgrid[:HEIGHT, :WIDTH].astype(np.float32)
    waves = np.sin(x / 17 + frame / 5) * np.cos(y / 11 + episode) + 1
    noise = np.random.default_rng((episode, frame)).random((HEIGHT, WIDTH), np.float32)
    return (0.005 + 5.2 * waves**2 / 2 + 0.05 * noise)[..., None].astype(np.float32)


def write(root: Path, use_videos: bool) -> None:
    shape, names = (HEIGHT, WIDTH, 1), ["height", "width", "channels"]
    kind = "video" if use_videos else "image"
    camera = {"dtype": kind, "shape": shape, "names": names, "info": {"is_depth_map": True}}
    features = {
        "observation.images.top": {"dtype": kind, "shape": (HEIGHT, WIDTH, 3), "names": names},
        "observation.images.depth": camera,
        "observation.images.depth_m": {**camera, "info": dict(camera["info"])},
        "observation.state": {"dtype": "float32", "shape": (2,), "names": ["x", "y"]},
        "action": {"dtype": "float32", "shape": (2,), "names": ["x", "y"]},
    }
    encoder = DepthEncoderConfig()
    dataset = LeRobotDataset.create("local/depth", FPS, features, root=root, use_videos=use_videos, depth_encoder=encoder)
    for episode, length in enumerate(LENGTHS):
        for frame in range(length):
            metres, seen = depth(episode, frame), np.zeros((HEIGHT, WIDTH, 3), np.uint8)
            seen[:, : frame + 1] = 40 * (episode + 1)
            values = np.array([episode, frame], np.float32)
            dataset.add_frame(
                {
                    "observation.images.top": seen,
                    "observation.images.depth": (metres * 1000).round().astype(np.uint16),
                    "observation.images.depth_m": metres,
                    "observation.state": values,
                    "action": values + 1,
                    "task": f"task {episode % 2}",
                }
            )
        dataset.save_episode()
    dataset.finalize()


folder = Path(sys.argv[1])
write(folder / "video", True)
write(folder / "images", False)
