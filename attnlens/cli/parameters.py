"""Makes the options of the commands from requests, and keywords for a run from what was typed."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from attnlens import requests
from attnlens.arguments import listed_numbers
from attnlens.choices import SHOWN as SELECTION
from attnlens.errors import TextError, UsageError
from attnlens.requests import OUTPUT
from attnlens.requests.fields import CallOnly

TRAINED = "Checkpoints and heads"
Parameters = dict[str, tuple[Any, Any]]
"""Options by the parameter of a command: what typer is told of each, and its default."""


def option(*names: str, panel: str = "Options", call_only: CallOnly = "", **more: Any) -> Any:
    """A typer option that also reads ATTNLENS_<OPTION>; `call_only` says why no file of defaults may set it."""
    long = next(name for name in names if name.startswith("--")).split("/")[0]
    envvar = "ATTNLENS_" + long.removeprefix("--").replace("-", "_").upper()
    found = typer.Option(*names, envvar=envvar, rich_help_panel=panel, **more)
    found.call_only = call_only
    return found


def output(name: str, help: str, metavar: str = "FILE") -> Any:  # noqa: A002  # as typer calls it
    """The option that names a file to write."""
    return option(name, panel=OUTPUT, help=help, metavar=metavar, call_only="written")


def parameters(kind: type, *, without: Collection[str] = (), **defaults: Any) -> Parameters:
    """The options of a request, its own before those that it has in common with others; with other defaults."""
    every = {name: found for name, found in requests.options(kind).items() if name not in without}
    bases = [requests.options(base) for base in (requests.Loading, requests.Feeding, requests.ModelRequest)]
    own_first = sorted(every, key=lambda name: sum(name in base for base in bases))
    return {
        parameter_of(name, every[name]): (_typed(name, every[name]), defaults.get(name, _default(every[name])))
        for name in own_first
    }


def parameter_of(name: str, found: requests.Option) -> str:
    """The name of an option's parameter, by how it is typed: analyzer for --analyzer, in the place of analyzers."""
    return found.flag.split("/")[0].removeprefix("--").replace("-", "_") or name


def _default(found: requests.Option) -> Any:
    return None if found.default == () else found.default


def _typed(name: str, found: requests.Option) -> Any:
    """What typer is told: how the option is typed, which type its word has, and its line of help."""
    flag = found.flag or "--" + name.replace("_", "-")
    more = {"min": found.least, "max": found.most, "metavar": found.metavar}
    given = {key: value for key, value in more.items() if value is not None}
    if found.shown is not None:
        given["show_default"] = found.shown
    plain = found.typed or _word(found.type)
    return Annotated[plain, option(flag, panel=found.panel, help=found.help, call_only=found.call_only, **given)]


def _word(plain: Any) -> Any:
    """The type that typer reads a word as: a bool, a number, several words, or one."""
    parts = requests.alternatives(plain)
    kind = next((kind for kind in (bool, int, float) if kind in parts), str)
    if plain is requests.Words:
        return list[str] | None
    return kind if type(None) not in parts else kind | None


Model = Annotated[
    str | None,
    typer.Argument(
        help="Hub id (`org/name@revision`), folder, `.gguf` or `.safetensors` file, or `demo`.", show_default="demo"
    ),
]
LISTED = ("kernels", "analyzers", "measures", "architectures", "schema")
Listed = Annotated[
    str | None,
    typer.Argument(
        help="`kernels`, `analyzers`, `measures`, `architectures` or `schema`.", show_default="the first three"
    ),
]
_printed = typer.Option("--markdown", help="Print markdown; the schema stays as it is.")
_printed.call_only = "written"  # as the option of that name which writes a file
ListedMarkdown = Annotated[bool, _printed]
Head = Annotated[
    str | None, option("--head", help="Only this head, as in `3.7`: layer 3, head 7.", metavar="LAYER.HEAD")
]
WindowsCsv = Annotated[
    str | None,
    output(
        "--windows-csv", "Write what every window read, one row a window and head (swap-kernel: and kernel), as CSV."
    ),
]
Json = Annotated[str | None, output("--json", "Write the report as JSON (`-`: to stdout).")]
Csv = Annotated[str | None, output("--csv", "Write one row a head as CSV.")]
Png = Annotated[
    str | None,
    output("--png", "Write the overview (a `.png`, `.svg` or `.pdf` file) or every picture (a folder).", "FILE|DIR"),
]
Html = Annotated[str | None, output("--html", "Write a self-contained page.")]
Markdown = Annotated[str | None, output("--markdown", "Write the summary as markdown.")]
AllHeads = Annotated[bool, option("--all-heads", panel=OUTPUT, help="Show every head, not a summary by layer.")]
Strict = Annotated[bool, option("--strict", help="Exit with 3 where a part could not be analysed.")]
Quiet = Annotated[bool, option("-q", "--quiet", panel=OUTPUT, help="Show no table and no progress.")]
Verbose = Annotated[bool, option("-v", "--verbose", panel=OUTPUT, help="Show conventions and timings too.")]
NoProgress = Annotated[bool, option("--no-progress", panel=OUTPUT, help="Show no progress.")]
Debug = Annotated[bool, option("--debug", panel=OUTPUT, help="Show a traceback with an error.")]


