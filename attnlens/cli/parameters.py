"""Build the options of the commands from requests, read defaults from files, and build requests from options."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, TypeVar, Unpack, get_args, get_origin

import typer
from pydantic.fields import FieldInfo

from attnlens import requests
from attnlens.arguments import checked_name
from attnlens.cli.show import guard
from attnlens.errors import TextError, UsageError
from attnlens.files import read_toml
from attnlens.requests import Request, details
from attnlens.requests.fields import CallOnly, Details
from attnlens.requests.run_options import OUTPUT, ModelRequest

R = TypeVar("R", bound=Request)
FILES = {"attnlens.toml": (), "pyproject.toml": ("tool", "attnlens")}  # Files that set options → table to read
RULES = "check"  # Table in these files that contains rules of `check`, not options
NEGATED = {"no_pack": "pack"}  # Negative flag of a switch, which a file can set → name of the switch
REMEDY = "Correct the file, or run in another folder."
WANTED = {  # Type → description and example of its values in a file
    **{bool: ("true or false", "true"), int: ("a whole number", "16")},
    **{float: ("a number", "0.1"), str: ("a string in quotes", '"…"')},
}


def kinds(commands: Iterable[Callable[..., object]]) -> dict[str, object]:
    """Return the annotated types of all options of these commands, keyed by parameter name."""
    options = {name: each for command in commands for name, each in signature(command).parameters.items()}
    return {name: each.annotation for name, each in options.items() if name != "context"}


def defaults(folder: Path, known: Mapping[str, object]) -> dict[str, object]:
    """Read options from `attnlens.toml`, or [tool.attnlens] of `pyproject.toml`.

    Return {} if there are none. Raise UsageError for an invalid file, name or value, and for options that a file must
    not set: those that are dangerous, and those that name files to read or write.
    """
    options: dict[str, object] = {}
    for name, path in FILES.items():
        if not options and (folder / name).is_file():
            table = read_toml(folder / name, [path], REMEDY)
            options = dict(_parse_entry(name, key, value, known) for key, value in table.items() if key != RULES)
    return options


def _parse_entry(file: str, key: str, value: object, known: Mapping[str, object]) -> tuple[str, object]:
    """Check one entry of a possibly untrusted file, and return the parameter that it sets and the value."""
    name = key.replace("-", "_")
    checked_name(f"option in {file}", name, sorted({*known, *NEGATED}))
    kind, declared = get_args(known[NEGATED.get(name, name)])[:2]
    why: CallOnly = getattr(declared, "call_only", "read")  # an argument names an input, and has no variable
    if why == "dangerous":
        remedy = f"Pass {option_name(name)} on the command line if this is intended."
        raise UsageError(f"{file} must not enable {key}.", remedy)
    if why:
        variable = f" or in ATTNLENS_{name.upper()}" if hasattr(declared, "call_only") else ""
        problem = f"{file} must not set {key}: an untrusted file must not choose which files are {why}."
        raise UsageError(problem, f"Remove {key} from {file}, and set it on the command line{variable}.")
    kinds = {kind, *get_args(kind)}  # `int | None`, `list[str] | None`
    several = any(get_origin(each) is list for each in kinds)
    plain = next((each for each in (bool, int, float) if each in kinds), str)
    items = value if several and isinstance(value, list) else [value]
    allowed = (int, float) if plain is float else plain
    if not all(isinstance(item, allowed) and (plain is bool) == isinstance(item, bool) for item in items):
        wanted, example = WANTED[plain]
        wanted += ", or a list of such values" * several
        raise UsageError(f"{file}: {key} must be {wanted}.", f"Correct that line, e.g. {key} = {example}.")
    return (NEGATED[name], not value) if name in NEGATED else (name, items if several else value)


Parameters = dict[str, Parameter]  # Options of a command by parameter name, annotated for typer


def _parameter(name: str, kind: object, declared: object, default: object) -> Parameters:
    annotation = Annotated[kind, declared]  # type: ignore[valid-type]  # the type is a value here
    return {name: Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)}


def _add_default(help: str, shown: object) -> str:  # noqa: A002
    """Append `[default: …]` to a help text if `shown` is a string."""
    return f"{help} [default: {shown}]" if isinstance(shown, str) else help


def list_kernels(incomplete: str) -> list[str]:
    """Return the kernels' names; if `incomplete` contains a plus sign, complete it with each tie, filter and hybrid."""
    from attnlens.kernels import FILTERS, HYBRIDS, TIES, kernels  # late, because only completion needs them

    kernel, plus, _ = incomplete.rpartition("+")
    return [f"{kernel}+{name}" for name in (*TIES, *FILTERS, *HYBRIDS)] if plus else [*kernels()]


