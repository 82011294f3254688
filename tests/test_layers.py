"""Tests the house: imports descend, names and libraries stay in their rooms, files and functions stay short."""

import ast
import importlib
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from attnlens import kernels, registry

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "attnlens"
LAYERS = {
    "errors": 0,
    "choices": 0,
    "wording": 0,
    "files": 0,
    "addresses": 0,
    "unit_files": 0,
    "records": 0,
    "linalg": 0,
    "statistics": 0,
    "attsvm": 0,
    "ksvd": 0,
    "registry": 1,
    "architectures": 1,
    "atlas": 1,
    "arguments": 1,
    "engines": 1,
    "rules": 1,
    "requests": 2,
    "analyzers": 2,
    "kernels": 2,
    "attention": 2,
    "models": 3,
    "texts": 3,
    "hooks": 3,
    "tracer": 3,
    "weights": 3,
    "primal": 3,
    "kernel_transformers": 3,
    "experiments": 4,
    "run": 4,
    "studies": 4,
    "doctor": 4,
    "shapes": 5,
    "sentences": 5,
    "plots": 5,
    "sections": 5,
    "render": 5,
    "export": 5,
    "cli": 6,
    "__init__": 7,
    "pytest_plugin": 7,
    "__main__": 7,
}
WITHOUT_TORCH = (
    *("errors", "files", "records", "registry", "atlas", "analyzers", "kernels", "rules", "requests", "cli"),
    *("engines", "pytest_plugin"),
)
PLUGGED_IN = {"registry": {"analyzers"}, "records": {"export"}}
"""Rooms above that a room finds by name when they are first asked for: what it can't know, or must not load."""
HEAVY = {"torch", "transformers", "matplotlib"}
KNOWERS = {
    "transformers": {3, 4},
    "matplotlib": {5},
    "rich.table": {5},
    "jinja2": {5},
    "typer": {6},
    "ray": {1},
    "submitit": {1},
}
OWNERS = {"matplotlib": {"plots"}, "rich.table": {"render"}, "jinja2": {"render"}}
"""Rooms of those levels that a library belongs to; others name it for its types alone."""
KINDS = {"command", "swap", "experiments", "trajectories", "doctor"}
"""Fields that tell one kind of report from another."""
LONGEST_FUNCTION, LONGEST_FILE = 40, 300

FILES = sorted(PACKAGE.rglob("*.py"))
NAMES = [str(path.relative_to(PACKAGE)) for path in FILES]
each_file = pytest.mark.parametrize("path", FILES, ids=NAMES)


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def is_for_type_checkers(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def nodes(tree: ast.AST, everywhere: bool) -> Iterator[ast.AST]:
    """All nodes; or those that run when the module is imported."""
    for child in ast.iter_child_nodes(tree):
        later = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) or is_for_type_checkers(child)
        if everywhere or not later:
            yield child
            yield from nodes(child, everywhere)


@cache
def imported(source: str, everywhere: bool = True) -> set[str]:
    """Dotted names of what a file imports; `from a import b` is a.b, and so is a use of a.b after `import a`."""
    found = set()
    for node in nodes(ast.parse(source), everywhere):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name != "attnlens"}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the layer"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "attnlens":
            found.add(f"attnlens.{node.attr}")
    return found


def rooms(names: set[str]) -> set[str]:
    """The rooms among them; the package itself stands on top, but its version is everybody's."""
    parts = {name.split(".")[1] for name in names if name.startswith("attnlens.") and name != "attnlens.__version__"}
    return {part if part in LAYERS else "__init__" for part in parts}


def upward(source: str, room: str) -> set[str]:
    return {other for other in rooms(imported(source)) if LAYERS[other] > LAYERS[room]}


def found_by_name(source: str) -> set[str]:
    """The rooms that a file imports by their names in strings."""
    calls = [node for node in nodes(ast.parse(source), everywhere=True) if isinstance(node, ast.Call)]
    loads = [call for call in calls if ast.unparse(call.func).endswith("import_module")]
    return rooms({call.args[0].value for call in loads if isinstance(call.args[0], ast.Constant)})


