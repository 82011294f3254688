"""Build the options of the commands from requests, read defaults from files, and convert options to keywords."""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import typer
from pydantic.fields import FieldInfo
from typer.models import ArgumentInfo

from attnlens import requests
from attnlens.arguments import checked_name
from attnlens.choices import SHOWN as SELECTION
from attnlens.errors import TextError, UsageError
from attnlens.files import read_bytes
from attnlens.requests import OUTPUT, Request, details
from attnlens.requests.fields import CallOnly

R = TypeVar("R", bound=Request)
FILES = {"attnlens.toml": (), "pyproject.toml": ("tool", "attnlens")}
"""Files that can set options, the first one with any wins, and the path of their table."""
RULES = "check"
"""Table in these files with the rules of `check` instead of options."""
NEGATED = {"no_pack": "pack"}
"""Negative spellings of switches that have two; typer gives an environment variable only to the positive one."""
LARGEST, REMEDY = 2**20, "Make the file readable, or run in another folder."
WANTED = {
    **{bool: ("true or false", "true"), int: ("a whole number", "16")},
    **{float: ("a number", "0.1"), str: ("a text in quotes", '"…"')},
}
"""Description and example of the values of each type in a file."""
YES, NO = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


def kinds(commands: Iterable[Callable[..., Any]]) -> dict[str, Any]:
    """Return the type of every option of these commands by parameter name, annotated for typer."""
    types: dict[str, Any] = {}
    for command in commands:
        types |= get_type_hints(command, include_extras=True)
    return {name: kind for name, kind in types.items() if name not in ("context", "return")}


def defaults(folder: Path, known: Mapping[str, Any]) -> dict[str, Any]:
    """Read options by parameter name from ATTNLENS_NO_PACK, `attnlens.toml`, or [tool.attnlens] of `pyproject.toml`.

    typer reads every other ATTNLENS_<OPTION>. Raise UsageError if a file can't be read, is not TOML, or sets an
    option that does not exist, is dangerous, names a file to read or write, or has a value of another type.
    """
    options = _from_files(folder, known)
    for negated, name in NEGATED.items():
        variable = f"ATTNLENS_{negated.upper()}"
        word = os.environ.get(variable, "").lower()
        if word and word not in YES + NO:
            raise UsageError(f"{variable}={word} is neither yes nor no.", f"Write {variable}=1 or {variable}=0.")
        if word:
            options[name] = word in NO
    return options


def _from_files(folder: Path, known: Mapping[str, Any]) -> dict[str, Any]:
    for name, path in FILES.items():
        if not (folder / name).is_file():
            continue
        table = _toml(folder / name)
        for depth, key in enumerate(path, 1):
            table = table.get(key, {})
            if not isinstance(table, dict):
                raise UsageError(f"{name}: {'.'.join(path[:depth])} must be a table.", f"Write [{'.'.join(path)}].")
        options = {key: value for key, value in table.items() if key != RULES}
        if options:
            return dict(_parse_entry(name, key, value, known) for key, value in options.items())
    return {}


def _toml(file: Path) -> dict[str, Any]:
    import tomllib

    try:
        return tomllib.loads(read_bytes(file, UsageError, REMEDY, most=LARGEST).decode())
    except RecursionError:
        raise UsageError(f"{file} is nested too deeply.", "Correct the file, or run in another folder.") from None
    except ValueError as error:  # TOML's own errors, bytes that are not UTF-8, numbers of thousands of digits
        raise UsageError(f"{file} is not valid TOML: {error}.", "Correct the file, or run in another folder.") from None


