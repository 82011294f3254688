"""Runs a fixed list of commands on the demo model and keeps, or compares, all that they print and write.

python tests/oracle.py FOLDER                  run, and keep everything in this new folder
python tests/oracle.py FOLDER --against OTHER  the same, then name every difference from what OTHER holds

A restructuring changes nothing that a user sees: run it before and after, on one machine. Times, memory and the
environment are left out; numbers have to be the same.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import map_schema
from program import attnlens, python

DEMO = Path(__file__).parent.parent / "attnlens" / "models" / "demo"
LOADED = (
    "import attnlens, json, torch; model = attnlens.load_swapped('saved').model; "
    "found = model(torch.arange(24)[None]).logits; json.dump(found.double().sum(-1).tolist(), open('logits.json', 'w'))"
)
"""What the saved model predicts, loaded again."""
TOP_P = (
    "import attnlens; attnlens.inspect('demo', analyzers='selection', select='top-p:0.9', layers=[1], heads=[0, 1], "
    "windows=8, length=32).write_json('report.json')"
)
"""A rule of selection, which only Python offers."""
PRIMAL = (
    "import attnlens; attnlens.heal('demo', 'primal:8', train=2, eta=0.05, windows=8, length=32)"
    ".write_json('report.json')"
)
"""A weight of the regulariser, which only Python offers."""
SHARDS = (
    "import attnlens; from attnlens.errors import ShardFinished\n"
    "options = {'windows': 8, 'length': 32, 'work': 'work'}\n"
    "try: attnlens.swap_kernel('demo', ['rbf', 'linear'], shard='1/2', **options)\n"
    "except ShardFinished: attnlens.swap_kernel('demo', ['rbf', 'linear'], **options).write_json('report.json')"
)
"""Shards of several kernels, which only Python offers."""
FEW = "--windows 8 --length 32 --no-progress"
REPORT = "--json report.json --csv heads.csv --markdown report.md"
COMMANDS = {
    "inspect": f"inspect demo {FEW} {REPORT} --windows-csv windows.csv --html report.html",
    "inspect-all-heads": f"inspect demo {FEW} --layers 0-1 --table -v {REPORT}",
    "inspect-weights": f"inspect demo --source weights --no-progress {REPORT}",
    "inspect-tokens": f"inspect demo --source tokens --heads 0,3 --placement random --seed 3 {FEW} {REPORT}",
    "inspect-selection": f"inspect demo --analyzer selection --layers 1 {FEW} {REPORT} --html report.html",
    "inspect-top-p": f"python -c {shlex.quote(TOP_P)}",
    "inspect-margins": f"inspect demo --head 3.2 --show selection {FEW} {REPORT} --html report.html",
    "inspect-ksvd": f"inspect demo --analyzer ksvd --analyzer extended --layers 2 {FEW} {REPORT}",
    "swap": f"swap-kernel demo --kernel rbf {FEW} {REPORT} --windows-csv windows.csv --html report.html",
    "swap-several": f"swap-kernel demo --kernel linear --kernel cosine --kernel window:8 --sweep layers {FEW} {REPORT}",
    "swap-heads": f"swap-kernel demo --kernel symmetric --layers 0-1 --sweep heads {FEW} {REPORT} --html report.html",
    "swap-healed": f"heal demo --kernel rbf --fit --train 4 --heads 1,2 --save saved {FEW} {REPORT}",
    "swap-primal": f"python -c {shlex.quote(PRIMAL)}",
    "swap-budget": f"ranks demo --budget loss:2% --plan plan.json {FEW} {REPORT}",
    "converge": f"converge --trials 2 --no-progress {REPORT} --html report.html",
    "converge-head": f"converge demo --head 3.2 {FEW} {REPORT} --html report.html",
    "converge-checkpoints": f"converge --checkpoints --layers 1 --heads 0,5 {FEW} {REPORT} --html report.html",
    "doctor": "doctor demo --no-progress --json report.json",
    "inspect-from-files": f"inspect {DEMO} --source weights --device files --no-progress {REPORT}",
    "inspect-shards": f"inspect demo {FEW} --work work --shard 2/2 && inspect demo {FEW} --work work --shard 1/2 && "
    f"inspect demo {FEW} --work work {REPORT}",
    "inspect-jobs": f"inspect demo {FEW} --jobs 2 --work work {REPORT}",
    "swap-shards": f"python -c {shlex.quote(SHARDS)}",
    "swap-jobs": f"swap-kernel demo --kernel rbf --kernel linear --sweep layers {FEW} --jobs 2 --work work {REPORT}",
    "swap-loaded": f"heal demo --kernel rbf --fit --train 2 --save saved {FEW} --json report.json && "
    f"python -c {shlex.quote(LOADED)}",
    "swap-ranks-of-a-plan": f"ranks demo --budget loss:5% --plan plan.json {FEW} --json first.json "
    f"&& ranks demo --ranks plan.json {FEW} {REPORT}",
    "compare": f"compare demo {DEMO / 'checkpoints' / 'step-01000'} {FEW} {REPORT} --html report.html",
    "compare-weights": f"compare demo {DEMO / 'checkpoints' / 'step-03000'} --source weights --no-progress {REPORT}",
    "check": f"inspect demo {FEW} --json accepted.json && check accepted.json --baseline baseline.json "
    "--update-baseline && check accepted.json --rule 'tokens.entropy: min > 0.05' "
    "--rule 'weights.symmetry: max < 0.01 @layers 0-1' "
    f"--baseline baseline.json --junit junit.xml {REPORT}",
    "converge-shards": "converge --checkpoints --layers 1 --heads 0,5 --work work --shard 1/2 "
    f"{FEW} && converge --checkpoints --layers 1 --heads 0,5 --work work {FEW} {REPORT}",
    "study": f"reproduce order --seeds 1 --cells language/nowhere --jobs 1 --work work --no-progress {REPORT}",
    "verify": "reproduce claims --quick --no-progress --json report.json",
    "list": "list",
    "list-schema": "list schema",
    "explain": "explain tokens.share_skew",
    "help": "--help",
    **{
        f"help-{name}": f"{name} --help"
        for name in ("inspect", "swap-kernel", "converge", "doctor", "reproduce", "list")
    },
}
DROPPED = {"timings", "environment", "peak_memory_bytes", "tokens_per_second", "seconds", "stamp", "beside_sdpa"}
"""Fields of a report, and beginnings of columns, that are not the same in two runs."""
PLACE = re.compile(r"(?:/[\w.-]{1,60}){1,8}/attnlens/(?:models/)?demo")
"""Where the tree lies that runs."""
COST = re.compile(r"× [0-9.]+|[0-9.,]+ (s|ms|MiB|→|tokens per second)(?= |$|[.,;)<])|(?<=, )[0-9.]+$")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where everything is kept; new")
    parser.add_argument("--against", type=Path, help="what to compare with")
    parser.add_argument("--only", nargs="+", choices=COMMANDS, default=COMMANDS, help="run these commands alone")
    asked = parser.parse_args()
    for name in asked.only:
        words, place = COMMANDS[name], asked.folder / name
        place.mkdir(parents=True)
        steps = [shlex.split(step) for step in words.split(" && ")]
        runs = [
            python(*step[1:], cwd=place) if step[0] == "python" else attnlens(*step, cwd=place, COLUMNS="120")
            for step in steps
        ]
        (place / "stdout.txt").write_text("".join(run.stdout for run in runs[-1:]))
        (place / "stderr.txt").write_text("".join(f"{run.stderr}exit {run.returncode}\n" for run in runs[-1:]))
        print(f"{name}: exit {', '.join(str(run.returncode) for run in runs)}", flush=True)
    if asked.against is not None:
        found = [line for name in asked.only for line in differences(asked.against / name, asked.folder / name)]
        print(*found, f"{len(found)} differences", sep="\n")
        sys.exit(bool(found))


def differences(before: Path, after: Path) -> Iterator[str]:
    """A line for each value that is not the same."""
    kept, made = (
        {os.path.relpath(path, folder) for path in folder.rglob("*") if path.is_file()} for folder in (before, after)
    )
    kept, made = ({name for name in names if not name.startswith("work/")} for names in (kept, made))
    yield from (f"{after.name}/{name}: missing" for name in sorted(kept - made))
    yield from (f"{after.name}/{name}: new" for name in sorted(made - kept))
    for name in sorted(kept & made):
        if name.startswith("saved/"):
            continue
        first, second = (read(folder / name) for folder in (before, after))
        yield from (f"{after.name}/{name}: {line}" for line in unlike(first, second))


def read(path: Path) -> Any:
    """A file's content without what differs from run to run."""
    text = PLACE.sub("DEMO", path.read_text())
    if path.suffix == ".json":
        return map_schema.version2(json.loads(text))
    if path.suffix == ".csv":
        rows = csv.DictReader(text.splitlines())
        return [{name: cell for name, cell in row.items() if name.split(".")[0] not in DROPPED} for row in rows]
    return [COST.sub("COST", line) for line in text.splitlines()]


def unlike(first: Any, second: Any, where: str = "") -> Iterator[str]:
    """Where two documents differ; a field that is new in the second one is no difference."""
    if isinstance(first, dict) and isinstance(second, dict):
        for key in first.keys() - DROPPED:
            if key in second:
                yield from unlike(first[key], second[key], f"{where}.{key}")
            else:
                yield f"{where}.{key} is gone"
    elif isinstance(first, list) and isinstance(second, list) and len(first) == len(second):
        for number, pair in enumerate(zip(first, second, strict=True)):
            yield from unlike(*pair, f"{where}[{number}]")
    elif first != second:
        yield f"{where}: {str(first)[:200]} → {str(second)[:200]}"


if __name__ == "__main__":
    main()
