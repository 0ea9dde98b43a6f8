"""Measure the time of `dali-stream info URI --index` for a bucket with many objects.

    python benchmarks/index.py ROOT [--objects 10000] [--rounds 1] [--json]

ROOT is a local dataset of LeRobot v2.1. Its episodes are repeated as hard links up to the requested number of files. nginx
serves them on loopback as an anonymous S3 bucket, without latency, so the program measures the work on this machine, including
that of nginx. Each round begins with an empty cache. Caches are removed only at the end, because ext4 creates files more slowly
for some minutes after many files were deleted. Wait some minutes between runs, or set TMPDIR to a folder in memory.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from argument_types import count
from storage import find_nginx, served

import dali_stream
from dali_stream.tools import environment


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("root", type=Path, help="a local LeRobot v2.1 dataset")
    parser.add_argument("--objects", type=count, default=10_000, help="video and Parquet files")
    parser.add_argument("--rounds", type=count, default=1)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    arguments = parser.parse_args()
    nginx = find_nginx()
    if nginx is None:
        print("index: skipped, because nginx is not installed: apt-get install nginx")
        return 0
    rounds = []
    write = partial(repeat, arguments.root, objects=arguments.objects)
    with served(nginx, write) as url, tempfile.TemporaryDirectory() as caches:
        for number in range(arguments.rounds):
            options = {"anon": True, "endpoint_url": url, "client_kwargs": {"region_name": "us-east-1"}}
            dataset = dali_stream.Dataset("s3://robots", storage_options=options, cache_dir=f"{caches}/{number}")
            began, cpu = time.perf_counter(), time.process_time()
            report = dali_stream.tools.index(dataset)
            rounds.append({"seconds": time.perf_counter() - began, "cpu_s": time.process_time() - cpu})
            dataset.close()
            text = "{seconds:.1f} s, CPU {cpu_s:.1f} s".format(**rounds[-1])
            print(f"{report.files} files, {len(report.broken)} broken: {text}")
    if arguments.json:
        medians = {name: statistics.median(figures[name] for figures in rounds) for name in rounds[0]}
        print(environment.report_json({"objects": report.files, "rounds": rounds, **medians, **environment.ran_on("cpu")}))
    return 1 if report.broken else 0


def repeat(root: Path, folder: Path, objects: int) -> None:
    """Write a dataset with `objects` files, which are hard links to the episodes of another dataset."""
    info = json.loads((root / "meta/info.json").read_text())
    cameras = [key for key, feature in info["features"].items() if feature["dtype"] == "video"]
    episodes = [json.loads(line) for line in (root / "meta/episodes.jsonl").read_text().splitlines()]
    total, size = -(-objects // (1 + len(cameras))), info["chunks_size"]
    shutil.copytree(root / "meta", folder / "meta", dirs_exist_ok=True)
    kinds = [(info["data_path"], "")] + [(info["video_path"], camera) for camera in cameras]
    meta = []
    for number in range(total):
        source = episodes[number % len(episodes)]
        meta.append(json.dumps(source | {"episode_index": number}))
        for template, camera in kinds:
            names = {"video_key": camera}
            old = template.format(episode_chunk=source["episode_index"] // size, episode_index=source["episode_index"], **names)
            new = folder / template.format(episode_chunk=number // size, episode_index=number, **names)
            new.parent.mkdir(parents=True, exist_ok=True)
            if number < len(episodes):
                shutil.copy(root / old, new)
            else:
                os.link(folder / old, new)
    frames = sum(json.loads(line)["length"] for line in meta)
    info |= {"total_episodes": total, "total_frames": frames, "splits": {"train": f"0:{total}"}}
    (folder / "meta/info.json").write_text(json.dumps(info))
    (folder / "meta/episodes.jsonl").write_text("\n".join(meta) + "\n")
    (folder / "meta/episodes_stats.jsonl").unlink(missing_ok=True)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except dali_stream.DaliStreamError as error:
        print(f"index: {error}", file=sys.stderr)
        sys.exit(1)
