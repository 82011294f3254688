"""Tests the wheel: built twice it is the same file, and it holds the package with its data and nothing else."""

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


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """The sources of the wheel in another folder, and a file that must not come in."""
    folder = tmp_path_factory.mktemp("elsewhere")
    cached = shutil.ignore_patterns("__pycache__", "*.pyc")
    shutil.copytree(ROOT / "attnlens", folder / "attnlens", ignore=cached, copy_function=shutil.copyfile)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copyfile(ROOT / name, folder / name)
    (folder / "tests").mkdir()
    (folder / "tests" / "test_stray.py").write_text("")
    return folder


def build(source, folder):
    """Build the wheel of the project in `source`."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = Path(folder).glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory):
    return build(source, tmp_path_factory.mktemp("first"))


@pytest.mark.full
def test_the_same_source_makes_the_same_wheel_wherever_and_whenever(wheel, source, tmp_path):
    for path in source.rglob("*"):
        os.utime(path, (1, 2_000_000_000))
    assert build(source, tmp_path / "second").read_bytes() == wheel.read_bytes()
    (source / "attnlens" / "py.typed").write_text("\n")
    try:
        assert build(source, tmp_path / "third").read_bytes() != wheel.read_bytes(), "the control"
    finally:
        shutil.copyfile(ROOT / "attnlens" / "py.typed", source / "attnlens" / "py.typed")


def test_the_wheel_contains_the_package_its_data_and_its_metadata(wheel):
    archive = zipfile.ZipFile(wheel)
    paths = [path for path in (ROOT / "attnlens").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    contents = set(archive.namelist())
    facts = {name for name in contents if ".dist-info/" in name}
    assert contents - facts == {str(path.relative_to(ROOT)) for path in paths}
    assert {Path(name).name for name in facts} == {"METADATA", "WHEEL", "entry_points.txt", "LICENSE", "RECORD"}
    page = {f"report/render/page/{name}" for name in ("page.css", "page.html.jinja", "data.js", "start.js")}
    data = {"records/architectures.csv", "models/demo/model.safetensors", "models/demo/text.txt", "py.typed"}
    data |= {"schema.json", "report/atlas.json", "lab/experiments/golden.json"}
    assert {f"attnlens/{name}" for name in page | data} <= contents
    text = {Path(name).name: archive.read(name) for name in facts}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert b"[console_scripts]\nattnlens = attnlens.cli:main" in text["entry_points.txt"]
    assert b"[pytest11]\nattnlens = attnlens.checks.pytest_plugin" in text["entry_points.txt"]
    metadata = message_from_bytes(text["METADATA"])
    fields = [metadata[name] for name in ("Name", "License-Expression", "Description-Content-Type")]
    assert fields == ["attnlens", "Apache-2.0", "text/markdown"]
    assert metadata.get_all("Requires-Dist")[: len(project["dependencies"])]