def test_every_room_stands_on_a_layer_and_the_scan_sees_imports():
    assert {room_of(path) for path in FILES} <= set(LAYERS)
    assert len(FILES) > 20
    seen = rooms(imported((PACKAGE / "analyzers" / "symmetry.py").read_text()))
    assert seen == {"linalg", "records", "registry"}


@each_file
def test_imports_only_go_down(path):
    assert upward(path.read_text(), room_of(path)) == set()
    assert found_by_name(path.read_text()) <= PLUGGED_IN.get(room_of(path), set()) | {room_of(path)}


@pytest.mark.parametrize(
    "planted",
    [
        "from attnlens.cli import main",
        "from attnlens import run",
        "import attnlens.render.terminal",
        "def late():\n    from attnlens.hooks import watch",
        "import attnlens\nattnlens.inspect('demo')",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from attnlens.run import inspect",
    ],
)
def test_a_planted_upward_import_is_found(planted):
    assert upward(planted, "registry")
    assert not upward(planted, "__main__")


def test_a_room_that_is_found_by_name_is_seen():
    assert found_by_name("from importlib import import_module\nimport_module('attnlens.plots')") == {"plots"}


def test_rooms_of_one_layer_do_not_import_each_other_in_circles():
    graph = {room: set() for room in LAYERS}
    for path in FILES:
        graph[room_of(path)] |= rooms(imported(path.read_text())) - {room_of(path)}
    while leaves := {room for room, below in graph.items() if not below}:
        graph = {room: below - leaves for room, below in graph.items() if room not in leaves}
    assert graph == {}


def heavy(names: set[str]) -> set[str]:
    return {name.split(".")[0] for name in names} & HEAVY


def file_of(name: str) -> Path | None:
    """The file that `import name` runs, where it is one of ours; `a.b.c` may be a thing c in a.b."""
    parts = name.split(".")[1:]
    for end in (len(parts), len(parts) - 1):
        stem = PACKAGE.joinpath(*parts[:end])
        for path in (stem.with_suffix(".py"), stem / "__init__.py"):
            if end > 0 and path.is_file():
                return path
    return None


def run_by_importing(path: Path, seen: set[Path]) -> set[Path]:
    """The files of the package that importing one of them runs."""
    if path not in seen:
        seen.add(path)
        for name in imported(path.read_text(), everywhere=False):
            below = file_of(name) if name.startswith("attnlens.") else None
            if below is not None:
                run_by_importing(below, seen)
                if (below.parent / "__init__.py").is_file():
                    run_by_importing(below.parent / "__init__.py", seen)
    return seen


@pytest.mark.parametrize("room", [room for room in WITHOUT_TORCH if any(room_of(path) == room for path in FILES)])
def test_rooms_that_answer_at_once_import_nothing_heavy(room):
    for path in (path for path in FILES if room_of(path) == room):
        for below in run_by_importing(path, set()):
            assert heavy(imported(below.read_text(), everywhere=False)) == set(), f"{path.name} runs {below}"


def test_a_planted_heavy_import_is_found_and_a_late_one_is_not():
    assert heavy(imported("import torch.nn", everywhere=False)) == {"torch"}
    assert heavy(imported("try:\n    from torch import Tensor\nexcept ImportError: ...", everywhere=False)) == {"torch"}
    assert heavy(imported("def f():\n    import torch", everywhere=False)) == set()
    assert heavy(imported("if TYPE_CHECKING:\n    import torch", everywhere=False)) == set()
    runs = run_by_importing(PACKAGE / "linalg" / "__init__.py", set())
    assert any(heavy(imported(path.read_text(), everywhere=False)) for path in runs)


@pytest.mark.parametrize("library", KNOWERS)
def test_each_library_is_known_where_it_belongs(library):
    knowers = {
        name
        for path, name in zip(FILES, NAMES, strict=True)
        if any(f"{other}.".startswith(f"{library}.") for other in imported(path.read_text()))
        if LAYERS[room_of(path)] not in KNOWERS[library]
    }
    assert knowers == set()


