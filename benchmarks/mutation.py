"""How many small changes of the core the tests notice. Each change, a mutant, is of one operator, number or decision.

    python -m pip install cosmic-ray
    python benchmarks/mutation.py [--only NAME ...] [--mutants 100] [--seed 0] [--json]

Takes a random sample of the mutants of each part of the package, out of a copy of it, and runs the fast tests of that part on
each, one after the other, until one fails. A mutant whose tests take 3 times as long as without it counts as noticed. Type
annotations, error messages and docstrings are not changed. The tests of a part are those of `PARTS`.
"""

from __future__ import annotations

import argparse
import ast
import math
import os
import random
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cosmic_ray.plugins
from argument_types import count
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_and_test
from cosmic_ray.testing import run_tests
from cosmic_ray.work_item import MutationSpec, TestOutcome

from dali_stream.tools import environment

ROOT = Path(__file__).parents[1]
PARTS = {  # modules, and the test files that are run in this order
    "order": (["order"], ["order", "mixture_order", "batches", "windows", "resume"]),
    "schedule": (["schedule"], ["reads", "schedule", "plan", "bottleneck", "required_memory", "options"]),
    "cache": (["cache"], ["reads", "frame_cache", "cache", "windows", "open_files", "loader"]),
    "decode": (["decode"], ["clips", "images", "codecs", "decode_speed", "torchcodec_cuda", "bad_video", "routes"]),
    "mp4": (["mp4"], ["index", "clips", "timestamps", "codecs"]),
    "rows": (["lerobot/rows.py"], ["row_groups", "reread", "features", "bad_metadata", "windows"]),
}
Place = tuple[int, int]  # line from 1, column from 0


def main() -> None:
    parser = argparse.ArgumentParser(description="How many small changes of the core the tests notice")
    parser.add_argument("--only", nargs="+", choices=[*PARTS], default=[*PARTS])
    parser.add_argument("--mutants", type=count, default=100, help="mutants of each part")
    parser.add_argument("--seed", type=int, default=0, help="which mutants")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    arguments = parser.parse_args()
    result: dict[str, Any] = {"mutants": arguments.mutants, "seed": arguments.seed, "parts": {}}
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "__pycache__"))
        os.chdir(copy)
        os.environ["PYTHONPATH"] = os.pathsep.join([str(copy), os.environ.get("PYTHONPATH", "")])
        for name in arguments.only:
            part = result["parts"][name] = measure(name, arguments.mutants, arguments.seed)
            low, high = part["noticed_95"]
            print(
                f"{name}: {part['noticed']} of {part['tried']} noticed, {part['share']:.0%} (95 % interval {low:.0%} to "
                f"{high:.0%})",
                flush=True,
            )
    if arguments.json:
        print(environment.report_json(result | environment.ran_on("cpu")))


def measure(name: str, size: int, seed: int) -> dict[str, Any]:
    """Run the tests of a part on a sample of its mutants. The working directory is the copy."""
    modules, tests = PARTS[name]
    files = [f"tests/test_{test}.py" for test in tests]
    command = shlex.join([sys.executable, "-m", "pytest", "-qx", "-p", "no:cacheprovider", "-m", "not slow", *files])
    began = time.monotonic()
    outcome, output = run_tests(command, 3600)
    if outcome is not TestOutcome.SURVIVED:
        raise SystemExit(f"The tests of {name} fail without a mutant:\n{output}")
    taken = time.monotonic() - began
    survivors, tried = [], 0
    for mutant in sample(modules, size, random.Random(seed)):
        work = mutate_and_test([mutant], command, 3 * taken + 30)
        if work.test_outcome is None:  # nothing to change in this place
            continue
        tried += 1
        if work.test_outcome is TestOutcome.SURVIVED:
            changed = [line for line in (work.diff or "").splitlines() if line[:1] in "+-" and line[:3] not in ("+++", "---")]
            survivors.append({"module": str(mutant.module_path), "line": mutant.start_pos[0], "change": changed})
            print(
                f"{mutant.module_path}:{mutant.start_pos[0]} is not noticed: {' '.join(changed)}", file=sys.stderr, flush=True
            )
    noticed = tried - len(survivors)
    return {
        "tests": files,
        "tests_s": round(taken, 1),
        "tried": tried,
        "noticed": noticed,
        "share": round(noticed / tried, 4),
        "noticed_95": interval(noticed, tried),
        "survivors": survivors,
    }


def sample(modules: list[str], size: int, random_numbers: random.Random) -> list[MutationSpec]:
    """Return mutants of different places, each place as likely as any other."""
    places: dict[tuple[Path, Place], list[MutationSpec]] = {}
    for module in modules:
        path = Path("dali_stream", module)
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            for mutant in mutants(file):
                places.setdefault((file, mutant.start_pos), []).append(mutant)
    chosen = random_numbers.sample(sorted(places), min(size, len(places)))
    return [random_numbers.choice(places[place]) for place in chosen]


def mutants(file: Path) -> Iterator[MutationSpec]:
    """Yield all mutants of a file, except of annotations and of errors."""
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
    """Yield the places of annotations and of errors that are raised."""
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
    """Return Wilson's 95 % interval of a share (Wilson 1927)."""
    z, share = 1.96, successes / trials
    middle, half = share + z * z / (2 * trials), z * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials**2))
    return round((middle - half) / (1 + z * z / trials), 4), round((middle + half) / (1 + z * z / trials), 4)


if __name__ == "__main__":
    main()
