"""Tests that the notebooks run, show what they store, and become pages of the site."""

import importlib.util
import json
from pathlib import Path

import notebooks
import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.ipynb"))
SPEC = importlib.util.spec_from_file_location("pages", ROOT / "docs" / "site" / "pages.py")
PAGES = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(PAGES)


@pytest.mark.full
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
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


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_notebooks_are_small_and_name_no_path_and_become_pages(path):
    text = path.read_text(encoding="utf-8")
    assert len(text) < 300_000
    assert not any(part in text for part in ("/home/", "/root/", "tmp/", str(ROOT)))
    written = PAGES.convert_notebook(path)
    page = written[f"{path.stem}.md"].decode()
    assert page.startswith("# ")
    assert len(written) == 1 + page.count("![") > 1
