"""Plants forty one-line faults, one at a time, in a copy of the package, and tells which ones the tests catch.

python tests/mutations.py [--only NUMBER ...] [--processes N]

A wrong sign, a group off by one, a mask that is dropped, a scale that is missing: each is a mistake that somebody has made
or could make. For each the test files concerned run until the first failure. Exit 1 where fewer than 38 of 40 are caught.
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


FAULTS = (
    Fault("linalg/forms.py", "return values * abs(self.query_key.scale)", "return values", "linalg spectrum"),
    Fault("linalg/forms.py", "squared.clamp(min=0).sqrt()", "squared.clamp(min=0)", "linalg symmetry"),
    Fault("linalg/symmetries.py", "return crossed / squared", "return -crossed / squared", "linalg rotation symmetry"),
    Fault("linalg/symmetries.py", "2 * norms.std(-1", "3 * norms.std(-1", "linalg symmetry"),
    Fault("linalg/rotation.py", "sines * sin).sum(-1)", "sines * -sin).sum(-1)", "rotation"),
    Fault("linalg/visible.py", "logits.masked_fill(~allowed, 0.0)", "logits", "visible linalg_tokens"),
    Fault("linalg/visible.py", "1 - key - distance", "1 - key + distance", "visible"),
    Fault("linalg/attention.py", "chooses = choices >= 2", "chooses = choices >= 1", "linalg_tokens spectrum"),
    Fault(
        "linalg/attention.py",
        "amax(-1), _allowed_keys(query_key) >= 1",
        "amax(-2), _allowed_keys(query_key) >= 1",
        "linalg_tokens",
    ),
    Fault("linalg/additive.py", "goal - self.matrix @ found", "goal + self.matrix @ found", "visible"),
    Fault("analyzers/symmetry.py", '(sums[0], "weights.symmetry")', "", "symmetry"),
    Fault(
        "weights/__init__.py",
        "head // group for head in heads",
        "head % self.maps.key.shape[0] for head in heads",
        "weights",
    ),
    Fault("weights/__init__.py", "scale=self.scale", "scale=1.0", "weights symmetry"),
    Fault(
        "weights/norms.py",
        "return norm.gain * (x - x.mean(-1, keepdim=True) if norm.centred else x)",
        "return norm.gain * x",
        "weights rotation",
    ),
    Fault("weights/turning.py", "(sides[0] + sides[1]).angle()", "-(sides[0] + sides[1]).angle()", "rotation weights"),
    Fault("hooks/call.py", "query.shape[-1] ** -0.5 if scaling is None", "1.0 if scaling is None", "hooks families"),
    Fault(
        "hooks/call.py", "max(torch.finfo(mask.dtype).min / 2, LOST)", "torch.finfo(mask.dtype).min / 2", "masks hooks"
    ),
    Fault("hooks/call.py", "bias = bias + added", "bias = added", "hooks masks families"),
    Fault("hooks/door.py", "argsort()", "flip(0).argsort()", "hooks swap"),
    Fault(
        "records/calls.py",
        "head // self.group for head in range(heads)",
        "head % self.key.shape[1] for head in range(heads)",
        "hooks families",
    ),
    Fault(
        "records/calls.py",
        "self.key.repeat_interleave(self.group, dim=1)",
        "self.key.repeat(1, self.group, 1, 1)",
        "attention hooks",
    ),
    Fault(
        "records/tensors.py",
        "(scores / self.softcap).tanh() * self.softcap",
        "(scores / self.softcap).tanh()",
        "hooks linalg_tokens spectrum",
    ),
    Fault("records/tensors.py", "key=self.key[rows][:, :, keys]", "key=self.key[rows][:, :, queries]", "inspect hooks"),
    Fault("attention/sums.py", "(phi_q @ phi_k.mT).tril()", "(phi_q @ phi_k.mT)", "attention"),
    Fault("attention/rows.py", "log_k = log_k + call.bias[..., rows, columns]", "pass", "attention"),
    Fault("attention/positions.py", "keys - 1 - seen.flip(-1)", "keys - seen.flip(-1)", "attention"),
    Fault("kernels/distances.py", "2 * gamma * scale", "gamma * scale", "kernels attention"),
    Fault("kernels/distances.py", "self.ratio = (1 - 2 * gamma)", "self.ratio = (1 + 2 * gamma)", "kernels"),
    Fault(
        "kernels/lowrank.py",
        "return low_query.to(query), low_key.to(key), scale",
        "return low_query.to(query), low_key.to(key), 1.0",
        "kernels attention",
    ),
    Fault("ksvd/objective.py", "/ 2 - trace", "/ 2 + trace", "ksvd"),
    Fault("ksvd/primal.py", "Primal(through_keys, through_queries", "Primal(through_queries, through_keys", "ksvd"),
    Fault("attsvm/nearness.py", "squared -= float(finite.W.square().sum())", "pass", "selection attsvm_equalities"),
    Fault("attsvm/nearness.py", "/ (size * solution.norm)", "/ size", "selection"),
    Fault("attsvm/head.py", "softmax.capped(scores) + scene.log_copies", "softmax.capped(scores)", "selection"),
    Fault("attsvm/descent.py", "-1 / (", "1 / (", "descent converge"),
    Fault("statistics/design.py", "count / (count - 1)", "1.0", "statistics"),
    Fault(
        "statistics/intervals.py",
        "value - high * error, value - low * error",
        "value + low * error, value + high * error",
        "statistics",
    ),
    Fault("statistics/discoveries.py", "(1 + beyond) / (1 + drawn)", "beyond / drawn", "statistics"),
    Fault(
        "run/inspect/collector.py", "factors = norms.tolist() if info.grows_with_factors else", "factors =", "inspect"
    ),
    Fault("run/swap/comparison/targets.py", "torch.cat([real[:, 1:]", "torch.cat([real[:, :-1]", "swap"),
)


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
