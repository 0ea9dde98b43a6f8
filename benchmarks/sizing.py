"""Measure the rates of docs/sizing.md: CPU time to decode, copy and plan, of codecs, sizes and GOPs.

    python benchmarks/sizing.py g1 --folder FOLDER [--rounds 5] [--json]

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

import program
from argument_types import count

from dali_stream import Dataset
from dali_stream.tools import prepare
from dali_stream.tools.bench import run

CODECS, GOPS, SIZES = ("h264", "hevc", "av1", "vp9"), (2, 30), ((480, 640), (224, 224))
LOADER: dict[str, Any] = {"batch_size": 16, "image_size": (224, 224), "image_dtype": "uint8", "device": "cpu"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", help="A local dataset.")
    parser.add_argument("--folder", type=Path, required=True, help="Folder for the copies, which are kept.")
    parser.add_argument("--rounds", type=count, default=5)
    return program.run(parser, measure, as_text)


def as_text(result: dict[str, Any]) -> str:
    """Return the result as text."""
    form = "{codec} of {recorded}, GOP {gop}: decode {decode_ms:.2f} ms, copy {copy_ms:.2f} ms, plan {plan_ms:.2f} ms"
    return "\n".join(form.format(**row) for row in result["rates"])


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the CPU milliseconds of each encoding: medians, and the smallest and the largest."""
    source, folder, rounds = arguments.dataset, arguments.folder, arguments.rounds
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
    return {"dataset": source, "loader": LOADER, "rounds": rounds, "rates": found}


if __name__ == "__main__":
    sys.exit(main())