TOLD: dict[str, tuple[Any, Any]] = {
    "json": (Json, None),
    "quiet": (Quiet, False),
    "no_progress": (NoProgress, False),
    "debug": (Debug, False),
}
"""What every command with a report takes."""
SHOWN = {
    "json": TOLD["json"],
    "csv": (Csv, None),
    "png": (Png, None),
    "html": (Html, None),
    "markdown": (Markdown, None),
    "quiet": TOLD["quiet"],
    "verbose": (Verbose, False),
    **TOLD,
}
"""Where the report goes, and what is said meanwhile."""


def also(*groups: Mapping[str, tuple[Any, Any]]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of these groups too, but for those that it has itself.

    They reach it as keywords; `context.params` holds all of them.
    """

    def extended(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        own = [given for given in signature.parameters.values() if given.kind is not given.VAR_KEYWORD]
        more = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
            for name, (kind, default) in {name: pair for group in groups for name, pair in group.items()}.items()
            if name not in signature.parameters
        ]

        @functools.wraps(command)
        def run(*args: Any, **given: Any) -> None:
            command(*args, **given)

        run.__signature__ = signature.replace(parameters=[*own, *more])  # type: ignore[attr-defined]
        run.__annotations__ = {given.name: given.annotation for given in (*own, *more)} | {"return": None}
        return run

    return extended


def numbers(name: str, words: str | None) -> list[int] | None:
    """Return `0-3,7` as [0, 1, 2, 3, 7]; None stays None. Raises UsageError for words that list no numbers."""
    return None if words is None else sorted(listed_numbers(f"--{name}", words))


def keywords(kind: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """Those among a command's parameters that a run of this kind takes, under its own names, checked.

    Raises UsageError where one makes no sense, TextError for a text from stdin without a stdin.
    """
    found = {}
    for name, asked in requests.options(kind).items():
        parameter = parameter_of(name, asked)
        if parameter in given:
            found[name] = requests.value_of(asked, name, _read(name, asked, given[parameter]))
    return found


def _read(name: str, asked: requests.Option, word: Any) -> Any:
    """A parameter as Python would give it."""
    if asked.check is requests.numbers:
        return numbers(name, word)
    if asked.typed == list[Path] | None:
        names = [str(path) for path in word or ()]
        if "." in names:
            remedy = "Give the path of a text file, or - for stdin."
            raise UsageError(f"--{name} names no file: it is empty, or a folder.", remedy)
        if "-" in names and sys.stdin is None:
            raise TextError(f"stdin is closed, so that --{name} - has nothing to read.", "Pipe a text, or name a file.")
        return names
    return asked.default if word is None else word


def chosen(given: Mapping[str, Any]) -> dict[str, Any]:
    """The layer and the head that --head names, as layers and heads; empty where it names none.

    Raises UsageError for a head beside other layers or heads, and for something to show without a head.
    """
    if given["head"] is None and given["show"] == SELECTION:
        raise UsageError(f"--show {given['show']} shows one head, and none is named.", "Name it, as in --head 3.7.")
    return requests.one_head(given["head"], given["layers"], given["heads"])
