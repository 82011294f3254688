"""Plants forty one-line faults, one at a time, in a copy of the package, and tells which ones the tests catch.

python tests/mutations.py [--only NUMBER ...] [--processes N]

data/mutations.tsv lists them: a wrong sign, a group off by one, a mask that is dropped, a scale that is missing. For
each the test files concerned run until the first failure. Exit 1 where more than two are missed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
TABLE = Path(__file__).parent / "data" / "mutations.tsv"
MISSED = 2
"""So many faults may stay unseen."""
LONGEST = 1800
"""Seconds after which a run of tests counts as caught: the fault made it hang."""


@dataclass(frozen=True)
class Fault:
    """One wrong line."""

    file: str
    """Below attnlens/."""
    right: str
    """Part of a line, found once in the file."""
    wrong: str
    tests: str
    """The test files concerned, without `test_` and `.py`."""


FAULTS = [Fault(*line.split("\t")) for line in TABLE.read_text().splitlines()[1:]]


def main() -> None:
    """Plant the faults asked for, and print for each the first test that failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", type=int, help="numbers from 1")
    parser.add_argument("--processes", type=int, default=2)
    given = parser.parse_args()
    numbers = given.only or range(1, len(FAULTS) + 1)
    refuse_failing({name for number in numbers for name in FAULTS[number - 1].tests.split()})
    with ThreadPoolExecutor(given.processes) as pool:
        found = list(pool.map(told, numbers))
    caught = sum(found)
    print(f"{caught} of {len(found)} caught")
    sys.exit(caught < len(found) - MISSED)


def told(number: int) -> bool:
    """Whether the tests catch that fault."""
    fault = FAULTS[number - 1]
    with copied() as place:
        file = place / "attnlens" / fault.file
        text = file.read_text()
        if text.count(fault.right) != 1:
            raise SystemExit(f"{number}: {fault.right!r} stands {text.count(fault.right)} times in {fault.file}")
        file.write_text(text.replace(fault.right, fault.wrong))
        verdict = first_failure(place, fault.tests.split())
    said = "caught" if verdict else "MISSED"
    print(f"{number:2} {said} {fault.file}: {fault.right} → {fault.wrong}  {verdict}", flush=True)
    return bool(verdict)


def refuse_failing(tests: set[str]) -> None:
    """Raise SystemExit where these tests fail without a fault too, so that they would catch anything."""
    with copied() as place:
        if verdict := first_failure(place, sorted(tests)):
            raise SystemExit(f"Without any fault: {verdict}")


@contextmanager
def copied() -> Iterator[Path]:
    """A copy of the project."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(shutil.copytree(ROOT, Path(folder) / "copy", ignore=shutil.ignore_patterns(".git", "__pycache__")))


def first_failure(place: Path, tests: list[str]) -> str:
    """The test that failed first; empty where all pass."""
    files = [f"tests/test_{name}.py" for name in tests]
    words = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "-m", "not slow", *files]
    environment = os.environ | {"PYTHONPATH": str(place)}
    try:
        run = subprocess.run(words, cwd=place, env=environment, capture_output=True, text=True, timeout=LONGEST)
    except subprocess.TimeoutExpired:
        return "too slow"
    if run.returncode not in (0, 1):
        raise SystemExit(f"{' '.join(files)}: exit {run.returncode}\n{run.stdout[-2000:]}{run.stderr[-2000:]}")
    return next((line for line in run.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))), "")


if __name__ == "__main__":
    main()
