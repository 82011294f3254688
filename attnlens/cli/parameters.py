"""Makes the options of the commands from requests, their defaults from files, and a run's keywords."""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer
from typer.models import ArgumentInfo

from attnlens import requests
from attnlens.arguments import checked_name, listed_numbers
from attnlens.choices import SHOWN as SELECTION
from attnlens.errors import TextError, UsageError
from attnlens.files import read_bytes
from attnlens.requests import OUTPUT
from attnlens.requests.fields import CallOnly

FILES = {"attnlens.toml": (), "pyproject.toml": ("tool", "attnlens")}
"""Where options may stand, the first that has any wins; and under which table."""
RULES = "check"
"""The table in them that holds no options, but what `check` checks."""
NEGATED = {"no_pack": "pack"}
"""The other spelling of a switch that has two; typer gives an environment variable to the first alone."""
LARGEST, REMEDY = 2**20, "Make it a file that can be read, or run in another folder."
WANTED = {
    **{bool: ("true or false", "true"), int: ("a whole number", "16")},
    **{float: ("a number", "0.1"), str: ("a text in quotes", '"…"')},
}
"""What an option of each type must be in a file, and an example."""
YES, NO = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


def kinds(commands: Iterable[Callable[..., Any]]) -> dict[str, Any]:
    """The type of every option of these commands, annotated as for typer, by parameter name."""
    found: dict[str, Any] = {}
    for command in commands:
        found |= get_type_hints(command, include_extras=True)
    return {name: kind for name, kind in found.items() if name not in ("context", "return")}


def defaults(folder: Path, known: Mapping[str, Any]) -> dict[str, Any]:
    """Options by parameter name, from ATTNLENS_NO_PACK, `attnlens.toml`, or [tool.attnlens] of `pyproject.toml`.

    Every other ATTNLENS_<OPTION> is typer's. Raises UsageError where a file can't be read, is no TOML, or names an
    option that does not exist, is dangerous, names what is read or written, or has a value of another type.
    """
    found = _from_files(folder, known)
    for negated, name in NEGATED.items():
        variable = f"ATTNLENS_{negated.upper()}"
        word = os.environ.get(variable, "").lower()
        if word and word not in YES + NO:
            raise UsageError(f"{variable}={word} is neither yes nor no.", f"Write {variable}=1 or {variable}=0.")
        if word:
            found[name] = word in NO
    return found


def _from_files(folder: Path, known: Mapping[str, Any]) -> dict[str, Any]:
    for name, path in FILES.items():
        if not (folder / name).is_file():
            continue
        table = _toml(folder / name)
        for depth, key in enumerate(path, 1):
            table = table.get(key, {})
            if not isinstance(table, dict):
                raise UsageError(
                    f"{name}: {'.'.join(path[:depth])} must be a table.", f"Write it as [{'.'.join(path)}]."
                )
        options = {key: value for key, value in table.items() if key != RULES}
        if options:
            return dict(_entry(name, key, value, known) for key, value in options.items())
    return {}


def _toml(file: Path) -> dict[str, Any]:
    import tomllib

    try:
        return tomllib.loads(read_bytes(file, UsageError, REMEDY, most=LARGEST).decode())
    except RecursionError:
        raise UsageError(f"{file} is nested too deep.", "Mend the file, or run in another folder.") from None
    except ValueError as error:  # TOML's own errors, bytes that are no UTF-8, numbers of thousands of digits
        raise UsageError(f"{file} is not valid TOML: {error}.", "Mend the file, or run in another folder.") from None


