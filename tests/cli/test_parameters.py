"""Tests that options come from files and the environment as from the command line."""

import json
import re
from typing import get_args

from program import invoke

from attnlens.cli.commands import app
from attnlens.cli.parameters import kinds

ONE = ("inspect", "demo", "--source", "tokens", "--analyzer", "spectrum", "--windows", "2", "--json", "-", "-q")


def test_options_come_from_the_environment_and_from_a_file(tmp_path):
    cases = [  # attnlens.toml, environment, command line, setting, value
        ('layers = "2"\nlength = 16', {}, (), "layers", [2]),
        ('layers = "2"\nlength = 16', {}, (), "length", 16),
        ('layers = "2"\nlength = 16', {"ATTNLENS_LAYERS": "1"}, (), "layers", [1]),
        ('layers = "2"\nlength = 16', {"ATTNLENS_LAYERS": "1"}, ("--layers", "0"), "layers", [0]),
        ("", {}, (), "pack", True),
        ("", {"ATTNLENS_PACK": "0"}, (), "pack", False),
        ("", {"ATTNLENS_PACK": "0"}, ("--pack",), "pack", True),
        ("no-pack = true", {}, (), "pack", False),
        ("pack = false", {}, (), "pack", False),
        ("pack = false", {"ATTNLENS_PACK": "yes"}, (), "pack", True),
        ('analyzer = "entropy"', {}, (), "analyzers", ["spectrum"]),
        ("", {"ATTNLENS_TEXT": "a b.txt"}, (), "text", "a b.txt"),
        ("", {"ATTNLENS_TEXT": "a b.txt:c.txt"}, (), "text", "a b.txt + c.txt"),
    ]
    for name, animal in (("a b.txt", "cat"), ("c.txt", "dog")):
        (tmp_path / name).write_text(f"The {animal} sat on the mat and looked. " * 40)
    for defaults, environment, words, name, value in cases:
        (tmp_path / "attnlens.toml").write_text(defaults)
        small = () if "length" in defaults else ("--length", "16", *(() if "layers" in defaults else ("--layers", "0")))
        result = invoke(*ONE, *small, *words, cwd=tmp_path, **environment)
        assert result.returncode == 0, result.stderr
        setting = json.loads(result.stdout)["settings"][name]
        assert (setting["name"] if name == "text" else setting) == value, (defaults, environment, words)
    (tmp_path / "attnlens.toml").write_text('analyzer = "spectrum"\n')
    weights = invoke("inspect", "demo", "--source", "weights", "--json", "-", "-q", cwd=tmp_path)
    assert json.loads(weights.stdout)["settings"]["analyzers"] == ["spectrum"], "a list of one, without brackets"


def test_options_that_name_a_file_or_a_model_are_marked_for_the_command_line_alone():
    """A file of defaults may lie beside a stranger's model, so that a new option of that kind must not be forgotten."""
    options = kinds(command.callback for command in app.registered_commands)
    declared = {name: get_args(kind)[1] for name, kind in options.items()}
    files = {name for name, option in declared.items() if re.search("FILE|DIR|REVISION", option.metavar or "")}
    assert {"json", "save", "ranks", "text", "adapter"} <= files
    assert {name for name in files if not getattr(declared[name], "call_only", "an argument")} == set()
