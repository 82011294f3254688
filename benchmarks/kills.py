"""Kill commands at random moments; check that no output is partial and that resumed runs report the same numbers.

python benchmarks/kills.py [--quick] [--only COMMAND ...] [--moments N] [--seed N]
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SMALL = (
    *("--windows", "8", "--length", "32", "--batch-size", "2", "--no-progress", "-q"),
    *("--json", "r.json", "--work", "work"),
)
COMMANDS = {
    "inspect": ("inspect", "demo", *SMALL),
    "inspect --jobs": ("inspect", "demo", *SMALL, "--jobs", "2"),
    "converge": ("converge", "--checkpoints", "--layers", "0", *SMALL),
    "swap-kernel --sweep": ("swap-kernel", "demo", "--kernel", "rbf", "--sweep", "heads", *SMALL),
    "heal": ("heal", "demo", "--kernel", "rbf", "--train", "12", *SMALL),
    "ranks": ("ranks", "demo", "--budget", "loss:5%", *SMALL),
    "study": (
        *("reproduce", "order", "--seeds", "1", "--cells", "language/nowhere", "--jobs", "1"),
        *("--no-progress", "-q", "--json", "r.json", "--work", "work"),
    ),
}
VARYING = {"timings", "environment", "peak_memory_bytes", "tokens_per_second", "seconds", "speed", "beside_sdpa"}
"""Fields of a report that differ between two whole runs."""
OLD = b"what stood here before"


def main() -> None:
    """Print one row per command; exit with 1 if an output was partial or a resumed run had other numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one moment of the first command: does it still run?")
    parser.add_argument("--only", nargs="+", choices=COMMANDS, help="kill only these commands")
    parser.add_argument("--moments", type=int, default=30, help="kills per command")
    parser.add_argument("--seed", type=int, default=0, help="seed of the moments")
    options = parser.parse_args()
    moments, names = (1, ["inspect"]) if options.quick else (options.moments, options.only or list(COMMANDS))
    broken = 0
    print(f"{'command':22} moments   old   new  resumed  equal  ratio")
    for name in names:
        draw = random.Random(options.seed)  # noqa: S311  # no secret
        with tempfile.TemporaryDirectory() as folder:
            start = time.perf_counter()
            whole = _run_command(COMMANDS[name], Path(folder))
            length = time.perf_counter() - start
        rows = [_kill(COMMANDS[name], draw.uniform(0, length), whole) for _ in range(moments)]
        counts = [sum(row[field] for row in rows) for field in ("old", "new", "resumed", "equal")]
        broken += 2 * moments - counts[0] - counts[1] - counts[3]
        print(
            f"{name:22} {moments:7} {counts[0]:5} {counts[1]:5} {counts[2]:8} {counts[3]:6} {counts[3] / moments:7.2f}",
            flush=True,
        )
    sys.exit(bool(broken))


def _kill(words: tuple[str, ...], wait: float, whole: Any) -> dict[str, bool]:
    """Kill a command after `wait` seconds, run it again, and compare its report with that of a whole run."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        output = folder / "r.json"
        output.write_bytes(OLD)
        process = subprocess.Popen(_build_command(words), cwd=folder, stderr=subprocess.DEVNULL)  # noqa: S603  # ours
        time.sleep(wait)
        process.kill()
        process.wait()
        content = output.read_bytes()
        old = content == OLD
        new = not old and _drop_varying(json.loads(content)) == whole
        resumed = old and any((folder / "work").rglob("*.safetensors"))
        return {"old": old, "new": new, "resumed": resumed, "equal": _run_command(words, folder) == whole}


def _run_command(words: tuple[str, ...], folder: Path) -> Any:
    """Run a command to its end and return its report without the varying fields."""
    subprocess.run(_build_command(words), cwd=folder, check=True)  # noqa: S603  # ours
    return _drop_varying(json.loads((folder / "r.json").read_text()))


def _drop_varying(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _drop_varying(part) for name, part in value.items() if name not in VARYING}
    return [_drop_varying(part) for part in value] if isinstance(value, list) else value


def _build_command(words: tuple[str, ...]) -> list[str]:
    return [sys.executable, "-m", "attnlens", *words]


if __name__ == "__main__":
    main()
