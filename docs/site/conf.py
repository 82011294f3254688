"""Settings of Sphinx for the documentation's site."""

from __future__ import annotations

import re
from typing import Any

import attnlens

project = "attnlens"
release = version = attnlens.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc"]
root_doc = "index"
html_theme = "furo"
html_title = f"attnlens {release}"
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_copyright = False
smartquotes = False  # keeps the two dashes of an option
myst_heading_anchors = 3
suppress_warnings = ["myst.header"]  # architectures.md is printed by a command, with headings of level 3
default_role = "code"  # our docstrings have `one` backtick around code
autodoc_typehints = "none"  # signatures contain shapes, which take Sphinx minutes to resolve
autodoc_member_order = "bysource"
autodoc_class_signature = "separated"
add_module_names = False


def escape_markup(_app: Any, _what: str, _name: str, _it: Any, _options: Any, lines: list[str]) -> None:
    """Escape what reStructuredText would read as markup: docstrings are plain text with formulas."""
    for number, line in enumerate(lines):
        parts = re.split(r"(`[^`]*`)", line) if ">>>" not in line else ["", line]
        lines[number] = "".join(
            part if code % 2 else re.sub(r"([*|_\\])", r"\\\1", part) for code, part in enumerate(parts)
        )


def setup(app: Any) -> None:
    """Register the escaping of docstrings."""
    app.connect("autodoc-process-docstring", escape_markup)
