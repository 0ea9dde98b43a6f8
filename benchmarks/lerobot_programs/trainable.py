"""Datasets that LeRobot can train on, made of recordings without actions or statistics."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq


def trainable(name: str, root: Path, folder: Path) -> Path:
    """Return a dataset that LeRobot can train on.

    This is the dataset `root` itself if it has actions and statistics. Otherwise, it is a copy in `folder`, to which made-up
    actions and states and computed statistics are added.
    """
    info = json.loads((root / "meta/info.json").read_text())
    if "action" in info["features"] and (root / "meta/stats.json").exists():
        return root
    copy = folder / name
    copy.mkdir()
    (copy / "videos").symlink_to(root.absolute() / "videos")
    shutil.copytree(root / "meta", copy / "meta", copy_function=shutil.copyfile)
    for path in sorted((root / "data").rglob("*.parquet")):
        table = pq.read_table(path)
        for key, shift in {"action": 1.0, "observation.state": 0.0}.items():
            if key not in info["features"]:
                place = table["frame_index"].to_numpy() / 10 + table["episode_index"].to_numpy() + shift
                values = np.stack([np.sin(place), np.cos(place), np.sin(place / 3), np.cos(place / 3)], axis=1)
                table = table.append_column(key, pa.array(list(values.astype(np.float32)), pa.list_(pa.float32())))
        target = copy / path.relative_to(root)
        target.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, target)
    for key in ("action", "observation.state"):
        info["features"].setdefault(key, {"dtype": "float32", "shape": [4], "names": list("abcd")})
    (copy / "meta/info.json").write_text(json.dumps(info))
    if not (copy / "meta/stats.json").exists():
        command = ["-m", "dali_stream", "stats", str(copy), "--out", str(copy / "meta/stats.json")]
        subprocess.run([sys.executable, *command], check=True, capture_output=True)
    return copy
