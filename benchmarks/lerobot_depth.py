"""Compares depth cameras with LeRobot's items: `python benchmarks/lerobot_depth.py [--data FOLDER] [--json REPORT]`.

Run it with a Python that has LeRobot 0.6.1, PyAV and this package. LeRobot's writer makes four datasets (`write_depth.py`):
depth as video with three quantizations, and as TIFF images in rows. Of each, 200 random items are compared key by key and bit
by bit, in millimetres and in metres, plain and with windows.
"""

import argparse
import importlib.metadata
import logging
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from lerobot.datasets.lerobot_dataset import LeRobotDataset
from torch.utils.data import default_collate

from dali_stream import Dataset, Loader
from dali_stream.tools import environment

WRITER = Path(__file__).parent / "lerobot_programs" / "write_depth.py"
CAMERAS = ("observation.images.depth", "observation.images.depth_m")
ITEMS, BATCH_SIZE = 200, 8


def compare(root: Path, unit: str, deltas: dict[str, list[float]] | None) -> int:
    """Compare batches of a shuffled epoch with LeRobot's items. Return the number of equal items."""
    theirs = LeRobotDataset("local/depth", root=root, delta_timestamps=deltas, depth_output_unit=unit)
    done = 0
    with Loader(Dataset(root), batch_size=BATCH_SIZE, delta_timestamps=deltas, depth_unit=unit, shuffle="global") as loader:
        for batch in loader:
            expected = default_collate([theirs[index] for index in batch["index"].tolist()])
            if set(batch) != set(expected):
                raise SystemExit(f"{root}: keys differ: {set(batch) ^ set(expected)}")
            for key, value in expected.items():
                own = batch[key]
                if isinstance(value, torch.Tensor) and not (own.dtype == value.dtype and torch.equal(own, value)):
                    raise SystemExit(f"{root}: {key} differs: {own.dtype} {own.shape}, LeRobot {value.dtype} {value.shape}")
                if not isinstance(value, torch.Tensor) and own != value:
                    raise SystemExit(f"{root}: {key} differs")
            done += len(batch["index"])
            if done >= ITEMS:
                break
    return done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="folder of the datasets, which are written if it does not exist")
    parser.add_argument("--json", type=Path, help="file for the report")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    folder = options.data or Path(tempfile.mkdtemp()) / "depth"
    if not folder.exists():
        subprocess.run([sys.executable, WRITER, folder], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    windows = {camera: [step / 10 for step in (-12, -1, 0, 3)] for camera in CAMERAS} | {"action": [0.0, 0.1, 0.2]}
    windows["observation.images.depth_m"] = [0.0]  # a single step has no time axis as video, and one as images
    versions = {name: importlib.metadata.version(name) for name in ("lerobot", "av", "torch")}
    report: dict[str, object] = {"date": time.strftime("%Y-%m-%d"), "versions": versions}
    for root in sorted(folder.iterdir()):
        for unit in ("mm", "m"):
            for name, deltas in (("plain", None), ("windows", windows)):
                report[f"{root.name} {unit} {name}"] = count = compare(root, unit, deltas)
                print(f"{root.name}, {unit}, {name}: {count} items are equal in all keys and bits", flush=True)
    if options.json:
        environment.write_report(options.json, report)


if __name__ == "__main__":
    main()
