"""Tests that commands start without heavy libraries, and that all imported libraries are declared."""

import ast
import re
import sys
import tomllib
from itertools import chain
from pathlib import Path

from program import captured, environment_with

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "attnlens"
FILES = sorted(PACKAGE.rglob("*.py"))
LIGHT = ("analyzers", "checks", "errors", "files", "records", "report.atlas", "requests")
LIGHT += ("cli.commands", "cli.entry", *(f"kernels.{path.stem}" for path in PACKAGE.glob("kernels/*.py")))
"""Modules and packages that the commands import before they answer `--help`, `list` or a usage error."""


AFRESH = """
import sys
import attnlens
def loaded():
    return {{"torch", "transformers", "matplotlib", "matplotlib.pyplot"}} & {{*sys.modules}}
print(*(one.__name__ for one in (attnlens.kernel, attnlens.analyzer, attnlens.MeasureInfo, attnlens.KernelParameter)))
import {light}
assert not loaded()
print(attnlens.maths.ksvd.dual.__name__, attnlens.lab.primal.build.__name__)
assert loaded() == {{"torch"}}
import attnlens.report.pictures
assert loaded() == {{"torch", "matplotlib"}}
sys.modules["transformers"] = None
import attnlens.cli.analyses
"""


def test_names_are_lazy_and_commands_answer_without_loading_a_heavy_library():
    """A new interpreter imports what plug-ins and commands need, the maths, the pictures, and then the analyses."""
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in FILES]
    names = [name.removesuffix(".__init__") for name in names]
    light = [name for name in names if any(f"{name}.".startswith(f"attnlens.{each}.") for each in LIGHT)]
    assert len(light) > 40
    run = captured([sys.executable, "-c", AFRESH.format(light=", ".join(light))], None, environment_with())
    assert run.stdout.split() == ["kernel", "analyzer", "MeasureInfo", "KernelParameter", "dual", "build"], run.stderr
    assert run.stderr.splitlines()[-1].startswith("ModuleNotFoundError: import of transformers"), "analyses preload it"


def test_third_party_imports_are_declared_dependencies():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *chain(*project["optional-dependencies"].values())]
    declared = {re.match(r"[\w-]+", line)[0].replace("-", "_") for line in lines}
    declared |= {"PIL", "upath"}  # what pillow and universal-pathlib are imported as
    nodes = [node for path in FILES for node in ast.walk(ast.parse(path.read_text()))]
    imported = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    assert {name.split(".")[0] for name in imported} - set(sys.stdlib_module_names) - {"attnlens"} <= declared
