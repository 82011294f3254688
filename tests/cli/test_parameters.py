"""Tests that options come from files and the environment as from the command line, and wrong ones are named."""

import json
import re
from typing import get_args

import pytest
from program import attnlens, refused, without_torch

from attnlens.cli.commands import app
from attnlens.cli.parameters import kinds

ONE = ("inspect", "demo", "--source", "tokens", "--layers", "0", "--json", "-", "-q")


def settings(*words, **more):
    result = attnlens(*words, **more)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)["settings"]


def test_options_come_from_the_environment_and_from_a_file(tmp_path):
    (tmp_path / "attnlens.toml").write_text('layers = "2"\nwindows = 3\nlength = 16\n')
    words = ("inspect", "demo", "--json", "-", "--no-progress")
    found = settings(*words, cwd=tmp_path)
    assert (found["layers"], found["windows"], found["length"]) == ([2], 3, 16)
    found = settings(*words, cwd=tmp_path, ATTNLENS_LAYERS="1")
    assert found["layers"] == [1]
    found = settings(*words, "--layers", "0", cwd=tmp_path, ATTNLENS_LAYERS="1")
    assert found["layers"] == [0]


@pytest.mark.parametrize("key", ["trust_remote_code", "allow-pickle"])
def test_a_file_may_not_switch_on_what_is_dangerous(tmp_path, key):
    (tmp_path / "attnlens.toml").write_text(f"{key} = true\n")
    refused(attnlens("inspect", "demo", cwd=tmp_path), key)


def test_an_unknown_option_in_a_file_is_named(tmp_path):
    (tmp_path / "attnlens.toml").write_text('layrs = "2"\n')
    refused(attnlens("inspect", "demo", cwd=tmp_path), "layrs", "Did you mean 'layers'")


def test_broken_configuration_file(tmp_path):
    (tmp_path / "attnlens.toml").write_text("layers = [")
    refused(attnlens("inspect", "demo", cwd=tmp_path), "TOML")


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("layers = [1]", "layers must be a string in quotes"),
        ('length = "x"', "length must be a whole number"),
        ("windows = true", "windows must be a whole number"),
        ('no-pack = "x"', "no-pack must be true or false"),
        ("analyzer = [5]", "analyzer must be a string in quotes, or a list of such values"),
        ("placement = 5", "placement must be a string in quotes"),
        ("seed = -1", "--seed"),
    ],
)
def test_a_value_of_the_wrong_type_is_named(tmp_path, line, word):
    (tmp_path / "attnlens.toml").write_text(f"{line}\n")
    refused(without_torch("inspect", "demo", cwd=tmp_path), word)


@pytest.mark.parametrize("content", ["tool = 5", "[tool]\nattnlens = 5"])
def test_a_project_file_without_tables_is_named(tmp_path, content):
    (tmp_path / "pyproject.toml").write_text(content)
    refused(without_torch("inspect", "demo", cwd=tmp_path), "pyproject.toml", "must be a table")


@pytest.mark.parametrize(
    ("line", "environment", "words", "pack"),
    [
        ("", {}, (), True),
        ("", {"ATTNLENS_NO_PACK": "1"}, (), False),
        ("", {"ATTNLENS_NO_PACK": "0"}, (), True),
        ("", {"ATTNLENS_PACK": "0"}, (), False),
        ("", {"ATTNLENS_NO_PACK": "1"}, ("--pack",), True),
        ("no-pack = true", {}, (), False),
        ("pack = false", {}, (), False),
        ("pack = false", {"ATTNLENS_NO_PACK": "no"}, (), True),
    ],
)
def test_both_spellings_of_a_switch_are_heard(tmp_path, line, environment, words, pack):
    (tmp_path / "attnlens.toml").write_text(line)
    assert settings(*ONE, *words, cwd=tmp_path, **environment)["pack"] is pack


def test_a_switch_that_is_neither_yes_nor_no():
    refused(attnlens("inspect", ATTNLENS_NO_PACK="perhaps"), "ATTNLENS_NO_PACK")
    refused(attnlens("inspect", ATTNLENS_PACK="perhaps"), "ATTNLENS_PACK")


def test_texts_from_the_environment_are_cut_as_PATH_is(tmp_path):  # noqa: N802
    for name, animal in (("a b.txt", "cat"), ("c.txt", "dog")):
        (tmp_path / name).write_text(f"The {animal} sat on the mat and looked. " * 40)
    assert settings(*ONE, cwd=tmp_path, ATTNLENS_TEXT="a b.txt")["text"]["name"] == "a b.txt"
    assert settings(*ONE, cwd=tmp_path, ATTNLENS_TEXT="a b.txt:c.txt")["text"]["name"] == "a b.txt + c.txt"
    (tmp_path / "attnlens.toml").write_text('analyzer = "spectrum"\n')
    assert settings("inspect", "demo", "--source", "weights", "--json", "-", "-q", cwd=tmp_path)["analyzers"] == [
        "spectrum"
    ]


def test_what_names_a_file_or_a_model_is_marked_as_said_in_a_call_alone():
    """A file of defaults may lie beside a stranger's model, so that a new option of that kind must not be forgotten."""
    known = kinds(command.callback for command in app.registered_commands)
    declared = {name: get_args(kind)[1] for name, kind in known.items()}
    files = {name for name, found in declared.items() if re.search("FILE|DIR|REVISION", found.metavar or "")}
    assert {"json", "save", "ranks", "text", "adapter"} <= files
    assert {name for name in files if not getattr(declared[name], "call_only", "an argument")} == set()
