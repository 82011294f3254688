"""Plant one-line faults, one at a time, in a copy of the project, and report which test catches each.

python tests/mutations.py FOLDER [--tier default|full|both] [--package NAME] [--only NUMBER ...] [--processes N]

data/mutations.tsv lists the faults: a wrong sign, a group off by one, a mask that is dropped, an exit code. For each
fault, the tests that execute its line run, the fastest first, until one fails. FOLDER stores which tests execute which
line; the first call records it with pytest-cov, which takes twice the time of the tests. Exit 1 if fewer than 95 % are
caught.
"""

from __future__ import annotations

import argparse
import ast
import functools
import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parent.parent
TABLE = Path(__file__).parent / "data" / "mutations.tsv"
TIERS = {"default": "not full", "full": "full", "both": "full or not full"}
"""Marker expression of each tier."""
WANTED = 0.95
"""Share of the faults that the tests must catch."""
LONGEST = 900
"""Seconds after which a fault counts as caught, because it made the tests hang."""
MOST = 400
"""Maximum number of tests for one fault."""
LIBRARIES = (
    *("matplotlib.backends.backend_agg", "pandas", "pydantic", "pytest", "rich.table", "scipy.optimize", "scipy.stats"),
    *("torch", "torch._dynamo", "transformers.models.auto.modeling_auto", "transformers.models.gpt2.modeling_gpt2"),
)
"""Modules imported once, before a process is forked for each fault."""
COVERAGE = """
[run]
source = attnlens
parallel = True
relative_files = True
patch = subprocess, fork, _exit
concurrency = thread, multiprocessing
data_file = {folder}/lines
"""


@dataclass(frozen=True)
class Fault:
    """A wrong line."""

    number: int
    file: str
    """Path below attnlens/."""
    right: str
    """Part of a line that occurs once in the file."""
    wrong: str

    @property
    def package(self) -> str:
        return self.file.partition("/")[0]


FAULTS = [Fault(number, *line.split("\t")) for number, line in enumerate(TABLE.read_text().splitlines()[1:], 1)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder for the record")
    parser.add_argument("--tier", choices=TIERS, default="default", help="tests that run")
    parser.add_argument("--package", help="faults of this package only")
    parser.add_argument("--only", nargs="+", type=int, help="faults with these numbers only")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    executed = Executed.recorded(options.folder / options.tier, TIERS[options.tier])
    for library in LIBRARIES:
        importlib.import_module(library)
    faults = [
        fault
        for fault in FAULTS
        if options.package in (None, fault.package) and (options.only is None or fault.number in options.only)
    ]
    with ThreadPoolExecutor(options.processes) as pool:
        tests = list(pool.map(functools.partial(verdict, executed), faults))
    planted = Counter(fault.package for fault in faults)
    caught = Counter(fault.package for fault, test in zip(faults, tests, strict=True) if test)
    for package in sorted(planted):
        print(f"{package:10} {planted[package]:3} planted, {caught[package]:3} caught")
    print(f"{'all':10} {len(faults):3} planted, {caught.total():3} caught")
    sys.exit(caught.total() < WANTED * len(faults))


@dataclass(frozen=True)
class Executed:
    """Tests that execute each line, and how long each takes."""

    lines: Mapping[str, Mapping[int, set[str]]]
    """Tests by line, by path below attnlens/."""
    seconds: Mapping[str, float]

    @classmethod
    def recorded(cls, folder: Path, marker: str) -> Executed:
        """Read the record in `folder`; if there is none, run the tests and make it."""
        from coverage import CoverageData

        if not (folder / "lines").exists():
            record(folder, marker)
        data = CoverageData(str(folder / "lines"))
        data.read()
        lines = {
            file.partition("attnlens/")[2]: {
                line: {test_of(context) for context in contexts if context}
                for line, contexts in data.contexts_by_lineno(file).items()
            }
            for file in data.measured_files()
        }
        return cls(lines, json.loads((folder / "seconds.json").read_text()))

    def tests(self, fault: Fault, source: str) -> list[str]:
        """Return the tests that execute a fault's statement, or else its package's tests, the fastest first."""
        of_file = self.lines.get(fault.file, {})
        tests = set().union(*(of_file.get(line, set()) for line in statement_lines(fault, source)))
        if not tests:  # for example, a line that runs in another process, which coverage misses
            tests = {test for test in self.seconds if test.startswith(f"tests/{fault.package}/")}
        fastest = sorted(tests & self.seconds.keys(), key=self.seconds.__getitem__)
        counts: dict[str, Iterator[int]] = defaultdict(count)
        rank = {test: next(counts[test.partition("[")[0]]) for test in fastest}
        # the three fastest cases of each test function come first, so that all claims are tried early
        return sorted(fastest, key=lambda test: (rank[test] > 2, self.seconds[test]))[:MOST]


def record(folder: Path, marker: str) -> None:
    """Run the tests once, and record which lines each executes and how long it takes."""
    folder.mkdir(parents=True, exist_ok=True)
    settings, log = folder / "coveragerc", folder / "junit.xml"
    settings.write_text(COVERAGE.format(folder=folder.resolve()))
    words = ["-m", marker, "-q", "-n", "2", "--dist", "worksteal", "-p", "no:cacheprovider", f"--junit-xml={log}"]
    words += ["--cov=attnlens", f"--cov-config={settings}", "--cov-context=test", "--cov-report="]
    run = subprocess.run([sys.executable, "-m", "pytest", *words], cwd=ROOT, check=False)
    if run.returncode != 0:
        (folder / "lines").unlink(missing_ok=True)
        raise SystemExit("The tests fail without a fault.")
    seconds = {
        f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}": float(case.get("time", 0))
        for case in ElementTree.parse(log).iter("testcase")  # noqa: S314  # written by our own pytest
    }
    (folder / "seconds.json").write_text(json.dumps(seconds))


