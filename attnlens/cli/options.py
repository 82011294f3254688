"""Which options do the commands share? One spelling, one environment variable and one line of help each."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from attnlens.errors import TextError, UsageError
from attnlens.registry import checked_name

SOURCES = ("weights", "tokens", "both")
LARGEST = 9999
"""Largest number of a layer or head that can be asked for; no model comes near it."""
INPUT, OUTPUT, DANGEROUS = "Input", "Output", "Dangerous options"


def option(*names: str, panel: str = "Options", **more: Any) -> Any:
    """A typer option that also reads ATTNLENS_<OPTION>."""
    long = next(name for name in names if name.startswith("--")).split("/")[0]
    envvar = "ATTNLENS_" + long.removeprefix("--").replace("-", "_").upper()
    return typer.Option(*names, envvar=envvar, rich_help_panel=panel, **more)


Model = Annotated[
    str | None,
    typer.Argument(
        help="Hub id (`org/name@revision`), folder, `.gguf` or `.safetensors` file, or `demo`.", show_default="demo"
    ),
]
Listed = Annotated[
    str | None,
    typer.Argument(help="`kernels`, `analyzers`, `measures` or `schema`.", show_default="all but the schema"),
]
Source = Annotated[str, option("--source", help="What to read: `weights`, `tokens` or `both`.", metavar="SOURCE")]
Analyzers = Annotated[
    list[str] | None,
    option("--analyzer", help="Only this analyzer; repeatable. `attnlens list` names them.", metavar="NAME"),
]
Layers = Annotated[str | None, option("--layers", help="Only these layers, as in `0-3,7`.", metavar="NUMBERS")]
Heads = Annotated[str | None, option("--heads", help="Only these heads, as in `0,5`.", metavar="NUMBERS")]
Text = Annotated[
    list[Path] | None,  # as paths, so that typer cuts ATTNLENS_TEXT as PATH is cut, and not at blanks
    option(
        "--text",
        panel=INPUT,
        help="Text file, or `-` for stdin; repeatable (ATTNLENS_TEXT joins several with "
        f"`{os.pathsep}`). Default: a built-in sample.",
        metavar="FILE",
    ),
]
Tokens = Annotated[
    int | None,
    option("--tokens", panel=INPUT, min=2, help="Window length in tokens.", show_default="128, or the model's limit"),
]
Sequences = Annotated[int, option("--sequences", panel=INPUT, min=1, help="How many windows or lines to feed.")]
BatchSize = Annotated[
    int, option("--batch-size", panel=INPUT, min=1, help="How many sequences go through the model at once.")
]
Pack = Annotated[
    bool, option("--pack/--no-pack", panel=INPUT, help="Cut running text into windows, or feed it line by line.")
]
Device = Annotated[str, option("--device", help="`auto`, `cpu`, `cuda`, `cuda:1`, `mps`.", metavar="DEVICE")]
Dtype = Annotated[
    str,
    option(
        "--dtype",
        help="Type of the model's weights: `auto`, `float32`, `bfloat16`, …; measures are float64.",
        metavar="TYPE",
    ),
]
Seed = Annotated[int, option("--seed", min=0, max=2**63 - 1, help="Seed of everything random.")]
Json = Annotated[
    str | None, option("--json", panel=OUTPUT, help="Write the report as JSON (`-`: to stdout).", metavar="FILE")
]
Csv = Annotated[str | None, option("--csv", panel=OUTPUT, help="Write one row a head as CSV.", metavar="FILE")]
Png = Annotated[
    str | None,
    option(
        "--png",
        panel=OUTPUT,
        help="Write the overview (a `.png`, `.svg` or `.pdf` file) or every picture (a folder).",
        metavar="FILE|DIR",
    ),
]
Html = Annotated[str | None, option("--html", panel=OUTPUT, help="Write a self-contained page.", metavar="FILE")]
Markdown = Annotated[
    str | None, option("--markdown", panel=OUTPUT, help="Write the summary as markdown.", metavar="FILE")
]
AllHeads = Annotated[bool, option("--all-heads", panel=OUTPUT, help="Show every head, not a summary by layer.")]
Strict = Annotated[bool, option("--strict", help="Exit with 3 where a part could not be analysed.")]
Offline = Annotated[bool, option("--offline", panel=INPUT, help="Use local files only.")]
Revision = Annotated[
    str | None, option("--revision", panel=INPUT, help="Commit, tag or branch of a hub model.", metavar="REVISION")
]
Quiet = Annotated[bool, option("-q", "--quiet", panel=OUTPUT, help="Show no table and no progress.")]
Verbose = Annotated[bool, option("-v", "--verbose", panel=OUTPUT, help="Show conventions and timings too.")]
NoProgress = Annotated[bool, option("--no-progress", panel=OUTPUT, help="Show no progress.")]
Debug = Annotated[bool, option("--debug", panel=OUTPUT, help="Show a traceback with an error.")]
TrustRemoteCode = Annotated[
    bool, option("--trust-remote-code", panel=DANGEROUS, help="Run Python code that comes with the model.")
]
AllowPickle = Annotated[
    bool, option("--allow-pickle", panel=DANGEROUS, help="Load `.bin` weights (pickles, tensors only).")
]


def numbers(what: str, words: str | None) -> list[int] | None:
    """`0-3,7` as [0, 1, 2, 3, 7]; None stays None.

    Raises UsageError where the words are no such list, a number is beyond all models, or a range runs backwards.
    """
    if words is None:
        return None
    found: set[int] = set()
    for word in words.split(","):
        first, dash, last = word.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise UsageError(f"--{what} {words!r} is no list of numbers.", "Write it like 0-3,7.")
        if max(len(first), len(last)) > len(str(LARGEST)):
            raise UsageError(f"--{what} {words!r} goes beyond {LARGEST}.", "Name numbers that the model has.")
        if dash and int(last) < int(first):
            raise UsageError(
                f"--{what} {words!r} has a range that runs backwards: {word.strip()}.", f"Write {last}-{first}."
            )
        found.update(range(int(first), int(last if dash else first) + 1))
    return sorted(found)


def asked(given: Mapping[str, Any]) -> dict[str, Any]:
    """Those among a command's parameters that say what is looked at, checked.

    Raises UsageError for an unknown source, and for layers and heads that are no numbers; TextError for `--text -`
    without a stdin.
    """
    plain = ("tokens", "sequences", "batch_size", "pack", "seed")
    settings = {name: given[name] for name in plain if name in given} | {
        "layers": numbers("layers", given["layers"]),
        "heads": numbers("heads", given["heads"]),
        "text": texts("text", given["text"] or ()),
    }
    if "source" in given:
        settings["source"] = checked_name("source", given["source"], SOURCES)
        settings["analyzers"] = given["analyzer"] or ()
    return settings


def texts(what: str, paths: Sequence[Path]) -> list[str]:
    """The text files of an option. Raises UsageError for an empty path, TextError for `-` without a stdin."""
    names = [str(path) for path in paths]
    if "." in names:
        raise UsageError(f"--{what} names no file.", "Give the path of a text file, or - for stdin.")
    if "-" in names and sys.stdin is None:
        raise TextError(
            f"stdin is closed, so that --{what} - has nothing to read.", "Pipe a text into it, or name a file."
        )
    return names


def loading(given: Mapping[str, Any]) -> dict[str, Any]:
    """Those among a command's parameters that say how a model is loaded."""
    names = ("device", "dtype", "offline", "revision", "trust_remote_code", "allow_pickle")
    return {name: given[name] for name in names if name in given}
