"""Write the site's sources: the repository's pages unchanged, and a page for every measure, kernel and command."""

from __future__ import annotations

import base64
import json
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from typer.main import get_command

import attnlens
from attnlens.cli.commands import app
from attnlens.report.render.markdown import escape_text
from attnlens.report.sections.reference import kernel_pages, measure_pages
from attnlens.report.sections.section import Section

ROOT = Path(__file__).parents[2]
LINKED = ("SECURITY.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE", "training/train_demo.py")
"""Files outside docs/ that the pages link to."""
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
"""Notebooks; each becomes a page."""
SOLVERS = ("maths.attsvm", "maths.ksvd", "lab.primal")
"""Submodules that docs/python.md documents."""
INTRODUCTIONS = {
    "measures": "`attnlens explain NAME` prints one of these pages in a terminal; `attnlens list measures` lists all.",
    "kernels": "`attnlens explain NAME` prints one of these pages in a terminal; `attnlens list kernels` lists all.",
    "commands": "`attnlens COMMAND --help` prints one of these pages in a terminal.",
}


def write_sources(folder: Path) -> None:
    """Write all sources into this folder, in the layout of the repository, so that links stay valid."""
    for path in (*LINKED, *(str(page.relative_to(ROOT)) for page in sorted((ROOT / "docs").glob("*.[mp]*")))):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, folder / path)
    (folder / "examples").mkdir(exist_ok=True)
    for notebook in NOTEBOOKS:
        shutil.copy(notebook, folder / "examples")
        for name, content in convert_notebook(notebook).items():
            (folder / "examples" / name).write_bytes(content)
    navigation = (Path(__file__).parent / "navigation.md").read_text(encoding="utf-8")
    (folder / "index.md").write_text((ROOT / "README.md").read_text(encoding="utf-8") + "\n" + navigation)
    for name, text in build_reference().items():
        (folder / "reference" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "reference" / name).write_text(text)


def convert_notebook(path: Path) -> dict[str, bytes]:
    """Convert a notebook to a page of markdown with its outputs; return the page and its images by file name."""
    lines: list[str] = []
    images: dict[str, bytes] = {}
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        lines.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            if "image/png" in data:
                name = f"{path.stem}-{len(images)}.png"
                images[name] = base64.b64decode(data["image/png"])
                lines.append(f"![{''.join(data['text/plain'])}]({name})")
            else:
                text = "".join(output["text"] if "text" in output else data["text/plain"])
                lines.append(f"```text\n{text.rstrip()}\n```")
    lines.append(f"This page is the notebook [{path.name}]({path.name}).")
    return images | {f"{path.stem}.md": ("\n\n".join(lines) + "\n").encode()}


def build_reference() -> dict[str, str]:
    """Build every generated page; keys are file names below reference/."""
    shelves = {
        "measures": {
            name: (page.lines[0], _link_measures(_render_facts(page))) for name, page in measure_pages().items()
        },
        "kernels": {name: (page.lines[0], _render_facts(page)) for name, page in kernel_pages().items()},
        "commands": {
            name: (_get_summary(command), _render_command(name, command)) for name, command in find_commands().items()
        },
    }
    pages = {"api.md": _render_api()}
    for shelf, entries in shelves.items():
        pages |= {f"{shelf}/{name}.md": f"# {escape_text(name)}\n\n{text}" for name, (_, text) in entries.items()}
        pages[f"{shelf}/index.md"] = _render_index(shelf, {name: summary for name, (summary, _) in entries.items()})
    return pages


def find_commands() -> Mapping[str, Any]:
    """Return all commands by name; the types of typer's bundled click are not public."""
    group: Any = get_command(app)
    return group.commands


def _render_facts(page: Section) -> str:
    """Render a page below its title: a sentence and a table of facts."""
    return (
        f"{_escape_marked(page.lines[0])}\n\n{_render_table(['', ''], [list(map(str, item)) for item in page.items])}"
    )