def test_of(context: str) -> str:
    """Return the test's name of a context: `FILE::NAME|run` in this process, `FILE::NAME (call)` in a forked one."""
    return re.sub(r"\|(run|setup|teardown)$| \((call|setup|teardown)\)$", "", context)


def statement_lines(fault: Fault, source: str) -> range:
    """Return the lines of the innermost statement with the fault; of a compound statement, those before its body."""
    start = source[: source.index(fault.right)].count("\n") + 1
    inside = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.stmt) and node.lineno <= start <= (node.end_lineno or node.lineno):
            body = getattr(node, "body", None)
            end = body[0].lineno - 1 if body else node.end_lineno or node.lineno
            if start <= max(end, node.lineno):
                inside.append(range(node.lineno, max(end, node.lineno) + 1))
    return min(inside, key=len, default=range(start, start + 1))


def verdict(executed: Executed, fault: Fault) -> str:
    """Plant a fault in a copy of the project, and return the test that catches it; empty if none does."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        ignored = shutil.ignore_patterns(".git", "__pycache__", ".hypothesis")
        place = Path(shutil.copytree(ROOT, Path(folder) / "copy", ignore=ignored))
        file = place / "attnlens" / fault.file
        source = file.read_text()
        if source.count(fault.right) != 1:
            raise SystemExit(f"{fault.number}: {fault.right!r} must occur once in {fault.file}")
        tests = executed.tests(fault, source)
        file.write_text(source.replace(fault.right, fault.wrong))
        failed = first_failure(place, tests) if tests else ""
    outcome = f"caught by {failed}" if failed else f"MISSED by {len(tests)} tests"
    change = f"{fault.number:3} {fault.file}: {fault.right} → {fault.wrong}"
    print(f"{change}: {outcome} ({time.monotonic() - begin:.0f} s)", flush=True)
    return failed


def first_failure(place: Path, tests: list[str]) -> str:
    """Run these tests in their order in a forked process, and return the first that fails; empty if all pass."""
    result = place / "result"
    child = os.fork()
    if child == 0:
        become(place, tests, result)
    deadline = time.monotonic() + LONGEST
    while os.waitpid(child, os.WNOHANG)[0] == 0:
        if time.monotonic() > deadline:
            with suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return "the time limit"
        time.sleep(0.1)
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    return result.read_text() if result.exists() else "a crash"


def become(place: Path, tests: list[str], result: Path) -> None:
    """Run the tests in this process, write the first failure to `result`, and end the process."""
    import pytest

    os.setpgid(0, 0)
    with open(place / "output", "w") as output:  # noqa: PTH123
        for number in (1, 2):
            os.dup2(output.fileno(), number)
    os.chdir(place)
    os.environ["PYTHONPATH"] = str(place)
    sys.path[:0] = [str(place), str(place / "tests" / "support")]

    class Order:
        failed = ""

        @pytest.hookimpl(trylast=True)
        def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
            order = {test: number for number, test in enumerate(tests)}
            items[:] = sorted((item for item in items if item.nodeid in order), key=lambda item: order[item.nodeid])

        def note(self, report: pytest.TestReport | pytest.CollectReport) -> None:
            if report.failed:
                self.failed = self.failed or report.nodeid

        pytest_runtest_logreport = pytest_collectreport = note

    order = Order()
    files = sorted({test.partition("::")[0] for test in tests})
    code = 3
    with suppress(BaseException):
        code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-m", TIERS["both"], *files], plugins=[order])
    passed = code in (0, 5)
    result.write_text("" if passed else order.failed or "an error in the run")
    os._exit(0)


if __name__ == "__main__":
    main()
