"""The commands; each parses its options, calls a function, and delivers the result."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from inspect import signature
from pathlib import Path
from typing import Annotated

import typer

import attnlens
from attnlens.cli.commands.check import check
from attnlens.cli.commands.models import compare, doctor, heal, inspect, ranks, swap_kernel
from attnlens.cli.commands.papers import converge, reproduce
from attnlens.cli.commands.reference import explain, list_, report
from attnlens.cli.exit_codes import UNUSABLE
from attnlens.cli.parameters import defaults, kinds
from attnlens.cli.short_help import GROUPS, VARIABLES, overview, short_help
from attnlens.cli.show import guard
from attnlens.errors import UsageError

app = typer.Typer(
    name="attnlens",
    help="Analyse the attention of pretrained transformers as kernel machines.",
    epilog="Exit codes: 0 success · 1 a check failed · 2 invalid arguments or input, or failed verification of "
    "attention, a backend or a mask · 3 incomplete (with --strict) · 70 internal error · 130 interrupted (finished "
    "work is kept) · 141 output pipe closed.",
    invoke_without_command=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)
WITHOUT_DEFAULTS = ("list", "explain")  # Commands that read no options from files
COMMANDS: dict[str, Callable[..., None]] = {
    command.__name__.strip("_").replace("_", "-"): command
    for command in (
        *(inspect, compare, check, doctor),
        *(swap_kernel, ranks, heal),
        *(converge, reproduce),
        *(report, list_, explain),
    )
}
"""Name of a command → its function."""
for group, names in GROUPS.items():
    for name in names:
        epilog = None if name in WITHOUT_DEFAULTS else VARIABLES
        app.command(name=name, rich_help_panel=group, epilog=epilog)(COMMANDS[name])


def help_for(words: Sequence[str]) -> str | None:
    """If `words` contain `-h`, return the short help of the command that they name, or the overview if they don't."""
    if "-h" not in words:
        return None
    if words[0] not in COMMANDS:
        return overview()
    command = COMMANDS[words[0]]
    return short_help(words[0], signature(command).parameters)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"attnlens {attnlens.__version__}")
        raise typer.Exit


@app.callback()
@guard
def root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Analyse the attention of pretrained transformers as kernel machines."""
    if context.invoked_subcommand is None:
        typer.echo(help_for(["-h"]))
        raise typer.Exit(UNUSABLE)
    if context.invoked_subcommand in WITHOUT_DEFAULTS or "--help" in sys.argv:
        return  # an error in a file must not prevent help
    try:
        Path.cwd()  # if the current folder was removed, no path can be resolved, and torch's MKL ends the process
    except OSError as error:
        raise UsageError(f"The current folder can't be read: {error.strerror}.", "Change to another folder.") from None
    options = defaults(Path(), kinds(command.callback for command in app.registered_commands if command.callback))
    context.default_map = dict.fromkeys(getattr(context.command, "commands", {}), options)