def _parse_entry(file: str, key: str, value: Any, known: Mapping[str, Any]) -> tuple[str, Any]:
    """Check one line of a file and return parameter and value; the file may belong to an untrusted model."""
    name = key.replace("-", "_")
    checked_name(f"option in {file}", name, sorted({*known, *NEGATED}))
    kind, declared = get_args(known[NEGATED.get(name, name)])[:2]
    why: CallOnly = "read" if isinstance(declared, ArgumentInfo) else declared.call_only
    if why == "dangerous":
        raise UsageError(f"{file} must not enable {key}.", "Pass it on the command line if this is intended.")
    if why:
        places = "on the command line" + (
            "" if isinstance(declared, ArgumentInfo) else f" or in ATTNLENS_{name.upper()}"
        )
        raise UsageError(
            f"{file} must not set {key}, which names what is {why}: the file may come from an untrusted source.",
            f"Remove {key} from {file}, and set it {places}.",
        )
    kinds = {kind, *get_args(kind)}  # `int | None`, `list[str] | None`
    several = any(get_origin(each) is list for each in kinds)
    plain = next((each for each in (bool, int, float) if each in kinds), str)
    items = value if several and isinstance(value, list) else [value]
    allowed = (int, float) if plain is float else plain
    if not all(isinstance(item, allowed) and (plain is bool) == isinstance(item, bool) for item in items):
        wanted, example = WANTED[plain]
        wanted += ", or a list of them" * several
        raise UsageError(f"{file}: {key} must be {wanted}.", f"Correct that line, e.g. {key} = {example}.")
    return (NEGATED[name], not value) if name in NEGATED else (name, items if several else value)


TRAINED = "Checkpoints and heads"
Parameters = dict[str, tuple[Any, Any]]
"""Options by the command's parameter: annotated type for typer, and default."""


def option(*names: str, panel: str = "Options", call_only: CallOnly = "", **more: Any) -> Any:
    """Create a typer option that also reads ATTNLENS_<OPTION>; `call_only` says why no defaults file may set it."""
    long = next(name for name in names if name.startswith("--")).split("/")[0]
    envvar = "ATTNLENS_" + long.removeprefix("--").replace("-", "_").upper()
    created = typer.Option(*names, envvar=envvar, rich_help_panel=panel, **more)
    created.call_only = call_only
    return created


def output(name: str, help: str, metavar: str = "FILE") -> Any:  # noqa: A002  # name of typer's argument
    """Create the option that names a file to write."""
    return option(name, panel=OUTPUT, help=help, metavar=metavar, call_only="written")


def parameters(kind: type[Request], *, without: Collection[str] = ()) -> Parameters:
    """Return the options of a request for typer, its own ones before those shared with other requests."""
    fields = {
        name: field
        for name, field in kind.model_fields.items()
        if name not in without and not details(field)["python_only"]
    }
    shared = [base.model_fields for base in (requests.Loading, requests.Feeding, requests.ModelRequest)]
    own_first = sorted(fields, key=lambda name: sum(name in base for base in shared))
    return {
        parameter_of(name, fields[name]): (_annotation(name, fields[name]), _typer_default(fields[name]))
        for name in own_first
    }


def parameter_of(name: str, field: FieldInfo) -> str:
    """Return the parameter name of an option from its flag: analyzer for --analyzer, although it sets analyzers."""
    return details(field)["flag"].split("/")[0].removeprefix("--").replace("-", "_") or name


def _annotation(name: str, field: FieldInfo) -> Any:
    """Return the typer annotation of an option: its flag, the type of its value, and its help."""
    about = details(field)
    flag = about["flag"] or "--" + name.replace("_", "-")
    more = {"min": about["least"], "max": about["most"], "metavar": about["metavar"], "show_default": about["shown"]}
    settings = {key: value for key, value in more.items() if value is not None}
    kind = about["typed"] or _typer_type(field)
    declared = option(flag, panel=about["panel"], help=field.description, call_only=about["call_only"], **settings)
    return Annotated[kind, declared]


def _typer_type(field: FieldInfo) -> Any:
    """Return the type that typer parses a value as: a bool, a number, several words, or one."""
    parts = requests.alternatives(field.annotation)
    kind = next((kind for kind in (bool, int, float) if kind in parts), str)
    if tuple[str, ...] in parts:
        return list[str] | None
    return kind | None if _typer_default(field) is None else kind


