"""Tests that help fits on one screen, shows options that exist, and gives examples that run."""

import shlex
from inspect import signature

import pytest
from program import attnlens, invoke
from typer.main import get_command

from attnlens.cli.commands import COMMANDS, WITHOUT_DEFAULTS, app
from attnlens.cli.short_help import EXAMPLES, GROUPS, OPTIONS

LINES, MOST_OPTIONS = 25, 12
QUICK = {"ATTNLENS_WINDOWS": "2", "ATTNLENS_LENGTH": "32", "ATTNLENS_TRIALS": "2", "ATTNLENS_ITERATIONS": "200"}


@pytest.mark.parametrize("name", COMMANDS)
def test_short_help_shows_at_most_12_options_and_three_examples_on_one_screen(name):
    result = invoke(name, "-h", COLUMNS="80")
    lines = result.stdout.splitlines()
    assert (result.returncode, result.stderr) == (0, "")
    assert len(lines) <= LINES
    assert max(map(len, lines)) <= 80
    assert "…" not in result.stdout, "whole phrases"
    shown = [line.split()[0] for line in lines if line.startswith("  --")]
    assert len(shown) == len(OPTIONS[name].split()) <= MOST_OPTIONS
    assert {flag[2:].replace("-", "_") for flag in shown} <= set(signature(COMMANDS[name]).parameters)
    assert [line.strip() for line in lines if line.strip().startswith("attnlens ")][:3] == list(EXAMPLES[name])
    group = get_command(app)
    for example in EXAMPLES[name]:
        _, command, *words = shlex.split(example)
        group.commands[command].make_context(command, words)
    whole = invoke(name, "--help").stdout
    assert "env var" not in whole
    assert whole.count("ATTNLENS_WINDOWS=8") == (name not in WITHOUT_DEFAULTS)


def test_the_program_alone_shows_its_commands_by_purpose():
    result = invoke()
    assert result.returncode == 2
    assert result.stdout == invoke("-h").stdout
    assert [line for line in result.stdout.splitlines() if line in GROUPS] == list(GROUPS)
    assert [name for names in GROUPS.values() for name in names] == list(COMMANDS)
    for name in COMMANDS:
        assert f"\n  {name:12} " in result.stdout
        assert f"\n{'':15}attnlens {name}" in result.stdout


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "reproduce"])
def test_examples_of_the_help_run(name, tmp_path):
    for file in ("report.json", "before.json", "after.json"):
        assert attnlens("inspect", "demo", "--json", file, "-q", cwd=tmp_path, **QUICK).returncode == 0
    small = QUICK | ({"ATTNLENS_LAYERS": "0"} if name in ("ranks", "heal") else {})
    for example in EXAMPLES[name]:
        # reports and plans already determine what is read
        quick = {} if ".json " in f"{example} " and name == "compare" else QUICK if "--ranks" in example else small
        result = attnlens(*shlex.split(example)[1:], cwd=tmp_path, **quick)
        assert result.returncode == 0, (example, result.stderr)
