"""Run examples of the gallery in the current folder: `python docs/gallery/run.py [FILE ...]`. Default: all examples.

Each example reads the dataset `demo`, which is written first if it does not exist, and draws the picture NAME.png. The output
of the example is written to NAME.txt. All examples run in this process, since importing torch and DALI takes longer than most
of them.
"""

from __future__ import annotations

import contextlib
import runpy
import sys
from pathlib import Path

import matplotlib

EXAMPLES = ("window", "mixture", "resume", "remote", "augmentation", "graph")
"""Names of the examples, in the order of the page."""


def main(files: list[str]) -> None:
    """Run the examples."""
    matplotlib.use("Agg")
    if not Path("demo").exists():
        from dali_stream.demo import write_demo

        write_demo("demo", episodes=4, size=(120, 160), codec="vp9")
    for file in map(Path, files or [str(Path(__file__).with_name(f"{name}.py")) for name in EXAMPLES]):
        with open(f"{file.stem}.txt", "w") as output, contextlib.redirect_stdout(output):
            runpy.run_path(str(file), run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
