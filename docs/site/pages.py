"""Writes the site's sources: the repository's pages as they are, and a page for every measure, kernel and command."""

from __future__ import annotations

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
BESIDE = ("SECURITY.md", "CHANGELOG.md", "LICENSE", "training/train_demo.py")
"""What the pages link to outside docs/."""
SOLVERS = ("maths.attsvm", "maths.ksvd", "lab.primal")
"""Submodules that docs/python.md offers."""
TOLD = {
    "measures": "`attnlens explain NAME` prints each of these pages in the terminal, `attnlens list measures` all.",
    "kernels": "`attnlens explain NAME` prints each of these pages in the terminal, `attnlens list kernels` all.",
    "commands": "`attnlens COMMAND --help` prints each of these pages in the terminal.",
}


def write(folder: Path) -> None:
    """Write all sources into this folder, laid out as the repository is, so that links hold as they stand."""
    for path in (*BESIDE, *(str(page.relative_to(ROOT)) for page in sorted((ROOT / "docs").glob("*.[mp]*")))):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, folder / path)
    navigation = (Path(__file__).parent / "navigation.md").read_text(encoding="utf-8")
    (folder / "index.md").write_text((ROOT / "README.md").read_text(encoding="utf-8") + "\n" + navigation)
    for name, text in reference().items():
        (folder / "reference" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "reference" / name).write_text(text)


def reference() -> dict[str, str]:
    """Every generated page by its file's name below reference/."""
    shelves = {
        "measures": {name: (page.lines[0], _linked(_facts(page))) for name, page in measure_pages().items()},
        "kernels": {name: (page.lines[0], _facts(page)) for name, page in kernel_pages().items()},
        "commands": {name: (_summary(it), _command(name, it)) for name, it in commands().items()},
    }
    pages = {"api.md": _api()}
    for shelf, told in shelves.items():
        pages |= {f"{shelf}/{name}.md": f"# {escape_text(name)}\n\n{text}" for name, (_, text) in told.items()}
        pages[f"{shelf}/index.md"] = _index(shelf, {name: summary for name, (summary, _) in told.items()})
    return pages


def commands() -> Mapping[str, Any]:
    """Every command by its name; typer makes them with a click of its own, whose types are not public."""
    found: Any = get_command(app)
    return found.commands


def _facts(page: Section) -> str:
    """The page below its title: what it is in a sentence, and a table of what else there is to say."""
    return f"{_marked(page.lines[0])}\n\n{_table(['', ''], [list(map(str, item)) for item in page.items])}"


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [titles, ["---"] * len(titles), *(map(_marked, row) for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _marked(text: str) -> str:
    """The text with its `code` as such, and nothing else in it that markdown could read as more than a letter."""
    parts = re.split(r"( ?`[^`]+` ?)", text)  # with its blanks, which are lost at the ends of what is escaped
    return "".join(part.replace("|", r"\|") if code % 2 else escape_text(part) for code, part in enumerate(parts))


def _linked(text: str) -> str:
    """The text with the names of measures as links to their pages, which lie beside it."""
    known = "|".join(sorted(map(re.escape, measure_pages()), key=len, reverse=True))
    return re.sub(rf"\b(?:{known})\b", lambda found: f"[{found.group()}]({found.group()}.md)", text)


def _index(shelf: str, told: Mapping[str, str]) -> str:
    entries = "\n".join(f"- [{escape_text(name)}]({name}.md): {_marked(summary)}" for name, summary in told.items())
    toctree = "\n".join(["```{toctree}", ":hidden:", "", *told, "```"])
    return f"# {shelf.capitalize()}\n\n{TOLD[shelf]}\n\n{entries}\n\n{toctree}\n"


def _summary(command: Any) -> str:
    return (command.help or "").split("\n\n")[0]


def _command(name: str, command: Any) -> str:
    """What it does, how it is typed, its arguments, and a table for each panel of its options."""
    arguments = [each for each in command.params if each.param_type_name == "argument"]
    typed = " ".join(["attnlens", name, *map(_word, arguments), "[OPTIONS]"])
    told = "".join(f"- {_marked(_word(each))}: {_marked(each.help or '')}\n" for each in arguments)
    panels: dict[str, list[Sequence[str]]] = {}
    for option in command.params:
        if option.param_type_name == "option" and not option.hidden:
            panels.setdefault(getattr(option, "rich_help_panel", None) or "Options", []).append(_option(option))
    titles = ("option", "meaning", "default", "environment")
    tables = [f"## {escape_text(panel)}\n\n{_table(titles, rows)}" for panel, rows in panels.items()]
    return "\n\n".join([_marked(_summary(command)), f"```text\n{typed}\n```", *filter(None, [told]), *tables])


def _word(argument: Any) -> str:
    word = argument.metavar or argument.name.upper()
    return word if argument.required else f"[{word}]"


def _option(option: Any) -> Sequence[str]:
    """Its names, its meaning, its default, and the variable that is read in its place."""
    names = ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
    return names, option.help or "", _default(option), f"`{option.envvar}`" if option.envvar else ""


def _default(option: Any) -> str:
    if isinstance(option.show_default, str):
        return option.show_default
    return "" if option.default in (None, False, ()) or callable(option.default) else str(option.default)


def _api() -> str:
    """The public names with their docstrings, which Sphinx reads from the code."""
    parts = ["# Python API", "How they are used together: [the Python library](../docs/python.md)."]
    for name, it in ((name, getattr(attnlens, name)) for name in attnlens.__all__):
        if not callable(it):
            continue
        kind = "autoclass" if isinstance(it, type) else "autofunction"
        parts.append(_directive(f"{kind}:: attnlens.{name}", members=isinstance(it, type)))
    for name in SOLVERS:
        parts += [f"## attnlens.{name}", _directive(f"automodule:: attnlens.{name}", members=True)]
    return "\n\n".join(parts) + "\n"


def _directive(line: str, *, members: bool) -> str:
    """In reStructuredText, as the docstrings are read."""
    return f"```{{eval-rst}}\n.. {line}\n" + "   :members:\n" * members + "```"
