"""Tests light starts, declared dependencies, and that one package only asks for the kind of a report."""

import ast
import re
import subprocess
import sys
import tomllib
from itertools import chain
from pathlib import Path

from program import environment_with

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "attnlens"
FILES = sorted(PACKAGE.rglob("*.py"))
LIGHT = ("analyzers", "checks", "errors", "files", "records", "report.atlas", "requests")
LIGHT += ("cli.commands", "cli.entry", *(f"kernels.{path.stem}" for path in PACKAGE.glob("kernels/*.py")))
"""Modules and packages that the commands import before they answer `--help`, `list` or a usage error."""
SHOWING = ("pictures", "render", "shapes.py")
"""Parts of report/ that do not ask for a report's kind."""
KINDS = {"command", "swap", "experiments", "trajectories", "doctor"}
"""Fields that tell one kind of report from another."""


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
    program = [sys.executable, "-c", AFRESH.format(light=", ".join(light))]
    run = subprocess.run(program, env=environment_with(), capture_output=True, text=True, check=False)
    assert run.stdout.split() == ["kernel", "analyzer", "MeasureInfo", "KernelParameter", "dual", "build"], run.stderr
    assert run.stderr.splitlines()[-1].startswith("ModuleNotFoundError: import of transformers"), "analyses preload it"


def kinds_asked(source: str) -> set[str]:
    """Return the fields of a report that conditions read to tell which kind it is."""
    nodes = list(ast.walk(ast.parse(source)))
    tests = [node.test for node in nodes if isinstance(node, ast.If | ast.IfExp | ast.While)]
    tests += [test for node in nodes for loop in getattr(node, "generators", []) for test in loop.ifs]
    read = [part for test in tests for part in ast.walk(test) if isinstance(part, ast.Attribute)]
    return {part.attr for part in read if part.attr in KINDS and ast.unparse(part.value).endswith("report")}


def test_only_sections_asks_what_kind_of_report_it_has():
    tables = PACKAGE / "report" / "pictures" / "__init__.py"  # its table names the pictures of each kind
    for package in ("cli", *(f"report/{name}" for name in SHOWING)):
        files = [path for path in FILES if (PACKAGE / package) in (path, *path.parents)]
        assert files
        assert {path.name: kinds_asked(path.read_text()) for path in files if kinds_asked(path.read_text())} == {}
        assert not [path for path in files if path != tables and "report.kind" in path.read_text()]
    assert "report.kind" in (PACKAGE / "report" / "export.py").read_text(), "the control"
    assert kinds_asked("if report.swap: pass") == {"swap"}, "the control"


def imported_libraries(source: str) -> set[str]:
    """Return the top-level names of what a file imports."""
    nodes = list(ast.walk(ast.parse(source)))
    whole = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return {name.split(".")[0] for name in whole | {node.module for node in nodes if isinstance(node, ast.ImportFrom)}}


def test_third_party_imports_are_declared_dependencies():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *chain(*project["optional-dependencies"].values())]
    declared = {re.match(r"[\w-]+", line)[0].replace("-", "_") for line in lines}
    declared |= {"PIL", "upath"}  # what pillow and universal-pathlib are imported as
    imported = set().union(*(imported_libraries(path.read_text()) for path in FILES))
    assert imported - set(sys.stdlib_module_names) - {"attnlens"} <= declared
