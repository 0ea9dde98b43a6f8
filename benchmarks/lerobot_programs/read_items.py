"""Reads items of datasets with LeRobot itself. benchmarks/prepare_lerobot.py starts it in LeRobot's environment.

    python benchmarks/lerobot_programs/read_items.py JOBS.json OUT

The program needs only LeRobot. JOBS.json contains a list of objects, one for each job, with the entries
    name       name of the job
    root       folder of the dataset
    episodes   episodes to read, or null for all
    deltas     `delta_timestamps`, or null
    index      values of the column `index` of the items to read
The program creates the folder OUT and writes `versions.json` to it. For each job, it writes `NAME.json` with the metadata that
LeRobot returns, or with the error, and `NAME.pt` with the items.
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
    """Return the metadata of a dataset and the items of a job."""
    dataset = lerobot_dataset.LeRobotDataset(
        "local/dataset", root=job["root"], episodes=job["episodes"], delta_timestamps=job["deltas"]
    )
    places = {int(index): place for place, index in enumerate(dataset.hf_dataset.with_format(None)["index"])}
    meta = dataset.meta
    stats = {
        key: {name: np.asarray(value).tolist() for name, value in by_name.items()}
        for key, by_name in (meta.stats or {}).items()
    }
    metadata = {
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
    return metadata, [dataset[places[index]] for index in job["index"]]


def main(jobs: Path, out: Path) -> None:
    out.mkdir()
    versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    (out / "versions.json").write_text(json.dumps({"python": platform.python_version(), **versions}))
    for job in json.loads(jobs.read_text()):
        try:
            metadata, items = read(job)
            torch.save(items, out / f"{job['name']}.pt")
        except Exception as error:
            traceback.print_exc()
            metadata = {"error": f"{type(error).__name__}: {error}"}
        (out / f"{job['name']}.json").write_text(json.dumps(metadata))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
