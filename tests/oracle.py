"""Run a fixed list of commands on the demo model and save all that they print and write in FOLDER.

python tests/oracle.py FOLDER [--against OTHER]

With --against, print every difference from OTHER, a folder saved before a change on the same machine, except times,
memory and the environment.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import map_schema
from program import DEMO, attnlens, python

LOADED = (
    "import attnlens, json, torch; model = attnlens.load_swapped('saved').model; "
    "logits = model(torch.arange(24)[None]).logits.double(); json.dump(logits.sum(-1).tolist(), open('l.json', 'w'))"
)
TOP_P = (
    "import attnlens; attnlens.inspect('demo', analyzers='selection', select='top-p:0.9', layers=[1], heads=[0, 1], "
    "windows=8, length=32).write_json('report.json')"
)
PRIMAL = (
    "import attnlens; attnlens.heal('demo', 'primal:8', train=2, eta=0.05, windows=8, length=32)"
    ".write_json('report.json')"
)
SHARDS = (
    "import attnlens; from attnlens.errors import ShardFinished\n"
    "options = {'windows': 8, 'length': 32, 'work': 'work'}\n"
    "try: attnlens.swap_kernel('demo', ['rbf', 'linear'], shard='1/2', **options)\n"
    "except ShardFinished: attnlens.swap_kernel('demo', ['rbf', 'linear'], **options).write_json('report.json')"
)
FEW = "--windows 8 --length 32 --no-progress"
REPORT = "--json report.json --csv heads.csv --markdown report.md"
COMMANDS = {
    "inspect": f"inspect demo {FEW} {REPORT} --windows-csv windows.csv --html report.html",
    "inspect-tokens": f"inspect demo --source tokens --heads 0,3 --placement random --seed 3 {FEW} {REPORT}",
    "inspect-selection": f"inspect demo --analyzer selection --layers 1 {FEW} {REPORT} --html report.html",
    "inspect-top-p": f"python -c {shlex.quote(TOP_P)}",
    "inspect-margins": f"inspect demo --head 3.2 --show selection {FEW} {REPORT} --html report.html",
    "inspect-ksvd": f"inspect demo --analyzer ksvd --analyzer extended --layers 2 {FEW} {REPORT}",
    "swap": f"swap-kernel demo --kernel rbf {FEW} {REPORT} --windows-csv windows.csv --html report.html",
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
    "swap-shards": f"python -c {shlex.quote(SHARDS)}",
    "swap-jobs": f"swap-kernel demo --kernel rbf --kernel linear --sweep layers {FEW} --jobs 2 --work work {REPORT}",
    "swap-loaded": f"heal demo --kernel rbf --fit --train 2 --save saved {FEW} --json report.json && "
    f"python -c {shlex.quote(LOADED)}",
    "swap-ranks-of-a-plan": f"ranks demo --budget loss:5% --plan plan.json {FEW} --json first.json "
    f"&& ranks demo --ranks plan.json {FEW} {REPORT}",
    "compare": f"compare demo {DEMO / 'checkpoints' / 'step-01000'} {FEW} {REPORT} --html report.html",
    "check": f"inspect demo {FEW} --json accepted.json && check accepted.json --baseline baseline.json "
    "--update-baseline && check accepted.json --rule 'tokens.entropy: min > 0.05' "
    "--rule 'weights.symmetry: max < 0.01 @layers 0-1' "
    f"--baseline baseline.json --junit junit.xml {REPORT}",
    "converge-shards": "converge --checkpoints --layers 1 --heads 0,5 --work work --shard 1/2 "
    f"{FEW} && converge --checkpoints --layers 1 --heads 0,5 --work work {FEW} {REPORT}",
    "study": f"reproduce order --seeds 1 --cells language/nowhere --jobs 1 --work work --no-progress {REPORT}",
    "verify": "reproduce claims --quick --no-progress --json report.json",
    "list": "list",
    "explain": "explain tokens.share_skew",
    "help": "--help",
    **{
        f"help-{name}": f"{name} --help"
        for name in ("inspect", "swap-kernel", "converge", "doctor", "reproduce", "list")
    },
}
PLACE = re.compile(r"(?:/[\w.-]{1,60}){1,8}/attnlens/(?:models/)?demo")
COST = re.compile(r"× [0-9.]+|[0-9.,]+ (s|ms|MiB|→|tokens per second)(?= |$|[.,;)<])|(?<=, )[0-9.]+$")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="new folder for the outputs")
    parser.add_argument("--against", type=Path, help="an earlier folder to compare with")
    parser.add_argument("--only", nargs="+", choices=COMMANDS, default=COMMANDS, help="run only these commands")
    options = parser.parse_args()
    for name in options.only:
        (folder := options.folder / name).mkdir(parents=True)
        for step in map(shlex.split, COMMANDS[name].split(" && ")):
            program, words = (python, step[1:]) if step[0] == "python" else (attnlens, step)
            run = program(*words, cwd=folder, COLUMNS="120")
            print(f"{name}: exit {run.returncode}", flush=True)
        (folder / "stdout.txt").write_text(run.stdout)
        (folder / "stderr.txt").write_text(f"{run.stderr}exit {run.returncode}\n")
    if options.against is not None:
        lines = [line for name in options.only for line in differences(options.against / name, options.folder / name)]
        print(*lines, f"{len(lines)} differences", sep="\n")
        sys.exit(bool(lines))


def differences(before: Path, after: Path) -> Iterator[str]:
    """Yield one line for each value that is missing, new or different."""
    first, second = (dict(values(folder)) for folder in (before, after))
    for path in sorted(first.keys() | second.keys()):
        if first.get(path) != second.get(path):
            yield f"{after.name}/{path}: {str(first.get(path))[:200]} → {str(second.get(path))[:200]}"


def values(folder: Path) -> Iterator[tuple[str, object]]:
    """Yield all values of all files with their paths, except those that differ between two runs."""
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if not path.is_file() or name.parts[0] in ("work", "saved"):
            continue
        text = PLACE.sub("DEMO", path.read_text())
        if path.suffix == ".json":
            pairs = map_schema.version2(json.loads(text)).items()
        elif path.suffix == ".csv":
            rows = list(csv.DictReader(text.splitlines()))
            pairs = ((f"{row}.{key}", cell) for row, cells in enumerate(rows) for key, cell in cells.items())
            pairs = ((key, cell) for key, cell in pairs if key.split(".")[1] not in map_schema.RUNS)
        else:
            pairs = ((str(number), COST.sub("COST", line)) for number, line in enumerate(text.splitlines()))
        yield from ((f"{name}:{key}", value) for key, value in pairs)


if __name__ == "__main__":
    main()
