"""Build a tiny model of each model type of transformers, and run it: is it supported, refused (why?), or does it crash?

python benchmarks/sweep.py [--quick] [--only TYPE ...] [--csv FILE]

Each type, saved with the settings of its processor, goes through load, inspect, doctor and swap-kernel (exponential and
RBF). Captured attention is compared with every softmax of the model's own eager pass, RBF attention with a naive one,
and planted weights W_Q = ±W_K are read. The table has one row per type; `attnlens list architectures` prints that of
`--csv attnlens/records/architectures.csv`. No network is used; the builders are tests/support/model_types.py and
tests/support/processors.py. All types take about 40 minutes on one core.
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

import naive_rbf
import torch
import transformers
from subjects import describe_machine

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))

import model_types
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
"""Maximum duration of one command for one type, in seconds."""
COLUMNS = [
    *("model_type", "class", "read", "route", "positions", "weights", "softmax_error", "rbf_error", "planted"),
    *("doctor", "swap", "seconds", "reason"),
]
GAMMA = 0.5
TOKENS, SEQUENCES = 16, 4


class TooSlowError(Exception):
    """A command took longer than SLOWEST."""


def main() -> None:
    """Run the selected types, write their table, and print the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few types: does it still run?")
    parser.add_argument("--only", nargs="*", default=[], help="run only these types")
    parser.add_argument("--csv")
    options = parser.parse_args()
    print(describe_machine())
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    rows = []
    for name in options.only or (QUICK if options.quick else model_types.TYPES()):
        rows.append(sweep_type(name))
        print(" | ".join(str(rows[-1][column]) for column in COLUMNS if column != "reason"), flush=True)
        if options.csv:
            write_table(Path(options.csv), rows)
    counts = Counter(row["read"] for row in rows)
    built = len(rows) - counts["not built"]
    readable = counts["whole"] + counts["in part"]
    print(f"{dict(counts)}; ratio of read to built types: {readable / max(1, built):.2f}")
    broken = [row["model_type"] for row in rows if "crash" in (row["read"], row["doctor"], row["swap"])]
    print(f"{len(broken)} end in exit 70: {', '.join(broken) or 'none'}")


def sweep_type(name: str) -> dict[str, Any]:
    """Build the row of one type."""
    row: dict[str, Any] = dict.fromkeys(COLUMNS, "") | {"model_type": name, "read": "not built"}
    start = time.perf_counter()
    with TemporaryDirectory() as folder:
        try:
            with limit_time():
                model = model_types.build(name)
                row |= {"class": type(model).__name__}
                model.save_pretrained(folder)
                processors.save(model, Path(folder))
                tiny.tokenizer("roberta").save_pretrained(folder)
                del model
        except Exception as error:
            return row | {"reason": f"{type(error).__name__}: {summarize_error(error)}"}
        row |= run_commands(folder)
        row["reason"] = str(row["reason"]).replace(folder, "MODEL")
    return row | {"seconds": f"{time.perf_counter() - start:.1f}"}


def run_commands(folder: str) -> dict[str, Any]:
    """Run each command on the model in a folder; return the columns."""
    status, loaded = run_limited(lambda: attnlens.load(folder))
    if status != "done":
        return {"read": status, "reason": loaded}
    options: dict[str, Any] = {"length": TOKENS, "text": [write_passage(folder)]} if texts.reads_text(loaded) else {}
    row: dict[str, Any] = {}
    status, report = run_limited(lambda: attnlens.inspect(loaded, windows=SEQUENCES, **options))
    row["read"], row["reason"] = status, report
    if status == "done":
        row["read"] = "whole" if report.coverage.complete else "in part"
        missing = sum(count for source, count in report.coverage.without.items() if source == "weights")
        row |= {
            "positions": report.model.conventions.position,
            "weights": "all" if not missing else "some" if missing < report.coverage.analysed else "none",
            "reason": "" if report.coverage.complete else report.coverage.sentence,
        }
    status, report = run_limited(lambda: attnlens.doctor(loaded, **options))
    row["doctor"] = report.summary.verdict if status == "done" else status
    kernels = ["exponential", "rbf"]
    status, swap = run_limited(lambda: attnlens.swap_kernel(loaded, kernels, windows=SEQUENCES, **options))
    row["swap"] = status
    for command, result in (("doctor", report), ("swap", swap)):
        if isinstance(result, str) and result not in row["reason"]:
            row["reason"] += f" {command}: {result}"
    if row["read"] in ("whole", "in part"):
        row |= check_attention(loaded)
    return row


def check_attention(loaded: loading.Loaded) -> dict[str, Any]:
    """Compare captured attention with the model's softmaxes, RBF with a naive one, and read planted weights."""
    inputs = texts.placeholder(loaded, TOKENS, 0, sequences=2).batches[0].inputs
    results: dict[str, Any] = {}
    for column, work in (
        ("softmax_error", lambda: own_softmax.difference(loaded.model, inputs)),
        ("rbf_error", lambda: naive_rbf.difference(loaded.model, inputs, GAMMA)),
        ("planted", lambda: planting.read(loaded, inputs)),
        ("route", lambda: "+".join(sorted({name_route(site.site) for site in hooks.survey(loaded.model, inputs)}))),
    ):
        status, value = run_limited(work)
        results[column] = f"{value:.1e}" if isinstance(value, float) else value if status == "done" else status
    results["route"] = "both" if "+" in str(results["route"]) else results["route"]
    return {column: "" if value is None else value for column, value in results.items()}


def name_route(site: Site) -> str:
    """Name the route by which a site is captured."""
    return "traced" if site.traced else "interface"


def write_passage(folder: str) -> str:
    """Write the beginning of the first built-in text to a file; return its path."""
    file = Path(folder) / "passage.txt"
    file.write_text(texts.sample("demo")[0].text[:4000])
    return str(file)


def run_limited(work: Callable[[], Any]) -> tuple[str, Any]:
    """Return the status (`done`, `refused`, `too slow`, `crash`), and the result or the reason."""
    try:
        with limit_time():
            return "done", work()
    except TooSlowError:
        return "too slow", f"more than {SLOWEST} s"
    except Interrupted:
        raise
    except AttnlensError as error:
        return "refused", error.problem
    except Exception as error:
        return "crash", f"{type(error).__name__}: {summarize_error(error)}"


def summarize_error(error: Exception) -> str:
    """Return the beginning of the message."""
    return " ".join(str(error).split())[:200]


@contextmanager
def limit_time() -> Iterator[None]:
    """Raise TooSlowError if the block takes longer than SLOWEST."""

    def stop(_signal: int, _frame: object) -> None:
        raise TooSlowError

    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, SLOWEST, 1)  # repeated, because a signal during a callback is lost
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def write_table(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write the table as CSV, sorted by type; rows of other types in an existing table stay."""
    by_type = {row["model_type"]: row for row in (*(read_table(path) if path.exists() else ()), *rows)}
    rows = [{name: by_type[key].get(name, "") for name in COLUMNS} for key in sorted(by_type)]
    with path.open("w", newline="") as file:
        file.write(f"# transformers {transformers.__version__}, torch {torch.__version__}\n")
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def read_table(path: Path) -> list[dict[str, str]]:
    """Read the rows of a table."""
    with path.open(newline="") as file:
        if not file.readline().startswith("#"):
            file.seek(0)
        return list(csv.DictReader(file))


if __name__ == "__main__":
    main()
