"""Reads items of datasets with LeRobot itself. benchmarks/prepare_lerobot.py starts it in LeRobot's environment.

    python benchmarks/lerobot_programs/read_items.py JOBS.json OUT

Needs only LeRobot. JOBS is a list of objects with
    name       of the dataset
    root       its folder
    episodes   to read, or null for all
    deltas     `delta_timestamps`, or null
    index      values of the column `index`, whose items are read
OUT becomes a folder with `versions.json`, and for each job `NAME.json` with the metadata as LeRobot has them, or the error, and
`NAME.pt` with the items.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
import traceback
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import torch
from lerobot.datasets import lerobot_dataset

PACKAGES = ("lerobot", "torch", "torchcodec", "av", "datasets", "numpy")


def read(job: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return metadata and items."""
    dataset = lerobot_dataset.LeRobotDataset(
        "local/dataset", root=job["root"], episodes=job["episodes"], delta_timestamps=job["deltas"]
    )
    places = {int(index): place for place, index in enumerate(dataset.hf_dataset.with_format(None)["index"])}
    meta = dataset.meta
    stats = {key: {name: np.asarray(value).tolist() for name, value in of.items()} for key, of in (meta.stats or {}).items()}
    found = {
        "fps": dataset.fps,
        "frames": len(dataset),
        "num_frames": dataset.num_frames,
        "num_episodes": dataset.num_episodes,
        "total_frames": meta.total_frames,
        "total_episodes": meta.total_episodes,
        "shapes": {key: list(shape) for key, shape in meta.shapes.items()},
        "cameras": list(meta.camera_keys),
        "videos": list(meta.video_keys),
        "stats": stats,
        "episode_rows": len(meta.episodes),
    }
    return found, [dataset[places[index]] for index in job["index"]]


def main(jobs: Path, out: Path) -> None:
    out.mkdir()
    versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    (out / "versions.json").write_text(json.dumps({"python": platform.python_version(), **versions}))
    for job in json.loads(jobs.read_text()):
        try:
            found, items = read(job)
            torch.save(items, out / f"{job['name']}.pt")
        except Exception as error:
            traceback.print_exc()
            found = {"error": f"{type(error).__name__}: {error}"}
        (out / f"{job['name']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
