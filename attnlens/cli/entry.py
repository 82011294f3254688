"""Run one command line, and turn uncaught errors into messages and exit codes."""

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
from itertools import pairwise

import typer
from pydantic import ValidationError

from attnlens.arguments import format_argument
from attnlens.cli.commands import app, help_for
from attnlens.cli.exit_codes import READER_LEFT, STOPS, UNUSABLE, leave
from attnlens.cli.outputs import guard_stdout
from attnlens.cli.parameters import parameter_of
from attnlens.cli.show import complain, expect_json, interrupt, report_failure, write_json_error
from attnlens.errors import UsageError
from attnlens.requests import Request, details

ClickError: type[typer.BadParameter] = typer.BadParameter.__base__  # type: ignore[assignment]  # click's class
"""Exception that click raises for arguments it can't parse; some versions of typer vendor click, others import it."""
WIDTHS = ("COLUMNS", "LINES", "TERMINAL_WIDTH")
WIDEST = 1000  # Maximum width and height of a terminal; tables fill the width
REMOVED = {  # Remedies for options and commands of earlier versions, and for options that only Python offers
    **{f"--{name}": f"Use attnlens ranks --{name}." for name in ("budget", "plan", "ranks")},
    **{f"--heal{old}": f"Use attnlens heal --{new}." for old, new in (("", "train"), ("-on", "learn"))},
    "--heal-control": "Use attnlens heal --control.",
    **{f"--heal-{name}": f"Use {name}, a keyword of the function heal." for name in ("batch", "rank", "checkpointing")},
    **{"verify": "Use: attnlens reproduce claims", "study": "Use: attnlens reproduce TABLE"},
    **{"--tokens": "Use --length.", "--sequences": "Use --windows; --placement sets the position of windows."},
    **{"--all-heads": "Use --table.", "--png": "Use --figure.", "--pairs": "Use --text with a file that ends in .tsv."},
    **{"--device-map": "Use --device spread.", "--from-files": "Use --device files.", "--address": "Set RAY_ADDRESS."},
    "--revision": "Append the revision to the model's name: org/name@revision.",
    **dict.fromkeys(("--models", "--reports"), "Run the command once per model in a shell loop."),
    "--dry-run": "The progress bar shows the remaining time; --windows 2 shortens the run.",
    "--sarif": "Use --junit or --annotations.",
    "--allow-other-model": "Omit this option: a baseline is matched by settings and heads, not by the model's name.",
    "merge": "Run the shards' command again without --shard to combine the shards' units and write the report.",
}


def run() -> None:
    """Run this process's command line, and exit with the resulting code."""
    code = exit_code()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # all output is already written
    if signal.getsignal(signal.SIGTERM) is interrupt:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if code == 0:
        gc.freeze()  # the process ends anyway; a last collection would take a fifth of the time of `list`
        sys.exit(0)
    # Skip finalisation: a library that ran out of memory may crash in it, and CPython reports an interruption inside
    # exec() as unhandled even if it was caught (dataclasses call exec() while torch is imported).
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(code)


def exit_code(words: Sequence[str] | None = None) -> int:
    """Run the command line `words` (default: sys.argv[1:]) and return its exit code."""
    words = sys.argv[1:] if words is None else words
    expect_json("--json=-" in words or ("--json", "-") in pairwise(words))
    try:
        _prepare()
        with guard_stdout():
            if help_text := help_for(words):
                typer.echo(help_text)
                return 0
            return app(words, prog_name="attnlens", standalone_mode=False) or 0
    except ClickError as error:
        # the error has no context if an option lacks its value, which only happens within a command
        command = error.ctx.command_path if error.ctx else f"attnlens {words[0]}"
        problem = _describe_problem(error)
        remedy = _find_replacement(problem) or f"Run: {command} -h"
        complain(problem, remedy)
        write_json_error(UsageError.code, problem, remedy)
        return UNUSABLE
    except typer.Exit as stop:
        return stop.exit_code
    except SystemExit as stop:  # raised by typer: 0 after completion, 1 if the reader of the help left early
        return READER_LEFT if stop.code else 0
    except BaseException as error:
        return report_failure(error)