def _typer_default(field: FieldInfo) -> Any:
    """Return the default of an option for typer; None for an empty list and for values that are not plain."""
    return field.default if isinstance(field.default, str | int | float) else None


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
_printed = typer.Option("--markdown", help="Print Markdown (the schema stays JSON).")
_printed.call_only = "written"  # like the option of that name that writes a file
ListedMarkdown = Annotated[bool, _printed]
Head = Annotated[
    str | None, option("--head", help="Only this head, e.g. `3.7`: layer 3, head 7.", metavar="LAYER.HEAD")
]
WindowsCsv = Annotated[
    str | None,
    output("--windows-csv", "Write the values of every window as CSV, one row per window and head (or kernel)."),
]
Figure = Annotated[
    str | None,
    output(
        "--figure", "Write the overview to a `.png`, `.svg` or `.pdf` file, or every picture to a folder.", "FILE|DIR"
    ),
]
Markdown = Annotated[str | None, output("--markdown", "Write the summary as Markdown.")]
Table = Annotated[bool, option("--table", panel=OUTPUT, help="Show every head instead of a summary by layer.")]
Strict = Annotated[bool, option("--strict", help="Exit with code 3 if a part could not be analysed.")]
Verbose = Annotated[bool, option("-v", "--verbose", panel=OUTPUT, help="Also show conventions and timings.")]
Debug = Annotated[bool, option("--debug", panel=OUTPUT, help="Show the traceback of an error.")]


REPORT_OPTIONS: dict[str, tuple[Any, Any]] = {
    "json": (Annotated[str | None, output("--json", "Write the report as JSON (`-`: stdout).")], None),
    "quiet": (Annotated[bool, option("-q", "--quiet", panel=OUTPUT, help="Print no tables and no progress.")], False),
    "no_progress": (Annotated[bool, option("--no-progress", panel=OUTPUT, help="Print no progress.")], False),
    "debug": (Debug, False),
}
"""Options of every command with a report."""
OUTPUT_OPTIONS = {
    "json": REPORT_OPTIONS["json"],
    "csv": (Annotated[str | None, output("--csv", "Write one row per head as CSV.")], None),
    "figure": (Figure, None),
    "html": (Annotated[str | None, output("--html", "Write a self-contained HTML page.")], None),
    "markdown": (Markdown, None),
    "quiet": REPORT_OPTIONS["quiet"],
    "verbose": (Verbose, False),
    **REPORT_OPTIONS,
}
"""Options on the report's destinations and on messages."""


def also(*groups: Mapping[str, tuple[Any, Any]]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of these groups too, except those that it already has.

    They reach it as keywords; `context.params` contains all of them.
    """

    def extend(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        present = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
        more = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
            for name, (kind, default) in {name: pair for group in groups for name, pair in group.items()}.items()
            if name not in signature.parameters
        ]

        @functools.wraps(command)
        def run(*args: object, **keywords: object) -> None:
            command(*args, **keywords)

        run.__signature__ = signature.replace(parameters=[*present, *more])  # type: ignore[attr-defined]
        annotations = {parameter.name: parameter.annotation for parameter in (*present, *more)}
        run.__annotations__ = annotations | {"return": None}
        return run

    return extend


def build(kind: type[R], values: Mapping[str, Any], **more: Any) -> R:
    """Build a request from a command's parameters and `more` options; options at their defaults are not set.

    Raise UsageError for an invalid value, TextError for a text from stdin without a stdin.
    """
    options = dict(more)
    for name, field in kind.model_fields.items():
        value = values.get(parameter_of(name, field))
        if details(field)["typed"] == list[Path] | None:
            value = _file_names(name, value or ())
        if name not in options and value not in (None, [], field.default):
            options[name] = value
    return kind(**options)


def _file_names(name: str, paths: Sequence[Path]) -> list[str]:
    """Return the names of files as they were typed, `-` for stdin."""
    names = [str(path) for path in paths]
    if "." in names:
        raise UsageError(f"--{name} does not name a file: the path is empty or a folder.", "Give the path of a file.")
    if "-" in names and sys.stdin is None:
        raise TextError(f"stdin is closed, so --{name} - cannot read from it.", "Pipe a text, or name a file.")
    return names


def selected_heads(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the layer and the head of --head as layers and heads; empty without --head."""
    if values["head"] is None and values["show"] == SELECTION:
        raise UsageError("--show selection requires a single head.", "Name it, e.g. --head 3.7.")
    return requests.one_head(values["head"], values["layers"], values["heads"])