@pytest.mark.parametrize("library", OWNERS)
def test_each_library_has_one_room(library):
    users = {
        room_of(path)
        for path in FILES
        if any(f"{other}.".startswith(f"{library}.") for other in imported(path.read_text(), everywhere=False))
    }
    assert users == OWNERS[library]


def test_one_file_draws_maps_of_layers_by_heads():
    assert [name for path, name in zip(FILES, NAMES, strict=True) if ".imshow(" in path.read_text()] == [
        "plots/heatmap.py"
    ]


def kinds_asked(source: str) -> set[str]:
    """The fields of a report that conditions read to tell which kind it is."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        tests = [node.test] if isinstance(node, ast.If | ast.IfExp | ast.While) else []
        tests += [test for loop in getattr(node, "generators", []) for test in loop.ifs]
        for test in tests:
            found |= {
                part.attr
                for part in ast.walk(test)
                if isinstance(part, ast.Attribute) and part.attr in KINDS and ast.unparse(part.value).endswith("report")
            }
    return found


@pytest.mark.parametrize("room", ["plots", "sentences", "render", "export", "cli", "shapes"])
def test_no_room_but_sections_asks_what_kind_of_report_it_is(room):
    asked = {
        name: kinds_asked(path.read_text()) for path, name in zip(FILES, NAMES, strict=True) if room_of(path) == room
    }
    assert {name: found for name, found in asked.items() if found} == {}


def test_a_planted_question_about_the_kind_is_found():
    assert kinds_asked("if report.swap is not None: ...") == {"swap"}
    assert kinds_asked("x = 1 if self.report.experiments else 2") == {"experiments"}
    assert kinds_asked("for e in report.experiments: ...") == set()
    assert kinds_asked((PACKAGE / "sections" / "kinds.py").read_text())


OTHER_MEANINGS = {
    "plots/experiments/steps.py": {"linear"},  # axes
    "plots/heatmap.py": {"nearest"},  # how pixels are drawn
    "records/windows.py": {"window"},  # of text, as below
    "run/compare/saved.py": {"window"},
    "sections/documents.py": {"window"},
    "sections/swaps/summary.py": {"window"},
    "sentences/population.py": {"window"},
    "sections/reference/explanations.py": {"features"},  # of a kernel, as below
    "sections/reference/lists.py": {"features"},
    "requests/training.py": {"rank", "exponential", "linear", "relu"},  # experiments, losses, heads
    "run/swap/ranks/search.py": {"rank"},  # a parameter
    "requests/run_options.py": {"selection"},  # what --show can say, which a type must spell out
}
"""Words that are the names of kernels and analyzers, and mean something else there."""
NAMELESS = (
    "attention",
    "cli",
    "export",
    "hooks",
    "plots",
    "records",
    "render",
    "requests",
    "run",
    "sections",
    "sentences",
)


def names_in(source: str) -> set[str]:
    """Names of kernels, ties, filters and analyzers among the strings of a file."""
    known = {found.name for found in registry.every_analyzer()} | {*kernels.kernels(), *kernels.TIES, *kernels.FILTERS}
    return {
        node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant) and node.value in known
    }


@pytest.mark.parametrize("room", NAMELESS)
def test_no_room_but_their_own_names_a_kernel_or_an_analyzer(room):
    named = {
        name: found
        for path, name in zip(FILES, NAMES, strict=True)
        if room_of(path) == room
        if (found := names_in(path.read_text()) - OTHER_MEANINGS.get(name, set()))
    }
    assert named == {}


def test_a_planted_name_of_a_kernel_is_found():
    assert names_in("if kernel.info.name == 'rbf': ...") == {"rbf"}
    assert names_in("words = 'the RBF kernel'") == set()


@each_file
def test_files_and_functions_fit_on_their_screens(path):
    source = path.read_text()
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    lengths = {node.name: (node.end_lineno or 0) - node.lineno + 1 for node in functions}
    assert {name: length for name, length in lengths.items() if length > LONGEST_FUNCTION} == {}
    assert len(source.splitlines()) <= LONGEST_FILE


def test_folders_have_at_most_fourteen_files():
    counts = Counter(path.parent for path in FILES if path.name != "__init__.py")
    assert {str(folder): count for folder, count in counts.items() if count > 14} == {}


OTHERS = sorted(file for room in ("tests", "benchmarks", "training") for file in (ROOT / room).glob("*.py"))


@pytest.mark.parametrize("path", [*FILES, *OTHERS], ids=lambda path: str(path.relative_to(ROOT)))
def test_every_file_says_in_its_first_line_what_it_does(path):
    first = (ast.get_docstring(ast.parse(path.read_text())) or "").splitlines()[0]
    assert len(first.split()) >= 4
    assert "?" not in first, "a statement, and no question"


def test_third_party_imports_are_declared_dependencies():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {re.match(r"[\w-]+", line)[0].replace("-", "_") for line in project["dependencies"]}
    extras = [
        line for extra in ("study", "datasets", "slurm", "ray") for line in project["optional-dependencies"][extra]
    ]
    study = {re.match(r"[\w-]+", line)[0] for line in extras}
    names = {name.split(".")[0] for path in FILES for name in imported(path.read_text())}
    declared |= {"PIL"} if "pillow" in declared else set()
    types_alone = {"jaxtyping", "pandas"}  # but for to_dataframe, which imports pandas when it is called
    brought = {"PIL", "pytest"}  # by matplotlib; by who runs the tests that use the plugin
    assert names - set(sys.stdlib_module_names) - {"attnlens"} <= declared | study | types_alone | brought
    at_import = {name.split(".")[0] for path in FILES for name in imported(path.read_text(), everywhere=False)}
    assert not at_import & (types_alone | study - {"attnlens"})


def defined(source: str) -> list[str]:
    """The names of the classes that a file defines."""
    return [node.name for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)]


def aliases(source: str) -> set[str]:
    """The names of the types that a file gives another type."""
    targets = [node.targets[0] for node in nodes(ast.parse(source), everywhere=True) if isinstance(node, ast.Assign)]
    return {target.id for target in targets if isinstance(target, ast.Name) and re.match("[A-Z][a-z]", target.id)}


def taken() -> set[str]:
    """Names of the types that are built in, or in a module of the standard library that the package uses."""
    used = {name.partition(".")[0] for path in FILES for name in imported(path.read_text())}
    modules = ["builtins", *(used & set(sys.stdlib_module_names)), "collections.abc", "concurrent.futures"]
    every = [value for module in modules for value in vars(importlib.import_module(module)).values()]
    return {value.__name__ for value in every if isinstance(value, type)}


def test_no_two_classes_have_one_name():
    homes: dict[str, list[str]] = {}
    for path, name in zip(FILES, NAMES, strict=True):
        for found in defined(path.read_text()):
            homes.setdefault(found, []).append(name)
    assert {name: files for name, files in homes.items() if len(files) > 1} == {}
    # an alias may stand in several files for one thing; in cli/ it is an option, as it is typed
    others = {path: aliases(path.read_text()) & set(homes) for path in FILES if room_of(path) != "cli"}
    assert {str(path): found for path, found in others.items() if found} == {}


def test_no_class_has_the_name_of_a_type_of_the_standard_library():
    assert {"Path", "Counter", "Thread", "Filter", "ValueError"} <= taken()
    assert {name for path in FILES for name in defined(path.read_text())} & taken() == set()


def test_a_planted_class_or_alias_is_seen():
    assert defined("class A: ...\ndef f():\n    class B: ...") == ["A", "B"]
    assert aliases("Form = Literal['a']\nSIZE = 3\nif TYPE_CHECKING:\n    Key = Float[Tensor, 'd']") == {"Form", "Key"}
