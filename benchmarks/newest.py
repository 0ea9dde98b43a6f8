"""Runs the tests of decoders, identity and routes, and writes a report: `python benchmarks/newest.py [--out REPORT]`.

`make test-newest` runs this program in an environment with the newest torch and torchcodec. Other arguments go to pytest.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from dali_stream.tools import environment

ROOT = Path(__file__).parents[1]
TESTS = {  # names of the test files
    "decoders": "bad_video clips codecs containers decodes depth edit_lists frame_size other_sizes resizing turned work",
    "identity": "delivered_frames frame_cache loader parity timestamps",
    "routes": "dali_route rate routes torchcodec_cuda",
}
FILES = [name for names in TESTS.values() for name in names.split()]


class Results:
    """Plugin of pytest that counts the results of the tests.

    Attributes:
        outcomes: Counts of "passed", "failed" and "skipped" for each file. A test with an error in a fixture has failed.
        skips: Number of skipped tests for each reason.
        deprecations: Messages of warnings that something will change in a later version of a library.
    """

    def __init__(self) -> None:
        self.outcomes = {name: Counter(passed=0, failed=0, skipped=0) for name in FILES}
        self.skips: Counter[str] = Counter()
        self.deprecations: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count a test once: its own result, or that of a fixture that did not pass."""
        if report.when == "call" or report.outcome != "passed":
            self.outcomes[Path(report.location[0]).stem.removeprefix("test_")][report.outcome] += 1
        if report.skipped:
            assert isinstance(report.longrepr, tuple)
            self.skips[report.longrepr[2].removeprefix("Skipped: ")] += 1

    def pytest_warning_recorded(self, warning_message: object) -> None:
        """Keep the first line of a warning, if it is about a later version."""
        if issubclass(warning_message.category, DeprecationWarning | FutureWarning):  # type: ignore[attr-defined]
            self.deprecations.add(str(warning_message.message).splitlines()[0])  # type: ignore[attr-defined]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--out", type=Path, help="file for the report")
    options, given = parser.parse_known_args()
    results = Results()
    files = [str(ROOT / f"tests/test_{name}.py") for name in FILES]
    code = pytest.main(["-q", "-p", "no:cacheprovider", *files, *given], [results])
    total = sum(results.outcomes.values(), Counter())
    report = environment.ran_on("cuda" if torch.cuda.is_available() else "cpu") | {
        "total": {outcome: total[outcome] for outcome in ("passed", "failed", "skipped")},
        "skips": dict(sorted(results.skips.items())),
        "deprecations": sorted(results.deprecations),
        "files": {name: dict(counts) for name, counts in results.outcomes.items()},
    }
    print(environment.report_json(report, indent=1))
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        environment.write_report(options.out, report)
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
