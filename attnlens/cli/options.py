"""Which options do the commands share? One spelling, one environment variable and one line of help each."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from attnlens.errors import UsageError
from attnlens.registry import checked_name

NEVER_FROM_FILES = ("trust_remote_code", "allow_pickle")
"""A file may lie beside a stranger's model; what is dangerous is asked for on the command line alone."""
SOURCES = ("weights", "tokens", "both")
INPUT, OUTPUT, DANGEROUS = "Input", "Output", "Dangerous options"


def _option(*names: str, panel: str = "Options", **more: Any) -> Any:
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
    str | None, typer.Argument(help="`analyzers`, `measures` or `schema`.", show_default="analyzers and measures")
]
Source = Annotated[str, _option("--source", help="What to read: `weights`, `tokens` or `both`.", metavar="SOURCE")]
Analyzers = Annotated[
    list[str] | None,
    _option("--analyzer", help="Only this analyzer; repeatable. `attnlens list` names them.", metavar="NAME"),
]
Layers = Annotated[str | None, _option("--layers", help="Only these layers, as in `0-3,7`.", metavar="NUMBERS")]
Heads = Annotated[str | None, _option("--heads", help="Only these heads, as in `0,5`.", metavar="NUMBERS")]
Text = Annotated[
    list[str] | None,
    _option(
        "--text",
        panel=INPUT,
        help="Text file, or `-` for stdin; repeatable. Default: a built-in sample.",
        metavar="FILE",
    ),
]
Tokens = Annotated[
    int | None,
    _option("--tokens", panel=INPUT, min=2, help="Window length in tokens.", show_default="128, or the model's limit"),
]
Sequences = Annotated[int, _option("--sequences", panel=INPUT, min=1, help="How many windows or lines to feed.")]
BatchSize = Annotated[
    int, _option("--batch-size", panel=INPUT, min=1, help="How many sequences go through the model at once.")
]
Pack = Annotated[
    bool, _option("--pack/--no-pack", panel=INPUT, help="Cut running text into windows, or feed it line by line.")
]
Device = Annotated[str, _option("--device", help="`auto`, `cpu`, `cuda`, `cuda:1`, `mps`.", metavar="DEVICE")]
Dtype = Annotated[
    str,
    _option(
        "--dtype",
        help="Type of the model's weights: `auto`, `float32`, `bfloat16`, …; measures are float64.",
        metavar="TYPE",
    ),
]
Seed = Annotated[int, _option("--seed", help="Seed of everything random.")]
Json = Annotated[
    str | None, _option("--json", panel=OUTPUT, help="Write the report as JSON (`-`: to stdout).", metavar="FILE")
]
Csv = Annotated[Path | None, _option("--csv", panel=OUTPUT, help="Write one row a head as CSV.", metavar="FILE")]
Png = Annotated[
    Path | None,
    _option(
        "--png",
        panel=OUTPUT,
        help="Write the overview (a `.png`, `.svg` or `.pdf` file) or every picture (a folder).",
        metavar="FILE|DIR",
    ),
]
Html = Annotated[Path | None, _option("--html", panel=OUTPUT, help="Write a self-contained page.", metavar="FILE")]
Markdown = Annotated[
    Path | None, _option("--markdown", panel=OUTPUT, help="Write the summary as markdown.", metavar="FILE")
]
AllHeads = Annotated[bool, _option("--all-heads", panel=OUTPUT, help="Show every head, not a summary by layer.")]
Strict = Annotated[bool, _option("--strict", help="Exit with 3 where a part could not be analysed.")]
Offline = Annotated[bool, _option("--offline", panel=INPUT, help="Use local files only.")]
Revision = Annotated[
    str | None, _option("--revision", panel=INPUT, help="Commit, tag or branch of a hub model.", metavar="REVISION")
]
Quiet = Annotated[bool, _option("-q", "--quiet", panel=OUTPUT, help="Show no table and no progress.")]
Verbose = Annotated[bool, _option("-v", "--verbose", panel=OUTPUT, help="Show conventions and timings too.")]
NoProgress = Annotated[bool, _option("--no-progress", panel=OUTPUT, help="Show no progress.")]
Debug = Annotated[bool, _option("--debug", panel=OUTPUT, help="Show a traceback with an error.")]
TrustRemoteCode = Annotated[
    bool, _option("--trust-remote-code", panel=DANGEROUS, help="Run Python code that comes with the model.")
]
AllowPickle = Annotated[
    bool, _option("--allow-pickle", panel=DANGEROUS, help="Load `.bin` weights (pickles, tensors only).")
]


def numbers(what: str, words: str | None) -> list[int] | None:
    """`0-3,7` as [0, 1, 2, 3, 7]; None stays None.

    Raises UsageError where the words are no such list, or a range runs backwards.
    """
    if words is None:
        return None
    found: list[int] = []
    for word in words.split(","):
        first, dash, last = word.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise UsageError(f"--{what} {words!r} is no list of numbers.", "Write it like 0-3,7.")
        if dash and int(last) < int(first):
            raise UsageError(
                f"--{what} {words!r} has a range that runs backwards: {word.strip()}.", f"Write {last}-{first}."
            )
        found += range(int(first), int(last if dash else first) + 1)
    return sorted(set(found))


def asked(given: Mapping[str, Any]) -> dict[str, Any]:
    """Those among a command's parameters that say what is looked at, checked.

    Raises UsageError for an unknown source, and for layers and heads that are no numbers.
    """
    return {name: given[name] for name in ("tokens", "sequences", "batch_size", "pack", "seed")} | {
        "source": checked_name("source", given["source"], SOURCES),
        "analyzers": given["analyzer"] or (),
        "layers": numbers("layers", given["layers"]),
        "heads": numbers("heads", given["heads"]),
        "text": given["text"] or (),
    }


def loading(given: Mapping[str, Any]) -> dict[str, Any]:
    """Those among a command's parameters that say how a model is loaded."""
    names = ("device", "dtype", "offline", "revision", "trust_remote_code", "allow_pickle")
    return {name: given[name] for name in names if name in given}


def defaults(folder: Path, known: set[str]) -> dict[str, Any]:
    """Options from `attnlens.toml`, or from [tool.attnlens] of `pyproject.toml`, by parameter name.

    Raises UsageError where the file is no TOML or names an option that does not exist.
    """
    for name, path in (("attnlens.toml", ()), ("pyproject.toml", ("tool", "attnlens"))):
        file = folder / name
        if not file.is_file():
            continue
        try:
            table = tomllib.loads(file.read_text(encoding="utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise UsageError(
                f"{file} is not valid TOML: {error}.", "Mend the file, or run in another folder."
            ) from None
        for key in path:
            table = table.get(key, {})
        for key in table:
            if key.replace("-", "_") in NEVER_FROM_FILES:
                raise UsageError(f"{name} may not switch on {key}.", "Give it on the command line, if you mean it.")
        if table:
            return {
                checked_name(f"option in {name}", key.replace("-", "_"), sorted(known)): value
                for key, value in table.items()
            }
    return {}
