"""Every model type of transformers, built tiny and run: which are read, which are refused and why, and which break.

python benchmarks/sweep.py [--quick] [--only TYPE ...] [--csv FILE] [--before FILE]

Each type, with the settings of its processor beside it, goes through load, inspect, doctor and swap-kernel (exponential
and RBF); what is captured is held against every softmax of the model's own eager pass, RBF attention against a naive
one, and planted weights W_Q = ±W_K are read. One row per type is written; `attnlens list architectures` shows that of
`--csv attnlens/records/architectures.csv`. --before prints what changed since an earlier table. No network is used; the
builders are tests/model_types.py and tests/processors.py. About 40 minutes for all types on one core.
"""

from __future__ import annotations

import argparse
import csv
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from subjects import machine

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import model_types
import naive_rbf
import own_softmax
import planting
import processors
import tiny

import attnlens
from attnlens.errors import AttnlensError
from attnlens.models import hooks, loading, texts
from attnlens.records import Site
from attnlens.runs.progress import Interrupted

QUICK = ("llama", "bert", "qwen3_vl", "detr", "mamba", "bloom")
SLOWEST = 60
"""Seconds that one command may take for one type."""
COLUMNS = [
    *("model_type", "class", "read", "route", "positions", "weights", "softmax_error", "rbf_error", "planted"),
    *("doctor", "swap", "seconds", "reason"),
]
GAMMA = 0.5
TOKENS, SEQUENCES = 16, 4


class TooSlowError(Exception):
    """A command took longer than SLOWEST."""


def main() -> None:
    """Run the types asked for, write their table, and print the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few types: does it still run?")
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--csv")
    parser.add_argument("--before", help="an earlier table to compare with")
    given = parser.parse_args()
    print(machine())
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    rows = []
    for name in given.only or (QUICK if given.quick else model_types.TYPES()):
        rows.append(swept(name))
        print(" | ".join(str(rows[-1][column]) for column in COLUMNS if column != "reason"), flush=True)
        if given.csv:
            write(Path(given.csv), rows)
    if given.before:
        compare(Path(given.before), rows)
    counts = Counter(row["read"] for row in rows)
    built = len(rows) - counts["not built"]
    read = counts["whole"] + counts["in part"]
    print(f"{dict(counts)}; ratio of read to built types: {read / max(1, built):.2f}")
    broken = [row["model_type"] for row in rows if "crash" in (row["read"], row["doctor"], row["swap"])]
    print(f"{len(broken)} end in exit 70: {', '.join(broken) or 'none'}")


def swept(name: str) -> dict[str, Any]:
    """The row of one type."""
    row: dict[str, Any] = dict.fromkeys(COLUMNS, "") | {"model_type": name, "read": "not built"}
    start = time.perf_counter()
    with TemporaryDirectory() as folder:
        try:
            with limited():
                model = model_types.build(name)
                row |= {"class": type(model).__name__}
                model.save_pretrained(folder)
                processors.save(model, Path(folder))
                tiny.tokenizer("roberta").save_pretrained(folder)
                del model
        except Exception as error:
            return row | {"reason": f"{type(error).__name__}: {first_line(error)}"}
        row |= told(folder)
        row["reason"] = str(row["reason"]).replace(folder, "MODEL")
    return row | {"seconds": f"{time.perf_counter() - start:.1f}"}


def told(folder: str) -> dict[str, Any]:
    """What each command says of the model in a folder."""
    how, loaded = tried(lambda: attnlens.load(folder))
    if how != "done":
        return {"read": how, "reason": loaded}
    options: dict[str, Any] = {"length": TOKENS, "text": [passage(folder)]} if texts.reads_text(loaded) else {}
    row: dict[str, Any] = {}
    how, report = tried(lambda: attnlens.inspect(loaded, windows=SEQUENCES, **options))
    row["read"], row["reason"] = how, report
    if how == "done":
        row["read"] = "whole" if report.coverage.complete else "in part"
        missing = sum(count for source, count in report.coverage.without.items() if source == "weights")
        row |= {
            "positions": report.model.conventions.position,
            "weights": "all" if not missing else "some" if missing < report.coverage.analysed else "none",
            "reason": "" if report.coverage.complete else report.coverage.sentence,
        }
    how, report = tried(lambda: attnlens.doctor(loaded, **options))
    row["doctor"] = report.summary.verdict if how == "done" else how
    kernels = ["exponential", "rbf"]
    how, found = tried(lambda: attnlens.swap_kernel(loaded, kernels, windows=SEQUENCES, **options))
    row["swap"] = how
    for command, outcome in (("doctor", report), ("swap", found)):
        if isinstance(outcome, str) and outcome not in row["reason"]:
            row["reason"] += f" {command}: {outcome}"
    if row["read"] in ("whole", "in part"):
        row |= checked(loaded)
    return row


def checked(loaded: loading.Loaded) -> dict[str, Any]:
    """Captured attention against the model's softmaxes, RBF attention against a naive one, and planted weights."""
    inputs = texts.placeholder(loaded, TOKENS, 0, sequences=2).batches[0].inputs
    found: dict[str, Any] = {}
    for column, work in (
        ("softmax_error", lambda: own_softmax.difference(loaded.model, inputs)),
        ("rbf_error", lambda: naive_rbf.difference(loaded.model, inputs, GAMMA)),
        ("planted", lambda: planting.read(loaded, inputs)),
        ("route", lambda: "+".join(sorted({route(site.site) for site in hooks.survey(loaded.model, inputs)}))),
    ):
        how, value = tried(work)
        found[column] = f"{value:.1e}" if isinstance(value, float) else value if how == "done" else how
    found["route"] = "both" if "+" in str(found["route"]) else found["route"]
    return {column: "" if value is None else value for column, value in found.items()}


