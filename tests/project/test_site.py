"""Tests that the site contains every page, measure, kernel and command, and notebooks that show what they compute."""

import importlib.util
import json
import re
from pathlib import Path

import notebooks
import pytest
from views import absent

import attnlens
from attnlens.analyzers import registry
from attnlens.analyzers.registry import DISTANCES
from attnlens.kernels import FILTERS, HYBRIDS, TIES, kernels

ROOT = Path(__file__).parents[2]
SITE = ROOT / "docs" / "site"
COMMANDS = {"inspect", "compare", "swap-kernel", "ranks", "heal", "converge", "check", "doctor", "reproduce", "report"}
COMMANDS |= {"list", "explain"}
SPEC = importlib.util.spec_from_file_location("pages", SITE / "pages.py")
PAGES = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(PAGES)
EXAMPLES = pytest.mark.parametrize("path", sorted(ROOT.glob("examples/*.ipynb")), ids=lambda path: path.stem)
NAMED = {
    line
    for tree in re.findall(r"```{toctree}\n(.*?)```", (SITE / "navigation.md").read_text(), re.DOTALL)
    for line in tree.splitlines()
    if line and not line.startswith(":")
}


@pytest.fixture(scope="module")
def reference():
    return PAGES.build_reference()


def test_the_navigation_names_every_page_once_and_no_other(reference):
    pages = {f"docs/{path.stem}" for path in (ROOT / "docs").glob("*.md")}
    assert pages - NAMED == set(), "add it to docs/site/navigation.md"
    lines = (SITE / "navigation.md").read_text().splitlines()
    assert all(lines.count(page) == 1 for page in NAMED)
    files = (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*.ipynb"))
    pages = {str(path.relative_to(ROOT).with_suffix("")) for path in files}
    written = {page for page in NAMED if page.startswith("reference/")}
    assert NAMED - pages == written
    assert {f"{page.removeprefix('reference/')}.md" for page in written} <= set(reference)


def test_each_measure_kernel_command_and_public_name_has_its_page(reference):
    shelves = {
        "measures": {*registry.measure_infos(), *(info.name for info in DISTANCES)},
        "kernels": {*kernels(), *TIES, *FILTERS, *HYBRIDS},
        "commands": set(PAGES.find_commands()) | COMMANDS,
    }
    for shelf, names in shelves.items():
        written = {name.removeprefix(f"{shelf}/").removesuffix(".md") for name in reference if name.startswith(shelf)}
        assert written == {*names, "index"}
        for name in names:
            page = reference[f"{shelf}/{name}.md"]
            assert page.startswith(f"# {name}\n\n")
            assert len(page) > 100
            assert not absent(reference[f"{shelf}/index.md"], f"({name}.md)", f"\n{name}\n")
    for name, command in PAGES.find_commands().items():
        words = {word for option in command.params if option.param_type_name == "option" for word in option.opts}
        assert not absent(reference[f"commands/{name}.md"], *(f"`{word}`" for word in words)), name
    assert "attnlens explain NAME" in reference["commands/explain.md"]
    assert "[tokens.share_key](tokens.share_key.md)" in reference["measures/tokens.share_skew.md"]
    for name, text in reference.items():
        for target in re.findall(r"\]\(([^)]+\.md)\)", text) if name.startswith("measures/") else ():
            assert f"measures/{target}" in reference
    public = [name for name in attnlens.__all__ if callable(getattr(attnlens, name))]
    assert not absent(reference["api.md"], *(f":: attnlens.{name}\n" for name in public))


def test_markup_is_escaped_except_code_and_sources_are_those_of_the_repository(reference, tmp_path):
    written = PAGES._escape_marked("a <b> | *c* `d|e` `f`, `g")
    assert written == r"a &#60;b&#62; &#124; &#42;c&#42; `d\|e` `f`, &#96;g"
    PAGES.write_sources(tmp_path)
    for path in (ROOT / "docs").glob("*.[mp]*"):
        assert (tmp_path / "docs" / path.name).read_bytes() == path.read_bytes()
    index = (tmp_path / "index.md").read_text()
    assert index.startswith((ROOT / "README.md").read_text())
    written = {str(path.relative_to(tmp_path / "reference")) for path in (tmp_path / "reference").rglob("*.md")}
    assert written == set(reference)


@pytest.mark.full
@EXAMPLES
def test_every_cell_runs_and_shows_the_stored_text(path):
    stored = [notebooks.texts(cell["outputs"]) for cell in notebooks.read_cells(path)]
    assert [notebooks.texts(outputs) for outputs in notebooks.execute(path)] == stored


def test_a_cell_shows_its_last_value_and_a_failing_cell_is_noticed(tmp_path):
    cells = [{"cell_type": "code", "source": ["x = 1\n", "print(x)\n", "x + 1"]}]
    (tmp_path / "a.ipynb").write_text(json.dumps({"cells": cells}))
    assert [notebooks.texts(outputs) for outputs in notebooks.execute(tmp_path / "a.ipynb")] == [["1\n", "2"]]
    cells.append({"cell_type": "code", "source": ["1 / 0"]})
    (tmp_path / "a.ipynb").write_text(json.dumps({"cells": cells}))
    with pytest.raises(ZeroDivisionError):
        notebooks.execute(tmp_path / "a.ipynb")


@EXAMPLES
def test_notebooks_are_small_and_name_no_path_and_become_pages(path):
    text = path.read_text(encoding="utf-8")
    assert len(text) < 300_000
    assert not any(part in text for part in ("/home/", "/root/", "tmp/", str(ROOT)))
    written = PAGES.convert_notebook(path)
    page = written[f"{path.stem}.md"].decode()
    assert page.startswith("# ")
    assert len(written) == 1 + page.count("![") > 1