WANTED = {  # Type of pydantic's error → requirement that the value violates
    "greater_than_equal": "at least {ge}",
    "less_than_equal": "at most {le}",
    **dict.fromkeys(("int_parsing", "int_parsing_size", "int_from_float"), "a whole number"),
    "float_parsing": "a number",
}


def _describe_problem(error: typer.BadParameter) -> str:
    """Return the message for invalid arguments: an option and the requirement on its value, or click's message."""
    near = getattr(error, "possibilities", None)
    if near:  # the nearest first
        return f"{error.message.rstrip('.')}. Did you mean {near[0]}?"
    cause, variable = error.__cause__, _variable_of(error)
    if isinstance(cause, ValidationError) and error.param is not None:
        first = cause.errors(include_url=False)[0]
        wanted = WANTED.get(first["type"], "").format(**first.get("ctx", {}))
        if wanted:
            flag = max(error.param.opts, key=len)
            value = format_argument(first["input"])
            value = value.strip("'") if "ctx" in first else value  # a number out of bounds, as it was typed
            return f"{flag} must be {wanted}, not {value}{variable}."
    return f"{error.format_message()}{variable}"


def _variable_of(error: typer.BadParameter) -> str:
    """Return ` (set by ATTNLENS_…)` if an environment variable set the invalid option; else an empty string."""
    name = getattr(getattr(error, "param", None), "name", None)  # some of click's errors have no parameter
    if error.ctx is None or name is None:
        return ""
    source = error.ctx.get_parameter_source(name)
    return f" (set by ATTNLENS_{name.upper()})" if source is not None and source.name == "ENVIRONMENT" else ""


def _find_replacement(problem: str) -> str | None:
    """Return the remedy for an option or command that was renamed or removed or exists only in Python; else None."""
    if problem.startswith("--windows must be a whole number"):
        return "Give the number of windows; --placement sets the position of windows."
    unknown = re.match(r"No such (?:option|command):? '?([\w-]+)", problem)
    if unknown is None or unknown[1] in REMOVED:
        return None if unknown is None else REMOVED[unknown[1]]
    name = parameter_of(unknown[1])
    if not unknown[1].startswith("--") or name.removeprefix("no_") not in _keywords(Request):
        return None
    if name.startswith("no_"):
        return f"Use {name[3:]}=False in Python."
    return f"Use {name} in Python: it is a keyword of the function."


def _keywords(kind: type[Request]) -> set[str]:
    """Return the names of the Python-only options of this request type and its subclasses."""
    names = {name for name, field in kind.model_fields.items() if details(field).get("python_only")}
    return names.union(*map(_keywords, kind.__subclasses__()))


def _prepare() -> None:
    """Prepare streams, terminal size and libraries. Raise UsageError if stdout is closed or Python runs with -OO."""
    for stop in STOPS:
        if signal.getsignal(stop) is leave:
            signal.signal(stop, interrupt)  # from here on, finished work is kept
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115, PTH123  # it stays open until the program exits
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # an ASCII-only terminal still shows the numbers
    for name in WIDTHS:
        size = os.environ.pop(name, "")
        if size.isascii() and size.isdecimal() and size.strip("0"):  # typer's help would use a width of 0
            os.environ[name] = size if len(size) <= 3 else str(WIDEST)
    os.environ["MPLBACKEND"] = "agg"  # a notebook exports its own backend to child processes
    warnings.simplefilter("ignore")  # else PYTHONWARNINGS=error turns libraries' warnings into failures
    if sys.stdout is None:
        raise UsageError("stdout is closed.", "Redirect stdout to a file: attnlens list > FILE")
    if sys.flags.optimize > 1:
        problem = "transformers can't be imported if Python is started with -OO."
        raise UsageError(problem, "Start Python without -OO, and unset PYTHONOPTIMIZE.")
