"""The site's sources name every page of docs/, and hold one for every measure, kernel and command."""

import importlib.util
import re
from pathlib import Path

import pytest

import attnlens
from attnlens.analyzers import registry
from attnlens.analyzers.registry import DISTANCES
from attnlens.kernels import FILTERS, HYBRIDS, TIES, kernels

ROOT = Path(__file__).parents[2]
SITE = ROOT / "docs" / "site"
COMMANDS = {
    "inspect",
    "compare",
    "swap-kernel",
    "ranks",
    "heal",
    "converge",
    "check",
    "doctor",
    "reproduce",
    "report",
    "list",
    "explain",
}


def module():
    spec = importlib.util.spec_from_file_location("pages", SITE / "pages.py")
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


PAGES = module()
NAMED = {
    line
    for tree in re.findall(r"```{toctree}\n(.*?)```", (SITE / "navigation.md").read_text(), re.DOTALL)
    for line in tree.splitlines()
    if line and not line.startswith(":")
}


@pytest.fixture(scope="module")
def reference():
    return PAGES.build_reference()


def test_the_navigation_names_every_page_once():
    pages = {f"docs/{path.stem}" for path in (ROOT / "docs").glob("*.md")}
    assert pages - NAMED == set(), "add it to docs/site/navigation.md"
    lines = (SITE / "navigation.md").read_text().splitlines()
    assert all(lines.count(page) == 1 for page in NAMED)


def test_what_the_navigation_names_is_there(reference):
    there = {str(path.relative_to(ROOT).with_suffix("")) for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"))}
    assert NAMED - there == {page for page in NAMED if page.startswith("reference/")}
    assert {f"{page.removeprefix('reference/')}.md" for page in NAMED if page.startswith("reference/")} <= set(
        reference
    )


@pytest.mark.parametrize(
    ("shelf", "names"),
    [
        ("measures", {*registry.measure_infos(), *(info.name for info in DISTANCES)}),
        ("kernels", {*kernels(), *TIES, *FILTERS, *HYBRIDS}),
        ("commands", set(PAGES.find_commands()) | COMMANDS),
    ],
)
def test_each_has_its_page(reference, shelf, names):
    written = {name.removeprefix(f"{shelf}/").removesuffix(".md") for name in reference if name.startswith(shelf)}
    assert written == {*names, "index"}
    for name in names:
        page = reference[f"{shelf}/{name}.md"]
        assert page.startswith(f"# {name}\n\n")
        assert len(page) > 100
        assert f"({name}.md)" in reference[f"{shelf}/index.md"]
        assert f"\n{name}\n" in reference[f"{shelf}/index.md"]


def test_a_commands_page_has_all_its_options(reference):
    for name, command in PAGES.find_commands().items():
        for option in command.params:
            for word in option.opts if option.param_type_name == "option" else ():
                assert f"`{word}`" in reference[f"commands/{name}.md"], (name, word)
    assert "attnlens explain MEASURE" in reference["commands/explain.md"]


def test_the_api_has_every_public_function_and_class(reference):
    for name in attnlens.__all__:
        if callable(getattr(attnlens, name)):
            assert f":: attnlens.{name}\n" in reference["api.md"]


def test_text_is_no_markup_but_for_code():
    written = PAGES._escape_marked("a <b> | *c* `d|e` `f`, `g")
    assert written == r"a &#60;b&#62; &#124; &#42;c&#42; `d\|e` `f`, &#96;g"


def test_measures_lead_to_each_other(reference):
    assert "[tokens.share_key](tokens.share_key.md)" in reference["measures/tokens.share_skew.md"]
    for name, text in reference.items():
        for target in re.findall(r"\]\(([^)]+\.md)\)", text) if name.startswith("measures/") else ():
            assert f"measures/{target}" in reference


def test_the_sources_are_the_repositorys_own(reference, tmp_path):
    PAGES.write_sources(tmp_path)
    for path in (ROOT / "docs").glob("*.[mp]*"):
        assert (tmp_path / "docs" / path.name).read_bytes() == path.read_bytes()
    index = (tmp_path / "index.md").read_text()
    assert index.startswith((ROOT / "README.md").read_text())
    written = {str(path.relative_to(tmp_path / "reference")) for path in (tmp_path / "reference").rglob("*.md")}
    assert written == set(reference)
