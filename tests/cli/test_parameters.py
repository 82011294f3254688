"""Tests that options come from files and the environment as from the command line."""

import json
import re
from typing import get_args

from program import invoke

from attnlens.cli.commands import app
from attnlens.cli.parameters import kinds

ONE = ("inspect", "demo", "--source", "tokens", "--analyzer", "spectrum", "--windows", "2", "--json", "-", "-q")


def test_options_come_from_the_environment_and_from_a_file(tmp_path):
    cases = [  # attnlens.toml, environment, command line, settings
        ('layers = "2"\nno-pack = true', {}, (), {"layers": [2], "length": 16, "pack": False}),
        ('layers = "2"\npack = false', {"ATTNLENS_LAYERS": "1"}, (), {"layers": [1], "pack": False}),
        (
            'layers = "2"\npack = false',
            {"ATTNLENS_LAYERS": "1", "ATTNLENS_PACK": "yes"},
            ("--layers", "0"),
            {"layers": [0], "pack": True},
        ),
        ('analyzer = "entropy"', {"ATTNLENS_PACK": "0"}, (), {"pack": False, "analyzers": ["spectrum"]}),
        ("", {"ATTNLENS_PACK": "0", "ATTNLENS_TEXT": "a b.txt"}, ("--pack",), {"pack": True, "text": "a b.txt"}),
        ("", {"ATTNLENS_TEXT": "a b.txt:c.txt"}, (), {"pack": True, "text": "a b.txt + c.txt"}),
    ]
    for name, animal in (("a b.txt", "cat"), ("c.txt", "dog")):
        (tmp_path / name).write_text(f"The {animal} sat on the mat and looked. " * 40)
    for defaults, environment, words, expected in cases:
        (tmp_path / "attnlens.toml").write_text(f"{defaults}\nlength = 16")
        small = () if "layers" in defaults else ("--layers", "0")
        result = invoke(*ONE, *small, *words, cwd=tmp_path, **environment)
        assert result.returncode == 0, result.stderr
        settings = json.loads(result.stdout)["settings"]
        settings["text"] = settings["text"]["name"]
        assert {name: settings[name] for name in expected} == expected, (defaults, environment, words)
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


def test_a_shell_completes_the_names_of_kernels_analyzers_and_measures():
    for line, expected in (
        ("swap-kernel demo --kernel rb", ["rbf"]),
        ("swap-kernel demo --kernel rbf+symm", ["rbf+symmetric"]),
        ("heal demo --kernel rbf+wind", ["rbf+window"]),
        ("inspect --analyzer spec", ["spectrum"]),
        ("explain tokens.share_n", ["tokens.share_negative"]),
        ("explain rb", ["rbf"]),
        ("list k", ["kernels"]),
    ):
        shell = {"COMP_WORDS": f"attnlens {line}", "COMP_CWORD": str(len(line.split()))}
        result = invoke(_ATTNLENS_COMPLETE="complete_bash", **shell)
        assert (result.returncode, result.stdout.split()) == (0, expected), line