def route(site: Site) -> str:
    """How a site is reached."""
    return "traced" if site.traced else "interface"


def passage(folder: str) -> str:
    """A file with the beginning of the first built-in text."""
    file = Path(folder) / "passage.txt"
    file.write_text(texts.sample("demo")[0].text[:4000])
    return str(file)


def tried(work: Callable[[], Any]) -> tuple[str, Any]:
    """How it ended, and what it gave: `done`, or `refused`, `too slow`, `crash` with the reason."""
    try:
        with limited():
            return "done", work()
    except TooSlowError:
        return "too slow", f"more than {SLOWEST} s"
    except Interrupted:
        raise
    except AttnlensError as error:
        return "refused", error.problem
    except Exception as error:
        return "crash", f"{type(error).__name__}: {first_line(error)}"


def first_line(error: Exception) -> str:
    """The beginning of what it says."""
    return " ".join(str(error).split())[:200]


@contextmanager
def limited() -> Iterator[None]:
    """Raise TooSlowError where the block takes longer than SLOWEST."""

    def late(_signal: int, _frame: object) -> None:
        raise TooSlowError

    signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, SLOWEST, 1)  # again, because one that strikes in a callback is lost
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    """The table as CSV, in the order of the types; a table that is there keeps the rows of the other types."""
    kept = {row["model_type"]: row for row in (*(read(path) if path.exists() else ()), *rows)}
    rows = [{name: kept[key].get(name, "") for name in COLUMNS} for key in sorted(kept)]
    with path.open("w", newline="") as file:
        file.write(f"# transformers {transformers.__version__}, torch {torch.__version__}\n")
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def read(path: Path) -> list[dict[str, str]]:
    """The rows of a table."""
    with path.open(newline="") as file:
        if not file.readline().startswith("#"):
            file.seek(0)
        return list(csv.DictReader(file))


def compare(path: Path, rows: list[dict[str, Any]]) -> None:
    """Print what an earlier table says otherwise, type by type."""
    before = {row["model_type"]: row for row in read(path)}
    for row in rows:
        old = before.get(row["model_type"], {})
        changed = [name for name in ("read", "positions", "weights", "doctor", "swap") if old.get(name) != row[name]]
        if changed:
            print(f"{row['model_type']}: " + ", ".join(f"{name} {old.get(name)} → {row[name]}" for name in changed))


if __name__ == "__main__":
    main()