def _entry(file: str, key: str, value: Any, known: Mapping[str, Any]) -> tuple[str, Any]:
    """One line of a file as a parameter and its value, checked: a file may lie beside a stranger's model."""
    name = key.replace("-", "_")
    checked_name(f"option in {file}", name, sorted({*known, *NEGATED}))
    kind, declared = get_args(known[NEGATED.get(name, name)])[:2]
    why: CallOnly = "read" if isinstance(declared, ArgumentInfo) else declared.call_only
    if why == "dangerous":
        raise UsageError(f"{file} may not switch on {key}.", "Give it on the command line, if you mean it.")
    if why:
        places = "on the command line" + (f" or in ATTNLENS_{name.upper()}" if declared.envvar else "")
        raise UsageError(
            f"{file} may not say by {key} what is {why}: it may come from a stranger.",
            f"Take {key} out of {file}, and name it {places}.",
        )
    kinds = {kind, *get_args(kind)}  # `int | None`, `list[str] | None`
    several = any(get_origin(one) is list for one in kinds)
    plain = next((one for one in (bool, int, float) if one in kinds), str)
    items = value if several and isinstance(value, list) else [value]
    allowed = (int, float) if plain is float else plain
    if not all(isinstance(item, allowed) and (plain is bool) == isinstance(item, bool) for item in items):
        wanted, example = WANTED[plain]
        wanted += ", or a list of them" * several
        raise UsageError(f"{file}: {key} must be {wanted}.", f"Mend that line, as in {key} = {example}.")
    return (NEGATED[name], not value) if name in NEGATED else (name, items if several else value)


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
    own_first = sorted(every.items(), key=lambda pair: sum(pair[0] in base for base in bases))
    return {
        parameter_of(name, found): (
            _typed(name, found),
            defaults.get(name, None if found.default == () else found.default),
        )
        for name, found in own_first
    }


def parameter_of(name: str, found: requests.Option) -> str:
    """The name of an option's parameter, by how it is typed: analyzer for --analyzer, in the place of analyzers."""
    return found.flag.split("/")[0].removeprefix("--").replace("-", "_") or name


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
Png = Annotated[
    str | None,
    output("--png", "Write the overview (a `.png`, `.svg` or `.pdf` file) or every picture (a folder).", "FILE|DIR"),
]
Markdown = Annotated[str | None, output("--markdown", "Write the summary as markdown.")]
AllHeads = Annotated[bool, option("--all-heads", panel=OUTPUT, help="Show every head, not a summary by layer.")]
Strict = Annotated[bool, option("--strict", help="Exit with 3 where a part could not be analysed.")]
Verbose = Annotated[bool, option("-v", "--verbose", panel=OUTPUT, help="Show conventions and timings too.")]
Debug = Annotated[bool, option("--debug", panel=OUTPUT, help="Show a traceback with an error.")]


TOLD: dict[str, tuple[Any, Any]] = {
    "json": (Annotated[str | None, output("--json", "Write the report as JSON (`-`: to stdout).")], None),
    "quiet": (Annotated[bool, option("-q", "--quiet", panel=OUTPUT, help="Show no table and no progress.")], False),
    "no_progress": (Annotated[bool, option("--no-progress", panel=OUTPUT, help="Show no progress.")], False),
    "debug": (Debug, False),
}
"""What every command with a report takes."""
SHOWN = {
    "json": TOLD["json"],
    "csv": (Annotated[str | None, output("--csv", "Write one row a head as CSV.")], None),
    "png": (Png, None),
    "html": (Annotated[str | None, output("--html", "Write a self-contained page.")], None),
    "markdown": (Markdown, None),
    "quiet": TOLD["quiet"],
    "verbose": (
        Annotated[bool, option("-v", "--verbose", panel=OUTPUT, help="Show conventions and timings too.")],
        False,
    ),
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
        return None if word is None else sorted(listed_numbers(f"--{name}", word))
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
    """The layer and the head that --head names, as layers and heads; empty where it names none."""
    if given["head"] is None and given["show"] == SELECTION:
        raise UsageError(f"--show {given['show']} shows one head, and none is named.", "Name it, as in --head 3.7.")
    return requests.one_head(given["head"], given["layers"], given["heads"])
