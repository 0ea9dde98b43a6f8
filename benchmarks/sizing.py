"""Measure the rates of docs/sizing.md: CPU time to decode, copy and plan, of codecs, sizes and GOPs.

    python benchmarks/sizing.py g1 --folder FOLDER --report FILE

The program writes copies of the first episode in each codec, size and GOP into a folder with `dali-stream prepare`, unless they
exist. It measures each copy with `dali-stream bench`, in turns. The rates are medians of CPU seconds of the threads, so they
hardly depend on what else the machine does.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import statistics
import sys
from pathlib import Path
from typing import Any

from argument_types import count, new_file

from dali_stream import Dataset
from dali_stream.tools import environment, prepare
from dali_stream.tools.bench import run

CODECS, GOPS, SIZES = ("h264", "hevc", "av1", "vp9"), (2, 30), ((480, 640), (224, 224))
LOADER: dict[str, Any] = {"batch_size": 16, "image_size": (224, 224), "image_dtype": "uint8", "device": "cpu"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", help="A local dataset.")
    parser.add_argument("--folder", type=Path, required=True, help="Folder for the copies, which are kept.")
    parser.add_argument("--rounds", type=count, default=5)
    parser.add_argument("--report", type=new_file, help="JSON file to write.")
    arguments = parser.parse_args()
    report = rates(arguments.dataset, arguments.folder, arguments.rounds) | environment.ran_on("cpu")
    if arguments.report:
        environment.write_report(arguments.report, report)
    return 0


def rates(source: str, folder: Path, rounds: int) -> dict[str, Any]:
    """Return the CPU milliseconds of each encoding: medians, and the smallest and the largest."""
    copies = {}
    for size, codec, gop in itertools.product(SIZES, CODECS, GOPS):
        copy = folder / f"{codec}-{size[0]}x{size[1]}-gop{gop}"
        if not (copy / "meta" / "info.json").exists():
            prepare(source, copy, size=size, codec=codec, gop=gop, episodes=[0], jobs=1)
        copies[size, codec, gop] = copy
    measured: dict[tuple[Any, ...], list[dict[str, float]]] = {key: [] for key in copies}
    for number in range(rounds):
        for key, copy in list(copies.items())[:: -1 if number % 2 else 1]:
            with contextlib.closing(Dataset(copy)) as dataset:
                report = run(dataset, "single", 10, 2, LOADER, "cpu", {"source": None}, lambda *_: None)
            assert report is not None
            measured[key].append(report["cpu_ms"])
    found = []
    for (size, codec, gop), rows in measured.items():
        decoding = sorted(row["decoded_frame"] for row in rows)
        found.append(
            {
                "codec": codec,
                "recorded": size,
                "gop": gop,
                "decode_ms": statistics.median(decoding),
                "decode_ms_range": [decoding[0], decoding[-1]],
                "copy_ms": statistics.median(row["delivered_frame"] for row in rows),
                "plan_ms": statistics.median(row["sample"] for row in rows),
            }
        )
        print(f"{codec} {size[0]}x{size[1]} GOP {gop}: {found[-1]}", flush=True)
    return {"dataset": source, "loader": LOADER, "rounds": rounds, "rates": found}


if __name__ == "__main__":
    sys.exit(main())
