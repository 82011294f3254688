"""Tests that docs/reports.md lists the code of every error, and no other codes."""

import re
from pathlib import Path

from attnlens import errors
from attnlens.cli import show
from attnlens.runs.swap import saved

ROOT = Path(__file__).parents[2]


def codes():
    """Codes of the error classes, and of failures that the command line translates itself."""
    classes, found = [errors.AttnlensError, *errors.AttnlensError.__subclasses__()], set()
    for kind in classes:  # the list grows while it is read
        classes += [each for each in kind.__subclasses__() if each not in classes]
        found.add(kind.code)
    assert saved.UnsavedError in classes
    source = Path(show.__file__).read_text()
    written = re.findall(r'write_json_error\("(\w+)"', source)
    return found | {*written, *re.findall(r'\bcode, problem(?:, exit_code)? = "(\w+)"', source)}


def test_the_page_lists_every_code_and_no_other():
    page = (ROOT / "docs" / "reports.md").read_text()
    table = page.split('{"error": {"code"')[1].split("```")[0]
    listed = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    assert len(listed) == len(set(listed))
    assert {"interrupted", "internal", "library", "memory"} <= codes()
    assert set(listed) == codes()