def list_analyzers() -> list[str]:
    """Return the names of all analyzers."""
    from attnlens.analyzers import registry  # late, because only completion needs them

    return sorted({analyzer.name for analyzer in registry.list_analyzers()})


COMPLETIONS: dict[str, Callable[..., list[str]]] = {"kernel": list_kernels, "analyzer": list_analyzers}
"""Parameter name of an option → function that lists the values that a shell offers for it."""


def argument(
    name: str,
    help: str,  # noqa: A002  # the name that typer gives it
    kind: object = str | None,
    metavar: str | None = None,
    shown: bool | str = True,
    default: object = None,
    names: Callable[[], list[str]] | None = None,
) -> Parameters:
    """Create a positional argument, required if its type is `str` or `list[str]`.

    Shell completion offers the values that `names` returns.
    """
    declared = typer.Argument(
        help=_add_default(help, shown), metavar=metavar, show_default=shown is True, autocompletion=names
    )
    return _parameter(name, kind, declared, Parameter.empty if kind in (str, list[str]) else default)


def option(
    flags: str,
    kind: object,
    help: str,  # noqa: A002
    default: object = None,
    **about: Unpack[Details],
) -> Parameters:
    """Create an option from its flags (`-q --quiet`) and details; the variable ATTNLENS_<OPTION> also sets it."""
    name = parameter_of(flags)
    declared = typer.Option(
        *flags.split(),
        envvar=f"ATTNLENS_{name.upper()}",
        show_envvar=False,  # the end of --help names the variables once
        help=_add_default(help, about.get("shown")),
        rich_help_panel=about.get("panel", "Options"),
        metavar=about.get("metavar"),
        show_default="shown" not in about,
        min=about.get("least"),
        max=about.get("most"),
        autocompletion=COMPLETIONS.get(name),
    )
    declared.call_only = about.get("call_only", "")
    return _parameter(name, kind, declared, False if kind is bool and default is None else default)


def output(flag: str, help: str, metavar: str = "FILE") -> Parameters:  # noqa: A002
    """Create an option that names a file to write."""
    return option(flag, str | None, help, panel=OUTPUT, metavar=metavar, call_only="written")


def parameters(kind: type[Request], *, without: Collection[str] = ()) -> Parameters:
    """Return the command-line options of a type of request; options common to most commands come last."""
    fields = {
        name: field
        for name, field in kind.model_fields.items()
        if name not in without and not details(field).get("python_only")
    }
    shared = [base.model_fields for base in (requests.Loading, requests.Feeding, ModelRequest)]
    result: Parameters = {}
    for name in sorted(fields, key=lambda name: sum(name in base for base in shared)):
        field, about = fields[name], details(fields[name])
        default = field.default if isinstance(field.default, str | int | float) else None
        parts = requests.alternatives(field.annotation)
        plain = next((each for each in (bool, int, float) if each in parts), str)
        typed: object = plain if default is not None else plain | None
        typed = about.get("typed", list[str] | None if tuple[str, ...] in parts else typed)
        result |= option(_flag(name, field), typed, field.description or "", default, **about)
    return result


def _flag(name: str, field: FieldInfo) -> str:
    return details(field).get("flag", "--" + name.replace("_", "-"))


def parameter_of(flag: str) -> str:
    """Return the parameter name of a flag: `analyzer` for --analyzer, which sets the field `analyzers`."""
    return flag.split()[-1].split("/")[0].removeprefix("--").replace("-", "_")


def option_name(option: str) -> str:
    """Return an option as typed on the command line: `--windows-csv` for `windows_csv`."""
    return f"--{option.replace('_', '-')}"


