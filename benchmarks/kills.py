"""Kills commands at random moments: each leaves the old output or the new one, and the next run no litter.

python benchmarks/kills.py [--quick] [--moments N] [--seed N]
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from attnlens.errors import AttnlensError
from attnlens.records import read_report

SMALL = ("--sequences", "2", "--tokens", "16", "--no-progress", "-q")
ONE = ("--layers", "0")
COMMANDS = {
    "inspect": ("inspect", "demo", *SMALL, *ONE, "--json", "r.json", "--csv", "r.csv"),
    "swap-kernel --save": ("swap-kernel", "demo", *SMALL, *ONE, "--json", "r.json", "--save", "saved"),
    "converge": ("converge", "--experiment", "feasibility", "--trials", "2", "-q", "--json", "r.json"),
}
OLD = b"what stood here before"


def main() -> None:
    """Print a row a command; end with 1 where something else than the old or the new output was left."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one moment a command: does it still run?")
    parser.add_argument("--moments", type=int, default=30, help="how often each command is killed")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    wanted = parser.parse_args()
    moments = 1 if wanted.quick else wanted.moments
    broken = False
    print(f"{'command':20} moments  old  new  ratio of whole outputs")
    for name, words in COMMANDS.items():
        found = list(killed(words, moments, wanted.seed))
        wrong = [state for state in found if state not in ("old", "new")]
        broken |= bool(wrong)
        row = f"{name:20} {moments:7} {found.count('old'):4} {found.count('new'):4}  {1 - len(wrong) / moments:.3f}"
        print(row, *wrong, flush=True)
    sys.exit(int(broken))


def killed(words: tuple[str, ...], moments: int, seed: int) -> Iterator[str]:
    """For each moment `old` or `new`, or in words what is neither; evenly drawn over what a whole run takes."""
    draw = random.Random(seed)  # noqa: S311  # no secret
    with tempfile.TemporaryDirectory() as folder:
        length = _seconds(lambda: subprocess.run(_program(words), cwd=folder, check=True))  # noqa: S603  # ours
    for _ in range(moments):
        with tempfile.TemporaryDirectory() as folder:
            yield _kill(words, Path(folder), draw.uniform(0, length))


def _kill(words: tuple[str, ...], folder: Path, wait: float) -> str:
    outputs = [folder / word for word in words if word.startswith("r.")]
    for output in outputs:
        output.write_bytes(OLD)
    process = subprocess.Popen(_program(words), cwd=folder)  # noqa: S603  # ours
    time.sleep(wait)
    process.kill()
    process.wait()
    states = {"old" if output.read_bytes() == OLD else _whole(output) for output in outputs}
    if not (folder / "saved").exists():  # a folder that is there is whole, and would be refused
        subprocess.run(_program(words), cwd=folder, check=True)  # noqa: S603  # ours
    litter = {path.name for path in folder.iterdir()} - {*(output.name for output in outputs), "saved"}
    return f"litter {sorted(litter)}" if litter else next((state for state in states if state != "old"), "old")


def _whole(output: Path) -> str:
    """`new` where the file is whole, else what is wrong with it."""
    content = output.read_bytes()
    if output.suffix == ".json":
        try:
            read_report(output)
        except AttnlensError as error:
            return error.problem
    return "new" if content.endswith(b"\n") else f"a part of {output.name}"


def _program(words: tuple[str, ...]) -> list[str]:
    return [sys.executable, "-m", "attnlens", *words]


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
