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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
TABLE = Path(__file__).parent / "data" / "mutations.tsv"
MISSED = 2
"""So many faults may stay unseen."""
LONGEST = 900
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
    with ThreadPoolExecutor(given.processes) as pool:
        found = list(pool.map(told, numbers))
    caught = sum(found)
    print(f"{caught} of {len(found)} caught")
    sys.exit(caught < len(found) - MISSED)


def told(number: int) -> bool:
    """Whether the tests catch that fault."""
    fault = FAULTS[number - 1]
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        for name in ("attnlens", "tests", "benchmarks", "docs", "pyproject.toml", "README.md"):
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, place / name)
        file = place / "attnlens" / fault.file
        text = file.read_text()
        if text.count(fault.right) != 1:
            raise SystemExit(f"{number}: {fault.right!r} stands {text.count(fault.right)} times in {fault.file}")
        file.write_text(text.replace(fault.right, fault.wrong))
        verdict = first_failure(place, fault.tests.split())
    print(
        f"{number:2} {'caught' if verdict else 'MISSED'} {fault.file}: {fault.right} → {fault.wrong}  {verdict}",
        flush=True,
    )
    return bool(verdict)


def first_failure(place: Path, tests: list[str]) -> str:
    """The test that failed first; empty where all pass."""
    files = [f"tests/test_{name}.py" for name in tests]
    words = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "--no-header",
        "-p",
        "no:cacheprovider",
        "-m",
        "not slow",
        *files,
    ]
    try:
        run = subprocess.run(
            words,
            cwd=place,
            env=os.environ | {"PYTHONPATH": str(place)},
            capture_output=True,
            text=True,
            timeout=LONGEST,
        )
    except subprocess.TimeoutExpired:
        return "too slow"
    if run.returncode == 0:
        return ""
    lines = [line for line in run.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return lines[0] if lines else f"exit {run.returncode}"


if __name__ == "__main__":
    main()