MODEL = argument(
    "model", "Model: hub id (`org/name@revision`), folder, `.gguf` or `.safetensors` file, or `demo`.", shown="demo"
)
WINDOWS_CSV = output(
    "--windows-csv",
    "Write the values of each window as CSV: one row per window, kernel and stage (swapped, fitted, healed).",
)
TABLE = option("--table", bool, "Print all tables in addition to the findings.", panel=OUTPUT)
STRICT = option(
    "--strict",
    bool,
    "Exit with code 3 if anything requested was left out, or if the model does not use all stored tensors.",
)
MARKDOWN = output("--markdown", "Write the summary as Markdown.")
DEBUG = option("--debug", bool, "Show the traceback of an error.", panel=OUTPUT)
JSON = output("--json", "Write the report as JSON; `-` writes to stdout.")
QUIET = option("-q --quiet", bool, "Do not print results or progress.", panel=OUTPUT)
REPORT_OPTIONS = JSON | QUIET | option("--no-progress", bool, "Do not print progress.", panel=OUTPUT) | DEBUG
"""Options of every command that makes a report."""
FIGURE = (
    "Draw pictures as `.png`, `.svg` or `.pdf` (`--bare`: for a paper). DIR: write all pictures to this folder. FILE: "
    "draw the overview, or the picture that the file is named after (e.g. `symmetry.pdf`). Captions: FILE.txt."
)
BARE = "Draw the pictures of --figure for a paper: 8-point text, 3.4 or 7 inches wide, without a title or notes."
VERBOSE = "Also show settings, versions, timings, memory use, notes and, if there are any, further tables."
OUTPUT_OPTIONS = TABLE | JSON | output("--csv", "Write the results as CSV.") | output("--figure", FIGURE, "FILE|DIR")
OUTPUT_OPTIONS |= option("--bare", bool, BARE, panel=OUTPUT)
OUTPUT_OPTIONS |= output("--html", "Write a self-contained HTML page.") | MARKDOWN | QUIET
OUTPUT_OPTIONS |= option("-v --verbose", bool, VERBOSE, panel=OUTPUT) | REPORT_OPTIONS
_printed = typer.Option("--markdown", help="Print Markdown.")
_printed.call_only = "written"  # like the option of that name that writes a file
PRINTED_MARKDOWN = _parameter("markdown", bool, _printed, default=False)
"""Switch of `list` and `explain`; no environment variable sets it, because ATTNLENS_MARKDOWN names a file."""


def with_options(*groups: Parameters) -> Callable[[Callable[[typer.Context], None]], Callable[..., None]]:
    """Wrap a command with `guard` and add the options of `groups`; the command reads them from `context.params`."""
    context = Parameter("context", Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
    options = {name: each for group in groups for name, each in group.items()}

    def extend(command: Callable[[typer.Context], None]) -> Callable[..., None]:
        @functools.wraps(command)
        @guard
        def run(context: typer.Context, **_options: object) -> None:
            command(context)

        run.__signature__ = Signature([context, *options.values()])  # type: ignore[attr-defined]
        run.__annotations__ = {"context": typer.Context, "return": None}
        return run

    return extend


def build(kind: type[R], values: Mapping[str, object], **more: object) -> R:
    """Build a request from a command's parameters and `more` options. Raise UsageError or TextError if invalid."""
    options = dict(more)
    for name, field in kind.model_fields.items():
        value = values.get(parameter_of(_flag(name, field)))
        if isinstance(value, Sequence) and details(field).get("typed") == list[Path] | None:
            value = [str(path) for path in value]
            if "." in value:
                problem = f"--{name} does not name a file: the path is empty or a folder."
                raise UsageError(problem, "Give the path of a file.")
            if "-" in value and sys.stdin is None:
                raise TextError(f"stdin is closed, so --{name} - cannot read from it.", "Pipe a text, or give a file.")
        if name not in options and value not in (None, [], field.default):
            options[name] = value
    return kind(**options)


def command_line_options(context: typer.Context) -> list[str]:
    """Return the names of the parameters that were set on the command line, not by an environment variable or file."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return [name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]
