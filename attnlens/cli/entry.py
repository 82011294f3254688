"""Runs one command line, and turns whatever it could not turn into words itself into words and an exit code."""

from __future__ import annotations

import gc
import io
import os
import re
import signal
import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import typer

from attnlens.cli import leave
from attnlens.cli.commands import app
from attnlens.cli.outputs import READER_LEFT, product
from attnlens.cli.show import UNUSABLE, complain, interrupt, told

TypedWrong: Any = typer.BadParameter.__base__
"""What click raises for words that it can't parse; typer carries its own click, or uses the package, by its version."""
WIDTHS = ("COLUMNS", "LINES", "TERMINAL_WIDTH")
WIDEST = 1000
"""Columns or lines beyond which no page is; a table is filled up to them."""
REMOVED = {
    "--models": "Run the command once per model, in a loop of the shell: units that are finished are kept.",
    "--reports": "Run the command once per model, in a loop of the shell, with a --json each.",
    "--dry-run": "The progress bar says how long a run takes; --sequences 2 makes it short.",
    "--sarif": "Use --junit or --annotations.",
    "--allow-other-model": "Leave it out: a baseline is compared by content.",
    "merge": "Run the command of the shards again without --shard: it uses their units and writes the report.",
}
"""Options and commands of earlier versions: what to do instead."""
UNSET_VARIABLE = re.compile(r" \(env var: '(\w+)'\)")
"""What click adds to an option's name, whether or not the variable is set."""


def run() -> None:
    """Run the program's own words, and end it."""
    code = exit_code()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # all is done and told
    if code == 0:
        gc.freeze()  # the process ends with all that it holds; looking through it takes a fifth of `list`
        sys.exit(0)
    # CPython holds an interruption that struck inside exec(), as dataclasses use it while torch is imported, for
    # unhandled even when it was caught; and a library that memory did not suffice for may crash when it is wound up.
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(code)


def exit_code(words: Sequence[str] | None = None) -> int:
    """Run these words (none: the program's own); the exit code, after everything was said."""
    try:
        _prepare()
        if sys.stdout is None:
            complain("stdout is closed.", "Send it somewhere, as in: attnlens list > FILE")
            return UNUSABLE
        if sys.flags.optimize > 1:
            problem = "Python was started with -OO, under which transformers can't be imported."
            complain(problem, "Leave out -OO, and PYTHONOPTIMIZE=2.")
            return UNUSABLE
        with product():
            return app(words, prog_name="attnlens", standalone_mode=False) or 0
    except TypedWrong as error:
        # an option without its value is told without a context, and only within a command
        first = (sys.argv[1:] if words is None else words)[:1]
        command = error.ctx.command_path if error.ctx else f"attnlens {first[0]}"
        problem = UNSET_VARIABLE.sub(lambda found: found[0] * (found[1] in os.environ), error.format_message())
        removed = next((remedy for name, remedy in REMOVED.items() if re.search(rf"(?<![\w-]){name}\b", problem)), None)
        complain(problem, removed or f"Run: {command} --help")
        return UNUSABLE
    except typer.Exit as stop:
        return stop.exit_code
    except SystemExit:  # so does typer itself end where nobody reads its help
        return READER_LEFT
    except BaseException as error:
        return told(error)


def _prepare() -> None:
    """Make streams, page and libraries usable in whatever state the caller left them."""
    if signal.getsignal(signal.SIGINT) is leave:
        signal.signal(signal.SIGINT, interrupt)  # from here on what is finished is kept
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115, PTH123  # it lives as long as the program
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that knows ASCII alone still gets its numbers
    for name in WIDTHS:
        given = os.environ.pop(name, "")
        if given.isascii() and given.isdecimal() and given.strip("0"):  # typer's help would believe a width of 0
            os.environ[name] = given if len(given) <= 3 else str(WIDEST)
    os.environ["MPLBACKEND"] = "agg"  # a notebook exports its own to the programs that it starts
    warnings.simplefilter("ignore")  # other libraries' talk; PYTHONWARNINGS=error would make it end the program