def _render_table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [titles, ["---"] * len(titles), *(map(_escape_marked, row) for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _escape_marked(text: str) -> str:
    """Escape the text for markdown except its `code`."""
    parts = re.split(r"( ?`[^`]+` ?)", text)  # with its spaces, which escaping would strip
    return "".join(part.replace("|", r"\|") if code % 2 else escape_text(part) for code, part in enumerate(parts))


def _link_measures(text: str) -> str:
    """Link the names of measures to their pages in the same folder."""
    names = "|".join(sorted(map(re.escape, measure_pages()), key=len, reverse=True))
    return re.sub(rf"\b(?:{names})\b", lambda match: f"[{match.group()}]({match.group()}.md)", text)


def _render_index(shelf: str, summaries: Mapping[str, str]) -> str:
    lines = "\n".join(
        f"- [{escape_text(name)}]({name}.md): {_escape_marked(summary)}" for name, summary in summaries.items()
    )
    toctree = "\n".join(["```{toctree}", ":hidden:", "", *summaries, "```"])
    return f"# {shelf.capitalize()}\n\n{INTRODUCTIONS[shelf]}\n\n{lines}\n\n{toctree}\n"


def _get_summary(command: Any) -> str:
    return (command.help or "").split("\n\n")[0]


def _render_command(name: str, command: Any) -> str:
    """Render the summary, usage and arguments of a command, and a table for each panel of its options."""
    arguments = [argument for argument in command.params if argument.param_type_name == "argument"]
    usage = " ".join(["attnlens", name, *map(_format_argument, arguments), "[OPTIONS]"])
    meanings = "".join(
        f"- {_escape_marked(_format_argument(argument))}: {_escape_marked(argument.help or '')}\n"
        for argument in arguments
    )
    panels: dict[str, list[Sequence[str]]] = {}
    for option in command.params:
        if option.param_type_name == "option" and not option.hidden:
            panels.setdefault(getattr(option, "rich_help_panel", None) or "Options", []).append(_format_option(option))
    titles = ("option", "meaning", "default", "environment")
    tables = [f"## {escape_text(panel)}\n\n{_render_table(titles, rows)}" for panel, rows in panels.items()]
    return "\n\n".join(
        [_escape_marked(_get_summary(command)), f"```text\n{usage}\n```", *filter(None, [meanings]), *tables]
    )


def _format_argument(argument: Any) -> str:
    word = argument.metavar or argument.name.upper()
    return word if argument.required else f"[{word}]"


def _format_option(option: Any) -> Sequence[str]:
    """Format the names, meaning, default and environment variable of an option."""
    names = ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
    meaning, _, shown = (option.help or "").partition(" [default: ")
    default = shown.removesuffix("]") or _format_default(option)
    return names, meaning, default, f"`{option.envvar}`" if option.envvar else ""


def _format_default(option: Any) -> str:
    return "" if option.default in (None, False, ()) or callable(option.default) else str(option.default)


def _render_api() -> str:
    """Render the public names with their docstrings, which Sphinx reads from the code."""
    parts = ["# Python API", "For how to use them together, see [the Python library](../docs/python.md)."]
    for name, item in ((name, getattr(attnlens, name)) for name in attnlens.__all__):
        if not callable(item):
            continue
        kind = "autoclass" if isinstance(item, type) else "autofunction"
        parts.append(_render_directive(f"{kind}:: attnlens.{name}", members=isinstance(item, type)))
    for name in SOLVERS:
        parts += [f"## attnlens.{name}", _render_directive(f"automodule:: attnlens.{name}", members=True)]
    return "\n\n".join(parts) + "\n"


def _render_directive(line: str, *, members: bool) -> str:
    """Render a reStructuredText directive, because docstrings are reStructuredText."""
    return f"```{{eval-rst}}\n.. {line}\n" + "   :members:\n" * members + "```"
