"""Tests the wheel: built twice it is the same file, and it holds the package with its data and nothing else."""

import hashlib
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.pyc")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """What the wheel is made from, in another folder, with other dates, and with what must not come in."""
    folder = tmp_path_factory.mktemp("elsewhere")
    shutil.copytree(ROOT / "attnlens", folder / "attnlens", ignore=LEFT_OUT, copy_function=shutil.copyfile)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copyfile(ROOT / name, folder / name)
    (folder / "tests").mkdir()
    (folder / "tests" / "test_stray.py").write_text("")
    return folder


def built(source, folder, **environment):
    """The wheel of the project in `source`."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    done = subprocess.run(command, cwd=source, env=os.environ | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = Path(folder).glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory):
    return built(source, tmp_path_factory.mktemp("first"))


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_the_same_source_makes_the_same_wheel_wherever_and_whenever(wheel, source, tmp_path):
    for path in source.rglob("*"):
        os.utime(path, (1, 2_000_000_000))
    assert digest(built(source, tmp_path / "second")) == digest(wheel)
    (source / "attnlens" / "py.typed").write_text("\n")
    try:
        assert digest(built(source, tmp_path / "third")) != digest(wheel), "a control: another file, another wheel"
    finally:
        shutil.copyfile(ROOT / "attnlens" / "py.typed", source / "attnlens" / "py.typed")


def test_the_wheel_holds_every_file_of_the_package_and_nothing_else(wheel):
    package = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "attnlens").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    held = set(zipfile.ZipFile(wheel).namelist())
    facts = {name for name in held if ".dist-info/" in name}
    assert held - facts == package
    assert {Path(name).name for name in facts} == {"METADATA", "WHEEL", "entry_points.txt", "LICENSE", "RECORD"}


def test_what_is_no_code_is_in_the_wheel(wheel):
    held = set(zipfile.ZipFile(wheel).namelist())
    pages = {f"attnlens/report/render/page/{name}" for name in ("page.css", "page.html.jinja", "data.js", "start.js")}
    data = {"records/architectures.csv", "models/demo/model.safetensors", "models/demo/text.txt", "py.typed"}
    data |= {"schema.json", "report/atlas.json", "lab/experiments/golden.json"}
    assert pages | {f"attnlens/{name}" for name in data} <= held


def test_the_wheel_says_what_the_project_says(wheel):
    archive = zipfile.ZipFile(wheel)
    text = {Path(name).name: archive.read(name) for name in archive.namelist() if ".dist-info/" in name}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    entries = text["entry_points.txt"].decode()
    assert f"[console_scripts]\nattnlens = {project['scripts']['attnlens']}" in entries
    assert f"[pytest11]\nattnlens = {project['entry-points']['pytest11']['attnlens']}" in entries
    metadata = message_from_bytes(text["METADATA"])
    assert metadata["Name"] == "attnlens"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata.get_all("Requires-Dist")[: len(project["dependencies"])]
