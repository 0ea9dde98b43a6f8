"""Measure how many small changes of the package's core the tests detect. Such a change is called a mutant.

    python -m pip install cosmic-ray
    python benchmarks/mutation.py [--only NAME ...] [--mutants 30] [--seed 0] [--json]

A mutant changes one operator, number or decision. Type annotations, error messages and docstrings are not changed. The core is
divided into parts, and `PARTS` lists the modules and the tests of each part. The program works on a copy of the package. It
takes a random sample of the mutants of each part. For each mutant, it runs the fast tests of the part until one fails. A mutant
with which they take more than 5 times as long as without it counts as detected, too.

Each run of the tests is a fork of this process, which has imported PyTorch, DALI and pytest, but no module of the package. All
runs share the datasets that the first run has written.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import difflib
import importlib
import math
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cosmic_ray.plugins
import pytest
from argument_types import count
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import use_mutation
from cosmic_ray.work_item import MutationSpec

ROOT = Path(__file__).parents[1]
PARTS = {  # name of the part: its modules, and its test files
    "order": (["order"], "order mixture_order batches windows resume selection augment options"),
    "schedule": (["schedule"], "budget reads schedule plan bottleneck required_memory options frame_files"),
    "cache": (
        ["cache"],
        "slots memory_account reads frame_cache frame_files cache windows open_files loader memory_format row_groups streaming "
        "stream_faults substitutes own_process gpu_cache",
    ),
    "decode": (
        ["decode"],
        "turns work images audit timestamps torchcodec_cuda clips routes capability normalize bad_video depth frame_cache "
        "decode_processes",
    ),
    "mp4": (
        ["mp4"],
        "damage video_index index_memory parameter_sets clips index timestamps codecs reads routes bad_video missing_frames",
    ),
    "rows": (["lerobot/rows.py"], "row_groups reread features bad_metadata windows timestamps"),
}
# The libraries that take longest to import. None of them starts a thread on import, which a fork would lose.
LIBRARIES = ("pyarrow.dataset", "torch", "torchcodec.decoders", "nvidia.dali.plugin.pytorch", "hypothesis", "accelerate")
OUTPUT = Path("..", "output")  # output of the tests
Place = tuple[int, int]  # line from 1, column from 0


def main() -> None:
    parser = argparse.ArgumentParser(description="How many small changes of the core the tests notice")
    parser.add_argument("--only", nargs="+", choices=[*PARTS], default=[*PARTS])
    parser.add_argument("--mutants", type=count, default=30, help="mutants of each part")
    parser.add_argument("--seed", type=int, default=0, help="seed of the choice of mutants")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    arguments = parser.parse_args()
    parts: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "copy")
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "__pycache__"))
        os.chdir(copy)
        Path("..", "tests").mkdir()
        os.environ["PYTHONPATH"] = os.pathsep.join([str(copy), os.environ.get("PYTHONPATH", "")])
        os.environ["PYTEST_XDIST_WORKER"] = "mutant"  # lets all runs share the datasets that they write, see tests/conftest.py
        sys.path.insert(0, str(copy))
        for library in LIBRARIES:
            importlib.import_module(library)
        for name in arguments.only:
            modules, tests = PARTS[name]
            chosen = sample(modules, arguments.mutants, random.Random(arguments.seed))
            part = parts[name] = {"seed": arguments.seed, **measure(name, tests.split(), chosen)}
            print("{}: {noticed} of {tried} noticed (95 % interval {:.0%} to {:.0%})".format(name, *part["noticed_95"], **part))
        if arguments.json:
            from dali_stream.tools import environment

            print(environment.report_json({"parts": parts} | environment.ran_on("cpu")))


def measure(name: str, tests: list[str], chosen: list[MutationSpec]) -> dict[str, Any]:
    """Run the tests of a part on some mutants, in the copy of the package. Return the results."""
    files = [f"tests/test_{test}.py" for test in tests]
    began = time.monotonic()
    if not run_tests(files):
        raise SystemExit(f"The tests of {name} fail without a mutant:\n{OUTPUT.read_text()}")
    limit = 5 * math.ceil(time.monotonic() - began)
    survivors, tried = [], 0
    for number, mutant in enumerate(chosen):
        print(f"{name}: {number} of {len(chosen)}", end="\r", file=sys.stderr, flush=True)
        operator = cosmic_ray.plugins.get_operator(mutant.operator_name)()
        with use_mutation(mutant.module_path, operator, mutant.occurrence) as (before, after):
            if after is None or not compiles(after):  # the operator changes nothing here, or the result is not valid Python
                continue
            tried += 1
            if not run_tests(files, limit):
                continue
        lines = difflib.unified_diff(before.splitlines(), after.splitlines(), n=0)
        changed = [line for line in lines if line[:1] in "+-" and line[:3] not in ("+++", "---")]
        survivors.append({"module": str(mutant.module_path), "line": mutant.start_pos[0], "change": changed})
        print(f"{mutant.module_path}:{mutant.start_pos[0]} is not noticed: {' '.join(changed)}", file=sys.stderr, flush=True)
    noticed = tried - len(survivors)
    result = {"tests": tests, "tried": tried, "noticed": noticed, "share": round(noticed / tried, 4)}
    return result | {"noticed_95": interval(noticed, tried), "survivors": survivors}


def run_tests(files: list[str], limit: int = 0) -> bool:
    """Run fast tests in a fork of this process until one fails. Return whether all pass in `limit` seconds. 0: no limit."""
    if not (child := os.fork()):
        os.setsid()
        with OUTPUT.open("w") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell ignores SIGINT by default
        signal.alarm(limit)
        sys.dont_write_bytecode = bool(limit)  # only the run without a mutant writes bytecode
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"  # applies to programs that tests start
        os._exit(pytest.main(["-qx", "-p", "no:cacheprovider", "--basetemp=../tests/run", "-m", "not slow", *files]))
    _, status = os.waitpid(child, 0)
    with contextlib.suppress(ProcessLookupError):  # end processes that the tests have left running
        os.killpg(child, signal.SIGKILL)
    return status == 0


def compiles(source: str) -> bool:
    """Return whether a text is valid Python. It may not be, since mutants also change the `/` and `*` of parameter lists."""
    try:
        compile(source, "mutant", "exec")
    except SyntaxError:
        return False
    return True


def sample(modules: list[str], size: int, random_numbers: random.Random) -> list[MutationSpec]:
    """Return a random sample of mutants at different places. All places have the same probability."""
    places: dict[tuple[Path, Place], list[MutationSpec]] = {}
    for module in modules:
        path = Path("dali_stream", module)
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            for mutant in mutants(file):
                places.setdefault((file, mutant.start_pos), []).append(mutant)
    chosen = random_numbers.sample(sorted(places), min(size, len(places)))
    return [random_numbers.choice(places[place]) for place in chosen]


def mutants(file: Path) -> Iterator[MutationSpec]:
    """Yield all mutants of a file, except those of annotations and raised errors."""
    source = file.read_text()
    left_out, nodes = list(unchanged(ast.parse(source))), list(ast_nodes(get_ast(source)))
    for name in cosmic_ray.plugins.operator_names():
        if (operator := cosmic_ray.plugins.get_operator(name)).arguments():
            continue
        places = (place for node in nodes for place in operator().mutation_positions(node))
        for occurrence, (start, end) in enumerate(places):
            if not any(first <= start and end <= last for first, last in left_out):
                yield MutationSpec(file, name, occurrence, start, end)


def unchanged(tree: ast.AST) -> Iterator[tuple[Place, Place]]:
    """Yield the start and end of annotations and raised errors, which are not changed."""
    for node in ast.walk(tree):
        parts = [getattr(node, "annotation", None), getattr(node, "returns", None)]
        if isinstance(node, ast.Raise):
            parts.append(node.exc)
        for part in parts:
            if isinstance(part, ast.expr):
                assert part.end_lineno is not None
                assert part.end_col_offset is not None
                yield (part.lineno, part.col_offset), (part.end_lineno, part.end_col_offset)


def interval(successes: int, trials: int) -> tuple[float, float]:
    """Return Wilson's 95 % confidence interval of a proportion (Wilson 1927)."""
    z, share = 1.96, successes / trials
    middle, half = share + z * z / (2 * trials), z * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials**2))
    return round((middle - half) / (1 + z * z / trials), 4), round((middle + half) / (1 + z * z / trials), 4)


if __name__ == "__main__":
    main()
