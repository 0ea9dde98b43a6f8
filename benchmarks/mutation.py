"""Measure how many small changes of the package's core the tests detect. Such a change is called a mutant.

    python -m pip install cosmic-ray
    python benchmarks/mutation.py [--only NAME ...] [--mutants 100] [--seed 0] [--json]
    python benchmarks/mutation.py [--only NAME ...] --report FILE [--survivors [--tests NAME ...]] [--json]

A mutant changes one operator, number or decision. Type annotations, error messages and docstrings are not changed. The core is
divided into parts, and `PARTS` lists the modules and the tests of each part. The program works on a copy of the package. It
takes a random sample of the mutants of each part. For each mutant, it runs the fast tests of the part until one fails. A test
also fails if it takes more than 5 times as long as without the mutant, plus 20 seconds.

Each run of the tests is a fork of this process, which has imported PyTorch, DALI and pytest, but no module of the package. All
runs share the datasets that the first run has written. The first run also records which functions each test calls. For a
mutant, only the tests that call the changed function run, the quickest first.

`--report` is the JSON object of an earlier run. Its parts that are not measured again become parts of the new report. With
`--survivors`, only the mutants that it lists as not detected are tried again, and the other results are kept. The seed, the
number of mutants and the package must then be the same, but the tests may have changed. `--tests` restricts the test files.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import difflib
import importlib
import inspect
import json
import math
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Iterator
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
        "slots pinned_cache reads frame_cache frame_files cache windows open_files loader memory_format row_groups streaming "
        "stream_faults substitutes",
    ),
    "decode": (
        ["decode"],
        "turns work images audit timestamps torchcodec_cuda clips routes capability normalize bad_video depth frame_cache",
    ),
    "mp4": (["mp4"], "damage video_index index_memory parameter_sets clips index timestamps codecs reads routes bad_video"),
    "rows": (["lerobot/rows.py"], "row_groups reread features bad_metadata windows timestamps"),
}
# The libraries that take longest to import. None of them starts a thread on import, which a fork would lose.
LIBRARIES = ("pyarrow.dataset", "torch", "torchcodec.decoders", "nvidia.dali.plugin.pytorch", "hypothesis", "accelerate")
OUTPUT = Path("..", "output")  # output of the tests
Place = tuple[int, int]  # line from 1, column from 0


def main() -> None:
    parser = argparse.ArgumentParser(description="How many small changes of the core the tests notice")
    parser.add_argument("--only", nargs="+", choices=[*PARTS], default=[*PARTS])
    parser.add_argument("--mutants", type=count, default=100, help="mutants of each part")
    parser.add_argument("--seed", type=int, default=0, help="seed of the choice of mutants")
    parser.add_argument("--report", type=Path, help="JSON report of an earlier run, for the parts that are not measured now")
    parser.add_argument("--survivors", action="store_true", help="try again only the mutants that --report lists")
    parser.add_argument("--tests", nargs="+", metavar="NAME", help="try the survivors only with these of the part's test files")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    arguments = parser.parse_args()
    if arguments.survivors and not arguments.report:
        parser.error("--survivors needs --report")
    if arguments.tests and not arguments.survivors:
        parser.error("--tests needs --survivors")
    parts: dict[str, Any] = json.loads(arguments.report.read_text())["parts"] if arguments.report else {}
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "copy")
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "__pycache__"))
        os.chdir(copy)
        Path("..", "tests").mkdir()
        os.environ["PYTHONPATH"] = os.pathsep.join([str(copy), os.environ.get("PYTHONPATH", "")])
        os.environ["PYTEST_XDIST_WORKER"] = "mutant"  # lets all runs share the datasets that they write, see tests/conftest.py
        os.environ["CALLS_IN"] = str(copy / "dali_stream")
        sys.path.insert(0, str(copy))
        # Python imports this module at startup, so that programs started by tests record their calls too.
        recorder = f"{inspect.getsource(record_calls)}\nimport os\nif 'CALLS_OF_TEST' in os.environ:\n    record_calls()\n"
        Path("sitecustomize.py").write_text(recorder)
        for library in LIBRARIES:
            importlib.import_module(library)
        for name in arguments.only:
            chosen, noticed = sample(PARTS[name][0], arguments.mutants, random.Random(arguments.seed)), 0
            if arguments.survivors:
                survivors = [{key: each[key] for key in identity(chosen[0])} for each in parts[name]["survivors"]]
                chosen = [mutant for mutant in chosen if identity(mutant) in survivors]
                if len(chosen) != len(survivors):
                    raise SystemExit(
                        f"--report must list survivors of this sample of {name}, got others. Run without --survivors"
                    )
                noticed = parts[name]["noticed"]
            tests = arguments.tests or PARTS[name][1].split()
            part = parts[name] = {"seed": arguments.seed} | measure(name, tests, chosen, noticed)
            low, high = part["noticed_95"]
            print(
                f"{name}: {part['noticed']} of {part['tried']} noticed, {part['share']:.0%} (95 % interval {low:.0%} to "
                f"{high:.0%})",
                flush=True,
            )
        if arguments.json:
            from dali_stream.tools import environment

            report = {"parts": {name: parts[name] for name in PARTS if name in parts}} | environment.ran_on("cpu")
            print(environment.report_json(report))


def measure(name: str, names: list[str], chosen: list[MutationSpec], noticed: int) -> dict[str, Any]:
    """Run the tests of a part on some mutants. Return the results.

    They also count `noticed` mutants that the tests have detected in an earlier run. The working directory must be the copy of
    the package.
    """
    files = [f"tests/test_{test}.py" for test in names]
    calls = Path("..", f"calls-{name}.json")
    if not tests_pass(files, CallRecorder(calls)):
        raise SystemExit(f"The tests of {name} fail without a mutant:\n{OUTPUT.read_text()}")
    tests = json.loads(calls.read_text())
    survivors, tried = [], noticed
    for number, mutant in enumerate(chosen):
        print(f"{name}: {number} of {len(chosen)}", end="\r", file=sys.stderr, flush=True)
        operator = cosmic_ray.plugins.get_operator(mutant.operator_name)()
        with use_mutation(mutant.module_path, operator, mutant.occurrence) as (before, after):
            if after is None or not compiles(after):  # the operator changes nothing here, or the result is not valid Python
                continue
            tried += 1
            function = [str(mutant.module_path.resolve()), first_line(before, mutant.start_pos[0])]
            callers = {test: s for test, (s, functions) in tests.items() if function in functions or not function[1]}
            if callers and not tests_pass(sorted({test.partition("::")[0] for test in callers}), Callers(callers)):
                continue
        lines = difflib.unified_diff(before.splitlines(), after.splitlines(), n=0)
        changed = [line for line in lines if line[:1] in "+-" and line[:3] not in ("+++", "---")]
        survivors.append(identity(mutant) | {"change": changed})
        print(f"{mutant.module_path}:{mutant.start_pos[0]} is not noticed: {' '.join(changed)}", file=sys.stderr, flush=True)
    noticed = tried - len(survivors)
    return {
        "tests": PARTS[name][1].split(),
        "tried": tried,
        "noticed": noticed,
        "share": round(noticed / tried, 4),
        "noticed_95": interval(noticed, tried),
        "survivors": survivors,
    }


class CallRecorder:
    """Plugin of pytest that writes to a file how long each test takes, and which functions of the package it calls."""

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()
        self.tests: dict[str, Any] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        calls = self.path.with_suffix(".test")
        calls.write_text("")
        os.environ["CALLS_OF_TEST"] = str(calls)
        record_calls()
        began = time.monotonic()
        try:
            return (yield)
        finally:
            sys.settrace(None)
            threading.settrace(None)
            functions = {tuple(line.split("\t")) for line in calls.read_text().splitlines()}
            self.tests[item.nodeid] = [time.monotonic() - began, [[path, int(line)] for path, line in functions]]

    def pytest_sessionfinish(self) -> None:
        self.path.write_text(json.dumps(self.tests))


def record_calls() -> None:
    """Append the functions that this process calls from now on to the file in the environment variable CALLS_OF_TEST."""
    import os
    import sys
    import threading

    path, package, seen = os.environ["CALLS_OF_TEST"], os.environ["CALLS_IN"], set()

    def trace(frame, event, argument):  # type: ignore[no-untyped-def]
        code = frame.f_code
        if code.co_filename.startswith(package) and code not in seen:
            seen.add(code)
            with open(path, "a") as file:
                file.write(f"{code.co_filename}\t{code.co_firstlineno}\n")

    threading.settrace(trace)
    sys.settrace(trace)


class Callers:
    """Plugin of pytest that runs only some tests, the quickest first, and kills a test that takes too long.

    Args:
        tests: {test: its duration in seconds}.
    """

    def __init__(self, tests: dict[str, float]) -> None:
        self.tests = tests

    def pytest_sessionstart(self) -> None:
        signal.alarm(60)  # time limit until the first test starts

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        signal.alarm(20 + math.ceil(5 * self.tests[nodeid]))

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = sorted((item for item in items if item.nodeid in self.tests), key=lambda item: self.tests[item.nodeid])


def tests_pass(files: list[str], plugin: object) -> bool:
    """Run fast tests in a fork of this process until one fails. Return whether all pass."""
    if not (child := os.fork()):
        os.setsid()
        with OUTPUT.open("w") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell ignores SIGINT by default
        sys.dont_write_bytecode = not isinstance(plugin, CallRecorder)  # only the first run writes bytecode, a mutant must not
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"  # applies to programs that tests start
        os._exit(pytest.main(["-qx", "-p", "no:cacheprovider", "--basetemp=../tests/run", "-m", "not slow", *files], [plugin]))
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


def identity(mutant: MutationSpec) -> dict[str, Any]:
    """Return the properties that distinguish a mutant from others of the same source."""
    return {
        "module": str(mutant.module_path),
        "line": mutant.start_pos[0],
        "operator": mutant.operator_name,
        "occurrence": mutant.occurrence,
    }


def first_line(source: str, line: int) -> int:
    """Return the first line, including decorators, of the innermost function whose body contains a line. 0 outside functions.

    Decorators and default values are evaluated when the function is defined, so they belong to the code around it.
    """
    first = 0
    for node in ast.walk(ast.parse(source)):  # outer functions come before inner ones
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.body[0].lineno <= line <= (node.end_lineno or 0):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    return first


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
